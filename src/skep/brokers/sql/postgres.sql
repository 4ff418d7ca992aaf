-- Every statement of the PostgreSQL engine.  Here its schema is called `skep`; the engine puts the quoted name
-- of its own in that place.  What changes jobs is in postgres/0002_verbs.sql.

-- name: put
SELECT n, there FROM skep.put($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13);

-- name: put_and_tell
-- The same, and a notification in the same commit.  The second part has no rows; it is there for what it does.
SELECT n, there FROM skep.put($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)
UNION ALL
SELECT 0, '' FROM (SELECT count(pg_notify($14, said)) AS n FROM unnest($15::text[]) AS said) AS told WHERE told.n < 0;

-- name: put_one
SELECT skep.put_one($1, $2, $3, $4, $5, $6, $7, $8);

-- name: put_one_and_tell
SELECT skep.put_one($1, $2, $3, $4, $5, $6, $7, $8), pg_notify($9, $10);

-- name: put_called
SELECT n, there FROM skep.put_called($1);

-- name: forget_tokens
DELETE FROM skep.token WHERE token = ANY ($1::text[]);

-- name: settle_lent
SELECT skep.settle_lent($1, $2, $3, $4, $5, $6);

-- name: installation
SELECT id FROM skep.installation;

-- name: seal
SELECT skep.seal($1, $2, $3, $4);

-- name: exchange
SELECT now_us, lost, queue, number, fences, ids, tasks, bodies, puts_us, attempts, failures, crashes, batches, rank, pos
  FROM skep.exchange($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13);

-- name: renew
SELECT n, new_end, asked FROM skep.renew($1, $2, $3, $4);

-- name: note
SELECT skep.note($1);

-- name: sweep
SELECT promoted, reaped, expired, removed, now_us, next_us, schedules_due, again_us, look
  FROM skep.sweep_by($1, $2, $3, $4, $5, $6);

-- name: notify
SELECT pg_notify($1, queue) FROM unnest($2::text[]) AS queue;

-- name: anything
-- Those of these queues in which there may be something to lease.
SELECT queue FROM unnest($2::text[]) AS wanted (queue)
 WHERE EXISTS (SELECT FROM skep.ready r WHERE r.queue = wanted.queue)
    OR EXISTS (SELECT FROM skep.held h WHERE h.queue = wanted.queue)
    OR EXISTS (SELECT FROM skep.scheduled s WHERE s.queue = wanted.queue AND s.due_us <= skep.moment($1));

-- name: now
SELECT skep.moment(NULL);

-- name: old_transactions
-- Who keeps VACUUM from removing what is gone, for longer than this: transactions, prepared ones, and replication slots.
-- Those of other users are seen only by members of pg_read_all_stats.
SELECT 'transaction' AS what, pid::text AS name, extract(epoch FROM clock_timestamp() - xact_start)::float8 AS seconds,
       coalesce(application_name, '') AS application, coalesce(state, '') AS state
  FROM pg_catalog.pg_stat_activity
 WHERE (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) AND xact_start < clock_timestamp() - $1::float8 * interval '1 second'
   AND backend_type = 'client backend' AND datname = current_database()
UNION ALL
SELECT 'prepared transaction', gid, extract(epoch FROM clock_timestamp() - prepared)::float8, owner::text, 'prepared'
  FROM pg_catalog.pg_prepared_xacts
 WHERE database = current_database() AND prepared < clock_timestamp() - $1::float8 * interval '1 second'
 ORDER BY seconds DESC
 LIMIT 10;

-- name: settings
SELECT name, setting FROM pg_catalog.pg_settings
 WHERE name IN ('fsync', 'synchronous_commit', 'synchronous_standby_names', 'server_version_num',
                'default_transaction_isolation');

-- name: queues
-- All but those in line, of which there may be millions: they are what is left of those that were put.
SELECT queue, CASE WHEN due_us <= skep.moment($1) THEN 'due' ELSE 'scheduled' END AS what, count(*) AS n
  FROM skep.scheduled GROUP BY 1, 2
UNION ALL
SELECT queue, 'held', count(*) FROM skep.held GROUP BY queue
UNION ALL
SELECT queue, 'running', count(*) FROM skep.running GROUP BY queue
UNION ALL
SELECT queue, 'running', sum(members)::bigint FROM skep.chunk GROUP BY queue
UNION ALL
SELECT queue, state, count(*) FROM skep.archive GROUP BY queue, state
UNION ALL
SELECT queue, 'put', sum(put)::bigint FROM skep.tally GROUP BY queue
UNION ALL
SELECT queue, 'deleted', sum(deleted)::bigint FROM skep.tally GROUP BY queue;

