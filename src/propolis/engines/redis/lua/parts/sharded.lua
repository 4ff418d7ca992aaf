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
