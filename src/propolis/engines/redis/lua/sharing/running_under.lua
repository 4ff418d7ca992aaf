-- with: base sharded jobs
-- How many run here under each of the names ARGV[5...].  While that is being counted it is more than any limit.  This is
-- asked for what keeps jobs of other shards back: so strays are looked for, a few each time.
local answer = {}
for at = 5, #ARGV do
    drop_few_strays(ARGV[at])
    answer[#answer + 1] = counted_under(ARGV[at]) or 2 ^ 40
end
return answer
