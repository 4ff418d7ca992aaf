-- How attempts end.

-- Where an app has shards: does one of these drafts take over the unique key of the job?  Then it is not
-- freed: that might arrive before the draft, and somebody else take the key.  See travelling.lua.
local function hands_on(j, drafts)
    for _, d in ipairs(drafts) do
        if j.unique and d.unique == j.unique then
            return true
        end
    end
    return false
end

-- It waits again: at the front, in the order of the whole call, which `released` collects; or for its time.
local function run_again(j, released, delay)
    j.s.due, j.s.exact = whole(now + (delay or 0)), nil
    move_member(j, 'running', waits_as(j))
    if released then
        released[#released + 1] = j
    else
        make_ready(j)
        save(j)
    end
end

-- The lease of a job that had begun ended in silence, or something else killed it (T8).
local MAX_LOSSES, FIRST_PAUSE_US, MAX_PAUSE_US = 10, 5000000, 300000000

local function lose(j, run, released)
    local s = j.s
    s.losses = (s.losses or 0) + 1
    if s.cancel then
        return end_job(j, 'cancelled', cancelled_us, 'running', 'cancelled')
    end
    add_event(j, 'lost', run.attempt, run.fence, run.holder, '')
    if s.losses >= MAX_LOSSES then
        end_job(j, 'dead', dead_us, 'running', 'lost')
    elseif s.losses < 3 then
        run_again(j, released)
    else
        run_again(j, nil, math.min(FIRST_PAUSE_US * 2 ^ (s.losses - 3), MAX_PAUSE_US))
    end
end

-- It took its process with it (T8b).
local function crash(j, run, o, released)
    local s = j.s
    s.crashes = (s.crashes or 0) + 1
    if s.cancel then
        return end_job(j, 'cancelled', cancelled_us, 'running', 'cancelled')
    end
    s.error = o.error
    add_event(j, 'crashed', run.attempt, run.fence, run.holder, o.note)
    if s.crashes >= j.max_crashes then
        end_job(j, 'dead', dead_us, 'running', 'crashed')
    else
        run_again(j, released)
    end
end

-- Retry it, perhaps in another queue, which may be in another shard (T5).
local function retry(j, run, o)
    local s = j.s
    add_event(j, 'retried', run.attempt, run.fence, run.holder, o.note)
    s.failures = (s.failures or 0) + 1
    s.error, s.losses = o.error, nil
    if o.queue and o.queue ~= j.queue then
        count(j.queue, 'deleted', 1)
        if elsewhere(o.shard) then
            s.due, s.exact, s.queue = whole(now + o.delay), nil, o.queue
            move_member(j, 'running', 'retrying')
            return leave_shard(j, o.shard)
        end
        count(o.queue, 'put', 1)
        note_queue(o.queue)
        s.queue, j.queue = o.queue, o.queue
    end
    run_again(j, nil, o.delay)
end

local PAST = {snooze = 'snoozed', release = 'released', unknown = 'parked'}

-- Give it back: the attempt does not count (T7, T12b).
local function give_back(j, run, o, released)
    local s = j.s
    add_event(j, PAST[o.kind], run.attempt, run.fence, run.holder, '')
    s.attempts = run.attempt - 1
    if o.asked then
        s.losses = nil
    end
    s.parked = o.kind == 'unknown' or nil
    if redis.call('EXISTS', RATES) == 1 then
        ruling = ruling or new_ruling()
        ruling.undo_start(j)
    end
    run_again(j, o.kind == 'release' and released, o.delay)
end

local function close_run(j, run)
    end_run(j, run)
    local s = j.s
    s.fence, s.started, s.attempts, s.error, s.parked = tonumber(run.fence), run.started, run.attempt, nil, nil
end

-- End one lease with an outcome that is more than plainly done (T4-T8b, T10-T12b).
--
-- o.kind is done, retry, dead, snooze, release, cancelled, broken, crash, lost or unknown; o.keep and o.delay are in
-- microseconds.  Gives false where the outcome is refused as if the lease were lost.  Those that go to the front are
-- only collected in `released`: the order of the whole call decides their places.
local function settle_one(j, run, o, released)
    local kind, s = o.kind, j.s
    if kind == 'cancelled' and not s.cancel then
        return false
    end
    close_run(j, run)
    if o.opens then
        open_emitted(o.opens)
    end
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
    elseif kind == 'lost' then
        lose(j, run, released)
    elseif kind == 'crash' then
        crash(j, run, o, released)
    elseif s.cancel then  -- asked to stop: it does not become ready again
        end_job(j, 'cancelled', cancelled_us, 'running', 'cancelled')
    elseif kind == 'retry' then
        retry(j, run, o)
    else
        give_back(j, run, o, released)
    end
    return true
end

-- The run of a lease that is still live, with its job; nil where it is lost.
local function leased(id, fence, holder, queue)
    local j = load(id, queue)
    local run = j and run_of(j)
    if run and run.fence == fence and run.holder == holder then
        return j, run
    end
    return nil
end

-- Reap a lease that nobody renewed (T8).  A suspect says when it begins: if it has not, nothing is counted.
local function reap_one(j, run, released)
    local s = j.s
    local suspect = (s.losses or 0) > 0 or (s.crashes or 0) > 0
    close_run(j, run)
    if not suspect or s.began == s.fence then
        lose(j, run, released)
    elseif s.cancel then
        end_job(j, 'cancelled', cancelled_us, 'running', 'cancelled')
    else
        s.attempts = run.attempt - 1
        add_event(j, 'lost', run.attempt, run.fence, run.holder, 'it had not begun')
        run_again(j, released)
    end
end
