-- with: base
-- Up to ARGV[5] rules that come after ARGV[6], or '' to begin: of each kind:scope:name and n.
local after = ARGV[6] == '' and '-' or '(' .. ARGV[6]
local answer = {}
for _, field in ipairs(redis.call('ZRANGEBYLEX', base .. 'rule_names', after, '+', 'LIMIT', 0, ARGV[5])) do
    local capped = field:match('^cap:queue:(.*)$')
    local n = capped and redis.call('HGET', base .. 'caps', capped) or redis.call('HGET', base .. 'rules', field)
    answer[#answer + 1] = field
    answer[#answer + 1] = n or 0
end
return answer
