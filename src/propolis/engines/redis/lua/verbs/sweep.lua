-- with: base jobs batches settling record_keeping removing
-- Do what time asks for: promote, reap (T8), expire (T11), forget.  Each kind of work at most ARGV[5] times;
-- ARGV[6] is how many dead jobs of each queue are kept, or ''; ARGV[7] the name of the sweeper, or ''.
--
-- Gives how many were promoted, reaped, expired and removed, now, when there is something to do next (us, or ''), when
-- the sweeper should come back (us, or ''), the queues at whose doors something waits, the kinds of records of which
-- some are due, the ids of the jobs that it ended, the lines in which jobs are parked, as queue and task,
-- by which numbers those that it ended are in order with those of other shards, and what was set aside because it could
-- not be read, with the reasons.

redis.call('DEL', base .. 'nothing')  -- so that maxmemory does not refuse us: see exchange.lua

local most, dead_max = tonumber(ARGV[5]), tonumber(ARGV[6])
local promoted, removed = 0, 0
local doors = {}
local undone = false  -- is there perhaps more of one kind than we may do?

local function past(key)
    local found = redis.call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, most)
    undone = undone or #found >= most
    return found
end

-- When the first job that is scheduled in a queue is due; `timed` knows it then, as it does not if jobs were removed.
local function timed(queue)
    local first = redis.call('ZRANGE', of_queue(queue, 'scheduled'), 0, 0, 'WITHSCORES')[2]
    if first then
        redis.call('ZADD', base .. 'timed', first, queue)
    else
        redis.call('ZREM', base .. 'timed', queue)
    end
    return tonumber(first)
end

-- --- a clock that went back -----------------------------------------------------------------

-- A bite of the leases that would end later than their spans from now, in the order of their ends: they end one span from
-- now.  Whatever ends with the last of a bite belongs to it.
local function shorten_some(after)
    local some = redis.call('ZRANGEBYSCORE', LEASES, '(' .. after, '+inf', 'WITHSCORES', 'LIMIT', 0, most)
    local upto = #some == 2 * most and some[#some]
    if upto then
        some = redis.call('ZRANGEBYSCORE', LEASES, '(' .. after, upto, 'WITHSCORES')
    end
    for n = 1, #some, 2 do
        local span = span_of_later(some[n])
        if span and tonumber(some[n + 1]) > now + span then
            redis.call('ZADD', LEASES, whole(now + span), some[n])
        end
    end
    if upto then
        redis.call('SET', base .. 'shortening', upto)
        undone = true
    else
        redis.call('DEL', base .. 'shortening')
    end
end

-- A job that waits for a time that was counted from a moment, and not given, waits no longer for it than before.
local function shift_job(queue, member)
    local j = load(scheduled_id(member), queue)
    local by = j and not j.s.exact and behind - (j.s.behind or 0) or 0
    if by > 0 then
        j.s.due, j.s.behind = whole(math.max(now, tonumber(j.s.due or j.put) - by)), behind
        redis.call('ZADD', of_queue(queue, 'scheduled'), j.s.due, member)
        redis.call('ZADD', base .. 'timed', 'LT', j.s.due, queue)
        save(j)
    end
end

-- A bite of all queues in turn: `shifting` knows the last one, and where to go on in it.
local function shift_some(at)
    local queue, cursor = at:match('^(.*)\n(%d+)$')
    local left = most
    while left > 0 do
        if cursor == '0' then
            queue = redis.call('ZRANGEBYLEX', base .. 'queues', queue == '' and '-' or '(' .. queue, '+', 'LIMIT', 0, 1)[1]
            if not queue then
                redis.call('DEL', base .. 'shifting')
                return
            end
        end
        local found = redis.call('ZSCAN', of_queue(queue, 'scheduled'), cursor, 'COUNT', 100)
        for n = 1, #found[2], 2 do
            shift_job(queue, found[2][n])
        end
        cursor, left = found[1], left - 1 - #found[2] / 2
    end
    redis.call('SET', base .. 'shifting', queue .. '\n' .. cursor)
    undone = true
end

if redis.call('EXISTS', JOBS, LEASES) > 0 then
    clock_went_back()
end
local shortening, shifting = redis.call('GET', base .. 'shortening'), redis.call('GET', base .. 'shifting')
if shortening then
    shorten_some(shortening)
end
if shifting then
    shift_some(shifting)
end

for _, rule in ipairs(past(base .. 'rule_ends')) do
    forget_rule(rule)
end

