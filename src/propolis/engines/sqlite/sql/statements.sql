-- Every statement of the SQLite engine.  Arrays come as JSON texts, read by json_each.

-- name: counters
SELECT seq, front FROM propolis_counter;

-- name: keep_counters
UPDATE propolis_counter SET seq = :seq, front = :front, largest_us = max(largest_us, :now_us);

-- name: keep_tally
INSERT INTO propolis_tally (queue, TALLY_COLUMNS)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (queue) DO UPDATE SET
    put = put + excluded.put, deleted = deleted + excluded.deleted, ready = ready + excluded.ready,
    scheduled = scheduled + excluded.scheduled, held = held + excluded.held, parked = parked + excluded.parked,
    running = running + excluded.running, done = done + excluded.done, dead = dead + excluded.dead,
    cancelled = cancelled + excluded.cancelled;

-- name: keep_arrivals
-- The same for a queue that got jobs and is known already: half of the steps.
UPDATE propolis_tally SET put = put + ?, ready = ready + ? WHERE queue = ?;

-- name: tally
SELECT TALLY_COLUMNS FROM propolis_tally WHERE queue = :queue;

-- name: tally_page
SELECT queue, TALLY_COLUMNS FROM propolis_tally WHERE queue > :after ORDER BY queue LIMIT :most;

-- name: count_due
-- Those whose time has come, counted up to a number.
SELECT count(*) FROM (SELECT 1 FROM propolis_scheduled WHERE queue = :queue AND due_us <= :now_us LIMIT :most);

-- name: keep_busy
-- A key or a task that nothing runs of is forgotten by forget_busy.
INSERT INTO propolis_busy (scope, name, running, held) VALUES (?, ?, ?, 0)
ON CONFLICT (scope, name) DO UPDATE SET running = running + excluded.running;

-- name: keep_bucket
-- The same where tokens were taken or given back.
INSERT INTO propolis_busy (scope, name, running, held, full_us) VALUES (?, ?, ?, 0, ?)
ON CONFLICT (scope, name) DO UPDATE SET running = running + excluded.running, full_us = excluded.full_us;

-- name: forget_busy
DELETE FROM propolis_busy WHERE scope = ? AND name = ? AND running = 0 AND full_us <= ?;

-- name: full_buckets
SELECT scope, name FROM propolis_busy WHERE full_us > 0 AND full_us <= :now_us LIMIT :most;

-- name: forget_bucket
UPDATE propolis_busy SET full_us = 0 WHERE scope = :scope AND name = :name;

-- name: busy_with
SELECT running, full_us FROM propolis_busy WHERE scope = :scope AND name = :name;

-- name: busy_keys
SELECT name, running, full_us FROM json_each(:keys) k CROSS JOIN propolis_busy b ON b.scope = 'key' AND b.name = k.value;

-- name: used_ids
-- Which of these ids are taken: by a live job, by a kept one, or by one that was chosen less than a day ago.
SELECT value FROM json_each(:ids)
 WHERE EXISTS (SELECT 1 FROM propolis_job     WHERE id = value)
    OR EXISTS (SELECT 1 FROM propolis_archive WHERE id = value)
    OR EXISTS (SELECT 1 FROM propolis_known   WHERE id = value AND until_us > :now_us);

-- name: held_keys
SELECT key, id FROM propolis_unique_key WHERE key IN (SELECT value FROM json_each(:keys));

-- name: take_key
INSERT INTO propolis_unique_key (key, id) VALUES (:key, :id);

-- name: free_key
DELETE FROM propolis_unique_key WHERE key = :key AND id = :id;

-- name: known_token
SELECT 1 FROM propolis_token WHERE token = :token AND until_us > :now_us;

-- name: keep_token
INSERT OR REPLACE INTO propolis_token (token, until_us) VALUES (:token, :until_us);

-- name: keep_id
INSERT OR REPLACE INTO propolis_known (id, until_us) VALUES (:id, :until_us);

-- name: add_job
INSERT INTO propolis_job (seq, id, task, queue, priority, pos, put_us, due_us, expires_us, max_crashes, plain, chosen,
                          unique_key, unique_until, limit_key, batch, member, body)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: stand_new
-- The jobs just put that are due join the back of their line.
INSERT INTO propolis_ready (queue, priority, pos, seq)
SELECT queue, priority, pos, seq FROM propolis_job WHERE seq BETWEEN :first AND :last AND due_us <= :now_us;

-- name: stand_new_but
-- The same without those that were set aside.
INSERT INTO propolis_ready (queue, priority, pos, seq)
SELECT queue, priority, pos, seq FROM propolis_job WHERE seq BETWEEN :first AND :last AND due_us <= :now_us
   AND seq NOT IN (SELECT value FROM json_each(:held));

-- name: schedule_new
INSERT INTO propolis_scheduled (queue, due_us, seq, epoch)
SELECT queue, due_us, seq, CASE WHEN seq IN (SELECT value FROM json_each(:given)) THEN NULL ELSE :epoch END
  FROM propolis_job WHERE seq BETWEEN :first AND :last AND due_us > :now_us;

-- name: expire_new
INSERT INTO propolis_expiring (expires_us, seq)
SELECT expires_us, seq FROM propolis_job WHERE seq BETWEEN :first AND :last AND expires_us IS NOT NULL;

-- name: let_expire
INSERT OR IGNORE INTO propolis_expiring (expires_us, seq) VALUES (:expires_us, :seq);

-- name: keep_from_expiring
DELETE FROM propolis_expiring WHERE expires_us = :expires_us AND seq = :seq;

