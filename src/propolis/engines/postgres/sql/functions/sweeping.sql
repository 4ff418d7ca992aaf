-- What has to be done without being asked, and how all that sweep share the work, so that a large fleet asks no more of
-- the server than a small one.

-- Somebody holds what this needs, and others do not wait for that: the next sweep tries again.  Clients log such warnings.
CREATE FUNCTION put_off(what text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM hurry();
    RAISE WARNING USING errcode = 'PP006', message = what || ' was put off: another session holds what it needs';
END $$;

-- A part of a sweep has failed, and the others go on.
CREATE FUNCTION part_failed(part text, why text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    RAISE WARNING USING errcode = 'PP006', message = format('a sweep could not %s: %s', part, why);
END $$;

-- A bite of the waiting jobs that have expired, in the order of puts.
CREATE FUNCTION late(t terms, most integer) RETURNS text[] LANGUAGE sql STABLE AS $$
    SELECT ARRAY(
        SELECT id FROM (
            SELECT id, seq FROM (
                (SELECT id, seq, expires_us FROM ready WHERE expires_us <= t.now_us ORDER BY expires_us LIMIT most) UNION ALL
                (SELECT id, seq, expires_us FROM scheduled WHERE expires_us <= t.now_us ORDER BY expires_us LIMIT most) UNION ALL
                (SELECT id, seq, expires_us FROM held WHERE expires_us <= t.now_us ORDER BY expires_us LIMIT most)) AS each
             ORDER BY expires_us LIMIT most) AS bite
         ORDER BY seq)
$$;

-- End these, which have expired (T11); gives the ids.  Where somebody holds what one of them needs, one by one.
CREATE FUNCTION expire_these(t terms, ids text[]) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    jobs job[];
    expired text[] := '{}';
BEGIN
    BEGIN
        jobs := unplace_all(t, ids);
        PERFORM end_all(t, jobs, 'dead', t.dead_us, 'expired');
        RETURN ARRAY(SELECT id FROM unnest(jobs));
    EXCEPTION WHEN lock_not_available THEN
        PERFORM hurry();
    END;
    FOR n IN 1..cardinality(ids) LOOP
        BEGIN
            jobs := unplace_all(t, ids[n:n]);
            PERFORM end_all(t, jobs, 'dead', t.dead_us, 'expired');
            expired := expired || ARRAY(SELECT id FROM unnest(jobs));
        EXCEPTION WHEN lock_not_available THEN
            PERFORM put_off('the end of job ' || ids[n]);
        END;
    END LOOP;
    RETURN expired;
END $$;

-- One lost lease, of a job that is in no table any more (T8).  Gives the job, and whether it is yet to be placed at the front, or
-- has ended.
CREATE FUNCTION reap_one(t terms, INOUT j job, OUT front boolean, OUT ended boolean) LANGUAGE plpgsql AS $$
DECLARE
    one record;
BEGIN
    IF j.began OR (coalesce(j.losses, 0) = 0 AND j.crashes = 0) THEN
        one := lose(t, j);
        j := one.j;
        front := one.front;
        ended := j.cancel IS TRUE OR j.losses >= 10;
        RETURN;
    END IF;
    ended := j.cancel IS TRUE;
    front := NOT ended;
    IF ended THEN
        PERFORM end_job(t, j, 'cancelled', t.cancelled_us, 'cancelled');
        RETURN;
    END IF;
    -- It is a suspect, which says when it begins: its worker died of something else.
    j.history := with_event(j, t.now_us, 'lost', 'it had not begun');
    j.attempts := j.attempts - 1;
    j.error := NULL;
    j.due_us := t.now_us;
END $$;

-- Take running jobs out of their table.
CREATE FUNCTION unrun(t terms, numbers bigint[]) RETURNS job[] LANGUAGE plpgsql AS $$
DECLARE
    jobs job[];
BEGIN
    WITH gone AS (
        DELETE FROM running WHERE number = ANY (numbers)
        RETURNING (WAITING_COLUMNS, RUN_COLUMNS, NULL, NULL, NULL, NULL, NULL)::job AS j)
    SELECT coalesce(array_agg(gone.j ORDER BY (gone.j).fence, (gone.j).seq), '{}') INTO jobs FROM gone;
    PERFORM open_keys(t, array_agg(queue), array_agg(limit_key)) FROM unnest(jobs) WHERE limit_key IS NOT NULL;
    RETURN jobs;
END $$;

-- Reap the leases that nobody renewed (T8), oldest first; gives how many, and the ids of the jobs that it ended.
CREATE FUNCTION reap(t terms, most integer, OUT n integer, OUT ended_ids text[]) LANGUAGE plpgsql AS $$
DECLARE
    numbers bigint[];
    ending bigint;
    job_id text;
    j job;
    one record;
    released job[] := '{}';
BEGIN
    n := 0;
    ended_ids := '{}';
    IF NOT EXISTS (SELECT FROM running WHERE until_us <= t.now_us)
       AND NOT EXISTS (SELECT FROM chunk WHERE until_us <= t.now_us) THEN
        RETURN;
    END IF;
    -- One sweeper at a time: two that share the lost leases out would send them to the front in any order.
    PERFORM FROM migration WHERE number = 1 FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    PERFORM break_out_lost(t, most);
    numbers := ARRAY(SELECT number FROM running WHERE until_us <= t.now_us ORDER BY fence, seq LIMIT most FOR UPDATE SKIP LOCKED);
    -- Those that may end, one by one: somebody may hold what their ends need.
    FOR ending, job_id IN
        SELECT number, id FROM running
         WHERE number = ANY (numbers) AND (cancel OR losses >= 9) ORDER BY fence, seq
    LOOP
        numbers := array_remove(numbers, ending);
        BEGIN
            FOREACH j IN ARRAY unrun(t, ARRAY[ending]) LOOP
                one := reap_one(t, j);
                n := n + 1;
                IF one.ended THEN
                    ended_ids := ended_ids || job_id;
                ELSIF one.front THEN
                    released := released || one.j;
                END IF;
            END LOOP;
        EXCEPTION WHEN lock_not_available THEN
            PERFORM put_off('the end of job ' || job_id);
        END;
    END LOOP;
    FOREACH j IN ARRAY unrun(t, numbers) LOOP
        one := reap_one(t, j);
        n := n + 1;
        IF one.front THEN
            released := released || one.j;
        END IF;
    END LOOP;
    PERFORM to_front(released);
    PERFORM wake(queue) FROM (SELECT DISTINCT queue FROM unnest(released)) AS them;
END $$;

-- What there is to do for a sweep, in one look: mostly nothing, and what it need not call it need not plan.  (Whatever the
-- statistics say, what is due is found by its time.)
CREATE FUNCTION to_sweep(
    t terms, dead_max bigint, OUT due boolean, OUT ending boolean, OUT counts boolean, OUT removing boolean, OUT old_jobs boolean,
    OUT old_records boolean, OUT old_names boolean, OUT unannounced boolean, OUT rules_over boolean, OUT full_buckets boolean,
    OUT old_openings boolean
) LANGUAGE plpgsql STABLE AS $$
BEGIN
    SELECT coalesce((SELECT true FROM scheduled WHERE due_us <= t.now_us ORDER BY due_us LIMIT 1), false),
           EXISTS (SELECT FROM running WHERE until_us <= t.now_us) OR EXISTS (SELECT FROM chunk WHERE until_us <= t.now_us)
               OR EXISTS (SELECT FROM ready WHERE expires_us <= t.now_us) OR EXISTS (SELECT FROM held WHERE expires_us <= t.now_us)
               OR EXISTS (SELECT FROM scheduled WHERE expires_us <= t.now_us),
           EXISTS (SELECT FROM tally), EXISTS (SELECT FROM removal),
           EXISTS (SELECT FROM archive WHERE keep_us <= t.now_us) OR EXISTS (SELECT FROM total WHERE dead > dead_max AND dead > 0),
           EXISTS (SELECT FROM swap_answer WHERE until_us <= t.now_us)
               OR EXISTS (SELECT FROM records WHERE expires_hour <= t.now_us / 3600000000 AND expires_us <= t.now_us)
               OR EXISTS (SELECT FROM feed_follower WHERE until_us <= t.now_us)
               OR EXISTS (SELECT FROM feed WHERE expires_hour <= t.now_us / 3600000000 AND expires_us <= t.now_us),
           EXISTS (SELECT FROM known WHERE until_us <= t.now_us) OR EXISTS (SELECT FROM token WHERE until_us <= t.now_us),
           EXISTS (SELECT FROM unannounced), EXISTS (SELECT FROM rule WHERE until_us <= t.now_us),
           EXISTS (SELECT FROM bucket WHERE full_minute < t.now_us / 60000000),
           EXISTS (SELECT FROM opening WHERE at_us < t.now_us - 60000000)
      INTO due, ending, counts, removing, old_jobs, old_records, old_names, unannounced, rules_over, full_buckets,
           old_openings;
    counts := counts OR ending;
    old_jobs := old_jobs OR (counts AND dead_max IS NOT NULL);  -- there may be too many dead ones once they are added up
END $$;

-- Do what time asks for; each kind of work at most `most` times.  Its parts do not undo one another: what one of them cannot do is
-- said, and the next sweep tries again.
CREATE FUNCTION sweep(at bigint, most integer, dead_us bigint, cancelled_us bigint, dead_max bigint)
RETURNS TABLE (promoted integer, reaped integer, expired integer, removed integer, now_us bigint, next_us bigint,
               records_due text[], ended_ids text[], parked text[])
LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    t terms := (moment(at), dead_us, cancelled_us);
    todo record;
    ids text[];
    b text;
BEGIN
    promoted := 0;
    reaped := 0;
    ended_ids := '{}';
    expired := 0;
    removed := 0;
    todo := to_sweep(t, dead_max);
    IF todo.due THEN
        FOR round IN 1..2 LOOP  -- after the first, what cannot be promoted is on the shelf
            BEGIN
                promoted := promote(t, NULL, most, 0);
                EXIT;
            EXCEPTION WHEN OTHERS THEN
                ids := shelve_for('promote jobs', sqlstate, sqlerrm, t, ARRAY(
                    SELECT id FROM scheduled WHERE due_us <= t.now_us ORDER BY due_us, seq LIMIT most));
            END;
            ended_ids := ended_ids || ids;
            EXIT WHEN ids = '{}';
        END LOOP;
    END IF;
    IF todo.ending THEN
        BEGIN
            PERFORM lock_ending(t, late(t, most));
        EXCEPTION WHEN OTHERS THEN
            PERFORM part_failed('lock batches', sqlerrm);
        END;
        FOR round IN 1..2 LOOP
            BEGIN
                SELECT r.n, r.ended_ids INTO reaped, ids FROM reap(t, most) AS r;
                ended_ids := ended_ids || ids;
                EXIT;
            EXCEPTION WHEN OTHERS THEN
                ids := shelve_for('reap leases', sqlstate, sqlerrm, t, lost_ids(t, most));
            END;
            ended_ids := ended_ids || ids;
            EXIT WHEN ids = '{}';
        END LOOP;
        FOR round IN 1..2 LOOP
            BEGIN
                ids := expire_these(t, late(t, most));  -- with those that were reaped
                expired := cardinality(ids);
                ended_ids := ended_ids || ids;
                EXIT;
            EXCEPTION WHEN OTHERS THEN
                ids := shelve_for('end jobs that have expired', sqlstate, sqlerrm, t, late(t, most));
            END;
            ended_ids := ended_ids || ids;
            EXIT WHEN ids = '{}';
        END LOOP;
    END IF;
    IF todo.counts THEN
        BEGIN
            PERFORM add_up();
        EXCEPTION WHEN OTHERS THEN
            PERFORM part_failed('add up', sqlerrm);
        END;
    END IF;
    IF todo.removing THEN
        BEGIN
            removed := remove_more(t, most);
        EXCEPTION WHEN OTHERS THEN
            PERFORM part_failed('remove queues and batches', sqlerrm);
        END;
    END IF;
    IF todo.old_jobs THEN
        BEGIN
            removed := removed + forget_jobs(t, most, dead_max);
        EXCEPTION WHEN OTHERS THEN
            PERFORM part_failed('forget jobs', sqlerrm);
        END;
    END IF;
    IF todo.old_records THEN
        BEGIN
            removed := removed + forget_records(t, most) + forget_feeds(t, most);
        EXCEPTION WHEN OTHERS THEN
            PERFORM part_failed('forget records and feeds', sqlerrm);
        END;
    END IF;
    IF todo.old_names THEN
        BEGIN
            PERFORM forget_names(t, most);
        EXCEPTION WHEN OTHERS THEN
            PERFORM part_failed('forget ids and tokens', sqlerrm);
        END;
    END IF;
    FOR b IN
        SELECT id FROM batch WHERE keep_us <= t.now_us OR (NOT sealed AND open_us <= t.now_us)
         LIMIT most FOR UPDATE SKIP LOCKED
    LOOP
        BEGIN
            PERFORM remove_batch(t, b);
        EXCEPTION WHEN OTHERS THEN
            PERFORM part_failed('remove batch ' || b, sqlerrm);
        END;
    END LOOP;
    IF random() < 0.01 THEN  -- about once in a minute, whatever the size of the fleet
        BEGIN
            PERFORM finish_overlooked(t);
        EXCEPTION WHEN OTHERS THEN
            PERFORM part_failed('finish batches', sqlerrm);
        END;
    END IF;
    IF todo.rules_over THEN
        BEGIN
            PERFORM remove_rules_over(t, most);
        EXCEPTION WHEN OTHERS THEN
            PERFORM part_failed('remove rules', sqlerrm);
        END;
    END IF;
    IF todo.full_buckets THEN
        BEGIN
            PERFORM forget_buckets(t, most);
        EXCEPTION WHEN OTHERS THEN
            PERFORM part_failed('forget buckets', sqlerrm);
        END;
    END IF;
    IF todo.old_openings THEN
        BEGIN
            PERFORM forget_all_openings(t, most);
        EXCEPTION WHEN OTHERS THEN
            PERFORM part_failed('forget openings', sqlerrm);
        END;
    END IF;
    IF todo.unannounced THEN
        BEGIN
            PERFORM announce();
        EXCEPTION WHEN OTHERS THEN
            PERFORM part_failed('announce', sqlerrm);
        END;
    END IF;
    now_us := t.now_us;
    next_us := least(
        (SELECT min(s.due_us) FROM scheduled s WHERE s.due_us > t.now_us),
        (SELECT min(r.until_us) FROM running r WHERE r.until_us > t.now_us),
        (SELECT min(c.until_us) FROM chunk c WHERE c.until_us > t.now_us),
        (SELECT min(u.until_us) FROM rule u WHERE u.until_us > t.now_us),
        next_token_of_all(t),
        (SELECT min(r.at_us) FROM records r WHERE r.at_us > t.now_us));
    records_due := kinds_due(t.now_us);
    parked := parked_lines(100);
    RETURN NEXT;
END $$;

-- Queues and tasks, in turn, of jobs that wait for somebody who knows their task.
CREATE FUNCTION parked_lines(most integer) RETURNS text[] LANGUAGE plpgsql STABLE SET enable_seqscan = off SET jit = off AS $$
DECLARE
    lines text[] := '{}';
    of_queue text := '';
    of_task text := '';
BEGIN
    FOR n IN 1..most LOOP
        SELECT queue, hold_name INTO of_queue, of_task FROM held
         WHERE hold_scope = 'parked' AND (queue, hold_name) > (of_queue, of_task) ORDER BY queue, hold_name LIMIT 1;
        EXIT WHEN NOT FOUND;
        lines := lines || of_queue || of_task;
    END LOOP;
    RETURN lines;
END $$;

CREATE FUNCTION forget_names(t terms, most integer) RETURNS void LANGUAGE sql AS $$
    DELETE FROM known WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM known WHERE until_us <= t.now_us LIMIT most FOR UPDATE SKIP LOCKED));
    DELETE FROM token WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM token WHERE until_us <= t.now_us LIMIT most FOR UPDATE SKIP LOCKED))
