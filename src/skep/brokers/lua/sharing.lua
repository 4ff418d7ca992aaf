-- Limits that hold for several homes together.
--
-- Each home has a share of such a limit, as the rule itself: so many may run there.  Home 0 has the rest, in `pool`.  A
-- share moves from one home to another by message, so that it is never in two of them.  What runs in a home beyond its
-- share, because it ran when the limit was made, is covered by what stays in the pool.

local SHARES, POOL = base .. 'shares', base .. 'pool'

-- The share of this home, and how many run here, of the limit `field`: limit:<scope>:<name>.
local function share_of(field)
    local scope, name = field:match('^limit:(%a+):(.*)$')
    local running
    if scope == 'queue' then
        running = redis.call('HLEN', of_queue(name, 'running'))
    else
        running = tonumber(redis.call('HGET', base .. 'limits', scope .. ':' .. name) or 0)
    end
    return tonumber(redis.call('HGET', base .. 'rules', field) or 0), running
end
