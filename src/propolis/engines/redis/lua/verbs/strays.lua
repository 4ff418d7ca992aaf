-- with: base jobs
-- Look through about ARGV[7] of those that are counted under a limit on ARGV[5], a task or key, from ARGV[6] on ('0' to
-- begin), for those that do not run.  Where ARGV[8] is '1' they are counted no more.  Gives where to go on, '0' at the
-- end, and their ids.
local scan = redis.call('SSCAN', limited_by(ARGV[5]), ARGV[6], 'COUNT', ARGV[7])
local strays = strays_among(ARGV[5], scan[2])
if ARGV[8] == '1' then
    in_chunks('SREM', limited_by(ARGV[5]), strays)
end
return {scan[1], strays}
