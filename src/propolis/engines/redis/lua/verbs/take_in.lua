-- with: base jobs batches
-- Take in what strangers pushed to the door of the queue ARGV[5].
--
-- ARGV[6...]  pairs of what was read there, the oldest first, and MessagePack of what it means: {job = draft}, or
--             {broken = draft, error = JSON}, or {} for a job that is there already.  The job of a push that is the
--             oldest now is put and the push is taken away, in one step; where that fails it is set aside.  One that
--             is not the oldest was taken in by somebody else, since everybody begins with the oldest.  So each push
--             is taken in once, however many callers have read it, and two pushes of the same bytes are two jobs.
--
-- Gives how many were taken in.

redis.call('DEL', base .. 'nothing')  -- so that maxmemory does not refuse us: the door only moves what is there

local door = of_queue(ARGV[5], 'incoming')
local n = 0

local function take_in(it)
    if it.job then
        emit({it.job})
    elseif it.broken and not used(it.broken.id) then
        add(it.broken)
        local j = load(it.broken.id)
        unplace(j)
        j.s.error = it.error
        end_job(j, 'dead', dead_us, 'waiting', 'broken')
    end
end

for at = 6, #ARGV, 2 do
    if redis.call('LINDEX', door, -1) == ARGV[at] then
        local fine, problem = pcall(take_in, cmsgpack.unpack(ARGV[at + 1]))
        if not fine and not is_nonsense(problem) then
            error(problem)  -- the server has refused it: it stays at the door
        elseif not fine then
            redis.call('HSET', base .. 'broken', door .. '\n' .. ARGV[at], problem)
        end
        redis.call('RPOP', door)
        n = n + 1
    end
end
publish_woken()
return n
