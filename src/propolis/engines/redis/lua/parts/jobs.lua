-- Jobs as tables, where they stand, and how they end.
--
-- A job `j` has what never changes (id, task, seq, put, priority, max_crashes, chosen, unique, until_started, key,
-- batch, member), its `queue`, and in `s` what changes.  A change of `s` needs a call of `save`.

--
-- A job that cannot be read goes to the broken shelf, wherever it is met: `shelve` in batches.lua.
local shelve

local COUNTS = {'attempts', 'failures', 'losses', 'crashes', 'fence', 'began', 'behind'}
local MOMENTS = {'due', 'expires', 'started', 'ended', 'keep'}

-- Can one calculate with the numbers of its record, and of what has changed about it?
local function is_sound(j)
    local sound = is_whole(j.priority, -1000, 1000) and is_whole(j.max_crashes, 0, 2 ^ 31) and is_whole(j.member, 0, 2 ^ 53)
        and is_moment(j.put) and is_whole(j.seq, 0, 2 ^ 53)
    for n = 1, next(j.s) and #COUNTS or 0 do
        sound = sound and is_whole(j.s[COUNTS[n]], 0, 2 ^ 53)
    end
    for n = 1, next(j.s) and #MOMENTS or 0 do
        sound = sound and is_moment(j.s[MOMENTS[n]])
    end
    return sound
end

-- Gives nil, and why, where it cannot be read.
local function made(id, record, state)
    local flag, task, put, seq, meta = record:match('^(.)([^\n]*)\n(%d+)\n(%d+)\n([^\n]*)\n')
    local fine, j = pcall(cjson.decode, meta)
    if not fine or type(j) ~= 'table' or type(j.queue) ~= 'string' then
        return nil, 'its record cannot be read'
    end
    j.id, j.flag, j.task, j.put, j.seq = id, flag, task, tonumber(put), tonumber(seq)
    j.record = record
    j.priority = j.priority or 0
    j.max_crashes = j.max_crashes or 3
    j.member = j.member or 0
    j.s = not state and {} or unpacked(state)
    if not j.s then
        return nil, 'its state cannot be read'
    elseif not is_sound(j) then
        return nil, 'it has numbers that cannot be'
    end
    j.queue = j.s.queue or j.queue
    return j
end

-- The job with this id; one of `queue`, if that is known, is shelved if it cannot be read.
local function load(id, queue)
    local record = redis.call('HGET', JOBS, id)
    if not record then
        return nil
    end
    local j, why = made(id, record, redis.call('HGET', STATE, id))
    if not j and queue and shelve then
        shelve(id, queue, why)
    end
    return j
end

local function save(j)
    if next(j.s) == nil then
        redis.call('HDEL', STATE, j.id)
    else
        redis.call('HSET', STATE, j.id, cmsgpack.pack(j.s))
    end
end

-- A run as it is written: its fence, the bundle whose leases end together, when it began, its attempt, its holder.
local function read_run(value)
    local fence, bundle, started, attempt, holder = value:match('^.(%d+)\n(%d+)\n(%d+)\n(%d+)%.?%d*\n(.*)$')
    return {
        fence = fence or '0', bundle = bundle or '', started = tonumber(started or now), attempt = tonumber(attempt or 1),
        holder = holder or '', value = value,
    }
end

-- The run of a running job, or nil.
local function run_of(j)
    local value = redis.call('HGET', of_queue(j.queue, 'running'), j.id)
    return value and read_run(value) or nil
end

-- Save what has changed about a running job: the end of its run must look at that.
local function save_running(j, run)
    redis.call('HSET', of_queue(j.queue, 'running'), j.id, 'X' .. run.value:sub(2))
    save(j)
end

