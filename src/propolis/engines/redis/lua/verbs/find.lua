-- with: base jobs
-- Look through some of all jobs for those that match.
--
-- ARGV[5]  where to go on, '0' to begin
-- ARGV[6]  how many to look at, about
-- ARGV[7]  MessagePack of {queue, task, state, reason, batch, scheduled}, each only if it is asked for
-- ARGV[8]  only those put after this number
-- ARGV[9]  how many are wanted: of those that match, these many that were put first
--
-- Gives {where to go on, '0' at the end; the number and the id of each}.

local where, after, want = cmsgpack.unpack(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local scan = redis.call('HSCAN', JOBS, ARGV[5], 'COUNT', ARGV[6])
local found = {}

local function state_of(j)
    return j.s.state or (run_of(j) and 'running' or 'ready')
end

local function matches(j)
    return (where.queue == nil or j.queue == where.queue)
       and (where.task == nil or j.task == where.task)
       and (where.batch == nil or j.batch == where.batch)
       and (where.reason == nil or j.s.reason == where.reason)
       and (where.state == nil or state_of(j) == where.state)
       and (where.scheduled == nil
            or where.scheduled == (state_of(j) == 'ready' and tonumber(j.s.due or j.put) > now))
end

for n = 1, #scan[2], 2 do
    local id, record = scan[2][n], scan[2][n + 1]
    local seq = tonumber(record:match('^[^\n]*\n%d+\n(%d+)\n'))
    if seq and seq > after then
        local j = made(id, record, redis.call('HGET', STATE, id))
        if j and matches(j) then
            found[#found + 1] = {seq, id}
        end
    end
end
table.sort(found, function(one, other) return one[1] < other[1] end)
local answer = {}
for n = 1, math.min(want, #found) do
    answer[#answer + 1] = whole(found[n][1])
    answer[#answer + 1] = found[n][2]
end
return {scan[1], answer}
