-- with: base jobs
-- Keep a rule: ARGV[5] kind, ARGV[6] scope, ARGV[7] name, ARGV[8] n.  Gives 0 if exactly this one is there.

local kind, scope, name, n = ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local key = kind == 'cap' and base .. 'caps' or base .. 'rules'
local field = kind == 'cap' and name or kind .. ':' .. scope .. ':' .. name
if redis.call('HGET', key, field) == n then
    return 0
end
redis.call('HSET', key, field, n)
redis.call('ZADD', base .. 'rule_names', 0, kind .. ':' .. scope .. ':' .. name)

if kind == 'limit' and scope ~= 'queue' then
    begin_limit(scope .. ':' .. name)
end
wake_for(scope, name)
publish_woken()
return 1
