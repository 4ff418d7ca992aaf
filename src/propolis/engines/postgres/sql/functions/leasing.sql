-- Leases begin.

-- A call does no more than this at once; whoever has more to do comes back.
CREATE FUNCTION bite() RETURNS integer LANGUAGE sql IMMUTABLE AS $$ SELECT 1000 $$;

-- Set jobs in line aside, each with the rule that keeps it back.
CREATE FUNCTION set_aside(ids text[], scopes text[], names text[]) RETURNS void LANGUAGE plpgsql SET enable_nestloop = off SET jit = off AS $$
BEGIN
    WITH gone AS (
        DELETE FROM ready WHERE id = ANY (ids)
        RETURNING WAITING_COLUMNS)
    INSERT INTO held (WAITING_COLUMNS, hold_scope, hold_name)
    SELECT gone.WAITING_COLUMNS, of.scope, of.name
      FROM gone JOIN unnest(ids, scopes, names) AS of (id, scope, name) ON of.id = gone.id;
END $$;

-- The groups in which these jobs in line may be set aside: of rules on the queue, and those on tasks, keys and both that they have.
CREATE FUNCTION groups_of(of_queue text, places tid[], OUT scopes text[], OUT names text[]) LANGUAGE plpgsql STABLE AS $$
DECLARE
    with_both boolean := EXISTS (SELECT FROM rule WHERE kind IN ('block', 'limit', 'pause') AND scope = 'task_key');
BEGIN
    WITH them AS MATERIALIZED (SELECT DISTINCT task, limit_key FROM ready WHERE ctid = ANY (places))
    SELECT array_agg(g.scope), array_agg(g.name) INTO scopes, names FROM (
        SELECT 'queue', of_queue UNION ALL
        SELECT DISTINCT 'task', task FROM them UNION ALL
        SELECT DISTINCT 'key', limit_key FROM them WHERE limit_key IS NOT NULL UNION ALL
        SELECT 'task_key', task || ' ' || limit_key FROM them WHERE with_both AND limit_key IS NOT NULL) AS g (scope, name);
END $$;

-- Whether a rule, or somebody who removes a queue or a batch, may want one of these jobs in line.
CREATE FUNCTION concerned(places tid[]) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    of_tasks text[];
    of_keys text[];
BEGIN
    SELECT array_agg(DISTINCT task), array_agg(DISTINCT limit_key) INTO of_tasks, of_keys FROM ready WHERE ctid = ANY (places);
    RETURN EXISTS (SELECT FROM rule WHERE kind IN ('block', 'limit', 'pause') AND scope = 'task' AND name = ANY (of_tasks))
        OR EXISTS (SELECT FROM rule WHERE kind IN ('block', 'limit', 'pause') AND scope = 'key' AND name = ANY (of_keys))
        OR array_remove(of_keys, NULL) <> '{}' AND concerned_for_each(of_keys, places)
        OR EXISTS (SELECT FROM removal)
           AND EXISTS (SELECT FROM ready AS r WHERE r.ctid = ANY (places)
                          AND is_removed(r.queue, CASE WHEN r.stepped IS NOT TRUE THEN r.batch END, r.seq));
END $$;

-- The same for rules on keys of a prefix, and those on a task of one key, or each.
CREATE FUNCTION concerned_for_each(of_keys text[], places tid[]) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    RETURN EXISTS (SELECT FROM unnest(prefix_lengths()) AS e (n), unnest(of_keys) AS k (key)
                    WHERE (SELECT true FROM rule WHERE kind = 'limit' AND scope = 'key' AND name = left(k.key, e.n) || '*' LIMIT 1))
        OR EXISTS (SELECT FROM rule WHERE kind IN ('block', 'limit', 'pause') AND scope = 'task_key')
           AND EXISTS (SELECT FROM ready AS j, unnest(ARRAY['*', j.limit_key]) AS k (key)
                        WHERE j.ctid = ANY (places) AND j.limit_key IS NOT NULL AND (
                              SELECT true FROM rule WHERE kind IN ('block', 'limit', 'pause') AND scope = 'task_key'
                                 AND name = j.task || ' ' || k.key LIMIT 1));
END $$;

