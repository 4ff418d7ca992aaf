-- Jobs come in.

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
    j.seq := nextval('back');
    j.pos := j.seq;
    RETURN j;
END $$;

-- Jobs as a producer describes them, in arrays and extras, with their places and the times that follow from now.
CREATE FUNCTION described(
    now_us bigint, ids text[], tasks text[], queues text[], priorities smallint[], max_crashes smallint[], bodies bytea[],
    extras jsonb
) RETURNS job[] LANGUAGE plpgsql AS $$
BEGIN
    RETURN ARRAY(
        SELECT ROW(
            f.place, f.place, now_us, coalesce(f.due_us, now_us + coalesce(f.delay_us, 0)),
            least(f.expires_us, now_us + f.expires_in_us), NULL, NULL, -f.priority, f.most, 0, 0, 0, f.queue, f.id, f.task,
            f.body, nullif(f.chosen, false), f.unique, CASE WHEN f.unique IS NOT NULL THEN coalesce(f.unique_until, 'ended') END,
            f.key, f.batch, coalesce(f.member, 0), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
            NULL, NULL, NULL, NULL, NULL)::job
          FROM (SELECT nextval('back') AS place, f.id, f.task, f.queue, f.priority, f.most, f.body, f.due_us, f.delay_us, f.expires_us,
                       f.expires_in_us, f.chosen, f.unique, f.unique_until, f.key, f.batch, f.member FROM ROWS FROM (
            unnest(ids, tasks, queues, priorities, max_crashes, bodies),
            jsonb_to_recordset(extras) AS (
                due_us bigint, delay_us bigint, expires_us bigint, expires_in_us bigint, chosen boolean, "unique" text,
                unique_until text, key text, batch text, member integer)
            ) AS f (id, task, queue, priority, most, body, due_us, delay_us, expires_us, expires_in_us, chosen, "unique",
                    unique_until, key, batch, member)) AS f);
END $$;

-- Those of these ids that are taken elsewhere than in line: by a job that is there, or by one that was chosen and ended
-- less than a day ago; each once, also where a job that was chosen is there and its id is known.
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
    RETURN (SELECT array_agg(DISTINCT id) FROM (
        SELECT id FROM running   WHERE id = ANY (names) UNION ALL
        SELECT id FROM scheduled WHERE id = ANY (names) UNION ALL
        SELECT id FROM held      WHERE id = ANY (names) UNION ALL
        SELECT id FROM archive   WHERE id = ANY (names) UNION ALL
        SELECT id FROM known     WHERE id = ANY (names) AND (until_us IS NULL OR until_us > now_us) UNION ALL
        SELECT m.id FROM chunk, unnest(chunk.ids) WITH ORDINALITY AS m (id, n)
         WHERE last_id >= low AND first_id <= high AND m.id IN (SELECT unnest(names))
           AND (gone IS NULL OR get_bit(gone, m.n::integer - 1) = 0)) AS taken);
END $$;

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
    b record;
BEGIN
    IF in_callers_transaction() AND NOT emitted THEN
        SELECT id, sealed, finished_us INTO b FROM batch WHERE id = of_batch FOR KEY SHARE;
    ELSE
        SELECT id, sealed, finished_us INTO b FROM batch WHERE id = of_batch FOR NO KEY UPDATE;
    END IF;
    IF NOT emitted AND b.id IS NULL THEN
        RAISE EXCEPTION USING errcode = 'PP001', message = 'unknown batch', detail = of_batch;
    ELSIF NOT emitted AND b.sealed THEN
        RAISE EXCEPTION USING errcode = 'PP002', message = 'sealed batch', detail = of_batch;
    END IF;
    RETURN b.id IS NOT NULL AND b.finished_us IS NULL;
END $$;

