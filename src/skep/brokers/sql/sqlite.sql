-- Every statement of the SQLite engine.  Arrays come as JSON texts, read by json_each.

-- name: counters
SELECT seq, front, fence FROM counter;

-- name: keep_counters
UPDATE counter SET seq = :seq, front = :front, fence = :fence;

-- name: keep_tally
INSERT INTO tally (queue, put, deleted) VALUES (:queue, :put, :deleted)
ON CONFLICT (queue) DO UPDATE SET put = put + excluded.put, deleted = deleted + excluded.deleted;

-- name: used_ids
-- Which of these ids are taken: by a live job, by a kept one, or by one that was chosen less than a day ago.
SELECT id FROM job     WHERE id IN (SELECT value FROM json_each(:ids))
UNION ALL
SELECT id FROM archive WHERE id IN (SELECT value FROM json_each(:ids))
UNION ALL
SELECT id FROM known   WHERE id IN (SELECT value FROM json_each(:ids)) AND until_us > :now_us;

-- name: held_keys
SELECT key, id FROM unique_key WHERE key IN (SELECT value FROM json_each(:keys));

-- name: take_key
INSERT INTO unique_key (key, id) VALUES (:key, :id);

-- name: free_key
DELETE FROM unique_key WHERE key = :key AND id = :id;

-- name: known_token
SELECT 1 FROM token WHERE token = :token AND until_us > :now_us;

-- name: keep_token
INSERT OR REPLACE INTO token (token, until_us) VALUES (:token, :until_us);

-- name: keep_id
INSERT OR REPLACE INTO known (id, until_us) VALUES (:id, :until_us);

-- name: add_job
INSERT INTO job (seq, id, task, queue, priority, pos, put_us, due_us, expires_us, max_crashes, plain, chosen,
                 unique_key, unique_until, limit_key, batch, member, body)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: stand_new
-- The jobs just put that are due join the back of their line.
INSERT INTO ready (queue, priority, pos, seq)
SELECT queue, priority, pos, seq FROM job WHERE seq BETWEEN :first AND :last AND due_us <= :now_us;

-- name: schedule_new
INSERT INTO scheduled (queue, due_us, seq)
SELECT queue, due_us, seq FROM job WHERE seq BETWEEN :first AND :last AND due_us > :now_us;

-- name: waiting_in
-- How many jobs wait in a queue, counted no further than needed.
SELECT count(*) FROM (
    SELECT 1 FROM ready     WHERE queue = :queue UNION ALL
    SELECT 1 FROM scheduled WHERE queue = :queue UNION ALL
    SELECT 1 FROM held      WHERE queue = :queue
    LIMIT :most);

-- name: anything
-- Is there something to lease in this queue?  A cheap look that takes no lock.
SELECT EXISTS (SELECT 1 FROM ready WHERE queue = :queue)
    OR EXISTS (SELECT 1 FROM scheduled WHERE queue = :queue AND due_us <= :now_us)
    OR EXISTS (SELECT 1 FROM held WHERE queue = :queue);

-- name: due
SELECT seq FROM scheduled WHERE queue = :queue AND due_us <= :now_us ORDER BY due_us, seq LIMIT :most;

-- name: unschedule_due
DELETE FROM scheduled WHERE queue = :queue AND due_us = :due_us AND seq = :seq;

-- name: line
-- The next jobs of a queue, in the order in which they are leased.
SELECT r.priority, r.pos, j.seq, j.id, j.task, CAST(j.body AS BLOB), j.attempts, j.failures, j.crashes, j.put_us, j.batch,
       j.expires_us, j.limit_key, j.plain
  FROM ready r JOIN job j ON j.seq = r.seq
 WHERE r.queue = :queue
 ORDER BY r.priority DESC, r.pos
 LIMIT :most;

-- name: leave_line
-- A lease looks at a stretch of the line and everything in it leaves: to run, to end, or to be held.
DELETE FROM ready WHERE queue = :queue AND priority = :priority AND pos BETWEEN :first AND :last;

-- name: start
INSERT INTO running (fence, seq, attempt, until_us, span_us, started_us, holder) VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: free_started_key
-- A key that is held only until its job starts.
DELETE FROM unique_key WHERE (key, id) IN (
    SELECT unique_key, id FROM job WHERE seq = :seq AND unique_until = 'started');

-- name: hold
INSERT INTO held (queue, scope, name, priority, pos, seq) VALUES (:queue, :scope, :name, :priority, :pos, :seq);

