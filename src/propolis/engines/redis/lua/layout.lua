-- Let the layout of what is stored be ARGV[2], if it still is ARGV[1] ('': nothing is stored).  Gives what it is then.
--
-- KEYS[1]  what all keys begin with

local key = KEYS[1] .. 'layout'
if (redis.call('GET', key) or '') == ARGV[1] then
    redis.call('SET', key, ARGV[2])
end
return redis.call('GET', key)
