-- with: base jobs batches
-- Forget the queue ARGV[5]: waiting jobs are cancelled, ended ones deleted, running ones finish.
-- At most ARGV[6] jobs go in one call.  Gives how many went, and 1 if there are more of them.

local queue, most = ARGV[5], tonumber(ARGV[6])
local going = {}

local function take(id)
    local j = load(id)
    if j then
        going[#going + 1] = j
    end
end

local function itself(member)
    return member
end

local function take_from_set(name, id_of)
    local key = of_queue(queue, name)
    if #going < most then
        for _, member in ipairs(redis.call('ZRANGE', key, 0, most - #going - 1)) do
            redis.call('ZREM', key, member)
            take(id_of(member))
        end
    end
    return redis.call('EXISTS', key) == 0
end

local function take_from_line(priority)
    local line, void = of_queue(queue, 'line:' .. priority), of_queue(queue, 'void:' .. priority)
    while #going < most do
        local entries = redis.call('LPOP', line, math.min(most - #going, CHUNK))
        if not entries then
            redis.call('DEL', void)
            redis.call('ZREM', of_queue(queue, 'ranks'), priority)
            return
        end
        for _, entry in ipairs(entries) do
            if redis.call('SREM', void, entry) == 0 then
                take(entry:match('^[^\n]*'))
            end
        end
    end
end

for _, priority in ipairs(redis.call('ZRANGE', of_queue(queue, 'ranks'), 0, -1)) do
    take_from_line(priority)
end
for _, group in ipairs(redis.call('SMEMBERS', of_queue(queue, 'holds'))) do
    if take_from_set('held:' .. group, itself) then
        redis.call('SREM', of_queue(queue, 'holds'), group)
    end
end
take_from_set('front', itself)
for _, name in ipairs({'scheduled', 'done', 'dead', 'cancelled'}) do
    take_from_set(name, scheduled_id)
end

table.sort(going, function(one, other) return one.seq < other.seq end)
for _, j in ipairs(going) do
    if j.s.state then
        forget(j)
    else
        end_job(j, 'cancelled', nil, waits_as(j))
    end
end

local more = #going >= most
local tally = redis.call('HMGET', of_queue(queue, 'tally'), 'put', 'deleted')
if not more and tonumber(tally[1] or 0) == tonumber(tally[2] or 0) then  -- else some run, or have come meanwhile
    redis.call('DEL', of_queue(queue, 'tally'))
    redis.call('ZREM', base .. 'queues', queue)
    redis.call('ZREM', base .. 'timed', queue)
end
tell_woken()
return {#going, more and 1 or 0}
