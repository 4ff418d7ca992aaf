-- with: base jobs
-- Everything known of the jobs with these ids, ARGV[5...]: for each its id, record, state, run, end of lease, result,
-- checkpoint.
-- What there is not is false; a job that is not there has no record.

local rows = {}
for at = 5, #ARGV do
    local id = ARGV[at]
    local record = redis.call('HGET', JOBS, id)
    local state = record and redis.call('HGET', STATE, id)
    local run, ends, result, checkpoint = false, false, false, false
    if record then
        local j = made(id, record, state)
        local queue = j and j.queue or ''
        run = redis.call('HGET', of_queue(queue, 'running'), id)
        local bundle = run and run:match('^.%d+\n(%d+)')
        ends = bundle and redis.call('ZSCORE', LEASES, bundle)
        result = redis.call('HGET', base .. 'results', id)
        checkpoint = redis.call('HGET', CHECKPOINTS, id)
    end
    rows[#rows + 1] = {id, record, state, run, ends, result, checkpoint}
end
return rows
