-- with: base jobs repairing
-- Where ARGV[5] is '1', jobs that stood nowhere wait again, and leases that nobody would end, end now.  Of each, from
-- ARGV[6] on, its id and the entry by which it was sought.  Gives the ids of those with which it is so: whoever has moved
-- since is none.
local found, leases = {}, {}

-- A name of its own lets nobody who has looked at the same time do this a second time.
local function stand_apart(j)
    redis.call('ZREM', of_queue(j.queue, 'front'), j.id)
    for _, group in ipairs(groups_of(j)) do
        redis.call('ZREM', of_queue(j.queue, 'held:' .. group), j.id)
    end
    j.s.apart = true
    make_ready(j)
    j.s.apart = nil
    save(j)
    note_queue(j.queue)
end

local function mend(j, what)
    if what == 'kept' then
        redis.call('ZADD', of_queue(j.queue, j.s.state), whole(j.s.ended or now), scheduled_as(j))
        redis.call('ZADD', base .. 'keep', 'NX', whole(j.s.keep or now), j.id)
        if j.s.state == 'dead' then
            count_dead(j.queue)
        end
    elseif what == 'leased' then
        leases[#leases + 1] = j
    else
        stand_apart(j)
    end
end

for at = 6, #ARGV, 2 do
    local j = load(ARGV[at])
    local what = j and not is_going(j.queue) and missing_place(j)
    if what and (what ~= 'line' or (j.s.entry or j.id) == ARGV[at + 1]) then
        found[#found + 1] = j.id
        if ARGV[5] == '1' then
            mend(j, what)
        end
    end
end
if #leases > 0 then
    local bundle, ids = new_bundle(), {}
    for _, j in ipairs(leases) do
        local run = run_of(j)
        local value = run.value:gsub('^(.%d+\n)%d+', function(fence) return fence .. bundle end)
        redis.call('HSET', of_queue(j.queue, 'running'), j.id, value)
        ids[#ids + 1], ids[#ids + 2] = j.queue, j.id
    end
    keep_bundle(bundle, 0, #leases, ids)
end
publish_woken()
return found