-- name: anything
-- Is there something to lease in this queue?  A cheap read that takes no lock.
SELECT NOT EXISTS (SELECT 1 FROM propolis_rule WHERE kind IN ('pause', 'block') AND scope = 'queue' AND name = :queue
                      AND (until_us IS NULL OR until_us > :now_us))
   AND (EXISTS (SELECT 1 FROM propolis_ready WHERE queue = :queue)
     OR EXISTS (SELECT 1 FROM propolis_scheduled WHERE queue = :queue AND due_us <= :now_us)
     OR EXISTS (SELECT 1 FROM propolis_group INDEXED BY propolis_group_opened WHERE queue = :queue AND opened)
     OR EXISTS (SELECT 1 FROM propolis_group WHERE opens_us <= :now_us)
     OR EXISTS (SELECT 1 FROM propolis_parked
                 WHERE queue = :queue AND task IN (SELECT value FROM json_each(:tasks)))
     OR EXISTS (SELECT 1 FROM propolis_rule WHERE until_us <= :now_us));

-- name: any_ready
SELECT 1 WHERE EXISTS (SELECT 1 FROM propolis_ready WHERE queue = :queue)
   OR EXISTS (SELECT 1 FROM propolis_group INDEXED BY propolis_group_opened WHERE queue = :queue AND opened);

-- name: due
SELECT queue, due_us, seq FROM propolis_scheduled WHERE queue = :queue AND due_us <= :now_us ORDER BY due_us, seq LIMIT :most;

-- name: unschedule_due
DELETE FROM propolis_scheduled WHERE queue = :queue AND due_us = :due_us AND seq = :seq;

-- name: line
-- The next jobs of a queue, in the order in which they are leased.
SELECT r.priority, r.pos, LINE_COLUMNS
  FROM propolis_ready r JOIN propolis_job j ON j.seq = r.seq
 WHERE r.queue = :queue
 ORDER BY r.priority DESC, r.pos
 LIMIT :most;

-- name: parked_line
-- The same of a line of parked jobs, from one on.
SELECT p.priority, j.pos, LINE_COLUMNS
  FROM propolis_parked p JOIN propolis_job j ON j.seq = p.seq
 WHERE p.queue = :queue AND p.task = :task AND (-p.priority, p.seq) > (-:priority, :seq)
 ORDER BY p.priority DESC, p.seq
 LIMIT :most;

-- name: park
INSERT INTO propolis_parked (queue, task, priority, seq) VALUES (:queue, :task, :priority, :seq);

-- name: unpark
DELETE FROM propolis_parked WHERE queue = :queue AND task = :task AND priority = :priority AND seq = :seq;

-- name: parked_lines
-- One step in the index for each, however many are parked.
WITH RECURSIVE line (queue, task) AS (
    SELECT queue, task FROM (SELECT queue, task FROM propolis_parked ORDER BY queue, task LIMIT 1)
    UNION ALL
    SELECT (SELECT p.queue FROM propolis_parked AS p WHERE (p.queue, p.task) > (line.queue, line.task)
             ORDER BY p.queue, p.task LIMIT 1),
           (SELECT p.task FROM propolis_parked AS p WHERE (p.queue, p.task) > (line.queue, line.task)
             ORDER BY p.queue, p.task LIMIT 1)
      FROM line WHERE queue IS NOT NULL
     LIMIT :most + 1
)
SELECT queue, task FROM line WHERE queue IS NOT NULL LIMIT :most;

-- name: leave_line
-- A lease reads a stretch of the line and everything in it leaves: to run, to end, or to be held.
DELETE FROM propolis_ready WHERE queue = :queue AND priority = :priority AND pos BETWEEN :first AND :last;

-- name: start
-- One statement for all of them: each row that is bound, or fetched, costs as much as ten steps of the machine.
INSERT INTO propolis_running (seq, fence, attempt, until_us, span_us, started_us, holder)
SELECT seq, max(fence + 1, :now_us), attempts + 1, :until_us, :until_us - :now_us, :now_us, :holder
  FROM json_each(:seqs) l JOIN propolis_job j ON j.seq = l.value;

-- name: free_started_key
-- A key that is held only until its job starts.
DELETE FROM propolis_unique_key WHERE (key, id) IN (
    SELECT unique_key, id FROM propolis_job WHERE seq = :seq AND unique_until = 'started');

-- name: hold
INSERT INTO propolis_held (queue, scope, name, priority, pos, seq) VALUES (?, ?, ?, ?, ?, ?);

-- name: unhold
DELETE FROM propolis_held WHERE queue = ? AND scope = ? AND name = ? AND priority = ? AND pos = ?;

-- name: unhold_any
DELETE FROM propolis_held WHERE seq = :seq RETURNING queue, scope, name;

-- name: held_line
-- The next jobs that are set aside in a group, behind so many of them.
SELECT h.priority, h.pos, LINE_COLUMNS
  FROM propolis_held h CROSS JOIN propolis_job j ON j.seq = h.seq
 WHERE h.queue = :queue AND h.scope = :scope AND h.name = :name
 ORDER BY h.priority DESC, h.pos
 LIMIT :most OFFSET :behind;

-- name: heads
-- The first jobs of some groups, in the order that is given.
SELECT j.priority, j.pos, LINE_COLUMNS FROM json_each(:seqs) l CROSS JOIN propolis_job j ON j.seq = l.value;

-- name: held_group
INSERT OR IGNORE INTO propolis_group (queue, scope, name, opened, opens_us, epoch, key)
VALUES (:queue, :scope, :name, 0, :opens_us, :epoch, :key);

-- name: groups_of_new
-- Of so many keys those with jobs that are set aside in a queue: others join these at once.
SELECT g.scope, g.name FROM json_each(:keys) k CROSS JOIN propolis_group g ON g.key = k.value AND g.queue = :queue;