-- --- what is due ----------------------------------------------------------------------------

-- There may be many queues: only those are looked into in which something is scheduled for now, or was.
for _, queue in ipairs(past(base .. 'timed')) do
    local n = promote(queue, most - promoted)
    if n > 0 then
        promoted = promoted + n
        wake(queue)
    end
    timed(queue)
end

-- No news comes of pushes at a door: a bite of them is looked at in turn, the first ones after the last.
local DOORS = 250
local function look_at_doors()
    local after = redis.call('GET', base .. 'door')
    local queues = redis.call('ZRANGEBYLEX', base .. 'queues', after and '(' .. after or '-', '+', 'LIMIT', 0, DOORS)
    local rest = after and redis.call('ZRANGEBYLEX', base .. 'queues', '-', '[' .. after, 'LIMIT', 0, DOORS - #queues) or {}
    for _, queue in ipairs(rest) do
        queues[#queues + 1] = queue
    end
    local names = {}
    for n, queue in ipairs(queues) do
        names[n] = of_queue(queue, 'incoming')
    end
    for n = 1, #names > 0 and redis.call('EXISTS', unpack(names)) > 0 and #names or 0 do
        if redis.call('EXISTS', names[n]) == 1 then
            doors[#doors + 1] = queues[n]
        end
    end
    if #queues == DOORS then
        redis.call('SET', base .. 'door', queues[DOORS])
    elseif after then
        redis.call('DEL', base .. 'door')
    end
end

look_at_doors()

-- Leases that are over, in the order in which they were given: a bite of them.  What a bundle has left is for the next
-- sweep.
local lost = {}
local over, left = past(LEASES), most
for _, bundle in ipairs(over) do
    local rest = each_lease(bundle, left, function(queue, id, run)
        left = left - 1
        local j = load(id, queue)
        if j and j.queue == queue then
            lost[#lost + 1] = {j = j, run = read_run(run)}
        else
            redis.call('HDEL', of_queue(queue, 'running'), id)
        end
    end)
    if #rest > 0 then
        redis.call('HSET', BUNDLED, bundle, cmsgpack.pack({0, rest}))
        undone = true
        break
    end
    forget_bundle(bundle)
end
table.sort(lost, function(one, other)
    local a, b = tonumber(one.run.fence), tonumber(other.run.fence)
    return a < b or (a == b and one.j.seq < other.j.seq)
end)
undone = undone or promoted >= most
local released, ended, ranks = {}, {}, {}
for _, it in ipairs(lost) do
    local n = #released
    with_care(it.j.id, it.j.queue, reap_one, it.j, it.run, released)
    if #released == n then
        ended[#ended + 1], ranks[#ranks + 1] = it.j.id, whole(it.j.seq)
    end
end
to_front(released)

local expired = {}
for _, id in ipairs(past(base .. 'expiring')) do
    local j = load(id)
    redis.call('ZREM', base .. 'expiring', id)
    if j then
        expired[#expired + 1] = j
    end
end
table.sort(expired, function(one, other) return one.seq < other.seq end)
for _, j in ipairs(expired) do
    with_care(j.id, j.queue, unplace, j)
    expire(j)
    ended[#ended + 1], ranks[#ranks + 1] = j.id, whole(2 ^ 52 + j.seq)
end

local function remove(ids)
    for _, id in ipairs(ids) do
        local j = load(id)
        if j then
            forget(j)
            removed = removed + 1
        end
    end
end

local old = past(base .. 'keep')
remove(old)
-- Of dead jobs that are too many, the oldest.
local crowded = dead_max and redis.call('ZRANGEBYSCORE', base .. 'deaths', '(' .. dead_max, '+inf', 'LIMIT', 0, most) or {}
local spare = most
for _, queue in ipairs(crowded) do
    local dead = of_queue(queue, 'dead')
    local excess = redis.call('ZCARD', dead) - dead_max
    undone = undone or excess > spare
    local ids = {}
    for n, member in ipairs(redis.call('ZRANGE', dead, 0, math.min(excess, spare) - 1)) do
        ids[n] = scheduled_id(member)
    end
    remove(ids)
    count_dead(queue)
    spare = spare - #ids
    if spare <= 0 then
        break
    end
end
local refilled = past(base .. 'refills')
undone = not see_to_limits(refilled, most) or undone
-- What is too much for one call to remove.
local rest = redis.call('HSCAN', REMOVALS, 0, 'COUNT', 10)[2]
for n = 1, #rest, 2 do
    local r = unpacked(rest[n + 1])
    if r and r.keys then  -- else another shard sees to it
        local gone, more = go_on(rest[n], r, most)
        removed = removed + gone
        undone = undone or more
    end
end
for _, what in ipairs({'known', 'tokens', 'claims', 'buckets'}) do
    in_chunks('ZREM', base .. what, past(base .. what))
end
for _, batch in ipairs(past(base .. 'batch_ends')) do
    local b = load_batch(batch)
    remove_batch(batch)
    if b and not b.finished then
        step_parent(b, batch, 'cancelled')
    end
end

-- --- what comes next ------------------------------------------------------------------------

local next_us
local function consider(moment)
    if moment and moment > now and not (next_us and next_us < moment) then
        next_us = moment
    end
end

local function first_of(key)
    local first = redis.call('ZRANGEBYSCORE', key, '(' .. whole(now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
    return tonumber(first[2]), first[1]
end

consider((first_of(LEASES)))
consider((first_of(base .. 'rule_ends')))
consider((first_of(base .. 'refills')))
local due, queue = first_of(base .. 'timed')
while due and timed(queue) ~= due do
    due, queue = first_of(base .. 'timed')
end
consider(due)
removed = removed + forget_records(most)
local records_due, next_record = kinds_due()
consider(next_record)

-- When `sweeper`, which has just swept, should come back: after some seconds where it is alone, and in a fleet when the
-- others have been, so that there are ten sweeps in six seconds together, evenly; in one of the next free moments by
-- chance, so that those of one machine, which may die together, do not stay together.  A sweeper that is new, or sees
-- that another has not come, does not rely on the others, which may all be gone, and comes between them.  The last to
-- come before something is to be done comes back for that; if it does not, the next one finds it.  A sweeper that has
-- left something undone comes back at once, and one that is late for long is gone.
local AT_ONCE_US, EACH_US, ALONE_US = 10000, 600000, 3000000
local SOON_US, LATE_US, LONGEST_US = 10000000, 30000000, 120000000
local SWEEPERS = base .. 'sweepers'

-- The nth free moment from this one on, at a distance from all others; infinite if that is later than `within` after
-- it.
local function free_moment(from, apart, within, nth)
    local before = from - apart
    local others = redis.call('ZRANGEBYSCORE', SWEEPERS, whole(before), '+inf', 'WITHSCORES')
    for k = 2, #others, 2 do
        local n = math.max(0, math.floor((tonumber(others[k]) - before) / apart) - 1)
        if n >= nth then
            break
        end
        nth = nth - n
        before = tonumber(others[k])
    end
    before = before + nth * apart
    return before <= from + within and before or math.huge
end

local function come_back(sweeper)
    local is_new = redis.call('ZREM', SWEEPERS, sweeper) == 0
    redis.call('ZREMRANGEBYSCORE', SWEEPERS, '-inf', whole(now - LATE_US))
    redis.call('ZREMRANGEBYSCORE', SWEEPERS, whole(now + 2 * LONGEST_US), '+inf')
    local chance = tonumber(redis.sha1hex(sweeper .. whole(now)):sub(1, 8), 16) / 2 ^ 32
    local nth = 1 + math.floor(chance * redis.call('ZCARD', SWEEPERS) / 4)
    local back = free_moment(now + ALONE_US, EACH_US, LONGEST_US, nth)
    if is_new or redis.call('ZCOUNT', SWEEPERS, '-inf', whole(now - 500000)) > 0 then
        back = math.min(back, free_moment(now + ALONE_US, EACH_US / 2, SOON_US, 1))
    end
    if back == math.huge then
        back = now + math.floor(LONGEST_US * (0.8 + 0.4 * chance))
    end
    local soonest = redis.call('ZRANGEBYSCORE', SWEEPERS, '(' .. whole(now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
    if next_us and next_us < back and (not soonest or next_us <= tonumber(soonest)) then
        back = next_us
    end
    if undone then
        back = now + AT_ONCE_US
    end
    redis.call('ZADD', SWEEPERS, whole(back), sweeper)
    return whole(back)
end

publish_woken()
return {
    promoted, #lost, #expired, removed, whole(now), next_us and whole(next_us) or '',
    ARGV[7] ~= '' and come_back(ARGV[7]) or '', doors, records_due, ended,
    redis.call('ZRANGE', base .. 'parked', 0, 99), ranks, redis.call('HSCAN', base .. 'broken', 0, 'COUNT', 10)[2],
}
