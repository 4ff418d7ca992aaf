-- What `repair` asks of jobs and places; nothing of it is as cheap as what workers do.

-- What is being dropped stands elsewhere, until it is gone.
local function is_going(queue)
    return removal_of('queue:' .. queue) ~= nil
end

local ANYWHERE = {upto = math.huge}

-- What is missing of a job: 'kept' or 'leased' if it is not where ended jobs, or leases, are looked for; 'line' if it can
-- only stand in the list of its line, where nobody can see it without a walk; nil if it is in its place.
local function missing_place(j)
    if j.s.state then
        return not redis.call('ZSCORE', of_queue(j.queue, j.s.state), scheduled_as(j)) and 'kept' or nil
    end
    local run = run_of(j)
    if run then
        local ends = redis.call('ZSCORE', LEASES, run.bundle)
        return not (ends and redis.call('HEXISTS', BUNDLED, run.bundle) == 1) and 'leased' or nil
    end
    return not stands(j, ANYWHERE) and 'line' or nil
end

-- Is this entry of a list one that a lease would take, and rightly?
local function is_right(entry)
    local j = load(entry:match('^[^\n]*'))
    return j and (j.s.entry or j.id) == entry and missing_place(j) == 'line'
end
