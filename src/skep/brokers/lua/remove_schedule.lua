-- with: base
-- Forget the schedule ARGV[5].  Gives 0 if there is none.
return redis.call('HDEL', base .. 'schedules', ARGV[5])
