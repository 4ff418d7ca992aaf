-- What every script begins with: where the keys are, what time it is, how a job is read and written.
--
-- KEYS[1]  what the keys of everything but the queues begin with; it also says which slot this is
-- ARGV[1]  what the keys of the queues begin with
-- ARGV[2]  now in microseconds since 1970, for tests; '' means the server's own clock
-- ARGV[3]  for how many microseconds dead jobs are kept if nobody says so
-- ARGV[4]  the same for cancelled ones
--
-- The key layout is described in redis.py.  Lua has only doubles: they hold microseconds exactly until the
-- year 2255, but `..` does not write them so: hence `whole`.

local base, root = KEYS[1], ARGV[1]
local dead_us, cancelled_us = tonumber(ARGV[3]), tonumber(ARGV[4])
local now = tonumber(ARGV[2])
if not now then
    local time = redis.call('TIME')
    now = time[1] * 1000000 + time[2]
end
local DAY_US = 86400000000
local CHUNK = 1000  -- how many arguments go into one command: unpack() can take 8,000

-- Where an app is spread over homes: the number of this one, how something is sent to another one, how a draft finds
-- its way (spread.lua, travelling.lua).  On one server there are no homes, and all of this is nil.
local me, send, travel

local function elsewhere(home)
    return home and home ~= me
end

local JOBS, STATE, LEASES, BUNDLES = base .. 'jobs', base .. 'state', base .. 'leases', base .. 'bundles'

local format = string.format
-- In a third of the time, where C's long is long enough.
local WHOLE = format('%d', 2 ^ 50) == '1125899906842624' and '%d' or '%.0f'
local function whole(number)
    return format(WHOLE, number)
end

local function of_queue(queue, what)
    return root .. '{' .. queue .. '}:' .. what
end

-- Call a command with any number of values after its key.
local function in_chunks(command, key, values)
    for first = 1, #values, CHUNK do
        redis.call(command, key, unpack(values, first, math.min(first + CHUNK - 1, #values)))
    end
end

-- The queues that have got something to lease, or to wait for; those who wait are told at the end.
local woken = {}

local function wake(queue)
    woken[queue] = true
end

local function wake_all()
    for _, queue in ipairs(redis.call('ZRANGE', base .. 'queues', 0, -1)) do
        wake(queue)
    end
end

local function tell_woken()
    for queue in pairs(woken) do
        redis.call('PUBLISH', of_queue(queue, 'news'), '')
    end
end

-- So many leases of each of these bundles have ended, or moved to another; a bundle without leases is forgotten.
local function leave_bundles(leaving)
    for bundle, n in pairs(leaving) do
        if redis.call('HINCRBY', BUNDLES, bundle, -n) <= 0 then
            redis.call('HDEL', BUNDLES, bundle)
            redis.call('ZREM', LEASES, bundle)
        end
    end
end

-- How many more jobs have come to a queue, or gone from it, since it was made.
local function count(queue, what, n)
    redis.call('HINCRBY', of_queue(queue, 'tally'), what, n)
end

local function note_queue(queue)
    redis.call('ZADD', base .. 'queues', 'NX', 0, queue)
end
