-- Limits that hold for several shards together.
--
-- Each shard has a share of such a limit, as the rule itself: so many may run there.  Shard 0 has the rest, in `pool`.
-- A share moves from one shard to another by message, so that it is never in two of them.  What runs in a shard beyond
-- its share, because it ran when the limit was made, is covered by what stays in the pool.

local SHARES, POOL = base .. 'shares', base .. 'pool'

-- The share of this shard, and how many run here, of the limit `field`: limit:<scope>:<name>.  While that is being
-- counted it is more than any limit.
local function share_of(field)
    local scope, name = field:match('^limit:(%a+):(.*)$')
    local running
    if scope == 'queue' then
        running = redis.call('HLEN', of_queue(name, 'running'))
    else
        local on = scope .. ':' .. name
        running = redis.call('SISMEMBER', base .. 'counting', on) == 1 and 2 ^ 40
            or redis.call('SCARD', base .. 'limited:' .. on)
    end
    return tonumber(redis.call('HGET', base .. 'rules', field) or 0), running
end