-- Go through these jobs in line, in their order: each has expired, is removed, is kept back by a rule, or is leased, up to `want`.
-- What a rule keeps back is set aside for it, or parked again if `of_task` is given.  Gives the numbers of those leased, how many
-- were put aside, and whether one of those that a rule had `let_go` is among them: then it went no further than `enough` of those.
CREATE FUNCTION lease_these(
    t terms, of_queue text, places tid[], let_go text[], enough bigint, of_task text, want integer, until bigint, who text,
    INOUT left_bytes bigint, OUT numbers bigint[], OUT aside integer, OUT look_again boolean
) LANGUAGE plpgsql SET enable_nestloop = off SET jit = off AS $$
DECLARE
    groups record := groups_of(of_queue, places);
    r rulings := under(t, of_queue, groups.scopes, groups.names);
    runs bigint[] := r.runs;
    fulls bigint[] := r.fulls;
    removing boolean := EXISTS (SELECT FROM removal);
    taken tid[] := '{}';
    kept text[] := '{}';
    kept_by integer[] := '{}';
    kept_keys text[] := '{}';
    ruling integer;
    use integer;
    c record;
BEGIN
    aside := 0;
    look_again := false;
    FOR c IN
        SELECT j.ctid AS place, j.id, j.expires_us <= t.now_us AS expired, octet_length(j.body) AS bytes,
               removing AND is_removed(j.queue, CASE WHEN j.stepped IS NOT TRUE THEN j.batch END, j.seq) AS removed,
               g.id IS NOT NULL AS let_go, j.limit_key AS key, e.n AS key_use, ARRAY[k.n, q.n, u.n, b.n] AS under
          FROM ready AS j
          LEFT JOIN (SELECT DISTINCT id FROM unnest(let_go) AS g (id)) AS g ON g.id = j.id
          LEFT JOIN unnest(r.scopes, r.names) WITH ORDINALITY AS k (scope, name, n) ON k.scope = 'key' AND k.name = j.limit_key
          LEFT JOIN unnest(r.scopes, r.names) WITH ORDINALITY AS q (scope, name, n) ON q.scope = 'queue' AND q.name = j.queue
          LEFT JOIN unnest(r.scopes, r.names) WITH ORDINALITY AS u (scope, name, n) ON u.scope = 'task' AND u.name = j.task
          LEFT JOIN unnest(r.scopes, r.names) WITH ORDINALITY AS b (scope, name, n)
                 ON b.scope = 'task_key' AND b.name = j.task || ' ' || j.limit_key
          LEFT JOIN unnest(r.use_scopes, r.use_names) WITH ORDINALITY AS e (scope, name, n) ON e.scope = 'key' AND e.name = j.limit_key
         WHERE j.ctid = ANY (places) ORDER BY j.rank, j.pos
    LOOP
        enough := enough - c.let_go::integer;
        FOREACH ruling IN ARRAY c.under LOOP
            use := r.uses[ruling];
            EXIT WHEN room(t.now_us, r.shut[ruling], r.ns[ruling], r.everys[ruling], r.bursts[ruling], runs[use], fulls[use]) <= 0;
            ruling := NULL;
        END LOOP;
        IF c.expired OR c.removed THEN
            PERFORM put_away(t, c.id, c.removed);
        ELSIF ruling IS NOT NULL THEN
            kept := kept || c.id;
            kept_by := kept_by || ruling;
            IF r.use_scopes[r.uses[ruling]] <> 'key' THEN
                kept_keys := kept_keys || c.key;
            END IF;
        ELSE
            taken := taken || c.place;
            IF c.key_use IS NOT NULL THEN
                runs[c.key_use] := runs[c.key_use] + 1;  -- also where the limit is for another task of that key
            END IF;
            FOREACH ruling IN ARRAY array_remove(c.under, NULL) LOOP
                use := r.uses[ruling];
                runs[use] := runs[use] + (use IS DISTINCT FROM c.key_use)::integer;
                fulls[use] := coalesce(
                    greatest(bounded(fulls[use], t.now_us, r.everys[ruling], r.bursts[ruling]), t.now_us) + r.everys[ruling], fulls[use]);
            END LOOP;
            left_bytes := left_bytes - c.bytes;
            EXIT WHEN cardinality(taken) = want OR left_bytes <= 0 OR (look_again AND enough <= 0);
            CONTINUE;
        END IF;
        aside := aside + 1;
        look_again := look_again OR c.let_go;
        EXIT WHEN look_again AND enough <= 0;
    END LOOP;
    PERFORM keep_buckets(r, fulls);
    IF of_task IS NULL AND kept <> '{}' THEN
        PERFORM open_kept(t, of_queue, r, fulls, kept_by), open_keys(t, array_fill(of_queue, ARRAY[cardinality(kept_keys)]), kept_keys);
    END IF;
    PERFORM set_aside(
        kept, ARRAY(SELECT CASE WHEN of_task IS NULL THEN r.scopes[n] ELSE 'parked' END FROM unnest(kept_by) AS n),
        ARRAY(SELECT coalesce(of_task, r.names[n]) FROM unnest(kept_by) AS n));
    numbers := lease_rows(t, taken, until, who);
