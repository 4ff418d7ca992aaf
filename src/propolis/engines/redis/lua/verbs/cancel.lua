-- with: base jobs batches
-- End waiting jobs, and ask for running ones to be stopped (T9).  ARGV[5...] are their ids.
-- Gives for each 1, or 0 if it is unknown or has ended.

local function cancel(j)
    if not j or j.s.state then
        return 0
    end
    local run = run_of(j)
    if not run then
        unplace(j)
        end_job(j, 'cancelled', cancelled_us, waits_as(j), 'cancelled')
    elseif not j.s.cancel then
        j.s.cancel = true
        add_event(j, 'cancel-requested', run.attempt, run.fence, '', '')
        save_running(j, run)
    end
    return 1
end

local answers = {}
for at = 5, #ARGV do
    answers[#answers + 1] = cancel(load(ARGV[at]))
end
publish_woken()
return answers
