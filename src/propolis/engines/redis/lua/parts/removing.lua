-- Removals: of all that a queue held, or of the members of a batch.
--
-- What a queue held is set aside under other keys in one step, so that nobody finds it any more; then it is removed, a
-- bite in the call and one in each sweep.  Until it is gone, `removals` keeps for `queue:<name>` or `batch:<id>`
-- {keys = what each is and where, holds = sets of groups, upto = the number of the last put before, removed, since,
-- left; of a batch borns = when it was born, and shards = the others}.

local REMOVED_AT_ONCE = 1000

local function new_removal(name)
    local r = removal_of(name) or {keys = {}, holds = {}, borns = {}, removed = 0, since = now, left = 0}
    r.upto = redis.call('INCR', base .. 'seq')
    return r
end

local function tell(name, value)
    if send and elsewhere(0) then
        send(0, {kind = 'removal', name = name, value = value})
    elseif value then
        store_record('removal', name, {version = next_version(), value = value})
    else
        remove_record('removal', name)
    end
end

-- A queue without jobs is forgotten; else some run, or have come meanwhile.
local function close_queue(queue)
    local tally = redis.call('HMGET', of_queue(queue, 'tally'), 'put', 'deleted')
    if redis.number_or(-1, tally[1] or 0) == redis.number_or(-2, tally[2] or 0) then
        redis.call('DEL', of_queue(queue, 'tally'))
        redis.call('ZREM', base .. 'queues', queue)
        redis.call('ZREM', base .. 'timed', queue)
    end
end

-- Set aside all that waits in a queue, or has ended there.
local function set_aside(queue)
    local r = new_removal('queue:' .. queue)
    local function move(what, kind)
        local key = of_queue(queue, what)
        if redis.call('EXISTS', key) == 1 then
            local going = of_queue(queue, 'going:' .. whole(r.upto) .. ':') .. what
            redis.call('RENAME', key, going)
            r.keys[#r.keys + 1] = kind .. ' ' .. going
            return going
        end
    end
    for _, priority in ipairs(redis.call('ZRANGE', of_queue(queue, 'ranks'), 0, -1)) do
        move('tidied:' .. priority, 'line')
        move('line:' .. priority, 'line')
        move('void:' .. priority, 'void')
    end
    redis.call('DEL', of_queue(queue, 'ranks'))
    for _, task in ipairs(parked_tasks(queue)) do
        move('parked:' .. task, 'numbered')
        redis.call('ZREM', base .. 'parked', queue .. '\n' .. task)
    end
    r.holds[#r.holds + 1] = move('holds', 'holds')
    move('front', 'ids')
    for _, what in ipairs({'scheduled', 'done', 'dead', 'cancelled'}) do
        move(what, 'numbered')
    end
    redis.call('DEL', of_queue(queue, 'freed'))
    redis.call('SREM', base .. 'holding', queue)
    redis.call('ZREM', base .. 'timed', queue)
    redis.call('ZREM', base .. 'deaths', queue)
    local tally = redis.call('HMGET', of_queue(queue, 'tally'), 'put', 'deleted')
    r.left = redis.number_or(0, tally[1]) - redis.number_or(0, tally[2]) - redis.call('HLEN', of_queue(queue, 'running'))
    return r
end

-- Some of the ids in such a key, by what it is; they are taken out of it.
local take_out = {}

function take_out.line(key, most)
    local ids, void = {}, key:gsub('^(.*):%a+:(.-)$', '%1:void:%2')
    for _, entry in ipairs(redis.call('LPOP', key, most) or {}) do
        if redis.call('SREM', void, entry) == 0 then
            ids[#ids + 1] = entry:match('^[^\n]*')
        end
    end
    return ids
end

function take_out.void(key)  -- comes after its lines
    redis.call('UNLINK', key)
    return {}
end

function take_out.ids(key, most)
    local ids = redis.call('ZRANGE', key, 0, most - 1)
    in_chunks('ZREM', key, ids)
    return ids
end

function take_out.numbered(key, most)
    local ids = take_out.ids(key, most)
    for n, member in ipairs(ids) do
        ids[n] = scheduled_id(member)
    end
    return ids
end

function take_out.holds(key, most, queue)
    local group = redis.call('SRANDMEMBER', key)
    if not group then
        return {}
    end
    local held = of_queue(queue, 'held:' .. group)
    local ids = take_out.ids(held, most)
    if redis.call('EXISTS', held) == 0 then
        redis.call('SREM', key, group)
    end
    return ids
end

function take_out.members(key, most)
    local first = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
    local ids, left = {}, {}
    for id in (first[1] or ''):gmatch('[^\n]+') do
        local to = #ids < most and ids or left
        to[#to + 1] = id
    end
    redis.call('ZREM', key, first[1] or '')
    if #left > 0 then
        redis.call('ZADD', key, first[2] + #ids, table.concat(left, '\n'))
    end
    return ids
end

-- The jobs among these that are not elsewhere by now.
local function still_there(ids, r)
    local going = {}
    for _, id in ipairs(ids) do
        local j = load(id)
        local ended = j and j.s.state
        if ended and not redis.call('ZSCORE', of_queue(j.queue, ended), scheduled_as(j))
            or j and not ended and not run_of(j) and not stands(j, r) then
            going[#going + 1] = j
        end
    end
    return going
end

local function remove_jobs(going)
    table.sort(going, function(one, other) return one.seq < other.seq end)
    for _, j in ipairs(going) do
        if j.s.state then
            forget(j)
        else
            end_job(j, 'cancelled', nil, waits_as(j))
        end
    end
    return #going
end

-- The same of a batch; the other shards do so too.
local function remove_members(batch, r, ids)
    local n = 0
    for born in pairs(r.borns) do
        for _, id in ipairs(ids) do
            n = n + forget_member(batch, tonumber(born), id)
        end
        for _, shard in ipairs(#ids > 0 and r.shards or {}) do
            send(shard, {kind = 'forget', batch = batch, born = tonumber(born), ids = ids})
        end
    end
    return n
end

-- Go on with a removal: gives how many jobs went, and whether there is more to do.
local function go_on(name, r, most)
    local scope, of = name:match('^(%a+):(.*)$')
    local found, looked, n = {}, 0, 0
    while r.keys[1] and looked < most do
        local kind, key = r.keys[1]:match('^(%a+) (.*)$')
        local ids = take_out[kind](key, most - looked, of)
        looked = looked + #ids
        if scope == 'batch' then
            n = n + remove_members(of, r, ids)
        else
            for _, j in ipairs(still_there(ids, r)) do
                found[#found + 1] = j
            end
        end
        if redis.call('EXISTS', key) == 0 then
            table.remove(r.keys, 1)
        end
    end
    n = n + remove_jobs(found)
    r.removed, r.left = r.removed + n, r.left - n
    local is_new, more = redis.call('HEXISTS', REMOVALS, name) == 0, #r.keys > 0
    for _, shard in ipairs((more and is_new or not more and not is_new) and r.shards or {}) do
        send(shard, {kind = 'removing', name = name, removal = more and {borns = r.borns, upto = 0} or nil})
    end
    if more then
        redis.call('HSET', REMOVALS, name, cmsgpack.pack(r))
        tell(name, '{"removed":' .. whole(r.removed) .. ',"since_us":' .. whole(r.since) .. '}')
    else
        if not is_new then
            redis.call('HDEL', REMOVALS, name)
            tell(name)
        end
        if scope == 'queue' then
            close_queue(of)
        end
    end
    return n, more
end
