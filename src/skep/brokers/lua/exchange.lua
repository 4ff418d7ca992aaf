-- with: base jobs batches settling
-- Settle one bundle of leases and take the next (T2, T4-T7, T10, T12): all of it, or only one half.
--
-- ARGV[5]   in how many rounds leases end, one after the other; of each round
--           how many groups of leases end as plainly as can be: done, nothing to keep, nothing to emit; of each
--           group its queue, how many, their ids, their fences; and
--           how many other leases end; of each its id, its fence, its outcome as MessagePack
-- then      span (us), holder, limit of all, how many queues; of each its name and how many jobs are wanted
--
-- Gives {now, numbers of the leases that were lost (as they stood in the arguments), the fence of the first new
--        lease, from which those of the others count on,
--        for each queue how many were leased and, if these are fewer than wanted, how many wait at the door, and in
--        how many us the next becomes due (else -1),
--        for each job its id and its record,
--        for each job that has run before: its number, and 'attempt failures crashes'}.
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
local limited = redis.call('EXISTS', base .. 'limits') == 1

local function settle_slowly(n, id, fence, outcome)
    local j, run = leased(id, fence)
    if not j or not settle_one(j, run, outcome, released) then
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

-- Leases that end with nothing to keep or to do but a step of their batch, if they have one.  Those of one bundle and one
-- batch are of one sort: their runs differ only in their fences.  Gives the sort, or nil if there is more to the job.
local function sort_of(sorts, run, fence, id)
    local flag = run:sub(1, 1)
    if (flag ~= 'P' and flag ~= 'M') or run:find(fence .. '\n', 2, true) ~= 2 then
        return nil
    end
    local tail = run:sub(#fence + 2)
    local sort = sorts[flag .. tail]
    if not sort then
        sort = {flag = flag, tail = tail, bundle = tail:match('^\n(%d+)'), n = 0}
        if flag == 'M' then
            sort.batch, sort.born = made(id, redis.call('HGET', JOBS, id)).batch, tail:match('%.(%d+)\n')
        end
        sorts[flag .. tail] = sort
        sorts[#sorts + 1] = sort
    end
    return sort
end

local function settle_group()
    local queue, n = argument(), tonumber(argument())
    local running = of_queue(queue, 'running')
    local gone, n_gone, others = {}, 0, {}
    local sorts, sort = {}, nil
    for first = 1, n, CHUNK do
        local last = math.min(first + CHUNK - 1, n)
        local runs = redis.call('HMGET', running, unpack(ARGV, at + first, at + last))
        for k = first, last do
            local run, fence = runs[k - first + 1], ARGV[at + n + k]
            if not sort or run ~= sort.flag .. fence .. sort.tail then
                sort = run and not limited and sort_of(sorts, run, fence, ARGV[at + k])
            end
            if sort then
                n_gone = n_gone + 1
                gone[n_gone] = ARGV[at + k]
                sort.n = sort.n + 1
                sort.last = k
            else
                others[#others + 1] = k
            end
        end
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
        settle_slowly(number + k, ARGV[at + k], ARGV[at + n + k], {kind = 'done'})
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
        local id, fence = argument(), argument()
        settle_slowly(number, id, fence, cmsgpack.unpack(argument()))
    end
end
to_front(released)

-- --- what comes next ------------------------------------------------------------------------

local span, holder = tonumber(argument()), argument()
local limit = tonumber(argument())
local ruled = redis.call('EXISTS', base .. 'rules') == 1
-- A fence grows with the time as well: on a replica that took over and does not know the last leases, none of
-- its own may look like one of them.
local first_fence = math.max(tonumber(redis.call('GET', base .. 'fence') or 0) + 1, now)
-- All leases of one call are a bundle, until somebody renews some of them: they end together.
local bundle = whole(first_fence)
local since = '\n' .. bundle .. '\n' .. whole(now) .. '\n'
local function nth_time(attempt)
    -- A value of more than 64 bytes, as these digits make it, keeps Redis from packing the hash into one string
    -- that every command would walk through: a third of the time of an exchange.
    return since .. format('%016d', attempt) .. '\n' .. holder
end
local first_time = nth_time(1)
local PLAIN, MEMBER = string.byte('P'), string.byte('M')

-- What has been leased: `taken` and `known` are the answer, `runs` is what is written of one queue.
local taken, known, total = {}, {}, 0
local runs, n_new = {}, 0

local function start(id, record, flag, run)
    taken[2 * total + 1] = id
    taken[2 * total + 2] = record
    runs[2 * n_new + 1] = id
    runs[2 * n_new + 2] = flag .. whole(first_fence + total) .. run
    total = total + 1
    n_new = n_new + 1
end

local function start_again(id, record, s)
    local attempt = (s.attempts or 0) + 1
    start(id, record, 'X', nth_time(attempt))
    known[#known + 1] = total
    known[#known + 1] = attempt .. ' ' .. (s.failures or 0) .. ' ' .. (s.crashes or 0)
end

local function write_runs(queue)
    in_chunks('HSET', of_queue(queue, 'running'), runs)
    runs, n_new = {}, 0
end

-- Where there is more to a job than its body: gives false if it has ended instead of starting.
local function may_start(j)
    if j.s.expires and tonumber(j.s.expires) <= now then
        expire(j)
        return false
    end
    if j.until_started then
        free_key(j)
    end
    if j.s.expires then
        redis.call('ZREM', base .. 'expiring', j.id)
    end
    move_member(j, waits_as(j), 'running')
    return true
end

-- The batch of a member that is plain in all other ways, with how many are taken of it.  They follow one another, mostly:
-- see put_members.lua for how their records begin.
local batches, the_last = {}, nil

local function batch_of(id, record)
    local meta = record:find('\n{', 1, true)
    if the_last and record:find(the_last.mark, meta, true) == meta then
        return the_last
    end
    local j = made(id, record)
    local mark = '\n{"born":' .. whole(j.born) .. ','
    the_last = batches[mark]
    if not the_last then
        local counts = redis.call('HGET', batch_key(j.batch), 'born') == whole(j.born)
        the_last = {mark = mark, batch = j.batch, n = 0, flag = counts and 'M' or 'X', counts = counts,
                    run = since .. format('%016d', 1) .. (counts and '.' .. whole(j.born) or '') .. '\n' .. holder}
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

-- Jobs that are what they were when they were put.
local function take_fresh(ids)
    local records = redis.call('HMGET', JOBS, unpack(ids))
    local n = 0
    for k = 1, #ids do
        local id, record = ids[k], records[k]
        if record and record:byte() == PLAIN then
            start(id, record, 'P', first_time)
            n = n + 1
        elseif record and record:byte() == MEMBER then
            local of = batch_of(id, record)
            start(id, record, of.flag, of.run)
            of.n = of.n + 1
            n = n + 1
        elseif record and may_start(made(id, record)) then
            start(id, record, 'X', first_time)
            n = n + 1
        end
    end
    return n
end

-- Jobs about which something may have changed.
local function take_changed(id)
    local j = load(id)
    if not j or not may_start(j) then
        return 0
    end
    start_again(id, redis.call('HGET', JOBS, id), j.s)
    return 1
end

-- The id of an entry in a list, and whether the job has changed; nothing if the entry was struck out.
local function standing(entry, void)
    if redis.call('SREM', void, entry) == 1 then
        return nil
    end
    local id = entry:match('^(.*)\n')
    return id or entry, id ~= nil
end

-- Take the jobs of these entries, in their order: fresh ones in one go where they stand together.
local function take_entries(entries, void)
    local struck = redis.call('EXISTS', void) == 1
    local n, fresh = 0, {}
    for k = 1, #entries do
        local entry = entries[k]
        if not struck and not entry:find('\n', 1, true) then
            fresh[#fresh + 1] = entry
        else
            local id, changed = standing(entry, void)
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

-- Without rules: whole pieces of the line, from the front.
local function take_from(queue, priority, want)
    local front = of_queue(queue, 'front')
    local line, void = of_queue(queue, 'line:' .. priority), of_queue(queue, 'void:' .. priority)
    local n = 0
    if redis.call('EXISTS', front) == 1 then
        local lowest, highest = places(priority)
        while n < want do
            local ids = redis.call('ZRANGEBYSCORE', front, lowest, highest, 'LIMIT', 0, math.min(want - n, CHUNK))
            if #ids == 0 then
                break
            end
            redis.call('ZREM', front, unpack(ids))
            for _, id in ipairs(ids) do
                n = n + take_changed(id)
            end
        end
    end
    while n < want do
        local entries = redis.call('LPOP', line, math.min(want - n, CHUNK))
        if not entries then
            redis.call('ZREM', of_queue(queue, 'ranks'), priority)
            break
        end
        n = n + take_entries(entries, void)
    end
    return n
end

-- --- with rules -----------------------------------------------------------------------------

-- Has a limit kept something back in this queue?  Whose end makes room may be elsewhere, and nobody tells of it.
local limited = false
local LOOK_AGAIN_US = 1000000

-- How many more may run because of the rules on one queue, task or key.
local function room(scope, name)
    local rules = redis.call('HMGET', base .. 'rules', 'pause:' .. scope .. ':' .. name, 'block:' .. scope .. ':' .. name,
                             'limit:' .. scope .. ':' .. name)
    if rules[1] or rules[2] then
        return 0
    end
    if not rules[3] then
        return math.huge
    end
    local running
    if scope == 'queue' then
        running = redis.call('HLEN', of_queue(name, 'running')) + n_new
    else
        running = tonumber(redis.call('HGET', base .. 'limits', scope .. ':' .. name) or 0)
    end
    local left = tonumber(rules[3]) - running
    limited = limited or left <= 0
    return left
end

-- Let those stand in line again, in their old places, whose rule keeps them back no more; gives how many.
local function unhold(queue, want)
    local holds, front = of_queue(queue, 'holds'), of_queue(queue, 'front')
    local n = 0
    for _, group in ipairs(redis.call('SMEMBERS', holds)) do
        local scope, name = group:match('^(%a+):(.*)$')
        local most = math.min(want, room(scope, name))
        if most > 0 then
            local held = of_queue(queue, 'held:' .. group)
            local back = redis.call('ZRANGE', held, 0, most - 1, 'WITHSCORES')
            for k = 1, #back, 2 do
                redis.call('ZREM', held, back[k])
                redis.call('ZADD', front, back[k + 1], back[k])
                n = n + 1
            end
            if redis.call('EXISTS', held) == 0 then
                redis.call('SREM', holds, group)
            end
        end
    end
    return n
end

local function hold(j, number, scope, name)
    local group = scope .. ':' .. name
    number = number or whole(place(j, redis.call('HINCRBY', of_queue(j.queue, 'tally'), 'back', 1)))
    redis.call('SADD', of_queue(j.queue, 'holds'), group)
    redis.call('ZADD', of_queue(j.queue, 'held:' .. group), number, j.id)
    j.s.entry = nil
    save(j)
end

-- The next of one line: its id, and its place if it is before the list.
local function next_of_line(queue, priority)
    local front = of_queue(queue, 'front')
    local lowest, highest = places(priority)
    local first = redis.call('ZRANGEBYSCORE', front, lowest, highest, 'WITHSCORES', 'LIMIT', 0, 1)
    if #first > 0 then
        redis.call('ZREM', front, first[1])
        return first[1], first[2]
    end
    while true do
        local entry = redis.call('LPOP', of_queue(queue, 'line:' .. priority))
        if not entry then
            return nil
        end
        local id = standing(entry, of_queue(queue, 'void:' .. priority))
        if id then
            return id
        end
    end
end

local function next_of(queue)
    for _, priority in ipairs(redis.call('ZRANGE', of_queue(queue, 'ranks'), 0, -1)) do
        local id, number = next_of_line(queue, priority)
        if id then
            return id, number
        end
    end
    return nil
end

-- Start this job, unless it has expired or a rule keeps it back: then false.
local function start_or_hold(j, number)
    if j.s.expires and tonumber(j.s.expires) <= now then
        expire(j)
        return false
    end
    if room('task', j.task) <= 0 then
        hold(j, number, 'task', j.task)
        return false
    end
    if j.key and room('key', j.key) <= 0 then
        hold(j, number, 'key', j.key)
        return false
    end
    may_start(j)
    start_again(j.id, redis.call('HGET', JOBS, j.id), j.s)
    count_run(j, 1)
    return true
end

-- One by one: each is taken, has expired, or is set aside with its place.  Where one that was let go is not taken
-- after all, the next of those held must stand in line before we go on.
local function take_ruled(queue, want)
    local n = 0
    want = math.min(want, room('queue', queue))
    if want <= 0 then
        return 0
    end
    local unheld = unhold(queue, want)
    while n < want do
        local id, number = next_of(queue)
        if not id then
            break
        end
        local j = load(id)
        if j and start_or_hold(j, number) then
            n = n + 1
        elseif unheld > 0 then
            unheld = unheld + unhold(queue, want - n)
        end
    end
    return n
end

-- --- all of them ----------------------------------------------------------------------------

local function take(queue, want)
    if redis.call('EXISTS', of_queue(queue, 'scheduled')) == 1 then
        promote(queue, CHUNK)
    end
    local n = 0
    if ruled or redis.call('EXISTS', of_queue(queue, 'holds')) == 1 then
        n = take_ruled(queue, want)
    else
        for _, priority in ipairs(redis.call('ZRANGE', of_queue(queue, 'ranks'), 0, -1)) do
            n = n + take_from(queue, priority, want - n)
            if n >= want then
                break
            end
        end
    end
    write_runs(queue)
    return n
end

-- In how many microseconds to look again, if nobody says so before; -1 means never.
local function due_in(queue)
    local due = redis.call('ZRANGE', of_queue(queue, 'scheduled'), 0, 0, 'WITHSCORES')[2]
    local left = due and tonumber(due) - now
    if limited then
        left = math.min(left or math.huge, LOOK_AGAIN_US)
    end
    return left or -1
end

local per_queue = {}
for _ = 1, tonumber(argument()) do
    local queue, want = argument(), tonumber(argument())
    want = math.min(want, limit - total)
    limited = false
    local n = want > 0 and take(queue, want) or 0
    per_queue[#per_queue + 1] = n
    per_queue[#per_queue + 1] = n < want and redis.call('LLEN', of_queue(queue, 'incoming')) or 0
    per_queue[#per_queue + 1] = n < want and due_in(queue) or -1
end
move_members()
if total > 0 then
    redis.call('SET', base .. 'fence', whole(first_fence + total - 1))
    redis.call('HSET', BUNDLES, bundle, total)
    redis.call('ZADD', LEASES, whole(now + span), bundle)
end
tell_woken()
return {whole(now), lost, bundle, per_queue, taken, known}
