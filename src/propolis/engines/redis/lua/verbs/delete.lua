-- with: base jobs
-- Forget ended jobs (T14).  ARGV[5...] are their ids.  Gives for each 1, or 0 if it is unknown or has not ended.
local answers = {}
for at = 5, #ARGV do
    local j = load(ARGV[at])
    local ended = j and j.s.state
    if ended then
        forget(j)
    end
    answers[#answers + 1] = ended and 1 or 0
end
return answers
