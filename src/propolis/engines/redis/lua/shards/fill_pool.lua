-- with: base sharded sharing
-- The limit ARGV[5] is ARGV[6], shared under the name ARGV[7]; ARGV[8] is 1 when all shards know it, and it may be
-- shared out, and 0 before.  Gives 0 if exactly this limit is there and shared out.
local packed = redis.call('HGET', POOL, ARGV[5])
local pool = packed and cmsgpack.unpack(packed)
if ARGV[8] == '0' then
    if pool and pool.n == tonumber(ARGV[6]) and pool.ready then
        return 0
    end
    redis.call('HSET', POOL, ARGV[5], cmsgpack.pack({n = tonumber(ARGV[6]), name = ARGV[7], left = 0}))
elseif pool and pool.name == ARGV[7] then
    pool.left, pool.ready = pool.n, true
    redis.call('HSET', POOL, ARGV[5], cmsgpack.pack(pool))
end
return 1
