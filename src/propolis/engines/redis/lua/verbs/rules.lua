-- with: base
-- Up to ARGV[5] rules that come after ARGV[6], or '' to begin, without those that are over: of each kind:scope:name, n,
-- what is said of it, as `keep_terms` keeps that, and its rate, as `keep_rate` does.
local answer, after, most = {}, ARGV[6] == '' and '-' or '(' .. ARGV[6], tonumber(ARGV[5])

local function add(rule)
    local capped = rule:match('^cap:queue:(.*)$')
    local n = capped and redis.call('HGET', base .. 'caps', capped) or redis.call('HGET', base .. 'rules', rule)
    answer[#answer + 1] = rule
    answer[#answer + 1] = n or 0
    answer[#answer + 1] = redis.call('HGET', base .. 'rule_terms', rule) or ''
    answer[#answer + 1] = redis.call('HGET', base .. 'rates', rule) or ''
end

while #answer < 4 * most do
    local some = redis.call('ZRANGEBYLEX', base .. 'rule_names', after, '+', 'LIMIT', 0, most - #answer / 4)
    if #some == 0 then
        break
    end
    for _, rule in ipairs(some) do
        if not is_over(rule) then
            add(rule)
        end
    end
    after = '(' .. some[#some]
end
return answer
