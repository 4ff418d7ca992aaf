-- with: base jobs waiting
-- How many jobs of its queue would be leased before the job ARGV[5], counted up to ARGV[6]; -1 if it is not ready and
-- due.

local j = load(ARGV[5])
if not j or j.s.state or j.s.parked or run_of(j) or tonumber(j.s.due or j.put) > now then
    return -1
end

local most = tonumber(ARGV[6])
local line, void = line_of(j)
local tidied = of_queue(j.queue, 'tidied:' .. j.priority)

-- Those before the lists: in front, and held by rules.  No look counts further than a bite of groups.
local before_lists = {of_queue(j.queue, 'front')}
local holds = of_queue(j.queue, 'holds')
local many = redis.call('SCARD', holds) > CHUNK  -- a choice by chance would take as long as all of the rest
for _, group in ipairs(many and redis.call('SSCAN', holds, 0, 'COUNT', CHUNK)[2] or redis.call('SMEMBERS', holds)) do
    before_lists[#before_lists + 1] = of_queue(j.queue, 'held:' .. group)
end

-- How many stand before this place.
local function places_before(place)
    local n = 0
    for _, key in ipairs(before_lists) do
        n = n + redis.call('ZCOUNT', key, '-inf', '(' .. place)
    end
    return n
end

-- How many stand in the lists of one priority.
local function in_lists(priority)
    return redis.call('LLEN', of_queue(j.queue, 'line:' .. priority))
        + redis.call('LLEN', of_queue(j.queue, 'tidied:' .. priority))
        - redis.call('SCARD', of_queue(j.queue, 'void:' .. priority))
end

local own = redis.call('ZSCORE', of_queue(j.queue, 'front'), j.id)
for _, group in ipairs(groups_of(j)) do
    own = own or redis.call('ZSCORE', of_queue(j.queue, 'held:' .. group), j.id)
end

-- Those of higher priority in lists.
local n = 0
for _, priority in ipairs(redis.call('ZRANGE', of_queue(j.queue, 'ranks'), 0, -1)) do
    if tonumber(priority) > j.priority then
        n = n + in_lists(priority)
    end
end

-- Those that are due and have not joined a line yet: they will stand behind the lists.
local due_before, due_itself = 0, false
local due = redis.call('ZRANGEBYSCORE', of_queue(j.queue, 'scheduled'), '-inf', now, 'LIMIT', 0, CHUNK)
for _, member in ipairs(due) do
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
    return math.min(most, n + places_before(own))
end
n = n + places_before(whole(last_place(j.priority)))
if due_itself then
    return math.min(most, n + in_lists(j.priority) + due_before)
end
-- What is tidied stands before the rest, and nothing there is struck out but what was so since.  A list does not tell
-- where an entry is: so it is looked for among as many as are counted.
local entry = j.s.entry or j.id
local before, behind = redis.call('LLEN', tidied), redis.call('LLEN', line)
local index, list = redis.call('LPOS', tidied, entry, 'MAXLEN', most), tidied
if not index and before < most then
    index, list = redis.call('LPOS', line, entry, 'MAXLEN', most - before), line
    n = n + before
end
if not index then
    return before + behind > most and most or -1
end
if redis.call('EXISTS', void) == 1 then
    for _, key in ipairs(list == line and {tidied, line} or {tidied}) do
        for _, other in ipairs(redis.call('LRANGE', key, 0, key == list and index or -1)) do
            n = n - redis.call('SISMEMBER', void, other)
        end
    end
end
return math.min(most, n + index)
