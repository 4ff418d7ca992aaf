-- with: base sharded
-- The shard ARGV[5] has heard everything up to the message with the number ARGV[6].
local shard, last = ARGV[5], tonumber(ARGV[6])
local outbox, leaving = base .. 'outbox:' .. shard, redis.call('EXISTS', base .. 'leaving') == 1
while true do
    local entry = redis.call('LINDEX', outbox, 0)
    if not entry or tonumber(entry:match('^%d+\n') or 0) > last then
        break
    end
    redis.call('LPOP', outbox)
    local m = leaving and unpacked(entry:match('^%d+\n(.*)$'))
    if m and m.kind == 'job' then
        redis.call('HDEL', base .. 'leaving', m.id)
    end
end
if redis.call('EXISTS', outbox) == 0 then
    redis.call('SREM', base .. 'owing', shard)
end
return 1