-- name: held_groups
-- One step in the index for each, however many are held.
WITH RECURSIVE grp (scope, name) AS (
    SELECT * FROM (SELECT scope, name FROM held WHERE queue = :queue ORDER BY scope, name LIMIT 1)
    UNION ALL
    SELECT (SELECT h.scope FROM held AS h WHERE h.queue = :queue AND (h.scope, h.name) > (grp.scope, grp.name)
             ORDER BY h.scope, h.name LIMIT 1),
           (SELECT h.name FROM held AS h WHERE h.queue = :queue AND (h.scope, h.name) > (grp.scope, grp.name)
             ORDER BY h.scope, h.name LIMIT 1)
      FROM grp WHERE scope IS NOT NULL
)
SELECT scope, name FROM grp WHERE scope IS NOT NULL;

-- name: held_first
SELECT priority, pos, seq FROM held WHERE queue = :queue AND scope = :scope AND name = :name
 ORDER BY priority DESC, pos LIMIT :most;

-- name: unhold
DELETE FROM held WHERE queue = :queue AND scope = :scope AND name = :name AND priority = :priority AND pos = :pos;

-- name: running_in
SELECT count(*) FROM running r JOIN job j ON j.seq = r.seq
 WHERE CASE :scope WHEN 'queue' THEN j.queue WHEN 'task' THEN j.task ELSE j.limit_key END = :name;

-- name: renew
UPDATE running SET until_us = :until_us, span_us = :until_us - :now_us
 WHERE fence = :fence AND until_us > :now_us AND seq = (SELECT seq FROM job WHERE id = :id)
RETURNING cancel;

-- name: leased
-- The running jobs of these leases, with as much of them as the common end needs.
SELECT r.fence, r.seq, j.id, j.queue, j.plain, r.cancel
  FROM json_each(:fences) f JOIN running r ON r.fence = f.value JOIN job j ON j.seq = r.seq;

-- name: running_job
SELECT j.seq, j.id, j.task, j.queue, j.priority, j.pos, j.due_us, j.expires_us, j.max_crashes, j.chosen, j.unique_key,
       j.limit_key, j.batch, j.member, j.stepped, j.attempts, j.failures, j.crashes, j.fence, j.started_us, j.history,
       r.fence AS lease_fence, r.attempt, r.started_us AS lease_started_us, r.holder, r.cancel
  FROM running r JOIN job j ON j.seq = r.seq
 WHERE r.fence = :fence;

-- name: live_job
SELECT seq, id, task, queue, priority, pos, due_us, expires_us, max_crashes, chosen, unique_key, limit_key, batch,
       member, stepped, attempts, failures, crashes, fence, started_us, history
  FROM job WHERE id = :id;

-- name: running_of
SELECT fence, attempt, started_us, holder, cancel FROM running WHERE seq = :seq;

-- name: stop_running
DELETE FROM running WHERE fence IN (SELECT value FROM json_each(:fences));

-- name: end_plain
DELETE FROM job WHERE seq IN (SELECT value FROM json_each(:seqs));

-- name: update_job
UPDATE job SET queue = :queue, pos = :pos, due_us = :due_us, attempts = :attempts, failures = :failures,
               crashes = :crashes, fence = :fence, started_us = :started_us, error = :error, history = :history
 WHERE seq = :seq;

-- name: stand
INSERT INTO ready (queue, priority, pos, seq) VALUES (:queue, :priority, :pos, :seq);

-- name: stand_due
-- A scheduled job whose time has come gets its place.
UPDATE job SET pos = :pos WHERE seq = :seq RETURNING queue, priority, due_us;

-- name: schedule
INSERT INTO scheduled (queue, due_us, seq) VALUES (:queue, :due_us, :seq);

-- name: unstand
DELETE FROM ready WHERE queue = :queue AND priority = :priority AND pos = :pos;

-- name: unschedule
DELETE FROM scheduled WHERE queue = :queue AND due_us = :due_us AND seq = :seq;

-- name: unhold_any
DELETE FROM held WHERE queue = :queue AND priority = :priority AND pos = :pos;

-- name: archive
INSERT INTO archive
SELECT seq, id, task, queue, priority, put_us, due_us, expires_us, max_crashes, chosen, unique_key, unique_until,
       limit_key, batch, member, :attempts, :failures, :crashes, :fence, :started_us, :error, progress, log, :history,
       body, :state, :cancel, :ended_us, :keep_us, :reason, :result
  FROM job WHERE seq = :seq;

-- name: remove_job
DELETE FROM job WHERE seq = :seq;