-- One more event in the history of a job; the newest hundred are kept.
local function add_event(j, kind, attempt, fence, holder, note)
    local events = j.s.history or {}
    events[#events + 1] = {now, kind, attempt, tonumber(fence), holder, note}
    if #events > 100 then
        table.remove(events, 1)
    end
    j.s.history = events
end

-- --- bundles ----------------------------------------------------------------------------------

-- A name for leases that end together, which no others have.
local function new_bundle()
    local number = now
    while redis.call('HEXISTS', BUNDLES, whole(number)) == 1 do
        number = number + 1
    end
    return whole(number)
end

-- Leases that end together after `span`: `n` of them, and for each queue, after its name, their ids.
local function keep_bundle(bundle, span, n, ids)
    redis.call('HSET', BUNDLES, bundle, n)
    redis.call('HSET', BUNDLED, bundle, cmsgpack.pack({span, ids}))
    redis.call('ZADD', LEASES, whole(now + span), bundle)
end

local function forget_bundle(bundle)
    redis.call('HDEL', BUNDLES, bundle)
    redis.call('HDEL', BUNDLED, bundle)
    redis.call('ZREM', LEASES, bundle)
end

-- So many leases of each of these bundles have ended, or moved to another; a bundle without leases is forgotten.
local function leave_bundles(leaving)
    for bundle, n in pairs(leaving) do
        if redis.call('HINCRBY', BUNDLES, bundle, -n) <= 0 then
            forget_bundle(bundle)
        end
    end
end

-- --- news -------------------------------------------------------------------------------------

-- Something has changed about a rule: those of its queue may have news, or those where something was set aside.  Where
-- these are many, some of them: the others look again by themselves.
local function wake_for(scope, name)
    if scope == 'queue' then
        return wake(name)
    end
    for _, queue in ipairs(redis.call('SRANDMEMBER', base .. 'holding', CHUNK)) do
        wake(queue)
    end
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

-- What no place of one line reaches.
local function last_place(priority)
    return PRIORITY_STEP / 2 - priority * PRIORITY_STEP
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

-- For how long the leases of this bundle were given, if it may have been given later than now.  It is named after the
-- time at which it began; where it was shortened, that says no more.
local function span_of_later(bundle)
    local packed = tonumber(bundle) > now and redis.call('HGET', BUNDLED, bundle)
    return packed and tonumber((unpacked(packed) or {})[1])
end

-- When the leases that end last were given, as far as that is later than now: so the clock has shown that time.  While
-- leases are being shortened, that may be of before the last step.
local function last_given()
    local last = redis.call('ZREVRANGE', LEASES, 0, 0, 'WITHSCORES')
    local span = last[1] and span_of_later(last[1])
    return span and redis.call('EXISTS', base .. 'shortening') == 0 and tonumber(last[2]) - span or 0
end

-- By how much the clock has gone back until now, in all (L2).  The engine remembers its largest time.
local STEP_US = 1000000
local behind

local function clock_went_back()
    if not behind then
        local latest = redis.number_or(0, redis.call('GET', base .. 'latest'))
        local shown = math.max(latest, last_given())
        behind = redis.number_or(0, redis.call('GET', base .. 'behind'))
        if shown > now + STEP_US then
            behind = behind + math.max(0, latest - now)  -- not by a lease: one may be damaged (L7)
            redis.call('SET', base .. 'behind', whole(behind))
            redis.call('SET', base .. 'shifting', '\n0')
            redis.call('SET', base .. 'shortening', whole(now))
        end
        if shown > now + STEP_US or latest < now - STEP_US then
            redis.call('SET', base .. 'latest', whole(now))
        end
    end
    return behind
end

-- A parked line is of one queue and one task; its jobs stand there in the order of their puts.
local function parked_line(j)
    return of_queue(j.queue, 'parked:' .. j.task)
end

local function park(j)
    redis.call('ZADD', parked_line(j), -j.priority, scheduled_as(j))
    redis.call('ZADD', base .. 'parked', 0, j.queue .. '\n' .. j.task)
end

local function unpark(j)
    redis.call('ZREM', parked_line(j), scheduled_as(j))
    if redis.call('EXISTS', parked_line(j)) == 0 then
        redis.call('ZREM', base .. 'parked', j.queue .. '\n' .. j.task)
    end
end

-- The tasks of which jobs are parked in a queue.
local function parked_tasks(queue)
    local tasks = redis.call('ZRANGEBYLEX', base .. 'parked', '[' .. queue .. '\n', '(' .. queue .. '\11')
    for n, line in ipairs(tasks) do
        tasks[n] = line:sub(#queue + 2)
    end
    return tasks
end

-- Let it wait where it belongs: in its parked line, among the scheduled, at the back of its line, or (`front`) before
-- all others.
local function make_ready(j, front)
    if j.s.expires then
        redis.call('ZADD', base .. 'expiring', j.s.expires, j.id)
    end
    if j.s.parked then
        park(j)
    elseif tonumber(j.s.due or j.put) > now then
        j.s.behind = not j.s.exact and clock_went_back() > 0 and behind or nil
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

-- Drop some of the entries of a list that are struck out, when these are more than half of it.  Its head moves over into
-- `tidied`, without them, and stands there before all others, until all of it has moved: a few at a time, so that
-- each entry that is struck out pays for some moves.
local function tidy(queue, priority)
    local line, void = of_queue(queue, 'line:' .. priority), of_queue(queue, 'void:' .. priority)
    local tidied = of_queue(queue, 'tidied:' .. priority)
    if redis.call('EXISTS', tidied) == 0 then
        local struck = redis.call('SCARD', void)
        if struck < 64 or struck * 2 < redis.call('LLEN', line) then
            return
        end
    end
    local kept = {}
    for _, entry in ipairs(redis.call('LPOP', line, 16) or {}) do
        if redis.call('SREM', void, entry) == 0 then
            kept[#kept + 1] = entry
        end
    end
    in_chunks('RPUSH', tidied, kept)
    if redis.call('EXISTS', line) == 0 and redis.call('EXISTS', tidied) == 1 then
        redis.call('RENAME', tidied, line)
    end
end

-- Take a job out of the list.  To find its entry there would mean to walk: it is struck out, and dropped
-- when it is reached.
local function strike(j)
    local line, void = line_of(j)
    local entry = j.s.entry or j.id
    if redis.call('LINDEX', line, -1) == entry then
        redis.call('RPOP', line)
    else
        redis.call('SADD', void, entry)
        tidy(j.queue, j.priority)
    end
    j.s.entry = nil
end

-- The groups of jobs in which this one may have been set aside.
local function groups_of(j)
    return {'task:' .. j.task, j.key and 'key:' .. j.key, j.key and 'task_key:' .. j.task .. ' ' .. j.key}
end

-- A group of jobs that were set aside is forgotten when it is empty.
local function forget_group(queue, group)
    local holds = of_queue(queue, 'holds')
    if redis.call('EXISTS', of_queue(queue, 'held:' .. group)) == 0 then
        redis.call('SREM', holds, group)
        if redis.call('EXISTS', holds) == 0 then
            redis.call('SREM', base .. 'holding', queue)
            redis.call('DEL', of_queue(queue, 'freed'))
        end
    end
end

-- Where a queue has more groups than one call looks at, `freed` names those that may have room, by the places of their
-- first jobs; it is only a hint.
local GROUPS = 500

-- Not a local, as number_or.
function redis.free_groups(queue, groups)
    local holds, freed = of_queue(queue, 'holds'), {}
    if #groups == 0 or redis.call('SCARD', holds) <= GROUPS then
        return
    end
    for first = 1, #groups, CHUNK do
        local last = math.min(first + CHUNK - 1, #groups)
        for k, is_there in ipairs(redis.call('SMISMEMBER', holds, unpack(groups, first, last))) do
            local group = groups[first + k - 1]
            local head = is_there == 1 and redis.call('ZRANGE', of_queue(queue, 'held:' .. group), 0, 0, 'WITHSCORES')[2]
            if head then
                freed[#freed + 1], freed[#freed + 2] = head, group
            end
        end
    end
    in_chunks('ZADD', of_queue(queue, 'freed'), freed)
end

-- Does a job wait in its queue, and not among what the removal `r` has set aside?
local function stands(j, r)
    if j.s.parked then
        return redis.call('ZSCORE', parked_line(j), scheduled_as(j))
    end
    if tonumber((j.s.entry or ''):match('\n(%d+)$') or j.seq) > r.upto
        or redis.call('ZSCORE', of_queue(j.queue, 'scheduled'), scheduled_as(j))
        or redis.call('ZSCORE', of_queue(j.queue, 'front'), j.id) then
        return true
    end
    for _, group in ipairs(groups_of(j)) do
        if redis.call('SISMEMBER', of_queue(j.queue, 'holds'), group) == 1
            and redis.call('ZSCORE', of_queue(j.queue, 'held:' .. group), j.id) then
            return true
        end
    end
    return false
end

-- Before a job joins a group: what a removal has set aside there gets a name of its own.
local function part_group(queue, group)
    local name = 'queue:' .. queue
    local r = removal_of(name)
    for _, holds in ipairs(r and r.holds or {}) do
        if redis.call('SREM', holds, group) == 1 then
            redis.call('RENAME', of_queue(queue, 'held:' .. group), holds .. ':' .. group)
            r.keys[#r.keys + 1] = 'ids ' .. holds .. ':' .. group
            redis.call('HSET', REMOVALS, name, cmsgpack.pack(r))
        end
    end
end

-- Take a waiting job from wherever it waits.
local function unplace(j)
    if j.s.parked then
        j.s.parked = nil
        return unpark(j)
    end
    if redis.call('ZREM', of_queue(j.queue, 'scheduled'), scheduled_as(j)) == 1
        or redis.call('ZREM', of_queue(j.queue, 'front'), j.id) == 1 then
        return
    end
    if redis.call('EXISTS', of_queue(j.queue, 'holds')) == 1 then
        for _, group in ipairs(groups_of(j)) do
            if redis.call('ZREM', of_queue(j.queue, 'held:' .. group), j.id) == 1 then
                forget_group(j.queue, group)
                return
            end
        end
    end
    local r = removal_of('queue:' .. j.queue)
    if not r or stands(j, r) then
        strike(j)
    end
end

-- Those whose time has come join the back of their line, in the order of their times.
local function promote(queue, most)
    local key = of_queue(queue, 'scheduled')
    local due = redis.call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, most)
    for _, member in ipairs(due) do
        redis.call('ZREM', key, member)
        local j = load(scheduled_id(member), queue)
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
    if j.unique and elsewhere(j.unique_shard) then
        send(j.unique_shard, {kind = 'free', key = j.unique, id = j.id})
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

-- Limits on tasks and keys: `limited:<scope>:<name>` has the ids of what runs under one.  `limits` knows for each how far
-- the count of what ran before it was made has come, as a queue and a place in it; '' when that is over.
-- Where there are limits for many keys it also has EACH_KEY, and all runs of jobs with keys are counted; once those
-- limits are gone, no start is counted any more (UNCOUNTED), and the end of what was.
local LIMITS, COUNTING = base .. 'limits', base .. 'counting'
local EACH_KEY, UNCOUNTED = 'each key', 'uncounted'

local function limited_by(on)
    return base .. 'limited:' .. on
end

-- A job that counts runs no more.
local function count_out(j)
    if redis.call('EXISTS', LIMITS) == 0 then
        return
    end
    local on_task, on_key = 'task:' .. j.task, j.key and 'key:' .. j.key
    local there = redis.call('HMGET', LIMITS, on_task, on_key or '', EACH_KEY)
    if there[1] then
        redis.call('SREM', limited_by(on_task), j.id)
    end
    if on_key and (there[2] or there[3]) then
        redis.call('SREM', limited_by(on_key), j.id)
        redis.free_groups(j.queue, {on_key, 'task_key:' .. j.task .. ' ' .. j.key})
    end
end

-- What a bundle whose own list is lost may have: of each queue all that runs there.
local function everything_that_runs()
    local known = {}
    for _, queue in ipairs(redis.call('ZRANGE', base .. 'queues', 0, -1)) do
        known[#known + 1] = queue
        known[#known + 1] = table.concat(redis.call('HKEYS', of_queue(queue, 'running')), '\n')
    end
    return known
end

-- Call `with` for up to `most` leases of a bundle that have not ended or moved to another: its queue, id and run.  A
-- bundle keeps the ids of all that it began with.  Gives those that were not looked at, as it keeps them.
local function each_lease(bundle, most, with)
    local packed = redis.call('HGET', BUNDLED, bundle)
    local known, rest = packed and (unpacked(packed) or {})[2] or everything_that_runs(), {}
    local mark, readable = '^.%d+\n' .. bundle .. '\n', '^.%d+\n%d+\n%d+\n[%d.]+\n'
    for k = 1, #known, 2 do
        local left = {}
        for id in known[k + 1]:gmatch('[^\n]+') do
            if most > 0 then
                most = most - 1
                local run = redis.call('HGET', of_queue(known[k], 'running'), id)
                if run and (run:find(mark) or not run:find(readable)) then
                    with(known[k], id, run)
                end
            else
                left[#left + 1] = id
            end
        end
        if #left > 0 then
            rest[#rest + 1] = known[k]
            rest[#rest + 1] = table.concat(left, '\n')
        end
    end
    return rest
end

-- Count those of these runs that a limit is for.  From now on the end of each is looked at, as if something had changed
-- about it.
local function count_in(on, queue, runs)
    local scope, name = on:match('^(%a+):(.*)$')
    for n = 1, #runs, 2 do
        local j = load(runs[n])
        if j and (j[scope or ''] == name and name or on == EACH_KEY and j.key) then
            redis.call('SADD', limited_by(scope and on or 'key:' .. j.key), j.id)
            redis.call('HSET', of_queue(queue, 'running'), j.id, 'X' .. runs[n + 1]:sub(2))
        end
    end
end

-- A bite of what ran before a limit was made; gives whether that is over.  Until then nothing starts under it.
local function count_some(on, most)
    local queue, cursor = (redis.call('HGET', LIMITS, on) or ''):match('^(.*)\n(%d+)$')
    while queue and most > 0 do
        if cursor == '0' then
            local after = queue == '' and '-' or '(' .. queue
            queue = redis.call('ZRANGEBYLEX', base .. 'queues', after, '+', 'LIMIT', 0, 1)[1]
        end
        if queue then
            local found = redis.call('HSCAN', of_queue(queue, 'running'), cursor, 'COUNT', 100)
            count_in(on, queue, found[2])
            cursor, most = found[1], most - 1 - #found[2] / 2
        end
    end
    redis.call('HSET', LIMITS, on, queue and queue .. '\n' .. cursor or '')
    redis.call(queue and 'SADD' or 'SREM', COUNTING, on)
    return queue == nil
end

-- How many run under a limit on a task or key; nil where that is still being counted.
local counting  -- is anything?

local function counted_under(on)
    if counting == nil then
        counting = redis.call('EXISTS', COUNTING) == 1
    end
    local what = counting and (redis.call('HEXISTS', LIMITS, on) == 1 and on or EACH_KEY)
    if what and redis.call('SISMEMBER', COUNTING, what) == 1 and not count_some(what, CHUNK) then
        return nil
    end
    return redis.call('SCARD', limited_by(on))
end

-- Does this job run, under a limit on this task or key?
local function runs_under(on, id)
    local scope, name = on:match('^(%a+):(.*)$')
    local j = load(id)
    return j and j[scope] == name and redis.call('HEXISTS', of_queue(j.queue, 'running'), id) == 1
end

-- Those of these ids that are counted under a limit, though they do not run under it: code that does not know limits for
-- many keys has ended their runs.
local function strays_among(on, ids)
    local strays = {}
    for _, id in ipairs(ids) do
        strays[#strays + 1] = not runs_under(on, id) and id or nil
    end
    return strays
end

-- Take those out of a count that are strays among a few by chance; gives whether there were any.
local function drop_few_strays(on)
    local strays = strays_among(on, redis.call('SRANDMEMBER', limited_by(on), 3))
    in_chunks('SREM', limited_by(on), strays)
    return #strays > 0
end

-- The same for a few counts by chance, of those for which something waits or, where there are shards, that are owned
-- here: so each stray is found in the end, and no lease has to look for it.
local function drop_some_strays()
    for _, queue in ipairs(redis.call('SRANDMEMBER', base .. 'holding', 5)) do
        for _, group in ipairs(redis.call('SRANDMEMBER', of_queue(queue, 'holds'), 20)) do
            if drop_few_strays((group:gsub('^task_key:.- ', 'key:', 1))) then
                redis.free_groups(queue, {group})
                wake(queue)
            end
        end
    end
    for _, on in ipairs(send and redis.call('ZRANDMEMBER', base .. 'owned_since', 20) or {}) do
        if drop_few_strays(on) then
            wake_for('key')
        end
    end
end

-- Wake those who wait for tokens that are there now.  Count a bite of what was too much for one call, for each of some
-- limits; gives whether all is counted.
local function see_to_limits(refilled, most)
    for _, on in ipairs(refilled) do
        if on:sub(1, 6) == 'queue:' then
            wake(on:sub(7))
        end
    end
    if #refilled > 0 then
        wake_for('key')
        in_chunks('ZREM', base .. 'refills', refilled)
    end
    if redis.call('HGET', LIMITS, EACH_KEY) == UNCOUNTED and redis.call('EXISTS', BUNDLES) == 0 then
        redis.call('HDEL', LIMITS, EACH_KEY)  -- nothing is left that was counted
    end
    if redis.call('EXISTS', LIMITS) == 1 then
        drop_some_strays()
    end
    if send then
        give_up_owned(most)
    end
    local all = true
    for _, on in ipairs(redis.call('SRANDMEMBER', COUNTING, 10)) do
        all = count_some(on, most) and all
    end
    return all
end

-- Where there are few bundles, and a bite of jobs in all of them, these tell what runs: nobody has to look into all queues.
-- Gives false if there are more.
local function count_few(on)
    local n = redis.call('HLEN', BUNDLED)
    if n > 16 then
        return false
    end
    for _, bundle in ipairs(redis.call('HKEYS', BUNDLED)) do
        local rest = each_lease(bundle, math.floor(CHUNK / n), function(queue, id, run)
            count_in(on, queue, {id, run})
        end)
        if #rest > 0 then
            return false
        end
    end
    return true
end

local function begin_limit(on)
    if redis.call('HSETNX', LIMITS, on, '\n0') == 1 then
        if count_few(on) then
            redis.call('HSET', LIMITS, on, '')
        else
            count_some(on, CHUNK)
        end
    end
end

-- How it is with the limits for many keys: nil where there are none.
local function each_key_counted()
    local how = redis.call('HGET', LIMITS, EACH_KEY)
    return how and how ~= UNCOUNTED and how or nil
end

local function end_limit(on)
    redis.call('HDEL', LIMITS, on)
    redis.call('SREM', COUNTING, on)
    if on:sub(1, 4) ~= 'key:' or not each_key_counted() then
        redis.call('UNLINK', limited_by(on))
    end
end

-- Is a limit for many keys: those that begin with something, or those of a task?
local function is_for_many(scope, name)
    return (scope == 'key' or scope == 'task_key') and name:sub(-1) == '*'
end

local function begin_limit_for_many(scope, name, rule)
    if send then
        redis.call('HSET', base .. 'shares', rule, 'many')  -- see sharded.lua
    end
    if scope == 'key' then
        redis.call('SADD', base .. 'prefixes', name:sub(1, -2))
    end
    if redis.call('HGET', LIMITS, EACH_KEY) == UNCOUNTED then
        redis.call('HDEL', LIMITS, EACH_KEY)
    end
    begin_limit(EACH_KEY)
end

local function end_limit_for_many(scope, name)
    if scope == 'key' then
        redis.call('SREM', base .. 'prefixes', name:sub(1, -2))
    end
    local of_tasks = redis.call('ZRANGEBYLEX', base .. 'rule_names', '[limit:task_key:', '(limit:task_key;', 'LIMIT', 0, 1)
    if #of_tasks == 0 and redis.call('EXISTS', base .. 'prefixes') == 0 and redis.call('HEXISTS', LIMITS, EACH_KEY) == 1 then
        redis.call('HSET', LIMITS, EACH_KEY, UNCOUNTED)
        redis.call('SREM', COUNTING, EACH_KEY)
    end
end

-- Forget a rule, kind:scope:name.  Gives whether it was there, and not over.
local function forget_rule(rule)
    local kind, scope, name = rule:match('^(%a+):([%a_]+):(.*)$')
    local there
    if kind == 'cap' then
        there = redis.call('HDEL', base .. 'caps', name)
    else
        there = redis.call('HDEL', base .. 'rules', rule)
    end
    there = there == 1 and not is_over(rule)
    redis.call('ZREM', base .. 'rule_names', rule)
    redis.call('HDEL', base .. 'rule_terms', rule)
    redis.call('ZREM', base .. 'rule_ends', rule)
    if kind == 'limit' then
        redis.call('HDEL', base .. 'rates', rule)
        if is_for_many(scope, name) then
            end_limit_for_many(scope, name)
        else
            end_limit(scope .. ':' .. name)
        end
        if send then
            redis.call('HDEL', base .. 'shares', rule)
            redis.call('HDEL', base .. 'pool', rule)
        end
    end
    wake_for(scope, name)
    return there
end

-- Keep until when a rule holds, either for so long from now or until then, and what else it says.
local function keep_terms(rule, lasts, ends, who_and_why)
    ends = lasts ~= '' and now + tonumber(lasts) or tonumber(ends)
    redis.call('HSET', base .. 'rule_terms', rule, whole(now) .. '\n' .. (ends and whole(ends) or '') .. '\n' .. who_and_why)
    if ends then
        redis.call('ZADD', base .. 'rule_ends', whole(ends), rule)
    else
        redis.call('ZREM', base .. 'rule_ends', rule)
    end
end

-- A token each so many us, and how many are saved up, as text; '' where the rule, which may be new, has no rate.
local function keep_rate(rule, rate, is_new)
    if rate ~= '' then
        redis.call('HSET', base .. 'rates', rule, rate)
    elseif not is_new then
        redis.call('HDEL', base .. 'rates', rule)
    end
end

-- May one more prefix have a limit?  Those that are over are forgotten.
local function room_for_prefix(most)
    local prefixes = redis.call('SMEMBERS', base .. 'prefixes')
    local left = tonumber(most) - #prefixes
    for _, prefix in ipairs(left <= 0 and prefixes or {}) do
        local rule = 'limit:key:' .. prefix .. '*'
        if is_over(rule) then
            forget_rule(rule)
            left = left + 1
        end
    end
    return left > 0
end

-- The lease of a job ends, however it ended.
local function end_run(j, run)
    redis.call('HDEL', of_queue(j.queue, 'running'), j.id)
    if run.bundle ~= '' then
        leave_bundles({[run.bundle] = 1})
    end
    count_out(j)
end

local function drop_checkpoint(j)
    if j.s.saved then
        redis.call('HDEL', CHECKPOINTS, j.id)
        j.s.saved = nil
    end
end

-- A job goes on in another shard.  Until it is known to be there, its id is taken here.
local function leave_shard(j, shard)
    local checkpoint = j.s.saved and redis.call('HGET', CHECKPOINTS, j.id) or nil
    send(shard, {
        kind = 'job', id = j.id, record = redis.call('HGET', JOBS, j.id), state = j.s, checkpoint = checkpoint,
    })
    redis.call('HDEL', CHECKPOINTS, j.id)
    redis.call('HDEL', JOBS, j.id)
    redis.call('HDEL', STATE, j.id)
    redis.call('HSET', base .. 'leaving', j.id, shard)
end

-- A sweep looks only into queues with many dead jobs.
local function count_dead(queue)
    local n = redis.call('ZCARD', of_queue(queue, 'dead'))
    if n > 0 then
        redis.call('ZADD', base .. 'deaths', n, queue)
    else
        redis.call('ZREM', base .. 'deaths', queue)
    end
end

-- Forget everything about a job but what its queue counts.
local function forget(j)
    drop_checkpoint(j)
    redis.call('HDEL', JOBS, j.id)
    redis.call('HDEL', STATE, j.id)
    if j.s.state then
        redis.call('ZREM', of_queue(j.queue, j.s.state), scheduled_as(j))
        redis.call('ZREM', base .. 'keep', j.id)
        redis.call('HDEL', base .. 'results', j.id)
        if j.s.state == 'dead' then
            count_dead(j.queue)
        end
    end
    count(j.queue, 'deleted', 1)
end
