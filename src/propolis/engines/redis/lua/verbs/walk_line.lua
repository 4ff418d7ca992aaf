-- with: base jobs repairing
-- Move up to ARGV[7] entries from the head of the list of queue ARGV[5] and priority ARGV[6] into `tidied`, which stands
-- before it, without those that are struck out, or are not right.  So nothing can be overlooked while others take and
-- put.  Gives the entries that were moved, whether `tidied` was there before, how many entries are left, and 1 if nobody
-- looked for a line of this priority.
local line, void = of_queue(ARGV[5], 'line:' .. ARGV[6]), of_queue(ARGV[5], 'void:' .. ARGV[6])
local tidied = of_queue(ARGV[5], 'tidied:' .. ARGV[6])
local had = redis.call('EXISTS', tidied)
local kept, forgotten = {}, 0
for _, entry in ipairs(redis.call('LPOP', line, ARGV[7]) or {}) do
    if redis.call('SREM', void, entry) == 0 and is_right(entry) then
        kept[#kept + 1] = entry
    end
end
in_chunks('RPUSH', tidied, kept)
local left = redis.call('LLEN', line)
if left == 0 and redis.call('EXISTS', tidied) == 1 then
    redis.call('RENAME', tidied, line)
end
if redis.call('EXISTS', line, tidied) > 0 then
    forgotten = redis.call('ZADD', of_queue(ARGV[5], 'ranks'), -ARGV[6], ARGV[6])
else
    redis.call('UNLINK', void)
end
return {kept, had, left, forgotten}
