-- with: base jobs waiting
-- How many jobs of its queue would be leased before the job ARGV[5]; -1 if it is not ready and due.

local j = load(ARGV[5])
if not j or j.s.state or run_of(j) or tonumber(j.s.due or j.put) > now then
    return -1
end

-- Those before the lists: in front, and held by rules.
local before_lists = {of_queue(j.queue, 'front')}
for _, group in ipairs(redis.call('SMEMBERS', of_queue(j.queue, 'holds'))) do
    before_lists[#before_lists + 1] = of_queue(j.queue, 'held:' .. group)
end

-- How many stand before this place, and the job's own place if it is here.
local function places_before(place)
    local n = 0
    for _, key in ipairs(before_lists) do
        n = n + redis.call('ZCOUNT', key, '-inf', '(' .. place)
    end
    return n
end

local own
for _, key in ipairs(before_lists) do
    own = own or redis.call('ZSCORE', key, j.id) or nil
end

-- Those of higher priority in lists.
local n = 0
for _, priority in ipairs(redis.call('ZRANGE', of_queue(j.queue, 'ranks'), 0, -1)) do
    if tonumber(priority) > j.priority then
        n = n + redis.call('LLEN', of_queue(j.queue, 'line:' .. priority))
              - redis.call('SCARD', of_queue(j.queue, 'void:' .. priority))
    end
end

-- Those that are due and have not joined a line yet: they will stand behind the lists.
local due_before, due_itself = 0, false
for _, member in ipairs(redis.call('ZRANGEBYSCORE', of_queue(j.queue, 'scheduled'), '-inf', now)) do
    local other = load(scheduled_id(member))
    if other then
        if other.id == j.id then
            due_itself = true
        elseif other.priority > j.priority then
            n = n + 1
        elseif other.priority == j.priority and not due_itself then
            due_before = due_before + 1
        end
    end
end

if own then
    return n + places_before(own)
end
local _, highest = places(j.priority)
n = n + places_before(highest)
local line, void = line_of(j)
if due_itself then
    return n + redis.call('LLEN', line) - redis.call('SCARD', void) + due_before
end
local index = redis.call('LPOS', line, j.s.entry or j.id)
if not index then
    return -1
end
if redis.call('EXISTS', void) == 1 then
    for _, entry in ipairs(redis.call('LRANGE', line, 0, index)) do
        n = n - redis.call('SISMEMBER', void, entry)
    end
end
return n + index