-- name: lead_group
-- A job that was set aside may come before all others there.
UPDATE propolis_group SET priority = :priority, pos = :pos, seq = :seq
 WHERE queue = :queue AND scope = :scope AND name = :name AND opened
   AND (priority < :priority OR (priority = :priority AND pos > :pos));

-- name: opened_groups
SELECT scope, name, priority, pos, seq FROM propolis_group INDEXED BY propolis_group_opened
 WHERE queue = :queue AND opened ORDER BY priority DESC, pos LIMIT :most;

-- name: is_open
SELECT 1 FROM propolis_group WHERE queue = :queue AND scope = :scope AND name = :name AND opened;

-- name: first_of
SELECT priority, pos, seq FROM propolis_held WHERE queue = :queue AND scope = :scope AND name = :name
 ORDER BY priority DESC, pos LIMIT 1;

-- name: closed_of_keys
-- The groups of keys of which a run has ended, with their first jobs; and not those that wait for a token.
SELECT g.queue, g.scope, g.name, h.priority, h.pos, h.seq
  FROM json_each(:keys) k CROSS JOIN propolis_group g ON g.key = k.value AND NOT g.opened AND g.opens_us IS NULL
  LEFT JOIN propolis_held h ON h.seq = (
       SELECT seq FROM propolis_held f WHERE f.queue = g.queue AND f.scope = g.scope AND f.name = g.name
        ORDER BY f.priority DESC, f.pos LIMIT 1);

-- name: closed_groups_of_key
SELECT queue, scope, name FROM propolis_group WHERE key = :key AND NOT opened;

-- name: closed_groups
SELECT queue, scope, name FROM propolis_group WHERE scope = :scope AND name = :name AND NOT opened;

-- name: open_group
UPDATE propolis_group SET opened = 1, opens_us = NULL, epoch = NULL, priority = ?, pos = ?, seq = ?
 WHERE queue = ? AND scope = ? AND name = ?;

-- name: close_group
UPDATE propolis_group SET opened = 0, opens_us = ?, epoch = ?, priority = NULL, pos = NULL, seq = NULL
 WHERE queue = ? AND scope = ? AND name = ?;

-- name: forget_group
DELETE FROM propolis_group WHERE queue = ? AND scope = ? AND name = ?;

-- name: groups_due
SELECT g.queue, g.scope, g.name, h.priority, h.pos, h.seq
  FROM (SELECT queue, scope, name FROM propolis_group WHERE opens_us <= :now_us ORDER BY opens_us LIMIT :most) g
  LEFT JOIN propolis_held h ON h.seq = (
       SELECT seq FROM propolis_held f WHERE f.queue = g.queue AND f.scope = g.scope AND f.name = g.name
        ORDER BY f.priority DESC, f.pos LIMIT 1);

-- name: next_groups
SELECT queue, opens_us FROM propolis_group WHERE opens_us IS NOT NULL ORDER BY opens_us LIMIT :most;

-- name: groups_before
-- Those that wait for a token by a clock that was set back.
SELECT queue, scope, name FROM propolis_group WHERE epoch < :epoch AND epoch IS NOT NULL LIMIT :most;

-- name: groups_of_keys
-- From a key on, with their places in this order.
SELECT queue, scope, name, key, queue, scope, name FROM propolis_group
 WHERE key IS NOT NULL AND (key, queue, scope, name) > (:a, :b, :c, :d) ORDER BY key, queue, scope, name LIMIT :most;

-- name: groups_of_tasks
SELECT queue, scope, name, name, queue, '', '' FROM propolis_group
 WHERE scope = 'task_key' AND (name, queue) > (:a, :b) ORDER BY name, queue LIMIT :most;

-- name: openings
SELECT scope, name, place FROM propolis_opening LIMIT :most;

-- name: keep_opening
INSERT OR REPLACE INTO propolis_opening (scope, name, place) VALUES (:scope, :name, :place);

-- name: end_opening
DELETE FROM propolis_opening WHERE scope = :scope AND name = :name;

-- name: renew
UPDATE propolis_running SET until_us = :until_us, span_us = :until_us - :now_us
 WHERE seq = (SELECT seq FROM propolis_job WHERE id = :id)
   AND fence = :fence AND holder = :holder AND until_us > :now_us
RETURNING cancel;

-- name: leased_plain
-- How many of these are run under one fence, by one holder, and can end in the common way.
SELECT count(*)
  FROM json_each(:seqs) l JOIN propolis_running r ON r.seq = l.value JOIN propolis_job j ON j.seq = r.seq
 WHERE r.fence = :fence AND r.holder = :holder
   AND j.queue = :queue AND j.task = :task AND j.limit_key IS NULL AND j.plain;

-- name: leased
-- The running jobs of these leases, with as much of them as the common end needs.
SELECT j.id, r.seq, r.fence, r.holder, j.queue, j.plain, j.task, j.limit_key
  FROM json_each(:seqs) l JOIN propolis_running r ON r.seq = l.value JOIN propolis_job j ON j.seq = r.seq;

-- name: leased_as
-- The same for one, by its id: it may have been put again since.
SELECT j.id, r.seq, r.fence, r.holder, j.queue, j.plain, j.task, j.limit_key
  FROM propolis_job j JOIN propolis_running r ON r.seq = j.seq WHERE j.id = :id;

-- name: running_job
SELECT j.LIVE_COLUMNS, r.fence AS lease_fence, r.attempt, r.started_us AS lease_started_us, r.holder, r.cancel, r.began
  FROM propolis_running r JOIN propolis_job j ON j.seq = r.seq
 WHERE r.seq = :seq;

-- name: live_job
SELECT LIVE_COLUMNS FROM propolis_job WHERE id = :id;

-- name: job_by_number
SELECT LIVE_COLUMNS FROM propolis_job WHERE seq = :seq;

