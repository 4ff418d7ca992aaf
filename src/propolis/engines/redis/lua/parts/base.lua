-- What every script begins with: where the keys are, what time it is, how a job is read and written.
--
-- KEYS[1]  what the keys of everything but the queues begin with; it also decides which slot this is
-- ARGV[1]  what the keys of the queues begin with
-- ARGV[2]  now in microseconds since 1970, for tests; '' means the server's own clock
-- ARGV[3]  for how many microseconds dead jobs are kept by default
-- ARGV[4]  the same for cancelled ones
--
-- The key layout is described in engine.py.  Lua has only doubles: they hold microseconds exactly until the
-- year 2255, but `..` does not write them so: hence `whole`.

local format = string.format
local base, root = KEYS[1], ARGV[1]
local dead_us, cancelled_us = tonumber(ARGV[3]), tonumber(ARGV[4])
local now = tonumber(ARGV[2])
if not now then
    local time = redis.call('TIME')
    now = time[1] * 1000000 + time[2]
end
local DAY_US = 86400000000
local CHUNK = 1000  -- how many arguments go into one command: unpack() can take 8,000

-- What a script has written stays written, so none may fail half-way because of what somebody else has written to one of
-- its keys.  Such a key is set aside, and so is a value in a hash that is no number where one must be: `broken` keeps
-- why.  Then it is as if it had not been there, and one key stops no queue (L7).
local native, type = redis, type

local function set_aside_key(problem, command, key, field)
    local aside = key .. ':broken:' .. format('%.0f', now)
    if problem:find('WRONGTYPE', 1, true) then
        native.call('RENAME', key, aside)
    elseif problem:find('not an integer', 1, true) and command:sub(1, 1) == 'H' then
        native.call('HSET', aside, field, native.call('HGET', key, field))
        native.call('HDEL', key, field)
    elseif problem:find('not an integer', 1, true) then
        native.call('RENAME', key, aside)
    else
        return
    end
    native.call('HSET', base .. 'broken', aside, command .. ': ' .. problem)
end

local redis = {error_reply = native.error_reply, sha1hex = native.sha1hex}

function redis.call(command, key, ...)
    local answer = native.pcall(command, key, ...)
    if type(answer) == 'table' and answer.err then
        set_aside_key(answer.err, command, key, ...)
        return native.call(command, key, ...)
    end
    return answer
end

-- MessagePack that may have been damaged: nil where it cannot be read.
local function unpacked(text)
    local fine, value = pcall(cmsgpack.unpack, text)
    return fine and type(value) == 'table' and value or nil
end

-- Is this a whole number from `least` to `most`, or, where it may lack, nothing?  What is a time may be text.
local EARLIEST_US, LATEST_US = -62135596800000000, 253402300799999999  -- the years 1 to 9999

local function is_whole(value, least, most)
    return value == nil or type(value) == 'number' and value >= least and value <= most and value % 1 == 0
end

local function is_moment(value)
    return value == nil or is_whole(tonumber(value) or '', EARLIEST_US, LATEST_US)
end

-- The whole number that was written; this one where there is none, or something else was written over it.
-- Not a local: a function has at most 60 of those around it.
function redis.number_or(otherwise, text)
    local number = tonumber(text or '')
    return number and is_whole(number, -2 ^ 53, 2 ^ 53) and number or otherwise
end

-- Where an app has shards: the number of this one, how something is sent to another one, how a draft finds
-- its way, how many run elsewhere under a limit, and what is owned no longer (sharded.lua, travelling.lua).  On one
-- server there are no shards, and all of this is nil.
local me, send, travel, travel_batch, running_elsewhere, give_up_owned

local function elsewhere(shard)
    return shard and shard ~= me
end

local JOBS, STATE, LEASES, BUNDLES = base .. 'jobs', base .. 'state', base .. 'leases', base .. 'bundles'
local BUNDLED, REMOVALS = base .. 'bundled', base .. 'removals'
local CHECKPOINTS = base .. 'checkpoints'

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

-- A removal that goes on, see removing.lua; nil if there is none of this name.
local removing
local function removal_of(name)
    if removing == nil then
        removing = redis.call('EXISTS', REMOVALS) == 1
    end
    local packed = removing and redis.call('HGET', REMOVALS, name)
    return packed and unpacked(packed) or nil
end

-- The queues that have got something to lease, or to wait for; those who wait get news at the end.
local woken = {}

local function wake(queue)
    woken[queue] = true
end

-- Without the right to do so they find their jobs later: nothing may fail after it was written.
local function publish_woken()
    for queue in pairs(woken) do
        native.pcall('PUBLISH', of_queue(queue, 'news'), '')
    end
end

-- Is a rule over, kind:scope:name?  Then it is as if it were not there, until a sweep removes it.
local function is_over(rule)
    local ends = redis.call('ZSCORE', base .. 'rule_ends', rule)
    return ends and tonumber(ends) <= now
end

-- How many more jobs have come to a queue, or gone from it, since it was made.
local function count(queue, what, n)
    redis.call('HINCRBY', of_queue(queue, 'tally'), what, n)
end

local function note_queue(queue)
    redis.call('ZADD', base .. 'queues', 'NX', 0, queue)
end
