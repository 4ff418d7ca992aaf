-- with: base jobs batches
-- Forget the batch ARGV[5] and its waiting members; running ones finish and step nothing.  No callback.
-- Gives 0 if there is none.

local batch = ARGV[5]
local b = batch_facts(batch)
if not b then
    return 0
end
local ended = batch_key(batch, 'batch_ended:')
local function remove(id)
    local j = redis.call('HEXISTS', ended, id) == 0 and load(id)
    if j and j.batch == batch and j.seq > b.born and not j.s.stepped and not run_of(j) then
        unplace(j)
        j.s.stepped = true
        end_job(j, 'cancelled', nil)
    end
end
for _, ids in ipairs(redis.call('ZRANGE', batch_key(batch, 'batch_members:'), 0, -1)) do
    for id in ids:gmatch('[^\n]+') do
        remove(id)
    end
end
remove_batch(batch)
if not b.finished then
    step_parent(b, batch, 'cancelled')
end
tell_woken()
return 1