-- name: note
UPDATE job SET progress = coalesce(:progress, progress), log = :log
 WHERE seq = (SELECT seq FROM running WHERE fence = :fence) AND id = :id;

-- name: log_of
SELECT j.log FROM running r JOIN job j ON j.seq = r.seq WHERE r.fence = :fence AND j.id = :id;

-- name: ask_to_stop
UPDATE running SET cancel = 1 WHERE fence = :fence;

-- name: tell
UPDATE job SET history = :history WHERE seq = :seq;

-- name: anything_to_sweep
SELECT EXISTS (SELECT 1 FROM scheduled WHERE due_us <= :now_us)
    OR EXISTS (SELECT 1 FROM running WHERE until_us <= :now_us OR until_us > :now_us + span_us)
    OR EXISTS (SELECT 1 FROM job WHERE expires_us <= :now_us)
    OR EXISTS (SELECT 1 FROM archive WHERE keep_us <= :now_us)
    OR EXISTS (SELECT 1 FROM known WHERE until_us <= :now_us)
    OR EXISTS (SELECT 1 FROM token WHERE until_us <= :now_us)
    OR EXISTS (SELECT 1 FROM batch WHERE keep_us <= :now_us)
    OR EXISTS (SELECT 1 FROM batch WHERE sealed = 0 AND open_us <= :now_us);

-- name: queues_with_due
SELECT DISTINCT queue FROM scheduled WHERE due_us <= :now_us;

-- name: shorten_leases
-- A lease that ends later than one given now would: the clock was set back.  It starts anew.
UPDATE running SET until_us = :now_us + span_us WHERE until_us > :now_us + span_us;

-- name: lost_leases
SELECT fence FROM running WHERE until_us <= :now_us ORDER BY fence LIMIT :most;

-- name: expired
SELECT id FROM job WHERE expires_us <= :now_us AND seq NOT IN (SELECT seq FROM running) ORDER BY seq LIMIT :most;

-- name: past_keeping
SELECT seq, queue FROM archive WHERE keep_us <= :now_us ORDER BY keep_us LIMIT :most;

-- name: full_shelves
SELECT queue, count(*) AS n FROM archive WHERE state = 'dead' GROUP BY queue HAVING n > :most;

-- name: oldest_dead
SELECT seq, queue FROM archive WHERE queue = :queue AND state = 'dead' ORDER BY ended_us, seq LIMIT :most;

-- name: remove_archived
DELETE FROM archive WHERE seq = :seq;

-- name: forget_ids
DELETE FROM known WHERE id IN (SELECT id FROM known WHERE until_us <= :now_us LIMIT :most);

-- name: forget_tokens
DELETE FROM token WHERE token IN (SELECT token FROM token WHERE until_us <= :now_us LIMIT :most);

-- name: batches_over
SELECT id FROM batch WHERE keep_us <= :now_us OR (sealed = 0 AND open_us <= :now_us) LIMIT :most;

-- name: next_moment
SELECT min(moment) FROM (
    SELECT min(due_us) AS moment FROM scheduled WHERE due_us > :now_us UNION ALL
    SELECT min(until_us) FROM running WHERE until_us > :now_us UNION ALL
    SELECT min(next_us) FROM schedule WHERE NOT paused AND next_us > :now_us);

-- name: any_schedule_due
SELECT EXISTS (SELECT 1 FROM schedule WHERE NOT paused AND next_us <= :now_us);

-- name: batch_row
SELECT id, body, sealed, live, done, dead, cancelled, created_us, finished_us, keep_us, parent, member
  FROM batch WHERE id = :id;

-- name: batch_page
SELECT id, body, sealed, live, done, dead, cancelled, created_us, finished_us, keep_us, parent, member
  FROM batch WHERE id > coalesce(:after, '') ORDER BY id LIMIT :most;

-- name: add_batch
INSERT INTO batch (id, body, created_us, open_us, parent, member)
VALUES (:id, :body, :created_us, :open_us, :parent, :member);

-- name: grow_batch
UPDATE batch SET live = live + :n WHERE id = :id AND finished_us IS NULL;

-- name: orphan_members
-- The live members of a batch that is over or gone: they step nothing, also if there is one of that name again.
UPDATE job SET stepped = 1 WHERE batch = :id AND NOT stepped;

-- name: seal_batch
UPDATE batch SET sealed = 1 WHERE id = :id;

-- name: step_batch
UPDATE batch SET live = live - 1, done = done + (:state = 'done'), dead = dead + (:state = 'dead'),
                 cancelled = cancelled + (:state = 'cancelled')
 WHERE id = :id;

