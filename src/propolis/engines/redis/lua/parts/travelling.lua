-- How a draft comes to its queue where an app has shards: by the shard of its batch, where it becomes a
-- member, by that of its unique key, which it takes there, and by that of its id, which a producer that has chosen it
-- claims there.  Where it is refused after that, all of this is undone.

local function free_at(shard, key, id)
    if elsewhere(shard) then
        send(shard, {kind = 'free', key = key, id = id})
    elseif redis.call('HGET', base .. 'unique', key) == id then
        redis.call('HDEL', base .. 'unique', key)
    end
end

-- This member never came to be: its batch is what it was before.
local function unjoin(batch, id, before, result, as)
    local key, ended = batch_key(batch), batch_key(batch, 'batch_ended:')
    if not redis.call('ZSCORE', batch_key(batch, 'batch_members:'), id) or redis.call('HEXISTS', ended, id) == 1 then
        return
    end
    redis.call('HINCRBY', key, as or 'waiting', -1)
    if before then
        redis.call('HSET', ended, id, before)
        redis.call('HINCRBY', key, before:match('^[^\n]*'), 1)
        if result then
            redis.call('HSET', batch_key(batch, 'batch_results:'), id, result)
        end
    else
        redis.call('ZREM', batch_key(batch, 'batch_members:'), id)
        redis.call('HINCRBY', key, 'total', -1)
    end
    finish_if_over(batch)
end

-- It is left out; `holder` is the job in its place.
local function refuse_draft(d, holder)
    reports[#reports + 1] = d.id
    reports[#reports + 1] = holder
    if d.keyed then
        free_at(d.unique_shard, d.unique, d.id)
    elseif d.heir_of then
        free_at(d.unique_shard, d.unique, d.heir_of)
    end
    if d.claimed and elsewhere(d.id_shard) then
        send(d.id_shard, {kind = 'unclaim', id = d.id})
    elseif d.claimed then
        redis.call('ZREM', base .. 'claims', d.id)
    end
    if d.joined and elsewhere(d.batch_shard) then
        send(d.batch_shard, {kind = 'unjoin', batch = d.batch, id = d.id, before = d.before, result = d.result})
    elseif d.joined then
        unjoin(d.batch, d.id, d.before, d.result)
    end
end

-- Make it a member.  Gives false if it is one that has not ended: then its id is taken, wherever that job is.
local function enter(d, batch, as)
    local before = redis.call('HGET', batch_key(batch, 'batch_ended:'), d.id)
    if not before and redis.call('ZSCORE', batch_key(batch, 'batch_members:'), d.id) then
        return false
    end
    d.before = before or nil
    d.result = before and redis.call('HGET', batch_key(batch, 'batch_results:'), d.id) or nil
    d.joined = join(batch, d.id, d.member or 0, as)
    return true
end

-- Take the key.  Gives the job that holds it, if one does; but what `heir_of` held has been handed on.
local function take_key(d)
    local holder = redis.call('HGET', base .. 'unique', d.unique)
    if holder and holder ~= d.heir_of then
        return holder
    end
    redis.call('HSET', base .. 'unique', d.unique, d.id)
    d.keyed = true
    return nil
end

local function send_draft(shard, d)
    d.seq = d.seq or redis.call('INCR', base .. 'seq')
    d.put = d.put or now
    send(shard, {kind = 'draft', draft = d})
end

-- Claim the id.  Gives false if somebody else has, in the last day: then that job is there, or on its way.  Two puts
-- may have been checked at the same time, each before the job of the other was there.
local function claim(d)
    local known = redis.call('ZSCORE', base .. 'claims', d.id)
    if known and tonumber(known) > now then
        return false
    end
    redis.call('ZADD', base .. 'claims', whole(now + DAY_US), d.id)
    d.claimed = true
    return true
end

-- Do here what is to be done for it on its way.  Gives the job in its place, if there is one.
local function stop_here(d)
    if d.batch and d.joined == nil and d.batch_shard == me and not enter(d, d.batch, 'waiting') then
        return d.id
    end
    local holder = d.unique and not d.keyed and d.unique_shard == me and take_key(d)
    if not holder and d.id_shard == me and not d.claimed then
        return not claim(d) and d.id
    end
    return holder
end

-- Bring a draft as far as this shard can.  `from` is the job that has emitted it, if one has.
--
-- d.via are the shards that it still has to pass, d.shard is where it will live.  Those of one put that are for one
-- queue pass the same shards, also where only some of them have something to do there: so they arrive in their order.
function travel(d, from)
    if not d.seq then
        raise_clock(now - 1)
    end
    if from and d.unique and d.unique == from.unique then
        d.heir_of = from.id
    end
    if d.shard == me and used(d.id) then
        return refuse_draft(d, d.id)
    end
    while d.via[1] do
        if d.via[1] ~= me then
            return send_draft(d.via[1], d)
        end
        table.remove(d.via, 1)
        local holder = stop_here(d)
        if holder then
            return refuse_draft(d, holder)
        end
    end
    if d.shard ~= me then
        return send_draft(d.shard, d)
    end
    add(d)
end

-- Bring a batch that an outcome opens as far as this shard can: by the shard of its parent, where it becomes a member before
-- anything that is sent there later, such as the end of its job.  Its own members go the same way: see way_of() in
-- shard_map.py.  So they find it.
function travel_batch(d)
    if d.parent and d.joined == nil then
        if elsewhere(d.parent_shard) then
            return send(d.parent_shard, {kind = 'opening', batch = d})
        elseif not enter(d, d.parent, 'running') then
            return  -- it is there, or on its way
        end
    end
    if elsewhere(d.shard) then
        send(d.shard, {kind = 'opening', batch = d})
    elseif redis.call('EXISTS', batch_key(d.id)) == 0 then
        open_batch(d)
    elseif d.joined and elsewhere(d.parent_shard) then
        send(d.parent_shard, {
            kind = 'unjoin', batch = d.parent, id = d.id, before = d.before, result = d.result, as = 'running',
        })
    elseif d.joined then
        unjoin(d.parent, d.id, d.before, d.result, 'running')
    end
end
