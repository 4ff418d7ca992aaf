-- with: base jobs batches
-- Up to ARGV[6] members of the batch ARGV[5] whose numbers come after ARGV[7]: of each its number, its id, how it
-- ended and why (or false), its result (or false), and whether it runs (1 or 0).

local batch, most = ARGV[5], tonumber(ARGV[6])
local after = ARGV[7] == '' and -1 or tonumber(ARGV[7])
local key, pieces = batch_key(batch), batch_key(batch, 'batch_members:')
local widest = math.max(1, redis.number_or(1, redis.call('HGET', key, 'widest')))

-- Pieces are in the order of their first numbers, and may overlap where several added at once.  So we go on until the
-- next one begins after all that are wanted.
local found, seen, last = {}, {}, nil

local function by_number(one, other)
    return one[1] < other[1] or (one[1] == other[1] and one[2] < other[2])
end

local function open_piece(number, ids)
    for id in ids:gmatch('[^\n]+') do
        if number > after and not seen[id] then
            seen[id] = true
            found[#found + 1] = {number, id}
        end
        number = number + 1
    end
    if #found >= most and (not last or number <= last) then
        table.sort(found, by_number)
        last = found[most][1]
    end
end

local at = 0
while true do
    local step = math.max(1, math.floor((most - #found) / widest))
    local some = redis.call('ZRANGEBYSCORE', pieces, after - widest + 1, '+inf', 'WITHSCORES', 'LIMIT', at, step)
    for n = 1, #some, 2 do
        local first = tonumber(some[n + 1])
        if last and first > last then
            some = {}
            break
        end
        open_piece(first, some[n])
    end
    if #some < 2 * step then
        break
    end
    at = at + step
end
table.sort(found, by_number)

-- What is not there any more, and of which nothing was written down, is done: see step_done().  Where there are shards,
-- all of it is written down, and what is not here may be there.
local function member_row(number, id)
    local ended = redis.call('HGET', batch_key(batch, 'batch_ended:'), id)
    local result = ended and redis.call('HGET', batch_key(batch, 'batch_results:'), id)
    local running = 0
    if not ended then
        local j = load(id)
        if j and j.batch == batch and not j.s.stepped and counts_in(batch, j.seq, j.s.joined) then
            running = run_of(j) and 1 or 0
        elseif send or redis.call('EXISTS', batch_key(id)) == 1 then
            running = 1  -- a nested batch
        else
            ended = 'done'
        end
    end
    return {whole(number), id, ended, result, running}
end

local answer = {}
for n = 1, math.min(most, #found) do
    answer[n] = member_row(found[n][1], found[n][2])
end
return answer
