-- with: base jobs batches
-- Forget the batch ARGV[5] and its waiting members; running ones finish and step nothing.  No callback.
-- ARGV[6...] are the other homes, where there are some.  Gives 0 if there is none.

local batch = ARGV[5]
local b = batch_facts(batch)
if not b then
    return 0
end
local ended, left = batch_key(batch, 'batch_ended:'), {}
for _, ids in ipairs(redis.call('ZRANGE', batch_key(batch, 'batch_members:'), 0, -1)) do
    for id in ids:gmatch('[^\n]+') do
        if redis.call('HEXISTS', ended, id) == 0 then
            left[#left + 1] = id
            forget_member(batch, b.born, id)
        end
    end
end
for at = 6, #left > 0 and #ARGV or 0 do
    send(tonumber(ARGV[at]), {kind = 'forget', batch = batch, born = b.born, ids = left})
end
remove_batch(batch)
if not b.finished then
    step_parent(b, batch, 'cancelled')
end
tell_woken()
return 1