END $$;

-- Lease where there are rules, or jobs that have expired or are being removed: all that is looked at leaves the line.  `let_go`
-- are the ids of those that a rule has just let go, with what unhold() says is `enough`; NULL: nobody has looked.  Gives the numbers.
--
-- One call sets aside no more than a bite, and looks no more than twenty times whether a rule lets more go, so that it ends in time
-- whatever stands in line: then it says that there is more.
CREATE FUNCTION lease_ruled(t terms, of_queue text, want integer, until bigint, who text, let_go text[], enough bigint) RETURNS bigint[]
LANGUAGE plpgsql AS $$
DECLARE
    look_again boolean := let_go IS NULL;
    looks integer := 0;
    step integer := want;
    reach integer := want;
    left_bytes bigint := max_bytes();
    aside integer := 0;
    places tid[];
    freed record;
    did record;
    numbers bigint[] := '{}';
BEGIN
    LOOP
        -- Where one that was let go is not taken after all, the next of those held must stand before we go on.
        IF look_again THEN
            freed := unhold(t, of_queue, reach, CASE WHEN looks = 0 THEN 0 ELSE least(reach, 32) END);
            let_go := coalesce(let_go, '{}') || freed.ids;
            enough := freed.enough;
            looks := looks + 1;
        END IF;
        places := lock_line(of_queue, greatest(step, reach), NULL, NULL, NULL, NULL);
        EXIT WHEN places = '{}';
        did := lease_these(t, of_queue, places, let_go, enough, NULL, want, until, who, left_bytes);
        numbers := numbers || did.numbers;
        want := want - coalesce(cardinality(did.numbers), 0);
        aside := aside + did.aside;
        left_bytes := did.left_bytes;
        look_again := did.look_again;
        EXIT WHEN want = 0 OR (cardinality(places) < greatest(step, reach) AND NOT look_again);
        IF aside >= bite() OR looks >= 20 OR left_bytes <= 0 THEN
            PERFORM wake(of_queue);
            EXIT;
        END IF;
        IF look_again THEN
            reach := greatest(reach, least(4 * reach, 32));
        ELSE
            step := least(4 * step, bite());
        END IF;
    END LOOP;
    RETURN numbers;
END $$;

-- Lease parked jobs of these tasks (T12b), line by line.  Those that a rule keeps back stay parked.  Gives the numbers.
CREATE FUNCTION lease_parked(t terms, of_queue text, want integer, until bigint, who text, of_tasks text[]) RETURNS bigint[]
LANGUAGE plpgsql AS $$
DECLARE
    places tid[];
    did record;
    aside integer := 0;
    numbers bigint[] := '{}';
    line text;
    step integer;
    rest text[];
    last_rank smallint;
    last_pos bigint;
BEGIN
    FOREACH line IN ARRAY of_tasks LOOP
        step := want;
        last_rank := -32768;
        last_pos := 0;
        CONTINUE WHEN room_of(t, of_queue, 'task', line) <= 0;
        WHILE want > 0 AND aside < bite() LOOP
            WITH free AS (
                DELETE FROM held WHERE ctid = ANY (ARRAY(
                    SELECT ctid FROM held WHERE queue = of_queue AND hold_scope = 'parked' AND hold_name = line
                       AND (rank, pos) > (last_rank, last_pos)
                     ORDER BY rank, pos LIMIT step FOR UPDATE SKIP LOCKED))
                RETURNING WAITING_COLUMNS),
            back AS (
                INSERT INTO ready (WAITING_COLUMNS)
                SELECT WAITING_COLUMNS FROM free
                RETURNING ctid, rank, pos)
            SELECT array_agg(ctid), (array_agg(rank ORDER BY rank DESC, pos DESC))[1], (array_agg(pos ORDER BY rank DESC, pos DESC))[1]
              INTO places, last_rank, last_pos FROM back;
            EXIT WHEN places IS NULL;
            did := lease_these(t, of_queue, places, '{}', 0, line, want, until, who, 1000000000000);
            numbers := numbers || did.numbers;
            want := want - coalesce(cardinality(did.numbers), 0);
            aside := aside + did.aside;
            rest := ARRAY(SELECT id FROM ready WHERE ctid = ANY (places));
            PERFORM set_aside(rest, array_fill('parked'::text, ARRAY[cardinality(rest)]), array_fill(line, ARRAY[cardinality(rest)]));
            step := least(4 * step, bite());
        END LOOP;
    END LOOP;
    RETURN numbers;
