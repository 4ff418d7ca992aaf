-- with: base jobs
-- Find jobs: all that match, in the order in which they were put, where there are few jobs; or a bite of a walk.
--
-- A walk looks for jobs that have ended where they are kept: queue by queue, in each in the order of their ends.  So it
-- does for those that run, in no order.  All others it looks for in the hash of all jobs, whose order says nothing.
--
-- ARGV[5]   MessagePack of {queue, task, state, reason, batch, scheduled}, each only if it is asked for
-- ARGV[6]   only those put after this number
-- ARGV[7]   how many are wanted, at most
-- ARGV[8]   how many jobs are few, or to be looked at, about
-- ARGV[9]   the same in bytes
--
-- Gives the number and the id of each, those that were put first; nothing at all (false) where there are too many.
--
-- In a walk:
--
-- ARGV[10]  how many queues to look at
-- ARGV[11]  where to go on: the queue, '' for the first one
-- ARGV[12]  and what of it, counted from 1
-- ARGV[13]  and where in it: a cursor of a hash, or an end in a sorted set; '' for its beginning
-- ARGV[14]  and the last that was seen there: a put number in a hash, the entry in a sorted set; '' if none was
--
-- Gives 1 if there is more, these last four for the next call, and the ids of what was found.

local STEP = 25  -- entries of a hash, or of a sorted set, that are read at once: their jobs may be large
local where, after, want = cmsgpack.unpack(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local left, room = tonumber(ARGV[8]), tonumber(ARGV[9])

local function state_of(j)
    return j.s.state or (run_of(j) and 'running' or 'ready')
end

local function matches(j)
    return (where.queue == nil or j.queue == where.queue)
       and (where.batch == nil or j.batch == where.batch)
       and (where.reason == nil or j.s.reason == where.reason)
       and (where.state == nil or state_of(j) == where.state)
       and (where.scheduled == nil
            or where.scheduled == (state_of(j) == 'ready' and tonumber(j.s.due or j.put) > now))
end

-- The number of its put, if this job is one of those.  What can be told without its state comes first.
local function seq_of_match(id, record)
    local task, seq = record:match('^.([^\n]*)\n%d+\n(%d+)\n')
    seq = tonumber(seq)
    if not seq or seq <= after or (where.task ~= nil and task ~= where.task) then
        return nil
    end
    local j = made(id, record, redis.call('HGET', STATE, id))
    return j and matches(j) and seq or nil
end

local function in_order(found)
    table.sort(found, function(one, other) return one[1] < other[1] end)
end

-- --- few ------------------------------------------------------------------------------------

local function first_matching()
    if redis.call('HLEN', JOBS) > left then
        return false
    end
    local found, at = {}, '0'
    repeat
        local scan = redis.call('HSCAN', JOBS, at, 'COUNT', STEP)
        for n = 1, #scan[2], 2 do
            local id, record = scan[2][n], scan[2][n + 1]
            room = room - #record
            local seq = seq_of_match(id, record)
            if seq then
                found[#found + 1] = {seq, id}
            end
        end
        at = scan[1]
        if room < 0 then
            return false
        end
    until at == '0'
    in_order(found)
    local answer = {}
    for n = 1, math.min(want, #found) do
        answer[#answer + 1] = whole(found[n][1])
        answer[#answer + 1] = found[n][2]
    end
    return answer
end

if not ARGV[10] then
    return first_matching()
end

-- --- a walk ---------------------------------------------------------------------------------

local queues_left = tonumber(ARGV[10])
local queue, what, at, last = ARGV[11], tonumber(ARGV[12]), ARGV[13], ARGV[14]
local found = {}
local moved = false  -- so that each call comes further

local function is_enough()
    return #found >= want or (moved and (left <= 0 or room <= 0))
end

-- What matches of a part of a hash, whose fields are ids: pairs of numbers and ids, in order.  Of `seen` numbers it was
-- told already.
local function hits_in(key, part, seen)
    local hits = {}
    for n = 1, #part, 2 do
        local id = part[n]
        local record = key == JOBS and part[n + 1] or redis.call('HGET', JOBS, id)
        if record then
            room = room - #record
            local seq = seq_of_match(id, record)
            if seq and seq > seen then
                hits[#hits + 1] = {seq, id}
            end
        end
    end
    left = left - #part / 2
    in_order(hits)
    return hits
end

-- A hash is read by whole buckets, whose places stay the same while others are added and removed.  Only where a single
-- one has more than is wanted does the next call go on in the middle of it, after a number.  True at its end.
local function walk_hash(key)
    at = at == '' and '0' or at
    local step = STEP
    while not is_enough() do
        step = last == '' and math.min(step, want - #found) or 1
        local scan = redis.call('HSCAN', key, at, 'COUNT', step)
        local hits = hits_in(key, scan[2], tonumber(last) or 0)
        local fitting = want - #found
        if #hits <= fitting then
            for _, hit in ipairs(hits) do
                found[#found + 1] = hit[2]
            end
            at, last, step, moved = scan[1], '', STEP, true
            if at == '0' then
                return true
            end
        elseif step > 1 then
            step = math.floor(step / 2)
        elseif #found > 0 then
            return false
        else
            for n = 1, want do
                found[n] = hits[n][2]
            end
            last = whole(hits[want][1])
        end
    end
    return false
end

-- How many entries of a sorted set come before the next one to look at, also if the last one is no longer there.
local function passed(key)
    if at == '' then
        return 0
    end
    local low, high = redis.call('ZCOUNT', key, '-inf', '(' .. at), redis.call('ZCOUNT', key, '-inf', at)
    while low < high do
        local middle = math.floor((low + high) / 2)
        if redis.call('ZRANGE', key, middle, middle)[1] <= last then
            low = middle + 1
        else
            high = middle
        end
    end
    return low
end

-- Each that stays there is seen once.  True at its end.
local function walk_sorted_set(key)
    local first = passed(key)
    while not is_enough() do
        local part = redis.call('ZRANGE', key, first, first + STEP - 1, 'WITHSCORES')
        if #part == 0 then
            return true
        end
        for n = 1, #part, 2 do
            if is_enough() then
                return false
            end
            local id = scheduled_id(part[n])
            local record = redis.call('HGET', JOBS, id)
            if record and seq_of_match(id, record) then
                found[#found + 1] = id
            end
            left, room = left - 1, room - (record and #record or 0)
            last, at, moved = part[n], part[n + 1], true
        end
        first = first + #part / 2
    end
    return false
end

-- Each key of a queue that is looked at.  True after the last one.
local function walk_queue(kinds)
    while what <= #kinds do
        local key = of_queue(queue, kinds[what])
        if redis.call('EXISTS', key) == 1 then
            local is_at_end = (kinds[what] == 'running' and walk_hash or walk_sorted_set)(key)
            if not is_at_end then
                return false
            end
        end
        what, at, last = what + 1, '', ''
    end
    return true
end

local function walk_queues(kinds)
    local queues = {where.queue}
    if not where.queue then
        queues = redis.call('ZRANGEBYLEX', base .. 'queues', '[' .. queue, '+', 'LIMIT', 0, queues_left + 1)
    end
    for n, name in ipairs(queues) do
        if name ~= queue then
            queue, what, at, last = name, 1, '', ''
        end
        if n > queues_left or not walk_queue(kinds) then
            return false
        end
    end
    return true
end

local is_at_end
if where.state == 'running' then
    is_at_end = where.reason ~= nil or where.scheduled == true or walk_queues({'running'})
elseif where.state == 'done' or where.state == 'dead' or where.state == 'cancelled' then
    is_at_end = where.scheduled == true or walk_queues({where.state})
elseif where.reason ~= nil then
    is_at_end = where.state ~= nil or where.scheduled == true or walk_queues({'dead', 'cancelled', 'done'})
else
    is_at_end = walk_hash(JOBS)
end
return {is_at_end and 0 or 1, queue, what, at, last, found}
