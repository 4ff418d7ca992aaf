-- Leases and jobs end; leases are renewed, and notes made on what runs.

-- End a job that is in no table any more, with all that follows.  It is kept for `keep`, or not at all if that is
-- NULL or nothing.
CREATE FUNCTION end_job(
    t terms, j job, became text, keep bigint, why text DEFAULT NULL, what text DEFAULT NULL, gave bytea DEFAULT NULL
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF j.unique_key IS NOT NULL THEN
        DELETE FROM unique_key WHERE key = j.unique_key AND id = j.id;
    END IF;
    IF j.chosen THEN
        INSERT INTO known (id, until_us) VALUES (j.id, t.now_us + 86400000000)
        ON CONFLICT (id) DO UPDATE SET until_us = excluded.until_us;
    END IF;
    IF keep > 0 THEN
        j.state := became;
        j.ended_us := t.now_us;
        j.keep_us := t.now_us + keep;
        j.reason := why;
        j.error := what;
        j.result := gave;
        IF became <> 'dead' THEN
            j.checkpoint := NULL;
        END IF;
        INSERT INTO archive (WAITING_COLUMNS, cancel, state, END_COLUMNS)
        VALUES (j.WAITING_COLUMNS, j.cancel, j.state, j.END_COLUMNS);
        INSERT INTO tally (queue, put, deleted, kept, dead) VALUES (j.queue, 0, 0, 1, (became = 'dead')::integer);
    ELSE
        INSERT INTO tally (queue, put, deleted) VALUES (j.queue, 0, 1);
    END IF;
    IF j.batch IS NOT NULL AND j.stepped IS NOT TRUE THEN
        PERFORM step_batch(t, j.batch, j.seq, j.member, j.id, became, gave, why);
    END IF;
END $$;

-- The same for many that end in one way, in this order.
CREATE FUNCTION end_all(t terms, jobs job[], became text, keep bigint, why text DEFAULT NULL) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    j job;
BEGIN
    IF cardinality(jobs) <= 1 THEN
        PERFORM end_job(t, jobs[1], became, keep, why) WHERE jobs <> '{}';
        RETURN;
    END IF;
    PERFORM lock_batches(ARRAY(SELECT DISTINCT batch FROM unnest(jobs) WHERE batch IS NOT NULL AND stepped IS NOT TRUE));
    DELETE FROM unique_key WHERE key = ANY (ARRAY(SELECT unique_key FROM unnest(jobs)))
                             AND (key, id) IN (SELECT unique_key, id FROM unnest(jobs));
    INSERT INTO known (id, until_us) SELECT id, t.now_us + 86400000000 FROM unnest(jobs) WHERE chosen ORDER BY id
    ON CONFLICT (id) DO UPDATE SET until_us = excluded.until_us;
    IF keep > 0 THEN
        INSERT INTO archive (seq, pos, put_us, due_us, expires_us, fence, started_us, rank, max_crashes, attempts,
            failures, crashes, queue, id, task, body, chosen, unique_key, unique_until, limit_key, batch, member,
            stepped, progress, log, history, checkpoint, losses, cancel, state, ended_us, keep_us, reason)
        SELECT seq, pos, put_us, due_us, expires_us, fence, started_us, rank, max_crashes, attempts,
               failures, crashes, queue, id, task, body, chosen, unique_key, unique_until, limit_key, batch, member,
               stepped, progress, log, history, CASE WHEN became = 'dead' THEN checkpoint END, losses, cancel, became, t.now_us,
               t.now_us + keep, why
          FROM unnest(jobs);
        INSERT INTO tally (queue, put, deleted, kept, dead)
        SELECT queue, 0, 0, count(*), CASE WHEN became = 'dead' THEN count(*) ELSE 0 END FROM unnest(jobs) GROUP BY queue;
    ELSE
        INSERT INTO tally (queue, put, deleted) SELECT queue, 0, count(*) FROM unnest(jobs) GROUP BY queue;
    END IF;
    FOREACH j IN ARRAY ARRAY(SELECT e FROM unnest(jobs) AS e WHERE e.batch IS NOT NULL AND e.stepped IS NOT TRUE) LOOP
        PERFORM step_batch(t, j.batch, j.seq, j.member, j.id, became, NULL, why);
    END LOOP;
END $$;

CREATE FUNCTION expire(t terms, j job) RETURNS void LANGUAGE sql AS $$
    SELECT end_job(t, j, 'dead', t.dead_us, 'expired')
$$;

-- Jobs that are due stand before all others of their priority, in this order.
CREATE FUNCTION to_front(jobs job[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO ready (WAITING_COLUMNS)
    SELECT seq, nextval('front'), CARRIED_COLUMNS
      FROM (SELECT seq, CARRIED_COLUMNS, row_number() OVER () AS n FROM unnest(jobs)) AS line
     ORDER BY n DESC;
END $$;

-- A lease of a job ended, and nobody knows how its run did (T8).  Gives the job if it is yet to be placed at the front.
CREATE FUNCTION lose(t terms, INOUT j job, OUT front boolean) LANGUAGE plpgsql AS $$
BEGIN
    front := false;
    j.losses := coalesce(j.losses, 0) + 1;
    IF j.cancel THEN
        PERFORM end_job(t, j, 'cancelled', t.cancelled_us, 'cancelled');
        RETURN;
    END IF;
    j.history := with_event(j, t.now_us, 'lost');
    IF j.losses >= 10 THEN
        PERFORM end_job(t, j, 'dead', t.dead_us, 'lost');
        RETURN;
    END IF;
    j.error := NULL;
    j.due_us := t.now_us;
    front := j.losses < 3;
    IF NOT front THEN
        j.due_us := t.now_us + least(5000000 * 2 ^ (j.losses - 3), 300000000)::bigint;
        j.pos := nextval('back');  -- which says when the pause was counted
        PERFORM place(t, j);
    END IF;
END $$;

-- Its own run took its process with it (T8b).
CREATE FUNCTION crash(t terms, INOUT j job, what text, note text, OUT front boolean) LANGUAGE plpgsql AS $$
BEGIN
    front := false;
    j.crashes := j.crashes + 1;
    IF j.cancel THEN
        PERFORM end_job(t, j, 'cancelled', t.cancelled_us, 'cancelled');
        RETURN;
    END IF;
    j.history := with_event(j, t.now_us, 'crashed', note);
    IF j.crashes >= j.max_crashes THEN
        PERFORM end_job(t, j, 'dead', t.dead_us, 'crashed', what);
        RETURN;
    END IF;
    j.error := what;
    j.due_us := t.now_us;
    front := true;
END $$;

-- One running job, locked by the caller, and the outcome of its run.  Gives whether that was accepted, and the
-- job if it is yet to be placed at the front.
CREATE FUNCTION settle_one(t terms, INOUT j job, o jsonb, OUT accepted boolean, OUT front boolean)
LANGUAGE plpgsql AS $$
DECLARE
    kind text := coalesce(o->>'kind', 'done');
    error text := o->>'error';
    one record;
BEGIN
    accepted := true;
    front := false;
    IF kind = 'cancelled' AND j.cancel IS NOT TRUE THEN
        accepted := false;
        RETURN;
    END IF;
    IF o ?| '{emit,opens}' THEN
        DELETE FROM unique_key WHERE key = j.unique_key AND id = j.id;  -- it may hand its own key on
        PERFORM open_batch(t, b, true) FROM jsonb_array_elements(o->'opens') AS b;
        PERFORM add_drafts(t, o->'emit', true);
    END IF;
    DELETE FROM running WHERE running.number = j.number;
    PERFORM open_keys(t, ARRAY[j.queue], ARRAY[j.limit_key]) WHERE j.limit_key IS NOT NULL;
    CASE
        WHEN kind = 'done' THEN
            PERFORM end_job(t, j, 'done', (o->>'keep_us')::bigint, NULL, NULL, decode(o->>'result', 'base64'));
        WHEN kind = 'dead' THEN
            j.failures := j.failures + 1;
            PERFORM end_job(t, j, 'dead', coalesce((o->>'keep_us')::bigint, t.dead_us), o->>'reason', error);
        WHEN kind = 'broken' THEN
            PERFORM end_job(t, j, 'dead', t.dead_us, 'broken', error);
        WHEN kind = 'crashed' THEN
            IF (o->>'blameless')::boolean THEN
                one := lose(t, j);
            ELSE
                one := crash(t, j, error, o->>'note');
            END IF;
            j := one.j;
            front := one.front;
        WHEN kind = 'cancelled' OR j.cancel THEN
            PERFORM end_job(t, j, 'cancelled', t.cancelled_us, 'cancelled', error);
        WHEN kind = 'retry' THEN
            j.history := with_event(j, t.now_us, 'retried', o->>'note');
            j.failures := j.failures + 1;
            j.losses := NULL;
            j.error := error;
            j.due_us := t.now_us + (o->>'delay_us')::bigint;
            IF o->>'queue' <> j.queue THEN
                INSERT INTO tally (queue, put, deleted) VALUES (j.queue, 0, 1), (o->>'queue', 1, 0);
                j.queue := o->>'queue';
            END IF;
            j.pos := nextval('back');
            PERFORM place(t, j);
        WHEN kind = 'snooze' THEN
            j.history := with_event(j, t.now_us, 'snoozed');
            j.attempts := j.attempts - 1;
            IF o ? 'asked' THEN
                j.losses := NULL;
            END IF;
            j.error := NULL;
            j.due_us := t.now_us + (o->>'delay_us')::bigint;
            j.pos := nextval('back');
            PERFORM give_back(t, j);
            PERFORM place(t, j);
        WHEN kind = 'release' THEN
            j.history := with_event(j, t.now_us, 'released');
            j.attempts := j.attempts - 1;
            j.error := NULL;
            j.due_us := t.now_us;
            PERFORM give_back(t, j);
            front := true;
        WHEN kind = 'unknown' THEN
            j.history := with_event(j, t.now_us, 'parked');
            j.attempts := j.attempts - 1;
            j.error := NULL;
            j.due_us := t.now_us;
            PERFORM give_back(t, j);
            PERFORM place(t, j);
            PERFORM set_aside(ARRAY[j.id], ARRAY['parked'], ARRAY[j.task]);
    END CASE;
END $$;

-- The batches in which these outcomes may count something: those of jobs that end, of what is emitted, and around what is opened.
CREATE FUNCTION stepped_by(at_numbers bigint[], outcomes text[]) RETURNS text[] LANGUAGE plpgsql AS $$
BEGIN
    RETURN ARRAY(
        SELECT r.batch FROM running AS r, unnest(at_numbers, outcomes::jsonb[]) AS l (number, o)
         WHERE r.number = l.number AND r.batch IS NOT NULL AND r.stepped IS NOT TRUE
           AND (r.cancel OR coalesce(o->>'kind', 'done') NOT IN ('retry', 'snooze', 'release', 'unknown'))
        UNION
        SELECT name FROM unnest(outcomes::jsonb[]) AS o, LATERAL (
            SELECT e->>'batch' AS name FROM jsonb_array_elements(o->'emit') AS e UNION ALL
            SELECT b->>'parent' FROM jsonb_array_elements(o->'opens') AS b) AS named WHERE name IS NOT NULL);
END $$;

-- Members of batches that are done, with nothing to keep and nothing to emit: gives their numbers, and how their
-- batches are to step.
CREATE FUNCTION end_members(
    t terms, at_numbers bigint[], of_ids text[], fences bigint[], holders text[], outcomes text[],
    OUT ended integer[], OUT steps step[]
) LANGUAGE plpgsql AS $$
DECLARE
    queues text[];
    keys text[];
BEGIN
    WITH over AS (
        DELETE FROM running AS r USING (
            SELECT min(place) AS n, number, id, fence, holder FROM by_number(at_numbers, of_ids, fences, holders, outcomes)
             WHERE outcome IS NULL GROUP BY number, id, fence, holder) AS l
         WHERE r.number = l.number AND r.id = l.id AND r.fence = l.fence AND r.holder = l.holder AND r.batch IS NOT NULL AND r.unique_key IS NULL
        RETURNING l.n::integer, r.queue, r.id, r.chosen, r.batch, r.member, r.stepped, r.seq, r.limit_key),
    counted AS (
        INSERT INTO tally (queue, put, deleted) SELECT queue, 0, count(*) FROM over GROUP BY queue),
    remembered AS (
        INSERT INTO known (id, until_us) SELECT id, t.now_us + 86400000000 FROM over WHERE chosen
        ON CONFLICT (id) DO UPDATE SET until_us = excluded.until_us),
    stepping AS (
        SELECT b.id AS batch, b.born, max(over.n) AS place, array_agg(over.member) AS numbers, array_agg(over.id) AS ids
          FROM over JOIN batch AS b ON b.id = over.batch WHERE over.stepped IS NOT TRUE AND over.seq > b.born
         GROUP BY b.id, b.born)
    SELECT (SELECT array_agg(n) FROM over), (SELECT array_agg((batch, born, place, numbers, ids, NULL)::step) FROM stepping),
           (SELECT array_agg(queue) FROM over), (SELECT array_agg(limit_key) FROM over) INTO ended, steps, queues, keys;
    PERFORM open_keys(t, queues, keys) WHERE array_remove(keys, NULL) <> '{}';
END $$;

-- End leases (T4-T8b, T10, T12); gives the numbers, from 1, of those that were no longer live.
-- An outcome that is NULL, or no outcomes at all, means: done, and nothing to keep.  Only whoever can begin anew may `share` a
-- batch with others: see step_done().
CREATE FUNCTION settle_all(
    t terms, at_numbers bigint[], ids text[], fences bigint[], holders text[], outcomes text[], share boolean
) RETURNS integer[]
LANGUAGE plpgsql AS $$
DECLARE
    ended integer[];
    steps step[];
    queues text[];
    keys text[];
    lost integer[] := '{}';
    released job[] := '{}';
    many record;
    j job;
    s step;
    one record;
BEGIN
    many := settle_members(t, at_numbers, ids, fences, holders, outcomes);
    ended := many.ended;
    steps := many.steps;
    IF cardinality(ended) < cardinality(ids) THEN
        IF cardinality(ids) > 1 THEN
            PERFORM FROM running WHERE number = ANY (at_numbers) ORDER BY number FOR UPDATE;
        END IF;
        -- The common end in one statement: done, nothing to keep, no batch to step.
        WITH gone AS (
            DELETE FROM running AS r USING by_number(at_numbers, ids, fences, holders, outcomes) AS l
             WHERE r.number = l.number AND r.id = l.id AND r.fence = l.fence AND r.holder = l.holder AND l.outcome IS NULL
               AND r.chosen IS NULL AND r.unique_key IS NULL AND r.batch IS NULL
            RETURNING l.place::integer AS n, r.queue, r.limit_key),
        counted AS (
            INSERT INTO tally (queue, put, deleted) SELECT queue, 0, count(*) FROM gone GROUP BY queue)
        SELECT ended || array_agg(n), array_agg(queue), array_agg(limit_key) INTO ended, queues, keys FROM gone;
        PERFORM open_keys(t, queues, keys) WHERE array_remove(keys, NULL) <> '{}';
    END IF;
    IF cardinality(ended) < cardinality(ids) THEN
        many := end_members(t, at_numbers, ids, fences, holders, outcomes);
        ended := ended || many.ended;
        steps := steps || many.steps;
    END IF;
    IF cardinality(ended) = cardinality(ids) THEN
        IF cardinality(steps) = 1 THEN  -- and nothing that a lease in the same call may find expired, and end in its batch
            PERFORM step_done(t, steps[1], share AND NOT EXISTS (SELECT FROM waiting() WHERE expires_us <= t.now_us));
        ELSIF cardinality(steps) > 1 THEN
            PERFORM lock_batches(ARRAY(SELECT DISTINCT batch FROM unnest(steps)));
            FOREACH s IN ARRAY ARRAY(SELECT x FROM unnest(steps) AS x ORDER BY x.place) LOOP
                PERFORM step_done(t, s, false);
            END LOOP;
        END IF;
        RETURN lost;
    END IF;
    PERFORM lock_batches(ARRAY(SELECT unnest(stepped_by(at_numbers, outcomes)) UNION SELECT batch FROM unnest(steps)));
    FOR n IN 1..cardinality(ids) LOOP  -- in their order, as one might see in what follows from them
        FOREACH s IN ARRAY ARRAY(SELECT x FROM unnest(steps) AS x WHERE x.place = n) LOOP
            PERFORM step_done(t, s, false);
        END LOOP;
        CONTINUE WHEN n = ANY (ended);
        SELECT WAITING_COLUMNS, RUN_COLUMNS INTO j FROM running
         WHERE number = at_numbers[n] AND id = ids[n] AND fence = fences[n]
           AND holder = CASE WHEN cardinality(holders) = 1 THEN holders[1] ELSE holders[n] END FOR UPDATE;
        IF NOT FOUND THEN
            lost := lost || n;
            CONTINUE;
        END IF;
        one := settle_one(t, j, outcomes[n]::jsonb);
        IF NOT one.accepted THEN
            lost := lost || n;
        ELSIF one.front THEN
            released := released || one.j;
        END IF;
    END LOOP;
    PERFORM to_front(released);
    RETURN lost;
END $$;

-- What renew() does, waiting for whoever holds one of them.
CREATE FUNCTION renew_these(now_us bigint, at_numbers bigint[], ids text[], fences bigint[], holders text[], until bigint)
RETURNS TABLE (n integer, new_end bigint, asked boolean) LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY SELECT place, until, false FROM renew_members(now_us, at_numbers, ids, fences, holders, until) AS place;
    RETURN QUERY
        UPDATE running AS r SET until_us = until, span_us = until - now_us
          FROM (SELECT l.number, l.id, l.fence, l.holder, l.place FROM by_number(at_numbers, ids, fences, holders, NULL) AS l
                 ORDER BY l.number) AS l
         WHERE r.number = l.number AND r.id = l.id AND r.fence = l.fence AND r.holder = l.holder AND r.until_us > now_us
        RETURNING l.place::integer, r.until_us, coalesce(r.cancel, false);
END $$;

-- Make each live lease end a span from now (T3).  Gives the numbers, from 1, of those that live, with their new ends and whether
-- they should stop.  Where somebody holds one of them, a settle for instance, only what was claimed together with it stays as it
-- is: its new end is NULL.
CREATE FUNCTION renew(at bigint, at_numbers bigint[], ids text[], fences bigint[], holders text[], span_us bigint)
RETURNS TABLE (n integer, new_end bigint, asked boolean)
LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    now_us bigint := moment(at);
    places integer[];
BEGIN
    BEGIN
        RETURN QUERY SELECT r.n, r.new_end, r.asked FROM renew_these(now_us, at_numbers, ids, fences, holders, now_us + span_us) AS r;
        RETURN;
    EXCEPTION WHEN lock_not_available THEN
        PERFORM hurry();
    END;
    FOR places IN
        SELECT array_agg(l.place::integer ORDER BY l.place) FROM unnest(at_numbers) WITH ORDINALITY AS l (number, place)
         GROUP BY l.number & -1024 ORDER BY 1
    LOOP
        BEGIN
            RETURN QUERY
                SELECT places[r.n], r.new_end, r.asked
                  FROM renew_these(
                           now_us, ARRAY(SELECT at_numbers[p] FROM unnest(places) AS p), ARRAY(SELECT renew.ids[p] FROM unnest(places) AS p),
                           ARRAY(SELECT fences[p] FROM unnest(places) AS p),
                           CASE WHEN cardinality(holders) = 1 THEN holders ELSE ARRAY(SELECT holders[p] FROM unnest(places) AS p) END,
                           now_us + span_us) AS r;
        EXCEPTION WHEN lock_not_available THEN
            RETURN QUERY SELECT p, NULL::bigint, false FROM unnest(places) AS p;
        END;
    END LOOP;
END $$;

-- Record what running jobs report (T3b); each note is {number, id, fence, holder, lines; and if there are any progress, began, checkpoint, puts}.
-- Gives the numbers, from 1, of those whose leases are lost.
CREATE FUNCTION note(at bigint, notes jsonb) RETURNS integer[] LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    t terms := (moment(at), 0, 0);
    d jsonb;
    n integer;
    lines text[];
    lost integer[] := '{}';
    puts jsonb := '[]';
BEGIN
    PERFORM break_out_leases(array_agg((a->>'number')::bigint), array_agg(a->>'id'), array_agg((a->>'fence')::bigint),
                             array_agg(a->>'holder')) FROM jsonb_array_elements(notes) AS a;
    FOR d, n IN SELECT a, i FROM jsonb_array_elements(notes) WITH ORDINALITY AS e (a, i) ORDER BY (a->>'number')::bigint, i LOOP
        SELECT coalesce(log, '{}') || ARRAY(SELECT jsonb_array_elements_text(d->'lines')) INTO lines
          FROM running
         WHERE number = (d->>'number')::bigint AND id = d->>'id' AND fence = (d->>'fence')::bigint AND holder = d->>'holder'
           AND until_us > t.now_us FOR UPDATE;
        IF NOT FOUND THEN
            lost := lost || n;
            CONTINUE;
        END IF;
        UPDATE running SET progress = coalesce(d->>'progress', progress), began = coalesce((d->>'began')::boolean, began),
                           checkpoint = coalesce(decode(d->>'checkpoint', 'base64'), checkpoint),
                           log = nullif(lines[greatest(1, cardinality(lines) - 99):], '{}')
         WHERE number = (d->>'number')::bigint;
        puts := puts || coalesce(d->'puts', '[]');
    END LOOP;
    IF puts <> '[]' THEN
        PERFORM put_drafts(t, puts, true);
    END IF;
    RETURN lost;
END $$;

-- End leases one by one, because some of them want what a transaction holds that may stay open: those are left as they are.  Gives
-- the numbers, from 1, of the leases that were no longer live, and with a minus those of the ones that were left.
CREATE FUNCTION settle_apart(
    at bigint, at_numbers bigint[], ids text[], fences bigint[], holders text[], outcomes text[], dead_us bigint, cancelled_us bigint
) RETURNS integer[] LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET lock_timeout = '50ms' AS $$
DECLARE
    t terms := (moment(at), dead_us, cancelled_us);
    answer integer[] := '{}';
BEGIN
    FOR n IN 1..cardinality(ids) LOOP
        BEGIN
            IF settle_all(t, at_numbers[n:n], ids[n:n], fences[n:n],
                          CASE WHEN cardinality(holders) = 1 THEN holders ELSE holders[n:n] END, outcomes[n:n], false) <> '{}' THEN
                answer := answer || n;
            END IF;
        EXCEPTION WHEN lock_not_available THEN
            answer := answer || -n;
            PERFORM hurry();
        END;
    END LOOP;
    RETURN answer;
END $$;

-- Settle one lease in a transaction that a job has written in; false if it is lost.
CREATE FUNCTION settle_lent(
    at bigint, of_number bigint, of_id text, of_fence bigint, of_holder text, outcome text, dead_us bigint, cancelled_us bigint
) RETURNS boolean LANGUAGE sql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
    SELECT settle_all((moment(at), dead_us, cancelled_us)::terms, ARRAY[of_number], ARRAY[of_id], ARRAY[of_fence],
                      ARRAY[of_holder], ARRAY[outcome], false) = '{}'
$$;

-- Jobs of which a column holds what no job has, because a foreign hand or a flipped bit has put it there (L7).  Nobody looks for
-- them: only where something has failed over one they are searched for, and go to the shelf.

CREATE FUNCTION is_moment(us bigint) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT us BETWEEN -62135596800000000 AND 253402300799999999  -- the years 1 to 9999
$$;

-- Can one calculate with its numbers?
CREATE FUNCTION is_sound(j job) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(
        is_moment(j.put_us) AND is_moment(j.due_us) AND is_moment(coalesce(j.expires_us, 0)) AND is_moment(coalesce(j.started_us, 0))
        AND j.rank IS NOT NULL AND j.task IS NOT NULL AND j.body IS NOT NULL AND (j.batch IS NULL OR j.member IS NOT NULL)
        AND coalesce(j.fence, 0) BETWEEN 0 AND 9007199254740992 AND j.max_crashes >= 0 AND j.attempts BETWEEN 0 AND 1000000000
        AND j.failures BETWEEN 0 AND 1000000000 AND j.crashes BETWEEN 0 AND 1000000000 AND coalesce(j.losses, 0) BETWEEN 0 AND 1000000000,
        false)
$$;

-- The same job with numbers that can be; what can be read of it stays.
CREATE FUNCTION mended(t terms, j job) RETURNS job LANGUAGE plpgsql AS $$
BEGIN
    j.put_us := CASE WHEN is_moment(j.put_us) THEN j.put_us ELSE t.now_us END;
    j.due_us := CASE WHEN is_moment(j.due_us) THEN j.due_us ELSE t.now_us END;
    j.expires_us := CASE WHEN is_moment(j.expires_us) THEN j.expires_us END;
    j.started_us := CASE WHEN is_moment(j.started_us) THEN j.started_us END;
    j.rank := coalesce(j.rank, 0);
    j.member := coalesce(j.member, 0);
    j.fence := CASE WHEN j.fence BETWEEN 0 AND 9007199254740992 THEN j.fence END;
    j.max_crashes := CASE WHEN j.max_crashes >= 0 THEN j.max_crashes ELSE 1 END;
    j.attempts := CASE WHEN j.attempts BETWEEN 0 AND 1000000000 THEN j.attempts ELSE 0 END;
    j.failures := CASE WHEN j.failures BETWEEN 0 AND 1000000000 THEN j.failures ELSE 0 END;
    j.crashes := CASE WHEN j.crashes BETWEEN 0 AND 1000000000 THEN j.crashes ELSE 0 END;
    j.losses := CASE WHEN j.losses BETWEEN 0 AND 1000000000 THEN j.losses END;
    RETURN j;
END $$;

-- Shelve those of these live jobs that are not sound; gives their ids.
CREATE FUNCTION shelve(t terms, ids text[]) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    shelved text[] := '{}';
    job_id text;
    j job;
BEGIN
    FOREACH job_id IN ARRAY ARRAY(SELECT s.id FROM shown(ids) AS s WHERE s.state IN ('ready', 'parked', 'running') AND NOT is_sound(s)) LOOP
        PERFORM break_out_job(job_id);
        FOREACH j IN ARRAY unplace_all(t, ARRAY[job_id]) || unrun(t, ARRAY(SELECT number FROM running WHERE id = job_id)) LOOP
            PERFORM end_job(t, mended(t, j), 'dead', t.dead_us, 'broken',
                            '{"type":"BrokenRow","message":"its row held a number that no job can have"}');
            shelved := shelved || job_id;
        END LOOP;
    END LOOP;
    RETURN shelved;
END $$;

-- The same after a part of a sweep has failed: it may go on where that has shelved something.
CREATE FUNCTION shelve_for(part text, code text, why text, t terms, ids text[]) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    shelved text[] := '{}';
BEGIN
    IF code LIKE '22%' OR code LIKE '23%' THEN
        shelved := shelve(t, ids);
    END IF;
    IF shelved = '{}' THEN
        PERFORM part_failed(part, why);
    END IF;
    RETURN shelved;
EXCEPTION WHEN OTHERS THEN
    PERFORM part_failed(part, sqlerrm);
    RETURN '{}';
END $$;

-- The same after an exchange has failed: those that it was to settle, and those that it may have met in these queues.
CREATE FUNCTION shelve_unsound(at bigint, of_ids text[], queues text[], dead_us bigint) RETURNS text[]
LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    t terms := (moment(at), dead_us, 0);
    of_queue text;
BEGIN
    FOREACH of_queue IN ARRAY queues LOOP
        of_ids := of_ids
            || ARRAY(SELECT id FROM ready WHERE queue = of_queue ORDER BY rank, pos LIMIT 2 * bite())
            || ARRAY(SELECT id FROM held WHERE queue = of_queue ORDER BY hold_scope, hold_name, rank, pos LIMIT 2 * bite())
            || ARRAY(SELECT id FROM scheduled WHERE queue = of_queue AND due_us <= t.now_us ORDER BY due_us, seq LIMIT bite());
    END LOOP;
    RETURN shelve(t, of_ids);
END $$;

-- The jobs whose leases nobody renewed, oldest first; none of them is a member of a chunk any more.
CREATE FUNCTION lost_ids(t terms, most integer) RETURNS text[] LANGUAGE plpgsql AS $$
BEGIN
    PERFORM break_out_lost(t, most);
    RETURN ARRAY(SELECT id FROM running WHERE until_us <= t.now_us ORDER BY fence, seq LIMIT most);
END $$;
