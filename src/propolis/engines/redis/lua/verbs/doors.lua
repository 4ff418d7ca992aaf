-- with: base
-- Of up to ARGV[5] queues whose names come after ARGV[6]: the last name ('' if there are no more), and of those at whose
-- doors something stands the name and how much.  ARGV[7] is the only one that is looked at, or ''.
local after = ARGV[6] == '' and '-' or '(' .. ARGV[6]
local queues = redis.call('ZRANGEBYLEX', base .. 'queues', after, '+', 'LIMIT', 0, ARGV[5])
local last = #queues == tonumber(ARGV[5]) and queues[#queues] or ''
if ARGV[7] ~= '' then
    queues, last = after == '-' and {ARGV[7]} or {}, ''
end
local found = {}
for _, queue in ipairs(queues) do
    local n = redis.call('LLEN', of_queue(queue, 'incoming'))
    if n > 0 then
        found[#found + 1], found[#found + 2] = queue, n
    end
end
return {last, found}
