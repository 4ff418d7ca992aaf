-- with: base jobs batches
-- Settle one instant of a schedule (C1): ARGV[5] name, ARGV[6] instant (us), ARGV[7] the draft of its job as
-- MessagePack, or '', ARGV[8] its next instant.  Gives 1 to exactly one caller.
local packed = redis.call('HGET', base .. 'schedules', ARGV[5])
local schedule = packed and cmsgpack.unpack(packed)
if not schedule or schedule.paused or schedule.next ~= ARGV[6] or tonumber(schedule.next) > now then
    return 0
end
schedule.last, schedule.next = schedule.next, ARGV[8]
redis.call('HSET', base .. 'schedules', ARGV[5], cmsgpack.pack(schedule))
if ARGV[7] ~= '' then
    emit({cmsgpack.unpack(ARGV[7])})
end
tell_woken()
return 1
