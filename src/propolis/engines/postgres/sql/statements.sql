-- Every statement of the PostgreSQL engine.  Here the schema of its tables is called `propolis` and that of its functions
-- `propolis_f`; the engine puts the quoted names of its own in their places.  What changes jobs is in functions/.

-- name: put
SELECT n, there FROM propolis_f.put($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13);

-- name: put_and_notify
-- The same, and a notification in the same commit.  The second part has no rows; it is there for what it does.
SELECT n, there FROM propolis_f.put($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)
UNION ALL
SELECT 0, '' FROM (SELECT count(pg_notify($14, payload)) AS n FROM unnest($15::text[]) AS payload) AS sent WHERE sent.n < 0;

-- name: put_one
SELECT propolis_f.put_one($1, $2, $3, $4, $5, $6, $7, $8);

-- name: put_one_and_notify
SELECT propolis_f.put_one($1, $2, $3, $4, $5, $6, $7, $8), pg_notify($9, $10);

-- name: put_called
SELECT n, there FROM propolis_f.put_called($1);

-- name: forget_tokens
DELETE FROM propolis.token WHERE token = ANY ($1::text[]);

-- name: settle_apart
SELECT propolis_f.settle_apart($1, $2, $3, $4, $5, $6, $7, $8);

-- name: settle_lent
SELECT propolis_f.settle_lent($1, $2, $3, $4, $5, $6, $7, $8);

-- name: installation
SELECT id, channel FROM propolis.installation;

-- name: seal
SELECT propolis_f.seal($1, $2, $3, $4);

-- name: exchange
SELECT now_us, lost, queue, number, numbers, fences, ids, tasks, bodies, puts_us, attempts, failures, crashes, batches, rank,
       pos, checkpoints, losses
  FROM propolis_f.exchange($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19);

-- name: shelve_unsound
SELECT propolis_f.shelve_unsound($1, $2, $3, $4);

-- name: renew
SELECT n, new_end, asked FROM propolis_f.renew($1, $2, $3, $4, $5, $6);

-- name: note
SELECT propolis_f.note($1, $2);

-- name: sweep
SELECT promoted, reaped, expired, removed, now_us, next_us, again_us, check_old, records_due, ended_ids, parked,
       nothing_ready
  FROM propolis_f.sweep_by($1, $2, $3, $4, $5, $6);

-- name: notify
SELECT pg_notify($1, queue) FROM unnest($2::text[]) AS queue;

-- name: anything
-- Those of these queues in which there may be something to lease.
SELECT queue FROM unnest($2::text[]) AS wanted (queue)
 WHERE EXISTS (SELECT FROM propolis.ready r WHERE r.queue = wanted.queue)
    OR EXISTS (SELECT FROM propolis.held h WHERE h.queue = wanted.queue AND h.hold_scope < 'parked')
    OR EXISTS (SELECT FROM propolis.held h WHERE h.queue = wanted.queue AND h.hold_scope > 'parked')
    OR EXISTS (SELECT FROM propolis.scheduled s WHERE s.queue = wanted.queue AND s.due_us <= propolis_f.moment($1));

-- name: now
SELECT propolis_f.moment(NULL);

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

-- name: holders
-- Whose transactions, open for longer than this, hold rows of the tables in this schema.
SELECT a.pid, coalesce(a.application_name, '') AS application, coalesce(a.state, '') AS state,
       a.xact_start AT TIME ZONE 'UTC' AS since, a.query_start AT TIME ZONE 'UTC' AS asked,
       array_agg(DISTINCT c.relname::text) AS tables
  FROM pg_catalog.pg_locks AS l
  JOIN pg_catalog.pg_class AS c ON c.oid = l.relation AND c.relkind = 'r'
  JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace AND n.nspname = $1
  JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid AND a.datname = current_database()
 WHERE l.granted AND l.mode <> 'AccessShareLock' AND a.pid <> pg_backend_pid()
   AND a.xact_start < clock_timestamp() - $2::float8 * interval '1 second'
 GROUP BY a.pid, a.application_name, a.state, a.xact_start, a.query_start
 ORDER BY a.xact_start, a.pid
 LIMIT 10;

-- name: settings
SELECT name, setting FROM pg_catalog.pg_settings
 WHERE name IN ('fsync', 'synchronous_commit', 'synchronous_standby_names', 'server_version_num',
                'default_transaction_isolation');

-- name: queues
SELECT queue, put, deleted, ready, scheduled, held, parked, running, done, dead, cancelled, more
  FROM propolis_f.counted($1, $2, $3, $4);

-- name: get
SELECT seq, put_us, due_us, expires_us, fence, started_us, rank, attempts, failures, crashes, queue, id, task, body,
       unique_key, limit_key, batch, member, error, progress, log, history, until_us, holder, cancel, state, ended_us,
       keep_us, reason, result, checkpoint, began, losses
  FROM propolis_f.get($1);

