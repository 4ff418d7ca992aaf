-- with: base spread
-- The home ARGV[5] has heard everything up to the message with the number ARGV[6].
local home, last = ARGV[5], tonumber(ARGV[6])
local outbox, leaving = base .. 'outbox:' .. home, redis.call('EXISTS', base .. 'leaving') == 1
while true do
    local entry = redis.call('LINDEX', outbox, 0)
    if not entry or tonumber(entry:match('^%d+')) > last then
        break
    end
    redis.call('LPOP', outbox)
    local m = leaving and cmsgpack.unpack(entry:match('^%d+\n(.*)$'))
    if m and m.kind == 'job' then
        redis.call('HDEL', base .. 'leaving', m.id)
    end
end
if redis.call('EXISTS', outbox) == 0 then
    redis.call('SREM', base .. 'owing', home)
end
return 1
