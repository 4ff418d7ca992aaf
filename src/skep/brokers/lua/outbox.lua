-- with: base spread
-- What is recorded here for other homes: of each its number and the first ARGV[5] entries.
local answer = {}
for _, home in ipairs(redis.call('SMEMBERS', base .. 'owing')) do
    answer[#answer + 1] = {tonumber(home), redis.call('LRANGE', base .. 'outbox:' .. home, 0, ARGV[5] - 1)}
end
return answer
