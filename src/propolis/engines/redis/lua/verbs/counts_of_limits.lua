-- with: base jobs
-- Look through about ARGV[6] of all jobs, from ARGV[5] on ('0' to begin), for what limits count of their tasks and keys.
-- Gives where to go on, '0' at the end, and the names of those counts.
local scan = redis.call('HSCAN', JOBS, ARGV[5], 'COUNT', ARGV[6])
local seen, found = {}, {}
for n = 1, #scan[2], 2 do
    local j = made(scan[2][n], scan[2][n + 1])
    for _, on in ipairs(j and {'task:' .. j.task, j.key and 'key:' .. j.key} or {}) do
        if not seen[on] and redis.call('EXISTS', limited_by(on)) == 1 then
            found[#found + 1] = on
        end
        seen[on] = true
    end
end
return {scan[1], found}