-- name: finish_batch
UPDATE batch SET finished_us = :finished_us, keep_us = :keep_us WHERE id = :id;

-- name: remove_batch
DELETE FROM batch WHERE id = :id;

-- name: remove_members
DELETE FROM member WHERE batch = :id;

-- name: add_member
INSERT INTO member (batch, member, id, state, result, reason)
VALUES (:batch, :member, :id, :state, :result, :reason)
ON CONFLICT (batch, member, id) DO UPDATE  -- it had ended and gone, and was put again under its id
   SET state = excluded.state, result = excluded.result, reason = excluded.reason;

-- name: live_members_by_kind
SELECT sum(r.seq IS NULL AND j.failures = 0 AND j.crashes = 0) AS enqueued,
       sum(r.seq IS NULL AND (j.failures > 0 OR j.crashes > 0)) AS retrying,
       sum(r.seq IS NOT NULL) AS running
  FROM job j LEFT JOIN running r ON r.seq = j.seq
 WHERE j.batch = :batch AND NOT j.stepped;

-- name: live_children
SELECT count(*) FROM batch WHERE parent = :batch AND finished_us IS NULL;

-- name: members
-- Ended members, live jobs and live nested batches, by number.
SELECT member, id, state, result, reason FROM (
    SELECT member, id, state, result, reason FROM member WHERE batch = :batch
    UNION ALL
    SELECT j.member, j.id, CASE WHEN r.seq IS NULL THEN 'ready' ELSE 'running' END, NULL, NULL
      FROM job j LEFT JOIN running r ON r.seq = j.seq WHERE j.batch = :batch AND NOT j.stepped
    UNION ALL
    SELECT member, id, 'running', NULL, NULL FROM batch WHERE parent = :batch AND finished_us IS NULL)
 WHERE member > coalesce(:after, -1)
 ORDER BY member, id
 LIMIT :most;

-- name: waiting_members
SELECT id FROM job WHERE batch = :batch AND NOT stepped AND seq NOT IN (SELECT seq FROM running);

-- name: schedule_row
SELECT name, body, next_us, last_us, paused FROM schedule WHERE name = :name;

-- name: schedule_rows
SELECT name, body, next_us, last_us, paused FROM schedule
 WHERE :due = 0 OR (NOT paused AND next_us <= :now_us) ORDER BY name;

-- name: keep_schedule
INSERT INTO schedule (name, body, next_us) VALUES (:name, :body, :next_us)
ON CONFLICT (name) DO UPDATE SET body = excluded.body, next_us = excluded.next_us;

-- name: pause_schedule
UPDATE schedule SET paused = :paused WHERE name = :name AND paused <> :paused RETURNING 1;

-- name: remove_schedule
DELETE FROM schedule WHERE name = :name RETURNING 1;

-- name: fire
UPDATE schedule SET last_us = next_us, next_us = :next_us
 WHERE name = :name AND next_us = :instant_us AND next_us <= :now_us AND NOT paused
RETURNING 1;

-- name: rules
SELECT kind, scope, name, n FROM rule ORDER BY kind, scope, name;

-- name: add_rule
INSERT INTO rule (kind, scope, name, n) VALUES (:kind, :scope, :name, :n)
ON CONFLICT (kind, scope, name) DO UPDATE SET n = excluded.n WHERE n <> excluded.n
RETURNING 1;

-- name: remove_rule
DELETE FROM rule WHERE kind = :kind AND scope = :scope AND name = :name RETURNING 1;

-- name: archived_job
SELECT * FROM archive WHERE id = :id;

-- name: revive
INSERT INTO job (seq, id, task, queue, priority, pos, put_us, due_us, expires_us, max_crashes, plain, chosen,
                 unique_key, unique_until, limit_key, batch, member, stepped, fence, history, body)
SELECT seq, id, task, queue, priority, :pos, put_us, :now_us, NULL, max_crashes, 0, chosen,
       unique_key, unique_until, limit_key, batch, member, 1, fence, :history, body
  FROM archive WHERE id = :id;

-- name: delete_archived
DELETE FROM archive WHERE id = :id RETURNING queue;

-- name: waiting_of_queue
SELECT id FROM job WHERE queue = :queue AND seq NOT IN (SELECT seq FROM running) ORDER BY seq;

-- name: drop_archived
DELETE FROM archive WHERE queue = :queue;

-- name: any_of_queue
SELECT EXISTS (SELECT 1 FROM job WHERE queue = :queue);

-- name: drop_tally
DELETE FROM tally WHERE queue = :queue;

