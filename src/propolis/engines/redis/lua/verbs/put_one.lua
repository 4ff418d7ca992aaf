-- The common case of put_plain.lua, before all else: one job, and nothing unusual about the call or its queue.
--
-- Each call of a script makes all of its functions anew.  They, the tables for many jobs and the guard of each command
-- cost more than the commands themselves, so there is none of that here.  Where anything is unusual, everything that was
-- written is taken back, but for the number, and what follows does it all with care.

if #ARGV == 15 then
    local call, base, of_queue = redis.pcall, KEYS[1], ARGV[1] .. '{' .. ARGV[7] .. '}:'
    local now, token, queue, priority, id = ARGV[2], ARGV[5], ARGV[7], ARGV[8], ARGV[14]
    local line, tally = of_queue .. 'line:' .. priority, of_queue .. 'tally'
    if now == '' then
        local time = call('TIME')
        now = time[1] .. ('00000' .. time[2]):sub(-6)
    end
    -- What is of another type than it should have gives a table here and below, and is unusual (L7).
    local usual = call('EXISTS', base .. 'caps', of_queue .. 'void:' .. priority) == 0
        and not call('ZSCORE', base .. 'known', id)
    -- The first write: where maxmemory is reached, this one is refused.
    local seq = usual and tonumber(call('INCRBY', base .. 'seq', 1))
    if seq and (token == ''
            or call('ZADD', base .. 'tokens', 'NX', ('%.0f'):format(now + 86400000000), token) == 1) then
        local record = ARGV[9] .. '\n' .. now .. '\n' .. ('%.0f'):format(seq) .. '\n' .. ARGV[10] .. '\n' .. ARGV[15]
        if call('HSETNX', base .. 'jobs', id, record) == 1 then
            local stands, counted = call('RPUSH', line, id), call('HINCRBY', tally, 'put', 1)
            if tonumber(stands) and tonumber(counted)
                    and tonumber(call('ZADD', of_queue .. 'ranks', -priority, priority))
                    and tonumber(call('ZADD', base .. 'queues', 'NX', 0, queue)) then
                call('PUBLISH', of_queue .. 'news', '')
                return {}
            end
            if tonumber(stands) then
                call('RPOP', line)
            end
            if tonumber(counted) then
                call('HINCRBY', tally, 'put', -1)
            end
            call('HDEL', base .. 'jobs', id)
        end
        if token ~= '' then
            call('ZREM', base .. 'tokens', token)
        end
    end
end
