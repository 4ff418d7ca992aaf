-- with: base jobs
-- Make the waiting job ARGV[5] due at ARGV[6] (us).  Gives 1, or 0 if it is not waiting.
local j = load(ARGV[5])
if not j or j.s.state or run_of(j) then
    return 0
end
unplace(j)
j.s.due, j.s.exact = ARGV[6], true
add_event(j, 'rescheduled', j.s.attempts or 0, j.s.fence or 0, '', '')
make_ready(j)
save(j)
publish_woken()
return 1
