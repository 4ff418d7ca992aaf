-- with: base jobs
-- Make live leases end later, or sooner (T3).  They become a bundle of their own.
--
-- ARGV[5]  the span (us)
-- then     of each lease its queue, its id, its fence, its holder
--
-- Gives now, and for each lease -1 (it is lost), 0, or 1 (somebody wants the job stopped).

redis.call('DEL', base .. 'nothing')  -- so that maxmemory does not refuse us: see exchange.lua

local bundle = new_bundle()
local ends, leaving, moved = {}, {}, {}
local ids, known = {}, {}  -- of each queue those that are renewed
local n = 0

local function is_live(of_bundle)
    if ends[of_bundle] == nil then
        ends[of_bundle] = tonumber(redis.call('ZSCORE', LEASES, of_bundle) or 0)
    end
    return ends[of_bundle] > now
end

local function renew(queue, id, fence, holder)
    local running = of_queue(queue, 'running')
    local run = redis.call('HGET', running, id)
    if not run then
        return -1
    end
    local flag, its_fence, its_bundle, rest = run:match('^(.)(%d+)\n(%d+)(\n.*)$')
    if its_fence ~= fence or rest:match('^\n%d+\n[%d.]+\n(.*)$') ~= holder or not is_live(its_bundle) then
        return -1
    end
    if not moved[id] then  -- somebody may name it twice
        moved[id] = true
        n = n + 1
        leaving[its_bundle] = (leaving[its_bundle] or 0) + 1
        redis.call('HSET', running, id, flag .. fence .. '\n' .. bundle .. rest)
        if not ids[queue] then
            ids[queue] = {}
            known[#known + 1] = queue
        end
        ids[queue][#ids[queue] + 1] = id
    end
    local state = flag == 'X' and redis.call('HGET', STATE, id)
    return state and (unpacked(state) or {}).cancel and 1 or 0
end

local renewed = {whole(now)}
ends[bundle] = math.huge
for at = 6, #ARGV, 4 do
    renewed[#renewed + 1] = renew(ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3])
end
if n > 0 then
    local bundled = {}
    for k, queue in ipairs(known) do
        bundled[2 * k - 1], bundled[2 * k] = queue, table.concat(ids[queue], '\n')
    end
    keep_bundle(bundle, tonumber(ARGV[5]), n, bundled)
    leave_bundles(leaving)
end
return renewed