-- name: running_of
SELECT fence, attempt, cancel FROM propolis_running WHERE seq = :seq;

-- name: stop_running
DELETE FROM propolis_running WHERE seq IN (SELECT value FROM json_each(:seqs));

-- name: end_plain
DELETE FROM propolis_job WHERE seq IN (SELECT value FROM json_each(:seqs));

-- name: mend_job
-- What a foreign hand, or a bit that has flipped, has made into something else becomes a number
-- again, from :least to :most.
UPDATE propolis_job SET
    priority = CASE WHEN typeof(priority) = 'integer' AND priority BETWEEN :least AND :most THEN priority ELSE 0 END,
    pos = CASE WHEN typeof(pos) = 'integer' AND pos BETWEEN :least AND :most THEN pos ELSE seq END,
    put_us = CASE WHEN typeof(put_us) = 'integer' AND put_us BETWEEN :least AND :most THEN put_us ELSE :now_us END,
    due_us = CASE WHEN typeof(due_us) = 'integer' AND due_us BETWEEN :least AND :most THEN due_us ELSE :now_us END,
    max_crashes = CASE WHEN typeof(max_crashes) = 'integer' AND max_crashes BETWEEN :least AND :most THEN max_crashes ELSE 1 END,
    chosen = CASE WHEN typeof(chosen) = 'integer' AND chosen BETWEEN :least AND :most THEN chosen ELSE 0 END,
    member = CASE WHEN typeof(member) = 'integer' AND member BETWEEN :least AND :most THEN member ELSE 0 END,
    stepped = CASE WHEN typeof(stepped) = 'integer' AND stepped BETWEEN :least AND :most THEN stepped ELSE 0 END,
    attempts = CASE WHEN typeof(attempts) = 'integer' AND attempts BETWEEN :least AND :most THEN attempts ELSE 0 END,
    failures = CASE WHEN typeof(failures) = 'integer' AND failures BETWEEN :least AND :most THEN failures ELSE 0 END,
    losses = CASE WHEN typeof(losses) = 'integer' AND losses BETWEEN :least AND :most THEN losses ELSE 0 END,
    crashes = CASE WHEN typeof(crashes) = 'integer' AND crashes BETWEEN :least AND :most THEN crashes ELSE 0 END,
    fence = CASE WHEN typeof(fence) = 'integer' AND fence BETWEEN :least AND :most THEN fence ELSE 0 END,
    expires_us = CASE WHEN typeof(expires_us) = 'integer' AND expires_us BETWEEN :least AND :most THEN expires_us END,
    started_us = CASE WHEN typeof(started_us) = 'integer' AND started_us BETWEEN :least AND :most THEN started_us END
 WHERE seq = :seq;

-- name: update_job
UPDATE propolis_job SET queue = :queue, pos = :pos, due_us = :due_us, attempts = :attempts, failures = :failures,
                        losses = :losses, crashes = :crashes, fence = :fence, started_us = :started_us,
                        error = :error, history = :history
 WHERE seq = :seq;

-- name: stand
INSERT INTO propolis_ready (queue, priority, pos, seq) VALUES (:queue, :priority, :pos, :seq);

-- name: stand_due
-- A scheduled job whose time has come gets its place.
UPDATE propolis_job SET pos = :pos WHERE seq = :seq RETURNING priority, task, limit_key;

-- name: schedule
INSERT INTO propolis_scheduled (queue, due_us, seq, epoch) VALUES (:queue, :due_us, :seq, :epoch);

-- name: unstand
DELETE FROM propolis_ready WHERE queue = :queue AND priority = :priority AND pos = :pos;

-- name: unschedule
DELETE FROM propolis_scheduled WHERE queue = :queue AND due_us = :due_us AND seq = :seq;

-- name: archive
INSERT INTO propolis_archive (ARCHIVE_COLUMNS)
SELECT seq, id, task, queue, priority, put_us, due_us, expires_us, max_crashes, chosen, unique_key, unique_until,
       limit_key, batch, member, :attempts, :failures, :losses, :crashes, :fence, :started_us, :error, progress,
       CASE :state WHEN 'dead' THEN checkpoint END, log, :history, body, :state, :cancel, :ended_us, :keep_us, :reason, :result
  FROM propolis_job WHERE seq = :seq;

-- name: remove_job
DELETE FROM propolis_job WHERE seq = :seq;

-- name: note
UPDATE propolis_job SET progress = coalesce(:progress, progress), log = :log,
                        checkpoint = coalesce(:checkpoint, checkpoint)
 WHERE seq = :seq;

-- name: begin
UPDATE propolis_running SET began = 1 WHERE seq = :seq;

-- name: log_of
SELECT j.seq, j.log FROM propolis_job j JOIN propolis_running r ON r.seq = j.seq
 WHERE j.id = :id AND r.fence = :fence AND r.holder = :holder AND r.until_us > :now_us;

-- name: ask_to_stop
UPDATE propolis_running SET cancel = 1 WHERE seq = :seq;

-- name: keep_history
UPDATE propolis_job SET history = :history WHERE seq = :seq;

