-- A dead job gets another life (T13).

-- Gives 0 if it is not dead, or (unless it has taken its key already: `keyed`) somebody else holds that.
local function replay(j, keyed)
    if not j or j.s.state ~= 'dead' then
        return 0
    end
    if j.unique and not keyed and redis.call('HSETNX', base .. 'unique', j.unique, j.id) == 0 then
        return 0
    end
    redis.call('ZREM', of_queue(j.queue, 'dead'), scheduled_as(j))
    redis.call('ZREM', base .. 'keep', j.id)
    count_dead(j.queue)
    local s = j.s
    add_event(j, 'replayed', s.attempts or 0, s.fence or 0, '', 'was dead: ' .. (s.reason or ''))
    j.s = {
        due = whole(now), fence = s.fence, stepped = s.stepped, queue = s.queue, history = s.history, log = s.log,
        progress = s.progress, saved = s.saved,
    }
    make_ready(j)
    save(j)
    return 1
end
