-- with: base waiting
-- Put jobs that have nothing special (T1): due now, never expiring, without unique key, batch or chosen id.
--
-- ARGV[5]  the token of the call, or ''
-- ARGV[6]  how many kinds of jobs; of each its queue, its priority, its head (flag and task), its meta
-- then     how many jobs; of each the number of its kind, its id, its body
--
-- Gives the numbers of the jobs that were not created; their ids are taken.

local repeated = known_token(ARGV[5])
local kinds, lines, at = {}, {}, 6

-- Kinds of one queue and one priority stand in one line, in the order of the call.
local function line_of(queue, priority)
    local name = of_queue(queue, 'line:' .. priority)
    if not lines[name] then
        lines[name] = {queue = queue, priority = priority, void = of_queue(queue, 'void:' .. priority), entries = {}}
    end
    return lines[name]
end

for k = 1, tonumber(ARGV[6]) do
    kinds[tostring(k)] = {  -- as the jobs name it
        line = line_of(ARGV[at + 1], ARGV[at + 2]),
        head = ARGV[at + 3] .. '\n' .. whole(now) .. '\n',
        meta = '\n' .. ARGV[at + 4] .. '\n',
    }
    at = at + 4
end
local total = tonumber(ARGV[at + 1])
at = at + 1

-- --- which of them are new ------------------------------------------------------------------

local refused, seen = {}, {}
local coming = {}

local ids = {}
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
        local queue = kinds[ARGV[at + 3 * n - 2]].line.queue
        coming[queue] = (coming[queue] or 0) + 1
    end
end
local full = check_room(coming)
if full then
    return full
end

-- --- put them -------------------------------------------------------------------------------

local n_new = total - #refused
local seq = n_new > 0 and redis.call('INCRBY', base .. 'seq', n_new) - n_new or 0
local records = {}
local function write_records()
    if #records > 0 then
        redis.call('HSET', JOBS, unpack(records))
        records = {}
    end
end
for n = 1, total do
    local id = ids[n]
    if id then
        local kind = kinds[ARGV[at + 3 * n - 2]]
        seq = seq + 1
        records[#records + 1] = id
        records[#records + 1] = kind.head .. whole(seq) .. kind.meta .. ARGV[at + 3 * n]
        local entries = kind.line.entries
        entries[#entries + 1] = id
        if #records == CHUNK then
            write_records()
        end
    end
end
write_records()

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
remember_token(ARGV[5])
tell_woken()
return refused
