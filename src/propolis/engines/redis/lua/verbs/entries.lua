-- with: base jobs repairing
-- Up to ARGV[9] entries of the list ARGV[5] ('line' or 'tidied') of queue ARGV[6] and priority ARGV[7], after the last
-- ARGV[8] of it, from its end: lists grow there.  Gives those that are right, those that are not, and how many it were.
-- In a line of a priority that nobody looks for nothing is right.
local key = of_queue(ARGV[6], ARGV[5] .. ':' .. ARGV[7])
local void = of_queue(ARGV[6], 'void:' .. ARGV[7])
local after, most = tonumber(ARGV[8]), tonumber(ARGV[9])
local right, wrong = {}, {}
local is_ranked = redis.call('ZSCORE', of_queue(ARGV[6], 'ranks'), ARGV[7])
local some = redis.call('LRANGE', key, -after - most, -after - 1)
for _, entry in ipairs(some) do
    if redis.call('SISMEMBER', void, entry) == 0 then
        local to = is_ranked and is_right(entry) and right or wrong
        to[#to + 1] = entry
    end
end
return {right, wrong, #some}
