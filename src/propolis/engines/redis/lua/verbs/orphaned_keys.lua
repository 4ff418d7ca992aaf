-- with: base jobs
-- Look through about ARGV[6] unique keys, from ARGV[5] on ('0' to begin), for those whose jobs are gone.  Where ARGV[7]
-- is '1' they are freed.  Gives where to go on, '0' at the end, and of each the key and the id.
local scan = redis.call('HSCAN', base .. 'unique', ARGV[5], 'COUNT', ARGV[6])
local found = {}
for n = 1, #scan[2], 2 do
    local key, id = scan[2][n], scan[2][n + 1]
    if redis.call('HEXISTS', JOBS, id) == 0 then
        found[#found + 1], found[#found + 2] = key, id
        if ARGV[7] == '1' then
            redis.call('HDEL', base .. 'unique', key)
        end
    end
end
return {scan[1], found}
