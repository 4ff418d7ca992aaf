-- Small parts that all others use, and the places where a job waits.

CREATE FUNCTION moment(at bigint) RETURNS bigint LANGUAGE sql VOLATILE AS $$
    SELECT coalesce(at, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
$$;

-- Wake those who wait for this queue, or for any if it is ''.  For rare events only, because commits with
-- a notification wait for one another; what clients know to be news they announce themselves.
CREATE FUNCTION wake(queue text) RETURNS void LANGUAGE sql VOLATILE AS $$
    SELECT pg_notify(i.channel, queue) FROM installation AS i
$$;

-- The history of a job with one more event; the newest hundred are kept.
CREATE FUNCTION with_event(j job, now_us bigint, kind text, note text DEFAULT '') RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    events jsonb := coalesce(j.history, '[]') || jsonb_build_array(
        jsonb_build_array(now_us, kind, j.attempts, coalesce(j.fence, 0), coalesce(j.holder, ''), note));
BEGIN
    RETURN CASE WHEN jsonb_array_length(events) > 100 THEN events - 0 ELSE events END;
END $$;

-- Put a job where it waits: in line, or among the scheduled.
CREATE FUNCTION place(t terms, j job) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF j.due_us > t.now_us THEN
        INSERT INTO scheduled (WAITING_COLUMNS) VALUES (j.WAITING_COLUMNS);
    ELSE
        INSERT INTO ready (WAITING_COLUMNS) VALUES (j.WAITING_COLUMNS);
    END IF;
END $$;

-- Take a waiting job out of wherever it waits; a row of NULLs if it does not.
CREATE FUNCTION unplace(t terms, job_id text) RETURNS job LANGUAGE plpgsql AS $$
DECLARE
    j job;
BEGIN
    DELETE FROM ready WHERE id = job_id RETURNING WAITING_COLUMNS INTO j;
    PERFORM open_keys(t, ARRAY[j.queue], ARRAY[j.limit_key]) WHERE j.limit_key IS NOT NULL;
    IF j.id IS NULL THEN
        DELETE FROM scheduled WHERE id = job_id RETURNING WAITING_COLUMNS INTO j;
        IF NOT FOUND THEN
            DELETE FROM held WHERE id = job_id RETURNING WAITING_COLUMNS INTO j;
        END IF;
    END IF;
    RETURN j;
END $$;

-- The same for many; gives those that waited, in this order.
CREATE FUNCTION unplace_all(t terms, ids text[]) RETURNS job[] LANGUAGE plpgsql SET enable_nestloop = off SET jit = off AS $$
DECLARE
    jobs job[];
BEGIN
    WITH from_ready AS (
        DELETE FROM ready WHERE id = ANY (ids)
        RETURNING (WAITING_COLUMNS, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)::job AS j),
    from_scheduled AS (
        DELETE FROM scheduled WHERE id = ANY (ids)
        RETURNING (WAITING_COLUMNS, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)::job AS j),
    from_held AS (
        DELETE FROM held WHERE id = ANY (ids)
        RETURNING (WAITING_COLUMNS, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)::job AS j),
    gone AS (SELECT j FROM from_ready UNION ALL SELECT j FROM from_scheduled UNION ALL SELECT j FROM from_held)
    SELECT coalesce(array_agg(g.j ORDER BY i.n), '{}') INTO jobs
      FROM gone AS g JOIN (SELECT id, min(n) AS n FROM unnest(ids) WITH ORDINALITY AS i (id, n) GROUP BY id) AS i ON i.id = (g.j).id;
    PERFORM open_keys(t, array_agg(queue), array_agg(limit_key)) FROM unnest(jobs) WHERE limit_key IS NOT NULL;
    RETURN jobs;
END $$;

-- Those whose time has come join the back of their line, in the order of their times: of one queue, as far as they were not yet
-- due at a time, or of all.
CREATE FUNCTION promote(t terms, of_queue text, most integer, from_due bigint) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    places tid[];
BEGIN
    IF of_queue IS NOT NULL THEN
        places := ARRAY(SELECT ctid FROM scheduled WHERE queue = of_queue AND due_us > from_due AND due_us <= t.now_us
                         ORDER BY due_us, seq LIMIT most FOR UPDATE SKIP LOCKED);
    ELSE
        places := ARRAY(SELECT ctid FROM scheduled WHERE due_us > from_due AND due_us <= t.now_us
                         ORDER BY due_us, seq LIMIT most FOR UPDATE SKIP LOCKED);
        PERFORM wake(queue) FROM (SELECT DISTINCT queue FROM scheduled WHERE ctid = ANY (places)) AS them;
    END IF;
    WITH due AS (
        DELETE FROM scheduled WHERE ctid = ANY (places) RETURNING WAITING_COLUMNS)
    INSERT INTO ready (WAITING_COLUMNS)
    SELECT seq, nextval('back'), CARRIED_COLUMNS FROM due ORDER BY due_us, seq;
    RETURN cardinality(places);
END $$;

-- Whether each statement sees what was committed before it.  In a caller's transaction it may not.
CREATE FUNCTION always_looks_anew() RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')
$$;

-- Counts that are kept: one that was damaged stops at a number to which others can still be added, and fails no call.
CREATE FUNCTION count_of(n numeric) RETURNS integer LANGUAGE sql IMMUTABLE AS $$
    SELECT greatest(-2147483647, least(2147483647, n))::integer
$$;

CREATE FUNCTION big_count_of(n numeric) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT greatest(-1e17, least(1e17, n))::bigint
$$;

-- Wait for nobody any more, in this call: after the first that was in the way others would be as well.
CREATE FUNCTION hurry() RETURNS void LANGUAGE sql VOLATILE AS $$
    SELECT set_config('lock_timeout', '1ms', true)
$$;

-- A UUIDv7, also where the server has none of its own.
CREATE FUNCTION new_id() RETURNS text LANGUAGE sql VOLATILE AS $$
    SELECT encode(set_bit(set_bit(overlay(
               uuid_send(gen_random_uuid())
               PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3) FROM 1 FOR 6
           ), 52, 1), 53, 1), 'hex')::uuid::text
$$;

CREATE FUNCTION refuse(what text, advice text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING errcode = '22023', message = 'propolis: ' || what, hint = advice;
END $$;

CREATE FUNCTION milliseconds(span interval) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT (extract(epoch FROM span) * 1000)::bigint
$$;
