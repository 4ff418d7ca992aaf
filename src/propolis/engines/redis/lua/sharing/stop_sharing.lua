-- with: base sharded jobs sharing
-- Forget the limit ARGV[5].  Gives 0 if it is not shared, or was over.
local known = redis.call('HEXISTS', POOL, ARGV[5])
local there = forget_rule(ARGV[5])
publish_woken()
return there and known or 0
