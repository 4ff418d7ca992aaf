-- with: base record_keeping
-- Read records: ARGV[5] their kind, ARGV[6] how many, ARGV[7] 'names', 'due', 'after' or 'before', then the names, or
-- the one to go on after, if there is one.
--
-- Gives {now, whether there are more, {for each its name, version, time, end (us, or '') and value}}.
local kind, most, how, after = ARGV[5], tonumber(ARGV[6]), ARGV[7], ARGV[8]
local names_key = kind_key('record_names', kind)

-- A piece of the names from a place on, and where the next piece begins.
local function piece(from)
    if how == 'due' then
        return redis.call('ZRANGEBYSCORE', kind_key('record_times', kind), '-inf', whole(now), 'LIMIT', from, CHUNK)
    elseif how == 'before' then
        return redis.call('ZREVRANGEBYLEX', names_key, after and '(' .. after or '+', '-', 'LIMIT', from, CHUNK)
    end
    return redis.call('ZRANGEBYLEX', names_key, after and '(' .. after or '-', '+', 'LIMIT', from, CHUNK)
end

local found, more = {}, 0

local function take(name)
    local record = record_of(kind, name)
    if record and how == 'due' and not record.at then  -- it is not due, whatever is written beside it
        redis.call('ZREM', kind_key('record_times', kind), name)
        record = nil
    end
    if not record then
        return true
    elseif #found >= 5 * most then
        more = 1
        return false
    end
    for _, field in ipairs({
        name, whole(record.version), record.at and whole(record.at) or '', record.expires and whole(record.expires) or '',
        record.value,
    }) do
        found[#found + 1] = field
    end
    return true
end

if how == 'names' then
    for n = 8, #ARGV do
        take(ARGV[n])
    end
else
    local from = 0
    repeat
        local names = piece(from)
        from = from + #names
        for _, name in ipairs(names) do
            if not take(name) then
                break
            end
        end
    until #names < CHUNK or more == 1
end
return {whole(now), more, found}
