-- Lists of columns that are said here once.  Where a statement has such a name, it has the list, and behind `j.` each
-- of them is one of j.

-- name: SHOWN_COLUMNS
-- Those of what is shown of a live job `j`, and of `r` if it runs.
j.seq, j.id, j.task, j.queue, j.priority, j.put_us, j.due_us, j.expires_us, j.unique_key, j.limit_key, j.batch,
j.member, j.attempts, j.failures, j.losses, j.crashes, j.fence, j.started_us, j.error, j.progress, j.log, j.history,
j.body, j.checkpoint, coalesce(r.began, 0) AS began, r.fence AS lease_fence, r.attempt, r.until_us,
r.started_us AS lease_started_us, r.holder,
coalesce(r.cancel, 0) AS cancel,
EXISTS (SELECT 1 FROM propolis_parked p
         WHERE p.queue = j.queue AND p.task = j.task AND p.priority = j.priority AND p.seq = j.seq) AS parked

-- name: ARCHIVE_COLUMNS
seq, id, task, queue, priority, put_us, due_us, expires_us, max_crashes, chosen, unique_key, unique_until,
limit_key, batch, member, attempts, failures, losses, crashes, fence, started_us, error, progress, checkpoint,
log, history, body, state, cancel, ended_us, keep_us, reason, result

-- name: LIVE_COLUMNS
-- What the rarer transitions need of a live job.
seq, id, task, queue, priority, pos, due_us, expires_us, max_crashes, chosen, unique_key, limit_key, batch,
member, stepped, attempts, failures, losses, crashes, fence, started_us, history

-- name: LINE_COLUMNS
-- What a lease needs of a job `j`.
j.seq, j.id, j.task, CAST(j.body AS BLOB), j.attempts, j.failures, j.losses, j.crashes,
j.fence, j.put_us, j.batch, j.expires_us, j.limit_key, j.plain, j.checkpoint

-- name: BATCH_COLUMNS
id, body, sealed, live, done, dead, cancelled, created_us, finished_us, keep_us, parent, member

-- name: TALLY_COLUMNS
put, deleted, ready, scheduled, held, parked, running, done, dead, cancelled