END $$;

-- End a job in line that is not to run.  Where that would have to wait for somebody it stays there, for a sweep.
CREATE FUNCTION put_away(t terms, job_id text, removed boolean) RETURNS void LANGUAGE plpgsql SET lock_timeout = '20ms' AS $$
BEGIN
    IF removed THEN
        PERFORM end_job(t, unplace(t, job_id), 'cancelled', NULL);
    ELSE
        PERFORM expire(t, unplace(t, job_id));
    END IF;
EXCEPTION WHEN lock_not_available THEN
    NULL;
END $$;

-- What one claim of a queue may bring, as far as it is more than one job: a client has to hold all of it.
CREATE FUNCTION max_bytes() RETURNS bigint LANGUAGE sql IMMUTABLE AS $$ SELECT 50000000::bigint $$;

-- Lease these jobs, which the caller has locked, as rows of their own.  Gives the numbers.
CREATE FUNCTION lease_rows(t terms, places tid[], until bigint, who text) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    numbers bigint[];
BEGIN
    WITH taken AS (
        DELETE FROM ready WHERE ctid = ANY (places) RETURNING WAITING_COLUMNS),
    started AS (
        INSERT INTO running (WAITING_COLUMNS, number, until_us, span_us, holder)
        SELECT seq, pos, put_us, due_us, expires_us, greatest(fence + 1, t.now_us), t.now_us, rank, max_crashes,
               attempts + 1, failures, crashes, queue, id, task, body, chosen, unique_key, unique_until, limit_key, batch,
               member, stepped, error, progress, log, history, checkpoint, losses, nextval('number'), until, until - t.now_us, who
          FROM taken ORDER BY rank, pos
        RETURNING number)
    SELECT array_agg(number) INTO numbers FROM started;
    RETURN numbers;
END $$;

-- What a client gets of jobs that are rows.
CREATE FUNCTION answer_rows(of_queue text, of_numbers bigint[]) RETURNS SETOF leased LANGUAGE sql STABLE AS $$  -- it is inlined
    SELECT NULL::bigint, NULL::integer[], of_queue, NULL::bigint, array_agg(number), array_agg(fence), array_agg(id),
           array_agg(task), array_agg(body), array_agg(put_us), array_agg(attempts), array_agg(failures), array_agg(crashes),
           array_agg(batch), max(rank), (array_agg(pos))[array_position(array_agg(rank), max(rank))],
           CASE WHEN count(checkpoint) > 0 THEN array_agg(checkpoint) END, array_agg(coalesce(losses, 0))
      FROM (SELECT put_us, rank, pos, number, fence, attempts, failures, crashes, losses, id, task, body, batch, checkpoint
              FROM running WHERE number = ANY (of_numbers) ORDER BY number) AS line
    HAVING count(*) > 0
$$;

-- Lease this one job, which the caller has locked, and answer with it: lease_rows() and answer_rows() without their sets, in a
-- third of the time.  NULL: it has expired.
CREATE FUNCTION lease_row(t terms, place tid, until bigint, who text) RETURNS leased LANGUAGE plpgsql AS $$
DECLARE
    j job;
