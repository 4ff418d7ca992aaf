-- How attempts end.

-- Where an app is spread over homes: does one of these drafts take over the unique key of the job?  Then it is not
-- freed: that might arrive before the draft, and somebody else take the key.  See travelling.lua.
local function hands_on(j, drafts)
    for _, d in ipairs(drafts) do
        if j.unique and d.unique == j.unique then
            return true
        end
    end
    return false
end

-- End one lease with an outcome that has something to say (T4-T7, T10, T12).
--
-- o.kind is done, retry, dead, snooze, release, cancelled or broken; o.keep and o.delay are in microseconds.
-- Gives false where the outcome is refused as if the lease were lost.  Those that go to the front are only
-- collected in `released`: the order of the whole call decides their places.
local function settle_one(j, run, o, released)
    local kind, s = o.kind, j.s
    if kind == 'cancelled' and not s.cancel then
        return false
    end
    end_run(j, run)
    s.fence, s.started, s.attempts, s.error = tonumber(run.fence), run.started, run.attempt, nil
    if o.emit then
        j.handed_on = send and hands_on(j, o.emit)
        free_key(j)  -- it may hand its own key on
        emit(o.emit, j)
    end
    if kind == 'done' then
        end_job(j, 'done', o.keep, 'running', nil, o.result)
    elseif kind == 'dead' then
        s.failures = (s.failures or 0) + 1
        s.error = o.error
        end_job(j, 'dead', o.keep or dead_us, 'running', o.reason)
    elseif kind == 'broken' then
        s.error = o.error
        end_job(j, 'dead', dead_us, 'running', 'broken')
    elseif kind == 'cancelled' then
        s.error = o.error
        end_job(j, 'cancelled', cancelled_us, 'running', 'cancelled')
    elseif s.cancel then  -- asked to stop: it does not become ready again
        end_job(j, 'cancelled', cancelled_us, 'running', 'cancelled')
    elseif kind == 'retry' then
        tell(j, 'retried', run.attempt, run.fence, run.holder, o.note)
        s.failures = (s.failures or 0) + 1
        s.error = o.error
        s.due = whole(now + o.delay)
        move_member(j, 'running', 'retrying')
        if o.queue and o.queue ~= j.queue then
            count(j.queue, 'deleted', 1)
            if elsewhere(o.home) then
                s.queue = o.queue
                leave_home(j, o.home)
                return true
            end
            count(o.queue, 'put', 1)
            note_queue(o.queue)
            s.queue, j.queue = o.queue, o.queue
        end
        make_ready(j)
        save(j)
    else
        tell(j, kind == 'snooze' and 'snoozed' or 'released', run.attempt, run.fence, run.holder, '')
        s.attempts = run.attempt - 1
        s.due = whole(now + (o.delay or 0))
        move_member(j, 'running', waits_as(j))
        if kind == 'release' then
            released[#released + 1] = j
        else
            make_ready(j)
            save(j)
        end
    end
    return true
end

-- The run of a lease that is still live, with its job; nil where it is lost.
local function leased(id, fence)
    local j = load(id)
    local run = j and run_of(j)
    if run and run.fence == fence then
        return j, run
    end
    return nil
end

-- Reap a lease that nobody renewed (T8).
local function reap_one(j, run, released)
    local s = j.s
    end_run(j, run)
    s.fence, s.started, s.attempts, s.error = tonumber(run.fence), run.started, run.attempt, nil
    s.crashes = (s.crashes or 0) + 1
    if s.cancel then
        end_job(j, 'cancelled', cancelled_us, 'running', 'cancelled')
        return
    end
    tell(j, 'crashed', run.attempt, run.fence, run.holder, '')
    if s.crashes >= j.max_crashes then
        end_job(j, 'dead', dead_us, 'running', 'crashed')
    else
        s.due = whole(now)
        move_member(j, 'running', 'retrying')
        released[#released + 1] = j
    end
end
