-- with: base jobs batches waiting record_keeping
-- Change records and put jobs (R1): each swap wholly or not at all.
--
-- ARGV[5]  the token of the call, or ''
-- ARGV[6]  MessagePack of swaps, each {changes = {{kind, name, value or keep or neither, expected, at_us,
--          at_in_us, expires_in_us}}, puts = drafts as add() takes them, opens = batches as open_batch() takes them, bounded, refused}.
--
-- Gives MessagePack of the answers: for each {version} or {0, refusal, name}.

local known = ARGV[5] ~= '' and redis.call('HGET', base .. 'swaps', ARGV[5])
if known and tonumber(redis.call('ZSCORE', base .. 'swap_ends', ARGV[5]) or 0) > now then
    return known
end

local function check_versions(changes)
    for _, c in ipairs(changes) do
        local record = record_of(c.kind, c.name)
        local version = record and record.version or 0
        if (c.expected and c.expected ~= version) or (c.keep and not record) then
            return {0, 'version', c.name}
        end
    end
    return nil
end

local function check_puts(s, fresh, coming)
    local full = s.bounded and check_room(coming)
    if full then
        return {0, 'queue-full', full.err:match('PROPOLISFULL %S+ %S+ (.*)$')}
    end
    local opened = {}
    for _, batch in ipairs(s.opens) do
        if redis.call('EXISTS', batch_key(batch.id)) == 0 then
            if batch.parent and not opened[batch.parent] and is_shut(batch.parent) then
                return {0, 'no-batch', batch.parent}
            end
            opened[batch.id] = true
        end
    end
    for _, d in ipairs(fresh) do
        if d.batch and not opened[d.batch] and is_shut(d.batch) then
            return {0, 'no-batch', d.batch}
        end
    end
    return nil
end

local function change(c, version)
    if not c.keep and c.value == nil then
        remove_record(c.kind, c.name)
        return
    end
    store_record(c.kind, c.name, {
        version = version,
        value = c.keep and record_of(c.kind, c.name).value or c.value,
        at = c.at_us or (c.at_in_us and now + c.at_in_us),
        expires = c.expires_in_us and now + c.expires_in_us,
    })
end

local function swap(s)
    if s.refused then  -- by another shard, which was asked before
        return s.refused
    end
    local refusal = check_versions(s.changes)
    if refusal then
        return refusal
    end
    local fresh, coming = fresh_of(s.puts)
    refusal = not send and check_puts(s, fresh, coming)
    if refusal then
        return refusal
    end
    for _, batch in ipairs(s.opens) do
        if elsewhere(batch.shard) then
            send(batch.shard, {kind = 'open', batch = batch})
        elseif redis.call('EXISTS', batch_key(batch.id)) == 0 then
            open_batch(batch)
        end
    end
    local version = next_version()
    for _, c in ipairs(s.changes) do
        change(c, version)
    end
    put_fresh(fresh)
    return {version}
end

-- The first write: where maxmemory is reached, that of what puts or is large is refused; but workers go on to write
-- that they are alive.
local swaps, small = cmsgpack.unpack(ARGV[6]), #ARGV[6] < 4096
for _, s in ipairs(swaps) do
    small = small and (s.refused or #s.puts == 0 and #s.opens == 0)
end
if small then
    redis.call('DEL', base .. 'nothing')
else
    redis.call('INCRBY', base .. 'seq', 0)
end
local answers = {}
for n, s in ipairs(swaps) do
    answers[n] = swap(s)
end
local packed = cmsgpack.pack(answers)
if ARGV[5] ~= '' then
    redis.call('HSET', base .. 'swaps', ARGV[5], packed)
    redis.call('ZADD', base .. 'swap_ends', whole(now + DAY_US), ARGV[5])
end
publish_woken()
return packed
