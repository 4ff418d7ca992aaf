-- Jobs come in, end, and step the batches that they belong to.

local add, step  -- each may lead to the other: what ends may put a callback

-- The id comes last: it may look like anything.
local function batch_key(batch, what)
    return base .. (what or 'batch:') .. batch
end

-- Put what follows from a step, or from the end of the job `from`; what is already there is left out.
local function emit(drafts, from)
    for _, d in ipairs(drafts) do
        if send then
            travel(d, from)
        elseif not (d.unique and redis.call('HEXISTS', base .. 'unique', d.unique) == 1) and not used(d.id) then
            add(d)
        end
    end
end

-- Does a member with this number among all puts count in the batch?  One that was put before the batch was born
-- belonged to another of that name.  So nobody has to look for the members of a batch that is gone.  Shards number
-- their puts each for itself: there a member knows when the batch that it joined was born (nil: it is a nested batch,
-- and does not).
local function counts_in(batch, seq, joined)
    local born = redis.call('HGET', batch_key(batch), 'born')
    if send then
        return born and (not joined or born == joined)
    end
    return born and redis.number_or(0, born) < seq
end

-- One member of a batch counts as something else now: waiting, retrying or running.
local function move_member(j, from, to)
    if j.batch and not j.s.stepped and elsewhere(j.batch_shard) then
        send(j.batch_shard, {kind = 'move', batch = j.batch, from = from, to = to, joined = j.s.joined})
    elseif j.batch and not j.s.stepped and counts_in(j.batch, j.seq, j.s.joined) then
        redis.call('HINCRBY', batch_key(j.batch), from, -1)
        redis.call('HINCRBY', batch_key(j.batch), to, 1)
    end
end

