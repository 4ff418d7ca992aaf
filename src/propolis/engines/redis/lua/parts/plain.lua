-- Jobs that have nothing special, perhaps but for a batch: what put_plain.lua and put_members.lua have in common.

-- The jobs of a call.  From ARGV[at] on: how many kinds; of each its queue, its priority, its head (flag and task), its
-- meta; then how many runs of jobs of one kind; of each the number of its kind and how many; then of each job its id
-- and its body.
local function read_call(at)
    local call = {kinds = {}, lines = {}, runs = {}, ids = {}, coming = {}}
    for k = 1, tonumber(ARGV[at]) do
        local queue, priority = ARGV[at + 1], ARGV[at + 2]
        local name = of_queue(queue, 'line:' .. priority)
        -- Kinds of one queue and one priority stand in one line, in the order of the call.
        call.lines[name] = call.lines[name]
            or {queue = queue, priority = priority, void = of_queue(queue, 'void:' .. priority), entries = {}}
        call.kinds[k] = {
            line = call.lines[name], head = ARGV[at + 3] .. '\n' .. whole(now) .. '\n', meta = ARGV[at + 4],
        }
        at = at + 4
    end
    at = at + 1
    local total = 0
    for r = 1, tonumber(ARGV[at]) do
        local n = tonumber(ARGV[at + 2])
        call.runs[r] = {kind = call.kinds[tonumber(ARGV[at + 1])], first = total + 1, last = total + n}
        total = total + n
        at = at + 2
    end
    call.at, call.total = at, total
    local ids = call.ids
    for n = 1, total do
        ids[n] = ARGV[at + 2 * n - 1]
    end
    return call
end

-- Leave those out whose ids are taken, and all of them if the call is `repeated`; gives their numbers.
local function leave_out(call, repeated)
    local refused, seen, ids = {}, {}, call.ids
    local taken = ids_in_use(ids)
    for _, run in ipairs(call.runs) do
        local n_new = 0
        for n = run.first, run.last do
            local id = ids[n]
            if repeated or taken[id] or seen[id] then
                refused[#refused + 1] = n
                ids[n] = false
            else
                seen[id] = true
                n_new = n_new + 1
            end
        end
        if n_new > 0 then
            local queue = run.kind.line.queue
            call.coming[queue] = (call.coming[queue] or 0) + n_new
        end
    end
    call.n_new = call.total - #refused
    return refused
end

-- Write the records of those that are new.  With `number`, the meta of each ends with its own, counted from there.
local function write_new(call, number)
    local seq = redis.call('INCRBY', base .. 'seq', call.n_new) - call.n_new
    local ids, at = call.ids, call.at
    local records, filled = {}, 0
    for _, run in ipairs(call.runs) do
        local head, meta, entries = run.kind.head, run.kind.meta, run.kind.line.entries
        for n = run.first, run.last do
            local id = ids[n]
            if id then
                seq = seq + 1
                entries[#entries + 1] = id
                records[filled + 1] = id
                if number then
                    records[filled + 2] = head .. whole(seq) .. meta .. (number + n - 1) .. '}\n' .. ARGV[at + 2 * n]
                else
                    records[filled + 2] = head .. whole(seq) .. meta .. ARGV[at + 2 * n]
                end
                filled = filled + 2
                if filled == CHUNK then
                    redis.call('HSET', JOBS, unpack(records))
                    records, filled = {}, 0
                end
            end
        end
    end
    if filled > 0 then
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

-- Let those that were written stand in line, and wake those who wait for them.
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
