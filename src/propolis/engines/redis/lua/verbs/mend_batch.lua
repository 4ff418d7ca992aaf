-- with: base jobs batches
-- The batch ARGV[5], if it still counts as ARGV[6] to ARGV[12] say (see recount_batch.lua), has so many members that wait,
-- are retried and run as ARGV[13] to ARGV[15] say.  Where nobody is left, it ends and calls back.  Gives 1 if it was so.
local batch, key = ARGV[5], batch_key(ARGV[5])
local fields = {'total', 'done', 'dead', 'cancelled', 'waiting', 'retrying', 'running'}
local counts = redis.call('HMGET', key, unpack(fields))
for n = 1, #fields do
    if tonumber(counts[n] or 0) ~= tonumber(ARGV[5 + n]) then
        return 0
    end
end
local total = ARGV[7] + ARGV[8] + ARGV[9] + ARGV[13] + ARGV[14] + ARGV[15]
redis.call('HSET', key, 'total', total, 'waiting', ARGV[13], 'retrying', ARGV[14], 'running', ARGV[15])
finish_if_over(batch)
publish_woken()
return 1
