-- with: base sharded jobs sharing
-- Forget the limit ARGV[5].  Gives 0 if it is not shared.
redis.call('HDEL', base .. 'rules', ARGV[5])
redis.call('ZREM', base .. 'rule_names', ARGV[5])
end_limit(ARGV[5]:match('^limit:(.*)$'))
redis.call('HDEL', SHARES, ARGV[5])
local known = redis.call('HDEL', POOL, ARGV[5])
wake_for(ARGV[5]:match('^limit:(%a+):(.*)$'))
publish_woken()
return known
