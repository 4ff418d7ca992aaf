-- with: base jobs repairing
-- Look through about ARGV[8] of the places ARGV[6] of the queue ARGV[5], from ARGV[7] on ('0' to begin), for those of no
-- job.  Where ARGV[9] is '1' they are cleared.  Gives where to go on, '0' at the end, and how many they are.
local what, key = ARGV[6], of_queue(ARGV[5], ARGV[6])
local hashed, numbered = what == 'running', what ~= 'front' and not what:find('^held:')
local scan = redis.call(hashed and 'HSCAN' or 'ZSCAN', key, ARGV[7], 'COUNT', ARGV[8])
local n = 0
for k = 1, #scan[2], 2 do
    local member = scan[2][k]
    local id = numbered and not hashed and scheduled_id(member) or member
    if redis.call('HEXISTS', JOBS, id) == 0 then
        n = n + 1
        if ARGV[9] == '1' then
            redis.call(hashed and 'HDEL' or 'ZREM', key, member)
        end
    end
end
if n > 0 and ARGV[9] == '1' and what:find('^held:') then
    forget_group(ARGV[5], what:sub(6))
elseif n > 0 and ARGV[9] == '1' and what == 'dead' then
    count_dead(ARGV[5])
end
return {scan[1], n}
