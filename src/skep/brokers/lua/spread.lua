-- What is added to every script where an app is spread over homes: see decision 0025.
--
-- KEYS[2]  `<base>home:<number of this home>:<clock>:<urgent>`.  The clock is the highest number of a put that the caller
--          has seen in any home, or 0: what is put now gets a higher one, so that numbers tell which was first.  It
--          is urgent (1) where maxmemory must not keep it from happening: see exchange.lua.
--
-- What must happen in another home is recorded here, in the step that makes it necessary, and sent on by whoever
-- called; every sweep sends on what was left.  Messages to one home are heard there in their order, and once.

do
    local number, clock, urgent = KEYS[2]:match('home:(%d+):(%d+):(%d)$')
    me = tonumber(number)
    if clock ~= '0' and tonumber(redis.call('GET', base .. 'seq') or 0) < tonumber(clock) then
        if urgent == '1' then
            redis.call('DEL', base .. 'nothing')
        end
        redis.call('SET', base .. 'seq', clock)
    end
end

local sent, reports = {}, {}
local last_sent

-- The numbers of messages grow with the time as well: a replica that took over and does not know the last ones must
-- not give their numbers to others.
function send(home, message)
    last_sent = math.max((last_sent or tonumber(redis.call('GET', base .. 'sent') or 0)) + 1, now)
    redis.call('SET', base .. 'sent', whole(last_sent))
    message.seq = tonumber(redis.call('GET', base .. 'seq') or 0)
    local entry = whole(last_sent) .. '\n' .. cmsgpack.pack(message)
    redis.call('RPUSH', base .. 'outbox:' .. home, entry)
    redis.call('SADD', base .. 'owing', home)
    sent[home] = sent[home] or {}
    sent[home][#sent[home] + 1] = entry
end

-- What is to be sent on: of each home its number, 1 if this very call has something for it, 1 if that is not all, and
-- else the entries.
local function owed()
    local answer = {}
    for _, home in ipairs(redis.call('SMEMBERS', base .. 'owing')) do
        local entries = sent[tonumber(home)]
        local more = not entries or redis.call('LLEN', base .. 'outbox:' .. home) > #entries
        answer[#answer + 1] = {tonumber(home), entries and 1 or 0, more and 1 or 0, more and {} or entries}
    end
    return answer
end