-- name: find
-- In each row where to go on.
SELECT (f.place).part, (f.place).queue AS from_queue, (f.place).after, (f.place).base, (f.place).since_us, (f.j).seq,
       (f.j).put_us, (f.j).due_us, (f.j).expires_us, (f.j).fence, (f.j).started_us, (f.j).rank, (f.j).attempts,
       (f.j).failures, (f.j).crashes, (f.j).queue, (f.j).id, (f.j).task, (f.j).body, (f.j).unique_key,
       (f.j).limit_key, (f.j).batch, (f.j).member, (f.j).error, (f.j).progress, (f.j).log, (f.j).history,
       (f.j).until_us, (f.j).holder, (f.j).cancel, (f.j).state, (f.j).ended_us, (f.j).keep_us, (f.j).reason,
       (f.j).result, (f.j).checkpoint, (f.j).began, (f.j).losses
  FROM propolis_f.find($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14) AS f;

-- name: position
SELECT propolis_f.position_of($1, $2, $3);

-- name: cancel
SELECT propolis_f.cancel($1, $2, $3, $4);

-- name: reschedule
SELECT propolis_f.reschedule($1, $2, $3);

-- name: replay
SELECT propolis_f.replay($1, $2);

-- name: delete
SELECT propolis_f.delete($1);

-- name: drop
SELECT propolis_f.drop_queue($1, $2, $3, $4);

-- name: rules
SELECT kind, scope, name, n, set_by, why, set_us, until_us, every_us, burst FROM propolis.rule
 WHERE ($3::text IS NULL OR (kind, scope, name) > ($3, $4::text, $5::text))
   AND (until_us IS NULL OR until_us > propolis_f.moment($1)) ORDER BY kind, scope, name LIMIT $2;

-- name: add_rule
SELECT propolis_f.add_rule($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12);

-- name: tokens
-- When the bucket of this name is full, and what time it is.
SELECT full_us, now_us FROM propolis_f.bucket_of($1, $2, $3);

-- name: remove_rule
SELECT propolis_f.remove_rule($1, $2, $3, $4);

-- name: batches
SELECT id, body, sealed, live, done, dead, cancelled, created_us, finished_us, keep_us, parent, enqueued, retrying, running
  FROM propolis_f.batches($1, $2, $3, $4);

-- name: members
SELECT member, id, state, result, reason FROM propolis_f.members($1, coalesce($2::integer, -1), $3);

-- name: delete_batch
SELECT propolis_f.delete_batch($1, $2, $3, $4);

-- name: rights
-- Whether nothing can be written here, which rights this user lacks on our schema ($1), our set ($2) and our tables ($3), and
-- which of these tables are not there.
SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean AS read_only, ARRAY(
       SELECT format('USAGE ON SCHEMA %I', s.nspname) FROM pg_catalog.pg_namespace AS s
        WHERE s.nspname IN ($1, $2) AND NOT has_schema_privilege(s.oid, 'USAGE')
       UNION ALL
       SELECT format('%s ON %I.%I', string_agg(w.wanted, ', ' ORDER BY w.place), $1, c.relname)
         FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS s ON s.oid = c.relnamespace AND s.nspname = $1,
              unnest(CASE WHEN c.relkind = 'S' THEN ARRAY['USAGE', 'UPDATE']
                          WHEN c.relname IN ('function_set', 'installation') THEN ARRAY['SELECT']
                          WHEN c.relname = 'migration' THEN ARRAY['SELECT', 'UPDATE']
                          ELSE ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE'] END) WITH ORDINALITY AS w (wanted, place)
        WHERE c.relname = ANY ($3::text[])
          AND NOT CASE WHEN c.relkind = 'S' THEN has_sequence_privilege(c.oid, w.wanted)
                       ELSE has_table_privilege(c.oid, w.wanted) END
        GROUP BY c.relname
       UNION ALL
       SELECT format('EXECUTE ON %s', min(p.oid::regprocedure::text)) FROM pg_catalog.pg_proc AS p
         JOIN pg_catalog.pg_namespace AS s ON s.oid = p.pronamespace AND s.nspname = $2
        WHERE NOT has_function_privilege(p.oid, 'EXECUTE') HAVING count(*) > 0) AS missing, ARRAY(
       SELECT name FROM unnest($3::text[]) AS wanted (name)
        WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS s ON s.oid = c.relnamespace
                           WHERE s.nspname = $1 AND c.relname = wanted.name)) AS gone;

-- name: installed
-- (to_regclass() may still know in a transaction that there was none before it waited for others.)
SELECT EXISTS (SELECT FROM pg_catalog.pg_tables WHERE schemaname = $1 AND tablename = 'migration');

-- name: migrations
-- Also of a propolis that wrote down less, and of a table of somebody else.
SELECT CASE jsonb_typeof(to_jsonb(m)->'number') WHEN 'number' THEN (to_jsonb(m)->>'number')::integer ELSE 0 END,
       coalesce(to_jsonb(m)->>'checksum', ''), coalesce((to_jsonb(m)->>'compatible_from')::integer, 1)
  FROM propolis.migration AS m;

-- name: has_set
SELECT EXISTS (SELECT FROM propolis.function_set JOIN pg_catalog.pg_namespace ON nspname = name WHERE name = $1);

