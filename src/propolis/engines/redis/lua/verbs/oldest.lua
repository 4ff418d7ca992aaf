-- with: base jobs
-- When the first ready job of each queue ARGV[5...] was put, in microseconds; '' if there is none.
--
-- Of what stands first in each of its lines: so what went to the back of one is not asked for.

local LINES = 20  -- priorities that are looked at, the highest first

local function put_of(id)
    local record = redis.call('HGET', JOBS, id)
    return record and tonumber(record:match('^[^\n]*\n(%d+)\n'))
end

-- The first entry of a list that is not struck out, if it is among the first ones.
local function first_in(list, void)
    for _, entry in ipairs(redis.call('LRANGE', list, 0, 24)) do
        if redis.call('SISMEMBER', void, entry) == 0 then
            return entry:match('^[^\n]*')
        end
    end
end

local function oldest_in(queue)
    local first = redis.call('ZRANGE', of_queue(queue, 'front'), 0, 0)
    local due = redis.call('ZRANGEBYSCORE', of_queue(queue, 'scheduled'), '-inf', now, 'LIMIT', 0, 1)[1]
    first[#first + 1] = due and scheduled_id(due)
    for _, priority in ipairs(redis.call('ZRANGE', of_queue(queue, 'ranks'), 0, LINES - 1)) do
        for _, kind in ipairs({'tidied:', 'line:'}) do
            first[#first + 1] = first_in(of_queue(queue, kind .. priority), of_queue(queue, 'void:' .. priority))
        end
    end
    local oldest
    for _, id in ipairs(first) do
        local put = put_of(id)
        oldest = put and math.min(oldest or put, put) or oldest
    end
    return oldest and whole(oldest) or ''
end

local answer = {}
for at = 5, #ARGV do
    answer[#answer + 1] = oldest_in(ARGV[at])
end
return answer
