-- with: base jobs batches waiting plain
-- Put jobs that have nothing special but a batch (T1): all of the same, with numbers that follow one another.
--
-- ARGV[5]  the token of the call, or ''
-- ARGV[6]  the batch
-- ARGV[7]  the number of the first
-- ARGV[8]  MessagePack of {batch = as open_batch() takes it} if that is to be opened first, else ''
-- ARGV[9]  1 to seal it in the end
-- ARGV[10] and more: the kinds and the jobs, as read_call() takes them
--
-- Gives the numbers of the jobs that were not created; their ids are taken.

local repeated = known_token(ARGV[5])
local batch, first = ARGV[6], tonumber(ARGV[7])
local key = batch_key(batch)
local opening = ARGV[8] ~= '' and redis.call('EXISTS', key) == 0 and cmsgpack.unpack(ARGV[8]).batch
local call = read_call(10)
local refused = leave_out(call, repeated)
if repeated then
    return refused
end
local full = check_room(call.coming)
if full then
    return full
end
for _, joined in ipairs({opening and opening.parent or false, not opening and call.n_new > 0 and batch or false}) do
    local shut = joined and is_shut(joined)
    if shut then
        return shut
    end
end

-- Those whose numbers follow one another are one piece in the list of members.
local function list_new()
    local piece, number = {}, first
    local function end_piece()
        if #piece > 0 then
            list_members(batch, number - #piece, piece)
            piece = {}
        end
    end
    for _, id in ipairs(call.ids) do
        if id then
            piece[#piece + 1] = id
        else
            end_piece()
        end
        number = number + 1
    end
    end_piece()
end

redis.call('INCRBY', base .. 'seq', 0)  -- the first write: where maxmemory is reached, this one is refused
if opening then
    open_batch(opening)
end
if call.n_new > 0 then
    -- What is the same for all of a kind; exchange.lua knows members of one batch by how this begins.
    local born = redis.call('HGET', key, 'born')
    for _, kind in pairs(call.kinds) do
        kind.meta = '\n{"born":' .. born .. ',' .. kind.meta:sub(2, -2) .. ',"member":'
    end
    write_new(call, first)
    list_new()
    redis.call('HINCRBY', key, 'total', call.n_new)
    redis.call('HINCRBY', key, 'waiting', call.n_new)
end
line_up(call)
if ARGV[9] == '1' then
    seal_batch(batch)
end
remember_token(ARGV[5])
publish_woken()
return refused
