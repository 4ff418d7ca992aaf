-- with: base
-- Pause the schedule ARGV[5] if ARGV[6] is 1, else let it go on.  Gives 0 if there is none, or it is so already.
local packed = redis.call('HGET', base .. 'schedules', ARGV[5])
local schedule = packed and cmsgpack.unpack(packed)
local paused = ARGV[6] == '1' or nil
if not schedule or schedule.paused == paused then
    return 0
end
schedule.paused = paused
redis.call('HSET', base .. 'schedules', ARGV[5], cmsgpack.pack(schedule))
return 1
