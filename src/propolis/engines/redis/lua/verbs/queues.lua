-- with: base jobs waiting
-- The counts of up to ARGV[5] queues whose names come after ARGV[6]: name, ready, scheduled, held, parked, running,
-- done, dead, cancelled, put, deleted.  What stands at the door is ready, and counts as put.
local answer = {}
local after = ARGV[6] == '' and '-' or '(' .. ARGV[6]
for _, queue in ipairs(redis.call('ZRANGEBYLEX', base .. 'queues', after, '+', 'LIMIT', 0, ARGV[5])) do
    local ready, scheduled = standing_in(queue), redis.call('ZCARD', of_queue(queue, 'scheduled'))
    local outside = redis.call('LLEN', of_queue(queue, 'incoming'))
    local due = redis.call('ZCOUNT', of_queue(queue, 'scheduled'), '-inf', now)
    local parked = 0
    for _, task in ipairs(parked_tasks(queue)) do
        parked = parked + redis.call('ZCARD', of_queue(queue, 'parked:' .. task))
    end
    local tally = redis.call('HMGET', of_queue(queue, 'tally'), 'put', 'deleted')
    answer[#answer + 1] = {
        queue, ready + due + outside, scheduled - due, waiting_in(queue) - ready - scheduled - parked, parked,
        redis.call('HLEN', of_queue(queue, 'running')),
        redis.call('ZCARD', of_queue(queue, 'done')), redis.call('ZCARD', of_queue(queue, 'dead')),
        redis.call('ZCARD', of_queue(queue, 'cancelled')),
        redis.number_or(0, tally[1]) + outside, redis.number_or(0, tally[2]),
    }
end
return answer
