-- An operator's hand.

-- End waiting jobs at once and ask for running ones to be stopped (T9); gives the numbers of those that were there.
CREATE FUNCTION cancel(at bigint, ids text[], dead_us bigint, cancelled_us bigint) RETURNS SETOF integer
LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    t terms := (moment(at), dead_us, cancelled_us);
    j job;
    waited job[];
    n integer;
BEGIN
    IF cardinality(ids) > 1 THEN
        PERFORM FROM chunk WHERE number = ANY (ARRAY(
            SELECT chunk_of(i.id) FROM unnest(cancel.ids) AS i (id)
             WHERE NOT EXISTS (SELECT FROM live() AS l WHERE l.id = i.id))) ORDER BY number FOR UPDATE;
        PERFORM FROM running WHERE id = ANY (ids) ORDER BY number FOR UPDATE;
    END IF;
    waited := unplace_all(t, ids);
    PERFORM end_all(t, waited, 'cancelled', t.cancelled_us, 'cancelled');
    RETURN QUERY SELECT min(i.n)::integer FROM unnest(ids) WITH ORDINALITY AS i (id, n), unnest(waited) AS w WHERE w.id = i.id GROUP BY i.id;
    FOR n IN SELECT i.n FROM unnest(ids) WITH ORDINALITY AS i (id, n) WHERE i.id NOT IN (SELECT id FROM unnest(waited)) LOOP
        LOOP
            IF NOT EXISTS (SELECT FROM running WHERE id = ids[n]) THEN
                PERFORM break_out_job(ids[n]);
            END IF;
            SELECT number, fence, attempts, history, cancel INTO j.number, j.fence, j.attempts, j.history, j.cancel
              FROM running WHERE id = ids[n] FOR UPDATE;
            IF FOUND THEN
                IF j.cancel IS NOT TRUE THEN
                    UPDATE running SET cancel = true, history = with_event(j, t.now_us, 'cancel-requested') WHERE number = j.number;
                END IF;
                RETURN NEXT n;
                EXIT;
            END IF;
            waited := unplace_all(t, ids[n:n]);
            IF waited <> '{}' THEN
                PERFORM end_all(t, waited, 'cancelled', t.cancelled_us, 'cancelled');
                RETURN NEXT n;
                EXIT;
            END IF;
            -- While we looked it may have moved to where we had looked before.  One statement sees it in one place, if it lives.
            EXIT WHEN NOT EXISTS (SELECT FROM live() WHERE id = cancel.ids[n])
                  AND chunk_of(cancel.ids[n]) IS NULL;
        END LOOP;
    END LOOP;
END $$;

-- Make a waiting job due at another time; false if it is not waiting.
CREATE FUNCTION reschedule(at bigint, job_id text, new_due bigint) RETURNS boolean
LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    t terms := (moment(at), 0, 0);
    j job := unplace(t, job_id);
BEGIN
    IF j.id IS NULL THEN
        j := unplace(t, job_id);  -- while we looked it may have moved to where we had looked before
    END IF;
    IF j.id IS NULL THEN
        RETURN false;
    END IF;
    j.history := with_event(j, t.now_us, 'rescheduled');
    j.error := NULL;
    j.due_us := new_due;
    j.pos := nextval('back');
    PERFORM place(t, j);
    PERFORM wake(j.queue);
    RETURN true;
END $$;

-- Give dead jobs a new life at the back of their queue (T13); gives the numbers of those.
CREATE FUNCTION replay(at bigint, ids text[]) RETURNS SETOF integer LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    t terms := (moment(at), 0, 0);
    j job;
    died_of text;
