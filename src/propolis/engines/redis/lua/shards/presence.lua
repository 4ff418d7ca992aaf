-- with: base sharded jobs
-- Whether these jobs, ARGV[5...], are here: of each 0 (no), 1 (it waits or has ended) or 2 (it runs).
local answer = {}
for at = 5, #ARGV do
    local j = load(ARGV[at])
    answer[#answer + 1] = not j and 0 or run_of(j) and 2 or 1
end
return answer
