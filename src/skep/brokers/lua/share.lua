-- with: base spread jobs sharing
-- From now on the limit ARGV[5] is shared among homes, and this one has no part of it yet.  ARGV[6] names the sharing:
-- shares of an earlier one count no more.
local scope, name = ARGV[5]:match('^limit:(%a+):(.*)$')
redis.call('HSET', base .. 'rules', ARGV[5], 0)
redis.call('HSET', SHARES, ARGV[5], ARGV[6])
local running = 0
for _, queue in ipairs(scope == 'queue' and {} or redis.call('ZRANGE', base .. 'queues', 0, -1)) do
    for _, id in ipairs(redis.call('HKEYS', of_queue(queue, 'running'))) do
        local j = load(id)
        if j and j[scope] == name then
            running = running + 1
        end
    end
end
if scope ~= 'queue' then
    redis.call('HSET', base .. 'limits', scope .. ':' .. name, running)
end
return 1
