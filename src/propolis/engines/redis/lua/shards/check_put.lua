-- with: base sharded waiting
-- What a put in another shard must know of this one.
--
-- ARGV[5]  the token of the call, or ''
-- then     how many ids, and these; how many unique keys that live here, and these; how many batches; how many queues
--
-- Gives 1 if the token is known, the numbers of the ids that are taken, the holder of each key or false, 0 (unknown), 1
-- (open) or 2 (sealed) for each batch, and for each queue its cap and how many wait there, or false.

local at = 5
local function list()
    local n = tonumber(ARGV[at + 1])
    local values = {unpack(ARGV, at + 2, at + 1 + math.min(n, 7000))}
    for k = 7001, n do
        values[k] = ARGV[at + 1 + k]
    end
    at = at + 1 + n
    return values
end

local ids = list()
local taken, used = ids_in_use(ids), {}
local leaving = redis.call('EXISTS', base .. 'leaving') == 1
for n, id in ipairs(ids) do
    if taken[id] or (leaving and redis.call('HEXISTS', base .. 'leaving', id) == 1) then
        used[#used + 1] = n
    end
end
local holders, batches, caps = {}, {}, {}
for n, key in ipairs(list()) do
    holders[n] = redis.call('HGET', base .. 'unique', key)
end
for n, batch in ipairs(list()) do
    local fields = redis.call('HMGET', base .. 'batch:' .. batch, 'created', 'sealed')
    batches[n] = not fields[1] and 0 or fields[2] and 2 or 1
end
for n, queue in ipairs(list()) do
    local cap = redis.call('HGET', base .. 'caps', queue)
    caps[n] = cap and not is_over('cap:queue:' .. queue) and {tonumber(cap), waiting_in(queue)}
end
return {known_token(ARGV[5]) and 1 or 0, used, holders, batches, caps}
