-- Lists of columns that are said here once.  Where another of these files has such a name, it has the list, and
-- behind `j.` each of them is one of j.

-- name: CARRIED_COLUMNS
-- What a job takes along, wherever it goes.
put_us, due_us, expires_us, fence, started_us, rank, max_crashes, attempts, failures, crashes, queue, id, task, body,
chosen, unique_key, unique_until, limit_key, batch, member, stepped, error, progress, log, history, checkpoint, losses

-- name: WAITING_COLUMNS
seq, pos, CARRIED_COLUMNS

-- name: NEW_COLUMNS
-- Those that are not empty when a job comes in.
seq, pos, put_us, due_us, expires_us, rank, max_crashes, attempts, failures, crashes, queue, id, task, body, chosen,
unique_key, unique_until, limit_key, batch, member

-- name: RUN_COLUMNS
until_us, holder, cancel, began, number

-- name: END_COLUMNS
ended_us, keep_us, reason, result

-- name: MEMBER_COLUMNS
-- Those of a job (seq, pos and so on), of member `m` of chunk `c`.
m.seq, m.seq, m.put_us, m.due_us, NULL, c.fence, c.started_us, m.rank, m.max_crashes, 1, 0, 0, c.queue,
m.id, m.task, m.body, NULL, NULL, NULL, NULL, c.batch, m.member, NULL, NULL, NULL, NULL, NULL, NULL,
NULL, c.until_us, c.holder, NULL, NULL, m.place, 'running', NULL, NULL, NULL, NULL
