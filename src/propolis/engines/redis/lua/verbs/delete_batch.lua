-- with: base jobs batches record_keeping removing
-- Forget the batch ARGV[5] and its waiting members; running ones finish and step nothing.  No callback.
-- ARGV[6...] are the other shards, where there are some.  Gives 0 if there is none.  Sweeps do what is too much for one
-- call.

local batch = ARGV[5]
local b = load_batch(batch)
if not b then
    return 0
end
local r = new_removal('batch:' .. batch)
local born, members = whole(b.born), batch_key(batch, 'batch_members:')
r.borns[born], r.shards = true, {}
for at = 6, #ARGV do
    r.shards[#r.shards + 1] = tonumber(ARGV[at])
end
if redis.call('EXISTS', members) == 1 then
    local going = base .. 'going_members:' .. born .. ':' .. batch
    redis.call('RENAME', members, going)
    r.keys[#r.keys + 1] = 'members ' .. going
end
go_on('batch:' .. batch, r, REMOVED_AT_ONCE)
remove_batch(batch)
if not b.finished then
    step_parent(b, batch, 'cancelled')
end
publish_woken()
return 1