-- The ids of members whose numbers follow one another from the first on are one piece, or some if they are many.
local function list_members(batch, first, ids)
    for from = 1, #ids, CHUNK do
        local to = math.min(from + CHUNK - 1, #ids)
        redis.call('ZADD', batch_key(batch, 'batch_members:'), first + from - 1, table.concat(ids, '\n', from, to))
    end
    local width = math.min(#ids, CHUNK)
    if width > redis.number_or(1, redis.call('HGET', batch_key(batch), 'widest')) then
        redis.call('HSET', batch_key(batch), 'widest', width)
    end
end

-- An error where nobody may join a batch from outside.
local function is_shut(batch)
    local fields = redis.call('HMGET', batch_key(batch), 'created', 'sealed')
    if not fields[1] then
        return redis.error_reply('PROPOLISUNKNOWN ' .. batch)
    elseif fields[2] then
        return redis.error_reply('PROPOLISSEALED ' .. batch)
    end
    return nil
end

-- As what a waiting job counts in its batch.
local function waits_as(j)
    local s = j.s
    local has_run = (s.failures or 0) > 0 or (s.losses or 0) > 0 or (s.crashes or 0) > 0
    return has_run and 'retrying' or 'waiting'
end

-- One more member of a batch: gives when that was born, or false where it is finished or gone.  An id that has ended
-- there before lives again.
local function join(batch, id, number, as)
    local key, ended = batch_key(batch), batch_key(batch, 'batch_ended:')
    local fields = redis.call('HMGET', key, 'born', 'finished')
    if not fields[1] or fields[2] then
        return false
    end
    local before = redis.call('HGET', ended, id)
    if before then
        redis.call('HDEL', ended, id)
        redis.call('HDEL', batch_key(batch, 'batch_results:'), id)
        redis.call('HINCRBY', key, before:match('^[^\n]*'), -1)
    else
        redis.call('HINCRBY', key, 'total', 1)
    end
    list_members(batch, number, {id})
    redis.call('HINCRBY', key, as, 1)
    return fields[1]
end

-- Put one job that is known to be new (T1).
--
-- d.id, d.head (flag and task), d.meta, d.body, d.queue, d.priority; and where there is one: d.chosen, d.unique,
-- d.batch, d.member, d.delay (us), d.due (us, as text), d.expires (us, as text), d.expires_in (us);
-- and where it was accepted in another shard: d.seq and d.put (us), its number and the time of that.
function add(d)
    local seq, put = d.seq or redis.call('INCR', base .. 'seq'), math.min(d.put or now, now)
    local j = {id = d.id, put = put, seq = seq, queue = d.queue, priority = d.priority, s = {}}
    if d.due then
        j.s.due, j.s.exact = d.due, true
    elseif d.delay then
        j.s.due = whole(put + d.delay)
    end
    local expires = d.expires
    if d.expires_in and (not expires or put + d.expires_in < tonumber(expires)) then
        expires = whole(put + d.expires_in)
    end
    if expires then
        j.s.expires = expires
    end
    if d.unique and not d.keyed then
        redis.call('HSET', base .. 'unique', d.unique, d.id)
    end
    if d.batch and d.joined == nil then
        d.joined = join(d.batch, d.id, d.member or 0, 'waiting')
    end
    if d.batch and not d.joined then
        j.s.stepped = true
    elseif send then
        j.s.joined = d.joined
    end
    local record = d.head .. '\n' .. whole(put) .. '\n' .. whole(seq) .. '\n' .. d.meta .. '\n' .. d.body
    redis.call('HSET', JOBS, d.id, record)
    make_ready(j)
    if next(j.s) then
        save(j)
    end
    note_queue(d.queue)
    count(d.queue, 'put', 1)
end

-- --- batches --------------------------------------------------------------------------------

local function remove_batch(batch)
    redis.call('UNLINK', batch_key(batch), batch_key(batch, 'batch_members:'), batch_key(batch, 'batch_ended:'),
               batch_key(batch, 'batch_results:'))
    redis.call('ZREM', base .. 'batches', batch)
    redis.call('ZREM', base .. 'batch_ends', batch)
end

local function load_batch(batch)
    local values = redis.call('HGETALL', batch_key(batch))
    if #values == 0 then
        return nil
    end
    local b = {}
    for n = 1, #values, 2 do
        b[values[n]] = values[n + 1]
    end
    for _, name in ipairs({'total', 'done', 'dead', 'cancelled', 'member', 'keep_for', 'born'}) do
        b[name] = tonumber(b[name] or 0) or 0
    end
    return b
end

-- A nested batch counts as one running member of its parent.
local function step_parent(b, id, state)
    local shard = tonumber(b.parent_shard)
    if b.parent and elsewhere(shard) then
        send(shard, {kind = 'step', batch = b.parent, id = id, was = 'running', state = state})
    elseif b.parent then
        step(b.parent, id, b.born, 'running', state)
    end
end

local function callbacks(b, names)
    local calls = unpacked(b.calls) or {}
    local drafts = {}
    for _, name in ipairs(names) do
        drafts[#drafts + 1] = calls[name]
    end
    emit(drafts)
end

local function finish_batch(batch)
    local key = batch_key(batch)
    local b = load_batch(batch)
    local succeeded = b.done == b.total
    redis.call('HSET', key, 'finished', whole(now), 'keep', whole(now + b.keep_for))
    redis.call('ZADD', base .. 'batch_ends', whole(now + b.keep_for), batch)
    callbacks(b, succeeded and {'on_succeeded', 'on_finished'} or {'on_finished'})
    step_parent(b, batch, succeeded and 'done' or 'dead')
    if b.keep_for == 0 then
        remove_batch(batch)
    end
end

local function finish_if_over(batch)
    local b = load_batch(batch)
    if b and b.sealed and not b.finished and b.done + b.dead + b.cancelled == b.total then
        finish_batch(batch)
    end
end

-- So many members of a batch, which ran, are done and leave nothing: they are in no hash, and no longer there.
local function step_done(batch, born, n)
    local key = batch_key(batch)
    if redis.call('HGET', key, 'born') == born then
        redis.call('HINCRBY', key, 'running', -n)
        redis.call('HINCRBY', key, 'done', n)
        finish_if_over(batch)
    end
end

-- One member of a batch, which counted there as `was`, has ended (B1); `seq` is its number among all puts.
function step(batch, id, seq, was, state, reason, result, joined)
    local key = batch_key(batch)
    if not counts_in(batch, seq, joined) then
        return
    end
    redis.call('HSET', batch_key(batch, 'batch_ended:'), id, reason and (state .. '\n' .. reason) or state)
    if result then
        redis.call('HSET', batch_key(batch, 'batch_results:'), id, result)
    end
    redis.call('HINCRBY', key, was, -1)
    redis.call('HINCRBY', key, state, 1)
    if state ~= 'done' and redis.call('HSETNX', key, 'failed', 1) == 1 then
        callbacks(load_batch(batch), {'on_failed'})
    end
    finish_if_over(batch)
end

-- Open a batch; one that is there already keeps what it was opened with.
local function open_batch(d)
    local key = batch_key(d.id)
    redis.call('HSET', key, 'body', d.body, 'calls', cmsgpack.pack(d.calls), 'keep_for', whole(d.keep_for),
               'created', whole(now), 'member', d.member, 'born', whole(redis.call('INCR', base .. 'seq')))
    redis.call('ZADD', base .. 'batches', 0, d.id)
    redis.call('ZADD', base .. 'batch_ends', whole(now + d.open_for), d.id)
    if d.parent and d.joined == nil then
        d.joined = true
        if elsewhere(d.parent_shard) then
            send(d.parent_shard, {kind = 'join', batch = d.parent, id = d.id, number = d.member, as = 'running'})
        else
            d.joined = join(d.parent, d.id, d.member, 'running')
        end
    end
    if d.joined then
        redis.call('HSET', key, 'parent', d.parent, 'parent_shard', d.parent_shard or '')
    end
end

-- Open what an outcome opens, unless it is there.  It may join a sealed parent, and stands alone where that is over.
local function open_emitted(batches)
    for _, d in ipairs(batches) do
        if send then
            travel_batch(d)
        elseif redis.call('EXISTS', batch_key(d.id)) == 0 then
            open_batch(d)
        end
    end
end

local function seal_batch(batch)
    if redis.call('HSETNX', batch_key(batch), 'sealed', 1) == 0 then
        return 0
    end
    redis.call('ZREM', base .. 'batch_ends', batch)
    finish_if_over(batch)
    return 1
end

-- --- ends -----------------------------------------------------------------------------------

-- End a job that is no longer waiting or running, with all that follows.  `keep` is for how long (us) it is
-- kept; nil or 0: not at all.  `was` is as what it counted in its batch.
local function end_job(j, state, keep, was, reason, result)
    free_key(j)
    if j.chosen then
        redis.call('ZADD', base .. 'known', whole(now + DAY_US), j.id)
    end
    if j.s.expires then
        redis.call('ZREM', base .. 'expiring', j.id)
    end
    if j.batch and not j.s.stepped and elsewhere(j.batch_shard) then
        send(j.batch_shard, {
            kind = 'step', batch = j.batch, id = j.id, was = was, state = state, reason = reason, result = result,
            joined = j.s.joined,
        })
    elseif j.batch and not j.s.stepped then
        step(j.batch, j.id, j.seq, was, state, reason, result, j.s.joined)
    end
    j.s.stepped = true
    if not keep or keep == 0 then
        forget(j)
        return
    end
    if state ~= 'dead' then
        drop_checkpoint(j)
    end
    j.s.state, j.s.ended, j.s.keep, j.s.reason, j.s.parked = state, now, now + keep, reason, nil
    if result then
        redis.call('HSET', base .. 'results', j.id, result)
    end
    redis.call('ZADD', of_queue(j.queue, state), whole(now), scheduled_as(j))
    redis.call('ZADD', base .. 'keep', whole(now + keep), j.id)
    if state == 'dead' then
        count_dead(j.queue)
    end
    save(j)
end

-- A job of which something cannot be read is dead, and keeps what is left of it.
function shelve(id, queue, why)
    local record = redis.call('HGET', JOBS, id) or ''
    redis.call('HDEL', of_queue(queue, 'running'), id)
    redis.call('HDEL', STATE, id)
    redis.call('HDEL', CHECKPOINTS, id)
    redis.call('ZREM', base .. 'expiring', id)
    local j = made(id, record)
    if not j or j.queue ~= queue then
        local seq = redis.call('INCR', base .. 'seq')
        record = table.concat({'X(broken)', whole(now), whole(seq), cjson.encode({queue = queue}), record}, '\n')
        redis.call('HSET', JOBS, id, record)
        j = made(id, record)
    end
    count_out(j)
    j.s.error = cjson.encode({type = 'BrokenStorage', message = why})
    end_job(j, 'dead', dead_us, 'waiting', 'broken')
end

-- Has something failed because a value was not what it must be, and not because the server refused?
local function is_nonsense(problem)
    return type(problem) == 'string'
        and (problem:find('attempt to', 1, true) or problem:find('bad argument', 1, true)) ~= nil
end

-- Do something with a job of this queue.  Where that fails because something about it is not what it should be, the job
-- goes to the shelf: gives nil.
local function with_care(id, queue, act, ...)
    local fine, answer = pcall(act, ...)
    if fine then
        return answer
    end
    if not is_nonsense(answer) then
        error(answer)
    end
    shelve(id, queue, tostring(answer))
    return nil
end

-- End a job that has waited too long (T11); it stands nowhere any more.
local function expire(j)
    end_job(j, 'dead', dead_us, waits_as(j), 'expired')
end

-- A batch is forgotten, which was born at `born`: so is this member, if it waits here.  Gives how many went.
local function forget_member(batch, born, id)
    local j = load(id)
    local own = j and j.batch == batch and (send and j.s.joined == whole(born) or not send and j.seq > born)
    if not own or j.s.state or j.s.stepped or run_of(j) then
        return 0
    end
    unplace(j)
    j.s.stepped = true
    end_job(j, 'cancelled', nil)
    return 1
end

-- Was its batch deleted, and it has only not gone yet?
local function was_removed(j)
    local r = j.batch and not j.s.stepped and removal_of('batch:' .. j.batch)
    return r and (send and r.borns[j.s.joined] or not send and j.seq <= r.upto)
end
