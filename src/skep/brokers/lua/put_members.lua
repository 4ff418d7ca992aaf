-- with: base jobs batches waiting
-- Put jobs that have nothing special but a batch (T1): all of the same, with numbers that follow one another.
--
-- ARGV[5]  the token of the call, or ''
-- ARGV[6]  the batch
-- ARGV[7]  the number of the first
-- ARGV[8]  MessagePack of {batch = as open_batch() takes it} if that is to be opened first, else ''
-- ARGV[9]  1 to seal it in the end
-- ARGV[10] and more: the kinds and the jobs, as put_plain.lua takes them
--
-- Gives the numbers of the jobs that were not created; their ids are taken.

local repeated = known_token(ARGV[5])
local batch, first = ARGV[6], tonumber(ARGV[7])
local key = batch_key(batch)
local opening = ARGV[8] ~= '' and redis.call('EXISTS', key) == 0 and cmsgpack.unpack(ARGV[8]).batch
local kinds, lines, at = {}, {}, 10

local function line_at(queue, priority)
    local name = of_queue(queue, 'line:' .. priority)
    if not lines[name] then
        lines[name] = {queue = queue, priority = priority, void = of_queue(queue, 'void:' .. priority), entries = {}}
    end
    return lines[name]
end

for k = 1, tonumber(ARGV[10]) do
    kinds[k] = {line = line_at(ARGV[at + 1], ARGV[at + 2]), head = ARGV[at + 3], meta = ARGV[at + 4]}
    at = at + 4
end
local total = tonumber(ARGV[at + 1])
at = at + 1

-- --- which of them are new ------------------------------------------------------------------

local refused, seen, coming, ids = {}, {}, {}, {}
for n = 1, total do
    ids[n] = ARGV[at + 3 * n - 1]
end
local taken = ids_in_use(ids)
for n, id in ipairs(ids) do
    if repeated or taken[id] or seen[id] then
        refused[#refused + 1] = n
        ids[n] = false
    else
        seen[id] = true
        local queue = kinds[tonumber(ARGV[at + 3 * n - 2])].line.queue
        coming[queue] = (coming[queue] or 0) + 1
    end
end
if repeated then
    return refused
end
local full = check_room(coming)
if full then
    return full
end
local n_new = total - #refused
for _, joined in ipairs({opening and opening.parent or false, not opening and n_new > 0 and batch or false}) do
    local shut = joined and is_shut(joined)
    if shut then
        return shut
    end
end

-- --- put them -------------------------------------------------------------------------------

redis.call('INCRBY', base .. 'seq', 0)  -- the first write: where maxmemory is reached, this one is refused
if opening then
    open_batch(opening)
end
if n_new > 0 then
    local born = redis.call('HGET', key, 'born')
    local seq = redis.call('INCRBY', base .. 'seq', n_new) - n_new
    -- What is the same for all of a kind; exchange.lua knows members of one batch by how this begins.
    for _, kind in ipairs(kinds) do
        kind.head = kind.head .. '\n' .. whole(now) .. '\n'
        kind.meta = '\n{"born":' .. born .. ',' .. kind.meta:sub(2, -2) .. ',"member":'
    end
    local records, piece, number = {}, {}, first
    local function end_piece()
        if #piece > 0 then
            list_members(batch, number - #piece, piece)
            piece = {}
        end
    end
    for n = 1, total do
        local id = ids[n]
        if id then
            local kind = kinds[tonumber(ARGV[at + 3 * n - 2])]
            seq = seq + 1
            records[#records + 1] = id
            records[#records + 1] = kind.head .. whole(seq) .. kind.meta .. number .. '}\n' .. ARGV[at + 3 * n]
            kind.line.entries[#kind.line.entries + 1] = id
            piece[#piece + 1] = id
            if #records == CHUNK then
                redis.call('HSET', JOBS, unpack(records))
                records = {}
            end
        else
            end_piece()
        end
        number = number + 1
    end
    if #records > 0 then
        redis.call('HSET', JOBS, unpack(records))
    end
    end_piece()
    redis.call('HINCRBY', key, 'total', n_new)
    redis.call('HINCRBY', key, 'waiting', n_new)
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

for name, line in pairs(lines) do
    if #line.entries > 0 then
        if redis.call('EXISTS', line.void) == 1 then
            named_apart(line.entries, line.void)
        end
        in_chunks('RPUSH', name, line.entries)
        redis.call('ZADD', of_queue(line.queue, 'ranks'), -line.priority, line.priority)
    end
end
for queue, n in pairs(coming) do
    note_queue(queue)
    count(queue, 'put', n)
    wake(queue)
end
if ARGV[9] == '1' then
    seal_batch(batch)
end
remember_token(ARGV[5])
tell_woken()
return refused