$$;

-- Lock the batches of jobs that a sweep may end: lost ones, and these, which have expired.
CREATE FUNCTION lock_ending(t terms, ids text[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    names text[] := ARRAY(
        SELECT batch FROM running
         WHERE until_us <= t.now_us AND batch IS NOT NULL AND (cancel OR losses >= 9 OR expires_us <= t.now_us)
        UNION
        SELECT batch FROM waiting() WHERE id = ANY (ids) AND batch IS NOT NULL);
BEGIN
    IF cardinality(names) > 1 THEN
        PERFORM FROM migration WHERE number = 1 FOR UPDATE SKIP LOCKED;  -- which reap() takes as well
        IF FOUND THEN
            PERFORM lock_batches(names);
        END IF;
    END IF;
END $$;

-- Forget what is past its keeping, and the oldest of shelves that hold more dead jobs than they may.
CREATE FUNCTION forget_jobs(t terms, most integer, dead_max bigint) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    old text[] := ARRAY(SELECT id FROM archive WHERE keep_us <= t.now_us ORDER BY keep_us LIMIT most);
    s record;
BEGIN
    IF dead_max IS NOT NULL THEN
        FOR s IN SELECT queue, dead - dead_max AS over FROM total WHERE dead > dead_max AND dead > 0 LIMIT bite() LOOP
            EXIT WHEN cardinality(old) >= most;
            old := old || ARRAY(SELECT id FROM archive WHERE queue = s.queue AND state = 'dead'  -- by archive_shelf
                                 ORDER BY ended_us, seq LIMIT least(most, s.over));
        END LOOP;
    END IF;
    RETURN CASE WHEN old = '{}' THEN 0 ELSE cardinality(forget(old)) END;
END $$;

-- Add a bite of the tally up: where there is nothing in it, nothing is written.  Whoever else is at it is left alone.
CREATE FUNCTION add_up() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM tally) THEN
        RETURN;
    END IF;
    PERFORM FROM installation FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    WITH gone AS (
        DELETE FROM tally WHERE ctid = ANY (ARRAY(SELECT ctid FROM tally LIMIT 10000 FOR UPDATE SKIP LOCKED))
        RETURNING queue, put, deleted, kept, dead)
    INSERT INTO total AS t (queue, put, deleted, kept, dead)
    SELECT queue, big_count_of(sum(put)), big_count_of(sum(deleted)), big_count_of(sum(kept)), big_count_of(sum(dead))
      FROM gone GROUP BY queue ORDER BY queue
    ON CONFLICT (queue) DO UPDATE SET
        put = big_count_of(t.put::numeric + excluded.put), deleted = big_count_of(t.deleted::numeric + excluded.deleted),
        kept = big_count_of(t.kept::numeric + excluded.kept), dead = big_count_of(t.dead::numeric + excluded.dead);
END $$;

-- Make one row of those that a queue has in a bite of the tally.
CREATE FUNCTION gather() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    WITH gone AS (
        DELETE FROM tally WHERE ctid = ANY (ARRAY(SELECT ctid FROM tally LIMIT 10000 FOR UPDATE SKIP LOCKED))
        RETURNING queue, put, deleted, kept, dead)
    INSERT INTO tally (queue, put, deleted, kept, dead)
    SELECT queue, big_count_of(sum(put)), big_count_of(sum(deleted)), big_count_of(sum(kept)), big_count_of(sum(dead))
      FROM gone GROUP BY queue;
END $$;

-- The same as add_up(), about once for a thousand jobs that are put, so that there are no more rows than that where nobody sweeps: in the call
-- that has drawn a place which can be divided by 1,024, or may have, for `n` jobs; some draw two places, and a batch one.  It comes
-- last, waits for nobody, and fails alone.  In the transaction of a caller's, which may stay open, it would hold the totals, which
-- sweeps want: there it only makes one row of those that it finds, which others pass by as long as it is open.
CREATE FUNCTION add_up_in_turn(n integer, place bigint DEFAULT currval('back')) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF n = 0 OR place % 1024 > 2 * n OR in_callers_transaction() AND NOT always_looks_anew() THEN
        RETURN;
    END IF;
    BEGIN
        IF in_callers_transaction() THEN
            PERFORM gather();
        ELSE
            PERFORM hurry();
            PERFORM add_up();
        END IF;
    EXCEPTION WHEN OTHERS THEN
        PERFORM part_failed('add up', sqlerrm);
    END;
END $$;

-- Notify those who wait for them; part of a sweep.
CREATE FUNCTION announce() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    q text;
BEGIN
    FOR q IN
        WITH taken AS (
            DELETE FROM unannounced WHERE ctid = ANY (ARRAY(
                SELECT ctid FROM unannounced LIMIT 10000 FOR UPDATE SKIP LOCKED))
            RETURNING queue)
        SELECT DISTINCT queue FROM taken
    LOOP
        PERFORM wake(q);
    END LOOP;
END $$;

-- The nth free moment from this one on, at a distance from all others; NULL if that is later than `within` after it.
CREATE FUNCTION free_moment(who text, from_us bigint, apart bigint, within bigint, nth bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    before bigint := from_us - apart;
    later bigint;
    n bigint;
BEGIN
    FOR later IN SELECT s.back_us FROM sweeper s WHERE s.name <> who AND s.back_us >= before ORDER BY s.back_us LOOP
        n := greatest(0, (later - before) / apart - 1);
        EXIT WHEN n >= nth;
        nth := nth - n;
        before := later;
    END LOOP;
    before := before + nth * apart;
    RETURN CASE WHEN before <= from_us + within THEN before END;
END $$;

-- When `who`, which has just swept, should come back: after a second where it is alone, and in a fleet when the others have
-- been, so that there are ten sweeps in six seconds together, evenly; in one of the next free moments by chance, so that
-- those of one machine, which may die together, do not stay together.  Whoever is new, and could not yet have seen that
-- nobody else comes, or sees that somebody has not come, does not rely on the others, who may all be gone, and comes
-- between them.  The last to come before something is to be done (next_us, or NULL) comes back for that; if it does not, the
-- next one finds it.  Whoever has left something undone comes back at once.  What time was seen is kept with the name.
CREATE FUNCTION come_back(now_us bigint, seen bigint, who text, next_us bigint, undone boolean) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    each bigint := 600000;
    new bigint := 5 * each;  -- within that somebody has to come, or is late
    soon bigint := 10000000;
    late bigint := 30000000;
    longest bigint := 120000000;
    others bigint;
    soonest bigint;
    back bigint;
BEGIN
    SELECT count(*), min(s.back_us) FILTER (WHERE s.back_us > now_us) INTO others, soonest
      FROM sweeper s WHERE s.name <> who;
    back := coalesce(free_moment(who, now_us + 1000000, each, longest, 1 + (random() * others / 4)::bigint),
                     now_us + longest * (0.8 + 0.4 * random()));
    IF NOT EXISTS (SELECT FROM sweeper s WHERE s.name = who AND s.since_us <= now_us - new)
       OR EXISTS (SELECT FROM sweeper s WHERE s.name <> who AND s.back_us < now_us - 500000) THEN
        back := least(back, free_moment(who, now_us + 1000000, each / 2, soon, 1));
    END IF;
    IF undone THEN
        back := now_us + 10000;
    ELSIF next_us < back AND (soonest IS NULL OR next_us <= soonest) THEN
        back := next_us;
    END IF;
    -- (While a step is put off, nobody can say whether what is new was counted before it.)
    INSERT INTO sweeper AS s (name, back_us, since_us, seen_us, seen_pos)
    VALUES (who, back, now_us, seen, CASE WHEN seen > now_us + 1000000 THEN 0 ELSE coalesce(pg_sequence_last_value('back'), 0) END)
    ON CONFLICT (name) DO UPDATE SET back_us = excluded.back_us, seen_us = excluded.seen_us,
                                     seen_pos = greatest(s.seen_pos, excluded.seen_pos);
    DELETE FROM sweeper s WHERE s.back_us < now_us - late OR s.back_us > now_us + 2 * longest;
    RETURN back;
END $$;

-- What is seen of the clock by a sweep that has locked the watch.  Where it has gone back by more than a second since somebody
-- swept, leases and delays that were counted before are to follow; where the lease that ends last was given later than now, leases
-- are.  A second step is put off until all delays have followed the first: its time is kept.  Gives the largest time that is to be
-- remembered.
CREATE FUNCTION look_at_clock(at bigint) RETURNS bigint LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    w record;
    seen bigint;
    -- A span that is lacking shows nothing, and one below 0 no more than 0 does.
    given bigint := greatest(
        (SELECT CASE WHEN span_us IS NOT NULL THEN until_us - greatest(span_us, 0) END
           FROM running WHERE until_us > 0 ORDER BY until_us DESC LIMIT 1),
        (SELECT until_us - greatest(span_us, 0) FROM chunk WHERE until_us > 0 ORDER BY until_us DESC LIMIT 1));
    now_us bigint;
BEGIN
    SELECT max(seen_us) INTO seen FROM sweeper;
    SELECT shift_us, shortened_us INTO w FROM watch;
    now_us := moment(at);  -- after all of this has happened
    IF seen > now_us + 1000000 AND w.shift_us IS NULL THEN
        UPDATE watch SET shift_us = seen - now_us, stepped_us = now_us, shifted_due = now_us, shifted_seq = 0, shortened_us = now_us,
               stepped_pos = (SELECT max(seen_pos) FROM sweeper);
        UPDATE sweeper SET seen_us = now_us WHERE seen_us > now_us;
        PERFORM open_ruled((now_us, NULL, NULL), 'limit', 'key', '*');
        RETURN now_us;
    END IF;
    IF greatest(seen, given) > now_us + 1000000 AND w.shortened_us IS NULL THEN
        UPDATE watch SET shortened_us = now_us;
    END IF;
    RETURN greatest(seen, now_us);
END $$;

-- A bite of the leases that end later than their spans from now, as the clock went back since they were given: they end one span
-- from now (L2).  Whatever ends with the last of a bite belongs to it.  Those that somebody is at are being renewed or settled.
CREATE FUNCTION shorten_leases(at bigint, most integer) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    since bigint := (SELECT shortened_us FROM watch);
    upto bigint;
    n integer;
BEGIN
    IF since IS NULL THEN
        RETURN;
    END IF;
    SELECT max(until_us), count(*) INTO upto, n
      FROM (SELECT until_us FROM (
                (SELECT until_us FROM running WHERE until_us > since ORDER BY until_us LIMIT most) UNION ALL
                (SELECT until_us FROM chunk WHERE until_us > since ORDER BY until_us LIMIT most)) AS each
             ORDER BY until_us LIMIT most) AS bite;
    UPDATE running SET until_us = moment(at) + span_us
     WHERE ctid = ANY (ARRAY(SELECT ctid FROM running WHERE until_us > since AND until_us <= upto FOR UPDATE SKIP LOCKED))
       AND until_us - moment(at) > span_us;  -- no sum: a span may be damaged, and too large for one
    UPDATE chunk SET until_us = moment(at) + span_us
     WHERE ctid = ANY (ARRAY(SELECT ctid FROM chunk WHERE until_us > since AND until_us <= upto FOR UPDATE SKIP LOCKED))
       AND until_us - moment(at) > span_us;  -- no sum: a span may be damaged, and too large for one
    UPDATE watch SET shortened_us = CASE WHEN n = most THEN upto END;
END $$;

-- Whether whoever put this job named a moment, and not a delay.  What cannot be read keeps the time that it has.
CREATE FUNCTION names_its_time(body bytea) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    RETURN convert_from(body, 'UTF8')::jsonb ? 'due_at';
EXCEPTION WHEN data_exception OR untranslatable_character THEN
    RETURN true;
END $$;

-- A bite of the delays that were counted before the clock went back: they end as much earlier.
--
-- A delay was counted when the job was put, or at its last event: behind a place that the last sweep before the step has seen, in the
-- future, or longer ago than the step, which was seen within a minute, unless nobody swept.  Each that is shifted gets an event, so that it is passed by afterwards; it goes to
-- before the place from which the next bite goes on.
CREATE FUNCTION shift_delays(at_us bigint, seen bigint, most integer) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    w record;
    r record;
    now_us bigint;
    n integer := 0;
BEGIN
    SELECT shift_us, stepped_us, coalesce(stepped_pos, 0) AS stepped_pos, shifted_due, shifted_seq INTO w FROM watch;
    IF w.shift_us IS NULL THEN
        RETURN;
    END IF;
    now_us := greatest(at_us, seen);  -- where it has gone back again since, the next step shifts these once more
    FOR r IN SELECT id, due_us, seq, pos, fence, attempts, body, history,
                    CASE WHEN history->-1->>0 ~ '^[0-9]{1,18}$' THEN (history->-1->>0)::bigint ELSE put_us END AS counted_us,
                    coalesce(history->-1->>1 = 'rescheduled', false) AS rescheduled
               FROM scheduled WHERE (due_us, seq) > (w.shifted_due, w.shifted_seq)
              ORDER BY due_us, seq LIMIT most FOR UPDATE SKIP LOCKED
    LOOP
        n := n + 1;
        w.shifted_due := r.due_us;
        w.shifted_seq := r.seq;
        CONTINUE WHEN r.pos > w.stepped_pos AND r.counted_us BETWEEN w.stepped_us - 60000000 AND now_us OR r.rescheduled;
        CONTINUE WHEN r.fence IS NULL AND names_its_time(r.body);
        UPDATE scheduled SET due_us = greatest(now_us, r.due_us - w.shift_us),
               history = CASE WHEN jsonb_typeof(r.history) <> 'array' THEN '[]'
                              WHEN jsonb_array_length(r.history) >= 100 THEN r.history - 0 ELSE coalesce(r.history, '[]') END
                   || jsonb_build_array(jsonb_build_array(now_us, 'clock', r.attempts, coalesce(r.fence, 0), '',
                                                          format('went back by %s s', w.shift_us / 1000000)))
         WHERE id = r.id;
    END LOOP;
    UPDATE watch SET shift_us = CASE WHEN n = most THEN w.shift_us END, shifted_due = w.shifted_due, shifted_seq = w.shifted_seq;
END $$;

-- Whether it is time to search for old transactions: only one of all that ask in a minute gets a yes.
CREATE FUNCTION time_to_check(now_us bigint) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    UPDATE watch SET looked_us = now_us WHERE abs(now_us - looked_us) >= 60000000;
    RETURN FOUND;
END $$;

-- Sweep, and answer when to come back, whether to search for old transactions and whether nothing waits; `who` is NULL for those who will not come back.
CREATE FUNCTION sweep_by(
    at bigint, most integer, dead_us bigint, cancelled_us bigint, dead_max bigint, who text,
    OUT promoted integer, OUT reaped integer, OUT expired integer, OUT removed integer, OUT now_us bigint,
    OUT next_us bigint, OUT again_us bigint, OUT check_old boolean, OUT records_due text[],
    OUT ended_ids text[], OUT parked text[], OUT nothing_ready boolean
) LANGUAGE plpgsql SET search_path FROM CURRENT SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    seen bigint;
BEGIN
    SELECT s.promoted, s.reaped, s.expired, s.removed, s.now_us, s.next_us, s.records_due, s.ended_ids,
           s.parked
      INTO promoted, reaped, expired, removed, now_us, next_us, records_due, ended_ids, parked
      FROM sweep(at, most, dead_us, cancelled_us, dead_max) AS s;
    check_old := false;
    nothing_ready := false;
    IF who IS NULL THEN
        RETURN;
    END IF;
    BEGIN
        PERFORM FROM watch FOR UPDATE;  -- the last lock of a sweep, so that no two take the same moment
        seen := look_at_clock(at);
        PERFORM shorten_leases(at, most);
        PERFORM shift_delays(now_us, seen, most);
        again_us := come_back(
            now_us, seen, who, next_us,
            greatest(promoted, reaped, expired, removed) >= most OR EXISTS (SELECT FROM removal)
                OR EXISTS (SELECT FROM rule u WHERE u.until_us <= sweep_by.now_us)
                OR EXISTS (SELECT FROM batch b WHERE b.keep_us <= sweep_by.now_us)
                OR EXISTS (SELECT FROM token k WHERE k.until_us <= sweep_by.now_us)
                OR EXISTS (SELECT FROM known k WHERE k.until_us <= sweep_by.now_us));
        check_old := time_to_check(now_us);
        IF seen > moment(at) + 1000000 OR (SELECT shift_us IS NOT NULL OR shortened_us IS NOT NULL FROM watch) THEN
            again_us := least(again_us, now_us + 10000);
        END IF;
        nothing_ready := NOT EXISTS (SELECT FROM ready) AND NOT EXISTS (SELECT FROM held WHERE hold_scope <> 'parked');
    EXCEPTION WHEN OTHERS THEN
        IF sqlstate <> '55P03' THEN  -- lock_not_available: others sweep
            PERFORM part_failed('follow the clock', sqlerrm);
        END IF;
        again_us := now_us + 1000000 * (0.5 + random());
    END;
END $$;
