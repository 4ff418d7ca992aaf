-- with: base sharded
-- The shards that own the names ARGV[5...].
local answer = {}
for at = 5, #ARGV do
    answer[#answer + 1] = tonumber(redis.call('HGET', base .. 'owners', ARGV[at]) or 0)
end
return answer