BEGIN
    FOR n IN 1..cardinality(ids) LOOP
        SELECT reason INTO died_of FROM archive WHERE id = ids[n] AND state = 'dead' FOR UPDATE;
        CONTINUE WHEN NOT FOUND;
        SELECT WAITING_COLUMNS INTO j FROM archive WHERE id = ids[n];
        IF j.unique_key IS NOT NULL THEN
            INSERT INTO unique_key (key, id) VALUES (j.unique_key, j.id) ON CONFLICT DO NOTHING;
            CONTINUE WHEN NOT FOUND;
        END IF;
        DELETE FROM archive WHERE seq = j.seq;
        INSERT INTO tally (queue, put, deleted, kept, dead) VALUES (j.queue, 0, 0, -1, -1);
        j.history := with_event(j, t.now_us, 'replayed', 'was dead: ' || died_of);
        j.attempts := 0;
        j.failures := 0;
        j.crashes := 0;
        j.losses := NULL;
        j.expires_us := NULL;
        j.started_us := NULL;
        j.error := NULL;
        j.progress := NULL;
        j.log := NULL;
        j.stepped := true;
        j.due_us := t.now_us;
        j.pos := nextval('back');
        PERFORM place(t, j);
        PERFORM wake(j.queue);
        RETURN NEXT n;
    END LOOP;
END $$;

-- Forget ended jobs (T14); gives the numbers of those.
CREATE FUNCTION delete(ids text[]) RETURNS SETOF integer LANGUAGE sql SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
    SELECT min(i.n)::integer FROM unnest(ids) WITH ORDINALITY AS i (id, n), unnest(forget(ids)) AS gone (id)
     WHERE gone.id = i.id GROUP BY i.id
$$;

-- Take these jobs out of the archive; gives the ids of those that were there.
CREATE FUNCTION forget(ids text[]) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    those text[];
BEGIN
    WITH gone AS (DELETE FROM archive WHERE id = ANY (ids) RETURNING queue, id, state),
    counted AS (
        INSERT INTO tally (queue, put, deleted, kept, dead)
        SELECT queue, 0, count(*), -count(*), -count(*) FILTER (WHERE state = 'dead') FROM gone GROUP BY queue)
    SELECT coalesce(array_agg(id), '{}') INTO those FROM gone;
    RETURN those;
END $$;

-- Every job that is there, with how it counts in its batch.
CREATE FUNCTION everywhere() RETURNS TABLE (place text, id text, queue text, seq bigint, batch text, counts boolean)
LANGUAGE sql STABLE AS $$  -- it is inlined
    SELECT 'ready', r.id, r.queue, r.seq, r.batch, r.stepped IS NOT TRUE FROM ready AS r UNION ALL
    SELECT 'scheduled', r.id, r.queue, r.seq, r.batch, r.stepped IS NOT TRUE FROM scheduled AS r UNION ALL
    SELECT 'held', r.id, r.queue, r.seq, r.batch, r.stepped IS NOT TRUE FROM held AS r UNION ALL
    SELECT 'running', r.id, r.queue, r.seq, r.batch, r.stepped IS NOT TRUE FROM running AS r UNION ALL
    SELECT 'running', m.id, c.queue, m.seq, c.batch, c.born IS NOT NULL FROM chunk AS c, members_of(c) AS m UNION ALL
    SELECT 'archive', r.id, r.queue, r.seq, r.batch, false FROM archive AS r
$$;

