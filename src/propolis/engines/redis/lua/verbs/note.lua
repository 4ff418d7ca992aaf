-- with: base jobs batches settling waiting
-- Keep what running jobs report while their leases are live (T3b).
--
-- ARGV[5]  MessagePack of a list of {id, fence, holder, queue, lines, puts; and where there is one progress, began, checkpoint}
-- ARGV[6]  how many lines are kept
--
-- Gives the numbers of the notes whose leases were lost, or an error where a job cannot be put; then nothing is kept.

local live, lost, puts, jobs = {}, {}, {}, {}
for n, note in ipairs(cmsgpack.unpack(ARGV[5])) do
    local j, run = leased(note.id, note.fence, note.holder, note.queue)
    if j and tonumber(redis.call('ZSCORE', LEASES, run.bundle) or 0) > now then
        jobs[j.id] = jobs[j.id] or j  -- it may stand there twice
        live[#live + 1] = {j = jobs[j.id], run = run, note = note}
        for _, d in ipairs(note.puts) do
            puts[#puts + 1] = d
        end
    else
        lost[#lost + 1] = n
    end
end

local fresh, coming = fresh_of(puts)
local refused = #fresh > 0 and check_room(coming)
for _, d in ipairs(fresh) do
    refused = refused or (not send and d.batch and is_shut(d.batch))
end
if refused then
    return refused
end

if #fresh == 0 then
    redis.call('DEL', base .. 'nothing')  -- so that maxmemory does not refuse us: a worker's notes come before its outcomes
end
for _, it in ipairs(live) do
    local j, s, note = it.j, it.j.s, it.note
    local log = s.log or {}
    s.progress = note.progress or s.progress
    for _, line in ipairs(note.lines) do
        log[#log + 1] = line
    end
    while #log > tonumber(ARGV[6]) do
        table.remove(log, 1)
    end
    s.log = #log > 0 and log or nil
    if note.began then
        s.began = tonumber(it.run.fence)
    end
    if note.checkpoint then
        redis.call('HSET', CHECKPOINTS, j.id, note.checkpoint)
        s.saved = true
    end
    save_running(j, it.run)
end
put_fresh(fresh)
publish_woken()
return lost