-- name: last_set
SELECT name FROM propolis.function_set JOIN pg_catalog.pg_namespace ON nspname = name ORDER BY number DESC LIMIT 1;

-- name: incompatible_sets
SELECT name FROM propolis.function_set WHERE knows < (SELECT max(compatible_from) FROM propolis.migration);

-- name: old_sets
-- Those before the newest ($2 of them), but for this one.
SELECT name FROM propolis.function_set
 WHERE name <> $1 AND number NOT IN (SELECT number FROM propolis.function_set ORDER BY number DESC LIMIT $2)
 ORDER BY number;

-- name: forget_set
DELETE FROM propolis.function_set WHERE name = $1;

-- name: grants
-- What lets those who may use one set ($1) use another ($2), its owner included.
WITH old AS (SELECT oid, nspowner, nspacl FROM pg_catalog.pg_namespace WHERE nspname = $1),
granted AS (
    SELECT 'SCHEMA' AS kind, a.grantee, a.privilege_type, a.is_grantable
      FROM old, aclexplode(coalesce(nspacl, acldefault('n', nspowner))) AS a
    UNION
    SELECT 'ALL FUNCTIONS IN SCHEMA', a.grantee, a.privilege_type, a.is_grantable
      FROM old JOIN pg_catalog.pg_proc AS p ON p.pronamespace = old.oid,
           aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a)
SELECT format('REVOKE ALL ON SCHEMA %I FROM PUBLIC', $2::text) AS statement FROM old
UNION ALL
SELECT format('REVOKE ALL ON ALL FUNCTIONS IN SCHEMA %I FROM PUBLIC', $2::text) FROM old
UNION ALL
SELECT format('GRANT %s ON %s %I TO %s', privilege_type, kind, $2::text,
              CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END)
       || CASE WHEN is_grantable THEN ' WITH GRANT OPTION' ELSE '' END
  FROM granted
 ORDER BY statement DESC;  -- first what is taken away

-- name: swap
SELECT propolis_f.swap($1, $2, $3, $4);

-- name: records_named
SELECT name, value, version, at_us, expires_us, t.now_us
  FROM (SELECT propolis_f.moment($1) AS now_us) AS t LEFT JOIN propolis.records AS r
    ON r.kind = $2 AND r.name = ANY ($3::text[]) AND (r.expires_us IS NULL OR r.expires_us > t.now_us)
 ORDER BY name;

-- name: records_due
SELECT name, value, version, at_us, expires_us, t.now_us
  FROM (SELECT propolis_f.moment($1) AS now_us) AS t LEFT JOIN LATERAL (
       SELECT name, value, version, at_us, expires_us FROM propolis.records
        WHERE kind = $2 AND at_us <= t.now_us AND (expires_us IS NULL OR expires_us > t.now_us)
        ORDER BY at_us, name LIMIT $3) AS r ON true
 ORDER BY at_us, name;

-- name: records_after
SELECT name, value, version, at_us, expires_us, t.now_us
  FROM (SELECT propolis_f.moment($1) AS now_us) AS t LEFT JOIN LATERAL (
       SELECT name, value, version, at_us, expires_us FROM propolis.records
        WHERE kind = $2 AND name > $4 AND (expires_us IS NULL OR expires_us > t.now_us)
        ORDER BY name LIMIT $3) AS r ON true
 ORDER BY name;

-- name: records_before
-- Backwards; from the end if there is no name.
SELECT name, value, version, at_us, expires_us, t.now_us
  FROM (SELECT propolis_f.moment($1) AS now_us) AS t LEFT JOIN LATERAL (
       SELECT name, value, version, at_us, expires_us FROM propolis.records
        WHERE kind = $2 AND ($4::text IS NULL OR name < $4) AND (expires_us IS NULL OR expires_us > t.now_us)
        ORDER BY name DESC LIMIT $3) AS r ON true
 ORDER BY name DESC;

-- name: publish
SELECT propolis_f.publish($1, $2, $3, $4, $5, $6, $7);

-- name: mark_followed
SELECT propolis_f.mark_followed($1, $2, $3);

-- name: follow
-- The head and the entries of a feed are read in one statement, hence as they were at one moment.
SELECT f.name, f.last, coalesce(f.forgotten > a.after OR (a.after > 0 AND a.after < f.born), false) AS gap, e.number, e.value
  FROM unnest($2::text[], $3::bigint[]) AS a(name, after)
 CROSS JOIN LATERAL (
       SELECT name, last, born, forgotten FROM propolis.feed
        WHERE name = a.name AND expires_us > propolis_f.moment($1) LIMIT 1) AS f
  LEFT JOIN LATERAL (
       SELECT number, value FROM propolis.feed_entry
        WHERE feed = f.name AND number > greatest(a.after, f.forgotten) ORDER BY number LIMIT $4) AS e
    ON a.after < f.last
 ORDER BY f.name, e.number;

-- name: repair
SELECT propolis_f.repair($1, $2, $3, $4);