-- name: anything_to_sweep
SELECT EXISTS (SELECT 1 FROM propolis_scheduled WHERE due_us <= :now_us)
    OR EXISTS (SELECT 1 FROM propolis_running WHERE until_us <= :now_us)
    OR EXISTS (SELECT 1 FROM propolis_expiring WHERE expires_us <= :now_us)
    OR EXISTS (SELECT 1 FROM propolis_removal)
    OR EXISTS (SELECT 1 FROM propolis_opening)
    OR EXISTS (SELECT 1 FROM propolis_group WHERE opens_us <= :now_us)
    OR EXISTS (SELECT 1 FROM propolis_busy WHERE full_us > 0 AND full_us <= :now_us)
    OR EXISTS (SELECT 1 FROM propolis_step_back)
    OR EXISTS (SELECT 1 FROM propolis_counter WHERE largest_us > :now_us + :tolerated_us)
    OR coalesce((SELECT until_us - span_us FROM propolis_running ORDER BY until_us DESC LIMIT 1) > :now_us + :tolerated_us, 0)
    OR EXISTS (SELECT 1 FROM propolis_counter WHERE largest_us < :now_us - :remembered_us
                  AND (EXISTS (SELECT 1 FROM propolis_running) OR EXISTS (SELECT 1 FROM propolis_scheduled)))
    OR EXISTS (SELECT 1 FROM propolis_tally WHERE dead > 0 AND dead > :dead_max)
    OR EXISTS (SELECT 1 FROM propolis_archive WHERE keep_us <= :now_us)
    OR EXISTS (SELECT 1 FROM propolis_known WHERE until_us <= :now_us)
    OR EXISTS (SELECT 1 FROM propolis_token WHERE until_us <= :now_us)
    OR EXISTS (SELECT 1 FROM propolis_record WHERE expires_us <= :now_us)
    OR EXISTS (SELECT 1 FROM propolis_swap WHERE until_us <= :now_us)
    OR EXISTS (SELECT 1 FROM propolis_batch WHERE keep_us <= :now_us)
    OR EXISTS (SELECT 1 FROM propolis_batch WHERE sealed = 0 AND open_us <= :now_us);

-- name: due_anywhere
SELECT queue, due_us, seq FROM propolis_scheduled WHERE due_us <= :now_us ORDER BY due_us, queue, seq LIMIT :most;

-- name: largest_time
-- With the time at which the lease that ends last was given: unless leases are being shortened, the clock has shown it.
SELECT largest_us, epoch, (SELECT until_us - span_us FROM propolis_running ORDER BY until_us DESC LIMIT 1),
       EXISTS (SELECT 1 FROM propolis_step_back)
  FROM propolis_counter;

-- name: remember_time
UPDATE propolis_counter SET largest_us = :now_us;

-- name: begin_epoch
UPDATE propolis_counter SET epoch = epoch + 1, largest_us = :now_us;

-- name: keep_step_back
INSERT INTO propolis_step_back (epoch, by_us) VALUES (:epoch, :by_us);

-- name: steps_back
SELECT epoch, by_us, until_us, seq FROM propolis_step_back ORDER BY epoch;

-- name: keep_followed
UPDATE propolis_step_back SET until_us = :until_us, seq = :seq;

-- name: forget_steps_back
DELETE FROM propolis_step_back;

-- name: leases_after
SELECT until_us, seq FROM propolis_running WHERE (until_us, seq) > (:until_us, :seq) AND until_us > :now_us
 ORDER BY until_us, seq LIMIT :most;

-- name: shorten_leases
-- Those that end later than one given now would: they start anew.
UPDATE propolis_running SET until_us = :now_us + span_us
 WHERE seq IN (SELECT value FROM json_each(:seqs)) AND until_us > :now_us + span_us;

-- name: delayed_before
SELECT queue, due_us, seq, epoch FROM propolis_scheduled WHERE epoch < :epoch AND epoch IS NOT NULL LIMIT :most;

-- name: bring_forward
UPDATE propolis_scheduled SET due_us = due_us - :by_us, epoch = :epoch
 WHERE queue = :queue AND due_us = :due_us AND seq = :seq;

-- name: bring_job_forward
UPDATE propolis_job SET due_us = due_us - :by_us WHERE seq = :seq;

-- name: lost_leases
-- The order among those that end together is that of their fences.
SELECT seq FROM (SELECT seq, fence FROM propolis_running WHERE until_us <= :now_us ORDER BY until_us LIMIT :most)
 ORDER BY fence, seq;

-- name: expired
-- A bite by the index, and only that in the order of the puts.
SELECT seq, expires_us FROM (SELECT seq, expires_us FROM propolis_expiring WHERE expires_us <= :now_us ORDER BY expires_us LIMIT :most)
 ORDER BY seq;

-- name: past_keeping
SELECT seq, queue, state FROM propolis_archive WHERE keep_us <= :now_us ORDER BY keep_us LIMIT :most;

-- name: full_shelves
SELECT queue, dead FROM propolis_tally WHERE dead > 0 AND dead > :most ORDER BY dead DESC LIMIT :limit;

-- name: oldest_dead
SELECT seq, queue, state FROM propolis_archive WHERE queue = :queue AND state = 'dead'
 ORDER BY ended_us, seq LIMIT :most;

-- name: remove_archived
DELETE FROM propolis_archive WHERE seq = :seq;

-- name: forget_ids
DELETE FROM propolis_known WHERE id IN (SELECT id FROM propolis_known WHERE until_us <= :now_us LIMIT :most);

-- name: forget_tokens
DELETE FROM propolis_token WHERE token IN (SELECT token FROM propolis_token WHERE until_us <= :now_us LIMIT :most);

-- name: batches_over
SELECT id FROM propolis_batch WHERE keep_us <= :now_us OR (sealed = 0 AND open_us <= :now_us) LIMIT :most;

-- name: next_moment
SELECT min(moment) FROM (
    SELECT min(due_us) AS moment FROM propolis_scheduled WHERE due_us > :now_us UNION ALL
    SELECT min(until_us) FROM propolis_running WHERE until_us > :now_us UNION ALL
    SELECT min(until_us) FROM propolis_rule WHERE until_us > :now_us UNION ALL
    SELECT min(opens_us) FROM propolis_group WHERE opens_us > :now_us UNION ALL
    SELECT min(at_us) FROM propolis_record WHERE at_us > :now_us UNION ALL
    SELECT min(expires_us) FROM propolis_record WHERE expires_us > :now_us);

