-- What operators see.

-- The queues that there are or were, after a name.  Of the tally, which may have many rows of a queue, one of each is read.
CREATE FUNCTION queue_names(after text, most integer) RETURNS text[] LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN ARRAY(
        WITH RECURSIVE counted (queue, n) AS (
            SELECT (SELECT t.queue FROM tally AS t WHERE t.queue > after ORDER BY t.queue LIMIT 1), 1 UNION ALL
            SELECT (SELECT t.queue FROM tally AS t WHERE t.queue > c.queue ORDER BY t.queue LIMIT 1), c.n + 1
              FROM counted AS c WHERE c.queue IS NOT NULL AND c.n < most)
        SELECT queue FROM (
            (SELECT queue FROM total WHERE queue > after ORDER BY queue LIMIT most) UNION
            SELECT queue FROM counted WHERE queue IS NOT NULL) AS names
         ORDER BY queue LIMIT most);
END $$;

-- How many jobs wait in a queue, as the counters say, if that is more than `enough`; what runs is counted only then.
CREATE FUNCTION waiting_in(of_queue text, enough bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    n bigint := (SELECT big_count_of(sum(put::numeric - deleted - kept)) FROM (
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
          FROM (SELECT s.queue, s.put, s.deleted, s.dead, s.scheduled, s.held, s.parked, least(s.alone, most) + s.members AS running,
                       s.done, s.cancelled, greatest(s.scheduled, s.held, s.parked, s.alone, s.done, s.cancelled) > most AS more
          FROM (SELECT q AS queue, o.put, o.deleted, o.dead,
                       (SELECT count(*) FROM (SELECT FROM scheduled AS s WHERE s.queue = q AND s.due_us > now_us LIMIT most + 1) AS few) AS scheduled,
                       (SELECT count(*) FROM (
                            (SELECT FROM held AS h WHERE h.queue = q AND h.hold_scope < 'parked' LIMIT most + 1) UNION ALL
                            (SELECT FROM held AS h WHERE h.queue = q AND h.hold_scope > 'parked' LIMIT most + 1)) AS few) AS held,
                       (SELECT count(*) FROM (
                            SELECT FROM held AS h WHERE h.queue = q AND h.hold_scope = 'parked' LIMIT most + 1) AS few) AS parked,
                       (SELECT count(*) FROM (SELECT FROM running AS r WHERE r.queue = q LIMIT most + 1) AS few) AS alone,
                       coalesce(u.n, 0) AS members,
                       (SELECT count(*) FROM (SELECT FROM archive AS a WHERE a.queue = q AND a.state = 'done' LIMIT most + 1) AS few) AS done,
                       (SELECT count(*) FROM (SELECT FROM archive AS a WHERE a.queue = q AND a.state = 'cancelled' LIMIT most + 1) AS few) AS cancelled
                  FROM unnest(names) AS q CROSS JOIN LATERAL (
                       SELECT big_count_of(sum(s.put)) AS put, big_count_of(sum(s.deleted)) AS deleted, big_count_of(sum(s.dead)) AS dead FROM (
                            SELECT t.put, t.deleted, t.dead FROM tally AS t WHERE t.queue = q UNION ALL
                            SELECT t.put, t.deleted, t.dead FROM total AS t WHERE t.queue = q) AS s) AS o
                  LEFT JOIN (
                       SELECT k.queue AS name, sum(k.members)::bigint AS n FROM chunk AS k WHERE k.queue = ANY (names)
                        GROUP BY k.queue) AS u ON u.name = q) AS s) AS c
         ORDER BY c.queue COLLATE "C";
END $$;

-- These jobs, in the order of puts; the state of each says where it is, and whether it is parked.  Those that are members of chunks
-- are in these chunks; NULL: they are searched for.
CREATE FUNCTION shown(these text[], in_chunks bigint[] DEFAULT NULL) RETURNS SETOF job LANGUAGE plpgsql STABLE AS $$
DECLARE
    low text := (SELECT min(id COLLATE "C") FROM unnest(these) AS id);
    high text := (SELECT max(id COLLATE "C") FROM unnest(these) AS id);
BEGIN
    RETURN QUERY
        SELECT WAITING_COLUMNS, RUN_COLUMNS, 'ready', END_COLUMNS FROM ready WHERE id = ANY (these) UNION ALL
        SELECT WAITING_COLUMNS, RUN_COLUMNS, 'ready', END_COLUMNS FROM scheduled WHERE id = ANY (these) UNION ALL
        SELECT WAITING_COLUMNS, RUN_COLUMNS, CASE hold_scope WHEN 'parked' THEN 'parked' ELSE 'ready' END, END_COLUMNS
          FROM held WHERE id = ANY (these) UNION ALL
        SELECT WAITING_COLUMNS, RUN_COLUMNS, 'running', END_COLUMNS FROM running WHERE id = ANY (these) UNION ALL
        SELECT WAITING_COLUMNS, RUN_COLUMNS, state, END_COLUMNS FROM archive WHERE id = ANY (these) UNION ALL
        SELECT MEMBER_COLUMNS FROM chunk AS c, members_of(c) AS m
         WHERE in_chunks IS NULL AND c.last_id >= low AND c.first_id <= high AND m.id = ANY (these) UNION ALL
        SELECT MEMBER_COLUMNS FROM chunk AS c, members_of(c) AS m
         WHERE c.number = ANY (in_chunks) AND m.id = ANY (these)
         ORDER BY seq;
END $$;

-- One job, wherever it is.
CREATE FUNCTION get(of_id text) RETURNS SETOF job LANGUAGE plpgsql STABLE SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN QUERY SELECT * FROM shown(ARRAY[of_id], ARRAY[chunk_of(of_id)]);
END $$;

-- How many stand before a job that is ready and due, or would, once those that have become due join their lines: up to `most`, and
-- of what is held or has become due only so many are looked at.
CREATE FUNCTION position_of(at bigint, of_id text, most integer) RETURNS bigint LANGUAGE plpgsql STABLE SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    now_us bigint := moment(at);
    j record;
BEGIN
    SELECT k.coming, k.queue, k.rank, k.pos, k.due_us, k.seq INTO j FROM (
        SELECT false AS coming, r.queue, r.rank, r.pos, r.due_us, r.seq FROM ready AS r WHERE r.id = of_id UNION ALL
        SELECT false, h.queue, h.rank, h.pos, h.due_us, h.seq FROM held AS h WHERE h.id = of_id AND h.hold_scope <> 'parked' UNION ALL
        SELECT true, s.queue, s.rank, s.pos, s.due_us, s.seq FROM scheduled AS s WHERE s.id = of_id AND s.due_us <= now_us) AS k;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    RETURN (SELECT count(*) FROM (
        (SELECT FROM ready AS r
          WHERE r.queue = j.queue AND (r.rank, r.pos) < (j.rank, CASE WHEN j.coming THEN 9223372036854775807 ELSE j.pos END)
          ORDER BY r.rank, r.pos LIMIT most)
        UNION ALL
        (SELECT FROM (
            (SELECT h.rank, h.pos FROM held AS h WHERE h.queue = j.queue AND h.hold_scope < 'parked'
              ORDER BY h.hold_scope, h.hold_name LIMIT most) UNION ALL
            (SELECT h.rank, h.pos FROM held AS h WHERE h.queue = j.queue AND h.hold_scope > 'parked'
              ORDER BY h.hold_scope, h.hold_name LIMIT most)) AS few
          WHERE few.rank < j.rank OR (few.rank = j.rank AND (j.coming OR few.pos < j.pos)))
        UNION ALL
        (SELECT FROM (
            SELECT s.rank, s.due_us, s.seq FROM scheduled AS s  -- compared whole: see looked_at()
             WHERE s.queue >= j.queue AND (s.queue, s.due_us) <= (j.queue, now_us)
             ORDER BY s.queue, s.due_us, s.seq LIMIT most) AS few
          WHERE few.rank < j.rank OR (few.rank = j.rank AND j.coming AND (few.due_us, few.seq) < (j.due_us, j.seq)))
        LIMIT most) AS before);
END $$;

-- --- jobs by what they are --------------------------------------------------------------------
--
-- A call reads at most as many rows as looks count (`most`), and says where to go on.
--
-- Jobs have numbers in the order of puts, and each place keeps those of a queue or a batch in that order.  So a bite is read of each
-- place, and shown up to where the first of these bites ends.  Of many queues with many jobs, it is one queue after the other.
--
-- Members of chunks are in no order.  As long as not more than `most` are there, each call reads them all.  Else they come in a
-- second part, in the order of their leases.  Whoever was in a chunk when the first part passed and was not when the second one
-- did has left it for good: so a third part is the first again, of jobs that may have left a chunk since that began.

CREATE TYPE wanted AS (
    now_us    bigint,
    queue     text COLLATE "C",
    task      text COLLATE "C",
    batch     text COLLATE "C",
    reason    text,
    scheduled boolean,
    waits     boolean,  -- those that wait are wanted, and so on
    runs      boolean,
    chunks    boolean,
    ends      text[],
    since_us  bigint    -- not NULL: only those that may have left a chunk since then
);

CREATE TYPE bite AS (
    ids    text[],
    chunks bigint[],  -- in which some of them are
    queue  text COLLATE "C",
    seq    bigint     -- it goes on after this one (of this queue); NULL: that was all
);

CREATE FUNCTION fits_waiting(w wanted, queue text, task text, due_us bigint, fence bigint) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(queue = w.queue, true) AND coalesce(task = w.task, true)
       AND coalesce((due_us > w.now_us) = w.scheduled, true) AND (w.since_us IS NULL OR fence IS NOT NULL)
$$;

CREATE FUNCTION fits_running(w wanted, queue text, task text, number bigint, history jsonb) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(queue = w.queue, true) AND coalesce(task = w.task, true)
       AND (w.since_us IS NULL OR number & 1023 > 0 OR history IS NOT NULL)
$$;

CREATE FUNCTION fits_ended(w wanted, queue text, task text, reason text, ended_us bigint) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(queue = w.queue, true) AND coalesce(task = w.task, true) AND coalesce(reason = w.reason, w.reason IS NULL)
       AND coalesce(ended_us >= w.since_us, true)
$$;

-- Of each place in these queues, or in a batch, what was put after a number: of the first `share` those that match, at most `enough`,
-- and the last of the share (n = share), behind which there may be more.  (Rows of the archive are compared whole: if they were only
-- in the order of puts, the server might walk over all others by its key.)
CREATE FUNCTION looked_at(w wanted, names text[], after bigint, share bigint, enough integer)
RETURNS TABLE (queue text, id text, seq bigint, fits boolean, n bigint, chunk bigint) LANGUAGE plpgsql STABLE AS $$
DECLARE
    place text;
    of_it boolean;
BEGIN
    FOR place, of_it IN VALUES ('ready', w.waits), ('scheduled', w.waits), ('held', w.waits), ('running', w.runs) LOOP
        CONTINUE WHEN NOT of_it;
        RETURN QUERY EXECUTE format(
            'SELECT q, j.id, j.seq, j.fits, j.n, NULL::bigint FROM unnest($2) AS q, LATERAL (
                SELECT b.id, b.seq, b.fits, b.n FROM (
                    SELECT r.id, r.seq, row_number() OVER () AS n, %s AS fits FROM (
                        (SELECT k.* FROM %I AS k WHERE $1.batch IS NULL AND k.queue = q AND k.seq > $3 ORDER BY k.seq LIMIT $4) UNION ALL
                        (SELECT k.* FROM %I AS k WHERE k.batch = $1.batch AND k.seq > $3 ORDER BY k.seq LIMIT $4)) AS r) AS b
                 WHERE b.fits OR b.n = $4 LIMIT $5) AS j',
            CASE place WHEN 'running' THEN 'fits_running($1, r.queue, r.task, r.number, r.history)'
                       ELSE 'fits_waiting($1, r.queue, r.task, r.due_us, r.fence)' END, place, place)
        USING w, names, after, share, enough;
    END LOOP;
    RETURN QUERY
        SELECT c.queue, m.id, m.seq, true, 0, c.number
          FROM chunk AS c, unnest(c.ids, c.seqs, c.tasks) WITH ORDINALITY AS m (id, seq, task, n)
         WHERE w.chunks AND CASE WHEN w.batch IS NULL THEN c.queue = ANY (names) ELSE c.batch = w.batch AND coalesce(c.queue = w.queue, true) END
           AND m.seq > after AND coalesce(m.task = w.task, true) AND (c.gone IS NULL OR get_bit(c.gone, m.n::integer - 1) = 0)
        UNION ALL
        SELECT q, j.id, j.seq, j.fits, j.n, NULL FROM unnest(names) AS q, unnest(w.ends) AS e, LATERAL (
            SELECT b.id, b.seq, b.fits, b.n FROM (
                SELECT r.id, r.seq, row_number() OVER () AS n, fits_ended(w, r.queue, r.task, r.reason, r.ended_us) AS fits FROM (
                    SELECT k.seq, k.id, k.queue, k.task, k.reason, k.ended_us FROM archive AS k
                     WHERE (k.queue, k.state, k.seq) > (q, e, after) AND (k.queue, k.state) <= (q, e)
                     ORDER BY k.queue, k.state, k.seq LIMIT share) AS r) AS b
             WHERE b.fits OR b.n = share LIMIT enough) AS j WHERE w.batch IS NULL
        UNION ALL
        (SELECT '', b.id, b.seq, b.fits, b.n, NULL FROM (
            SELECT r.id, r.seq, row_number() OVER () AS n,
                   r.state = ANY (w.ends) AND fits_ended(w, r.queue, r.task, r.reason, r.ended_us) AS fits FROM (
                SELECT k.seq, k.id, k.queue, k.task, k.reason, k.ended_us, k.state FROM archive AS k
                 WHERE (k.batch, k.seq) > (w.batch, after) AND k.batch <= w.batch
                 ORDER BY k.batch, k.seq LIMIT share) AS r) AS b
         WHERE b.fits OR b.n = share LIMIT enough);
END $$;

-- A bite of these queues, or of a batch: in the order of puts, or queue by queue.
CREATE FUNCTION bite_of(w wanted, names text[], by_queue boolean, after bigint, share bigint, room integer) RETURNS bite
LANGUAGE plpgsql STABLE AS $$
DECLARE
    b bite;
    queues text[];
    seqs bigint[];
BEGIN
    WITH looked AS MATERIALIZED (
        SELECT (CASE WHEN by_queue THEN l.queue ELSE '' END) COLLATE "C" AS queue, l.seq, l.id, l.chunk, l.fits, l.n = share AS last
          FROM looked_at(w, names, after, share, room + 1) AS l),
    until AS (SELECT queue, seq FROM looked WHERE last ORDER BY queue, seq LIMIT 1),
    page AS (
        SELECT l.queue, l.seq, l.id, l.chunk FROM looked AS l LEFT JOIN until AS u ON true
         WHERE l.fits AND (u.seq IS NULL OR (l.queue, l.seq) <= (u.queue, u.seq)) ORDER BY l.queue, l.seq LIMIT room + 1)
    SELECT array_agg(p.id ORDER BY p.queue, p.seq), array_agg(p.queue ORDER BY p.queue, p.seq), array_agg(p.seq ORDER BY p.queue, p.seq),
           array_agg(p.chunk) FILTER (WHERE p.chunk IS NOT NULL), (SELECT u.queue FROM until AS u), (SELECT u.seq FROM until AS u)
      INTO b.ids, queues, seqs, b.chunks, b.queue, b.seq FROM page AS p;
    IF cardinality(b.ids) > room THEN
        b.ids := b.ids[1:room];
        b.queue := queues[room];
        b.seq := seqs[room];
    END IF;
    RETURN b;
END $$;

-- A bite of the members of chunks, in the order of their leases, after one of those.
CREATE FUNCTION bite_of_chunks(w wanted, after bigint, most integer, room integer) RETURNS bite LANGUAGE plpgsql STABLE AS $$
DECLARE
    b bite;
    c record;
    looked integer := 0;
    found text[];
    places bigint[];
BEGIN
    b.ids := '{}';
    b.chunks := '{}';
    FOR c IN SELECT k.number, k.ids, k.seqs, k.tasks, k.gone, cardinality(k.ids) AS n,
                    coalesce(k.queue = w.queue, true) AND coalesce(k.batch = w.batch, w.batch IS NULL) AS fits
               FROM chunk AS k WHERE k.number >= after & -1024 ORDER BY k.number LOOP
        IF looked >= most OR cardinality(b.ids) >= room THEN
            b.seq := coalesce(b.seq, c.number - 1);
            RETURN b;
        END IF;
        looked := looked + c.n;
        CONTINUE WHEN NOT c.fits;
        SELECT array_agg(m.id ORDER BY m.n), array_agg(c.number + m.n ORDER BY m.n) INTO found, places
          FROM unnest(c.ids, c.tasks) WITH ORDINALITY AS m (id, task, n)
         WHERE c.number + m.n > after AND coalesce(m.task = w.task, true) AND (c.gone IS NULL OR get_bit(c.gone, m.n::integer - 1) = 0);
        IF cardinality(b.ids) + cardinality(found) > room THEN
            b.seq := places[room - cardinality(b.ids)];
        END IF;
        b.chunks := b.chunks || c.number;
        b.ids := (b.ids || found)[1:room];
        EXIT WHEN b.seq IS NOT NULL;
    END LOOP;
    RETURN b;
END $$;

-- Where to go on, once more with each job of the page; NULL: that was all.
CREATE TYPE page AS (
    part     integer,  -- 1: those that have places in the order of puts; 2: members of chunks; 3: the first once more
    queue    text COLLATE "C",  -- NULL: all in the order of puts
    after    bigint,
    base     bigint,   -- in all queues after this one
    since_us bigint,   -- since when members of chunks are left out; NULL: none were
    ids      text[],
    chunks   bigint[]
);

-- Queue by queue: the rest of the one in which the page before has ended, then others, of each less the more there are.
CREATE FUNCTION queue_by_queue(w wanted, from_queue text, after bigint, base bigint, most integer, room integer) RETURNS bite
LANGUAGE plpgsql STABLE AS $$
DECLARE
    b bite;
    more bite;
    several integer := greatest(1, most / 100);
    names text[] := queue_names(from_queue, 10 * several);
    group_of text[];
BEGIN
    IF from_queue <> '' THEN
        b := bite_of(w, ARRAY[from_queue], true, after, most, room);
    END IF;
    FOR i IN 1..cardinality(names) BY several LOOP
        EXIT WHEN b.seq IS NOT NULL;
        group_of := names[i:i + several - 1];
        IF cardinality(b.ids) >= room THEN
            b.queue := names[i - 1];
            b.queue := coalesce(b.queue, from_queue);
            b.seq := 9223372036854775807;
            RETURN b;
        END IF;
        more := bite_of(w, group_of, true, base, most / several, room - coalesce(cardinality(b.ids), 0));
        b := (b.ids || more.ids, b.chunks || more.chunks, more.queue, more.seq)::bite;
    END LOOP;
    IF b.seq IS NULL AND cardinality(names) = 10 * several THEN
        b.queue := names[10 * several];
        b.seq := 9223372036854775807;
    END IF;
    RETURN b;
END $$;

-- A page of jobs for which everything that is given is true, at most `room`, from that place on.
CREATE FUNCTION find_page(
    at bigint, from_part integer, from_queue text, from_after bigint, from_base bigint, from_since bigint, of_queue text, of_task text,
    of_batch text, of_state text, of_reason text, is_scheduled boolean, room integer, most integer
) RETURNS page LANGUAGE plpgsql STABLE AS $$
DECLARE
    p page := (from_part, from_queue, from_after, from_base, from_since, NULL, NULL);
    w wanted;
    b bite;
    names text[];
    few integer := 32;
BEGIN
    w.now_us := moment(at);
    w.queue := of_queue;
    w.task := of_task;
    w.batch := of_batch;
    w.reason := of_reason;
    w.scheduled := is_scheduled;
    w.waits := coalesce(of_state = 'ready', true) AND of_reason IS NULL;
    w.runs := coalesce(of_state = 'running', true) AND of_reason IS NULL AND is_scheduled IS NOT TRUE;
    w.ends := CASE WHEN is_scheduled THEN '{}' WHEN of_state IS NULL THEN '{done,dead,cancelled}' ELSE ARRAY[of_state] END;
    IF p.part = 2 THEN
        b := bite_of_chunks(w, p.after, most, room);
    ELSE
        w.chunks := w.runs AND p.part = 1
            AND coalesce((SELECT sum(c.members) FROM (SELECT members FROM chunk ORDER BY number LIMIT most + 1) AS c), 0) <= most;
        IF w.runs AND NOT w.chunks THEN
            p.since_us := coalesce(p.since_us, w.now_us);
        END IF;
        IF p.part = 3 THEN
            w.since_us := p.since_us;
        END IF;
        IF p.queue IS NULL AND of_queue IS NULL AND of_batch IS NULL THEN
            names := queue_names('', 10 * greatest(1, most / 100) + 1);
            IF cardinality(names) > 10 * greatest(1, most / 100) THEN
                p.queue := '';
                p.base := p.after;
            END IF;
        ELSE
            names := ARRAY[coalesce(of_queue, '')];
        END IF;
        IF p.queue IS NULL THEN
            b := bite_of(w, names, false, p.after, most / greatest(1, cardinality(names)), room);
            IF b.seq IS NOT NULL AND coalesce(cardinality(b.ids), 0) < room AND cardinality(names) > few THEN
                p.queue := '';
                p.base := p.after;
            END IF;
        END IF;
        IF p.queue IS NOT NULL THEN
            b := queue_by_queue(w, p.queue, p.after, p.base, most, room);
            p.queue := b.queue;
        END IF;
    END IF;
    p.ids := b.ids;
    p.chunks := coalesce(b.chunks, '{}');
    p.after := b.seq;
    IF p.after IS NULL AND p.since_us IS NOT NULL AND p.part < 3 THEN
        p.part := p.part + 1;
        p.queue := NULL;
        p.after := 0;
        p.base := 0;
    END IF;
    RETURN p;
END $$;

-- The jobs of a page, and where to go on, in each row; if there are none, that alone.
CREATE FUNCTION find(
    at bigint, from_part integer, from_queue text, from_after bigint, from_base bigint, from_since bigint, of_queue text, of_task text,
    of_batch text, of_state text, of_reason text, is_scheduled boolean, room integer, most integer
) RETURNS TABLE (place page, j job) LANGUAGE plpgsql STABLE SET search_path FROM CURRENT
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    place := find_page(at, from_part, from_queue, from_after, from_base, from_since, of_queue, of_task, of_batch, of_state, of_reason,
                       is_scheduled, room, most);
    RETURN QUERY SELECT place, s FROM (SELECT) AS one LEFT JOIN shown(place.ids, place.chunks) AS s ON true;
END $$;
