-- with: base
-- The id and all fields of up to ARGV[5] batches whose ids come after ARGV[6]; or, if ARGV[5] is 0, of the one with
-- that id.
local ids
if ARGV[5] == '0' then
    ids = {ARGV[6]}
else
    local after = ARGV[6] == '' and '-' or '(' .. ARGV[6]
    ids = redis.call('ZRANGEBYLEX', base .. 'batches', after, '+', 'LIMIT', 0, ARGV[5])
end
local answer = {}
for _, id in ipairs(ids) do
    local fields = redis.call('HGETALL', base .. 'batch:' .. id)
    if #fields > 0 then
        answer[#answer + 1] = {id, fields}
    end
end
return answer
