-- The end of every script where an app has shards.
-- Gives what the verb itself gives, what is to be sent on, of drafts that were refused the id and that of the job
-- in the way, 1 if there are limits of which each shard has a share, and the number of the last put.
local answer = verb()
if type(answer) == 'table' and answer.err then
    return answer
end
return {
    answer, owed(), reports, redis.call('EXISTS', base .. 'shares'), redis.call('GET', base .. 'seq') or '0',
}
