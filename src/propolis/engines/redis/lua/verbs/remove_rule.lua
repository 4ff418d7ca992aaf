-- with: base jobs
-- Forget a rule: ARGV[5] kind, ARGV[6] scope, ARGV[7] name.  Gives 0 if there is none, or it was over.
local there = forget_rule(ARGV[5] .. ':' .. ARGV[6] .. ':' .. ARGV[7])
publish_woken()
return there and 1 or 0
