-- with: base spread sharing
-- Forget the limit ARGV[5].  Gives 0 if it is not shared.
redis.call('HDEL', base .. 'rules', ARGV[5])
redis.call('HDEL', base .. 'limits', ARGV[5]:match('^limit:(.*)$'))
redis.call('HDEL', SHARES, ARGV[5])
local known = redis.call('HDEL', POOL, ARGV[5])
wake_all()
tell_woken()
return known
