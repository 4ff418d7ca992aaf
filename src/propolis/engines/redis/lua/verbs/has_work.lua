-- with: base waiting
-- Is there anything to lease in one of the queues ARGV[5...]?  Gives 1 or 0.
for at = 5, #ARGV do
    local queue = ARGV[at]
    if standing_in(queue) > 0 or redis.call('ZCOUNT', of_queue(queue, 'scheduled'), '-inf', now) > 0
        or redis.call('EXISTS', of_queue(queue, 'incoming')) == 1 then
        return 1
    end
end
return 0