BEGIN
    DELETE FROM ready WHERE ctid = place
    RETURNING WAITING_COLUMNS INTO j;
    IF j.expires_us <= t.now_us THEN
        PERFORM place(t, j);
        RETURN NULL;
    END IF;
    j.fence := greatest(j.fence + 1, t.now_us);
    j.number := nextval('number');
    j.started_us := t.now_us;
    j.attempts := j.attempts + 1;
    j.holder := who;
    INSERT INTO running (WAITING_COLUMNS, number, until_us, span_us, holder)
    VALUES (j.WAITING_COLUMNS, j.number, until, until - t.now_us, j.holder);
    RETURN (NULL, NULL, j.queue, NULL, ARRAY[j.number], ARRAY[j.fence], ARRAY[j.id], ARRAY[j.task], ARRAY[j.body], ARRAY[j.put_us],
            ARRAY[j.attempts], ARRAY[j.failures], ARRAY[j.crashes], ARRAY[j.batch], j.rank, j.pos,
            CASE WHEN j.checkpoint IS NOT NULL THEN ARRAY[j.checkpoint] END, ARRAY[coalesce(j.losses, 0)])::leased;
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
          FROM (SELECT seq, pos, put_us, due_us, rank, max_crashes, id, task, body, member FROM taken ORDER BY rank, pos) AS line),
    packed AS (
        INSERT INTO chunk (number, fence, started_us, until_us, span_us, members, queue, holder, first_id, last_id, batch, born,
                           ids, tasks, bodies, seqs, puts_us, dues_us, ranks, max_crashes, in_batch)
        SELECT nextval('number'), t.now_us, t.now_us, until, until - t.now_us, cardinality(ids), of_queue, who, first_id, last_id,
               of_batch, its_birth, ids, tasks, bodies, seqs, puts_us, dues_us, ranks, max_crashes, in_batch FROM line
        RETURNING number)
    SELECT NULL::bigint, NULL::integer[], of_queue, number, NULL::bigint[], ARRAY[t.now_us], ids, tasks, bodies, puts_us,
           NULL::integer[], NULL::integer[], NULL::integer[], CASE WHEN of_batch IS NOT NULL THEN ARRAY[of_batch] END, rank,
           poss[array_position(ranks, rank)], NULL::bytea[], NULL::integer[]
      FROM packed, line;
END $$;

-- Lease these jobs, which the caller has locked and which are plain but for their batches: as a chunk where jobs of one
-- batch stand together.  Where many batches take turns, rows are cheaper than so many chunks.
CREATE FUNCTION lease_members(t terms, of_queue text, places tid[], until bigint, who text) RETURNS SETOF leased
LANGUAGE plpgsql AS $$
DECLARE
    r record;
    numbers bigint[];
BEGIN
    FOR r IN
        SELECT run.batch, run.places, run.n, run.since, run.newest, b.born, count(*) OVER () AS runs
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
            numbers := lease_rows(t, places, until, who);
            RETURN QUERY SELECT * FROM answer_rows(of_queue, numbers);
            RETURN;
        ELSIF r.n = 1 OR r.born BETWEEN r.since AND r.newest THEN
            numbers := lease_rows(t, r.places, until, who);
            RETURN QUERY SELECT * FROM answer_rows(of_queue, numbers);
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
-- priorities and the front are looked at all the same.  Whoever comes back short looks again from a floor that is sure, or
-- without one.
CREATE FUNCTION lock_line(
    of_queue text, want integer, from_rank smallint, from_pos bigint, sure_rank smallint, sure_pos bigint
) RETURNS tid[] LANGUAGE plpgsql AS $$
DECLARE
    places tid[] := '{}';
BEGIN
    IF from_pos IS NULL AND sure_pos IS NULL THEN
        RETURN ARRAY(SELECT ctid FROM ready WHERE queue = of_queue ORDER BY rank, pos LIMIT want FOR UPDATE SKIP LOCKED);
    END IF;
    places := ARRAY(SELECT ctid FROM ready WHERE queue = of_queue AND (rank, pos) < (coalesce(from_rank, sure_rank), 1::bigint)
                     ORDER BY rank, pos LIMIT want FOR UPDATE SKIP LOCKED);
    places := places || ARRAY(
        SELECT ctid FROM ready WHERE queue = of_queue AND (rank, pos) >= (coalesce(from_rank, sure_rank), coalesce(from_pos, sure_pos))
         ORDER BY rank, pos LIMIT want - cardinality(places) FOR UPDATE SKIP LOCKED);
    IF cardinality(places) < want AND from_pos IS NOT NULL THEN
        RETURN lock_line(of_queue, want, NULL, NULL, sure_rank, sure_pos);
    END IF;
    RETURN places;
END $$;

