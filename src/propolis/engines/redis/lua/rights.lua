-- Which of the commands that our scripts use, and whether the channel ARGV[1], the user has no right to.
--
-- KEYS[2]  the key that never exists: each command is tried on it, and what that leaves is gone before the next.
--
-- Gives their names.

local nothing = KEYS[2]
local TRIED = {  -- by the arguments after the key
    [''] = 'EXISTS GET HGETALL HKEYS HLEN INCR LLEN LPOP RPOP SCARD SMEMBERS SRANDMEMBER UNLINK XLEN ZCARD ZRANDMEMBER',
    ['x'] = 'HDEL HEXISTS HGET HMGET LPOS RPUSH SADD SET SISMEMBER SMISMEMBER SREM ZMSCORE ZREM ZSCORE',
    ['x x'] = 'HSET HSETNX',
    ['x 1'] = 'HINCRBY',
    ['0'] = 'HSCAN INCRBY LINDEX PEXPIRE SSCAN ZSCAN',
    ['0 x'] = 'ZADD',
    ['0 0'] = 'LRANGE ZCOUNT ZRANGE ZRANGEBYSCORE ZREMRANGEBYSCORE ZREVRANGE',
    ['- +'] = 'XRANGE ZRANGEBYLEX',
    ['+ -'] = 'ZREVRANGEBYLEX',
    ['* x x'] = 'XADD',
    ['MAXLEN 0'] = 'XTRIM',
}

local missing = {}

local function try(name, ...)
    local answer = redis.pcall(...)
    local error = type(answer) == 'table' and answer.err
    if error and (error:find('ACL failure', 1, true) or error:find('NOPERM', 1, true)
            or error:find('The user executing the script', 1, true)) then
        missing[#missing + 1] = name
    end
end

try('DEL', 'DEL', nothing)
if #missing > 0 then
    return missing  -- nothing could be taken away again
end
try('TIME', 'TIME')
try('PUBLISH, or the channel ' .. ARGV[1], 'PUBLISH', ARGV[1], '')
redis.pcall('SET', nothing, '')
try('RENAME', 'RENAME', nothing, nothing)
redis.call('DEL', nothing)
for arguments, commands in pairs(TRIED) do
    local given = {}
    for argument in arguments:gmatch('%S+') do
        given[#given + 1] = argument
    end
    for command in commands:gmatch('%S+') do
        try(command, command, nothing, unpack(given))
        redis.call('DEL', nothing)
    end
end
table.sort(missing)
return missing
