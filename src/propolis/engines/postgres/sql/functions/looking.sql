-- What operators see.

-- The queues that there are or were, after a name.
CREATE FUNCTION queue_names(after text DEFAULT '', most integer DEFAULT NULL) RETURNS text[] LANGUAGE plpgsql AS $$
BEGIN
    RETURN ARRAY(
        SELECT queue FROM (
            (SELECT queue FROM total WHERE queue > after ORDER BY queue LIMIT most) UNION
            SELECT queue FROM tally WHERE queue > after) AS names
         ORDER BY queue LIMIT most);
END $$;

-- How many jobs wait in a queue, as the counters say, if that is more than `enough`; what runs is counted only then.
CREATE FUNCTION waiting_in(of_queue text, enough bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    n bigint := (SELECT sum(put - deleted - kept) FROM (
        SELECT put, deleted, kept FROM tally WHERE queue = of_queue UNION ALL
        SELECT put, deleted, kept FROM total WHERE queue = of_queue) AS counted);
BEGIN
    IF n > enough THEN
        n := n - (SELECT count(*) FROM running WHERE queue = of_queue)
               - (SELECT coalesce(sum(members), 0) FROM chunk WHERE queue = of_queue);
    END IF;
    RETURN n;
END $$;

-- Of each of these queues what was put and deleted, and how many jobs are where, each counted up to `most`.
CREATE FUNCTION counted(at bigint, after text, queues_most integer, most integer)
RETURNS TABLE (queue text, put bigint, deleted bigint, ready bigint, scheduled bigint, held bigint, parked bigint, running bigint,
               done bigint, dead bigint, cancelled bigint, more boolean)
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    now_us bigint := moment(at);
    names text[] := queue_names(coalesce(after, ''), queues_most);
BEGIN
    RETURN QUERY
        SELECT c.queue, c.put, c.deleted,
               CASE WHEN c.more THEN least(most, (SELECT count(*) FROM (SELECT FROM ready AS r WHERE r.queue = c.queue LIMIT most) AS few))
                    ELSE c.put - c.deleted - c.scheduled - c.held - c.parked - c.running - c.done - c.dead - c.cancelled END,
               least(c.scheduled, most), least(c.held, most), least(c.parked, most), c.running, least(c.done, most), c.dead,
               least(c.cancelled, most), c.more
          FROM (SELECT s.queue, s.put, s.deleted, s.dead, s.scheduled, s.held, s.parked, s.running, s.done, s.cancelled,
                       greatest(s.scheduled, s.held, s.parked, s.done, s.cancelled) > most AS more
          FROM (SELECT q AS queue, o.put, o.deleted, o.dead,
                       (SELECT count(*) FROM (SELECT FROM scheduled AS s WHERE s.queue = q AND s.due_us > now_us LIMIT most + 1) AS few) AS scheduled,
                       (SELECT count(*) FROM (
                            (SELECT FROM held AS h WHERE h.queue = q AND h.hold_scope < 'parked' LIMIT most + 1) UNION ALL
                            (SELECT FROM held AS h WHERE h.queue = q AND h.hold_scope > 'parked' LIMIT most + 1)) AS few) AS held,
                       (SELECT count(*) FROM (
                            SELECT FROM held AS h WHERE h.queue = q AND h.hold_scope = 'parked' LIMIT most + 1) AS few) AS parked,
                       coalesce(u.n, 0) AS running,
                       (SELECT count(*) FROM (SELECT FROM archive AS a WHERE a.queue = q AND a.state = 'done' LIMIT most + 1) AS few) AS done,
                       (SELECT count(*) FROM (SELECT FROM archive AS a WHERE a.queue = q AND a.state = 'cancelled' LIMIT most + 1) AS few) AS cancelled
                  FROM unnest(names) AS q CROSS JOIN LATERAL (
                       SELECT sum(s.put)::bigint AS put, sum(s.deleted)::bigint AS deleted, sum(s.dead)::bigint AS dead FROM (
                            SELECT t.put, t.deleted, t.dead FROM tally AS t WHERE t.queue = q UNION ALL
                            SELECT t.put, t.deleted, t.dead FROM total AS t WHERE t.queue = q) AS s) AS o
                  LEFT JOIN (
                       SELECT s.name, sum(s.n)::bigint AS n FROM (
                            SELECT r.queue AS name, count(*) AS n FROM running AS r WHERE r.queue = ANY (names) GROUP BY r.queue UNION ALL
                            SELECT k.queue, sum(k.members) FROM chunk AS k WHERE k.queue = ANY (names) GROUP BY k.queue) AS s
                        GROUP BY s.name) AS u ON u.name = q) AS s) AS c
         ORDER BY c.queue COLLATE "C";
END $$;

-- These jobs, in the order of puts; the state of each says where it is, and whether it is parked.
CREATE FUNCTION shown(these text[]) RETURNS SETOF job LANGUAGE plpgsql STABLE AS $$
DECLARE
    low text := (SELECT min(id COLLATE "C") FROM unnest(these) AS id);
    high text := (SELECT max(id COLLATE "C") FROM unnest(these) AS id);
BEGIN
    RETURN QUERY
        SELECT seq, pos, put_us, due_us, expires_us, fence, started_us, rank, max_crashes, attempts, failures, crashes,
               queue, id, task, body, chosen, unique_key, unique_until, limit_key, batch, member, stepped, error,
               progress, log, history, checkpoint, losses, until_us, holder, cancel, began, number, 'ready', ended_us, keep_us, reason,
               result
          FROM ready WHERE id = ANY (these)
        UNION ALL
        SELECT seq, pos, put_us, due_us, expires_us, fence, started_us, rank, max_crashes, attempts, failures, crashes,
               queue, id, task, body, chosen, unique_key, unique_until, limit_key, batch, member, stepped, error,
               progress, log, history, checkpoint, losses, until_us, holder, cancel, began, number, 'ready', ended_us, keep_us, reason,
               result
          FROM scheduled WHERE id = ANY (these)
        UNION ALL
        SELECT seq, pos, put_us, due_us, expires_us, fence, started_us, rank, max_crashes, attempts, failures, crashes,
               queue, id, task, body, chosen, unique_key, unique_until, limit_key, batch, member, stepped, error,
               progress, log, history, checkpoint, losses, until_us, holder, cancel, began, number,
               CASE hold_scope WHEN 'parked' THEN 'parked' ELSE 'ready' END, ended_us, keep_us, reason, result
          FROM held WHERE id = ANY (these)
        UNION ALL
        SELECT seq, pos, put_us, due_us, expires_us, fence, started_us, rank, max_crashes, attempts, failures, crashes,
               queue, id, task, body, chosen, unique_key, unique_until, limit_key, batch, member, stepped, error,
               progress, log, history, checkpoint, losses, until_us, holder, cancel, began, number, 'running', ended_us, keep_us, reason,
               result
          FROM running WHERE id = ANY (these)
        UNION ALL
        SELECT seq, pos, put_us, due_us, expires_us, fence, started_us, rank, max_crashes, attempts, failures, crashes,
               queue, id, task, body, chosen, unique_key, unique_until, limit_key, batch, member, stepped, error,
               progress, log, history, checkpoint, losses, until_us, holder, cancel, began, number, state, ended_us, keep_us, reason,
               result
          FROM archive WHERE id = ANY (these)
        UNION ALL
        SELECT m.seq, m.seq, m.put_us, m.due_us, NULL, c.fence, c.started_us, m.rank, m.max_crashes, 1, 0, 0, c.queue,
               m.id, m.task, m.body, NULL, NULL, NULL, NULL, c.batch, m.member, NULL, NULL, NULL, NULL, NULL, NULL,
               NULL, c.until_us, c.holder, NULL, NULL, m.place, 'running', NULL, NULL, NULL, NULL
          FROM chunk AS c, members_of(c) AS m WHERE c.last_id >= low AND c.first_id <= high AND m.id = ANY (these)
         ORDER BY seq;
END $$;

-- One job, or those after a place in the order of puts for which everything that is given is true.  From each queue, state and
-- place not more than `most` are read, so that a page costs the same wherever it is; what is filtered out is walked over.
CREATE FUNCTION find(
    at bigint, of_id text, after bigint, of_queue text, of_task text, of_batch text, of_state text, of_reason text,
    is_scheduled boolean, most integer
) RETURNS SETOF job LANGUAGE plpgsql STABLE SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    now_us bigint := moment(at);
    waits boolean := coalesce(of_state = 'ready', true) AND of_reason IS NULL;
    runs boolean := coalesce(of_state = 'running', true) AND of_reason IS NULL AND is_scheduled IS NOT TRUE;
    queues text[] := CASE WHEN of_queue IS NULL AND of_id IS NULL THEN queue_names() ELSE ARRAY[of_queue] END;
    ends text[] := CASE WHEN is_scheduled THEN '{}' WHEN of_state IS NULL THEN '{done,dead,cancelled}' ELSE ARRAY[of_state] END;
    ids text[];
BEGIN
    IF of_id IS NOT NULL THEN
        ids := ARRAY[of_id];
    ELSIF of_batch IS NOT NULL THEN
        ids := ARRAY(
            SELECT j.id FROM (
                SELECT w.id, w.seq FROM waiting() AS w
                 WHERE waits AND w.batch = of_batch AND coalesce(w.queue = of_queue, true)
                   AND coalesce(w.task = of_task, true) AND coalesce((w.due_us > now_us) = is_scheduled, true)
                UNION ALL
                SELECT r.id, r.seq FROM running AS r
                 WHERE runs AND r.batch = of_batch AND coalesce(r.queue = of_queue, true) AND coalesce(r.task = of_task, true)
                UNION ALL
                SELECT m.id, m.seq FROM chunk AS c, members_of(c) AS m
                 WHERE runs AND c.batch = of_batch AND coalesce(c.queue = of_queue, true) AND coalesce(m.task = of_task, true)
                UNION ALL
                SELECT a.id, a.seq FROM archive AS a
                 WHERE a.batch = of_batch AND a.state = ANY (ends) AND coalesce(a.queue = of_queue, true)
                   AND coalesce(a.task = of_task, true) AND (of_reason IS NULL OR a.reason = of_reason)) AS j
             WHERE j.seq > after ORDER BY j.seq LIMIT most);
    ELSE
        ids := ARRAY(
            SELECT found.id FROM (
                SELECT j.id, j.seq FROM unnest(queues) AS q, LATERAL (
                    SELECT r.id, r.seq FROM ready AS r
                     WHERE r.queue = q AND r.seq > after AND coalesce(r.task = of_task, true)
                       AND coalesce((r.due_us > now_us) = is_scheduled, true)
                     ORDER BY r.seq LIMIT most) AS j WHERE waits
                UNION ALL
                SELECT j.id, j.seq FROM unnest(queues) AS q, LATERAL (
                    SELECT s.id, s.seq FROM scheduled AS s
                     WHERE s.queue = q AND s.seq > after AND coalesce(s.task = of_task, true)
                       AND coalesce((s.due_us > now_us) = is_scheduled, true)
                     ORDER BY s.seq LIMIT most) AS j WHERE waits
                UNION ALL
                SELECT j.id, j.seq FROM unnest(queues) AS q, LATERAL (
                    SELECT h.id, h.seq FROM held AS h
                     WHERE h.queue = q AND h.seq > after AND coalesce(h.task = of_task, true)
                       AND coalesce((h.due_us > now_us) = is_scheduled, true)
                     ORDER BY h.seq LIMIT most) AS j WHERE waits
                UNION ALL
                SELECT r.id, r.seq FROM running AS r
                 WHERE runs AND r.queue = ANY (queues) AND r.seq > after AND coalesce(r.task = of_task, true)
                UNION ALL
                SELECT m.id, m.seq FROM chunk AS c, members_of(c) AS m
                 WHERE runs AND c.queue = ANY (queues) AND m.seq > after AND coalesce(m.task = of_task, true)
                UNION ALL
                SELECT j.id, j.seq FROM unnest(queues) AS q, unnest(ends) AS e, LATERAL (
                    SELECT a.id, a.seq FROM archive AS a
                     WHERE a.queue = q AND a.state = e AND a.seq > after AND coalesce(a.task = of_task, true)
                       AND (of_reason IS NULL OR a.reason = of_reason)
                     ORDER BY a.seq LIMIT most) AS j) AS found
             ORDER BY found.seq LIMIT most);
    END IF;
    RETURN QUERY SELECT j.seq, j.pos, j.put_us, j.due_us, j.expires_us, j.fence, j.started_us, j.rank, j.max_crashes,
                       j.attempts, j.failures, j.crashes, j.queue, j.id, j.task, j.body, j.chosen, j.unique_key,
                       j.unique_until, j.limit_key, j.batch, j.member, j.stepped, j.error, j.progress, j.log, j.history,
                       j.checkpoint, j.losses, j.until_us, j.holder, j.cancel, j.began, j.number, j.state, j.ended_us, j.keep_us, j.reason,
                       j.result
                   FROM shown(ids) AS j;
END $$;
