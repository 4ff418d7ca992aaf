-- with: base
-- Up to ARGV[6] members of the batch ARGV[5] whose numbers come after ARGV[7]: of each its number, its id, how it
-- ended and why (or false), its result (or false), and whether it runs (1 or 0).
local key = base .. 'batch:' .. ARGV[5]
local after = ARGV[7] == '' and '-inf' or '(' .. ARGV[7]
local found = redis.call('ZRANGEBYSCORE', key .. ':members', after, '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[6])
local answer = {}
for n = 1, #found, 2 do
    local id = found[n]
    local running = 1
    local ended = redis.call('HGET', key .. ':ended', id)
    if not ended and redis.call('HEXISTS', JOBS, id) == 1 then
        running = redis.call('ZSCORE', LEASES, id) and 1 or 0
    end
    answer[#answer + 1] = {found[n + 1], id, ended, redis.call('HGET', key .. ':results', id), running}
end
return answer
