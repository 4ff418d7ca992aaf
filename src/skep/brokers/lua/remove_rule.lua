-- with: base
-- Forget a rule: ARGV[5] kind, ARGV[6] scope, ARGV[7] name.  Gives 0 if there is none.
local kind, scope, name = ARGV[5], ARGV[6], ARGV[7]
local removed
if kind == 'cap' then
    removed = redis.call('HDEL', base .. 'caps', name)
else
    removed = redis.call('HDEL', base .. 'rules', kind .. ':' .. scope .. ':' .. name)
end
if kind == 'limit' then
    redis.call('HDEL', base .. 'limits', scope .. ':' .. name)
end
wake_all()
tell_woken()
return removed