-- name: place_of
SELECT j.queue, j.priority, j.pos, j.due_us, j.seq,
       EXISTS (SELECT 1 FROM running r WHERE r.seq = j.seq) AS running,
       EXISTS (SELECT 1 FROM scheduled s WHERE s.queue = j.queue AND s.due_us = j.due_us AND s.seq = j.seq) AS coming
  FROM job j WHERE j.id = :id;

-- name: before_in_line
-- Those that stand before it, and those that have become due and would join a line before it.
SELECT (SELECT count(*) FROM (SELECT priority, pos FROM ready WHERE queue = :queue UNION ALL
                              SELECT priority, pos FROM held WHERE queue = :queue)
         WHERE priority > :priority OR (priority = :priority AND (:coming OR pos < :pos)))
     + (SELECT count(*) FROM scheduled s JOIN job j ON j.seq = s.seq
         WHERE s.queue = :queue AND s.due_us <= :now_us
           AND (j.priority > :priority
                OR (j.priority = :priority AND :coming AND (s.due_us, s.seq) < (:due_us, :seq))))
       AS before;

-- name: count_ready
SELECT queue, count(*) FROM ready GROUP BY queue;

-- name: count_scheduled
SELECT queue, sum(due_us <= :now_us), sum(due_us > :now_us) FROM scheduled GROUP BY queue;

-- name: count_held
SELECT queue, count(*) FROM held GROUP BY queue;

-- name: count_running
SELECT j.queue, count(*) FROM running r JOIN job j ON j.seq = r.seq GROUP BY j.queue;

-- name: count_archived
SELECT queue, state, count(*) FROM archive GROUP BY queue, state;

-- name: tallies
SELECT queue, put, deleted FROM tally ORDER BY queue;

-- name: find_live
SELECT j.seq, j.id, j.task, j.queue, j.priority, j.put_us, j.due_us, j.expires_us, j.unique_key, j.limit_key, j.batch,
       j.member, j.attempts, j.failures, j.crashes, j.fence, j.started_us, j.error, j.progress, j.log, j.history, j.body,
       r.fence AS lease_fence, r.attempt, r.until_us, r.started_us AS lease_started_us, r.holder,
       coalesce(r.cancel, 0) AS cancel
  FROM job j LEFT JOIN running r ON r.seq = j.seq
 WHERE j.seq > :after
   AND (:queue IS NULL OR j.queue = :queue)
   AND (:task IS NULL OR j.task = :task)
   AND (:batch IS NULL OR j.batch = :batch)
   AND (:waiting IS NULL OR r.seq IS NULL)
   AND (:scheduled IS NULL OR (r.seq IS NULL AND j.due_us > :now_us) = :scheduled)
 ORDER BY j.seq
 LIMIT :most;

-- name: find_running
-- From the few that run, and not through all that wait.
SELECT j.seq, j.id, j.task, j.queue, j.priority, j.put_us, j.due_us, j.expires_us, j.unique_key, j.limit_key, j.batch,
       j.member, j.attempts, j.failures, j.crashes, j.fence, j.started_us, j.error, j.progress, j.log, j.history, j.body,
       r.fence AS lease_fence, r.attempt, r.until_us, r.started_us AS lease_started_us, r.holder,
       coalesce(r.cancel, 0) AS cancel
  FROM running r JOIN job j ON j.seq = r.seq
 WHERE j.seq > :after
   AND (:queue IS NULL OR j.queue = :queue)
   AND (:task IS NULL OR j.task = :task)
   AND (:batch IS NULL OR j.batch = :batch)
 ORDER BY j.seq
 LIMIT :most;

-- name: get_live
SELECT j.seq, j.id, j.task, j.queue, j.priority, j.put_us, j.due_us, j.expires_us, j.unique_key, j.limit_key, j.batch,
       j.member, j.attempts, j.failures, j.crashes, j.fence, j.started_us, j.error, j.progress, j.log, j.history, j.body,
       r.fence AS lease_fence, r.attempt, r.until_us, r.started_us AS lease_started_us, r.holder,
       coalesce(r.cancel, 0) AS cancel
  FROM job j LEFT JOIN running r ON r.seq = j.seq
 WHERE j.id = :id;

-- name: find_archived
SELECT * FROM archive
 WHERE seq > :after
   AND (:queue IS NULL OR queue = :queue)
   AND (:task IS NULL OR task = :task)
   AND (:batch IS NULL OR batch = :batch)
   AND (:state IS NULL OR state = :state)
   AND (:reason IS NULL OR reason = :reason)
 ORDER BY seq
 LIMIT :most;