-- So many of these jobs, which stand in line since `since`, are members of a batch; what is emitted is plain where that is over.
CREATE FUNCTION join_batch(of_batch text, n bigint, since bigint, ids text[], emitted boolean) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    its_born bigint;
BEGIN
    IF NOT in_callers_transaction() THEN
        UPDATE batch SET live = count_of(live::numeric + n), newest = ids[cardinality(ids)]
         WHERE id = of_batch AND (emitted OR NOT sealed) AND finished_us IS NULL RETURNING born INTO its_born;
    END IF;
    IF its_born IS NULL THEN
        IF NOT joins(of_batch, emitted) THEN  -- or it says what is wrong
            UPDATE ready SET stepped = true WHERE id = ANY (ids);
            UPDATE scheduled SET stepped = true WHERE id = ANY (ids);
            RETURN;
        END IF;
        PERFORM count_in(of_batch, n);
        SELECT born INTO its_born FROM batch WHERE id = of_batch;
    END IF;
    IF its_born > since THEN  -- it was removed, and there is a new one of that name, since we began
        UPDATE ready SET seq = nextval('back') WHERE id = ANY (ids);
        UPDATE scheduled SET seq = nextval('back') WHERE id = ANY (ids);
    END IF;
END $$;

-- Take a unique key for a job; gives the id of the job that holds it, if that is another one.
CREATE FUNCTION take_key(of_key text, job_id text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    holder text;
BEGIN
    LOOP
        INSERT INTO unique_key (key, id) VALUES (of_key, job_id) ON CONFLICT DO NOTHING;
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
    -- (An entry beside a job that is there would keep it from standing in line again, until the caller's commit.)
    IF in_callers_transaction() AND used_elsewhere(ARRAY[j.id], t.now_us) <> '{}' OR enter(ARRAY[j.id], t.now_us) <> '{}' THEN
        RETURN j.id;
    END IF;
    IF j.unique_key IS NOT NULL THEN
        holder := take_key(j.unique_key, j.id);
        IF holder IS NOT NULL THEN
            RETURN holder;
        END IF;
    END IF;
    IF j.chosen THEN
        INSERT INTO known (id, until_us) VALUES (j.id, NULL) ON CONFLICT (id) DO UPDATE SET until_us = NULL;
    END IF;
    IF j.batch IS NOT NULL THEN
        IF joins(j.batch, emitted) THEN
            PERFORM count_in(j.batch, 1);
        ELSE
            j.stepped := true;
        END IF;
    END IF;
    j.seq := nextval('back');
    PERFORM place(t, j);
    INSERT INTO tally (queue, put, deleted) VALUES (j.queue, 1, 0);
    RETURN NULL;
END $$;

-- Put jobs of any kind, no two of which have the same id or the same unique key: what add_job() does, set by set.
-- Those that are due stand in line before the rest is looked at: that is their entry.  Gives those that were not
-- created, each with the id of the job in its place.
CREATE FUNCTION add_jobs(t terms, jobs job[], emitted boolean) RETURNS TABLE (refused text, there text) LANGUAGE plpgsql AS $$
DECLARE
    kinds record;
    made text[] := '{}';
    taken text[];
    later text[];
    b record;
BEGIN
    SELECT count(j.unique_key) > 0 AS keyed, bool_or(j.chosen) AS chosen, count(j.batch) > 0 AS batched,
           bool_or(j.due_us > t.now_us) AS later, bool_or(j.due_us <= t.now_us) AS now INTO kinds FROM unnest(jobs) AS j;
    IF kinds.batched AND NOT in_callers_transaction() THEN
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
            INSERT INTO ready (NEW_COLUMNS)
            SELECT NEW_COLUMNS FROM unnest(jobs) WHERE due_us <= t.now_us ON CONFLICT (id) DO NOTHING RETURNING id)
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
        DELETE FROM ready WHERE id = ANY (ARRAY(SELECT unnest(taken) INTERSECT SELECT unnest(made)));
    END IF;
    IF kinds.keyed THEN
        taken := '{}';
        FOR refused, there IN SELECT k.refused, k.there FROM take_keys(jobs) AS k LOOP
            RETURN NEXT;
            taken := taken || refused;
        END LOOP;
        IF taken <> '{}' THEN
            jobs := ARRAY(SELECT j FROM unnest(jobs) AS j WHERE j.id NOT IN (SELECT unnest(taken)));
            DELETE FROM ready WHERE id = ANY (taken);
        END IF;
    END IF;
    IF kinds.chosen THEN
        INSERT INTO known (id, until_us) SELECT id, NULL FROM unnest(jobs) WHERE chosen ON CONFLICT (id) DO UPDATE SET until_us = NULL;
    END IF;
    IF kinds.later THEN
        INSERT INTO scheduled (NEW_COLUMNS)
        SELECT NEW_COLUMNS FROM unnest(jobs) WHERE due_us > t.now_us;
    END IF;
    IF kinds.batched THEN
        FOR b IN SELECT j.batch AS id, count(*) AS n, min(j.seq) AS since, array_agg(j.id) AS ids
                   FROM unnest(jobs) AS j WHERE j.batch IS NOT NULL GROUP BY 1 ORDER BY 1
        LOOP
            PERFORM join_batch(b.id, b.n, b.since, b.ids, emitted);
        END LOOP;
    END IF;
    INSERT INTO tally (queue, put, deleted) SELECT queue, count(*), 0 FROM unnest(jobs) GROUP BY queue;
END $$;

-- Take the unique keys of these jobs, in their order, so that two who take the same ones wait and do not lock each other out.
-- Gives the jobs whose key another one holds, and those others.
CREATE FUNCTION take_keys(jobs job[]) RETURNS TABLE (refused text, there text) LANGUAGE plpgsql AS $$
DECLARE
    missed text[];
BEGIN
    WITH got AS (
        INSERT INTO unique_key (key, id)
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
          FROM (SELECT nextval('back') AS place, id, task, queue, priority, most, body, n
                  FROM unnest(ids, tasks, queues, priorities, max_crashes, bodies) WITH ORDINALITY
                    AS j (id, task, queue, priority, most, body, n)) AS j
            ON CONFLICT (id) DO NOTHING
        RETURNING id, queue, seq),
    counted AS (INSERT INTO tally (queue, put, deleted) SELECT queue, count(*), 0 FROM added GROUP BY queue)
    SELECT array_agg(id), min(seq) INTO made, since FROM added;
    elsewhere := used_elsewhere(made, t.now_us);
    IF of_batch IS NOT NULL AND cardinality(made) > coalesce(cardinality(elsewhere), 0) THEN
        PERFORM join_batch(of_batch, cardinality(made) - coalesce(cardinality(elsewhere), 0), since, made, false);
    END IF;
    IF elsewhere IS NULL AND cardinality(made) = cardinality(ids) THEN
        RETURN '{}';
    END IF;
    WITH taken_back AS (DELETE FROM ready WHERE id = ANY (elsewhere) RETURNING queue)
    INSERT INTO tally (queue, put, deleted) SELECT queue, -count(*), 0 FROM taken_back GROUP BY queue;
    RETURN ARRAY(
        SELECT i::integer FROM (
            SELECT id, i, row_number() OVER (PARTITION BY id ORDER BY i) AS nth
              FROM unnest(ids) WITH ORDINALITY AS all_ids (id, i)) AS numbered
         WHERE nth > 1 OR id NOT IN (SELECT unnest(made)) OR id IN (SELECT unnest(elsewhere))
         ORDER BY i);
END $$;

-- Put jobs that come together with something else, those that are taken left out.  Gives the queues of those that were created.
--
-- Of two that want the same id or key the first comes first.  So those that are the first of all go as a set, and then hardly any
-- others are left: those of an id that the first did not get for its key, or of a key that the first did not get for its id.
CREATE FUNCTION add_drafts(t terms, drafts jsonb, emitted boolean) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    d record;
    jobs job[];
    others job[];
    refused text[];
    for_keys text[];
    created text[];
    j job;
BEGIN
    SELECT count(*) AS n, array_agg(id) AS ids, array_agg(task) AS tasks, array_agg(queue) AS queues, array_agg(priority) AS priorities,
           array_agg(max_crashes) AS most, array_agg(decode(body, 'base64')) AS bodies INTO d
      FROM jsonb_to_recordset(drafts) AS d (id text, task text, queue text, priority smallint, max_crashes smallint, body text);
    jobs := described(t.now_us, d.ids, d.tasks, d.queues, d.priorities, d.most, d.bodies, drafts);
    IF d.n <= 3 OR NOT always_looks_anew() THEN  -- so few cost less one by one
        others := jobs;
    ELSE
        others := ARRAY(
            SELECT e FROM unnest(jobs) AS e
             WHERE e.pos NOT IN (SELECT min(pos) FROM unnest(jobs) GROUP BY id)
                OR e.unique_key IS NOT NULL AND e.pos NOT IN (SELECT min(pos) FROM unnest(jobs) WHERE unique_key IS NOT NULL GROUP BY unique_key));
        IF others <> '{}' THEN
            jobs := ARRAY(SELECT e FROM unnest(jobs) AS e WHERE e.pos NOT IN (SELECT pos FROM unnest(others)));
        END IF;
        IF in_callers_transaction() THEN  -- see add_job()
            jobs := ARRAY(SELECT e FROM unnest(jobs) AS e WHERE e.id NOT IN (SELECT unnest(used_elsewhere(d.ids, t.now_us))));
        END IF;
        SELECT array_agg(a.refused), array_agg(a.refused) FILTER (WHERE a.refused <> a.there) INTO refused, for_keys
          FROM add_jobs(t, jobs, emitted) AS a;
        created := ARRAY(SELECT DISTINCT e.queue FROM unnest(jobs) AS e WHERE e.id NOT IN (SELECT unnest(refused)));
        IF others <> '{}' THEN
            others := ARRAY(
                SELECT e FROM unnest(others) AS e
                 WHERE e.id NOT IN (SELECT id FROM unnest(jobs) EXCEPT SELECT unnest(for_keys))
                   AND NOT EXISTS (SELECT FROM unique_key AS k WHERE k.key = e.unique_key) ORDER BY e.pos);
        END IF;
    END IF;
    FOREACH j IN ARRAY others LOOP
        IF add_job(t, j, emitted) IS NULL THEN
            created := created || j.queue;
        END IF;
    END LOOP;
    RETURN created;
END $$;

-- Refuse, after the fact, what makes more jobs wait than a cap allows: whoever raises is rolled back.
-- The lock on the rule makes those who put at the same time wait and count one another; but nobody waits for the transaction of
-- a caller's: what that has put counts from its commit on.
CREATE FUNCTION check_room(now_us bigint, queues text[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    r record;
    n bigint;
BEGIN
    IF NOT in_callers_transaction() THEN
        PERFORM FROM rule AS u WHERE u.kind = 'cap' AND u.name = ANY (queues) ORDER BY u.name FOR UPDATE;
    END IF;
    FOR r IN SELECT u.name, u.n FROM rule AS u
              WHERE u.kind = 'cap' AND u.name = ANY (queues) AND (u.until_us IS NULL OR u.until_us > now_us) ORDER BY u.name
    LOOP
        n := waiting_in(r.name, r.n);
        IF n > r.n THEN
            RAISE EXCEPTION USING errcode = 'PP003', message = 'queue full',
                detail = jsonb_build_object('queue', r.name, 'limit', r.n, 'would_hold', n)::text;
        END IF;
    END LOOP;
END $$;

-- Put jobs that come together with something else, those that are taken left out; caps hold if they are `bounded`.
CREATE FUNCTION put_drafts(t terms, drafts jsonb, bounded boolean) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    queues text[] := add_drafts(t, drafts, false);
BEGIN
    IF bounded THEN
        PERFORM check_room(t.now_us, queues);
    END IF;
    PERFORM wake(queue) FROM (SELECT DISTINCT queue FROM unnest(queues) AS queue) AS each;
END $$;

-- What a put is answered that was made before: each job with the id of the one that is there, which is another one where that has
-- its unique key.
CREATE FUNCTION answer_again(ids text[], extras jsonb, now_us bigint) RETURNS TABLE (n integer, there text) LANGUAGE plpgsql AS $$
DECLARE
    its_own text[] := used_elsewhere(ids, now_us) || ARRAY(SELECT r.id FROM ready AS r WHERE r.id = ANY (ids));
BEGIN
    RETURN QUERY
        SELECT a.i::integer, coalesce(k.id, a.id) FROM unnest(ids) WITH ORDINALITY AS a (id, i)
          LEFT JOIN unique_key AS k ON k.key = extras->'each'->(a.i::integer - 1)->>'unique' AND a.id <> ALL (its_own)
         ORDER BY a.i;
END $$;

-- Put jobs (T1), in arrays, with extras if not all are plain: about `each`, and whether two of them are `alike` in their ids
-- or unique keys, so that it matters which comes first; or the one `batch` of which all are members, with numbers from
-- `first` on, if that is all there is to say.  Opens a batch before and seals it after that.
-- Gives the numbers, from 1, of those that were not created, each with the id of the job in its place.
CREATE FUNCTION put(
    at bigint, ids text[], tasks text[], queues text[], priorities smallint[], max_crashes smallint[], bodies bytea[],
    extras jsonb, new_token text, new_batch jsonb, seal_it boolean, dead_us bigint, cancelled_us bigint
) RETURNS TABLE (n integer, there text) LANGUAGE plpgsql SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    t terms := (moment(at), dead_us, cancelled_us);
    jobs job[];
    left_out integer[];
BEGIN
    IF new_token IS NOT NULL THEN
        INSERT INTO token (token, until_us) VALUES (new_token, t.now_us + 86400000000)
        ON CONFLICT (token) DO UPDATE SET until_us = excluded.until_us WHERE token.until_us <= t.now_us;
        IF NOT FOUND THEN
            RETURN QUERY SELECT a.n, a.there FROM answer_again(ids, extras, t.now_us) AS a;
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
    IF extras IS NULL OR extras ? 'batch' THEN
        left_out := add_plain(t, ids, tasks, queues, priorities, max_crashes, bodies, extras->>'batch', (extras->'first')::integer);
        RETURN QUERY SELECT i, ids[i] FROM unnest(left_out) AS i;
    ELSE
        jobs := described(t.now_us, ids, tasks, queues, priorities, max_crashes, bodies, extras->'each');
        IF (extras->'alike')::boolean THEN
            IF NOT in_callers_transaction() THEN
                PERFORM lock_batches(ARRAY(SELECT DISTINCT j.batch FROM unnest(jobs) AS j WHERE j.batch IS NOT NULL));
            END IF;
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
                SELECT i.n, a.there FROM add_jobs(t, jobs, false) AS a
                  JOIN unnest(ids) WITH ORDINALITY AS i (id, n) ON i.id = a.refused
            LOOP
                RETURN NEXT;
                left_out := left_out || n;
            END LOOP;
        END IF;
    END IF;
    IF EXISTS (SELECT FROM rule WHERE kind = 'cap') THEN
        PERFORM check_room(t.now_us, ARRAY(SELECT q FROM unnest(queues) WITH ORDINALITY AS added (q, i) WHERE i <> ALL (coalesce(left_out, '{}'))));
    END IF;
    IF new_batch IS NOT NULL AND seal_it THEN
        PERFORM seal_batch(t, new_batch->>'id');
    END IF;
    PERFORM add_up_in_turn(cardinality(ids));
END $$;

-- Put one plain job: what put() does, without its sets, in two thirds of the time.  Says whether it was created.
CREATE FUNCTION put_one(
    at bigint, new_id text, of_task text, of_queue text, of_priority smallint, max_crashes smallint, new_body bytea,
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
        INSERT INTO token (token, until_us) VALUES (new_token, now_us + 86400000000)
        ON CONFLICT (token) DO UPDATE SET until_us = excluded.until_us WHERE token.until_us <= now_us;
        IF NOT FOUND THEN
            RETURN false;
        END IF;
    END IF;
    place := nextval('back');
    INSERT INTO ready (seq, pos, put_us, due_us, rank, max_crashes, attempts, failures, crashes, queue, id, task, body, member)
    VALUES (place, place, now_us, now_us, -of_priority, max_crashes, 0, 0, 0, of_queue, new_id, of_task, new_body, 0)
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
    INSERT INTO tally (queue, put, deleted) VALUES (of_queue, 1, 0);
    IF capped THEN
        PERFORM check_room(now_us, ARRAY[of_queue]);
    END IF;
    IF place % 1024 = 0 THEN
        PERFORM add_up_in_turn(1);
    END IF;
    RETURN true;
END $$;
