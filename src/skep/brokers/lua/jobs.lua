-- Jobs as tables, where they stand, and how they end.
--
-- A job `j` has what never changes (id, task, seq, put, priority, max_crashes, chosen, unique, until_started, key,
-- batch, member), its `queue`, and in `s` what changes.  Whoever changes `s` calls `save`.

local function made(id, record, state)
    local flag, task, put, seq, meta = record:match('^(.)([^\n]*)\n(%d+)\n(%d+)\n([^\n]*)\n')
    local j = cjson.decode(meta)
    j.id, j.flag, j.task, j.put, j.seq = id, flag, task, tonumber(put), tonumber(seq)
    j.priority = j.priority or 0
    j.max_crashes = j.max_crashes or 3
    j.member = j.member or 0
    j.s = state and cmsgpack.unpack(state) or {}
    j.queue = j.s.queue or j.queue
    return j
end

local function load(id)
    local record = redis.call('HGET', JOBS, id)
    return record and made(id, record, redis.call('HGET', STATE, id))
end

local function save(j)
    if next(j.s) == nil then
        redis.call('HDEL', STATE, j.id)
    else
        redis.call('HSET', STATE, j.id, cmsgpack.pack(j.s))
    end
end

-- The run of a running job, or nil: its fence, the bundle whose leases end together, when it began, its attempt,
-- who holds it.
local function run_of(j)
    local value = redis.call('HGET', of_queue(j.queue, 'running'), j.id)
    if not value then
        return nil
    end
    local fence, bundle, started, attempt, holder = value:match('^.(%d+)\n(%d+)\n(%d+)\n(%d+)%.?%d*\n(.*)$')
    return {
        fence = fence, bundle = bundle, started = tonumber(started), attempt = tonumber(attempt), holder = holder,
        value = value,
    }
end

-- Save what has changed about a running job: whoever ends its run must look at that.
local function save_running(j, run)
    redis.call('HSET', of_queue(j.queue, 'running'), j.id, 'X' .. run.value:sub(2))
    save(j)
end

