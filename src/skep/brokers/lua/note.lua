-- with: base jobs batches settling
-- What running jobs tell about themselves; of leases that are lost it is dropped.
--
-- ARGV[5]  MessagePack of a list of {id, fence, progress or nothing, lines}
-- ARGV[6]  how many lines are kept

for _, told in ipairs(cmsgpack.unpack(ARGV[5])) do
    local j, run = leased(told.id, told.fence)
    if j then
        j.s.progress = told.progress or j.s.progress
        local log = j.s.log or {}
        for _, line in ipairs(told.lines) do
            log[#log + 1] = line
        end
        while #log > tonumber(ARGV[6]) do
            table.remove(log, 1)
        end
        j.s.log = #log > 0 and log or nil
        save_running(j, run)
    end
end
return 1
