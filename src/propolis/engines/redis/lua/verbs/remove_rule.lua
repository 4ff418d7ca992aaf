-- with: base jobs
-- Forget a rule: ARGV[5] kind, ARGV[6] scope, ARGV[7] name.  Gives 0 if there is none.
local kind, scope, name = ARGV[5], ARGV[6], ARGV[7]
local removed
if kind == 'cap' then
    removed = redis.call('HDEL', base .. 'caps', name)
else
    removed = redis.call('HDEL', base .. 'rules', kind .. ':' .. scope .. ':' .. name)
end
redis.call('ZREM', base .. 'rule_names', kind .. ':' .. scope .. ':' .. name)
if kind == 'limit' then
    end_limit(scope .. ':' .. name)
end
wake_for(scope, name)
publish_woken()
return removed