-- name: batch_row
SELECT BATCH_COLUMNS FROM propolis_batch WHERE id = :id;

-- name: batch_page
SELECT BATCH_COLUMNS FROM propolis_batch WHERE id > coalesce(:after, '') ORDER BY id LIMIT :most;

-- name: add_batch
INSERT INTO propolis_batch (id, body, created_us, open_us, parent, member)
VALUES (:id, :body, :created_us, :open_us, :parent, :member);

-- name: grow_batch
UPDATE propolis_batch SET live = live + :n WHERE id = :id AND finished_us IS NULL;

-- name: orphan_members
-- New members of a batch that is over or gone: they step nothing, also if there is one of that name again.
UPDATE propolis_job SET stepped = 1 WHERE batch = :id AND NOT stepped AND seq BETWEEN :first AND :last;

-- name: seal_batch
UPDATE propolis_batch SET sealed = 1 WHERE id = :id;

-- name: step_batch
UPDATE propolis_batch SET live = live - 1, done = done + (:state = 'done'), dead = dead + (:state = 'dead'),
                          cancelled = cancelled + (:state = 'cancelled')
 WHERE id = :id;

-- name: finish_batch
UPDATE propolis_batch SET finished_us = :finished_us, keep_us = :keep_us WHERE id = :id;

-- name: remove_batch
DELETE FROM propolis_batch WHERE id = :id;

-- name: live_members_of
-- A bite of the live members that were put before a number.
SELECT seq FROM propolis_job WHERE batch = :batch AND batch IS NOT NULL AND NOT stepped AND seq <= :upto LIMIT :most;

-- name: detach
UPDATE propolis_job SET stepped = 1 WHERE seq = :seq;

-- name: forget_members
DELETE FROM propolis_member WHERE (batch, member, id) IN
    (SELECT batch, member, id FROM propolis_member WHERE batch = :batch AND seq <= :upto LIMIT :most);

-- name: add_member
INSERT INTO propolis_member (batch, member, id, seq, state, result, reason)
VALUES (:batch, :member, :id, :seq, :state, :result, :reason)
ON CONFLICT (batch, member, id) DO UPDATE  -- it had ended and gone, and was put again under its id
   SET seq = excluded.seq, state = excluded.state, result = excluded.result, reason = excluded.reason;

-- name: live_members_by_kind
-- Among so many of them.
SELECT sum(r.seq IS NULL AND j.failures + j.losses + j.crashes > 0) AS retrying, sum(r.seq IS NOT NULL) AS running
  FROM (SELECT seq, failures, losses, crashes FROM propolis_job
         WHERE batch = :batch AND batch IS NOT NULL AND NOT stepped LIMIT :most) j
  LEFT JOIN propolis_running r ON r.seq = j.seq;

-- name: live_children
SELECT count(*) FROM (
    SELECT 1 FROM propolis_batch WHERE parent = :batch AND parent IS NOT NULL AND finished_us IS NULL LIMIT :most);

-- name: ended_members
SELECT member, id, state, result, reason FROM propolis_member
 WHERE batch = :batch AND member > :after ORDER BY member, id LIMIT :most;

-- name: live_members
SELECT j.member, j.id, CASE WHEN r.seq IS NULL THEN 'ready' ELSE 'running' END, NULL, NULL
  FROM propolis_job j LEFT JOIN propolis_running r ON r.seq = j.seq
 WHERE j.batch = :batch AND j.batch IS NOT NULL AND NOT j.stepped AND j.member > :after
 ORDER BY j.member, j.id LIMIT :most;

-- name: live_nested
SELECT member, id, 'running', NULL, NULL FROM propolis_batch
 WHERE parent = :batch AND parent IS NOT NULL AND finished_us IS NULL AND member > :after
 ORDER BY member, id LIMIT :most;

-- name: rules
SELECT kind, scope, name, n, set_by, why, set_us, until_us, every_us, burst FROM propolis_rule
 WHERE (kind, scope, name) > (:kind, :scope, :name) AND (until_us IS NULL OR until_us > :now_us)
 ORDER BY kind, scope, name LIMIT :most;

-- name: rules_of
SELECT kind, n, every_us, burst FROM propolis_rule
 WHERE kind IN ('block', 'limit', 'pause') AND scope = :scope AND name = :name
   AND (until_us IS NULL OR until_us > :now_us);

-- name: rules_of_keys
SELECT r.name, r.kind, r.n, r.every_us, r.burst FROM json_each(:keys) k CROSS JOIN propolis_rule r
    ON r.kind IN ('block', 'limit', 'pause') AND r.scope = 'key' AND r.name = k.value
 WHERE r.until_us IS NULL OR r.until_us > :now_us;

-- name: any_group
SELECT EXISTS (SELECT 1 FROM propolis_group);

-- name: prefixes
-- The limits on keys that begin with something.
SELECT name, n, every_us, burst FROM propolis_rule INDEXED BY propolis_rule_each
 WHERE kind = 'limit' AND substr(name, -1) = '*' AND scope = 'key' AND (until_us IS NULL OR until_us > :now_us);

-- name: circumstances
-- What a lease has to look into: any rule, jobs that were set aside, what is being removed.
SELECT EXISTS (SELECT 1 FROM propolis_rule),
       EXISTS (SELECT 1 FROM propolis_group),
       EXISTS (SELECT 1 FROM propolis_removal);

