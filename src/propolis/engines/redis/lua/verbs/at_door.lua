-- with: base
-- What strangers pushed to the door of the queue ARGV[5], the oldest first, but for the oldest ARGV[8]: at most ARGV[6]
-- pushes, and no more once they are ARGV[7] bytes.
local first = tonumber(ARGV[8] or 0)
local door, most, bytes = of_queue(ARGV[5], 'incoming'), tonumber(ARGV[6]), tonumber(ARGV[7])
local found, size = {}, 0
while #found < most and size < bytes do
    local pushed = redis.call('LINDEX', door, -1 - first - #found)
    if not pushed then
        break
    end
    found[#found + 1] = pushed
    size = size + #pushed
end
return found
