-- with: base sharded
-- Of each name in ARGV[5...] for how long this shard has owned it, as own.lua tells, and how many run elsewhere.
for at = 5, #ARGV, 3 do
    if (redis.call('HGET', base .. 'owned', ARGV[at]) or ''):match('^%d*') == ARGV[at + 1] then
        redis.call('HSET', base .. 'owned', ARGV[at], ARGV[at + 1] .. ' ' .. ARGV[at + 2])
    end
end
return 1
