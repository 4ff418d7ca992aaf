-- Batches: they open, step, finish and go.

-- What is held of a batch, and until the commit.  FOR UPDATE: whoever seals or removes it.  FOR NO KEY UPDATE: whoever changes
-- its counts.  FOR SHARE: members that are done, and counted in the tally: see step_done().  FOR KEY SHARE: whoever joins it in a
-- transaction of a caller's, which may stay open: only the first of these waits for that.

-- Whether this is the transaction of a caller's, which may stay open for as long as that wants: see callers.sql.
CREATE FUNCTION in_callers_transaction() RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT coalesce(current_setting('propolis.caller', true), '') = 'yes'
$$;

-- Lock the batches that a step may count something in: nested ones before those around them, as their ends go.
CREATE FUNCTION lock_batches(names text[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF cardinality(names) > 1 THEN  -- one is locked when its turn comes
        PERFORM FROM batch WHERE id = ANY (names) ORDER BY parent IS NULL, id DESC FOR NO KEY UPDATE;
    END IF;
END $$;

-- Have a batch for oneself until the commit, with what was added to its tally in its counts.
CREATE FUNCTION add_up_batch(of_batch text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    more record;
BEGIN
    PERFORM FROM batch WHERE id = of_batch FOR NO KEY UPDATE;
    WITH gone AS (DELETE FROM batch_tally WHERE batch = of_batch RETURNING n, joined)
    SELECT sum(n) AS done, sum(joined) AS joined INTO more FROM gone;
    IF more.done IS NOT NULL THEN
        UPDATE batch SET live = count_of(live::numeric + more.joined - more.done), done = count_of(done::numeric + more.done)
         WHERE id = of_batch;
    END IF;
END $$;

-- Make one row of those that its tally has, about once for a thousand members that are done, so that whoever looks at the batch while
-- the newest one still waits reads no more.  Whoever is at some of these rows keeps them.
CREATE FUNCTION gather_batch(s step) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF always_looks_anew() AND EXISTS (SELECT FROM unnest(s.numbers) AS number WHERE number % 1024 = 1023) THEN
        WITH gone AS (
            DELETE FROM batch_tally WHERE ctid = ANY (ARRAY(
                SELECT ctid FROM batch_tally WHERE batch = s.batch LIMIT 10000 FOR UPDATE SKIP LOCKED))
            RETURNING n, joined)
        INSERT INTO batch_tally (batch, n, joined) SELECT s.batch, count_of(sum(n)), count_of(sum(joined)) FROM gone HAVING count(*) > 0;
    END IF;
END $$;

-- So many more members are to end in a batch that the caller has locked.
CREATE FUNCTION count_in(of_batch text, more bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF in_callers_transaction() THEN
        INSERT INTO batch_tally (batch, n, joined) VALUES (of_batch, 0, more);
    ELSE
        UPDATE batch SET live = count_of(live::numeric + more) WHERE id = of_batch;
    END IF;
END $$;

-- One member has ended (B1); `since` is its place in the order of puts.
CREATE FUNCTION step_batch(
    t terms, of_batch text, since bigint, of_member integer, member_id text, became text, gave bytea, why text
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    b family;
BEGIN
    PERFORM add_up_batch(of_batch);
    UPDATE batch SET live = count_of(live::numeric - 1), done = count_of(done::numeric + (became = 'done')::integer),
                     dead = count_of(dead::numeric + (became = 'dead')::integer),
                     cancelled = count_of(cancelled::numeric + (became = 'cancelled')::integer)
     WHERE id = of_batch AND born < since
    RETURNING id, born, calls, sealed, live, dead, cancelled, keep_for_us, finished_us, parent, member INTO b;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    INSERT INTO ended (batch, born, first, last, n, state, reason, numbers, ids, results)
    VALUES (of_batch, b.born, of_member, of_member, 1, became, why, ARRAY[of_member], ARRAY[member_id],
            CASE WHEN gave IS NOT NULL THEN ARRAY[gave] END);
    IF became <> 'done' AND b.dead::bigint + b.cancelled = 1 THEN
        PERFORM call_back(t, b, 'on_failed');
    END IF;
    IF b.sealed AND b.live = 0 THEN
        PERFORM finish_batch(t, b);
    END IF;
END $$;

-- Many members are done at once.
--
-- Whoever ends the last member must see that it is the last, so it has the batch for itself until it commits.  But while
-- the one that was put last waits in line, somebody will end that one later, and will see what we have added, because it
-- waits for those who share the lock.  So until then we only add, and wait for nobody.  Calls that lock more than this
-- batch do not `share` it: two that want it for themselves after that would wait for each other.
CREATE FUNCTION step_done(t terms, s step, share boolean) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    n integer := cardinality(s.ids);
    b family;
BEGIN
    IF share AND goes_on(s) THEN
        PERFORM FROM batch WHERE id = s.batch AND born = s.born FOR SHARE SKIP LOCKED;
        IF FOUND THEN
            IF goes_on(s) THEN
                INSERT INTO batch_tally (batch, n) VALUES (s.batch, n);
                PERFORM gather_batch(s);
                PERFORM list_done(s);
                RETURN;
            END IF;
            PERFORM FROM batch WHERE id = s.batch FOR NO KEY UPDATE SKIP LOCKED;
            IF NOT FOUND THEN  -- others share it as well: if they want the same, all of us would wait for one another
                RAISE EXCEPTION USING errcode = '40001', message = 'the newest member was taken meanwhile: begin anew';
            END IF;
        END IF;
    END IF;
    PERFORM add_up_batch(s.batch);
    UPDATE batch SET live = count_of(live::numeric - n), done = count_of(done::numeric + n) WHERE id = s.batch AND born = s.born
    RETURNING id, born, calls, sealed, live, dead, cancelled, keep_for_us, finished_us, parent, member INTO b;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    PERFORM list_done(s);
    IF b.sealed AND b.live = 0 THEN
        PERFORM finish_batch(t, b);
    END IF;
END $$;

-- Whether others than these are to end in the batch, for sure.  What stands in line under that id may be a job that counts
-- no more, as after a replay, or another one.  (IS TRUE: so that only the id is searched for.)
CREATE FUNCTION goes_on(s step) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM batch AS b JOIN ready AS r ON r.id = b.newest
         WHERE b.id = s.batch AND b.born = s.born
           AND (r.batch = b.id AND r.seq > b.born AND r.stepped IS NOT TRUE) IS TRUE);
END $$;

CREATE FUNCTION list_done(s step) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO ended (batch, born, first, last, n, state, reason, numbers, ids, results)
    SELECT s.batch, s.born, min(number), max(number), count(*), 'done', NULL, array_agg(number), array_agg(id),
           CASE WHEN s.results IS NOT NULL THEN array_agg(result) END
      FROM unnest(s.numbers, s.ids, s.results) AS m (number, id, result) GROUP BY number / 1024;
END $$;

-- Open a batch, unless it is there.  What is emitted may join a sealed parent, and stands alone where that is over: then it is
-- as old as the parent, so that it counts there no more than what was put before.
CREATE FUNCTION open_batch(t terms, b jsonb, emitted boolean DEFAULT false) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO batch (id, born, body, calls, keep_for_us, created_us, open_us, parent, member)
    VALUES (b->>'id', nextval('back'), b->>'body', b->'calls', (b->>'keep_for_us')::bigint, t.now_us, t.now_us + (b->>'open_us')::bigint,
            b->>'parent', (b->>'member')::integer)
    ON CONFLICT DO NOTHING;
    IF NOT FOUND OR b->>'parent' IS NULL THEN
        RETURN;
    ELSIF joins(b->>'parent', emitted) THEN
        PERFORM count_in(b->>'parent', 1);
        UPDATE batch SET born = nextval('back') WHERE id = b->>'id';  -- after its parent, which nobody removes from here on
    ELSE
        UPDATE batch AS inner_one SET born = around.born FROM batch AS around
         WHERE inner_one.id = b->>'id' AND around.id = inner_one.parent;
    END IF;
END $$;

CREATE FUNCTION seal_batch(t terms, of_batch text) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    b family;
BEGIN
    PERFORM FROM batch WHERE id = of_batch FOR UPDATE;
    PERFORM add_up_batch(of_batch);
    SELECT id, born, calls, sealed, live, dead, cancelled, keep_for_us, finished_us, parent, member INTO b
      FROM batch WHERE id = of_batch;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING errcode = 'PP001', message = 'unknown batch', detail = of_batch;
    ELSIF b.sealed THEN
        RETURN false;
    END IF;
    UPDATE batch SET sealed = true WHERE id = of_batch;
    IF b.live = 0 THEN
        PERFORM finish_batch(t, b);
    END IF;
    RETURN true;
END $$;

CREATE FUNCTION call_back(t terms, b family, what text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF b.calls ? what THEN
        BEGIN
            PERFORM add_job(t, drafted(b.calls->what, t.now_us), true);
            PERFORM wake(b.calls->what->>'queue');
        EXCEPTION WHEN data_exception OR not_null_violation THEN  -- its callback cannot be read, and its members end all the same
            RAISE WARNING USING errcode = 'PP006', message = format('batch %s could not call back: %s', b.id, sqlerrm);
        END;
    END IF;
END $$;

CREATE FUNCTION finish_batch(t terms, b family) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE batch SET finished_us = t.now_us, keep_us = t.now_us + least(b.keep_for_us, 3155760000000000) WHERE id = b.id;  -- a century, if that can be
    IF b.dead::bigint + b.cancelled = 0 THEN
        PERFORM call_back(t, b, 'on_succeeded');
    END IF;
    PERFORM call_back(t, b, 'on_finished');
    IF b.parent IS NOT NULL THEN
        PERFORM step_batch(t, b.parent, b.born, b.member, b.id,
                           CASE WHEN b.dead::bigint + b.cancelled = 0 THEN 'done' ELSE 'dead' END, NULL, NULL);
    END IF;
    IF b.keep_for_us = 0 THEN
        PERFORM remove_batch(t, b.id);
    END IF;
END $$;

-- Its live members step nothing from here on: see there.
CREATE FUNCTION remove_batch(t terms, of_batch text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    b family;
BEGIN
    DELETE FROM batch WHERE id = of_batch
    RETURNING id, born, calls, sealed, live, dead, cancelled, keep_for_us, finished_us, parent, member INTO b;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    DELETE FROM batch_tally WHERE batch = of_batch;
    IF (remove_some(t, 'batch', b.id, b.born, b.born, bite())).more THEN
        PERFORM remove_later(t, 'batch', b.id, b.born, b.born, 0);
    END IF;
    IF b.finished_us IS NULL AND b.parent IS NOT NULL THEN
        PERFORM step_batch(t, b.parent, b.born, b.member, b.id, 'cancelled', NULL, NULL);
    END IF;
END $$;

CREATE FUNCTION seal(at bigint, of_batch text, dead_us bigint, cancelled_us bigint) RETURNS boolean
LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT seal_batch((moment(at), dead_us, cancelled_us)::terms, of_batch)
$$;

-- Whoever ends the last member of a batch finishes it, so nothing should be found here.  But if ever one is overlooked, it
-- calls back late and not never.
CREATE FUNCTION finish_overlooked(t terms) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    name text;
    b family;
BEGIN
    FOR name IN
        SELECT o.id FROM batch AS o LEFT JOIN batch_tally AS y ON y.batch = o.id
         WHERE o.sealed AND o.finished_us IS NULL
         GROUP BY o.id HAVING coalesce(sum(y.n - y.joined), 0) >= o.live
    LOOP
        PERFORM FROM batch WHERE id = name FOR NO KEY UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;  -- somebody is at it
        PERFORM add_up_batch(name);
        SELECT id, born, calls, sealed, live, dead, cancelled, keep_for_us, finished_us, parent, member INTO b
          FROM batch WHERE id = name;
        IF b.sealed AND b.live = 0 AND b.finished_us IS NULL THEN
            RAISE WARNING 'all members of batch % had ended and nobody finished it: tell the authors of propolis', name;
            PERFORM finish_batch(t, b);
        END IF;
    END LOOP;
END $$;

-- Forget a batch and its waiting members; running ones finish.
CREATE FUNCTION delete_batch(at bigint, of_batch text, dead_us bigint, cancelled_us bigint) RETURNS boolean
LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    t terms := (moment(at), dead_us, cancelled_us);
    its_birth bigint;
    until bigint;
    did record;
BEGIN
    SELECT born INTO its_birth FROM batch WHERE id = of_batch FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    until := nextval('back');
    PERFORM remove_batch(t, of_batch);
    did := remove_some(t, 'batch', of_batch, its_birth, until, bite());
    IF did.more THEN
        PERFORM remove_later(t, 'batch', of_batch, its_birth, until, did.gone);
    END IF;
    RETURN true;
END $$;

-- One batch, or those after an id, with how far their live members are.  Only among `counted` live members at a place, and
-- `counted` chunks, are those that run, or have run before, told from the rest.
CREATE FUNCTION batches(of_id text, after text, most integer, counted integer)
RETURNS TABLE (id text, body text, sealed boolean, live integer, done integer, dead integer, cancelled integer, created_us bigint,
               finished_us bigint, keep_us bigint, parent text, enqueued bigint, retrying bigint, running bigint)
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
BEGIN
    RETURN QUERY
        WITH page AS MATERIALIZED (
            SELECT b.id, b.born, b.body, b.sealed, count_of(b.live + t.joined - t.n) AS live,
                   count_of(b.done + t.n) AS done, b.dead, b.cancelled,
                   b.created_us, b.finished_us, b.keep_us, b.parent
              FROM ((SELECT k.id, k.born, k.body, k.sealed, k.live, k.done, k.dead, k.cancelled, k.created_us, k.finished_us,
                            k.keep_us, k.parent
                       FROM batch AS k WHERE k.id = of_id) UNION ALL
                    (SELECT k.id, k.born, k.body, k.sealed, k.live, k.done, k.dead, k.cancelled, k.created_us, k.finished_us,
                            k.keep_us, k.parent
                       FROM batch AS k WHERE of_id IS NULL AND k.id > coalesce(after, '') ORDER BY k.id LIMIT most)) AS b, LATERAL (
                   SELECT coalesce(sum(y.n), 0)::numeric AS n, coalesce(sum(y.joined), 0)::numeric AS joined
                     FROM batch_tally AS y WHERE y.batch = b.id) AS t),
        in_chunks AS MATERIALIZED (
            SELECT c.batch, c.born, sum(c.members) AS n
              FROM (SELECT k.batch, k.born, k.members FROM chunk AS k ORDER BY k.number LIMIT counted) AS c
             WHERE c.batch IN (SELECT p.id FROM page AS p) GROUP BY 1, 2)
        SELECT p.id, p.body, p.sealed, p.live, p.done, p.dead, p.cancelled, p.created_us, p.finished_us, p.keep_us, p.parent,
               greatest(0, p.live - w.n - r.n)::bigint, w.n, r.n
          FROM page AS p, LATERAL (
               SELECT count(*) AS n FROM (
                   (SELECT j.failures, j.crashes, j.losses FROM ready AS j
                     WHERE j.batch = p.id AND j.seq > p.born AND j.stepped IS NOT TRUE ORDER BY j.seq LIMIT counted) UNION ALL
                   (SELECT j.failures, j.crashes, j.losses FROM scheduled AS j
                     WHERE j.batch = p.id AND j.seq > p.born AND j.stepped IS NOT TRUE ORDER BY j.seq LIMIT counted) UNION ALL
                   (SELECT j.failures, j.crashes, j.losses FROM held AS j
                     WHERE j.batch = p.id AND j.seq > p.born AND j.stepped IS NOT TRUE ORDER BY j.seq LIMIT counted)) AS few
                WHERE greatest(few.failures, few.crashes, few.losses) > 0) AS w, LATERAL (
               SELECT (SELECT count(*) FROM (
                           SELECT FROM running AS j
                            WHERE j.batch = p.id AND j.seq > p.born AND j.stepped IS NOT TRUE ORDER BY j.seq LIMIT counted) AS few)
                    + (SELECT count(*) FROM (
                           SELECT FROM batch AS k
                            WHERE k.parent = p.id AND k.born > p.born AND k.finished_us IS NULL LIMIT counted) AS few)
                    + (SELECT coalesce(sum(c.n), 0)::bigint FROM in_chunks AS c WHERE c.batch = p.id AND c.born = p.born) AS n) AS r
         ORDER BY p.id;
END $$;

-- Members of a batch with numbers after this one, in their order: those that have ended, live jobs and live nested batches.
CREATE FUNCTION members(of_batch text, after integer, most integer)
RETURNS TABLE (member integer, id text, state text, result bytea, reason text)
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off AS $$
DECLARE
    its_birth bigint := (SELECT b.born FROM batch AS b WHERE b.id = of_batch);
    enough integer := 0;  -- up to this number there are as many as are wanted, if there are so many
    n integer := 0;
    e record;
BEGIN
    FOR e IN SELECT last, ended.n FROM ended WHERE batch = of_batch AND born = its_birth AND first > after ORDER BY first LOOP
        enough := greatest(enough, e.last);
        n := n + e.n;
        EXIT WHEN n >= most;
    END LOOP;
    IF n < most THEN
        enough := 2147483647;
    END IF;
    RETURN QUERY
        SELECT m.member, m.id, m.state, m.result, m.reason FROM (
            SELECT DISTINCT ON (m.member, m.id) m.member, m.id, m.state, m.result, m.reason FROM (
                SELECT p.number AS member, p.id, ended.state, p.result, ended.reason, 1 AS rank
                  FROM ended, unnest(numbers, ids, results) AS p (number, id, result)
                 WHERE batch = of_batch AND born = its_birth AND first > after - 1024 AND first <= enough AND last > after
                   AND p.number > after AND p.number <= enough
                UNION ALL
                (SELECT l.member, l.id, 'ready', NULL, NULL, 0 FROM ready AS l
                  WHERE l.batch = of_batch AND l.seq > its_birth AND l.stepped IS NOT TRUE AND l.member > after
                  ORDER BY l.member LIMIT most)
                UNION ALL
                (SELECT l.member, l.id, 'ready', NULL, NULL, 0 FROM scheduled AS l
                  WHERE l.batch = of_batch AND l.seq > its_birth AND l.stepped IS NOT TRUE AND l.member > after
                  ORDER BY l.member LIMIT most)
                UNION ALL
                (SELECT l.member, l.id, 'ready', NULL, NULL, 0 FROM held AS l
                  WHERE l.batch = of_batch AND l.seq > its_birth AND l.stepped IS NOT TRUE AND l.member > after
                  ORDER BY l.member LIMIT most)
                UNION ALL
                (SELECT l.member, l.id, 'running', NULL, NULL, 0 FROM running AS l
                  WHERE l.batch = of_batch AND l.seq > its_birth AND l.stepped IS NOT TRUE AND l.member > after
                  ORDER BY l.member LIMIT most)
                UNION ALL
                SELECT m.member, m.id, 'running', NULL, NULL, 0 FROM chunk AS c, members_of(c) AS m
                 WHERE c.batch = of_batch AND c.born = its_birth AND m.member > after
                UNION ALL
                (SELECT b.member, b.id, 'running', NULL, NULL, 0 FROM batch AS b
                  WHERE b.parent = of_batch AND b.born > its_birth AND b.finished_us IS NULL AND b.member > after
                  ORDER BY b.member LIMIT most)) AS m
             ORDER BY m.member, m.id, m.rank) AS m
         WHERE its_birth IS NOT NULL
         ORDER BY m.member, m.id LIMIT most;
END $$;
