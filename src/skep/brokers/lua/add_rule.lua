-- with: base jobs
-- Keep a rule: ARGV[5] kind, ARGV[6] scope, ARGV[7] name, ARGV[8] n.  Gives 0 if exactly this one is there.

local kind, scope, name, n = ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local key = kind == 'cap' and base .. 'caps' or base .. 'rules'
local field = kind == 'cap' and name or kind .. ':' .. scope .. ':' .. name
if redis.call('HGET', key, field) == n then
    return 0
end
redis.call('HSET', key, field, n)

-- From now on what runs of it is counted; so far it was not.
local function running_now()
    local running = 0
    for _, queue in ipairs(redis.call('ZRANGE', base .. 'queues', 0, -1)) do
        for _, id in ipairs(redis.call('HKEYS', of_queue(queue, 'running'))) do
            local j = load(id)
            if j and j[scope] == name then
                running = running + 1
            end
        end
    end
    return running
end

if kind == 'limit' and scope ~= 'queue' then
    redis.call('HSET', base .. 'limits', scope .. ':' .. name, running_now())
end
wake_all()
tell_woken()
return 1
