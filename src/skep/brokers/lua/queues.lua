-- with: base waiting
-- The counts of every queue: name, ready, scheduled, held, running, done, dead, cancelled, put, deleted.
local answer = {}
for _, queue in ipairs(redis.call('ZRANGE', base .. 'queues', 0, -1)) do
    local ready, held, scheduled = waiting_in(queue)
    local due = redis.call('ZCOUNT', of_queue(queue, 'scheduled'), '-inf', now)
    local tally = redis.call('HMGET', of_queue(queue, 'tally'), 'put', 'deleted')
    answer[#answer + 1] = {
        queue, ready + due, scheduled - due, held, redis.call('HLEN', of_queue(queue, 'running')),
        redis.call('ZCARD', of_queue(queue, 'done')), redis.call('ZCARD', of_queue(queue, 'dead')),
        redis.call('ZCARD', of_queue(queue, 'cancelled')), tally[1] or 0, tally[2] or 0,
    }
end
return answer
