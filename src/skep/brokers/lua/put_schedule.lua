-- with: base
-- Store a schedule: ARGV[5] name, ARGV[6] body, ARGV[7] timing, ARGV[8] its next instant (us).  While its timing is
-- unchanged it keeps its own next instant.
local packed = redis.call('HGET', base .. 'schedules', ARGV[5])
local schedule = packed and cmsgpack.unpack(packed) or {}
if schedule.timing ~= ARGV[7] then
    schedule.next = ARGV[8]
end
schedule.body, schedule.timing = ARGV[6], ARGV[7]
redis.call('HSET', base .. 'schedules', ARGV[5], cmsgpack.pack(schedule))
return 1
