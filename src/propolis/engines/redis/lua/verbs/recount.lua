-- with: base jobs waiting repairing
-- The places in the queue ARGV[5], how many jobs it counts, and how many stand there.  Where ARGV[6] is '1' it
-- counts these from now on.
local queue = ARGV[5]
local places = {'running', 'scheduled', 'front', 'done', 'dead', 'cancelled'}
for _, task in ipairs(parked_tasks(queue)) do
    places[#places + 1] = 'parked:' .. task
end
for _, group in ipairs(redis.call('SMEMBERS', of_queue(queue, 'holds'))) do
    places[#places + 1] = 'held:' .. group
end
local there = standing_in(queue) - redis.call('ZCARD', of_queue(queue, 'front'))
for _, what in ipairs(places) do
    there = there + redis.call(what == 'running' and 'HLEN' or 'ZCARD', of_queue(queue, what))
end
local tally = redis.call('HMGET', of_queue(queue, 'tally'), 'put', 'deleted')
local counted = redis.number_or(0, tally[1]) - redis.number_or(0, tally[2])
if is_going(queue) then
    there = counted  -- when it is over, one can see
elseif ARGV[6] == '1' and counted ~= there then
    count(queue, 'put', there - counted)
end
return {places, redis.call('ZRANGE', of_queue(queue, 'ranks'), 0, -1), counted, there}