-- Lease the next jobs of a queue (T2), at most as many as a chunk can have.  What was due at `from_due` stands in line, as far as
-- the client knows, so that nobody walks over what has left and is not yet vacuumed.  A row without ids: more has become due.
CREATE FUNCTION lease_some(
    t terms, of_queue text, want integer, until bigint, who text, from_rank smallint, from_pos bigint, sure_rank smallint,
    sure_pos bigint, from_due bigint, of_tasks text[]
) RETURNS SETOF leased LANGUAGE plpgsql AS $$
DECLARE
    places tid[];
    claim record;
    its_birth bigint;
    due boolean;
    paused boolean;
    keeps boolean;
    parked boolean;
    singly boolean;
    ruled boolean;
    freed record;
    let_go text[];
    enough bigint;
    numbers bigint[];
    answer leased;
BEGIN
    -- One query for all that is rare: where nobody waits but for one job, statements are what its start waits for.
    -- (Whatever the statistics say, what is due is found by its time.)
    SELECT (SELECT true FROM scheduled WHERE queue = of_queue AND due_us > coalesce(from_due, 0) AND due_us <= t.now_us
             ORDER BY due_us LIMIT 1) IS NOT NULL,
           EXISTS (SELECT FROM rule WHERE kind IN ('block', 'pause') AND scope = 'queue' AND name = of_queue
                      AND (until_us IS NULL OR until_us > t.now_us)),
           EXISTS (SELECT FROM rule WHERE kind = 'limit' AND scope = 'queue' AND name = of_queue),
           EXISTS (SELECT FROM held WHERE queue = of_queue AND hold_scope < 'parked')
               OR EXISTS (SELECT FROM held WHERE queue = of_queue AND hold_scope > 'parked'),
           of_tasks <> '{}' AND EXISTS (SELECT FROM held WHERE queue = of_queue AND hold_scope = 'parked'),
           EXISTS (SELECT FROM rule WHERE kind IN ('block', 'limit', 'pause') AND scope IN ('key', 'task', 'task_key'))
               OR EXISTS (SELECT FROM removal)
      INTO due, paused, singly, keeps, parked, ruled;
    IF due THEN
        IF promote(t, of_queue, bite(), coalesce(from_due, 0)) = bite() THEN
            answer.queue := of_queue;
            RETURN NEXT answer;
        END IF;
    END IF;
    IF paused THEN
        RETURN;  -- all of it stays where it is, however much that may be
    END IF;
    IF singly THEN
        want := least(want, room_of(t, of_queue, 'queue', of_queue));
        IF want <= 0 THEN
            RETURN;  -- the same
        END IF;
    END IF;
    IF parked THEN
        numbers := lease_parked(t, of_queue, want, until, who, of_tasks);
        FOR answer IN SELECT * FROM answer_rows(of_queue, numbers) LOOP
            answer.pos := 0;  -- which says nothing of the line
            RETURN NEXT answer;
            want := want - cardinality(numbers);
        END LOOP;
        IF want = 0 THEN
            RETURN;
        END IF;
    END IF;
    IF NOT singly THEN
        let_go := '{}';
        IF keeps THEN
            freed := unhold(t, of_queue, want, 0);
            let_go := freed.ids;
            enough := freed.enough;
        ELSIF ruled THEN
            PERFORM forget_openings(t, of_queue, bite());
        END IF;
        singly := let_go <> '{}';
    END IF;
    IF NOT singly THEN
        places := lock_line(of_queue, want, from_rank, from_pos, sure_rank, sure_pos);
        IF places = '{}' THEN
            RETURN;
        END IF;
        IF cardinality(places) = 1 AND NOT ruled THEN
            answer := lease_row(t, places[1], until, who);
            IF answer.ids IS NOT NULL THEN
                RETURN NEXT answer;
                RETURN;
            END IF;
            singly := true;
        END IF;
    END IF;
    IF NOT singly THEN
        SELECT bool_and(
                   history IS NULL AND chosen IS NULL AND unique_key IS NULL AND limit_key IS NULL AND expires_us IS NULL
                   AND stepped IS NULL) AS plain, bool_or(expires_us <= t.now_us) AS late, count(batch) AS batched,
               sum(octet_length(body)) AS bytes, min(batch) AS batch,
               count(*) = count(batch) AND min(batch) = max(batch) AS one_batch, min(seq) AS since
          INTO claim FROM ready WHERE ctid = ANY (places);
        singly := coalesce(claim.late, false);
        IF ruled AND NOT singly THEN
            singly := concerned(places);
        END IF;
        IF claim.bytes > max_bytes() AND NOT singly THEN
            places := ARRAY(
                SELECT place FROM (
                    SELECT ctid AS place, sum(octet_length(body)) OVER (ORDER BY rank, pos) - octet_length(body) AS before
                      FROM ready WHERE ctid = ANY (places)) AS line
                 WHERE before < max_bytes());
            PERFORM wake(of_queue);
        END IF;
    END IF;
    IF singly THEN
        numbers := lease_ruled(t, of_queue, want, until, who, let_go, enough);
        RETURN QUERY SELECT * FROM answer_rows(of_queue, numbers);
    ELSIF NOT claim.plain OR cardinality(places) = 1 THEN
        numbers := lease_rows(t, places, until, who);
        RETURN QUERY SELECT * FROM answer_rows(of_queue, numbers);
    ELSIF claim.batched > 0 THEN
        IF claim.one_batch THEN
            SELECT born INTO its_birth FROM batch WHERE id = claim.batch AND born < claim.since;
            IF FOUND THEN
                RETURN QUERY SELECT * FROM lease_chunk(t, of_queue, places, until, who, claim.batch, its_birth);
                RETURN;
            END IF;
        END IF;
        RETURN QUERY SELECT * FROM lease_members(t, of_queue, places, until, who);
    ELSE
        RETURN QUERY SELECT * FROM lease_chunk(t, of_queue, places, until, who, NULL, NULL);
    END IF;
