-- Records: small named values with versions.  A kind has a hash of them, their names in order, and their times.

local function kind_key(what, kind)
    return base .. what .. ':' .. kind
end

local function remove_record(kind, name)
    redis.call('HDEL', kind_key('records', kind), name)
    redis.call('ZREM', kind_key('record_names', kind), name)
    redis.call('ZREM', kind_key('record_times', kind), name)
    redis.call('ZREM', base .. 'record_ends', kind .. '\n' .. name)
    if redis.call('EXISTS', kind_key('records', kind)) == 0 then
        redis.call('ZREM', base .. 'record_kinds', kind)
    end
end

-- The record as {version, value, at, expires}; nil where there is none, or it has expired.  One that cannot be read
-- is set aside.
local function record_of(kind, name)
    local packed = redis.call('HGET', kind_key('records', kind), name)
    local record = packed and unpacked(packed)
    if packed and not (
        record and record.version and is_whole(record.version, 0, 2 ^ 53) and type(record.value) == 'string'
        and is_moment(record.at) and is_moment(record.expires)
    ) then
        redis.call('HSET', base .. 'broken', kind .. '\n' .. name, packed)
        remove_record(kind, name)
        return nil
    end
    if record and not (record.expires and record.expires <= now) then
        return record
    end
    return nil
end

local function store_record(kind, name, record)
    if redis.call('HSET', kind_key('records', kind), name, cmsgpack.pack(record)) == 1 then  -- a new one
        redis.call('ZADD', kind_key('record_names', kind), 0, name)
        redis.call('ZADD', base .. 'record_kinds', 0, kind)
    end
    if record.at then
        redis.call('ZADD', kind_key('record_times', kind), whole(record.at), name)
    else
        redis.call('ZREM', kind_key('record_times', kind), name)
    end
    if record.expires then
        redis.call('ZADD', base .. 'record_ends', whole(record.expires), kind .. '\n' .. name)
    else
        redis.call('ZREM', base .. 'record_ends', kind .. '\n' .. name)
    end
end

-- None comes back, also not when a record was removed and the clock was set back.
local function next_version()
    local version = math.max(tonumber(redis.call('GET', base .. 'record_version') or 0) + 1, now)
    redis.call('SET', base .. 'record_version', whole(version))
    return version
end

-- Forget what has expired, a bite of it; gives how many.
local function forget_records(most)
    local over = redis.call('ZRANGEBYSCORE', base .. 'record_ends', '-inf', whole(now), 'LIMIT', 0, most)
    for _, place in ipairs(over) do
        remove_record(place:match('^([^\n]*)\n(.*)$'))
    end
    local tokens = redis.call('ZRANGEBYSCORE', base .. 'swap_ends', '-inf', whole(now), 'LIMIT', 0, most)
    if #tokens > 0 then
        in_chunks('HDEL', base .. 'swaps', tokens)
        in_chunks('ZREM', base .. 'swap_ends', tokens)
    end
    return #over
end

-- The kinds of which some records are due, and when the next of the others becomes so.
local function kinds_due()
    local kinds, next_at = {}, nil
    for _, kind in ipairs(redis.call('ZRANGE', base .. 'record_kinds', 0, -1)) do
        local times = kind_key('record_times', kind)
        for _, name in ipairs(redis.call('ZRANGEBYSCORE', times, '-inf', whole(now), 'LIMIT', 0, 1)) do
            if record_of(kind, name) then
                kinds[#kinds + 1] = kind
            end
        end
        local later = redis.call('ZRANGEBYSCORE', times, '(' .. whole(now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
        if later[2] and (not next_at or tonumber(later[2]) < next_at) then
            next_at = tonumber(later[2])
        end
    end
    return kinds, next_at
end
