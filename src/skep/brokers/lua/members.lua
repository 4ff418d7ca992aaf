-- with: base jobs
-- Up to ARGV[6] members of the batch ARGV[5] whose numbers come after ARGV[7]: of each its number, its id, how it
-- ended and why (or false), its result (or false), and whether it runs (1 or 0).
local after = ARGV[7] == '' and '-inf' or '(' .. ARGV[7]
local found = redis.call('ZRANGEBYSCORE', base .. 'batch_members:' .. ARGV[5], after, '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[6])
local answer = {}
for n = 1, #found, 2 do
    local id = found[n]
    local ended = redis.call('HGET', base .. 'batch_ended:' .. ARGV[5], id)
    local j = not ended and load(id)
    local running = (not j or run_of(j)) and 1 or 0  -- what is no job is a nested batch
    answer[#answer + 1] = {found[n + 1], id, ended, redis.call('HGET', base .. 'batch_results:' .. ARGV[5], id), running}
end
return answer