-- One more event in the history of a job; the newest hundred are kept.
local function tell(j, kind, attempt, fence, holder, note)
    local events = j.s.history or {}
    events[#events + 1] = {now, kind, attempt, tonumber(fence), holder, note}
    if #events > 100 then
        table.remove(events, 1)
    end
    j.s.history = events
end

-- --- places ---------------------------------------------------------------------------------
--
-- A line is one priority of one queue.  Its jobs stand in a list, which knows only its two ends.  What stood
-- at the head and was sent back there, or was passed over because of a rule, stands before the list, by number,
-- in `front` or `held`.  So `place` orders everything that is not in the list, and all of it is before the list.

local PRIORITY_STEP = 2199023255552  -- 2^41

local function place(j, number)
    return number - j.priority * PRIORITY_STEP
end

-- The lowest and the highest place of one line.
local function places(priority)
    local middle = -priority * PRIORITY_STEP
    return whole(middle - PRIORITY_STEP / 2), whole(middle + PRIORITY_STEP / 2)
end

local function line_of(j)
    return of_queue(j.queue, 'line:' .. j.priority), of_queue(j.queue, 'void:' .. j.priority)
end

local function scheduled_as(j)
    return string.format('%016.0f', j.seq) .. j.id
end

-- The id in what `scheduled_as` made.
local function scheduled_id(member)
    return member:sub(17)
end

-- To the back of the line.  An entry that is more than an id says that something has changed about the job since
-- it was put; and none may look like another one that was struck out and is still there.
local function stand(j)
    local line, void = line_of(j)
    local entry = j.id
    j.s.entry = nil
    if next(j.s) or redis.call('SISMEMBER', void, entry) == 1 then
        entry = j.id .. '\n' .. whole(redis.call('INCR', base .. 'seq'))
        j.s.entry = entry
    end
    redis.call('RPUSH', line, entry)
    redis.call('ZADD', of_queue(j.queue, 'ranks'), -j.priority, j.priority)
end

-- Let it wait where it belongs: among the scheduled, at the back of its line, or (`front`) before all others.
local function make_ready(j, front)
    if j.s.expires then
        redis.call('ZADD', base .. 'expiring', j.s.expires, j.id)
    end
    if tonumber(j.s.due or j.put) > now then
        redis.call('ZADD', of_queue(j.queue, 'scheduled'), j.s.due, scheduled_as(j))
        redis.call('ZADD', base .. 'timed', 'LT', j.s.due, j.queue)
    elseif front then
        local number = redis.call('HINCRBY', of_queue(j.queue, 'tally'), 'front', -1)
        redis.call('ZADD', of_queue(j.queue, 'front'), whole(place(j, number)), j.id)
        redis.call('ZADD', of_queue(j.queue, 'ranks'), -j.priority, j.priority)
    else
        stand(j)
    end
    wake(j.queue)
end

-- Several to the front, so that the first of them stands first.
local function to_front(jobs)
    for n = #jobs, 1, -1 do
        make_ready(jobs[n], true)
        save(jobs[n])
    end
end

-- Rebuild a list of which more than half is struck out: each entry pays for one move of another.
local function tidy(line, void)
    local struck = redis.call('SCARD', void)
    if struck < 64 or struck * 2 < redis.call('LLEN', line) then
        return
    end
    local entries = redis.call('LRANGE', line, 0, -1)
    local standing = {}
    for _, entry in ipairs(entries) do
        if redis.call('SISMEMBER', void, entry) == 0 then
            standing[#standing + 1] = entry
        end
    end
    redis.call('DEL', line, void)
    in_chunks('RPUSH', line, standing)
end

-- Take a job out of the list.  To find its entry there would mean to walk: it is struck out, and whoever comes
-- to it drops it.
local function strike(j)
    local line, void = line_of(j)
    local entry = j.s.entry or j.id
    if redis.call('LINDEX', line, -1) == entry then
        redis.call('RPOP', line)
    else
        redis.call('SADD', void, entry)
        tidy(line, void)
    end
    j.s.entry = nil
end

-- Take a waiting job from wherever it waits.
local function unplace(j)
    if redis.call('ZREM', of_queue(j.queue, 'scheduled'), scheduled_as(j)) == 1 then
        return
    end
    if redis.call('ZREM', of_queue(j.queue, 'front'), j.id) == 1 then
        return
    end
    local holds = of_queue(j.queue, 'holds')
    for _, group in ipairs(redis.call('SMEMBERS', holds)) do
        local held = of_queue(j.queue, 'held:' .. group)
        if redis.call('ZREM', held, j.id) == 1 then
            if redis.call('EXISTS', held) == 0 then
                redis.call('SREM', holds, group)
            end
            return
        end
    end
    strike(j)
end

-- Those whose time has come join the back of their line, in the order of their times.
local function promote(queue, most)
    local key = of_queue(queue, 'scheduled')
    local due = redis.call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, most)
    for _, member in ipairs(due) do
        redis.call('ZREM', key, member)
        local j = load(scheduled_id(member))
        if j then
            stand(j)
            save(j)
        end
    end
    return #due
end

-- --- what a job holds -----------------------------------------------------------------------

local function free_key(j)
    if j.handed_on then
        return
    end
    if j.unique and elsewhere(j.unique_home) then
        send(j.unique_home, {kind = 'free', key = j.unique, id = j.id})
    elseif j.unique and redis.call('HGET', base .. 'unique', j.unique) == j.id then
        redis.call('HDEL', base .. 'unique', j.unique)
    end
end

-- Is the id taken: by a job that is there, or by one that was chosen less than a day ago?
local function used(id)
    if redis.call('HEXISTS', JOBS, id) == 1 or (send and redis.call('HEXISTS', base .. 'leaving', id) == 1) then
        return true
    end
    local known = redis.call('ZSCORE', base .. 'known', id)
    return known and tonumber(known) > now
end

-- Limits on tasks and keys count what runs, from the moment when there is such a limit.
local function count_run(j, n)
    local limits = base .. 'limits'
    if redis.call('EXISTS', limits) == 0 then
        return
    end
    for _, name in ipairs({'task:' .. j.task, j.key and 'key:' .. j.key}) do
        if redis.call('HEXISTS', limits, name) == 1 then
            redis.call('HINCRBY', limits, name, n)
        end
    end
end

-- The lease of a job ends, however it ended.
local function end_run(j, run)
    redis.call('HDEL', of_queue(j.queue, 'running'), j.id)
    leave_bundles({[run.bundle] = 1})
    count_run(j, -1)
end

-- A job goes on in another home.  Until it is known to be there, its id is taken here.
local function leave_home(j, home)
    send(home, {kind = 'job', id = j.id, record = redis.call('HGET', JOBS, j.id), state = j.s})
    redis.call('HDEL', JOBS, j.id)
    redis.call('HDEL', STATE, j.id)
    redis.call('HSET', base .. 'leaving', j.id, home)
end

-- Forget everything about a job but what its queue counts.
local function forget(j)
    redis.call('HDEL', JOBS, j.id)
    redis.call('HDEL', STATE, j.id)
    if j.s.state then
        redis.call('ZREM', of_queue(j.queue, j.s.state), scheduled_as(j))
        redis.call('ZREM', base .. 'keep', j.id)
        redis.call('HDEL', base .. 'results', j.id)
    end
    count(j.queue, 'deleted', 1)
end
