-- with: base jobs ruling batches settling
-- Settle one bundle of leases and take the next (T2, T4-T7, T10, T12): all of it, or only one half.
--
-- ARGV[5]   in how many rounds leases end, one after the other; of each round
--           how many groups of leases end as plainly as can be: done, nothing to keep, nothing to emit; of each
--           group its queue, its holder, how many, their ids, their fences; and
--           how many other leases end; of each its id, its fence, its holder, its queue, its outcome as MessagePack
-- then      span (us), holder, limit of all, how many tasks whose parked jobs are wanted, and these;
--           how many queues; of each its name and how many jobs are wanted
--
-- Gives {now, which is the fence of each job that runs for the first time; numbers of the leases that were lost (as they
--        stood in the arguments),
--        for each queue how many were leased and, if these are fewer than wanted, how many wait at the door, and in
--        how many us to look again: 0 where there is more than one call does (else -1),
--        for each job its id and its record,
--        for each job that has run before: its number, and 'fence attempt failures crashes losses', with what it has
--        saved, if it has, in a further line}.
--
-- This is the hot path: whatever is done here for each job is done a hundred thousand times a second.  So plain jobs
-- go through it in few commands with many values, and little is written or compared for each of them.

-- Where maxmemory is reached, Redis refuses a script whose first write could need memory, but never stops one
-- that has written already.  What ends and takes jobs is what makes room again, so it must not be refused.
redis.call('DEL', base .. 'nothing')

local at = 4
local function argument()
    at = at + 1
    return ARGV[at]
end

-- --- what has ended -------------------------------------------------------------------------

local lost, released = {}, {}
local number = 0  -- of the lease, counted from 1

