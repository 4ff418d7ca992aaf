-- with: base sharded
-- What is recorded here for other shards: of each its number and the first ARGV[5] entries.
local answer = {}
for _, shard in ipairs(redis.call('SMEMBERS', base .. 'owing')) do
    answer[#answer + 1] = {tonumber(shard), redis.call('LRANGE', base .. 'outbox:' .. shard, 0, ARGV[5] - 1)}
end
return answer
