-- with: base
-- Forget what stands at the door of the queue ARGV[5].  Gives how much.
local door = of_queue(ARGV[5], 'incoming')
local n = redis.call('LLEN', door)
redis.call('UNLINK', door)
return n
