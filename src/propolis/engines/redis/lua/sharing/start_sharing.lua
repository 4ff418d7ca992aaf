-- with: base sharded jobs sharing
-- From now on the limit ARGV[5] is shared among shards, and this one has no part of it yet.  ARGV[6] names the sharing:
-- shares of an earlier one count no more.
if is_over(ARGV[5]) then
    forget_rule(ARGV[5])
end
local scope, name = ARGV[5]:match('^limit:(%a+):(.*)$')
redis.call('HSET', base .. 'rules', ARGV[5], 0)
redis.call('ZADD', base .. 'rule_names', 0, ARGV[5])
redis.call('HSET', SHARES, ARGV[5], ARGV[6])
if scope ~= 'queue' then
    begin_limit(scope .. ':' .. name)
end
return 1
