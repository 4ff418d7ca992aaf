-- with: base sharded sharing
-- The share that this shard has of the limit ARGV[5], how many run here, and what is left in the pool.
local share, running = share_of(ARGV[5])
local packed = redis.call('HGET', POOL, ARGV[5])
return {share, running, packed and cmsgpack.unpack(packed).left or 0}
