-- with: base sharded jobs replaying batches travelling record_keeping
-- Do what another shard has recorded.  ARGV[5] is its number; ARGV[6...] its messages, in their order.  What was heard
-- before is passed over: `heard` keeps the number of the last message of each shard.

redis.call('DEL', base .. 'nothing')  -- so that maxmemory does not refuse us: what comes was accepted elsewhere

local source = ARGV[5]
local act = {}

function act.draft(m)
    travel(m.draft)
end

function act.free(m)
    free_at(me, m.key, m.id)
end

function act.unclaim(m)
    redis.call('ZREM', base .. 'claims', m.id)
end

function act.move(m)
    if counts_in(m.batch, m.seq, m.joined) then
        redis.call('HINCRBY', batch_key(m.batch), m.from, -1)
        redis.call('HINCRBY', batch_key(m.batch), m.to, 1)
    end
end

function act.step(m)
    step(m.batch, m.id, m.seq, m.was, m.state, m.reason, m.result, m.joined)
end

function act.join(m)
    join(m.batch, m.id, m.number, m.as)
end

function act.unjoin(m)
    unjoin(m.batch, m.id, m.before, m.result, m.as)
end

function act.opening(m)
    travel_batch(m.batch)
end

function act.open(m)
    if redis.call('EXISTS', batch_key(m.batch.id)) == 0 then
        open_batch(m.batch)
    end
end

function act.seal(m)
    if redis.call('EXISTS', batch_key(m.batch)) == 1 then
        seal_batch(m.batch)
    end
end

function act.forget(m)
    for _, id in ipairs(m.ids) do
        forget_member(m.batch, m.born, id)
    end
end

-- How far another shard is with a removal, or that it has finished: all records are here.
function act.removal(m)
    if m.value then
        store_record('removal', m.name, {version = next_version(), value = m.value})
    else
        remove_record('removal', m.name)
    end
end

-- Members of a batch that is being removed are not leased here either.
function act.removing(m)
    if m.removal then
        redis.call('HSET', REMOVALS, m.name, cmsgpack.pack(m.removal))
    else
        redis.call('HDEL', REMOVALS, m.name)
    end
end

-- A job that was retried in a queue of this shard.
function act.job(m)
    if used(m.id) then
        return
    end
    redis.call('HSET', JOBS, m.id, m.record)
    if m.checkpoint then
        redis.call('HSET', CHECKPOINTS, m.id, m.checkpoint)
    end
    local j = made(m.id, m.record)
    j.s, j.queue = m.state, m.state.queue
    make_ready(j)
    save(j)
    note_queue(j.queue)
    count(j.queue, 'put', 1)
end

-- A dead job whose key was taken for it.
function act.replay(m)
    local replayed = replay(load(m.id), true)
    reports[#reports + 1] = m.id
    reports[#reports + 1] = tostring(replayed)
    if replayed == 0 then
        send(tonumber(source), {kind = 'free', key = m.key, id = m.id})
    end
end

-- A share of a limit; of an earlier sharing it counts no more.
function act.lend(m)
    if redis.call('HGET', base .. 'shares', m.field) == m.name then
        redis.call('HINCRBY', base .. 'rules', m.field, m.n)
        wake_for(m.field:match('^limit:(%a+):(.*)$'))
    end
end

-- What one shard at a time owns comes here, or (`to`) goes on from here, since all such moves are kept here.
function act.own(m)
    if m.to and m.to ~= me then
        redis.call('HSET', base .. 'owners', m.on, m.to)
        return send(m.to, {kind = 'own', on = m.on, full = m.full})
    end
    if m.full then
        redis.call('ZADD', base .. 'buckets', m.full, m.on)
    end
    if me == 0 then
        redis.call('HDEL', base .. 'owners', m.on)
    else
        own(m.on)
    end
end

local function hear(m)
    if m.seq > tonumber(redis.call('GET', base .. 'seq') or 0) then
        redis.call('SET', base .. 'seq', whole(m.seq))
    end
    act[m.kind](m)
end

-- One that cannot be understood is set aside, and those after it are heard.
local heard = tonumber(redis.call('HGET', base .. 'heard', source) or 0)
for at = 6, #ARGV do
    local number, packed = ARGV[at]:match('^(%d+)\n(.*)$')
    if not number or tonumber(number) > heard then
        local m = number and unpacked(packed)
        local fine, why = pcall(hear, m)
        if not fine and m and m.seq and act[m.kind or ''] and not is_nonsense(why) then
            error(why)
        elseif not fine then
            redis.call('HSET', base .. 'broken', 'from shard ' .. source .. ': ' .. (number or at), ARGV[at])
        end
        if number then
            heard = tonumber(number)
            redis.call('HSET', base .. 'heard', source, number)  -- each by itself, in case the next one fails
        end
    end
end
publish_woken()
return 1
