-- with: base
-- Make live leases end later, or sooner (T3).
--
-- ARGV[5]  the span (us)
-- then     of each lease its queue, its id, its fence
--
-- Gives now, and for each lease -1 (it is lost), 0, or 1 (somebody wants the job stopped).

redis.call('DEL', base .. 'nothing')  -- so that maxmemory does not refuse us: see exchange.lua

local renewed = {whole(now)}
local until_us = whole(now + tonumber(ARGV[5]))
for at = 6, #ARGV, 3 do
    local queue, id, fence = ARGV[at], ARGV[at + 1], ARGV[at + 2]
    local run = redis.call('HGET', of_queue(queue, 'running'), id)
    local ends = redis.call('ZSCORE', LEASES, id)
    local answer = -1
    if run and run:match('^.(%d+)') == fence and ends and tonumber(ends) > now then
        redis.call('ZADD', LEASES, until_us, id)
        local state = redis.call('HGET', STATE, id)
        answer = state and cmsgpack.unpack(state).cancel and 1 or 0
    end
    renewed[#renewed + 1] = answer
end
return renewed
