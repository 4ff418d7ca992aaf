-- with: put_one base waiting plain
-- Put jobs that have nothing special (T1): due now, never expiring, without unique key, batch or chosen id.
--
-- ARGV[5]  the token of the call, or ''
-- ARGV[6]  and more: the kinds and the jobs, as read_call() takes them
--
-- Gives the numbers of the jobs that were not created; their ids are taken.

local call = read_call(6)
local refused = leave_out(call, known_token(ARGV[5]))
local full = check_room(call.coming)
if full then
    return full
end
for _, kind in pairs(call.kinds) do
    kind.meta = '\n' .. kind.meta .. '\n'
end
if call.n_new > 0 then
    write_new(call)
end
line_up(call)
remember_token(ARGV[5])
publish_woken()
return refused
