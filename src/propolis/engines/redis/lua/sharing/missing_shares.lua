-- with: base sharded jobs ruling sharing
-- Which shares this shard lacks for the next ARGV[6] jobs of the queue ARGV[5]: of each its limit, the name of the
-- sharing, and how many; and which queues, tasks and keys it must own for them.  Rather too many: those that stand next in
-- any of the lines are counted, also in those where jobs of the tasks ARGV[7...] are parked.
local queue, want = ARGV[5], tonumber(ARGV[6])
local needs = {}

local function need(field, n)
    local name = redis.call('HGET', SHARES, field)
    if name and name ~= MANY then
        needs[field] = (needs[field] or 0) + n
    end
end

local ruling, to_own, owners = new_ruling(), {}, {}

local function need_limit(limit, on)
    if on ~= 'queue:' .. queue then
        need(limit.rule, 1)
    end
    if not owners[on] and is_for_owners(limit.rule, limit.every) then
        owners[on] = true
        to_own[#to_own + 1] = on
    end
end

local function count_needs(ids)
    for _, id in ipairs(ids) do
        local j = load(id:match('^[^\n]*'))
        if j then
            ruling.each_limit(j, need_limit)
        end
    end
end

need('limit:queue:' .. queue, want)
local groups = redis.call('SRANDMEMBER', of_queue(queue, 'holds'), want)
for _, group in ipairs(groups) do
    local held = of_queue(queue, 'held:' .. group)
    need('limit:' .. group, math.min(want, redis.call('ZCARD', held)))
    count_needs(redis.call('ZRANGE', held, 0, math.floor(want / #groups)))
end
count_needs(redis.call('ZRANGE', of_queue(queue, 'front'), 0, want - 1))
for _, priority in ipairs(redis.call('ZRANGE', of_queue(queue, 'ranks'), 0, -1)) do
    count_needs(redis.call('LRANGE', of_queue(queue, 'tidied:' .. priority), 0, want - 1))
    count_needs(redis.call('LRANGE', of_queue(queue, 'line:' .. priority), 0, want - 1))
end
for at = 7, #ARGV do
    for _, member in ipairs(redis.call('ZRANGE', of_queue(queue, 'parked:' .. ARGV[at]), 0, want - 1)) do
        count_needs({scheduled_id(member)})
    end
end
for _, member in ipairs(redis.call('ZRANGEBYSCORE', of_queue(queue, 'scheduled'), '-inf', now, 'LIMIT', 0, want)) do
    count_needs({scheduled_id(member)})
end
local answer = {}
for field, n in pairs(needs) do
    local share, running = share_of(field)
    local short = math.min(n, want) - (share - running)
    if short > 0 then
        answer[#answer + 1] = {field, redis.call('HGET', SHARES, field), short}
    end
end
return {answer, to_own}
