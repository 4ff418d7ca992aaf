-- Jobs that have nothing special, perhaps but for a batch: what put_plain.lua and put_members.lua have in common.

-- The jobs of a call.  From ARGV[at] on: how many kinds; of each its queue, its priority, its head (flag and task), its
-- meta; then how many jobs; of each the number of its kind, its id, its body.
local function read_call(at)
    local call = {kinds = {}, lines = {}, ids = {}, coming = {}}
    for k = 1, tonumber(ARGV[at]) do
        local queue, priority = ARGV[at + 1], ARGV[at + 2]
        local name = of_queue(queue, 'line:' .. priority)
        -- Kinds of one queue and one priority stand in one line, in the order of the call.
        call.lines[name] = call.lines[name]
            or {queue = queue, priority = priority, void = of_queue(queue, 'void:' .. priority), entries = {}}
        call.kinds[tostring(k)] = {  -- as the jobs name it
            line = call.lines[name], head = ARGV[at + 3] .. '\n' .. whole(now) .. '\n', meta = ARGV[at + 4],
        }
        at = at + 4
    end
    at = at + 1
    call.at, call.total = at, tonumber(ARGV[at])
    local ids = call.ids
    for n = 1, call.total do
        ids[n] = ARGV[at + 3 * n - 1]
    end
    return call
end

-- Leave those out whose ids are taken, and all of them if the call is `repeated`; gives their numbers.
local function leave_out(call, repeated)
    local refused, seen = {}, {}
    local kinds, ids, coming, at = call.kinds, call.ids, call.coming, call.at
    local taken = ids_in_use(ids)
    for n, id in ipairs(ids) do
        if repeated or taken[id] or seen[id] then
            refused[#refused + 1] = n
            ids[n] = false
        else
            seen[id] = true
            local queue = kinds[ARGV[at + 3 * n - 2]].line.queue
            coming[queue] = (coming[queue] or 0) + 1
        end
    end
    call.n_new = call.total - #refused
    return refused
end

-- Write the records of those that are new.  With `first`, the meta of each ends with its number, counted from there.
local function write_new(call, first)
    local seq = redis.call('INCRBY', base .. 'seq', call.n_new) - call.n_new
    local kinds, ids, at = call.kinds, call.ids, call.at
    local records = {}
    for n = 1, call.total do
        local id = ids[n]
        if id then
            local kind = kinds[ARGV[at + 3 * n - 2]]
            seq = seq + 1
            records[#records + 1] = id
            if first then
                records[#records + 1] = kind.head .. whole(seq) .. kind.meta .. (first + n - 1) .. '}\n' .. ARGV[at + 3 * n]
            else
                records[#records + 1] = kind.head .. whole(seq) .. kind.meta .. ARGV[at + 3 * n]
            end
            local entries = kind.line.entries
            entries[#entries + 1] = id
            if #records == CHUNK then
                redis.call('HSET', JOBS, unpack(records))
                records = {}
            end
        end
    end
    if #records > 0 then
        redis.call('HSET', JOBS, unpack(records))
    end
end

-- In a list nothing may look like an entry that was struck out and is still there.
local function named_apart(entries, void)
    for n, id in ipairs(entries) do
        if redis.call('SISMEMBER', void, id) == 1 then
            entries[n] = id .. '\n' .. whole(redis.call('INCR', base .. 'seq'))
            redis.call('HSET', STATE, id, cmsgpack.pack({entry = entries[n]}))
        end
    end
end

-- Let those that were written stand in line, and wake whoever waits for them.
local function line_up(call)
    for name, line in pairs(call.lines) do
        if #line.entries > 0 then
            if redis.call('EXISTS', line.void) == 1 then
                named_apart(line.entries, line.void)
            end
            in_chunks('RPUSH', name, line.entries)
            redis.call('ZADD', of_queue(line.queue, 'ranks'), -line.priority, line.priority)
        end
    end
    for queue, n in pairs(call.coming) do
        note_queue(queue)
        count(queue, 'put', n)
        wake(queue)
    end
end
