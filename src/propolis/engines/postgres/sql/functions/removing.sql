-- Queues and batches go, a bite at a time: the first in the call that asks for it, the others in sweeps.

-- Whether somebody removes this job, which was put at that place.
CREATE FUNCTION is_removed(of_queue text, of_batch text, of_seq bigint) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (
        SELECT FROM removal AS m
         WHERE of_seq > m.since AND of_seq <= m.until
           AND (m.scope = 'queue' AND m.name = of_queue OR m.scope = 'batch' AND m.name = of_batch))
$$;

-- The next jobs of a queue to be removed, in the order of puts.  Rows are compared whole where the server would else go
-- through all of the archive in that order.
CREATE FUNCTION left_of_queue(of_queue text, until bigint, most integer) RETURNS text[] LANGUAGE sql STABLE AS $$
    SELECT ARRAY(
        SELECT id FROM (
            (SELECT id, seq FROM ready WHERE queue = of_queue AND seq <= until ORDER BY seq LIMIT most) UNION ALL
            (SELECT id, seq FROM scheduled WHERE queue = of_queue AND seq <= until ORDER BY seq LIMIT most) UNION ALL
            (SELECT id, seq FROM held WHERE queue = of_queue AND seq <= until ORDER BY seq LIMIT most) UNION ALL
            (SELECT id, seq FROM archive WHERE (queue, state, seq) > (of_queue, 'done', 0) AND (queue, state, seq) <= (of_queue, 'done', until)
              ORDER BY queue, state, seq LIMIT most) UNION ALL
            (SELECT id, seq FROM archive WHERE (queue, state, seq) > (of_queue, 'dead', 0) AND (queue, state, seq) <= (of_queue, 'dead', until)
              ORDER BY queue, state, seq LIMIT most) UNION ALL
            (SELECT id, seq FROM archive WHERE (queue, state, seq) > (of_queue, 'cancelled', 0) AND (queue, state, seq) <= (of_queue, 'cancelled', until)
              ORDER BY queue, state, seq LIMIT most)) AS j
         ORDER BY seq LIMIT most)
$$;

-- And of a batch.
CREATE FUNCTION left_of_batch(of_batch text, since bigint, until bigint, most integer) RETURNS text[] LANGUAGE sql STABLE AS $$
    SELECT ARRAY(
        SELECT id FROM (
            (SELECT id, seq FROM ready WHERE batch = of_batch AND seq > since AND seq <= until AND stepped IS NOT TRUE
              ORDER BY seq LIMIT most) UNION ALL
            (SELECT id, seq FROM scheduled WHERE batch = of_batch AND seq > since AND seq <= until AND stepped IS NOT TRUE
              ORDER BY seq LIMIT most) UNION ALL
            (SELECT id, seq FROM held WHERE batch = of_batch AND seq > since AND seq <= until AND stepped IS NOT TRUE
              ORDER BY seq LIMIT most)) AS j
         ORDER BY seq LIMIT most)
$$;

-- Remove one bite of the jobs of a queue or batch with these places in the order of puts, and of what is listed of a batch that
-- was born there; gives how many jobs went, and whether there may be more.
CREATE FUNCTION remove_some(
    t terms, of_scope text, of_name text, since bigint, until bigint, most integer, OUT gone integer, OUT more boolean
) LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off AS $$
DECLARE
    ids text[] := CASE of_scope WHEN 'queue' THEN left_of_queue(of_name, until, most)
                                ELSE left_of_batch(of_name, since, until, most) END;
    waited job[] := unplace_all(t, ids);
    lines integer := 0;
BEGIN
    PERFORM end_all(t, waited, 'cancelled', NULL);
    gone := cardinality(waited);
    IF of_scope = 'queue' THEN
        gone := gone + cardinality(forget(ids));
    ELSE
        DELETE FROM ended WHERE ctid = ANY (ARRAY(
            SELECT ctid FROM ended WHERE batch = of_name AND born BETWEEN since AND until LIMIT most FOR UPDATE SKIP LOCKED));
        GET DIAGNOSTICS lines = ROW_COUNT;
    END IF;
    more := cardinality(ids) = most OR lines = most;
