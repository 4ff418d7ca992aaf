-- with: base sharded jobs sharing
-- The limit ARGV[5] is ARGV[6], shared under the name ARGV[7]; ARGV[8] is 1 when all shards know it, and it may be
-- shared out, and 0 before.  Gives whether there was such a limit, and whether exactly this one is there and shared out.
if is_over(ARGV[5]) then
    forget_rule(ARGV[5])
end
local packed = redis.call('HGET', POOL, ARGV[5])
local pool = packed and cmsgpack.unpack(packed)
if ARGV[8] == '0' then
    if pool and pool.n == tonumber(ARGV[6]) and pool.ready then
        return {1, 1}
    end
    redis.call('HSET', POOL, ARGV[5], cmsgpack.pack({n = tonumber(ARGV[6]), name = ARGV[7], left = 0}))
elseif pool and pool.name == ARGV[7] then
    pool.left, pool.ready = pool.n, true
    redis.call('HSET', POOL, ARGV[5], cmsgpack.pack(pool))
end
return {pool and 1 or 0, 0}
