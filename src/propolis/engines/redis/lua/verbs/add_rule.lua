-- with: base jobs
-- Set a rule: ARGV[5] kind, ARGV[6] scope, ARGV[7] name, ARGV[8] n; for how many us it holds, or until when (both may be
-- ''), who set it and why, as JSON; and of a rate each how many us a token comes, and how many are saved up ('': none);
-- ARGV[13] is how many prefixes may have a limit.  Gives 0 if it replaces one.

local kind, scope, name, n, rate = ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[12]
local rule = kind .. ':' .. scope .. ':' .. name
if is_over(rule) then
    forget_rule(rule)
end
local limits_many = kind == 'limit' and is_for_many(scope, name)
if limits_many and scope == 'key' and redis.call('HEXISTS', base .. 'rules', rule) == 0 and not room_for_prefix(ARGV[13]) then
    return redis.error_reply('PROPOLISPREFIXES ' .. name)
end
local new = redis.call('HSET', kind == 'cap' and base .. 'caps' or base .. 'rules', kind == 'cap' and name or rule, n)
redis.call('ZADD', base .. 'rule_names', 0, rule)
keep_terms(rule, ARGV[9], ARGV[10], ARGV[11])
keep_rate(rule, rate, new == 1)

if limits_many then
    begin_limit_for_many(scope, name, rule)
elseif kind == 'limit' and scope ~= 'queue' then
    begin_limit(scope .. ':' .. name)
end
wake_for(scope, name)
publish_woken()
return new