-- name: ruled_scopes
-- Are there rules on queues, on tasks, on keys, on tasks of one key, limits for each key of many or of a task, rates,
-- and some that are over?  One step in an index for each.
SELECT EXISTS (SELECT 1 FROM propolis_rule INDEXED BY propolis_rule_scope WHERE kind <> 'cap' AND scope = 'queue'),
       EXISTS (SELECT 1 FROM propolis_rule INDEXED BY propolis_rule_scope WHERE kind <> 'cap' AND scope = 'task'),
       EXISTS (SELECT 1 FROM propolis_rule INDEXED BY propolis_rule_scope WHERE kind <> 'cap' AND scope = 'key'),
       EXISTS (SELECT 1 FROM propolis_rule WHERE kind = 'block' AND scope = 'task_key')
    OR EXISTS (SELECT 1 FROM propolis_rule WHERE kind = 'pause' AND scope = 'task_key'),
       EXISTS (SELECT 1 FROM propolis_rule INDEXED BY propolis_rule_each
                WHERE kind = 'limit' AND substr(name, -1) = '*' AND scope = 'key'),
       EXISTS (SELECT 1 FROM propolis_rule WHERE kind = 'limit' AND scope = 'task_key'),
       EXISTS (SELECT 1 FROM propolis_rule INDEXED BY propolis_rule_rate WHERE every_us IS NOT NULL),
       EXISTS (SELECT 1 FROM propolis_rule WHERE until_us <= :now_us);

-- name: cap
SELECT n, until_us FROM propolis_rule WHERE kind = 'cap' AND scope = 'queue' AND name = :queue;

-- name: add_rule
INSERT INTO propolis_rule (kind, scope, name, n, set_by, why, set_us, until_us, every_us, burst)
VALUES (:kind, :scope, :name, :n, :set_by, :why, :now_us, :until_us, :every_us, :burst);

-- name: remove_rule
-- Gives whether it was over.
DELETE FROM propolis_rule WHERE kind = :kind AND scope = :scope AND name = :name
RETURNING coalesce(until_us <= :now_us, 0);

-- name: rules_over
SELECT kind, scope, name FROM propolis_rule WHERE until_us <= :now_us ORDER BY until_us LIMIT :most;

-- name: removals
SELECT name, upto, removed, since_us, cancels FROM propolis_removal LIMIT :most;

-- name: removal
SELECT name, upto, removed, since_us, cancels FROM propolis_removal WHERE name = :name;

-- name: keep_removal
INSERT OR REPLACE INTO propolis_removal (name, upto, removed, since_us, cancels)
VALUES (:name, :upto, :removed, :since_us, :cancels);

-- name: end_removal
DELETE FROM propolis_removal WHERE name = :name;

-- name: archived_job
SELECT ARCHIVE_COLUMNS FROM propolis_archive WHERE id = :id;

-- name: revive
INSERT INTO propolis_job (seq, id, task, queue, priority, pos, put_us, due_us, expires_us, max_crashes, plain, chosen,
                          unique_key, unique_until, limit_key, batch, member, stepped, fence, history, checkpoint, body)
SELECT seq, id, task, queue, priority, :pos, put_us, :now_us, NULL, max_crashes, 0, chosen,
       unique_key, unique_until, limit_key, batch, member, 1, fence, :history, checkpoint, body
  FROM propolis_archive WHERE id = :id;

-- name: delete_archived
DELETE FROM propolis_archive WHERE id = :id RETURNING queue, state;

-- name: waiting_of_queue
-- A bite of what waits in a queue, from whichever lines it stands in.  Whoever wants them in the order of the puts
-- sorts the bite: ORDER BY here would sort all of them.
SELECT seq FROM propolis_ready     WHERE queue = :queue AND seq <= :upto UNION ALL
SELECT seq FROM propolis_scheduled WHERE queue = :queue AND seq <= :upto UNION ALL
SELECT seq FROM propolis_parked    WHERE queue = :queue AND seq <= :upto UNION ALL
SELECT seq FROM propolis_held      WHERE queue = :queue AND seq <= :upto
LIMIT :most;

-- name: drop_archived
DELETE FROM propolis_archive WHERE seq IN
    (SELECT seq FROM propolis_archive WHERE queue = :queue AND seq <= :upto LIMIT :most) RETURNING state;

-- name: drop_tally
DELETE FROM propolis_tally WHERE queue = :queue;

-- name: place_of
SELECT j.queue, j.priority, j.pos, j.due_us, j.seq,
       EXISTS (SELECT 1 FROM propolis_running r WHERE r.seq = j.seq)
    OR EXISTS (SELECT 1 FROM propolis_parked p
                WHERE p.queue = j.queue AND p.task = j.task AND p.priority = j.priority AND p.seq = j.seq) AS apart,
       EXISTS (SELECT 1 FROM propolis_scheduled s
                WHERE s.queue = j.queue AND s.due_us = j.due_us AND s.seq = j.seq) AS coming
  FROM propolis_job j WHERE j.id = :id;

-- name: before_in_line
-- Those that stand before it, and those that have become due and would join a line before it; up to a number.
SELECT count(*) FROM (
    SELECT 1 FROM propolis_ready WHERE queue = :queue AND priority > :priority UNION ALL
    SELECT 1 FROM propolis_ready WHERE queue = :queue AND priority = :priority AND (:coming OR pos < :pos) UNION ALL
    SELECT 1 FROM (SELECT priority, pos FROM propolis_held WHERE queue = :queue LIMIT :most)
     WHERE priority > :priority OR (priority = :priority AND (:coming OR pos < :pos)) UNION ALL
    SELECT 1 FROM (SELECT due_us, seq FROM propolis_scheduled WHERE queue = :queue AND due_us <= :now_us LIMIT :most) s
             JOIN propolis_job j ON j.seq = s.seq
     WHERE j.priority > :priority
        OR (j.priority = :priority AND :coming AND (s.due_us, s.seq) < (:due_us, :seq))
    LIMIT :most);

