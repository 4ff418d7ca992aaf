-- What a put asks before it writes anything, because what a script has written stays written.

local function known_token(token)
    local until_us = token ~= '' and redis.call('ZSCORE', base .. 'tokens', token)
    return until_us and tonumber(until_us) > now
end

local function remember_token(token)
    if token ~= '' then
        redis.call('ZADD', base .. 'tokens', whole(now + DAY_US), token)
    end
end

-- Those of these ids that are taken, as a set.
local function ids_in_use(ids)
    local taken = {}
    local known = redis.call('EXISTS', base .. 'known') == 1
    for first = 1, #ids, CHUNK do
        local last = math.min(first + CHUNK - 1, #ids)
        local jobs = redis.call('HMGET', JOBS, unpack(ids, first, last))
        local scores = known and redis.call('ZMSCORE', base .. 'known', unpack(ids, first, last))
        for k = first, last do
            local score = scores and scores[k - first + 1]
            if jobs[k - first + 1] or (score and tonumber(score) > now) then
                taken[ids[k]] = true
            end
        end
    end
    return taken
end

-- How many jobs of a queue wait, whatever for: nobody has to count them.
local function waiting_in(queue)
    local tally, r = redis.call('HMGET', of_queue(queue, 'tally'), 'put', 'deleted'), removal_of('queue:' .. queue)
    return redis.number_or(0, tally[1]) - redis.number_or(0, tally[2]) - (r and r.left or 0)
        - redis.call('HLEN', of_queue(queue, 'running'))
        - redis.call('ZCARD', of_queue(queue, 'done')) - redis.call('ZCARD', of_queue(queue, 'dead'))
        - redis.call('ZCARD', of_queue(queue, 'cancelled'))
end

-- How many of them stand in line.
local function standing_in(queue)
    local n = redis.call('ZCARD', of_queue(queue, 'front'))
    for _, priority in ipairs(redis.call('ZRANGE', of_queue(queue, 'ranks'), 0, -1)) do
        n = n + redis.call('LLEN', of_queue(queue, 'line:' .. priority))
              + redis.call('LLEN', of_queue(queue, 'tidied:' .. priority))
              - redis.call('SCARD', of_queue(queue, 'void:' .. priority))
    end
    return n
end

-- An error where a queue has no room for what is coming to it.
local function check_room(coming)
    if redis.call('EXISTS', base .. 'caps') == 0 then
        return nil
    end
    for queue, n in pairs(coming) do
        local cap = redis.call('HGET', base .. 'caps', queue)
        local would_hold = cap and not is_over('cap:queue:' .. queue) and waiting_in(queue) + n
        if would_hold and would_hold > tonumber(cap) then
            return redis.error_reply(string.format('PROPOLISFULL %s %d %s', cap, would_hold, queue))
        end
    end
    return nil
end

-- Of jobs that come together with something else: those that are new, and how many come to each queue.  Where an app
-- has shards all shards were asked before, and the rest is found out on their way, as for what is emitted.
local function fresh_of(puts)
    local fresh, coming, ids, keys = {}, {}, {}, {}
    if send then
        return puts, coming
    end
    for _, d in ipairs(puts) do
        local taken = ids[d.id] or used(d.id)
            or (d.unique and (keys[d.unique] or redis.call('HEXISTS', base .. 'unique', d.unique) == 1))
        if not taken then
            ids[d.id] = true
            if d.unique then
                keys[d.unique] = true
            end
            coming[d.queue] = (coming[d.queue] or 0) + 1
            fresh[#fresh + 1] = d
        end
    end
    return fresh, coming
end

local function put_fresh(fresh)
    for _, d in ipairs(fresh) do
        if send then
            travel(d)
        else
            add(d)
        end
    end
end
