-- with: base jobs repairing
-- Look through about ARGV[6] of all jobs, from ARGV[5] on ('0' to begin), for those that are not where they can be seen.
-- Gives where to go on, '0' at the end, and of each its id, its queue, what is missing (see repairing.lua), its priority,
-- its number and its entry in the list.
local scan = redis.call('HSCAN', JOBS, ARGV[5], 'COUNT', ARGV[6])
local found = {}
for n = 1, #scan[2], 2 do
    local j = made(scan[2][n], scan[2][n + 1], redis.call('HGET', STATE, scan[2][n]))
    local what = j and not is_going(j.queue) and missing_place(j)
    if what then
        found[#found + 1] = {j.id, j.queue, what, j.priority, whole(j.seq), j.s.entry or j.id}
    end
end
return {scan[1], found}
