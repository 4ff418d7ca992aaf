-- The end of every script where an app is spread over homes.
-- Gives what the verb itself gives, what is to be sent on, of drafts that were refused the id and who is in the way, 1
-- if there are limits of which each home has a share, and the number of the last put.
local answer = verb()
if type(answer) == 'table' and answer.err then
    return answer
end
return {
    answer, owed(), reports, redis.call('EXISTS', base .. 'shares'), redis.call('GET', base .. 'seq') or '0',
}
