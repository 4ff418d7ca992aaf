-- with: base jobs batches record_keeping removing
-- Forget the queue ARGV[5]: waiting jobs are cancelled, ended ones deleted, running ones finish.  Gives how many jobs
-- went in this call; sweeps do the rest.
if redis.call('EXISTS', of_queue(ARGV[5], 'tally')) == 0 then
    return 0
end
local gone = go_on('queue:' .. ARGV[5], set_aside(ARGV[5]), REMOVED_AT_ONCE)
publish_woken()
return gone
