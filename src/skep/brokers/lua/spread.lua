-- What is added to every script where an app is spread over homes: see decision 0025.
--
-- KEYS[2]  `<base>home:<number of this home>:<clock>:<what>`.  The clock is the highest number of a put that the caller
--          has seen in any home, or 0: what is put now gets a higher one, so that numbers tell which was first.  They
--          grow with the time as well, for those who have not seen one another.  `what` is p for a put, u for what
--          full memory must not keep from happening (see exchange.lua), and - for the rest.
--
-- What must happen in another home is recorded here, in the step that makes it necessary, and sent on by whoever
-- called; every sweep sends on what was left.  Messages to one home are heard there in their order, and once.

local function raise_clock(least)
    if tonumber(redis.call('GET', base .. 'seq') or 0) < least then
        redis.call('SET', base .. 'seq', whole(least))
    end
end

do
    local number, clock, what = KEYS[2]:match('home:(%d+):(%d+):(.)$')
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
function send(home, message)
    last_sent = math.max((last_sent or tonumber(redis.call('GET', base .. 'sent') or 0)) + 1, now)
    message.seq = tonumber(redis.call('GET', base .. 'seq') or 0)
    local entry = whole(last_sent) .. '\n' .. cmsgpack.pack(message)
    redis.call('RPUSH', base .. 'outbox:' .. home, entry)
    if not sent[home] then
        redis.call('SADD', base .. 'owing', home)
        sent[home] = {}
    end
    sent[home][#sent[home] + 1] = entry
end

-- What is to be sent on: of each home its number, 1 if this very call has something for it, 1 if that is not all, and
-- else the entries.
local function owed()
    local answer = {}
    if last_sent then
        redis.call('SET', base .. 'sent', whole(last_sent))
    end
    for _, home in ipairs(redis.call('SMEMBERS', base .. 'owing')) do
        local entries = sent[tonumber(home)]
        local more = not entries or redis.call('LLEN', base .. 'outbox:' .. home) > #entries
        answer[#answer + 1] = {tonumber(home), entries and 1 or 0, more and 1 or 0, more and {} or entries}
    end
    return answer
end