-- name: get
SELECT 'ready' AS stands, w.* FROM skep.waiting w WHERE id = $1
UNION ALL
SELECT 'running', r.* FROM skep.running r WHERE id = $1
UNION ALL
SELECT 'running', m.* FROM skep.chunk c, skep.members_of(c) AS m WHERE c.last_id >= $1 AND c.first_id <= $1 AND m.id = $1
UNION ALL
SELECT a.state, a.* FROM skep.archive a WHERE id = $1;

-- name: find
SELECT * FROM skep.find($1, $2, $3, $4, $5, $6, $7, $8, $9);

-- name: position
-- How many stand before a job that is ready and due, or would, once those that have become due join their lines.
SELECT (SELECT count(*) FROM (SELECT queue, rank, pos FROM skep.ready UNION ALL SELECT queue, rank, pos FROM skep.held) AS r
         WHERE r.queue = j.queue AND (r.rank < j.rank OR (r.rank = j.rank AND (j.coming OR r.pos < j.pos))))
     + (SELECT count(*) FROM skep.scheduled s
         WHERE s.queue = j.queue AND s.due_us <= skep.moment($1)
           AND (s.rank < j.rank OR (s.rank = j.rank AND j.coming AND (s.due_us, s.seq) < (j.due_us, j.seq))))
  FROM (SELECT false AS coming, queue, rank, pos, due_us, seq FROM skep.ready WHERE id = $2 UNION ALL
        SELECT false, queue, rank, pos, due_us, seq FROM skep.held WHERE id = $2 UNION ALL
        SELECT true, queue, rank, pos, due_us, seq FROM skep.scheduled WHERE id = $2 AND due_us <= skep.moment($1)) AS j;

-- name: cancel
SELECT skep.cancel($1, $2, $3, $4);

-- name: reschedule
SELECT skep.reschedule($1, $2, $3);

-- name: replay
SELECT skep.replay($1, $2);

-- name: delete
SELECT skep.delete($1);

-- name: drop
SELECT skep.drop_queue($1, $2, $3, $4);

-- name: rules
SELECT kind, scope, name, n FROM skep.rule ORDER BY kind, scope, name;

-- name: add_rule
SELECT skep.add_rule($1, $2, $3, $4);

-- name: remove_rule
SELECT skep.remove_rule($1, $2, $3);

-- name: batches
-- One batch, or those after an id, with how far their live members are.
SELECT b.id, b.body, b.sealed, b.live - t.n AS live, b.done + t.n AS done, b.dead, b.cancelled, b.created_us, b.finished_us, b.keep_us, b.parent,
       m.enqueued, m.retrying, m.running + (
           SELECT coalesce(sum(c.members), 0)::bigint FROM skep.chunk c WHERE c.batch = b.id AND c.born = b.born) + (
           SELECT count(*) FROM skep.batch n
            WHERE n.parent = b.id AND n.born > b.born AND n.finished_us IS NULL) AS running
  FROM skep.batch b, LATERAL (
       SELECT coalesce(sum(n), 0)::integer AS n FROM skep.batch_tally WHERE batch = b.id) AS t, LATERAL (
       SELECT count(*) FILTER (WHERE NOT l.running AND l.failures = 0 AND l.crashes = 0) AS enqueued,
              count(*) FILTER (WHERE NOT l.running AND (l.failures > 0 OR l.crashes > 0)) AS retrying,
              count(*) FILTER (WHERE l.running) AS running
         FROM skep.live l WHERE l.batch = b.id AND l.seq > b.born AND l.stepped IS NOT TRUE) AS m
 WHERE ($1::text IS NULL OR b.id = $1) AND ($2::text IS NULL OR b.id > $2)
 ORDER BY b.id
 LIMIT $3;

-- name: members
SELECT member, id, state, result, reason FROM skep.members($1, coalesce($2::integer, -1), $3);

-- name: delete_batch
SELECT skep.delete_batch($1, $2, $3, $4);

-- name: put_schedule
-- While its timing is unchanged a schedule keeps its own next instant.
INSERT INTO skep.schedule AS old (name, body, timing, next_us) VALUES ($1, $2, $3, $4)
ON CONFLICT (name) DO UPDATE SET
    body = excluded.body, timing = excluded.timing,
    next_us = CASE WHEN old.timing = excluded.timing THEN old.next_us ELSE excluded.next_us END;

-- name: schedules
SELECT body, next_us, last_us, paused FROM skep.schedule
 WHERE NOT $2 OR (NOT paused AND next_us <= skep.moment($1)) ORDER BY name;

-- name: pause_schedule
UPDATE skep.schedule SET paused = $2 WHERE name = $1 AND paused <> $2 RETURNING true;

-- name: remove_schedule
DELETE FROM skep.schedule WHERE name = $1 RETURNING true;

-- name: fire
SELECT skep.fire($1, $2, $3, $4, $5);

-- name: installed
SELECT to_regclass($1) IS NOT NULL;

-- name: newest
SELECT coalesce(max(number), 0) FROM skep.migration;