-- Counters whose sums differ from a recount, in one snapshot: by how much is the same at any later moment.
CREATE FUNCTION wrong_counters() RETURNS TABLE (queue text, what text, counted bigint, there bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    r record;
    also text := CASE WHEN to_regclass('total') IS NOT NULL THEN 'UNION ALL SELECT queue, %1$s FROM total' ELSE '' END;
BEGIN
    FOR r IN SELECT v.name, v.value, v.jobs FROM (VALUES
        ('put', 'put::numeric - deleted', 'everywhere()'),
        ('kept', 'kept', 'archive'),
        ('dead', 'dead', $q$(SELECT queue FROM archive WHERE state = 'dead') AS dead$q$)) AS v (name, value, jobs)
    LOOP
        CONTINUE WHEN NOT EXISTS (SELECT FROM pg_attribute WHERE attrelid = 'tally'::regclass AND attname = r.name);
        RETURN QUERY EXECUTE format(
            'SELECT queue, %L::text, greatest(-9e18, least(9e18, coalesce(s.n, 0)))::bigint, coalesce(j.n, 0)::bigint
               FROM (SELECT queue, sum(n) AS n FROM (SELECT queue, %s AS n FROM tally %s) AS each GROUP BY queue) AS s
               FULL JOIN (SELECT queue, count(*) AS n FROM %s GROUP BY queue) AS j USING (queue)
              WHERE coalesce(s.n, 0) <> coalesce(j.n, 0) ORDER BY queue LIMIT 1000', r.name, r.value, format(also, r.value), r.jobs);
    END LOOP;
END $$;

-- Batches that count other members to come than are there; what is done and not yet counted is on its way.
CREATE FUNCTION wrong_batches() RETURNS TABLE (batch text, counted bigint, there bigint) LANGUAGE sql AS $$
    SELECT b.id, b.live - d.n, j.n + c.n
      FROM (SELECT o.id, count(e.id) AS n FROM batch AS o
              LEFT JOIN everywhere() AS e ON e.batch = o.id AND e.counts AND e.seq > o.born GROUP BY o.id) AS j
      JOIN batch AS b ON b.id = j.id, LATERAL (
           SELECT coalesce(sum(y.n), 0) AS n FROM batch_tally AS y WHERE y.batch = b.id) AS d, LATERAL (
           SELECT count(*) AS n FROM batch AS o WHERE o.parent = b.id AND o.finished_us IS NULL AND o.born > b.born) AS c
     WHERE b.finished_us IS NULL AND b.live - d.n <> j.n + c.n ORDER BY b.id LIMIT 1000
$$;

-- A sentence for each fault, up to a thousand of a kind; all of them are mended if that is wanted.
CREATE FUNCTION repair(at bigint, mend boolean, dead_us bigint, cancelled_us bigint) RETURNS SETOF text
LANGUAGE plpgsql SET search_path FROM CURRENT SET jit = off AS $$
DECLARE
    t terms := (moment(at), dead_us, cancelled_us);
    r record;
BEGIN
    FOR r IN SELECT w.id, w.place, o.place AS other FROM everywhere() AS w JOIN everywhere() AS o USING (id)
              WHERE w.place IN ('ready', 'scheduled', 'held') AND (o.place IN ('running', 'archive') OR o.place < w.place)
              ORDER BY w.id LIMIT 1000 LOOP
        RETURN NEXT format('job %s stood in two places, %s and %s', r.id, r.place, r.other);
        IF mend THEN
            EXECUTE format('DELETE FROM %I WHERE id = $1', r.place) USING r.id;
        END IF;
    END LOOP;
    FOR r IN SELECT k.key, k.id FROM unique_key AS k
              WHERE NOT EXISTS (SELECT FROM everywhere() AS e WHERE e.id = k.id AND e.place <> 'archive') LIMIT 1000 LOOP
        RETURN NEXT format('the unique key %L was held by job %s, which is gone', r.key, r.id);
        IF mend THEN
            DELETE FROM unique_key AS k WHERE k.key = r.key AND k.id = r.id;
        END IF;
    END LOOP;
    FOR r IN SELECT w.batch, w.counted, w.there FROM wrong_batches() AS w LOOP
        RETURN NEXT format('batch %s counted %s members to come, and %s are there', r.batch, r.counted, r.there);
        IF mend THEN
            UPDATE batch AS b SET live = count_of(b.live::numeric - r.counted + r.there) WHERE b.id = r.batch;
        END IF;
    END LOOP;
    IF mend THEN
        PERFORM finish_overlooked(t);
    END IF;
    FOR r IN SELECT w.queue, w.what, w.counted, w.there FROM wrong_counters() AS w LOOP
        RETURN NEXT format('queue %s counted %s jobs (%s), and %s are there', r.queue, r.counted, r.what, r.there);
        IF mend AND r.what = 'put' THEN
            INSERT INTO tally (queue, put, deleted) VALUES (r.queue, r.there - r.counted, 0);
        ELSIF mend THEN
            EXECUTE format('INSERT INTO tally (queue, put, deleted, %I) VALUES ($1, 0, 0, $2)', r.what)
              USING r.queue, r.there - r.counted;
        END IF;
    END LOOP;
END $$;
