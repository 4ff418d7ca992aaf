-- with: base jobs batches settling
-- Do what time asks for: promote, reap (T8), expire (T11), forget.  Each kind of work at most ARGV[5] times;
-- ARGV[6] is how many dead jobs of each queue are kept, or ''; ARGV[7] the name of the one who sweeps, or ''.
--
-- Gives how many were promoted, reaped, expired and removed, now, when there is something to do next (us, or ''), 1 if
-- a schedule is due, when the one who sweeps should come back (us, or ''), and the queues at whose doors
-- something waits.

redis.call('DEL', base .. 'nothing')  -- so that maxmemory does not refuse us: see exchange.lua

local most, dead_max = tonumber(ARGV[5]), tonumber(ARGV[6])
local queues = redis.call('ZRANGE', base .. 'queues', 0, -1)
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

-- There may be many queues: only those are looked into in which something is scheduled for now, or was.
for _, queue in ipairs(past(base .. 'timed')) do
    local n = promote(queue, most - promoted)
    if n > 0 then
        promoted = promoted + n
        wake(queue)
    end
    timed(queue)
end

-- Nobody tells us who comes to a door.
for first = 1, #queues, CHUNK do
    local last = math.min(first + CHUNK - 1, #queues)
    local names = {}
    for n = first, last do
        names[#names + 1] = of_queue(queues[n], 'incoming')
    end
    for n = first, redis.call('EXISTS', unpack(names)) > 0 and last or 0 do
        if redis.call('EXISTS', names[n - first + 1]) == 1 then
            doors[#doors + 1] = queues[n]
        end
    end
end

-- The leases of these bundles, in the order in which they were given.  Those that run are looked through, because
-- a bundle does not know its jobs; but only when one was lost.
local function leases_of(bundles)
    local over, found = {}, {}
    for _, bundle in ipairs(bundles) do
        over[bundle] = true
    end
    for _, queue in ipairs(#bundles > 0 and queues or {}) do
        local running = redis.call('HGETALL', of_queue(queue, 'running'))
        for n = 1, #running, 2 do
            local fence, bundle = running[n + 1]:match('^.(%d+)\n(%d+)')
            if over[bundle] then
                found[#found + 1] = {id = running[n], fence = tonumber(fence)}
            end
        end
    end
    table.sort(found, function(one, other) return one.fence < other.fence end)
    return found
end

local lost = {}
for _, lease in ipairs(leases_of(past(LEASES))) do
    local j = #lost < most and load(lease.id)
    if j then
        lost[#lost + 1] = {j = j, run = run_of(j)}
    end
end
undone = undone or promoted >= most or #lost >= most
local released = {}
for _, it in ipairs(lost) do
    reap_one(it.j, it.run, released)
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
    unplace(j)
    expire(j)
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
if dead_max then
    for _, queue in ipairs(queues) do
        local shelf = of_queue(queue, 'dead')
        local excess = redis.call('ZCARD', shelf) - dead_max
        undone = undone or excess > most
        excess = math.min(most, excess)
        if excess > 0 then
            local ids = {}
            for _, member in ipairs(redis.call('ZRANGE', shelf, 0, excess - 1)) do
                ids[#ids + 1] = scheduled_id(member)
            end
            remove(ids)
        end
    end
end
for _, what in ipairs({'known', 'tokens', 'claims'}) do
    redis.call('ZREMRANGEBYSCORE', base .. what, '-inf', now)
end
for _, batch in ipairs(past(base .. 'batch_ends')) do
    local b = batch_facts(batch)
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
local due, queue = first_of(base .. 'timed')
while due and timed(queue) ~= due do
    due, queue = first_of(base .. 'timed')
end
consider(due)
local schedules_due = 0
for _, packed in ipairs(redis.call('HVALS', base .. 'schedules')) do
    local schedule = cmsgpack.unpack(packed)
    if not schedule.paused then
        consider(tonumber(schedule.next))
        if tonumber(schedule.next) <= now then
            schedules_due = 1
        end
    end
end

-- When `who`, which has just swept, should come back: after some seconds where it is alone, and in a fleet when the others
-- have been, so that there are ten sweeps in six seconds together, evenly; in one of the next free moments by chance, so
-- that those of one machine, which may die together, do not stay together.  Whoever is new, or sees that somebody has not
-- come, does not rely on the others, who may all be gone, and comes between them.  The last to come before something is to
-- be done comes back for that; if it does not, the next one finds it.  Whoever has left something undone comes back at
-- once, and whoever is late for long is gone.
local AT_ONCE_US, ALONE_US, EACH_US, SOON_US, LATE_US, LONGEST_US = 10000, 3000000, 600000, 10000000, 30000000, 120000000
local SWEEPERS = base .. 'sweepers'

-- The nth free moment from this one on, at a distance from all others; infinite if that is later than `within` after it.
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

local function come_back(who)
    local is_new = redis.call('ZREM', SWEEPERS, who) == 0
    redis.call('ZREMRANGEBYSCORE', SWEEPERS, '-inf', whole(now - LATE_US))
    redis.call('ZREMRANGEBYSCORE', SWEEPERS, whole(now + 2 * LONGEST_US), '+inf')
    local chance = tonumber(redis.sha1hex(who .. whole(now)):sub(1, 8), 16) / 2 ^ 32
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
    redis.call('ZADD', SWEEPERS, whole(back), who)
    return whole(back)
end

tell_woken()
return {
    promoted, #lost, #expired, removed, whole(now), next_us and whole(next_us) or '', schedules_due,
    ARGV[7] ~= '' and come_back(ARGV[7]) or '', doors,
}
