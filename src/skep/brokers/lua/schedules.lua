-- with: base
-- Now, and all schedules: name and MessagePack.
return {whole(now), redis.call('HGETALL', base .. 'schedules')}
