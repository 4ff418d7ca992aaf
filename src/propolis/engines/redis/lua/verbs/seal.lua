-- with: base jobs batches
-- Seal the batch ARGV[5].  Gives 1, or 0 if it was sealed already.
if redis.call('EXISTS', batch_key(ARGV[5])) == 0 then
    return redis.error_reply('PROPOLISUNKNOWN ' .. ARGV[5])
end
local sealed = seal_batch(ARGV[5])
publish_woken()
return sealed
