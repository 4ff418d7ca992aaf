-- with: base
-- Read feeds: ARGV[5] how many entries of each at most, then for each its name and the number to go on after, or ''.
--
-- Gives for each {the number of its last entry, 1 if some before these are missing, the entries of the stream}, or {} where it
-- is not there.
local function read(feed, after)
    local fields = redis.call('HMGET', base .. 'feed_head:' .. feed, 'last', 'born', 'forgotten', 'expires')
    if tonumber(fields[4] or 0) <= now then
        return {}
    end
    local last, born, forgotten = tonumber(fields[1]), tonumber(fields[2]), tonumber(fields[3])
    if not after or after >= last then
        return {fields[1], 0, {}}
    end
    local from = '(' .. whole(math.max(after, forgotten))
    local entries = redis.call('XRANGE', base .. 'feed:' .. feed, from, '+', 'COUNT', ARGV[5])
    local gap = #entries == 0 or forgotten > after or (after > 0 and after < born)
    return {fields[1], gap and 1 or 0, entries}
end

local pages = {}
for n = 6, #ARGV, 2 do
    pages[#pages + 1] = read(ARGV[n], tonumber(ARGV[n + 1]))
end
return pages