END $$;

-- A key that is held only until its job starts.
CREATE FUNCTION free_started_keys(first_number bigint) RETURNS void LANGUAGE sql AS $$
    DELETE FROM unique_key AS k USING running AS r
     WHERE r.number >= first_number AND r.unique_until = 'started' AND k.key = r.unique_key AND k.id = r.id
$$;

-- End leases and take the next jobs.  Wants are queues, numbers and floors, in arrays; `most` bounds them all.  Gives what
-- was lost, the leases, among them rows of queues in which more has become due, and in the end a row without a queue where a
-- limit keeps something back, with the time of the next token (pos).
CREATE FUNCTION exchange(
    at bigint, numbers bigint[], ids text[], fences bigint[], holders text[], outcomes text[], queues text[], wants integer[],
    from_ranks smallint[], from_places bigint[], sure_ranks smallint[], sure_places bigint[], from_dues bigint[], tasks text[], most integer, span_us bigint, who text,
    dead_us bigint, cancelled_us bigint
) RETURNS SETOF leased LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    t terms := (moment(at), dead_us, cancelled_us);
    answer leased;
    want integer;
    step integer;
    first_number bigint;  -- of those that have a row
    back record;
BEGIN
    answer.now_us := t.now_us;
    IF numbers IS NOT NULL THEN
        answer.lost := settle_all(t, numbers, ids, fences, holders, outcomes, true);
    END IF;
    RETURN NEXT answer;
    FOR n IN 1..coalesce(cardinality(queues), 0) LOOP
        want := least(wants[n], most);
        WHILE want > 0 LOOP
            step := least(want, 1023);
            FOR answer IN
                SELECT l.now_us, l.lost, l.queue, l.number, l.numbers, l.fences, l.ids, l.tasks, l.bodies, l.puts_us, l.attempts,
                       l.failures, l.crashes, l.batches, l.rank, l.pos, l.checkpoints, l.losses
                  FROM lease_some(
                       t, queues[n], step, t.now_us + span_us, who, from_ranks[n], from_places[n], sure_ranks[n],
                       sure_places[n], from_dues[n], tasks) AS l
            LOOP
                RETURN NEXT answer;
                CONTINUE WHEN answer.ids IS NULL;
                first_number := least(first_number, answer.numbers[1]);
                want := want - cardinality(answer.ids);
                most := most - cardinality(answer.ids);
                step := step - cardinality(answer.ids);
            END LOOP;
            EXIT WHEN step > 0;
        END LOOP;
    END LOOP;
    IF first_number IS NOT NULL AND EXISTS (SELECT FROM unique_key) THEN
        PERFORM free_started_keys(first_number);
    END IF;
    IF most > 0 AND EXISTS (SELECT FROM rule WHERE kind = 'limit') THEN
        back := kept_back(t, queues);
        IF back.limited THEN
            answer := NULL;
            answer.pos := back.next_us;
            RETURN NEXT answer;
        END IF;
    END IF;
END $$;
