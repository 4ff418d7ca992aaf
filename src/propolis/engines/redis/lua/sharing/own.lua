-- with: base sharded
-- Which of the names ARGV[5...] this shard owns: of each '' if it does not, or what tells this time from others.
local answer = {}
for at = 5, #ARGV do
    local on = ARGV[at]
    if me == 0 and redis.call('HEXISTS', base .. 'owners', on) == 0 and redis.call('HEXISTS', base .. 'owned', on) == 0 then
        own(on)
    end
    answer[#answer + 1] = (redis.call('HGET', base .. 'owned', on) or ''):match('^%d*')
end
return answer
