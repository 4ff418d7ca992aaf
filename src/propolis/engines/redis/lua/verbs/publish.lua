-- with: base
-- Append entries to a feed.
--
-- ARGV[5]  the feed
-- ARGV[6]  how many entries of this call came before these and are not even stored
-- ARGV[7]  how many entries are kept, ARGV[8] how many bytes, ARGV[9] for how many microseconds
-- ARGV[10] the entries, from here on
--
-- Gives the number of the last one.
local head, stream = base .. 'feed_head:' .. ARGV[5], base .. 'feed:' .. ARGV[5]
local passed, keep, keep_bytes, keep_us = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local fields = redis.call('HMGET', head, 'last', 'born', 'forgotten', 'bytes', 'expires')
local before, born = tonumber(fields[1] or 0), tonumber(fields[2])
local forgotten, bytes = tonumber(fields[3] or 0), tonumber(fields[4] or 0)
local is_new = tonumber(fields[5] or 0) <= now

local first = math.max(before + 1, now)
if is_new then
    born, forgotten = first, 0
end
if passed > 0 then
    first = first + passed
    forgotten = first - 1
end
local last = first + #ARGV - 10
-- The first write: where maxmemory is reached, this one is refused.
redis.call('HSET', head, 'last', whole(last), 'born', whole(born), 'expires', whole(now + keep_us))
if is_new or passed > 0 then
    redis.call('UNLINK', stream)
    bytes = 0
end
for n = 10, #ARGV do
    redis.call('XADD', stream, whole(first + n - 10) .. '-0', 'v', ARGV[n])
    bytes = bytes + #ARGV[n]
end

local length = redis.call('XLEN', stream)
if length > keep or bytes > keep_bytes then
    for _, entry in ipairs(redis.call('XRANGE', stream, '-', '+', 'COUNT', 2 * (#ARGV - 9) + 10)) do
        if length == 1 or (length <= keep and bytes <= keep_bytes) then
            break
        end
        length = length - 1
        bytes = bytes - #entry[2][2]
        forgotten = tonumber(entry[1]:match('^%d+'))
    end
    redis.call('XTRIM', stream, 'MINID', whole(forgotten + 1))
end
redis.call('HSET', head, 'forgotten', whole(forgotten), 'bytes', whole(bytes))
for _, key in ipairs({head, stream}) do
    redis.call('PEXPIRE', key, whole(math.ceil(keep_us / 1000)))
end
return whole(last)
