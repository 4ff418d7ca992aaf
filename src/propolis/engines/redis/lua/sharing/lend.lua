-- with: base sharded sharing
-- Give up to ARGV[7] shares of the limit ARGV[5], in the sharing ARGV[6], to the shard ARGV[8]: from the pool, of which
-- ARGV[9] must stay, and of what this shard does not use.  Gives how many.
local field, name, want, shard = ARGV[5], ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8])
if redis.call('HGET', SHARES, field) ~= name then
    return 0
end
local packed = redis.call('HGET', POOL, field)
local pool = packed and cmsgpack.unpack(packed)
local given = 0
if pool and pool.name == name then
    given = math.max(0, math.min(want, pool.left - tonumber(ARGV[9])))
    pool.left = pool.left - given
    redis.call('HSET', POOL, field, cmsgpack.pack(pool))
end
if shard == me then
    redis.call('HINCRBY', base .. 'rules', field, given)
    return given
end
local share, running = share_of(field)
local spare = math.max(0, math.min(want - given, share - running))
redis.call('HINCRBY', base .. 'rules', field, 0 - spare)  -- Redis 6.2 takes -0 for no number
if given + spare > 0 then
    send(shard, {kind = 'lend', field = field, name = name, n = given + spare})
end
return given + spare
