-- with: base jobs batches waiting
-- Put any jobs (T1), opening a batch before and sealing it after that.
--
-- ARGV[5]  the token of the call, or ''
-- ARGV[6]  MessagePack of {jobs = drafts as add() takes them, batch = {id, body, calls, keep_for, open_for, parent,
--          member} or nothing, seal = true or false}.  What belongs elsewhere was asked for before:
--          see shards/putting.py.
--
-- Gives, one after the other, the number of each job that was not created and the id of the job in its place.

local call = cmsgpack.unpack(ARGV[6])
local refused, fresh = {}, {}
local ids, keys, coming, joined = {}, {}, {}, {}

local function refuse(n, holder)
    refused[#refused + 1] = n
    refused[#refused + 1] = holder
end

if known_token(ARGV[5]) then
    for n, d in ipairs(call.jobs) do
        refuse(n, d.unique and not used(d.id) and redis.call('HGET', base .. 'unique', d.unique) or d.id)
    end
    return refused
end

local away = call.batch and elsewhere(call.batch.shard)
local opening = call.batch and not away and redis.call('EXISTS', batch_key(call.batch.id)) == 0
for n, d in ipairs(call.jobs) do
    local holder = (ids[d.id] or used(d.id)) and d.id
    if not holder and d.unique then
        holder = keys[d.unique] or (not elsewhere(d.unique_shard) and redis.call('HGET', base .. 'unique', d.unique))
    end
    if holder then
        refuse(n, holder)
    else
        ids[d.id] = true
        if d.unique then
            keys[d.unique] = d.id
        end
        if d.batch and not elsewhere(d.batch_shard) and not (opening and d.batch == call.batch.id) then
            joined[d.batch] = true
        end
        if not elsewhere(d.shard) then
            coming[d.queue] = (coming[d.queue] or 0) + 1
        end
        fresh[#fresh + 1] = d
    end
end
local full = check_room(coming)
if full then
    return full
end
if opening and call.batch.parent and not elsewhere(call.batch.parent_shard) then
    joined[call.batch.parent] = true
end
for batch in pairs(joined) do
    local shut = is_shut(batch)
    if shut then
        return shut
    end
end

redis.call('INCRBY', base .. 'seq', 0)  -- the first write: where maxmemory is reached, this one is refused
if away then
    send(call.batch.shard, {kind = 'open', batch = call.batch})
elseif opening then
    open_batch(call.batch)
end
put_fresh(fresh)
if away and call.seal then
    send(call.batch.shard, {kind = 'seal', batch = call.batch.id})
elseif call.batch and call.seal then
    seal_batch(call.batch.id)
end
remember_token(ARGV[5])
publish_woken()
return refused
