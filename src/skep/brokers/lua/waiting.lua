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

-- How many jobs of a queue wait: in line, set aside by a rule, and for their time.
local function waiting_in(queue)
    local held, ready = 0, redis.call('ZCARD', of_queue(queue, 'front'))
    for _, priority in ipairs(redis.call('ZRANGE', of_queue(queue, 'ranks'), 0, -1)) do
        ready = ready + redis.call('LLEN', of_queue(queue, 'line:' .. priority))
                      - redis.call('SCARD', of_queue(queue, 'void:' .. priority))
    end
    for _, group in ipairs(redis.call('SMEMBERS', of_queue(queue, 'holds'))) do
        held = held + redis.call('ZCARD', of_queue(queue, 'held:' .. group))
    end
    return ready, held, redis.call('ZCARD', of_queue(queue, 'scheduled'))
end

-- An error where a queue has no room for what is coming to it.
local function check_room(coming)
    if redis.call('EXISTS', base .. 'caps') == 0 then
        return nil
    end
    for queue, n in pairs(coming) do
        local cap = redis.call('HGET', base .. 'caps', queue)
        if cap then
            local ready, held, scheduled = waiting_in(queue)
            if ready + held + scheduled + n > tonumber(cap) then
                return redis.error_reply('SKEPFULL ' .. cap .. ' ' .. queue)
            end
        end
    end
    return nil
end
