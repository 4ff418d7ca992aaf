-- with: base jobs
-- Set a rule: ARGV[5] kind, ARGV[6] scope, ARGV[7] name, ARGV[8] n; for how many us it holds, or until when (both may be
-- ''), and who set it and why, as JSON.  Gives 0 if it replaces one.

local kind, scope, name, n = ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local rule = kind .. ':' .. scope .. ':' .. name
if is_over(rule) then
    forget_rule(rule)
end
local new = redis.call('HSET', kind == 'cap' and base .. 'caps' or base .. 'rules', kind == 'cap' and name or rule, n)
redis.call('ZADD', base .. 'rule_names', 0, rule)
keep_terms(rule, ARGV[9], ARGV[10], ARGV[11])

if kind == 'limit' and scope ~= 'queue' then
    begin_limit(scope .. ':' .. name)
end
wake_for(scope, name)
publish_woken()
return new
