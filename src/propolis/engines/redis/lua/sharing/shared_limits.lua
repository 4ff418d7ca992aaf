-- with: base sharded sharing
-- All limits that are shared: of each its field in `rules` and its n.
local answer = {}
local pools = redis.call('HGETALL', POOL)
for n = 1, #pools, 2 do
    answer[n], answer[n + 1] = pools[n], cmsgpack.unpack(pools[n + 1]).n
end
return answer
