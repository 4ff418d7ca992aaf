-- What is added to every script where an app has shards: see decision 0025.
--
-- KEYS[2]  `<base>shard:<number of this shard>:<clock>:<what>`.  The clock is the highest number of a put that the
--          caller has seen in any shard, or 0: what is put now gets a higher one, so that numbers show which was
--          first.  They grow with the time as well, for callers that have not seen one another.  `what` is
--          p for a put, u for what full memory must not keep from happening (see exchange.lua), and - for the rest.
--
-- What must happen in another shard is recorded here, in the step that makes it necessary, and sent on by the
-- caller; every sweep sends on what was left.  Messages to one shard are heard there in their order, and once.

local function raise_clock(least)
    if tonumber(redis.call('GET', base .. 'seq') or 0) < least then
        redis.call('SET', base .. 'seq', whole(least))
    end
end

do
    local number, clock, what = KEYS[2]:match('shard:(%d+):(%d+):(.)$')
    me = tonumber(number)
    if what == 'p' then
        raise_clock(math.max(tonumber(clock), now - 1))
    elseif what == 'u' and clock ~= '0' then
        redis.call('DEL', base .. 'nothing')
        raise_clock(tonumber(clock))
    end
end

local sent, reports = {}, {}
local last_sent

-- The numbers of messages grow with the time as well: a replica that took over and does not know the last ones must
-- not give their numbers to others.
function send(shard, message)
    last_sent = math.max((last_sent or tonumber(redis.call('GET', base .. 'sent') or 0)) + 1, now)
    message.seq = tonumber(redis.call('GET', base .. 'seq') or 0)
    local entry = whole(last_sent) .. '\n' .. cmsgpack.pack(message)
    redis.call('RPUSH', base .. 'outbox:' .. shard, entry)
    if not sent[shard] then
        redis.call('SADD', base .. 'owing', shard)
        sent[shard] = {}
    end
    sent[shard][#sent[shard] + 1] = entry
end

-- What is to be sent on: of each shard its number, 1 if this very call has something for it, 1 if that is not all, and
-- else the entries.
local function owed()
    local answer = {}
    if last_sent then
        redis.call('SET', base .. 'sent', whole(last_sent))
    end
    for _, shard in ipairs(redis.call('SMEMBERS', base .. 'owing')) do
        local entries = sent[tonumber(shard)]
        local more = not entries or redis.call('LLEN', base .. 'outbox:' .. shard) > #entries
        answer[#answer + 1] = {tonumber(shard), entries and 1 or 0, more and 1 or 0, more and {} or entries}
    end
    return answer
end

-- --- what one shard at a time may start -------------------------------------------------------
--
-- A queue, task or key with a bucket, and a key under a limit for many, are *owned* by one shard: it alone starts what
-- they limit, has the bucket, and knows how many run elsewhere, which only become fewer.  Who owns none by name is owned
-- by shard 0, which knows the `owners` of the others.  See own.lua.

-- What is in `shares` of a limit for many keys.
local MANY = 'many'

-- Is that so under this limit; and is it one for many keys?
local function is_for_owners(rule, every)
    local share = redis.call('HGET', base .. 'shares', rule)
    return share == MANY or share and every, share == MANY
end

-- How many run in other shards under a limit for many keys, which count; infinite where this shard may start none.
function running_elsewhere(rule, every, on)
    local for_owners, for_many = is_for_owners(rule, every)
    if not for_owners then
        return 0
    end
    local known = (redis.call('HGET', base .. 'owned', on) or ''):match('^%d+ (%d+)$')
    return known and (for_many and tonumber(known) or 0) or math.huge
end

-- A bucket that goes to another shard, and whatever was known about its name; nil where this one does not own it.
local function disown(on)
    if redis.call('HDEL', base .. 'owned', on) == 0 and (me ~= 0 or redis.call('HEXISTS', base .. 'owners', on) == 1) then
        return nil
    end
    local full = redis.call('ZSCORE', base .. 'buckets', on)
    redis.call('ZREM', base .. 'buckets', on)
    redis.call('ZREM', base .. 'owned_since', on)
    return {kind = 'own', on = on, full = full and whole(tonumber(full)) or nil}
end

-- From now on it is owned by this shard, which does not know yet what runs elsewhere.
local function own(on)
    redis.call('HSET', base .. 'owned', on, whole(redis.call('INCR', base .. 'seq')))
    redis.call('ZADD', base .. 'owned_since', whole(now), on)
end

-- Let a shard have it: shard 0 hears of each such move, and keeps it.
local function hand_over(on, shard)
    local message = disown(on)
    if message and me == 0 then
        redis.call('HSET', base .. 'owners', on, shard)
        send(shard, message)
    elseif message then
        message.to = shard
        send(0, message)
    end
end

-- What was owned for long goes back to shard 0, which forgets it: a bite of that.  Whatever still runs or has a bucket here
-- is owned on.
local OWNED_US = 60000000

function give_up_owned(most)
    local old = redis.call('ZRANGEBYSCORE', base .. 'owned_since', '-inf', whole(now - OWNED_US), 'LIMIT', 0, most)
    for _, on in ipairs(old) do
        if redis.call('EXISTS', base .. 'limited:' .. on) == 1 or redis.call('ZSCORE', base .. 'buckets', on) then
            redis.call('ZADD', base .. 'owned_since', whole(now), on)
        elseif me == 0 then
            disown(on)
        else
            hand_over(on, 0)
        end
    end
end
