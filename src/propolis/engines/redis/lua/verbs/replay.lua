-- with: base jobs replaying
-- Give dead jobs a new life at the back of their queue (T13).  ARGV[5...] are their ids.
-- Gives for each 1, or 0 if it is not dead, or somebody else holds its key.

local answers = {}
for at = 5, #ARGV do
    answers[#answers + 1] = replay(load(ARGV[at]))
end
publish_woken()
return answers
