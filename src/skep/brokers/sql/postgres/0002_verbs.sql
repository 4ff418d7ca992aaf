-- The verbs of the PostgreSQL engine: each is one statement for the client, hence one round trip and one commit.
--
-- Those that clients call come last, and carry their search_path with them; the others are parts of theirs.
-- The hot ones never scan a table: its statistics may be those of a moment when it was empty, or full.  Before 18 a
-- scan that is forbidden and made all the same counts as so dear that it would be compiled each time, hence no jit.
-- They are in PL/pgSQL, because before 18 functions in SQL that are not inlined are planned anew at every call.
-- The time is an argument, so that tests can move it: NULL means the server's own clock.
--
-- Whoever locks several rows does so in one order, so that nobody waits for a deadlock to be found, which takes a second:
-- chunks and then running jobs by their fences, batches as lock_batches() does, then ids and keys in theirs.

-- What all steps of one call have in common.
CREATE TYPE terms AS (
    now_us       bigint,
    dead_us      bigint,  -- how long dead jobs are kept if nobody says so
    cancelled_us bigint
);

CREATE FUNCTION moment(at bigint) RETURNS bigint LANGUAGE sql VOLATILE AS $$
    SELECT coalesce(at, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
$$;

-- Wake those who wait for this queue, or for any if it is ''.  For rare events only, because commits with
-- a notification wait for one another; what clients know to be news they tell themselves.
CREATE FUNCTION wake(queue text) RETURNS void LANGUAGE sql VOLATILE AS $$
    SELECT pg_notify('skep:' || current_schema(), queue)
$$;

-- The history of a job with one more event; the newest hundred are kept.
CREATE FUNCTION told(j job, now_us bigint, kind text, note text DEFAULT '') RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    events jsonb := coalesce(j.history, '[]') || jsonb_build_array(
        jsonb_build_array(now_us, kind, j.attempts, coalesce(j.fence, 0), coalesce(j.holder, ''), note));
BEGIN
    RETURN CASE WHEN jsonb_array_length(events) > 100 THEN events - 0 ELSE events END;
END $$;

-- --- places ---------------------------------------------------------------------------------

-- Put a job where it waits: in line, or among the scheduled.
CREATE FUNCTION place(t terms, j job) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    j.until_us := NULL;
    j.holder := NULL;
    j.cancel := NULL;
    j.hold_scope := NULL;
    j.hold_name := NULL;
    IF j.due_us > t.now_us THEN
        INSERT INTO scheduled VALUES (j.*);
    ELSE
        INSERT INTO ready VALUES (j.*);
    END IF;
END $$;

-- Take a waiting job out of wherever it waits; a row of NULLs if it does not.
CREATE FUNCTION unplace(job_id text) RETURNS job LANGUAGE plpgsql AS $$
DECLARE
    j job;
BEGIN
    DELETE FROM ready WHERE id = job_id RETURNING * INTO j;
    IF NOT FOUND THEN
        DELETE FROM scheduled WHERE id = job_id RETURNING * INTO j;
        IF NOT FOUND THEN
            DELETE FROM held WHERE id = job_id RETURNING * INTO j;
        END IF;
    END IF;
    RETURN j;
END $$;

-- Those whose time has come join the back of their line, in the order of their times.
CREATE FUNCTION promote(t terms, of_queue text, most integer) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    j job;
    n integer := 0;
BEGIN
    FOR j IN
        WITH due AS (
            DELETE FROM scheduled WHERE ctid = ANY (ARRAY(
                SELECT ctid FROM scheduled WHERE queue = of_queue AND due_us <= t.now_us
                 ORDER BY due_us, seq LIMIT most FOR UPDATE SKIP LOCKED))
            RETURNING *)
        SELECT * FROM due ORDER BY due_us, seq
    LOOP
        j.pos := nextval('back');
        INSERT INTO ready VALUES (j.*);
        n := n + 1;
    END LOOP;
    RETURN n;
END $$;

-- --- chunks ---------------------------------------------------------------------------------

-- The number of the member with this id; NULL if there is none, or it is gone.
CREATE FUNCTION member(c chunk, job_id text) RETURNS integer LANGUAGE sql STABLE AS $$
    SELECT n FROM array_position(c.ids, job_id) AS n WHERE c.gone IS NULL OR get_bit(c.gone, n - 1) = 0
$$;

CREATE FUNCTION bits_of(numbers integer[]) RETURNS bit(1023) LANGUAGE sql IMMUTABLE AS $$
    SELECT bit_or(set_bit(0::bit(1023), n - 1, 1)) FROM unnest(numbers) AS n
$$;

-- Take these members, all of which are there, out of a chunk that the caller has locked.
CREATE FUNCTION leave_chunk(of_number bigint, numbers integer[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM chunk WHERE number = of_number AND members = cardinality(numbers);
    IF NOT FOUND THEN
        UPDATE chunk SET members = members - cardinality(numbers), gone = coalesce(gone, 0::bit(1023)) | bits_of(numbers)
         WHERE number = of_number;
    END IF;
END $$;

-- Make members of a chunk that the caller has locked, these or all, rows in `running`; gives how many there are.
CREATE FUNCTION break_out(of_number bigint, numbers integer[] DEFAULT NULL) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    bits bit(1023) := bits_of(numbers);
    moved integer[];
BEGIN
    WITH rows AS (
        INSERT INTO running
        SELECT m.* FROM chunk, members_of(chunk) AS m
         WHERE number = of_number AND (numbers IS NULL OR get_bit(bits, (m.fence - number)::integer - 1) = 1)
        RETURNING fence)
    SELECT array_agg((fence - of_number)::integer) INTO moved FROM rows;
    IF moved IS NULL THEN
        RETURN 0;
    END IF;
    PERFORM leave_chunk(of_number, moved);
    RETURN cardinality(moved);
END $$;

-- The leases that may be members, by their chunks, each in the order of its members; one that is given twice counts once,
-- where it comes first.
CREATE FUNCTION by_chunk(fences bigint[], ids text[], outcomes text[])
RETURNS TABLE (number bigint, numbers integer[], ids text[], outcomes text[], places integer[], last_place integer, plain boolean)
LANGUAGE sql STABLE AS $$  -- it is inlined
    SELECT l.fence & -1024, array_agg((l.fence & 1023)::integer), array_agg(l.id), array_agg(l.outcome),
           array_agg(l.place::integer), max(l.place)::integer, bool_and(l.outcome IS NULL)
      FROM (SELECT DISTINCT ON (l.fence, l.id) *
              FROM unnest(fences, ids, outcomes) WITH ORDINALITY AS l (fence, id, outcome, place)
             WHERE l.fence & 1023 > 0 ORDER BY l.fence, l.id, l.place) AS l
     GROUP BY 1 ORDER BY 1
$$;

-- Break the jobs of these leases out, as far as they are members of chunks.
CREATE FUNCTION break_out_leases(fences bigint[], ids text[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    l record;
BEGIN
    FOR l IN SELECT * FROM by_chunk(fences, ids, NULL) LOOP
        PERFORM FROM chunk WHERE number = l.number FOR UPDATE;
        PERFORM break_out(l.number, ARRAY(
            SELECT DISTINCT member(chunk, t.id) FROM chunk, unnest(l.numbers, l.ids) AS t (n, id)
             WHERE number = l.number AND member(chunk, t.id) = t.n));
    END LOOP;
END $$;

-- Break a job out, if it is a member of a chunk.
CREATE FUNCTION break_out_job(job_id text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    c chunk;
BEGIN
    SELECT * INTO c FROM chunk WHERE last_id >= job_id AND first_id <= job_id AND member(chunk, job_id) > 0 FOR UPDATE;
    IF FOUND THEN
        PERFORM break_out(c.number, ARRAY[member(c, job_id)]);
    END IF;
END $$;

-- Break out what limits count: they look at jobs one by one.
CREATE FUNCTION break_out_limited() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    c bigint;
BEGIN
    FOR c IN
        SELECT number FROM chunk
         WHERE EXISTS (SELECT FROM rule WHERE kind = 'limit' AND (scope <> 'queue' OR name = chunk.queue))
         ORDER BY number FOR UPDATE
    LOOP
        PERFORM break_out(c);
    END LOOP;
END $$;

-- Break out the chunks whose leases nobody renewed, oldest first, until there are `most` such jobs.
CREATE FUNCTION break_out_lost(t terms, most integer) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    c bigint;
BEGIN
    FOR c IN SELECT number FROM chunk WHERE until_us <= t.now_us ORDER BY number FOR UPDATE SKIP LOCKED LOOP
        EXIT WHEN most <= 0;
        most := most - break_out(c);
    END LOOP;
END $$;

-- Members of one batch that are done: it steps once for all of them, where the last of them stands in the call.
CREATE TYPE step AS (
    batch   text,
    born    bigint,
    place   integer,
    numbers integer[],
    ids     text[],
    results bytea[]
);

-- What is to become of these leases of one chunk, as far as they are members of it.
CREATE TYPE sorted AS (
    done       integer[],  -- members, and all that follows in their order
    places     integer[],
    last_place integer,
    ids        text[],
    numbers    integer[],
    results    bytea[],
    kept       integer[],  -- those of them that are archived
    outcomes   jsonb[],
    others     integer[]
);

CREATE FUNCTION sorted_out(
    of_number bigint, given_numbers integer[], given_ids text[], given_outcomes jsonb[], given_places integer[]
) RETURNS sorted LANGUAGE plpgsql SET enable_nestloop = off SET jit = off AS $$  -- planned for ten, it would be a loop in a loop for a thousand
DECLARE
    s sorted;
BEGIN
    SELECT array_agg(n) FILTER (WHERE done), array_agg(place) FILTER (WHERE done), max(place) FILTER (WHERE done),
           array_agg(id) FILTER (WHERE done), array_agg(number) FILTER (WHERE done),
           CASE WHEN count(result) FILTER (WHERE done) > 0 THEN array_agg(result) FILTER (WHERE done) END,
           array_agg(n) FILTER (WHERE done AND keep), array_agg(o) FILTER (WHERE done AND keep),
           array_agg(n) FILTER (WHERE NOT done) INTO s
      FROM (SELECT m.n::integer AS n, given.place, o, coalesce((o->>'keep_us')::bigint > 0, false) AS keep,
                   o IS NULL OR (o->>'kind' = 'done' AND NOT o ? 'emit') AS done,
                   m.id, m.number, decode(o->>'result', 'base64') AS result
              FROM chunk, unnest(chunk.ids, chunk.in_batch) WITH ORDINALITY AS m (id, number, n),
                   unnest(given_numbers, given_ids, given_outcomes, given_places) AS given (n, id, o, place)
             WHERE chunk.number = of_number AND given.n = m.n AND given.id = m.id
               AND (gone IS NULL OR get_bit(gone, m.n::integer - 1) = 0)
             ORDER BY m.n) AS found;
    RETURN s;
END $$;

-- End leases of members that are done, and break out those with other outcomes, or with emissions.
-- Gives the numbers, from 1, of the leases that have ended here, and how batches are to step.
CREATE FUNCTION settle_members(
    t terms, fences bigint[], of_ids text[], outcomes text[], OUT ended integer[], OUT steps step[]
) LANGUAGE plpgsql AS $$
DECLARE
    l record;
    c record;
    s sorted;
BEGIN
    ended := '{}';
    steps := '{}';
    FOR l IN SELECT * FROM by_chunk(fences, of_ids, outcomes) LOOP
        IF l.plain THEN
            DELETE FROM chunk WHERE number = l.number AND gone IS NULL AND ids = l.ids
            RETURNING queue, batch, born, in_batch INTO c;
            IF FOUND THEN
                INSERT INTO tally VALUES (c.queue, 0, cardinality(l.ids));
                ended := ended || l.places;
                IF c.born IS NOT NULL THEN
                    steps := steps || (c.batch, c.born, l.last_place, c.in_batch, l.ids, NULL)::step;
                END IF;
                CONTINUE;
            END IF;
        END IF;
        SELECT queue, batch, born INTO c FROM chunk WHERE number = l.number FOR UPDATE;
        CONTINUE WHEN NOT FOUND;
        s := sorted_out(l.number, l.numbers, l.ids, l.outcomes::jsonb[], l.places);
        IF s.others IS NOT NULL THEN
            PERFORM break_out(l.number, s.others);
        END IF;
        IF s.kept IS NOT NULL THEN
            PERFORM keep_members(t, l.number, s.kept, s.outcomes);
        END IF;
        IF s.done IS NOT NULL THEN
            PERFORM leave_chunk(l.number, s.done);
            INSERT INTO tally VALUES (c.queue, 0, cardinality(s.done) - coalesce(cardinality(s.kept), 0));
            ended := ended || s.places;
            IF c.born IS NOT NULL THEN
                steps := steps || (c.batch, c.born, s.last_place, s.numbers, s.ids, s.results)::step;
            END IF;
        END IF;
    END LOOP;
END $$;

-- Archive members that are done, with what their outcomes say.
CREATE FUNCTION keep_members(t terms, of_number bigint, numbers integer[], outcomes jsonb[]) RETURNS void
LANGUAGE plpgsql SET enable_nestloop = off SET jit = off AS $$
BEGIN
    INSERT INTO archive (seq, pos, put_us, due_us, fence, started_us, rank, max_crashes, attempts, failures, crashes, queue,
                         id, task, body, batch, member, state, ended_us, keep_us, result)
    SELECT m.seq, m.pos, m.put_us, m.due_us, m.fence, m.started_us, m.rank, m.max_crashes, m.attempts, m.failures, m.crashes,
           m.queue, m.id, m.task, m.body, m.batch, m.member, 'done', t.now_us, t.now_us + (k.o->>'keep_us')::bigint,
           decode(k.o->>'result', 'base64')
      FROM chunk, members_of(chunk) AS m, unnest(numbers, outcomes) AS k (n, o)
     WHERE chunk.number = of_number AND m.fence = of_number + k.n;
END $$;

-- Renew leases of members: a chunk as a whole if all that it still has are among them, else they are broken out.
-- Gives the numbers, from 1, of those that were renewed here.
CREATE FUNCTION renew_members(now_us bigint, fences bigint[], ids text[], until bigint) RETURNS SETOF integer
LANGUAGE plpgsql SET enable_nestloop = off SET jit = off AS $$
DECLARE
    l record;
    c record;
BEGIN
    FOR l IN SELECT * FROM by_chunk(fences, ids, NULL) LOOP
        PERFORM FROM chunk WHERE number = l.number AND until_us > now_us FOR UPDATE;
        CONTINUE WHEN NOT FOUND;
        SELECT members, array_agg(DISTINCT m.n) AS found, array_agg(r.place) AS places INTO c
          FROM chunk, unnest(chunk.ids) WITH ORDINALITY AS m (id, n), unnest(l.numbers, l.ids, l.places) AS r (n, id, place)
         WHERE number = l.number AND r.n = m.n AND r.id = m.id AND (gone IS NULL OR get_bit(gone, m.n::integer - 1) = 0)
         GROUP BY members;
        CONTINUE WHEN NOT FOUND;
        IF cardinality(c.found) = c.members THEN
            UPDATE chunk SET until_us = until WHERE number = l.number;
            RETURN QUERY SELECT unnest(c.places);
        ELSE
            PERFORM break_out(l.number, c.found::integer[]);
        END IF;
    END LOOP;
END $$;

-- --- jobs come in ---------------------------------------------------------------------------

-- A job as a producer describes it, with the times that follow from now.
CREATE FUNCTION drafted(d jsonb, now_us bigint) RETURNS job LANGUAGE plpgsql AS $$
DECLARE
    j job;
BEGIN
    j.put_us := now_us;
    j.due_us := coalesce((d->>'due_us')::bigint, now_us + coalesce((d->>'delay_us')::bigint, 0));
    j.expires_us := least((d->>'expires_us')::bigint, now_us + (d->>'expires_in_us')::bigint);
    j.rank := -coalesce((d->>'priority')::smallint, 0);
    j.max_crashes := coalesce((d->>'max_crashes')::smallint, 3);
    j.attempts := 0;
    j.failures := 0;
    j.crashes := 0;
    j.queue := coalesce(d->>'queue', 'default');
    j.id := d->>'id';
    j.task := d->>'task';
    j.body := decode(d->>'body', 'base64');
    j.chosen := nullif((d->>'chosen')::boolean, false);
    j.unique_key := d->>'unique';
    j.unique_until := CASE WHEN d->>'unique' IS NOT NULL THEN coalesce(d->>'unique_until', 'ended') END;
    j.limit_key := d->>'key';
    j.batch := d->>'batch';
    j.member := coalesce((d->>'member')::integer, 0);
    RETURN j;
END $$;

-- Jobs as a producer describes them, in arrays and facts, with their places and the times that follow from now.
CREATE FUNCTION described(
    now_us bigint, ids text[], tasks text[], queues text[], priorities smallint[], max_crashes smallint[], bodies bytea[],
    facts jsonb
) RETURNS job[] LANGUAGE plpgsql AS $$
BEGIN
    RETURN ARRAY(
        SELECT ROW(
            f.place, f.place, now_us, coalesce(f.due_us, now_us + coalesce(f.delay_us, 0)),
            least(f.expires_us, now_us + f.expires_in_us), NULL, NULL, -f.priority, f.most, 0, 0, 0, f.queue, f.id, f.task,
            f.body, nullif(f.chosen, false), f.unique, CASE WHEN f.unique IS NOT NULL THEN coalesce(f.unique_until, 'ended') END,
            f.key, f.batch, coalesce(f.member, 0), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
            NULL, NULL, NULL)::job
          FROM (SELECT nextval('back') AS place, * FROM ROWS FROM (
            unnest(ids, tasks, queues, priorities, max_crashes, bodies),
            jsonb_to_recordset(facts) AS (
                due_us bigint, delay_us bigint, expires_us bigint, expires_in_us bigint, chosen boolean, "unique" text,
                unique_until text, key text, batch text, member integer)
            ) AS f (id, task, queue, priority, most, body, due_us, delay_us, expires_us, expires_in_us, chosen, "unique",
                    unique_until, key, batch, member)) AS f);
END $$;

-- Those of these ids that are taken elsewhere than in line: by a job that is there, or by one that was chosen and ended
-- less than a day ago.
--
-- An id is unique in each table, not across them.  So whoever puts one first makes an entry in the index of `ready`,
-- where of two that do so at the same time the second waits for the first, and only then looks elsewhere, with a new
-- snapshot.  A job that moves meanwhile is seen in one of its two places, since this is one statement.
-- New ids are greater than all before them, so that each place is first asked for anything between the least and
-- the greatest of them: that is one step for a bundle instead of one for each job.
CREATE FUNCTION used_elsewhere(names text[], now_us bigint) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    low text := (SELECT min(name COLLATE "C") FROM unnest(names) AS name);
    high text := (SELECT max(name COLLATE "C") FROM unnest(names) AS name);
BEGIN
    IF NOT EXISTS (SELECT FROM running   WHERE id >= low AND id <= high)
       AND NOT EXISTS (SELECT FROM scheduled WHERE id >= low AND id <= high)
       AND NOT EXISTS (SELECT FROM held      WHERE id >= low AND id <= high)
       AND NOT EXISTS (SELECT FROM archive   WHERE id >= low AND id <= high)
       AND NOT EXISTS (SELECT FROM known     WHERE id >= low AND id <= high)
       AND NOT EXISTS (SELECT FROM chunk     WHERE last_id >= low AND first_id <= high) THEN
        RETURN NULL;
    END IF;
    RETURN (SELECT array_agg(id) FROM (
        SELECT id FROM running   WHERE id = ANY (names) UNION ALL
        SELECT id FROM scheduled WHERE id = ANY (names) UNION ALL
        SELECT id FROM held      WHERE id = ANY (names) UNION ALL
        SELECT id FROM archive   WHERE id = ANY (names) UNION ALL
        SELECT id FROM known     WHERE id = ANY (names) AND (until_us IS NULL OR until_us > now_us) UNION ALL
        SELECT m.id FROM chunk, unnest(chunk.ids) WITH ORDINALITY AS m (id, n)
         WHERE last_id >= low AND first_id <= high AND m.id IN (SELECT unnest(names))
           AND (gone IS NULL OR get_bit(gone, m.n::integer - 1) = 0)) AS taken);
END $$;

-- Whether each statement sees what was committed before it.  In a caller's transaction it may not.
CREATE FUNCTION always_looks_anew() RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')
$$;

-- Make entries for ids in the index of `ready`, without jobs, so that whoever else puts one of them waits until we have
-- committed; gives those that are taken, here or elsewhere.
CREATE FUNCTION enter(ids text[], now_us bigint) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    entries tid[];
    entered text[];
BEGIN
    WITH entry AS (
        INSERT INTO ready (queue, rank, pos, id) SELECT '', 0, nextval('back'), id FROM unnest(ids) AS id
        ON CONFLICT (id) DO NOTHING RETURNING ctid, id)
    SELECT array_agg(ctid), array_agg(id) INTO entries, entered FROM entry;
    DELETE FROM ready WHERE ctid = ANY (entries);
    IF NOT always_looks_anew() THEN
        RETURN used_elsewhere(ids, now_us) || ARRAY(SELECT unnest(ids) EXCEPT SELECT unnest(entered))
            || ARRAY(SELECT id FROM ready WHERE id = ANY (ids));  -- as it was, before somebody took it from there
    ELSIF cardinality(entered) = cardinality(ids) THEN
        RETURN used_elsewhere(ids, now_us);
    END IF;
    RETURN used_elsewhere(ids, now_us) || ARRAY(SELECT unnest(ids) EXCEPT SELECT unnest(entered));
END $$;

-- Lock the batch that a new job names, and say whether it counts there.  Nobody adds to a batch from outside
-- that is sealed or not there; what is emitted is then a plain job.
CREATE FUNCTION joins(of_batch text, emitted boolean) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    b batch;
BEGIN
    SELECT * INTO b FROM batch WHERE id = of_batch FOR UPDATE;
    IF NOT emitted AND b.id IS NULL THEN
        RAISE EXCEPTION USING errcode = 'SK001', message = 'unknown batch', detail = of_batch;
    ELSIF NOT emitted AND b.sealed THEN
        RAISE EXCEPTION USING errcode = 'SK002', message = 'sealed batch', detail = of_batch;
    END IF;
    RETURN b.id IS NOT NULL AND b.finished_us IS NULL;
END $$;

-- So many of these jobs, which stand in line since `since`, are members of a batch.
CREATE FUNCTION join_batch(of_batch text, n bigint, since bigint, ids text[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    its_born bigint;
BEGIN
    UPDATE batch SET live = live + n, newest = ids[cardinality(ids)]
     WHERE id = of_batch AND NOT sealed RETURNING born INTO its_born;
    IF NOT FOUND THEN
        PERFORM joins(of_batch, false);  -- which says what is wrong
    ELSIF its_born > since THEN  -- it was removed, and there is a new one of that name, since we began
        UPDATE ready SET seq = nextval('back') WHERE id = ANY (ids);
        UPDATE scheduled SET seq = nextval('back') WHERE id = ANY (ids);
    END IF;
END $$;

-- Lock the batches that a step may count something in: nested ones before those around them, as their ends go.
CREATE FUNCTION lock_batches(names text[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF cardinality(names) > 1 THEN  -- one is locked when its turn comes
        PERFORM FROM batch WHERE id = ANY (names) ORDER BY parent IS NULL, id DESC FOR UPDATE;
    END IF;
END $$;

-- Have a batch for oneself until the commit, with what was added to its tally in its counts.
CREATE FUNCTION add_up_batch(of_batch text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    more bigint;
BEGIN
    PERFORM FROM batch WHERE id = of_batch FOR UPDATE;
    WITH gone AS (DELETE FROM batch_tally WHERE batch = of_batch RETURNING n) SELECT sum(n) INTO more FROM gone;
    IF more > 0 THEN
        UPDATE batch SET live = live - more, done = done + more WHERE id = of_batch;
    END IF;
END $$;

-- Take a unique key for a job; gives the id of the job that holds it, if that is another one.
CREATE FUNCTION take_key(of_key text, job_id text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    holder text;
BEGIN
    LOOP
        INSERT INTO unique_key VALUES (of_key, job_id) ON CONFLICT DO NOTHING;
        IF FOUND THEN
            RETURN NULL;
        END IF;
        SELECT id INTO holder FROM unique_key WHERE key = of_key;
        IF FOUND THEN  -- else it was freed in this moment
            RETURN holder;
        END IF;
    END LOOP;
END $$;

-- Put one job (T1).  NULL if it was created, else the id of the job in its place.
CREATE FUNCTION add_job(t terms, j job, emitted boolean) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    holder text;
BEGIN
    IF enter(ARRAY[j.id], t.now_us) <> '{}' THEN
        RETURN j.id;
    END IF;
    IF j.unique_key IS NOT NULL THEN
        holder := take_key(j.unique_key, j.id);
        IF holder IS NOT NULL THEN
            RETURN holder;
        END IF;
    END IF;
    IF j.chosen THEN
        INSERT INTO known VALUES (j.id, NULL) ON CONFLICT (id) DO UPDATE SET until_us = NULL;
    END IF;
    IF j.batch IS NOT NULL THEN
        IF joins(j.batch, emitted) THEN
            UPDATE batch SET live = live + 1 WHERE id = j.batch;
        ELSE
            j.stepped := true;
        END IF;
    END IF;
    j.seq := nextval('back');
    j.pos := j.seq;
    PERFORM place(t, j);
    INSERT INTO tally VALUES (j.queue, 1, 0);
    RETURN NULL;
END $$;

-- Put jobs of any kind, no two of which have the same id or the same unique key: what add_job() does, set by set.
-- Those that are due stand in line before the rest is looked at: that is their entry.  Gives those that were not
-- created, each with the id of the job in its place.
CREATE FUNCTION add_jobs(t terms, jobs job[]) RETURNS TABLE (refused text, there text) LANGUAGE plpgsql AS $$
DECLARE
    kinds record;
    made text[] := '{}';
    taken text[];
    later text[];
    b record;
BEGIN
    SELECT count(j.unique_key) > 0 AS keyed, bool_or(j.chosen) AS chosen, count(j.batch) > 0 AS batched,
           bool_or(j.due_us > t.now_us) AS later, bool_or(j.due_us <= t.now_us) AS now INTO kinds FROM unnest(jobs) AS j;
    IF kinds.batched THEN
        PERFORM lock_batches(ARRAY(SELECT DISTINCT j.batch FROM unnest(jobs) AS j WHERE j.batch IS NOT NULL));
    END IF;
    IF kinds.chosen THEN  -- others may put the same ids, in another order
        jobs := ARRAY(SELECT j FROM unnest(jobs) AS j ORDER BY j.id);
        IF kinds.now AND kinds.later THEN
            PERFORM enter(ARRAY(SELECT id FROM unnest(jobs)), t.now_us);
        END IF;
    END IF;
    IF kinds.now THEN
        WITH added AS (
            INSERT INTO ready SELECT * FROM unnest(jobs) WHERE due_us <= t.now_us ON CONFLICT (id) DO NOTHING RETURNING id)
        SELECT array_agg(id) INTO made FROM added;
        taken := used_elsewhere(made, t.now_us);
        IF kinds.later OR made IS NULL OR cardinality(made) < cardinality(jobs) THEN
            taken := taken || ARRAY(SELECT j.id FROM unnest(jobs) AS j WHERE j.due_us <= t.now_us EXCEPT SELECT unnest(made));
        END IF;
    END IF;
    IF kinds.later THEN
        taken := taken || enter(ARRAY(SELECT id FROM unnest(jobs) WHERE due_us > t.now_us), t.now_us);
    END IF;
    IF taken <> '{}' THEN
        RETURN QUERY SELECT name, name FROM unnest(taken) AS name;
        jobs := ARRAY(SELECT j FROM unnest(jobs) AS j WHERE j.id NOT IN (SELECT unnest(taken)));
        DELETE FROM ready WHERE id = ANY (taken) AND id = ANY (made);
    END IF;
    IF kinds.keyed THEN
        taken := '{}';
        FOR refused, there IN SELECT * FROM take_keys(jobs) LOOP
            RETURN NEXT;
            taken := taken || refused;
        END LOOP;
        IF taken <> '{}' THEN
            jobs := ARRAY(SELECT j FROM unnest(jobs) AS j WHERE j.id NOT IN (SELECT unnest(taken)));
            DELETE FROM ready WHERE id = ANY (taken);
        END IF;
    END IF;
    IF kinds.chosen THEN
        INSERT INTO known SELECT id, NULL FROM unnest(jobs) WHERE chosen ON CONFLICT (id) DO UPDATE SET until_us = NULL;
    END IF;
    IF kinds.later THEN
        INSERT INTO scheduled SELECT * FROM unnest(jobs) WHERE due_us > t.now_us;
    END IF;
    IF kinds.batched THEN
        FOR b IN SELECT j.batch AS id, count(*) AS n, min(j.seq) AS since, array_agg(j.id) AS ids
                   FROM unnest(jobs) AS j WHERE j.batch IS NOT NULL GROUP BY 1 ORDER BY 1
        LOOP
            PERFORM join_batch(b.id, b.n, b.since, b.ids);
        END LOOP;
    END IF;
    INSERT INTO tally SELECT queue, count(*), 0 FROM unnest(jobs) GROUP BY queue;
END $$;

-- Take the unique keys of these jobs, in their order, so that two who take the same ones wait and do not lock each other out.
-- Gives the jobs whose key another one holds, and those others.
CREATE FUNCTION take_keys(jobs job[]) RETURNS TABLE (refused text, there text) LANGUAGE plpgsql AS $$
DECLARE
    missed text[];
BEGIN
    WITH got AS (
        INSERT INTO unique_key
        SELECT j.unique_key, j.id FROM unnest(jobs) AS j WHERE j.unique_key IS NOT NULL ORDER BY j.unique_key COLLATE "C"
        ON CONFLICT DO NOTHING RETURNING id)
    SELECT array_agg(j.id) INTO missed FROM unnest(jobs) AS j
     WHERE j.unique_key IS NOT NULL AND j.id NOT IN (SELECT id FROM got);
    IF missed IS NULL THEN
        RETURN;
    END IF;
    FOR refused, there IN
        SELECT j.id, take_key(j.unique_key, j.id) FROM unnest(jobs) AS j WHERE j.id IN (SELECT unnest(missed))
    LOOP
        IF there IS NOT NULL THEN
            RETURN NEXT;
        END IF;
    END LOOP;
END $$;

-- Put jobs that are all plain, or (of_batch) plain but for being members of one batch, whose numbers follow one another from
-- first_number on.  Gives the numbers, from 1, of those that were not created.
CREATE FUNCTION add_plain(
    t terms, ids text[], tasks text[], queues text[], priorities smallint[], max_crashes smallint[], bodies bytea[],
    of_batch text, first_number integer
) RETURNS integer[] LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    made text[];
    since bigint;
    elsewhere text[];
BEGIN
    WITH added AS (
        INSERT INTO ready (seq, pos, put_us, due_us, rank, max_crashes, attempts, failures, crashes, queue, id, task, body,
                           batch, member)
        SELECT place, place, t.now_us, t.now_us, -priority, most, 0, 0, 0, queue, id, task, body, of_batch,
               coalesce(first_number - 1 + n, 0)
          FROM (SELECT nextval('back') AS place, *
                  FROM unnest(ids, tasks, queues, priorities, max_crashes, bodies) WITH ORDINALITY
                    AS j (id, task, queue, priority, most, body, n)) AS j
            ON CONFLICT (id) DO NOTHING
        RETURNING id, queue, seq),
    counted AS (INSERT INTO tally SELECT queue, count(*), 0 FROM added GROUP BY queue)
    SELECT array_agg(id), min(seq) INTO made, since FROM added;
    elsewhere := used_elsewhere(made, t.now_us);
    IF of_batch IS NOT NULL AND cardinality(made) > coalesce(cardinality(elsewhere), 0) THEN
        PERFORM join_batch(of_batch, cardinality(made) - coalesce(cardinality(elsewhere), 0), since, made);
    END IF;
    IF elsewhere IS NULL AND cardinality(made) = cardinality(ids) THEN
        RETURN '{}';
    END IF;
    WITH taken_back AS (DELETE FROM ready WHERE id = ANY (elsewhere) RETURNING queue)
    INSERT INTO tally SELECT queue, -count(*), 0 FROM taken_back GROUP BY queue;
    RETURN ARRAY(
        SELECT i::integer FROM (
            SELECT id, i, row_number() OVER (PARTITION BY id ORDER BY i) AS nth
              FROM unnest(ids) WITH ORDINALITY AS all_ids (id, i)) AS numbered
         WHERE nth > 1 OR id NOT IN (SELECT unnest(made)) OR id IN (SELECT unnest(elsewhere))
         ORDER BY i);
END $$;

-- Put what follows from a step; what is already there is left out.
CREATE FUNCTION emit(t terms, drafts jsonb) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    d jsonb;
BEGIN
    FOR d IN SELECT jsonb_array_elements(drafts) LOOP
        PERFORM add_job(t, drafted(d, t.now_us), true);
    END LOOP;
END $$;

-- Refuse, after the fact, what makes more jobs wait than a cap allows: whoever raises is rolled back.
-- The lock on the rule makes those who put at the same time wait and count one another.
CREATE FUNCTION check_room(queues text[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    r rule;
    n bigint;
BEGIN
    FOR r IN SELECT * FROM rule WHERE kind = 'cap' AND name = ANY (queues) ORDER BY name FOR UPDATE LOOP
        SELECT count(*) INTO n FROM (SELECT FROM waiting WHERE queue = r.name LIMIT r.n + 1) AS few;
        IF n > r.n THEN
            RAISE EXCEPTION USING errcode = 'SK003', message = 'queue full',
                detail = jsonb_build_object('queue', r.name, 'limit', r.n)::text;
        END IF;
    END LOOP;
END $$;

-- --- jobs end -------------------------------------------------------------------------------

-- One member has ended (B1); `since` is its place in the order of puts.
CREATE FUNCTION step_batch(
    t terms, of_batch text, since bigint, of_member integer, member_id text, became text, gave bytea, why text
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    b batch;
BEGIN
    PERFORM add_up_batch(of_batch);
    UPDATE batch SET live = live - 1, done = done + (became = 'done')::integer,
                     dead = dead + (became = 'dead')::integer, cancelled = cancelled + (became = 'cancelled')::integer
     WHERE id = of_batch AND born < since RETURNING * INTO b;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    INSERT INTO ended VALUES (of_batch, of_member, of_member, 1, became, why, ARRAY[of_member], ARRAY[member_id],
                              CASE WHEN gave IS NOT NULL THEN ARRAY[gave] END);
    IF became <> 'done' AND b.dead + b.cancelled = 1 THEN
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
    b batch;
BEGIN
    IF share AND goes_on(s) THEN
        PERFORM FROM batch WHERE id = s.batch AND born = s.born FOR KEY SHARE SKIP LOCKED;
        IF FOUND THEN
            IF goes_on(s) THEN
                INSERT INTO batch_tally VALUES (s.batch, n);
                PERFORM list_done(s);
                RETURN;
            END IF;
            PERFORM FROM batch WHERE id = s.batch FOR UPDATE SKIP LOCKED;
            IF NOT FOUND THEN  -- others share it as well: if they want the same, all of us would wait for one another
                RAISE EXCEPTION USING errcode = '40001', message = 'the newest member was taken meanwhile: begin anew';
            END IF;
        END IF;
    END IF;
    PERFORM add_up_batch(s.batch);
    UPDATE batch SET live = live - n, done = done + n WHERE id = s.batch AND born = s.born RETURNING * INTO b;
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
    INSERT INTO ended
    SELECT s.batch, min(number), max(number), cardinality(s.ids), 'done', NULL, s.numbers, s.ids, s.results
      FROM unnest(s.numbers) AS number;
END $$;

CREATE FUNCTION open_batch(t terms, b jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO batch (id, born, body, calls, linger_us, created_us, open_us, parent, member)
    VALUES (b->>'id', nextval('back'), b->>'body', b->'calls', (b->>'linger_us')::bigint, t.now_us, t.now_us + (b->>'open_us')::bigint,
            b->>'parent', (b->>'member')::integer)
    ON CONFLICT DO NOTHING;
    IF FOUND AND b->>'parent' IS NOT NULL AND joins(b->>'parent', false) THEN
        UPDATE batch SET live = live + 1 WHERE id = b->>'parent';
        UPDATE batch SET born = nextval('back') WHERE id = b->>'id';  -- after its parent, which nobody removes from here on
    END IF;
END $$;

CREATE FUNCTION seal_batch(t terms, of_batch text) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    b batch;
BEGIN
    PERFORM add_up_batch(of_batch);
    SELECT * INTO b FROM batch WHERE id = of_batch FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING errcode = 'SK001', message = 'unknown batch', detail = of_batch;
    ELSIF b.sealed THEN
        RETURN false;
    END IF;
    UPDATE batch SET sealed = true WHERE id = of_batch;
    IF b.live = 0 THEN
        PERFORM finish_batch(t, b);
    END IF;
    RETURN true;
END $$;

CREATE FUNCTION call_back(t terms, b batch, what text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF b.calls ? what THEN
        PERFORM add_job(t, drafted(b.calls->what, t.now_us), true);
        PERFORM wake(b.calls->what->>'queue');
    END IF;
END $$;

CREATE FUNCTION finish_batch(t terms, b batch) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE batch SET finished_us = t.now_us, keep_us = t.now_us + b.linger_us WHERE id = b.id;
    IF b.dead + b.cancelled = 0 THEN
        PERFORM call_back(t, b, 'on_succeeded');
    END IF;
    PERFORM call_back(t, b, 'on_finished');
    IF b.parent IS NOT NULL THEN
        PERFORM step_batch(t, b.parent, b.born, b.member, b.id,
                           CASE WHEN b.dead + b.cancelled = 0 THEN 'done' ELSE 'dead' END, NULL, NULL);
    END IF;
    IF b.linger_us = 0 THEN
        PERFORM remove_batch(t, b.id);
    END IF;
END $$;

-- Its live members step nothing from here on: see there.
CREATE FUNCTION remove_batch(t terms, of_batch text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    b batch;
BEGIN
    DELETE FROM batch WHERE id = of_batch RETURNING * INTO b;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    DELETE FROM ended WHERE batch = of_batch;
    DELETE FROM batch_tally WHERE batch = of_batch;
    IF b.finished_us IS NULL AND b.parent IS NOT NULL THEN
        PERFORM step_batch(t, b.parent, b.born, b.member, b.id, 'cancelled', NULL, NULL);
    END IF;
END $$;

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
        INSERT INTO known VALUES (j.id, t.now_us + 86400000000)
        ON CONFLICT (id) DO UPDATE SET until_us = excluded.until_us;
    END IF;
    IF keep > 0 THEN
        j.state := became;
        j.ended_us := t.now_us;
        j.keep_us := t.now_us + keep;
        j.reason := why;
        j.error := what;
        j.result := gave;
        j.until_us := NULL;
        j.holder := NULL;
        j.hold_scope := NULL;
        j.hold_name := NULL;
        INSERT INTO archive VALUES (j.*);
    ELSE
        INSERT INTO tally VALUES (j.queue, 0, 1);
    END IF;
    IF j.batch IS NOT NULL AND j.stepped IS NOT TRUE THEN
        PERFORM step_batch(t, j.batch, j.seq, j.member, j.id, became, gave, why);
    END IF;
END $$;

CREATE FUNCTION expire(t terms, j job) RETURNS void LANGUAGE sql AS $$
    SELECT end_job(t, j, 'dead', t.dead_us, 'expired')
$$;

-- End the waiting jobs that have expired (T11).
CREATE FUNCTION expire_some(t terms, most integer) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    job_id text;
    j job;
    n integer := 0;
BEGIN
    FOR job_id IN
        SELECT id FROM waiting WHERE expires_us <= t.now_us ORDER BY seq LIMIT most
    LOOP
        j := unplace(job_id);
        IF j.id IS NOT NULL THEN
            PERFORM expire(t, j);
            n := n + 1;
        END IF;
    END LOOP;
    RETURN n;
END $$;

-- --- leases end -----------------------------------------------------------------------------

-- Jobs stand before all others of their priority, in this order.
CREATE FUNCTION to_front(t terms, jobs job[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    j job;
BEGIN
    FOR n IN REVERSE cardinality(jobs)..1 LOOP
        j := jobs[n];
        j.pos := nextval('front');
        PERFORM place(t, j);
    END LOOP;
END $$;

-- One running job, locked by the caller, and the outcome of its run.  Gives whether that was accepted, and the
-- job if it is yet to be placed at the front.
CREATE FUNCTION settle_one(t terms, INOUT j job, o jsonb, OUT accepted boolean, OUT front boolean)
LANGUAGE plpgsql AS $$
DECLARE
    kind text := coalesce(o->>'kind', 'done');
    error text := o->>'error';
BEGIN
    accepted := true;
    front := false;
    IF kind = 'cancelled' AND j.cancel IS NOT TRUE THEN
        accepted := false;
        RETURN;
    END IF;
    IF o ? 'emit' THEN
        DELETE FROM unique_key WHERE key = j.unique_key AND id = j.id;  -- it may hand its own key on
        PERFORM emit(t, o->'emit');
    END IF;
    DELETE FROM running WHERE running.fence = j.fence;
    CASE
        WHEN kind = 'done' THEN
            PERFORM end_job(t, j, 'done', (o->>'keep_us')::bigint, NULL, NULL, decode(o->>'result', 'base64'));
        WHEN kind = 'dead' THEN
            j.failures := j.failures + 1;
            PERFORM end_job(t, j, 'dead', coalesce((o->>'keep_us')::bigint, t.dead_us), o->>'reason', error);
        WHEN kind = 'broken' THEN
            PERFORM end_job(t, j, 'dead', t.dead_us, 'broken', error);
        WHEN kind = 'cancelled' OR j.cancel THEN
            PERFORM end_job(t, j, 'cancelled', t.cancelled_us, 'cancelled', error);
        WHEN kind = 'retry' THEN
            j.history := told(j, t.now_us, 'retried', o->>'note');
            j.failures := j.failures + 1;
            j.error := error;
            j.due_us := t.now_us + (o->>'delay_us')::bigint;
            IF o->>'queue' <> j.queue THEN
                INSERT INTO tally VALUES (j.queue, 0, 1), (o->>'queue', 1, 0);
                j.queue := o->>'queue';
            END IF;
            j.pos := nextval('back');
            PERFORM place(t, j);
        WHEN kind = 'snooze' THEN
            j.history := told(j, t.now_us, 'snoozed');
            j.attempts := j.attempts - 1;
            j.error := NULL;
            j.due_us := t.now_us + (o->>'delay_us')::bigint;
            j.pos := nextval('back');
            PERFORM place(t, j);
        WHEN kind = 'release' THEN
            j.history := told(j, t.now_us, 'released');
            j.attempts := j.attempts - 1;
            j.error := NULL;
            j.due_us := t.now_us;
            front := true;
    END CASE;
END $$;

-- The batches in which these outcomes may count something: those of jobs that end, and of what is emitted.
CREATE FUNCTION stepped_by(fences bigint[], outcomes text[]) RETURNS text[] LANGUAGE plpgsql AS $$
BEGIN
    RETURN ARRAY(
        SELECT r.batch FROM running AS r, unnest(fences, outcomes::jsonb[]) AS l (fence, o)
         WHERE r.fence = l.fence AND r.batch IS NOT NULL AND r.stepped IS NOT TRUE
           AND (r.cancel OR coalesce(o->>'kind', 'done') NOT IN ('retry', 'snooze', 'release'))
        UNION
        SELECT e->>'batch' FROM unnest(outcomes::jsonb[]) AS o, jsonb_array_elements(o->'emit') AS e WHERE e ? 'batch');
END $$;

-- Members of batches that are done, with nothing to keep and nothing to emit: gives their numbers, and how their
-- batches are to step.
CREATE FUNCTION end_members(
    t terms, fences bigint[], of_ids text[], outcomes text[], OUT ended integer[], OUT steps step[]
) LANGUAGE plpgsql AS $$
BEGIN
    WITH over AS (
        DELETE FROM running AS r USING (
            SELECT min(n) AS n, fence, id
              FROM unnest(fences, of_ids, outcomes) WITH ORDINALITY AS l (fence, id, outcome, n)
             WHERE outcome IS NULL GROUP BY fence, id) AS l
         WHERE r.fence = l.fence AND r.id = l.id AND r.batch IS NOT NULL AND r.unique_key IS NULL
        RETURNING l.n::integer, r.queue, r.id, r.chosen, r.batch, r.member, r.stepped, r.seq),
    counted AS (
        INSERT INTO tally SELECT queue, 0, count(*) FROM over GROUP BY queue),
    remembered AS (
        INSERT INTO known SELECT id, t.now_us + 86400000000 FROM over WHERE chosen
        ON CONFLICT (id) DO UPDATE SET until_us = excluded.until_us),
    stepping AS (
        SELECT b.id AS batch, b.born, max(over.n) AS place, array_agg(over.member) AS numbers, array_agg(over.id) AS ids
          FROM over JOIN batch AS b ON b.id = over.batch WHERE over.stepped IS NOT TRUE AND over.seq > b.born
         GROUP BY b.id, b.born)
    SELECT (SELECT array_agg(n) FROM over),
           (SELECT array_agg((batch, born, place, numbers, ids, NULL)::step) FROM stepping) INTO ended, steps;
END $$;

-- End leases (T4-T7, T10, T12); gives the numbers, from 1, of those that were no longer live.
-- An outcome that is NULL, or no outcomes at all, means: done, and nothing to keep.  Only who can begin anew may `share` a
-- batch with others: see step_done().
CREATE FUNCTION settle_all(t terms, fences bigint[], ids text[], outcomes text[], share boolean) RETURNS integer[]
LANGUAGE plpgsql AS $$
DECLARE
    ended integer[];
    steps step[];
    lost integer[] := '{}';
    released job[] := '{}';
    many record;
    j job;
    s step;
    one record;
BEGIN
    many := settle_members(t, fences, ids, outcomes);
    ended := many.ended;
    steps := many.steps;
    IF cardinality(ended) < cardinality(fences) THEN
        IF cardinality(fences) > 1 THEN
            PERFORM FROM running WHERE fence = ANY (fences) ORDER BY fence FOR UPDATE;
        END IF;
        -- The common end in one statement: done, nothing to keep, nobody to tell.
        WITH gone AS (
            DELETE FROM running AS r USING unnest(fences, ids, outcomes) WITH ORDINALITY AS l (fence, id, outcome, n)
             WHERE r.fence = l.fence AND r.id = l.id AND l.outcome IS NULL
               AND r.chosen IS NULL AND r.unique_key IS NULL AND r.batch IS NULL
            RETURNING l.n::integer AS n, r.queue),
        counted AS (
            INSERT INTO tally SELECT queue, 0, count(*) FROM gone GROUP BY queue)
        SELECT ended || array_agg(n) INTO ended FROM gone;
    END IF;
    IF cardinality(ended) < cardinality(fences) THEN
        many := end_members(t, fences, ids, outcomes);
        ended := ended || many.ended;
        steps := steps || many.steps;
    END IF;
    IF cardinality(ended) = cardinality(fences) THEN
        IF cardinality(steps) = 1 THEN  -- and nothing that a lease in the same call may find expired, and end in its batch
            PERFORM step_done(t, steps[1], share AND NOT EXISTS (SELECT FROM waiting WHERE expires_us <= t.now_us));
        ELSIF cardinality(steps) > 1 THEN
            PERFORM lock_batches(ARRAY(SELECT DISTINCT batch FROM unnest(steps)));
            FOR s IN SELECT * FROM unnest(steps) ORDER BY place LOOP
                PERFORM step_done(t, s, false);
            END LOOP;
        END IF;
        RETURN lost;
    END IF;
    PERFORM lock_batches(ARRAY(SELECT unnest(stepped_by(fences, outcomes)) UNION SELECT batch FROM unnest(steps)));
    FOR n IN 1..cardinality(fences) LOOP  -- in their order, as one might see in what follows from them
        FOR s IN SELECT * FROM unnest(steps) WHERE place = n LOOP
            PERFORM step_done(t, s, false);
        END LOOP;
        CONTINUE WHEN n = ANY (ended);
        SELECT * INTO j FROM running WHERE fence = fences[n] AND id = ids[n] FOR UPDATE;
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
    PERFORM to_front(t, released);
    RETURN lost;
END $$;

-- Reap the leases that nobody renewed (T8), oldest first.
CREATE FUNCTION reap(t terms, most integer) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    j job;
    released job[] := '{}';
    n integer := 0;
BEGIN
    IF NOT EXISTS (SELECT FROM running WHERE until_us <= t.now_us)
       AND NOT EXISTS (SELECT FROM chunk WHERE until_us <= t.now_us) THEN
        RETURN 0;
    END IF;
    -- One sweeper at a time: two that share the lost leases out would send them to the front in any order.
    PERFORM FROM migration WHERE number = 1 FOR UPDATE;
    PERFORM break_out_lost(t, most);
    FOR j IN
        SELECT * FROM running WHERE until_us <= t.now_us ORDER BY fence LIMIT most FOR UPDATE SKIP LOCKED
    LOOP
        n := n + 1;
        DELETE FROM running WHERE fence = j.fence RETURNING * INTO j;
        j.crashes := j.crashes + 1;
        IF j.cancel THEN
            PERFORM end_job(t, j, 'cancelled', t.cancelled_us, 'cancelled');
        ELSE
            j.history := told(j, t.now_us, 'crashed');
            IF j.crashes >= j.max_crashes THEN
                PERFORM end_job(t, j, 'dead', t.dead_us, 'crashed');
            ELSE
                j.error := NULL;
                j.due_us := t.now_us;
                released := released || j;
            END IF;
        END IF;
    END LOOP;
    PERFORM to_front(t, released);
    PERFORM wake(queue) FROM (SELECT DISTINCT queue FROM unnest(released)) AS them;
    RETURN n;
END $$;

-- --- leases begin ---------------------------------------------------------------------------

CREATE FUNCTION running_in(of_scope text, of_name text) RETURNS bigint LANGUAGE sql AS $$
    SELECT count(*) FROM running
     WHERE CASE of_scope WHEN 'queue' THEN queue WHEN 'task' THEN task ELSE limit_key END = of_name
$$;

-- Let those stand in line again, in their old places, whose rule keeps them back no more; gives how many.
CREATE FUNCTION unhold(of_queue text, want integer) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    h record;
    j job;
    room bigint;
    n integer := 0;
    last_scope text := '';  -- no scope is less
    last_name text := '';
BEGIN
    LOOP  -- from rule to rule, one step in the index for each
        SELECT hold_scope AS scope, hold_name AS name INTO h FROM held
         WHERE queue = of_queue AND (hold_scope, hold_name) > (last_scope, last_name)
         ORDER BY hold_scope, hold_name LIMIT 1;
        EXIT WHEN NOT FOUND;
        last_scope := h.scope;
        last_name := h.name;
        SELECT min(CASE WHEN r.kind IN ('pause', 'block') THEN 0 ELSE r.n - running_in(r.scope, r.name) END) INTO room
          FROM rule r WHERE r.scope = h.scope AND r.name = h.name AND r.kind <> 'cap';
        FOR j IN
            WITH free AS (
                DELETE FROM held WHERE ctid = ANY (ARRAY(
                    SELECT ctid FROM held WHERE queue = of_queue AND hold_scope = h.scope AND hold_name = h.name
                     ORDER BY rank, pos LIMIT greatest(0, least(want, room)) FOR UPDATE SKIP LOCKED))
                RETURNING *)
            SELECT * FROM free
        LOOP
            j.hold_scope := NULL;
            j.hold_name := NULL;
            INSERT INTO ready VALUES (j.*);
            n := n + 1;
        END LOOP;
    END LOOP;
    RETURN n;
END $$;

-- What a client is told: leases of one queue, in their order, in arrays; and a floor for the next claim, which is the
-- first place of the last priority.  Those of a chunk have no fences and counters of their own, and one batch at most: they
-- are the first runs of plain jobs.  The first row of an answer has only the time, and the numbers of the leases that were lost.
CREATE TYPE leased AS (
    now_us   bigint,
    lost     integer[],
    queue    text,
    number   bigint,
    fences   bigint[],
    ids      text[],
    tasks    text[],
    bodies   bytea[],
    puts_us  bigint[],
    attempts integer[],
    failures integer[],
    crashes  integer[],
    batches  text[],
    rank     smallint,
    pos      bigint
);

-- Lease where there are rules, or jobs that have expired.  All that is looked at leaves the line: it has expired,
-- a rule holds it, or it is taken.  The locks on the limits make those who lease at the same time count one another.
-- Gives the fences.
--
-- One call sets at most 20,000 jobs aside, so that it ends in time whatever stands in line: then it says that there is more.
CREATE FUNCTION lease_one_by_one(t terms, of_queue text, want integer, until bigint, who text) RETURNS bigint[]
LANGUAGE plpgsql AS $$
DECLARE
    j job;
    r rule;
    seen integer;
    unheld integer := 0;
    look_again boolean := true;
    fences bigint[] := '{}';
    aside integer := 0;
    last_rank smallint := -32768;  -- how far we are: what is before that has just been taken away
    last_pos bigint := 0;
BEGIN
    PERFORM FROM rule WHERE kind = 'limit' ORDER BY scope, name FOR UPDATE;
    PERFORM break_out_limited();
    WHILE want > 0 LOOP
        -- Where one that was let go is not taken after all, the next of those held must stand before we go on.
        IF look_again THEN
            unheld := unheld + unhold(of_queue, want);
            look_again := false;
            last_rank := -32768;
        END IF;
        seen := 0;
        FOR j IN
            WITH gone AS (
                DELETE FROM ready WHERE ctid = ANY (ARRAY(
                    SELECT ctid FROM ready WHERE queue = of_queue AND (rank, pos) > (last_rank, last_pos)
                     ORDER BY rank, pos LIMIT CASE WHEN unheld > 0 THEN 1 ELSE want END FOR UPDATE SKIP LOCKED))
                RETURNING *)
            SELECT * FROM gone ORDER BY rank, pos
        LOOP
            seen := seen + 1;
            last_rank := j.rank;
            last_pos := j.pos;
            IF j.expires_us <= t.now_us THEN
                PERFORM expire(t, j);
                aside := aside + 1;
                look_again := unheld > 0;
                CONTINUE;
            END IF;
            SELECT * INTO r FROM rule
             WHERE kind <> 'cap' AND name = CASE scope WHEN 'queue' THEN j.queue WHEN 'task' THEN j.task ELSE j.limit_key END
               AND (kind <> 'limit' OR running_in(scope, name) >= n)
             ORDER BY kind, scope LIMIT 1;
            IF FOUND THEN
                j.hold_scope := r.scope;
                j.hold_name := r.name;
                INSERT INTO held VALUES (j.*);
                aside := aside + 1;
                look_again := unheld > 0;
                CONTINUE;
            END IF;
            want := want - 1;
            j.fence := nextval('fence');
            j.attempts := j.attempts + 1;
            j.started_us := t.now_us;
            j.until_us := until;
            j.holder := who;
            INSERT INTO running VALUES (j.*);
            fences := fences || j.fence;
        END LOOP;
        EXIT WHEN seen = 0;
        IF aside >= 20000 THEN
            PERFORM wake(of_queue);
            EXIT;
        END IF;
    END LOOP;
    RETURN fences;
END $$;

-- An array cannot be larger than a gigabyte, and is made in memory.
CREATE FUNCTION most_bytes() RETURNS bigint LANGUAGE sql IMMUTABLE AS $$ SELECT 50000000::bigint $$;

-- Lease these jobs, which the caller has locked, as rows of their own.  Gives the fences.
CREATE FUNCTION lease_rows(t terms, places tid[], until bigint, who text) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    fences bigint[];
BEGIN
    WITH taken AS (DELETE FROM ready WHERE ctid = ANY (places) RETURNING *),
    started AS (
        INSERT INTO running (
            seq, pos, put_us, due_us, expires_us, fence, started_us, rank, max_crashes, attempts, failures, crashes,
            queue, id, task, body, chosen, unique_key, unique_until, limit_key, batch, member, stepped, error,
            progress, log, history, until_us, holder)
        SELECT seq, pos, put_us, due_us, expires_us, nextval('fence'), t.now_us, rank, max_crashes, attempts + 1,
               failures, crashes, queue, id, task, body, chosen, unique_key, unique_until, limit_key, batch, member,
               stepped, error, progress, log, history, until, who
          FROM (SELECT * FROM taken ORDER BY rank, pos) AS line
        RETURNING fence)
    SELECT array_agg(fence) INTO fences FROM started;
    RETURN fences;
END $$;

-- What is told of jobs that are rows, in several answers if they are large.
CREATE FUNCTION tell_rows(of_queue text, of_fences bigint[]) RETURNS SETOF leased LANGUAGE sql STABLE AS $$  -- it is inlined
    SELECT NULL::bigint, NULL::integer[], of_queue, NULL::bigint, array_agg(fence), array_agg(id), array_agg(task),
           array_agg(body), array_agg(put_us), array_agg(attempts), array_agg(failures), array_agg(crashes),
           array_agg(batch), max(rank), (array_agg(pos))[array_position(array_agg(rank), max(rank))]
      FROM (SELECT *, sum(octet_length(body)) OVER (ORDER BY fence) / most_bytes() AS piece
              FROM running WHERE fence = ANY (of_fences) ORDER BY fence) AS line
     GROUP BY piece ORDER BY piece
$$;

-- Lease this one job, which the caller has locked, and tell of it: lease_rows() and tell_rows() without their sets, in a
-- third of the time.
CREATE FUNCTION lease_row(t terms, place tid, until bigint, who text) RETURNS leased LANGUAGE plpgsql AS $$
DECLARE
    j job;
BEGIN
    DELETE FROM ready WHERE ctid = place RETURNING * INTO j;
    j.fence := nextval('fence');
    j.started_us := t.now_us;
    j.attempts := j.attempts + 1;
    j.until_us := until;
    j.holder := who;
    INSERT INTO running VALUES (j.*);
    RETURN (NULL, NULL, j.queue, NULL, ARRAY[j.fence], ARRAY[j.id], ARRAY[j.task], ARRAY[j.body], ARRAY[j.put_us],
            ARRAY[j.attempts], ARRAY[j.failures], ARRAY[j.crashes], ARRAY[j.batch], j.rank, j.pos)::leased;
END $$;

-- Lease these jobs, which the caller has locked and which are plain, as one chunk; if they are members of a batch, all of
-- the same, and of the same birth.
CREATE FUNCTION lease_chunk(
    t terms, of_queue text, places tid[], until bigint, who text, of_batch text, its_birth bigint
) RETURNS SETOF leased
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH taken AS (
        DELETE FROM ready WHERE ctid = ANY (places)
        RETURNING seq, pos, put_us, due_us, rank, max_crashes, id, task, body, member),
    line AS (
        SELECT array_agg(id) AS ids, array_agg(task) AS tasks, array_agg(body) AS bodies, array_agg(seq) AS seqs,
               array_agg(put_us) AS puts_us, array_agg(due_us) AS dues_us, array_agg(rank) AS ranks,
               array_agg(max_crashes) AS max_crashes, min(id) AS first_id, max(id) AS last_id, max(rank) AS rank,
               array_agg(pos) AS poss, CASE WHEN of_batch IS NOT NULL THEN array_agg(member) END AS in_batch
          FROM (SELECT * FROM taken ORDER BY rank, pos) AS line),
    packed AS (
        INSERT INTO chunk (number, started_us, until_us, members, queue, holder, first_id, last_id, batch, born, ids, tasks,
                           bodies, seqs, puts_us, dues_us, ranks, max_crashes, in_batch)
        SELECT nextval('fence'), t.now_us, until, cardinality(ids), of_queue, who, first_id, last_id, of_batch, its_birth, ids,
               tasks, bodies, seqs, puts_us, dues_us, ranks, max_crashes, in_batch FROM line
        RETURNING number)
    SELECT NULL::bigint, NULL::integer[], of_queue, number, NULL::bigint[], ids, tasks, bodies, puts_us, NULL::integer[],
           NULL::integer[], NULL::integer[], CASE WHEN of_batch IS NOT NULL THEN ARRAY[of_batch] END, rank,
           poss[array_position(ranks, rank)]
      FROM packed, line;
END $$;

-- Lease these jobs, which the caller has locked and which are plain but for their batches: as a chunk where jobs of one
-- batch stand together.  Where many batches take turns, rows are cheaper than so many chunks.
CREATE FUNCTION lease_members(t terms, of_queue text, places tid[], until bigint, who text) RETURNS SETOF leased
LANGUAGE plpgsql AS $$
DECLARE
    r record;
    fences bigint[];
BEGIN
    FOR r IN
        SELECT run.*, b.born, count(*) OVER () AS runs
          FROM (SELECT batch, array_agg(place) AS places, count(*) AS n, min(seq) AS since, max(seq) AS newest,
                       min(nth) AS first
                  FROM (SELECT ctid AS place, batch, seq, row_number() OVER (ORDER BY rank, pos) AS nth,
                               row_number() OVER (PARTITION BY batch ORDER BY rank, pos) AS nth_of_batch
                          FROM ready WHERE ctid = ANY (places)) AS line
                 GROUP BY batch, nth - nth_of_batch) AS run
          LEFT JOIN batch AS b ON b.id = run.batch
         ORDER BY run.first
    LOOP
        IF r.runs * 4 > cardinality(places) THEN
            fences := lease_rows(t, places, until, who);
            RETURN QUERY SELECT * FROM tell_rows(of_queue, fences);
            RETURN;
        ELSIF r.n = 1 OR r.born BETWEEN r.since AND r.newest THEN
            fences := lease_rows(t, r.places, until, who);
            RETURN QUERY SELECT * FROM tell_rows(of_queue, fences);
        ELSE
            RETURN QUERY SELECT * FROM lease_chunk(
                t, of_queue, r.places, until, who, r.batch, CASE WHEN r.born < r.since THEN r.born END);
        END IF;
    END LOOP;
END $$;

-- Lock the next jobs of a queue.
--
-- (from_rank, from_pos) is a floor: what stands between the front and there has been taken, as far as the client
-- knows, so that the claim need not walk over index entries of rows that are gone and not yet vacuumed.  Higher
-- priorities and the front are looked at all the same.  Whoever comes back short looks again without a floor.
CREATE FUNCTION lock_line(of_queue text, want integer, from_rank smallint, from_pos bigint) RETURNS tid[]
LANGUAGE plpgsql AS $$
DECLARE
    places tid[] := '{}';
BEGIN
    IF from_pos IS NOT NULL THEN
        places := ARRAY(SELECT ctid FROM ready WHERE queue = of_queue AND (rank, pos) < (from_rank, 1::bigint)
                         ORDER BY rank, pos LIMIT want FOR UPDATE SKIP LOCKED);
        places := places || ARRAY(
            SELECT ctid FROM ready WHERE queue = of_queue AND (rank, pos) >= (from_rank, from_pos)
             ORDER BY rank, pos LIMIT want - cardinality(places) FOR UPDATE SKIP LOCKED);
    END IF;
    IF cardinality(places) < want THEN
        places := ARRAY(SELECT ctid FROM ready WHERE queue = of_queue
                         ORDER BY rank, pos LIMIT want FOR UPDATE SKIP LOCKED);
    END IF;
    RETURN places;
END $$;

-- Lease the next jobs of a queue (T2), at most as many as a chunk can have.
CREATE FUNCTION lease_some(
    t terms, of_queue text, want integer, until bigint, who text, from_rank smallint, from_pos bigint
) RETURNS SETOF leased LANGUAGE plpgsql AS $$
DECLARE
    places tid[];
    piece tid[];
    fences bigint[];
    claim record;
    its_birth bigint;
    due boolean;
    paused boolean;
    singly boolean;
BEGIN
    -- One look for all that is rare: where nobody waits but for one job, statements are what its start waits for.
    SELECT EXISTS (SELECT FROM scheduled WHERE queue = of_queue AND due_us <= t.now_us),
           EXISTS (SELECT FROM rule WHERE kind IN ('pause', 'block') AND scope = 'queue' AND name = of_queue),
           EXISTS (SELECT FROM rule WHERE kind <> 'cap' AND (scope <> 'queue' OR name = of_queue))
               OR EXISTS (SELECT FROM held WHERE queue = of_queue)
               OR EXISTS (SELECT FROM ready WHERE expires_us <= t.now_us)
      INTO due, paused, singly;
    IF due THEN
        PERFORM promote(t, of_queue, 1000);
        singly := singly OR EXISTS (SELECT FROM ready WHERE expires_us <= t.now_us);
    END IF;
    IF paused THEN
        RETURN;  -- all of it stays where it is, however much that may be
    END IF;
    IF singly THEN
        fences := lease_one_by_one(t, of_queue, want, until, who);
        RETURN QUERY SELECT * FROM tell_rows(of_queue, fences);
        RETURN;
    END IF;
    places := lock_line(of_queue, want, from_rank, from_pos);
    IF places = '{}' THEN
        RETURN;
    ELSIF cardinality(places) = 1 THEN
        RETURN NEXT lease_row(t, places[1], until, who);
        RETURN;
    END IF;
    SELECT count(*) > 1 AND bool_and(
               history IS NULL AND chosen IS NULL AND unique_key IS NULL AND limit_key IS NULL AND expires_us IS NULL
               AND stepped IS NULL) AS plain, count(batch) AS batched, sum(octet_length(body)) AS bytes,
           min(batch) AS batch, count(*) = count(batch) AND min(batch) = max(batch) AS one_batch, min(seq) AS since
      INTO claim FROM ready WHERE ctid = ANY (places);
    IF NOT claim.plain OR (claim.batched > 0 AND claim.bytes >= most_bytes()) THEN
        fences := lease_rows(t, places, until, who);
        RETURN QUERY SELECT * FROM tell_rows(of_queue, fences);
    ELSIF claim.batched > 0 THEN
        IF claim.one_batch THEN
            SELECT born INTO its_birth FROM batch WHERE id = claim.batch AND born < claim.since;
            IF FOUND THEN
                RETURN QUERY SELECT * FROM lease_chunk(t, of_queue, places, until, who, claim.batch, its_birth);
                RETURN;
            END IF;
        END IF;
        RETURN QUERY SELECT * FROM lease_members(t, of_queue, places, until, who);
    ELSIF claim.bytes < most_bytes() THEN
        RETURN QUERY SELECT * FROM lease_chunk(t, of_queue, places, until, who, NULL, NULL);
    ELSE
        FOR piece IN
            SELECT array_agg(place) FROM (
                SELECT ctid AS place, sum(octet_length(body)) OVER (ORDER BY rank, pos) / most_bytes() AS n
                  FROM ready WHERE ctid = ANY (places)) AS p
             GROUP BY n ORDER BY n
        LOOP
            RETURN QUERY SELECT * FROM lease_chunk(t, of_queue, piece, until, who, NULL, NULL);
        END LOOP;
    END IF;
END $$;

-- A key that is held only until its job starts.
CREATE FUNCTION free_started_keys(first_fence bigint) RETURNS void LANGUAGE sql AS $$
    DELETE FROM unique_key AS k USING running AS r
     WHERE r.fence >= first_fence AND r.unique_until = 'started' AND k.key = r.unique_key AND k.id = r.id
$$;

-- --- what clients call ----------------------------------------------------------------------

-- Put jobs (T1), in arrays, with facts if not all are plain: about `each`, and whether two of them are `alike` in their ids
-- or unique keys, so that it matters which comes first; or the one `batch` of which all are members, with numbers from
-- `first` on, if that is all there is to say.  Opens a batch before and seals it after that.
-- Gives the numbers, from 1, of those that were not created, each with the id of the job in its place.
CREATE FUNCTION put(
    at bigint, ids text[], tasks text[], queues text[], priorities smallint[], max_crashes smallint[], bodies bytea[],
    facts jsonb, new_token text, new_batch jsonb, seal_it boolean, dead_us bigint, cancelled_us bigint
) RETURNS TABLE (n integer, there text) LANGUAGE plpgsql SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    t terms := (moment(at), dead_us, cancelled_us);
    jobs job[];
    left_out integer[];
BEGIN
    IF new_token IS NOT NULL THEN
        INSERT INTO token VALUES (new_token, t.now_us + 86400000000)
        ON CONFLICT (token) DO UPDATE SET until_us = excluded.until_us WHERE token.until_us <= t.now_us;
        IF NOT FOUND THEN
            RETURN QUERY SELECT i::integer, id FROM unnest(ids) WITH ORDINALITY AS all_ids (id, i);
            RETURN;
        END IF;
    END IF;
    IF new_batch IS NOT NULL THEN
        IF seal_it AND NOT always_looks_anew() AND EXISTS (SELECT FROM batch WHERE id = new_batch->>'id') THEN
            -- What its members have added since this transaction began would not be seen.
            RAISE EXCEPTION USING errcode = '40001', message = 'a batch that is there cannot be sealed above READ COMMITTED';
        END IF;
        PERFORM open_batch(t, new_batch);
    END IF;
    IF facts IS NULL OR facts ? 'batch' THEN
        left_out := add_plain(t, ids, tasks, queues, priorities, max_crashes, bodies, facts->>'batch', (facts->'first')::integer);
        RETURN QUERY SELECT i, ids[i] FROM unnest(left_out) AS i;
    ELSE
        jobs := described(t.now_us, ids, tasks, queues, priorities, max_crashes, bodies, facts->'each');
        IF (facts->'alike')::boolean THEN
            PERFORM lock_batches(ARRAY(SELECT DISTINCT j.batch FROM unnest(jobs) AS j WHERE j.batch IS NOT NULL));
            FOR i IN 1..cardinality(jobs) LOOP
                there := add_job(t, jobs[i], false);
                IF there IS NOT NULL THEN
                    n := i;
                    RETURN NEXT;
                    left_out := left_out || n;
                END IF;
            END LOOP;
        ELSE
            FOR n, there IN
                SELECT i.n, a.there FROM add_jobs(t, jobs) AS a
                  JOIN unnest(ids) WITH ORDINALITY AS i (id, n) ON i.id = a.refused
            LOOP
                RETURN NEXT;
                left_out := left_out || n;
            END LOOP;
        END IF;
    END IF;
    IF EXISTS (SELECT FROM rule WHERE kind = 'cap') THEN
        PERFORM check_room(ARRAY(SELECT q FROM unnest(queues) WITH ORDINALITY AS added (q, i) WHERE i <> ALL (coalesce(left_out, '{}'))));
    END IF;
    IF new_batch IS NOT NULL AND seal_it THEN
        PERFORM seal_batch(t, new_batch->>'id');
    END IF;
END $$;

-- Put one plain job: what put() does, without its sets, in two thirds of the time.  Says whether it was created.
CREATE FUNCTION put_one(
    at bigint, new_id text, of_task text, of_queue text, of_priority smallint, most_crashes smallint, new_body bytea,
    new_token text
) RETURNS boolean LANGUAGE plpgsql SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    now_us bigint := moment(at);
    place bigint;
    taken boolean;
    capped boolean;
BEGIN
    IF new_token IS NOT NULL THEN
        INSERT INTO token VALUES (new_token, now_us + 86400000000)
        ON CONFLICT (token) DO UPDATE SET until_us = excluded.until_us WHERE token.until_us <= now_us;
        IF NOT FOUND THEN
            RETURN false;
        END IF;
    END IF;
    place := nextval('back');
    INSERT INTO ready (seq, pos, put_us, due_us, rank, max_crashes, attempts, failures, crashes, queue, id, task, body, member)
    VALUES (place, place, now_us, now_us, -of_priority, most_crashes, 0, 0, 0, of_queue, new_id, of_task, new_body, 0)
        ON CONFLICT (id) DO NOTHING;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    -- See used_elsewhere() for why this comes after the entry in line.
    SELECT EXISTS (SELECT FROM running   WHERE id = new_id)
        OR EXISTS (SELECT FROM scheduled WHERE id = new_id)
        OR EXISTS (SELECT FROM held      WHERE id = new_id)
        OR EXISTS (SELECT FROM archive   WHERE id = new_id)
        OR EXISTS (SELECT FROM known     WHERE id = new_id AND (until_us IS NULL OR until_us > now_us))
        OR EXISTS (SELECT FROM chunk     WHERE last_id >= new_id AND first_id <= new_id AND member(chunk, new_id) > 0),
           EXISTS (SELECT FROM rule      WHERE kind = 'cap')
      INTO taken, capped;
    IF taken THEN
        DELETE FROM ready WHERE id = new_id;
        RETURN false;
    END IF;
    INSERT INTO tally VALUES (of_queue, 1, 0);
    IF capped THEN
        PERFORM check_room(ARRAY[of_queue]);
    END IF;
    RETURN true;
END $$;

CREATE FUNCTION seal(at bigint, of_batch text, dead_us bigint, cancelled_us bigint) RETURNS boolean
LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT seal_batch((moment(at), dead_us, cancelled_us)::terms, of_batch)
$$;

-- Does a limit keep something back in one of these queues?  Whose end makes room may be elsewhere, and nobody tells of it.
CREATE FUNCTION kept_back(queues text[]) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (
        SELECT FROM unnest(queues) AS of (queue), rule AS r
         WHERE r.kind = 'limit'
           AND (EXISTS (SELECT FROM held h WHERE h.queue = of.queue AND h.hold_scope = r.scope AND h.hold_name = r.name)
                OR r.scope = 'queue' AND r.name = of.queue AND EXISTS (SELECT FROM ready y WHERE y.queue = of.queue)))
$$;

-- End leases and take the next jobs.  Wants are queues, numbers and floors, in arrays; `most` bounds them all.  Gives what
-- was lost, the leases, and in the end a row of nothing where a limit keeps something back.
CREATE FUNCTION exchange(
    at bigint, fences bigint[], ids text[], outcomes text[], queues text[], wants integer[], from_ranks smallint[],
    from_places bigint[], most integer, span_us bigint, who text, dead_us bigint, cancelled_us bigint
) RETURNS SETOF leased LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    t terms := (moment(at), dead_us, cancelled_us);
    answer leased;
    want integer;
    step integer;
    first_fence bigint;  -- of those that have a row
BEGIN
    answer.now_us := t.now_us;
    IF fences IS NOT NULL THEN
        answer.lost := settle_all(t, fences, ids, outcomes, true);
    END IF;
    RETURN NEXT answer;
    FOR n IN 1..coalesce(cardinality(queues), 0) LOOP
        want := least(wants[n], most);
        WHILE want > 0 LOOP
            step := least(want, 1023);
            FOR answer IN SELECT * FROM lease_some(t, queues[n], step, t.now_us + span_us, who, from_ranks[n], from_places[n]) LOOP
                RETURN NEXT answer;
                first_fence := least(first_fence, answer.fences[1]);
                want := want - cardinality(answer.ids);
                most := most - cardinality(answer.ids);
                step := step - cardinality(answer.ids);
            END LOOP;
            EXIT WHEN step > 0;
        END LOOP;
    END LOOP;
    IF first_fence IS NOT NULL AND EXISTS (SELECT FROM unique_key) THEN
        PERFORM free_started_keys(first_fence);
    END IF;
    IF most > 0 AND EXISTS (SELECT FROM rule WHERE kind = 'limit') AND kept_back(queues) THEN
        answer := NULL;
        RETURN NEXT answer;
    END IF;
END $$;

-- Make each live lease end a span from now (T3).  Gives the numbers, from 1, of those that live, with their new
-- ends and whether they should stop.
CREATE FUNCTION renew(at bigint, fences bigint[], ids text[], span_us bigint)
RETURNS TABLE (n integer, new_end bigint, asked boolean)
LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    now_us bigint := moment(at);
BEGIN
    RETURN QUERY SELECT place, now_us + span_us, false FROM renew_members(now_us, fences, ids, now_us + span_us) AS place;
    RETURN QUERY
        UPDATE running AS r SET until_us = now_us + span_us
          FROM (SELECT * FROM unnest(fences, ids) WITH ORDINALITY AS l (fence, id, place) ORDER BY l.fence) AS l
         WHERE r.fence = l.fence AND r.id = l.id AND r.until_us > now_us
        RETURNING l.place::integer, r.until_us, coalesce(r.cancel, false);
END $$;

-- Record progress and log lines of running jobs; each note is {fence, id, progress, lines}.
CREATE FUNCTION note(notes jsonb) RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    d jsonb;
    lines text[];
BEGIN
    PERFORM break_out_leases(array_agg((n->>'fence')::bigint), array_agg(n->>'id')) FROM jsonb_array_elements(notes) AS n;
    FOR d IN SELECT n FROM jsonb_array_elements(notes) WITH ORDINALITY AS a (n, i) ORDER BY (n->>'fence')::bigint, i LOOP
        SELECT coalesce(log, '{}') || ARRAY(SELECT jsonb_array_elements_text(d->'lines')) INTO lines
          FROM running WHERE fence = (d->>'fence')::bigint AND id = d->>'id' FOR UPDATE;
        CONTINUE WHEN NOT FOUND;
        UPDATE running SET progress = coalesce(d->>'progress', progress),
                           log = nullif(lines[greatest(1, cardinality(lines) - 99):], '{}')
         WHERE fence = (d->>'fence')::bigint;
    END LOOP;
END $$;

-- Do what time asks for; each kind of work at most `most` times.
CREATE FUNCTION sweep(at bigint, most integer, dead_us bigint, cancelled_us bigint, dead_max bigint)
RETURNS TABLE (promoted integer, reaped integer, expired integer, removed integer, now_us bigint, next_us bigint,
               schedules_due boolean)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    t terms := (moment(at), dead_us, cancelled_us);
    moved integer;
    q text;
    b text;
BEGIN
    promoted := 0;
    FOR q IN SELECT DISTINCT queue FROM scheduled WHERE due_us <= t.now_us LOOP
        moved := promote(t, q, most - promoted);
        IF moved > 0 THEN
            PERFORM wake(q);
        END IF;
        promoted := promoted + moved;
    END LOOP;
    PERFORM lock_ending(t);
    reaped := reap(t, most);
    expired := expire_some(t, most);
    removed := forget_jobs(t, most, dead_max);
    DELETE FROM known WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM known WHERE until_us <= t.now_us LIMIT most FOR UPDATE SKIP LOCKED));
    DELETE FROM token WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM token WHERE until_us <= t.now_us LIMIT most FOR UPDATE SKIP LOCKED));
    FOR b IN
        SELECT id FROM batch WHERE keep_us <= t.now_us OR (NOT sealed AND open_us <= t.now_us)
         LIMIT most FOR UPDATE SKIP LOCKED
    LOOP
        PERFORM remove_batch(t, b);
    END LOOP;
    IF random() < 0.01 THEN  -- about once in a minute, whatever the size of the fleet
        PERFORM finish_overlooked(t);
    END IF;
    PERFORM add_up();
    PERFORM announce();
    now_us := t.now_us;
    next_us := least(
        (SELECT min(s.due_us) FROM scheduled s WHERE s.due_us > t.now_us),
        (SELECT min(r.until_us) FROM running r WHERE r.until_us > t.now_us),
        (SELECT min(c.until_us) FROM chunk c WHERE c.until_us > t.now_us),
        (SELECT min(s.next_us) FROM schedule s WHERE NOT s.paused AND s.next_us > t.now_us));
    schedules_due := EXISTS (SELECT FROM schedule s WHERE NOT s.paused AND s.next_us <= t.now_us);
    RETURN NEXT;
END $$;

-- Whoever ends the last member of a batch finishes it, so nothing should be found here.  But if ever one is overlooked, it
-- calls back late and not never.
CREATE FUNCTION finish_overlooked(t terms) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    name text;
    b batch;
BEGIN
    FOR name IN
        SELECT o.id FROM batch AS o LEFT JOIN batch_tally AS y ON y.batch = o.id
         WHERE o.sealed AND o.finished_us IS NULL
         GROUP BY o.id HAVING coalesce(sum(y.n), 0) >= o.live
    LOOP
        PERFORM FROM batch WHERE id = name FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;  -- somebody is at it
        PERFORM add_up_batch(name);
        SELECT * INTO b FROM batch WHERE id = name;
        IF b.sealed AND b.live = 0 AND b.finished_us IS NULL THEN
            RAISE WARNING 'all members of batch % had ended and nobody finished it: tell the authors of skep', name;
            PERFORM finish_batch(t, b);
        END IF;
    END LOOP;
END $$;

-- Lock the batches of jobs that a sweep may end.
CREATE FUNCTION lock_ending(t terms) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    names text[] := ARRAY(
        SELECT batch FROM running
         WHERE until_us <= t.now_us AND batch IS NOT NULL AND (cancel OR crashes + 1 >= max_crashes)
        UNION
        SELECT batch FROM chunk WHERE until_us <= t.now_us AND batch IS NOT NULL AND 1 = ANY (max_crashes)
        UNION
        SELECT batch FROM waiting WHERE expires_us <= t.now_us AND batch IS NOT NULL);
BEGIN
    IF cardinality(names) > 1 THEN
        PERFORM FROM migration WHERE number = 1 FOR UPDATE;  -- which reap() takes as well
        PERFORM lock_batches(names);
    END IF;
END $$;

-- Forget what is past its keeping, and the oldest of shelves that hold more dead jobs than they may.
CREATE FUNCTION forget_jobs(t terms, most integer, dead_max bigint) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    old bigint[] := ARRAY(SELECT seq FROM archive WHERE keep_us <= t.now_us ORDER BY keep_us LIMIT most);
    s record;
    n integer;
BEGIN
    IF dead_max IS NOT NULL THEN
        FOR s IN SELECT queue, count(*) - dead_max AS over FROM archive WHERE state = 'dead'
                  GROUP BY queue HAVING count(*) > dead_max LOOP
            old := old || ARRAY(SELECT seq FROM archive WHERE queue = s.queue AND state = 'dead'  -- by archive_shelf
                                 ORDER BY ended_us, seq LIMIT least(most, s.over));
        END LOOP;
    END IF;
    IF old = '{}' THEN
        RETURN 0;
    END IF;
    WITH gone AS (DELETE FROM archive WHERE seq = ANY (old) RETURNING queue),
    counted AS (INSERT INTO tally SELECT queue, 0, count(*) FROM gone GROUP BY queue)
    SELECT count(*) INTO n FROM gone;
    RETURN n;
END $$;

-- Make one row of the many that a queue has got in the tally.  Whoever else is at it is left alone; where there are
-- few there is nothing to do, so that a sweep of an idle queue writes nothing.
CREATE FUNCTION add_up() RETURNS void LANGUAGE sql AS $$
    WITH gone AS (
        DELETE FROM tally WHERE ctid = ANY (ARRAY(
            SELECT ctid FROM tally WHERE queue IN (SELECT queue FROM tally GROUP BY queue HAVING count(*) > 20)
             LIMIT 10000 FOR UPDATE SKIP LOCKED))
        RETURNING *)
    INSERT INTO tally SELECT queue, sum(put), sum(deleted) FROM gone GROUP BY queue
$$;

-- --- an operator's hand ---------------------------------------------------------------------

-- End waiting jobs at once and ask for running ones to be stopped (T9); gives the numbers of those that were there.
CREATE FUNCTION cancel(at bigint, ids text[], dead_us bigint, cancelled_us bigint) RETURNS SETOF integer
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t terms := (moment(at), dead_us, cancelled_us);
    j job;
BEGIN
    IF cardinality(ids) > 1 THEN
        PERFORM FROM chunk WHERE chunk.ids && cancel.ids ORDER BY number FOR UPDATE;
        PERFORM FROM running WHERE id = ANY (ids) ORDER BY fence FOR UPDATE;
        PERFORM lock_batches(ARRAY(SELECT DISTINCT batch FROM waiting WHERE id = ANY (ids) AND batch IS NOT NULL));
    END IF;
    FOR n IN 1..cardinality(ids) LOOP
        FOR turn IN 1..2 LOOP  -- while we looked it may have moved to where we had looked before
            j := unplace(ids[n]);
            IF j.id IS NOT NULL THEN
                PERFORM end_job(t, j, 'cancelled', t.cancelled_us, 'cancelled');
                RETURN NEXT n;
                EXIT;
            END IF;
            PERFORM break_out_job(ids[n]);
            SELECT * INTO j FROM running WHERE id = ids[n] FOR UPDATE;
            IF FOUND THEN
                IF j.cancel IS NOT TRUE THEN
                    j.holder := NULL;
                    UPDATE running SET cancel = true, history = told(j, t.now_us, 'cancel-requested') WHERE fence = j.fence;
                END IF;
                RETURN NEXT n;
                EXIT;
            END IF;
        END LOOP;
    END LOOP;
END $$;

-- Make a waiting job due at another time; false if it is not waiting.
CREATE FUNCTION reschedule(at bigint, job_id text, new_due bigint) RETURNS boolean
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t terms := (moment(at), 0, 0);
    j job := unplace(job_id);
BEGIN
    IF j.id IS NULL THEN
        j := unplace(job_id);  -- while we looked it may have moved to where we had looked before
    END IF;
    IF j.id IS NULL THEN
        RETURN false;
    END IF;
    j.history := told(j, t.now_us, 'rescheduled');
    j.error := NULL;
    j.due_us := new_due;
    j.pos := nextval('back');
    PERFORM place(t, j);
    PERFORM wake(j.queue);
    RETURN true;
END $$;

-- Give dead jobs a new life at the back of their queue (T13); gives the numbers of those.
CREATE FUNCTION replay(at bigint, ids text[]) RETURNS SETOF integer LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t terms := (moment(at), 0, 0);
    j job;
BEGIN
    FOR n IN 1..cardinality(ids) LOOP
        SELECT * INTO j FROM archive WHERE id = ids[n] AND state = 'dead' FOR UPDATE;
        CONTINUE WHEN NOT FOUND;
        IF j.unique_key IS NOT NULL THEN
            INSERT INTO unique_key VALUES (j.unique_key, j.id) ON CONFLICT DO NOTHING;
            CONTINUE WHEN NOT FOUND;
        END IF;
        DELETE FROM archive WHERE seq = j.seq;
        j.history := told(j, t.now_us, 'replayed', 'was dead: ' || j.reason);
        j.attempts := 0;
        j.failures := 0;
        j.crashes := 0;
        j.expires_us := NULL;
        j.started_us := NULL;
        j.error := NULL;
        j.progress := NULL;
        j.log := NULL;
        j.state := NULL;
        j.ended_us := NULL;
        j.keep_us := NULL;
        j.reason := NULL;
        j.result := NULL;
        j.stepped := true;
        j.due_us := t.now_us;
        j.pos := nextval('back');
        PERFORM place(t, j);
        PERFORM wake(j.queue);
        RETURN NEXT n;
    END LOOP;
END $$;

-- Forget ended jobs (T14); gives the numbers of those.
CREATE FUNCTION delete(ids text[]) RETURNS SETOF integer LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    q text;
BEGIN
    FOR n IN 1..cardinality(ids) LOOP
        DELETE FROM archive WHERE id = ids[n] RETURNING queue INTO q;
        CONTINUE WHEN NOT FOUND;
        INSERT INTO tally VALUES (q, 0, 1);
        RETURN NEXT n;
    END LOOP;
END $$;

-- Forget a queue; gives how many jobs went.
CREATE FUNCTION drop_queue(at bigint, of_queue text, dead_us bigint, cancelled_us bigint) RETURNS integer
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t terms := (moment(at), dead_us, cancelled_us);
    job_id text;
    j job;
    gone integer := 0;
    archived integer;
BEGIN
    FOR job_id IN SELECT id FROM waiting WHERE queue = of_queue ORDER BY seq LOOP
        j := unplace(job_id);
        IF j.id IS NOT NULL THEN
            PERFORM end_job(t, j, 'cancelled', NULL);
            gone := gone + 1;
        END IF;
    END LOOP;
    WITH them AS (DELETE FROM archive WHERE queue = of_queue RETURNING 1) SELECT count(*) INTO archived FROM them;
    INSERT INTO tally VALUES (of_queue, 0, archived);
    IF NOT EXISTS (SELECT FROM live WHERE queue = of_queue) AND NOT EXISTS (SELECT FROM chunk WHERE queue = of_queue) THEN
        -- What somebody has put since then is still counted.
        WITH forgotten AS (DELETE FROM tally WHERE queue = of_queue RETURNING *)
        INSERT INTO tally SELECT of_queue, sum(put) - sum(deleted), 0 FROM forgotten HAVING sum(put) <> sum(deleted);
    END IF;
    RETURN gone + archived;
END $$;

CREATE FUNCTION add_rule(of_kind text, of_scope text, of_name text, of_n integer) RETURNS boolean
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    changed boolean;
BEGIN
    INSERT INTO rule VALUES (of_kind, of_scope, of_name, of_n)
    ON CONFLICT (kind, scope, name) DO UPDATE SET n = excluded.n WHERE rule.n <> excluded.n;
    changed := FOUND;
    PERFORM wake('');
    RETURN changed;
END $$;

CREATE FUNCTION remove_rule(of_kind text, of_scope text, of_name text) RETURNS boolean
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    changed boolean;
BEGIN
    DELETE FROM rule WHERE kind = of_kind AND scope = of_scope AND name = of_name;
    changed := FOUND;
    PERFORM wake('');
    RETURN changed;
END $$;

-- Forget a batch and its waiting members; running ones finish.
CREATE FUNCTION delete_batch(at bigint, of_batch text, dead_us bigint, cancelled_us bigint) RETURNS boolean
LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    t terms := (moment(at), dead_us, cancelled_us);
    its_birth bigint;
BEGIN
    SELECT born INTO its_birth FROM batch WHERE id = of_batch FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    WITH gone AS (
        DELETE FROM ready WHERE batch = of_batch AND seq > its_birth AND stepped IS NOT TRUE RETURNING queue, id, chosen, unique_key),
    gone_later AS (
        DELETE FROM scheduled WHERE batch = of_batch AND seq > its_birth AND stepped IS NOT TRUE RETURNING queue, id, chosen, unique_key),
    gone_held AS (
        DELETE FROM held WHERE batch = of_batch AND seq > its_birth AND stepped IS NOT TRUE RETURNING queue, id, chosen, unique_key),
    them AS (
        SELECT * FROM gone UNION ALL SELECT * FROM gone_later UNION ALL SELECT * FROM gone_held),
    counted AS (
        INSERT INTO tally SELECT queue, 0, count(*) FROM them GROUP BY queue),
    freed AS (
        DELETE FROM unique_key AS k USING them WHERE k.key = them.unique_key AND k.id = them.id)
    INSERT INTO known SELECT id, t.now_us + 86400000000 FROM them WHERE chosen
    ON CONFLICT (id) DO UPDATE SET until_us = excluded.until_us;
    PERFORM remove_batch(t, of_batch);
    RETURN true;
END $$;

-- Settle one instant of a schedule (C1).
CREATE FUNCTION fire(at bigint, of_name text, instant bigint, draft jsonb, new_next bigint) RETURNS boolean
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t terms := (moment(at), 0, 0);
BEGIN
    UPDATE schedule SET last_us = next_us, next_us = new_next
     WHERE name = of_name AND next_us = instant AND next_us <= t.now_us AND NOT paused;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF draft IS NOT NULL THEN
        PERFORM add_job(t, drafted(draft, t.now_us), true);
        PERFORM wake(draft->>'queue');
    END IF;
    RETURN true;
END $$;

-- --- those who look -------------------------------------------------------------------------

-- Members of a batch with numbers after this one, in their order: those that have ended, live jobs and live nested batches.
CREATE FUNCTION members(of_batch text, after integer, most integer)
RETURNS TABLE (member integer, id text, state text, result bytea, reason text)
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    its_birth bigint := (SELECT b.born FROM batch AS b WHERE b.id = of_batch);
    enough integer := 0;  -- up to this number there are as many as are wanted, if there are so many
    n integer := 0;
    e record;
BEGIN
    FOR e IN SELECT last, ended.n FROM ended WHERE batch = of_batch AND first > after ORDER BY first LOOP
        enough := greatest(enough, e.last);
        n := n + e.n;
        EXIT WHEN n >= most;
    END LOOP;
    IF n < most THEN
        enough := 2147483647;
    END IF;
    RETURN QUERY
        SELECT m.member, m.id, m.state, m.result, m.reason FROM (
            SELECT DISTINCT ON (m.member, m.id) m.* FROM (
                SELECT p.number AS member, p.id, ended.state, p.result, ended.reason, 1 AS rank
                  FROM ended, unnest(numbers, ids, results) AS p (number, id, result)
                 WHERE batch = of_batch AND first <= enough AND last > after AND p.number > after AND p.number <= enough
                UNION ALL
                SELECT l.member, l.id, CASE WHEN l.running THEN 'running' ELSE 'ready' END, NULL, NULL, 0
                  FROM live AS l
                 WHERE l.batch = of_batch AND l.seq > its_birth AND l.stepped IS NOT TRUE AND l.member > after
                UNION ALL
                SELECT m.member, m.id, 'running', NULL, NULL, 0 FROM chunk AS c, members_of(c) AS m
                 WHERE c.batch = of_batch AND c.born = its_birth AND m.member > after
                UNION ALL
                SELECT b.member, b.id, 'running', NULL, NULL, 0 FROM batch AS b
                 WHERE b.parent = of_batch AND b.born > its_birth AND b.finished_us IS NULL AND b.member > after) AS m
             ORDER BY m.member, m.id, m.rank) AS m
         WHERE its_birth IS NOT NULL
         ORDER BY m.member, m.id LIMIT most;
END $$;

-- The queues that there are or were, one step in the index for each.
CREATE FUNCTION queue_names() RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    names text[] := '{}';
    name text := (SELECT min(queue) FROM tally);
BEGIN
    WHILE name IS NOT NULL LOOP
        names := names || name;
        SELECT min(queue) INTO name FROM tally WHERE queue > name;
    END LOOP;
    RETURN names;
END $$;

-- The jobs after a place in the order of puts for which everything that is given is true.  From each queue, state and
-- place not more than `most` are read, so that a page costs the same wherever it is; what is filtered out is walked over.
CREATE FUNCTION find(
    at bigint, after bigint, of_queue text, of_task text, of_batch text, of_state text, of_reason text,
    is_scheduled boolean, most integer
) RETURNS SETOF every_job LANGUAGE plpgsql STABLE SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    now_us bigint := moment(at);
    waits boolean := coalesce(of_state = 'ready', true) AND of_reason IS NULL;
    runs boolean := coalesce(of_state = 'running', true) AND of_reason IS NULL AND is_scheduled IS NOT TRUE;
    queues text[] := CASE WHEN of_queue IS NULL THEN queue_names() ELSE ARRAY[of_queue] END;
    ends text[] := CASE WHEN is_scheduled THEN '{}' WHEN of_state IS NULL THEN '{done,dead,cancelled}' ELSE ARRAY[of_state] END;
BEGIN
    IF of_batch IS NOT NULL THEN
        RETURN QUERY
            SELECT * FROM every_job AS j
             WHERE j.batch = of_batch AND j.seq > after AND coalesce(j.queue = of_queue, true)
               AND coalesce(j.task = of_task, true) AND coalesce(j.stands = of_state, true)
               AND (of_reason IS NULL OR j.reason = of_reason)
               AND coalesce((j.stands = 'ready' AND j.due_us > now_us) = is_scheduled, true)
             ORDER BY j.seq LIMIT most;
        RETURN;
    END IF;
    RETURN QUERY
        SELECT found.* FROM (
            SELECT 'ready', j.* FROM unnest(queues) AS q, LATERAL (
                SELECT * FROM ready AS r
                 WHERE r.queue = q AND r.seq > after AND coalesce(r.task = of_task, true)
                   AND coalesce((r.due_us > now_us) = is_scheduled, true)
                 ORDER BY r.seq LIMIT most) AS j WHERE waits
            UNION ALL
            SELECT 'ready', j.* FROM unnest(queues) AS q, LATERAL (
                SELECT * FROM scheduled AS s
                 WHERE s.queue = q AND s.seq > after AND coalesce(s.task = of_task, true)
                   AND coalesce((s.due_us > now_us) = is_scheduled, true)
                 ORDER BY s.seq LIMIT most) AS j WHERE waits
            UNION ALL
            SELECT 'ready', j.* FROM unnest(queues) AS q, LATERAL (
                SELECT * FROM held AS h
                 WHERE h.queue = q AND h.seq > after AND coalesce(h.task = of_task, true)
                   AND coalesce((h.due_us > now_us) = is_scheduled, true)
                 ORDER BY h.seq LIMIT most) AS j WHERE waits
            UNION ALL
            SELECT 'running', r.* FROM running AS r
             WHERE runs AND r.queue = ANY (queues) AND r.seq > after AND coalesce(r.task = of_task, true)
            UNION ALL
            SELECT 'running', m.* FROM chunk AS c, members_of(c) AS m
             WHERE runs AND c.queue = ANY (queues) AND m.seq > after AND coalesce(m.task = of_task, true)
            UNION ALL
            SELECT j.state, j.* FROM unnest(queues) AS q, unnest(ends) AS e, LATERAL (
                SELECT * FROM archive AS a
                 WHERE a.queue = q AND a.state = e AND a.seq > after AND coalesce(a.task = of_task, true)
                   AND (of_reason IS NULL OR a.reason = of_reason)
                 ORDER BY a.seq LIMIT most) AS j) AS found
         ORDER BY found.seq LIMIT most;
END $$;