END $$;

-- Leave the rest to sweeps.
CREATE FUNCTION remove_later(t terms, of_scope text, of_name text, from_seq bigint, to_seq bigint, n bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO removal AS m (scope, name, since, until, began_us, removed) VALUES (of_scope, of_name, from_seq, to_seq, t.now_us, n)
    ON CONFLICT (scope, name) DO UPDATE SET since = least(m.since, excluded.since), until = greatest(m.until, excluded.until),
                                            removed = m.removed + excluded.removed;
    INSERT INTO records AS r (kind, name, value, version)
    SELECT 'removal', of_scope || ':' || of_name,
           convert_to(jsonb_build_object('removed', m.removed, 'since_us', m.began_us)::text, 'UTF8'), next_version(t.now_us, 0)
      FROM removal AS m WHERE m.scope = of_scope AND m.name = of_name
    ON CONFLICT (kind, name) DO UPDATE SET value = excluded.value, version = greatest(excluded.version, r.version + 1);
END $$;

-- Go on with what is being removed; gives how many jobs went.
CREATE FUNCTION remove_more(t terms, most integer) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    m record;
    did record;
    n integer := 0;
BEGIN
    FOR m IN SELECT scope, name, since, until FROM removal ORDER BY began_us LIMIT bite() FOR UPDATE SKIP LOCKED LOOP
        did := remove_some(t, m.scope, m.name, m.since, m.until, most - n);
        n := n + did.gone;
        IF did.more THEN
            PERFORM remove_later(t, m.scope, m.name, m.since, m.until, did.gone);
        ELSE
            DELETE FROM removal WHERE scope = m.scope AND name = m.name;
            DELETE FROM records WHERE kind = 'removal' AND name = m.scope || ':' || m.name;
            IF m.scope = 'queue' THEN
                PERFORM forget_queue(m.name);
            END IF;
        END IF;
        EXIT WHEN n >= most;
    END LOOP;
    RETURN n;
END $$;

-- Forget what a queue has counted, if nothing is left in it.  What somebody has put since then is still counted; and what a caller's
-- transaction has gathered, which nobody waits for.
CREATE FUNCTION forget_queue(of_queue text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM live() WHERE queue = of_queue) OR EXISTS (SELECT FROM chunk WHERE queue = of_queue) THEN
        RETURN;
    END IF;
    WITH gone AS (
        DELETE FROM tally WHERE ctid = ANY (ARRAY(SELECT ctid FROM tally WHERE queue = of_queue FOR UPDATE SKIP LOCKED))
        RETURNING put, deleted, kept, dead),
    whole AS (DELETE FROM total WHERE queue = of_queue RETURNING put, deleted, kept, dead)
    INSERT INTO tally (queue, put, deleted, kept, dead)
    SELECT of_queue, big_count_of(sum(put) - sum(deleted)), 0, big_count_of(sum(kept)), big_count_of(sum(dead))
      FROM (SELECT put, deleted, kept, dead FROM gone UNION ALL SELECT put, deleted, kept, dead FROM whole) AS forgotten
    HAVING sum(put) <> sum(deleted) OR sum(kept) <> 0;
END $$;

-- Forget a queue; gives how many jobs went at once.
CREATE FUNCTION drop_queue(at bigint, of_queue text, dead_us bigint, cancelled_us bigint) RETURNS integer
LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    t terms := (moment(at), dead_us, cancelled_us);
    until bigint := nextval('back');
    did record;
BEGIN
    did := remove_some(t, 'queue', of_queue, 0, until, bite());
    IF did.more THEN
        PERFORM remove_later(t, 'queue', of_queue, 0, until, did.gone);
    ELSE
        PERFORM forget_queue(of_queue);
    END IF;
    RETURN did.gone;
END $$;
