-- What the rules on queues, tasks and keys let start, and the buckets of those limits that are rates.
--
-- A bucket is kept as the time at which it is full, until then (GCRA); one that is not kept has been full for ever.

local RATES, BUCKETS, REFILLS = base .. 'rates', base .. 'buckets', base .. 'refills'
local FREE, SHUT = math.huge, 0

-- Made where a call needs it, since most have nothing to do with rules.
local function new_ruling()
    local ruling = {
        limited = false,  -- has a limit kept something back?  The job whose end makes room may be elsewhere
        again_at = nil,   -- when the first rule is over, or has a token, that kept something back
        counts = false,   -- was there too much to count for this call?
    }
    local limits, prefixes, is_wide = {}, nil, nil
    local found, shut_until, running = {}, {}, {}
    local full_at, changed, refills = {}, {}, {}

    local there = {}  -- which of these keys exist

    local function is_there(what)
        if there[what] == nil then
            there[what] = redis.call('EXISTS', base .. what) == 1
        end
        return there[what]
    end

    local function ends_of(rule)
        local at = is_there('rule_ends') and redis.call('ZSCORE', base .. 'rule_ends', rule)
        return at and tonumber(at) or nil
    end

    -- A limit is {rule, n, ends}, and has {every, burst} besides where it is a rate; nil where it is over.
    local function read_limit(rule, n)
        local ends = ends_of(rule)
        if ends and ends <= now then
            return nil
        end
        local rate = is_there('rates') and redis.call('HGET', RATES, rule)
        local every, burst = (rate or ''):match('^(%d+) (%d+)$')
        every, burst = tonumber(every), tonumber(burst)
        local is_rate = every and every > 0 and burst > 0
        return {rule = rule, n = redis.number_or(0, n), ends = ends, every = is_rate and every or nil, burst = burst}
    end

    -- The limit on this scope:name; false where there is none.
    local function limit_on(on)
        if limits[on] == nil then
            local rule = 'limit:' .. on
            local n = redis.call('HGET', base .. 'rules', rule)
            limits[on] = n and read_limit(rule, n) or false
        end
        return limits[on]
    end

    -- Are there limits for many keys?  Then all that runs and has a key is counted.
    local function for_many()
        if is_wide == nil then
            is_wide = each_key_counted() ~= nil
        end
        return is_wide
    end

    -- The limit on a key, or on the longest prefix of it; what a name with a star limits is a prefix.
    local function limit_of_key(key)
        local own = key:sub(-1) ~= '*' and limit_on('key:' .. key)
        if own or not for_many() then
            return own
        elseif not prefixes then
            prefixes = redis.call('SMEMBERS', base .. 'prefixes')
            table.sort(prefixes, function(one, other) return #one > #other end)
        end
        for _, prefix in ipairs(prefixes) do
            local limit = key:sub(1, #prefix) == prefix and limit_on('key:' .. prefix .. '*')
            if limit then
                return limit
            end
        end
        return nil
    end

    local function limit_of_task_key(task)
        return for_many() and limit_on('task_key:' .. task .. ' *') or nil
    end

    -- --- buckets ----------------------------------------------------------------------------

    -- When the bucket of a scope:name is full.  What none can be under this limit is put right.
    local function full_under(limit, on)
        local full = full_at[on] or tonumber(redis.call('ZSCORE', BUCKETS, on) or 0)
        local latest = now + limit.burst * limit.every
        if full > latest then
            full, changed[on] = latest, limit
        end
        full_at[on] = full
        return full
    end

    local function fill(limit, on, full)
        full_at[on], changed[on] = full, limit
    end

    local function next_token(limit, on)
        return full_at[on] - (limit.burst - 1) * limit.every
    end

    local function take_tokens(limit, on, n)
        if limit.every then
            fill(limit, on, math.max(full_under(limit, on), now) + n * limit.every)
        end
    end

    -- --- room -------------------------------------------------------------------------------

    -- How many of a queue, task or key run; nil where that is still being counted.
    local function running_under(on)
        if not running[on] and on:sub(1, 6) == 'queue:' then
            running[on] = redis.call('HLEN', of_queue(on:sub(7), 'running'))
        end
        running[on] = running[on] or counted_under(on)
        return running[on]
    end

    -- Does a pause or block that is there hold?
    local function shuts(rule, on)
        local ends = ends_of(rule)
        if ends and ends > now then
            shut_until[on] = math.min(ends, shut_until[on] or math.huge)
        end
        return not ends or ends > now
    end

    -- What the rules on this let start: FREE, SHUT, or what a limit does and whose runs and tokens it counts.
    local function ask(scope, name, on)
        local rules = redis.call('HMGET', base .. 'rules', 'pause:' .. on, 'block:' .. on, 'limit:' .. on)
        local paused, blocked = rules[1] and shuts('pause:' .. on, on), rules[2] and shuts('block:' .. on, on)
        if paused or blocked then
            return SHUT
        end
        local limit
        if scope == 'task_key' then
            local task, key = name:match('^(.-) (.*)$')
            on = 'key:' .. key
            limit = not limit_of_key(key) and limit_of_task_key(task)
        else
            limits[on] = limits[on] or rules[3] and read_limit('limit:' .. on, rules[3]) or false
            limit = scope == 'key' and limit_of_key(name) or scope ~= 'key' and limits[on]
        end
        return limit and {limit = limit, on = on} or FREE
    end

    local function look_again(at)
        ruling.again_at = at and math.min(at, ruling.again_at or math.huge) or ruling.again_at
    end

    local function room_under(limit, on)
        local n, elsewhere = running_under(on), running_elsewhere and running_elsewhere(limit.rule, limit.every, on) or 0
        ruling.counts = ruling.counts or not n
        local left = n and limit.n - n - elsewhere or 0
        ruling.limited = ruling.limited or left <= 0
        if left > 0 and limit.every then
            local full, capacity = full_under(limit, on), limit.burst * limit.every
            left = math.min(left, math.floor((capacity - math.max(0, full - now)) / limit.every))
            if left <= 0 then
                refills[on] = next_token(limit, on)
                look_again(refills[on])
            end
        end
        if left <= 0 then
            look_again(limit.ends)
        end
        return left
    end

    -- How many more may start because of the rules on a queue, a task, a key or a task of one key.
    function ruling.room(scope, name)
        local on = scope .. ':' .. name
        local it = found[on]
        if not it then
            it = ask(scope, name, on)
            found[on] = it
        end
        if it == FREE then
            return FREE
        elseif it == SHUT then
            look_again(shut_until[on])
            return SHUT
        end
        return room_under(it.limit, it.on)
    end

    -- --- starts -----------------------------------------------------------------------------

    local function count_start(on, id)
        running[on] = running[on] and running[on] + 1
        redis.call('SADD', limited_by(on), id)
    end

    -- A job starts.  Where there are limits for many keys, each start with a key is counted.
    function ruling.started(j)
        local of_task, of_key = found['task:' .. j.task], j.key and found['key:' .. j.key]
        if type(of_task) == 'table' then
            count_start(of_task.on, j.id)
            take_tokens(of_task.limit, of_task.on, 1)
        end
        if j.key and type(of_key) ~= 'table' then
            of_key = found['task_key:' .. j.task .. ' ' .. j.key]
        end
        if type(of_key) == 'table' then
            count_start(of_key.on, j.id)
            take_tokens(of_key.limit, of_key.on, 1)
        elseif j.key and for_many() then
            count_start('key:' .. j.key, j.id)
        end
    end

    -- So many have started in a queue.
    function ruling.started_in(queue, n)
        local of_queue = found['queue:' .. queue]
        if type(of_queue) == 'table' and n > 0 then
            take_tokens(of_queue.limit, of_queue.on, n)
        end
    end

    -- Call `with` for each limit that holds for a job, with whose runs and tokens it counts.
    function ruling.each_limit(j, with)
        local of_queue, of_task = limit_on('queue:' .. j.queue), limit_on('task:' .. j.task)
        local of_key = j.key and (limit_of_key(j.key) or limit_of_task_key(j.task))
        if of_queue then
            with(of_queue, 'queue:' .. j.queue)
        end
        if of_task then
            with(of_task, 'task:' .. j.task)
        end
        if of_key then
            with(of_key, 'key:' .. j.key)
        end
    end

    -- A start does not count: each limit that holds for the job now has its token back.
    function ruling.undo_start(j)
        ruling.each_limit(j, function(limit, on)
            if limit.every then
                fill(limit, on, math.max(full_under(limit, on) - limit.every, now))
                refills[on] = next_token(limit, on)
            end
        end)
    end

    -- Write down the buckets that have changed, and when those have a token for which something may wait, here or
    -- elsewhere.
    function ruling.keep()
        local full, times = {}, {}
        for on, limit in pairs(changed) do
            full[#full + 1] = whole(full_at[on])
            full[#full + 1] = on
            local at = next_token(limit, on)
            if at > now and (on:sub(1, 6) == 'queue:' or is_there('holding')) then
                refills[on] = at
            end
        end
        for on, at in pairs(refills) do
            times[#times + 1] = whole(at)
            times[#times + 1] = on
        end
        in_chunks('ZADD', BUCKETS, full)
        in_chunks('ZADD', REFILLS, times)
    end

    -- --- keys and groups ----------------------------------------------------------------------

    -- The task, the key and the meta of a job that has nothing special but its key; nil where that takes more than a look.
    function ruling.read_keyed(record)
        local task, meta = record:match('^K([^\n]*)\n%d+\n%d+\n([^\n]*)\n')
        local key = meta and not meta:find('\\', 1, true) and meta:match('"key":"([^"]*)"')
        if key then
            return task, key, meta
        end
        return nil
    end

    -- Jobs that have nothing special but their keys run no more: see `count_out`.
    function ruling.count_out(queue, ids)
        local counted, freed = {}, {}
        for first = 1, #ids, CHUNK do
            local last = math.min(first + CHUNK - 1, #ids)
            for k, record in ipairs(redis.call('HMGET', JOBS, unpack(ids, first, last))) do
                local task, key = ruling.read_keyed(record or '')
                local j = not key and record and made(ids[first + k - 1], record)
                task, key = task or j and j.task, key or j and j.key
                if task and counted[task] == nil then
                    counted[task] = redis.call('HEXISTS', base .. 'limits', 'task:' .. task) == 1
                end
                if task and counted[task] then
                    redis.call('SREM', limited_by('task:' .. task), ids[first + k - 1])
                end
                if key then
                    redis.call('SREM', limited_by('key:' .. key), ids[first + k - 1])
                    freed[#freed + 1] = 'key:' .. key
                    freed[#freed + 1] = 'task_key:' .. task .. ' ' .. key
                end
            end
        end
        redis.free_groups(queue, freed)
    end

    -- Some groups that may have room, where there are more than one call looks at: those that are known to, of which some
    -- have a token since a moment ago, and a few by chance, or a bite of them if most of these have room.
    local FEW = 20

    function ruling.some_groups(queue, want)
        local holds, freed = of_queue(queue, 'holds'), of_queue(queue, 'freed')
        local groups = redis.call('ZRANGE', freed, 0, math.min(want + FEW, GROUPS) - 1)
        in_chunks('ZREM', freed, groups)
        local refilled = redis.call('ZRANGEBYSCORE', base .. 'refills', '-inf', now, 'LIMIT', 0, want)
        in_chunks('ZREM', base .. 'refills', refilled)
        for _, on in ipairs(refilled) do
            groups[#groups + 1] = redis.call('SISMEMBER', holds, on) == 1 and on or nil
        end
        local with_room, few = 0, redis.call('SRANDMEMBER', holds, FEW)
        for _, group in ipairs(few) do
            with_room = with_room + (ruling.room(group:match('^([%a_]+):(.*)$')) > 0 and 1 or 0)
        end
        few = with_room * 2 > FEW and redis.call('SRANDMEMBER', holds, GROUPS) or few
        for _, group in ipairs(few) do
            groups[#groups + 1] = group
        end
        return groups
    end

    -- Those that still have room, where there are many.
    function ruling.keep_sources(queue, sources)
        local groups = {}
        for _, source in ipairs(sources) do
            groups[#groups + 1] = source.group
        end
        redis.free_groups(queue, groups)
    end

    return ruling
end

local ruling
