-- with: base
-- Everything known of the jobs with these ids, ARGV[5...]: for each its id, record, state, run, end of lease, result.
-- What there is not is false; a job that is not there has no record.

local rows = {}
for at = 5, #ARGV do
    local id = ARGV[at]
    local record = redis.call('HGET', JOBS, id)
    local state = record and redis.call('HGET', STATE, id)
    local run, ends, result = false, false, false
    if record then
        local queue = state and cmsgpack.unpack(state).queue
        queue = queue or cjson.decode(record:match('^[^\n]*\n%d+\n%d+\n([^\n]*)\n')).queue
        run = redis.call('HGET', of_queue(queue, 'running'), id)
        ends = run and redis.call('ZSCORE', LEASES, run:match('^.%d+\n(%d+)'))
        result = redis.call('HGET', base .. 'results', id)
    end
    rows[#rows + 1] = {id, record, state, run, ends, result}
end
return rows
