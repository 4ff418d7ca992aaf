-- with: base jobs batches
-- What the batch ARGV[5] counts: total, done, dead, cancelled, waiting, retrying, running; and of the members in up to
-- ARGV[7] of its pieces, from ARGV[6] on, the ids of those that are there, each with what it counts as; and whether there
-- are more pieces.  Nothing where it is finished or gone.
local batch, first, most = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7])
local key, pieces = batch_key(batch), batch_key(batch, 'batch_members:')
local fields = {'total', 'done', 'dead', 'cancelled', 'waiting', 'retrying', 'running'}
local counts = redis.call('HMGET', key, unpack(fields))
local b = load_batch(batch)
if not b or b.finished or removal_of('batch:' .. batch) then
    return {}
end
for n = 1, #counts do
    counts[n] = tonumber(counts[n] or 0)
end

-- As what a member counts; nil if it is not there.
local function counts_as(id)
    local j = load(id)
    if j and j.batch == batch and not j.s.stepped and counts_in(batch, j.seq, j.s.joined) then
        return run_of(j) and 'running' or waits_as(j)
    end
    local nested = load_batch(id)
    return nested and nested.parent == batch and not nested.finished and 'running' or nil
end

local live = {}
for _, ids in ipairs(redis.call('ZRANGE', pieces, first, first + most - 1)) do
    for id in ids:gmatch('[^\n]+') do
        local as = counts_as(id)
        if as then
            live[#live + 1], live[#live + 2] = id, as
        end
    end
end
return {counts, live, redis.call('ZCARD', pieces) > first + most and 1 or 0}