-- name: find_live
SELECT SHOWN_COLUMNS
  FROM propolis_job j LEFT JOIN propolis_running r ON r.seq = j.seq
 WHERE j.seq > :after AND j.seq <= :upto
   AND (:queue IS NULL OR j.queue = :queue)
   AND (:task IS NULL OR j.task = :task)
   AND (:batch IS NULL OR j.batch = :batch)
   AND (:waiting IS NULL OR r.seq IS NULL)
   AND (:scheduled IS NULL OR (r.seq IS NULL AND j.due_us > :now_us) = :scheduled)
 ORDER BY j.seq
 LIMIT :most;

-- name: find_running
-- From the few that run, and not through all that wait.
SELECT SHOWN_COLUMNS
  FROM propolis_running r JOIN propolis_job j ON j.seq = r.seq
 WHERE r.seq > :after AND r.seq <= :upto
   AND (:queue IS NULL OR j.queue = :queue)
   AND (:task IS NULL OR j.task = :task)
   AND (:batch IS NULL OR j.batch = :batch)
 ORDER BY r.seq
 LIMIT :most;

-- name: get_live
SELECT SHOWN_COLUMNS
  FROM propolis_job j LEFT JOIN propolis_running r ON r.seq = j.seq
 WHERE j.id = :id;

-- name: find_archived
SELECT ARCHIVE_COLUMNS
  FROM propolis_archive
 WHERE seq > :after AND seq <= :upto
   AND (:queue IS NULL OR queue = :queue)
   AND (:task IS NULL OR task = :task)
   AND (:batch IS NULL OR batch = :batch)
   AND (:state IS NULL OR state = :state)
   AND (:reason IS NULL OR reason = :reason)
 ORDER BY seq
 LIMIT :most;

-- name: bite_of_jobs
-- The last number that a search which filters looks at; NULL: all that there are.
SELECT seq FROM propolis_job WHERE seq > :after ORDER BY seq LIMIT 1 OFFSET :most;

-- name: bite_of_running
SELECT seq FROM propolis_running WHERE seq > :after ORDER BY seq LIMIT 1 OFFSET :most;

-- name: bite_of_archived
SELECT seq FROM propolis_archive WHERE seq > :after ORDER BY seq LIMIT 1 OFFSET :most;

-- name: record
SELECT value, version FROM propolis_record
 WHERE kind = :kind AND name = :name AND (expires_us IS NULL OR expires_us > :now_us);

-- name: keep_record
INSERT INTO propolis_record (kind, name, value, version, at_us, expires_us)
VALUES (:kind, :name, :value, :version, :at_us, :expires_us)
    ON CONFLICT (kind, name) DO UPDATE SET value = excluded.value, version = excluded.version,
       at_us = excluded.at_us, expires_us = excluded.expires_us;

-- name: remove_record
DELETE FROM propolis_record WHERE kind = :kind AND name = :name;

-- name: next_version
UPDATE propolis_version SET last = max(last + 1, :now_us) WHERE only = 1 RETURNING last;

-- name: records_after
SELECT name, value, version, at_us, expires_us FROM propolis_record
 WHERE kind = :kind AND name > :after AND (expires_us IS NULL OR expires_us > :now_us)
 ORDER BY name LIMIT :most;

-- name: records_before
SELECT name, value, version, at_us, expires_us FROM propolis_record
 WHERE kind = :kind AND name < :after AND (expires_us IS NULL OR expires_us > :now_us)
 ORDER BY name DESC LIMIT :most;

-- name: records_backwards
SELECT name, value, version, at_us, expires_us FROM propolis_record
 WHERE kind = :kind AND (expires_us IS NULL OR expires_us > :now_us)
 ORDER BY name DESC LIMIT :most;

-- name: records_due
SELECT name, value, version, at_us, expires_us FROM propolis_record
 WHERE kind = :kind AND at_us <= :now_us AND (expires_us IS NULL OR expires_us > :now_us)
 ORDER BY at_us, name LIMIT :most;

-- name: records_named
SELECT name, value, version, at_us, expires_us FROM propolis_record
 WHERE kind = :kind AND name IN (SELECT value FROM json_each(:names))
   AND (expires_us IS NULL OR expires_us > :now_us)
 ORDER BY name;

-- name: kinds_due
-- Kinds are few; each is looked up by the index, from one to the next.
WITH RECURSIVE kind_of(kind) AS (
    SELECT min(kind) FROM propolis_record WHERE at_us IS NOT NULL
    UNION ALL
    SELECT (SELECT min(kind) FROM propolis_record WHERE at_us IS NOT NULL AND kind > kind_of.kind)
      FROM kind_of WHERE kind_of.kind IS NOT NULL)
SELECT kind FROM kind_of
 WHERE kind IS NOT NULL
   AND EXISTS (SELECT 1 FROM propolis_record AS r WHERE r.kind = kind_of.kind AND r.at_us <= :now_us
                  AND (r.expires_us IS NULL OR r.expires_us > :now_us));

-- name: forget_records
DELETE FROM propolis_record WHERE (kind, name) IN
    (SELECT kind, name FROM propolis_record WHERE expires_us <= :now_us ORDER BY expires_us LIMIT :most);

-- name: answered_swap
SELECT answers FROM propolis_swap WHERE token = :token AND until_us > :now_us;

-- name: keep_swap
INSERT INTO propolis_swap (token, answers, until_us) VALUES (:token, :answers, :until_us)
    ON CONFLICT (token) DO UPDATE SET answers = excluded.answers, until_us = excluded.until_us;

-- name: forget_swaps
DELETE FROM propolis_swap WHERE token IN
    (SELECT token FROM propolis_swap WHERE until_us <= :now_us ORDER BY until_us LIMIT :most);

-- name: tables
SELECT name FROM sqlite_master WHERE type = 'table';

-- name: installed
SELECT number, checksum, compatible_from FROM propolis_migration;