local function settle_slowly(n, id, fence, of_holder, queue, outcome)
    local j, run = leased(id, fence, of_holder, queue)
    if not j or not with_care(id, j.queue, settle_one, j, run, outcome, released) then
        lost[#lost + 1] = n
    end
end

local function forget_plain(queue, ids)
    if #ids > 0 then
        in_chunks('HDEL', of_queue(queue, 'running'), ids)
        in_chunks('HDEL', JOBS, ids)
        count(queue, 'deleted', #ids)
    end
end

-- Leases that end with nothing to keep or to do but a step of their batch, if they have one, or to be counted out.  Those of one bundle and
-- one batch are of one sort: their runs are the same.  Gives the sort, or nil if there is more to the job.
local function sort_of(sorts, run, fence, of_holder, id)
    local sort = sorts[run]
    if not sort then
        local flag, its_fence, bundle, born, its_holder = run:match('^([PLM])(%d+)\n(%d+)\n%d+\n%d+%.?(%d*)\n(.*)$')
        if not flag or its_holder ~= of_holder then
            return nil
        end
        sort = {run = run, fence = its_fence, bundle = bundle, n = 0, limited = flag == 'L'}
        if flag == 'M' then
            local j = made(id, redis.call('HGET', JOBS, id) or '')
            if not j then
                return nil
            end
            sort.batch, sort.born = j.batch, born
        end
        sorts[run] = sort
        sorts[#sorts + 1] = sort
    end
    return sort.fence == fence and sort or nil
end

local function settle_group()
    local queue, of_holder, n = argument(), argument(), tonumber(argument())
    local running = of_queue(queue, 'running')
    local gone, n_gone, others, limited = {}, 0, {}, {}
    local sorts, sort = {}, nil
    for first = 1, n, CHUNK do
        local last = math.min(first + CHUNK - 1, n)
        local runs = redis.call('HMGET', running, unpack(ARGV, at + first, at + last))
        for k = first, last do
            local run, fence = runs[k - first + 1], ARGV[at + n + k]
            if not sort or run ~= sort.run or fence ~= sort.fence then
                sort = run and sort_of(sorts, run, fence, of_holder, ARGV[at + k])
            end
            if sort then
                n_gone = n_gone + 1
                gone[n_gone] = ARGV[at + k]
                sort.n = sort.n + 1
                sort.last = k
                if sort.limited then
                    limited[#limited + 1] = ARGV[at + k]
                end
            else
                others[#others + 1] = k
            end
        end
    end
    if #limited > 0 then
        ruling = ruling or new_ruling()
        ruling.count_out(queue, limited)
    end
    forget_plain(queue, gone)
    local leaving, members = {}, {}
    for _, each in ipairs(sorts) do
        leaving[each.bundle] = (leaving[each.bundle] or 0) + each.n
        if each.batch then
            members[#members + 1] = each
        end
    end
    leave_bundles(leaving)
    -- A batch steps once for all of a sort, where the last of them stands.
    table.sort(members, function(one, other) return one.last < other.last end)
    local m = 1
    for _, k in ipairs(others) do
        while m <= #members and members[m].last < k do
            step_done(members[m].batch, members[m].born, members[m].n)
            m = m + 1
        end
        settle_slowly(number + k, ARGV[at + k], ARGV[at + n + k], of_holder, queue, {kind = 'done'})
    end
    for rest = m, #members do
        step_done(members[rest].batch, members[rest].born, members[rest].n)
    end
    number = number + n
    at = at + 2 * n
end

for _ = 1, tonumber(argument()) do
    for _ = 1, tonumber(argument()) do
        settle_group()
    end
    for _ = 1, tonumber(argument()) do
        number = number + 1
        local id, fence, of_holder, queue = argument(), argument(), argument(), argument()
        settle_slowly(number, id, fence, of_holder, queue, cmsgpack.unpack(argument()))
    end
end
to_front(released)

-- --- what comes next ------------------------------------------------------------------------

local span, holder = tonumber(argument()), argument()
local limit = tonumber(argument())
local ruled = redis.call('EXISTS', base .. 'rules') == 1
local tasks = {}
for n = 1, tonumber(argument()) do
    tasks[n] = argument()
end
-- A fence is drawn from the time and the last one of its job: a replica that took over and does not know the last
-- leases gives none of them to another.
local fence = whole(now)
-- All leases of one call are a bundle, until somebody renews some of them: they end together.
local bundle = new_bundle()
local since = '\n' .. bundle .. '\n' .. fence .. '\n'
local function nth_time(attempt)
    -- A value of more than 64 bytes, as these digits make it, keeps Redis from packing the hash into one string
    -- that every command would walk through: a third of the time of an exchange.
    return since .. format('%016d', attempt) .. '\n' .. holder
end
local first_time = fence .. nth_time(1)
local plain, limited_run = 'P' .. first_time, 'L' .. first_time
local PLAIN, MEMBER, KEYED = string.byte('P'), string.byte('M'), string.byte('K')

-- No call does more than a bite: so many jobs that it looks at and does not lease, because a rule keeps them back, or
-- they have expired; so many bytes that it leases.  Then it says that there is more.
local BITE, GAP = 500, 0.1
local MAX_BYTES, FIRST_PIECE = 16777216, 32
local looked, bytes = 0, 0

-- What has been leased: `taken` and `known` are the answer, `runs` and `ids` are of one queue.
local taken, known, total = {}, {}, 0
local runs, ids, n_new = {}, {}, 0
local bundled = {}

local function is_sated()
    return looked >= BITE or bytes >= MAX_BYTES
end

-- How many to take from a line in one go, if so many are wanted: their bodies may be large.
local function piece(want)
    local most = FIRST_PIECE
    if total > 0 then
        most = math.max(1, math.floor((MAX_BYTES - bytes) * total / bytes))
    end
    return math.min(want, most, CHUNK)
end

local function start(id, record, run)
    taken[2 * total + 1] = id
    taken[2 * total + 2] = record
    runs[2 * n_new + 1] = id
    runs[2 * n_new + 2] = run
    total = total + 1
    n_new = n_new + 1
    ids[n_new] = id
    bytes = bytes + #record
end

local function start_again(j)
    local s = j.s
    if next(s) == nil then
        return start(j.id, j.record, (j.flag == 'K' and 'L' or 'X') .. first_time)
    end
    local attempt, own_fence = (s.attempts or 0) + 1, whole(math.max((s.fence or 0) + 1, now))
    start(j.id, j.record, 'X' .. own_fence .. nth_time(attempt))
    known[#known + 1] = total
    local checkpoint = s.saved and '\n' .. redis.call('HGET', CHECKPOINTS, j.id) or ''
    known[#known + 1] = table.concat({own_fence, attempt, s.failures or 0, s.crashes or 0, s.losses or 0}, ' ')
        .. checkpoint
end

-- Write down what runs of one queue.
local function write_runs(queue)
    if n_new > 0 then
        in_chunks('HSET', of_queue(queue, 'running'), runs)
        bundled[#bundled + 1] = queue
        bundled[#bundled + 1] = table.concat(ids, '\n')
        runs, ids, n_new = {}, {}, 0
    end
end

-- The batch of a member that is plain in all other ways, with how many are taken of it.  They follow one another,
-- mostly: see put_members.lua for how their records begin.
local batches, the_last = {}, nil

local function batch_of(id, record)
    local meta = record:find('\n{', 1, true)
    if the_last and record:find(the_last.mark, meta, true) == meta then
        return the_last
    end
    local j = made(id, record)
    if not j or not j.born then
        return {}
    end
    local mark = '\n{"born":' .. whole(j.born) .. ','
    the_last = batches[mark]
    if not the_last then
        local counts = redis.call('HGET', batch_key(j.batch), 'born') == whole(j.born)
        the_last = {mark = mark, batch = j.batch, n = 0, counts = counts,
                    run = 'M' .. fence .. since .. format('%016d', 1) .. '.' .. whole(j.born) .. '\n' .. holder}
        batches[mark] = the_last
    end
    return the_last
end

local function move_members()
    for _, of in pairs(batches) do
        if of.counts then
            redis.call('HINCRBY', batch_key(of.batch), 'waiting', -of.n)
            redis.call('HINCRBY', batch_key(of.batch), 'running', of.n)
        end
    end
end

-- --- rules ----------------------------------------------------------------------------------

local LOOK_AGAIN_US = 1000000

-- Is there no rule on a queue or a task?
local free = {}

local function is_free(on)
    if free[on] == nil then
        local rules = redis.call('HMGET', base .. 'rules', 'pause:' .. on, 'block:' .. on, 'limit:' .. on)
        free[on] = not (rules[1] or rules[2] or rules[3])
    end
    return free[on]
end

-- How many more may start because of the rules on a queue, task, key or task of one key.
local function room(scope, name)
    if (scope == 'queue' or scope == 'task') and is_free(scope .. ':' .. name) then
        return math.huge
    end
    ruling = ruling or new_ruling()
    local left = ruling.room(scope, name)
    if ruling.counts then
        ruling.counts, looked = false, BITE  -- come back at once
    end
    return left
end

-- Set a job aside: in its place, if it had one, else behind all those that were set aside before it.
local function hold(j, number, group)
    number = number or whole(place(j, redis.call('HINCRBY', of_queue(j.queue, 'tally'), 'back', 1)))
    if redis.call('SADD', of_queue(j.queue, 'holds'), group) == 1 then
        redis.call('SADD', base .. 'holding', j.queue)
        part_group(j.queue, group)
    end
    redis.call('ZADD', of_queue(j.queue, 'held:' .. group), number, j.id)
    if j.s.entry then
        j.s.entry = nil
        save(j)
    end
end

-- Is there a rule on a task of one key, or on each of its keys?
local names_both

local function rules_both()
    if names_both == nil then
        names_both = false
        for _, hold in ipairs({'block', 'limit', 'pause'}) do
            local first, past_all = '[' .. hold .. ':task_key:', '(' .. hold .. ':task_key;'
            local found = redis.call('ZRANGEBYLEX', base .. 'rule_names', first, past_all, 'LIMIT', 0, 1)
            names_both = names_both or #found > 0
        end
    end
    return names_both
end

-- The rule that keeps a job back, as the group of those that it keeps back; nil if there is none.
local function kept_back(j)
    if room('task', j.task) <= 0 then
        return 'task:' .. j.task
    elseif j.key and room('key', j.key) <= 0 then
        return 'key:' .. j.key
    elseif j.key and rules_both() and room('task_key', j.task .. ' ' .. j.key) <= 0 then
        return 'task_key:' .. j.task .. ' ' .. j.key
    end
    return nil
end

-- --- jobs -----------------------------------------------------------------------------------

-- Start this job, unless it has expired, or its batch was deleted, or a rule keeps it back: then 0.
local function try_to_start(j, number)
    if was_removed(j) then
        looked = looked + 1
        j.s.stepped = true
        end_job(j, 'cancelled', nil)
        return 0
    end
    if j.s.expires and tonumber(j.s.expires) <= now then
        looked = looked + 1
        expire(j)
        return 0
    end
    local group = ruled and kept_back(j)
    if group then
        looked = looked + 1
        hold(j, number, group)
        return 0
    end
    if ruling then
        ruling.started(j)
    end
    if j.until_started then
        free_key(j)
    end
    if j.s.expires then
        redis.call('ZREM', base .. 'expiring', j.id)
    end
    move_member(j, waits_as(j), 'running')
    start_again(j)
    return 1
end

local here  -- the queue from which jobs are taken

local function take_one(j, number)
    return with_care(j.id, here, try_to_start, j, number) or 0
end

-- A job about which something may have changed.
local function take_changed(id, number)
    local j = load(id, here)
    if not j then
        looked = looked + GAP
        return 0
    end
    return take_one(j, number)
end

-- A job that has nothing special but its key, beside rules.
local function take_keyed(id, record)
    ruling = ruling or new_ruling()
    local task, key, meta = ruling.read_keyed(record)
    if not key then
        return take_changed(id)
    end
    local j = {id = id, task = task, key = key}
    local group = kept_back(j)
    if group then
        looked = looked + 1
        j.queue, j.priority, j.s = here, tonumber(meta:match('"priority":(%-?%d+)') or 0), {}
        hold(j, nil, group)
        return 0
    end
    ruling.started(j)
    start(id, record, limited_run)
    return 1
end

-- Jobs that are what they were when they were put.
local function take_fresh(ids)
    local records = redis.call('HMGET', JOBS, unpack(ids))
    local n = 0
    for k = 1, #ids do
        local id, record = ids[k], records[k]
        local flag = record and (record:byte() or 0)
        if not flag then
            looked = looked + GAP
        elseif flag == KEYED and ruled then
            n = n + take_keyed(id, record)
        elseif flag == KEYED or flag == PLAIN and (not ruled or is_free('task:' .. record:match('^.([^\n]*)'))) then
            start(id, record, plain)
            n = n + 1
        elseif flag == MEMBER and (not ruled or is_free('task:' .. record:match('^.([^\n]*)'))) then
            local of = batch_of(id, record)
            if of.counts then
                start(id, record, of.run)
                of.n = of.n + 1
                n = n + 1
            else
                n = n + take_changed(id)
            end
        else
            n = n + take_changed(id)
        end
    end
    return n
end

-- The id of an entry in a list, and whether the job has changed; nothing if the entry was struck out.
local function standing(entry, void)
    if redis.call('SREM', void, entry) == 1 then
        looked = looked + GAP
        return nil
    end
    local id = entry:match('^(.*)\n')
    return id or entry, id ~= nil
end

-- Take the jobs of these entries, in their order: fresh ones in one go where they stand together.
local function take_entries(entries, void)
    local n, fresh = 0, {}
    for k = 1, #entries do
        local entry = entries[k]
        if not void and not entry:find('\n', 1, true) then
            fresh[#fresh + 1] = entry
        else
            local id, changed = entry:match('^(.*)\n'), true
            if void then
                id, changed = standing(entry, void)
            end
            if id and not changed then
                fresh[#fresh + 1] = id
            elseif id then
                if #fresh > 0 then
                    n = n + take_fresh(fresh)
                    fresh = {}
                end
                n = n + take_changed(id)
            end
        end
    end
    if #fresh > 0 then
        n = n + take_fresh(fresh)
    end
    return n
end

-- Some from the head of the list of one priority; nil if there are none.
local function take_from(queue, priority, want)
    local void, tidied = of_queue(queue, 'void:' .. priority), of_queue(queue, 'tidied:' .. priority)
    local gaps = redis.call('EXISTS', void, tidied) > 0
    local entries = gaps and redis.call('LPOP', tidied, piece(want))
        or redis.call('LPOP', of_queue(queue, 'line:' .. priority), piece(want))
    return entries and take_entries(entries, gaps and void)
end

-- --- those that stand before the lists ------------------------------------------------------
--
-- A source is a set of such jobs, by their places: those in front, and those set aside by a rule that has room again.

local function see_next(source)
    local first = redis.call('ZRANGE', source.key, 0, 0, 'WITHSCORES')
    source.id, source.number, source.at = first[1], first[2], tonumber(first[2])
    return source.id ~= nil
end

-- Put a source where it belongs: the one whose next job comes first is the last.
local function file(sources, source)
    local k = #sources
    while k > 0 and sources[k].at < source.at do
        sources[k + 1] = sources[k]
        k = k - 1
    end
    sources[k + 1] = source
end

-- Where there are many groups, some of them: see `some_groups`.
local function sources_of(queue, want)
    local sources, front, seen = {}, {key = of_queue(queue, 'front')}, {}
    if see_next(front) then
        sources[1] = front
    end
    local holds = of_queue(queue, 'holds')
    local n = redis.call('SCARD', holds)
    sources.many = n > GROUPS
    local groups = {}
    if sources.many then
        ruling = ruling or new_ruling()
        groups = ruling.some_groups(queue, want)
    elseif n > 0 then
        groups = redis.call('SMEMBERS', holds)
    end
    for _, group in ipairs(groups) do
        local source = not seen[group] and {key = of_queue(queue, 'held:' .. group), group = group} or nil
        seen[group] = true
        if source then
            source.scope, source.name = group:match('^([%a_]+):(.*)$')
            if room(source.scope, source.name) > 0 and see_next(source) then
                file(sources, source)
            end
        end
    end
    return sources
end

-- Take the next job of the last source.
local function take_next(queue, sources)
    local source = table.remove(sources)
    redis.call('ZREM', source.key, source.id)
    local n = take_changed(source.id, source.number)
    if see_next(source) then
        if not source.group or room(source.scope, source.name) > 0 then
            file(sources, source)
        end
    elseif source.group then
        forget_group(queue, source.group)
    end
    return n
end

-- --- all of them ----------------------------------------------------------------------------

-- Those of a parked line; whom a rule keeps back stays there.
local function take_parked(queue, task, want)
    local line, n, passed = of_queue(queue, 'parked:' .. task), 0, 0
    while n < want and not is_sated() do
        local member = redis.call('ZRANGE', line, passed, passed)[1]
        if not member then
            break
        end
        local j = load(scheduled_id(member), queue)
        local expired = j and j.s.expires and tonumber(j.s.expires) <= now
        if j and not expired and ruled and kept_back(j) then
            passed, looked = passed + 1, looked + 1
        elseif j then
            unpark(j)
            n = n + take_one(j)
        else
            redis.call('ZREM', line, member)
        end
    end
    return n
end

local function take(queue, want)
    here = queue
    if redis.call('EXISTS', of_queue(queue, 'scheduled')) == 1 then
        promote(queue, CHUNK)
    end
    want = ruled and math.min(want, room('queue', queue)) or want
    local n, sources, ranks = 0, {}, {}
    for _, task in ipairs(want > 0 and tasks or {}) do
        n = n + take_parked(queue, task, want - n)
    end
    if n < want then
        sources, ranks = sources_of(queue, want), redis.call('ZRANGE', of_queue(queue, 'ranks'), 0, -1)
    end
    local r = 1
    while n < want and not is_sated() do
        local source, priority = sources[#sources], ranks[r]
        if source and (not priority or source.at < last_place(priority)) then
            n = n + take_next(queue, sources)
        elseif priority then
            local some = take_from(queue, priority, want - n)
            if not some then
                redis.call('ZREM', of_queue(queue, 'ranks'), priority)
                r = r + 1
            end
            n = n + (some or 0)
        else
            break
        end
    end
    if sources.many then
        ruling.keep_sources(queue, sources)
    end
    write_runs(queue)
    if ruling then
        ruling.started_in(queue, n)
    end
    return n
end

-- In how many microseconds to look again, if no news comes before; -1 means never.
local function due_in(queue)
    local due = redis.call('ZRANGE', of_queue(queue, 'scheduled'), 0, 0, 'WITHSCORES')[2]
    local left = due and tonumber(due) - now
    if is_sated() then
        return 0
    elseif ruling and ruling.limited then
        left = math.min(left or math.huge, LOOK_AGAIN_US)
    end
    if ruling and ruling.again_at then
        left = math.min(left or math.huge, math.max(0, ruling.again_at - now))
    end
    return left or -1
end

local per_queue = {}
for _ = 1, tonumber(argument()) do
    local queue, want = argument(), tonumber(argument())
    want = math.min(want, limit - total)
    looked = 0
    if ruling then
        ruling.limited, ruling.again_at = false, nil
    end
    local n = want > 0 and bytes < MAX_BYTES and take(queue, want) or 0
    per_queue[#per_queue + 1] = n
    per_queue[#per_queue + 1] = n < want and redis.call('LLEN', of_queue(queue, 'incoming')) or 0
    per_queue[#per_queue + 1] = n < want and due_in(queue) or -1
end
move_members()
if ruling then
    ruling.keep()
end
if total > 0 then
    keep_bundle(bundle, span, total, bundled)
end
publish_woken()
return {fence, lost, per_queue, taken, known}
