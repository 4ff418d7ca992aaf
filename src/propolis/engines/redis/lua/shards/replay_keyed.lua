-- with: base sharded
-- Take the unique key ARGV[5] for the dead job ARGV[6], which lives in the shard ARGV[7], and have it replayed there.
-- Gives 0 if somebody else holds the key.
if redis.call('HSETNX', base .. 'unique', ARGV[5], ARGV[6]) == 0 then
    return 0
end
send(tonumber(ARGV[7]), {kind = 'replay', key = ARGV[5], id = ARGV[6]})
return 1
