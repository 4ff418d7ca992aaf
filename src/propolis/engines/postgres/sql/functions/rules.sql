-- Rules: what keeps jobs back, what they count, and who sets them.
--
-- Jobs that a rule keeps back are a *group*, with the scope and the name of the rule.  A limit for each key of a prefix keeps back
-- groups as if each of these keys had a limit of its own, and one for each key of a task those of that task and each key.  A key
-- has one count and one bucket, whichever limit holds for it.

-- The rules on some groups, with what they count.  Arrays, because whoever leases counts on in them.
CREATE TYPE rulings AS (
    scopes     text[],
    names      text[],
    shut       boolean[],  -- paused or blocked, or others lease under it just now
    ns         integer[],  -- NULL: there is no limit
    everys     bigint[],
    bursts     integer[],
    each       boolean[],  -- the limit is for each key
    uses       integer[],  -- which of these it counts:
    use_scopes text[],
    use_names  text[],
    runs       bigint[],   -- counted up to where there is no room
    fulls      bigint[]    -- when their buckets are full: at the latest when an empty one would be
);

-- The n of a limit that is only a rate.
CREATE FUNCTION unbounded() RETURNS integer LANGUAGE sql IMMUTABLE AS $$ SELECT 2147483647 $$;

-- When a bucket is full: at the latest when an empty one would be.
CREATE FUNCTION bounded(full_us bigint, now_us bigint, every_us bigint, burst integer) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT least(full_us, now_us + every_us * burst)
$$;

-- Whether this can be a limit: one that is damaged is as if it were not there, so that it stops no lease of others (L7).
CREATE FUNCTION can_be_counted_with(n integer, every_us bigint, burst integer) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$  -- it is inlined
    SELECT n >= 0 AND (every_us IS NULL OR (every_us > 0 AND burst > 0 AND every_us::numeric * burst <= 3200000000000000))
$$;

-- When there is a token in it.
CREATE FUNCTION next_token(full_us bigint, now_us bigint, every_us bigint, burst integer) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT greatest(now_us, bounded(full_us, now_us, every_us, burst) - (burst - 1) * every_us)
$$;

-- How many more jobs may start; NULL: any number.
CREATE FUNCTION room(now_us bigint, shut boolean, n integer, every_us bigint, burst integer, run bigint, full_us bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN shut THEN 0
                WHEN n IS NOT NULL THEN greatest(0, least(
                    n - run, (every_us * burst - greatest(0, bounded(full_us, now_us, every_us, burst) - now_us)) / every_us)) END
$$;

-- How long the prefixes are that have a limit.
CREATE FUNCTION prefix_lengths() RETURNS integer[] LANGUAGE sql STABLE AS $$
    SELECT ARRAY(SELECT DISTINCT length(name) - 1 FROM rule WHERE kind = 'limit' AND scope = 'key' AND right(name, 1) = '*')
$$;

-- The rules that hold for these groups: whether one shuts it, and the limit with what it counts.
--
-- The limit of a key is that of exactly this key, else that of the longest prefix, else that of each key of its task.  `each`: it is
-- one of the latter two.
CREATE FUNCTION rules_on(t terms, of_scopes text[], of_names text[])
RETURNS TABLE (scope text, name text, shut boolean, n integer, every_us bigint, burst integer, use_scope text, use_name text, each boolean)
LANGUAGE plpgsql STABLE SET enable_nestloop = on SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    lengths integer[] := prefix_lengths();
BEGIN
    RETURN QUERY
        SELECT g.scope, g.name,
               (SELECT true FROM rule AS r WHERE r.kind IN ('block', 'pause') AND r.scope = g.scope AND r.name = g.name
                   AND (r.until_us IS NULL OR r.until_us > t.now_us) LIMIT 1) IS NOT NULL,
               l.n, l.every_us, l.burst, CASE g.scope WHEN 'task_key' THEN 'key' ELSE g.scope END, coalesce(g.key, g.name), l.turn > 1
          FROM (SELECT s.scope, s.name, CASE s.scope WHEN 'key' THEN s.name
                                                     WHEN 'task_key' THEN substr(s.name, strpos(s.name, ' ') + 1) END AS key
                  FROM unnest(of_scopes, of_names) AS s (scope, name) WHERE s.name IS NOT NULL) AS g
          LEFT JOIN LATERAL (
               SELECT f.turn, r.n, r.every_us, r.burst FROM (
                   SELECT 1 AS turn, g.scope AS scope, g.name AS name WHERE g.key IS NULL UNION ALL
                   SELECT 1, 'key', g.key WHERE right(g.key, 1) <> '*' UNION ALL
                   SELECT 2, 'key', left(g.key, e) || '*' FROM unnest(lengths) AS e WHERE g.key IS NOT NULL UNION ALL
                   SELECT 3, 'task_key', left(g.name, strpos(g.name, ' ')) || '*' WHERE g.scope = 'task_key') AS f,
                   LATERAL (SELECT u.n, u.every_us, u.burst FROM rule AS u WHERE u.kind = 'limit' AND u.scope = f.scope AND u.name = f.name
                               AND (u.until_us IS NULL OR u.until_us > t.now_us)
                               AND can_be_counted_with(u.n, u.every_us, u.burst) LIMIT 1) AS r  -- by its key, whatever the statistics say
                ORDER BY f.turn, length(f.name) DESC LIMIT 1) AS l ON g.scope <> 'task_key' OR l.turn = 3;
END $$;

-- The rules on these groups, as far as there are any.  Nothing is counted yet.
CREATE FUNCTION rulings_on(t terms, of_scopes text[], of_names text[]) RETURNS rulings LANGUAGE plpgsql STABLE AS $$
DECLARE
    r rulings;
BEGIN
    SELECT array_agg(o.scope), array_agg(o.name), array_agg(o.shut), array_agg(o.n), array_agg(o.every_us), array_agg(o.burst),
           array_agg(o.each), array_agg(o.use), array_agg(o.use_scope) FILTER (WHERE o.first), array_agg(o.use_name) FILTER (WHERE o.first)
      INTO r.scopes, r.names, r.shut, r.ns, r.everys, r.bursts, r.each, r.uses, r.use_scopes, r.use_names
      FROM (SELECT h.scope, h.name, h.shut, h.n, h.every_us, h.burst, h.use_scope, h.use_name, h.each,
                   dense_rank() OVER (ORDER BY h.use_scope, h.use_name)::integer AS use,
                   row_number() OVER (PARTITION BY h.use_scope, h.use_name) = 1 AS first
              FROM rules_on(t, of_scopes, of_names) AS h WHERE h.shut OR h.n IS NOT NULL ORDER BY use) AS o;
    RETURN r;
END $$;

-- Count what they do, and look into the buckets.
CREATE FUNCTION counted_under(t terms, r rulings) RETURNS rulings LANGUAGE plpgsql STABLE AS $$
BEGIN
    SELECT array_agg(CASE
               WHEN c.most IS NULL OR c.most = unbounded() THEN 0
               WHEN c.scope = 'key' THEN (SELECT count(*) FROM (SELECT FROM running WHERE limit_key = c.name LIMIT c.most) AS j)
               WHEN c.scope = 'task' THEN (SELECT count(*) FROM (SELECT FROM running WHERE task = c.name LIMIT c.most) AS j)
               ELSE (SELECT count(*) FROM (SELECT FROM running WHERE queue = c.name LIMIT c.most) AS j) END ORDER BY c.use),
           array_agg(coalesce(least(c.full_us, c.empty_us), 0) ORDER BY c.use)
      INTO r.runs, r.fulls
      FROM (SELECT k.use, n.scope, n.name, k.most, k.empty_us, CASE WHEN k.empty_us IS NOT NULL THEN full_at(n.scope, n.name) END AS full_us
              FROM (SELECT u.use, max(u.n) AS most, min(t.now_us + u.every_us * u.burst) AS empty_us
                      FROM unnest(r.uses, r.ns, r.everys, r.bursts) AS u (use, n, every_us, burst) GROUP BY u.use) AS k
              JOIN unnest(r.use_scopes, r.use_names) WITH ORDINALITY AS n (scope, name, use) ON n.use = k.use) AS c;
    RETURN r;
END $$;

-- Lock the limits among these, so that those who lease at the same time count one another: a limit of this very name, and under
-- one for each key, and under a rate, the bucket.  Those that are not locked are shut.
--
-- A limit on a queue or a task is waited for, as all want it; but not for long, since an exchange may lock others before that, and
-- nobody is to wait for one another.  Of a key that somebody else leases jobs just now, nobody else need do so.
CREATE FUNCTION lock_limits(t terms, INOUT r rulings) LANGUAGE plpgsql SET lock_timeout = '50ms' AS $$
DECLARE
    locked text[];
    buckets text[];
BEGIN
    BEGIN
        PERFORM FROM (SELECT l.scope COLLATE "C" AS scope, l.name COLLATE "C" AS name
                        FROM unnest(r.scopes, r.names, r.ns) AS l (scope, name, n)
                       WHERE l.scope IN ('queue', 'task') AND l.n < unbounded() ORDER BY 1, 2) AS l, LATERAL (
                SELECT FROM rule WHERE kind = 'limit' AND scope = l.scope AND name = l.name FOR UPDATE) AS them;
        INSERT INTO bucket (scope, name, full_us, full_minute)
        SELECT DISTINCT n.scope, n.name, 0, t.now_us / 60000000 + 1
          FROM unnest(r.uses, r.everys, r.each) AS l (use, every_us, each)
          JOIN unnest(r.use_scopes, r.use_names) WITH ORDINALITY AS n (scope, name, use) ON n.use = l.use
         WHERE (l.each OR l.every_us IS NOT NULL)
           AND (SELECT true FROM bucket AS b WHERE b.scope = n.scope AND b.name = n.name LIMIT 1) IS NULL ORDER BY 1, 2
        ON CONFLICT (scope, name) DO NOTHING;
        PERFORM FROM (SELECT n.scope COLLATE "C" AS scope, n.name COLLATE "C" AS name
                        FROM unnest(r.scopes, r.names, r.everys) AS n (scope, name, every_us)
                       WHERE n.scope IN ('queue', 'task') AND n.every_us IS NOT NULL ORDER BY 1, 2) AS n, LATERAL (
                SELECT FROM bucket WHERE scope = n.scope AND name = n.name FOR UPDATE) AS them;
    EXCEPTION WHEN lock_not_available THEN
        NULL;  -- those are taken as they are
    END;
    SELECT array_agg(u.scope || ' ' || u.name) INTO locked
      FROM unnest(r.scopes, r.names, r.ns, r.each) AS l (scope, name, n, each), LATERAL (
           SELECT scope, name FROM rule WHERE kind = 'limit' AND scope = l.scope AND name = l.name FOR UPDATE SKIP LOCKED) AS u
     WHERE l.n < unbounded() AND NOT l.each;
    SELECT array_agg(u.scope || ' ' || u.name) INTO buckets
      FROM (SELECT DISTINCT use FROM unnest(r.uses, r.everys, r.each) AS l (use, every_us, each) WHERE l.each OR l.every_us IS NOT NULL) AS l
      JOIN unnest(r.use_scopes, r.use_names) WITH ORDINALITY AS n (scope, name, use) ON n.use = l.use, LATERAL (
           SELECT scope, name FROM bucket WHERE scope = n.scope AND name = n.name FOR UPDATE SKIP LOCKED) AS u;
    SELECT array_agg(coalesce(l.shut OR (l.n < unbounded() AND NOT l.each AND k.name IS NULL)
                              OR ((l.each OR l.every_us IS NOT NULL) AND b.name IS NULL), false) ORDER BY l.place) INTO r.shut
      FROM unnest(r.scopes, r.names, r.shut, r.ns, r.everys, r.each, r.uses)
      WITH ORDINALITY AS l (scope, name, shut, n, every_us, each, use, place)
      JOIN unnest(r.use_scopes, r.use_names) WITH ORDINALITY AS n (scope, name, use) ON n.use = l.use
      LEFT JOIN unnest(locked) AS k (name) ON k.name = l.scope || ' ' || l.name
      LEFT JOIN unnest(buckets) AS b (name) ON b.name = n.scope || ' ' || n.name;
END $$;

-- Its run did not count: the tokens that it took are to go back, as far as there are rates now.  One that is full needs none.
CREATE FUNCTION give_back(t terms, j job) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM rule WHERE every_us IS NOT NULL) THEN
        INSERT INTO unspent (scope, name, at_us, every_us, burst)
        SELECT r.use_scope, r.use_name, t.now_us, r.every_us, r.burst
          FROM rules_on(t, ARRAY['queue', 'task', 'key', 'task_key'], ARRAY[j.queue, j.task, j.limit_key, j.task || ' ' || j.limit_key]) AS r
         WHERE r.every_us IS NOT NULL
           AND (SELECT true FROM bucket AS b WHERE b.scope = r.use_scope AND b.name = r.use_name LIMIT 1);
    END IF;
END $$;

-- Put tokens of runs that did not count back into these buckets, which the caller has locked.
CREATE FUNCTION take_back(of_scopes text[], of_names text[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    back record;
BEGIN
    FOR back IN
        WITH gone AS (
            DELETE FROM unspent AS u USING unnest(of_scopes, of_names) AS o (scope, name)
             WHERE u.scope = o.scope AND u.name = o.name RETURNING u.number, u.scope, u.name, u.at_us, u.every_us, u.burst)
        SELECT scope, name, at_us, every_us, burst FROM gone ORDER BY number
    LOOP
        UPDATE bucket AS b SET full_us = greatest(bounded(b.full_us, back.at_us, back.every_us, back.burst) - back.every_us, back.at_us)
         WHERE b.scope = back.scope AND b.name = back.name;
    END LOOP;
END $$;

-- The rules on these groups, with what they count, all of it locked until the end of the transaction.  What others have locked is
-- shut, and somebody is to look again: soon, where all want it.
CREATE FUNCTION under(t terms, of_queue text, of_scopes text[], of_names text[]) RETURNS rulings LANGUAGE plpgsql AS $$
DECLARE
    r rulings := rulings_on(t, of_scopes, of_names);
    before boolean[] := r.shut;
    busy text[];
BEGIN
    IF coalesce(array_remove(r.ns, NULL), '{}') = '{}' THEN
        RETURN r;
    END IF;
    r := lock_limits(t, r);
    IF r.shut <> before THEN
        SELECT array_agg(l.scope) INTO busy FROM unnest(r.scopes, r.shut, before) AS l (scope, shut, before) WHERE l.shut AND NOT l.before;
        INSERT INTO opening (queue, scope, name, at_us)
        SELECT of_queue, l.scope, l.name, t.now_us FROM unnest(r.scopes, r.names, r.shut, before) AS l (scope, name, shut, before)
         WHERE l.shut AND NOT l.before AND l.scope IN ('key', 'task_key');
        IF busy && ARRAY['queue', 'task'] THEN
            PERFORM wake(of_queue);
        END IF;
    END IF;
    IF EXISTS (SELECT FROM unspent) THEN
        PERFORM take_back(array_agg(n.scope), array_agg(n.name)) FROM unnest(r.use_scopes, r.use_names) WITH ORDINALITY AS n (scope, name, use)
          WHERE n.use IN (SELECT l.use FROM unnest(r.uses, r.shut) AS l (use, shut) WHERE NOT l.shut);
    END IF;
    PERFORM break_out_limited(
        ARRAY(SELECT l.name FROM unnest(r.scopes, r.names, r.ns) AS l (scope, name, n) WHERE l.scope = 'queue' AND l.n < unbounded()),
        ARRAY(SELECT l.name FROM unnest(r.scopes, r.names, r.ns) AS l (scope, name, n) WHERE l.scope = 'task' AND l.n < unbounded()));
    RETURN counted_under(t, r);
END $$;

-- How many more jobs may start under the rules of this name, which are locked; NULL: any number.
CREATE FUNCTION room_of(t terms, of_queue text, of_scope text, of_name text) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    r rulings := under(t, of_queue, ARRAY[of_scope], ARRAY[of_name]);
BEGIN
    PERFORM keep_buckets(r, r.fulls);
    RETURN room(t.now_us, r.shut[1], r.ns[1], r.everys[1], r.bursts[1], r.runs[1], r.fulls[1]);
END $$;

-- Keep what has become of these buckets, which the caller has locked.
CREATE FUNCTION keep_buckets(r rulings, fulls bigint[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF array_remove(r.everys, NULL) <> '{}' THEN
        UPDATE bucket AS b SET full_us = u.full_us, full_minute = u.full_us / 60000000 + 1
          FROM unnest(r.use_scopes, r.use_names, fulls) WITH ORDINALITY AS u (scope, name, full_us, use)
         WHERE b.scope = u.scope AND b.name = u.name AND b.full_us <> u.full_us
           AND u.use IN (SELECT l.use FROM unnest(r.uses, r.shut, r.everys) AS l (use, shut, every_us)
                          WHERE NOT l.shut AND l.every_us IS NOT NULL);
    END IF;
END $$;

-- When the bucket of this name is full, with the tokens that come back into it.
CREATE FUNCTION full_at(of_scope text, of_name text) RETURNS bigint LANGUAGE plpgsql STABLE AS $$
DECLARE
    full_us bigint := coalesce((SELECT b.full_us FROM bucket AS b WHERE b.scope = of_scope AND b.name = of_name), 0);
    back record;
BEGIN
    FOR back IN SELECT at_us, every_us, burst FROM unspent WHERE scope = of_scope AND name = of_name ORDER BY number LOOP
        full_us := greatest(bounded(full_us, back.at_us, back.every_us, back.burst) - back.every_us, back.at_us);
    END LOOP;
    RETURN full_us;
END $$;

-- Of all groups of a queue a lease looks at so many without being told.
CREATE FUNCTION few() RETURNS integer LANGUAGE sql IMMUTABLE AS $$ SELECT 32 $$;

-- The groups of a queue after this one and before a scope, in their order.
CREATE FUNCTION lines_after(of_queue text, from_scope text, from_name text, to_scope text, most integer)
RETURNS TABLE (scope text, name text) LANGUAGE plpgsql STABLE AS $$
BEGIN
    scope := from_scope;
    name := from_name;
    FOR n IN 1..most LOOP
        SELECT h.hold_scope, h.hold_name INTO scope, name FROM held AS h
         WHERE h.queue = of_queue AND (h.hold_scope, h.hold_name) > (lines_after.scope, lines_after.name) AND h.hold_scope < to_scope
         ORDER BY h.hold_scope, h.hold_name LIMIT 1;
        EXIT WHEN NOT FOUND;
        IF scope <> 'parked' THEN
            RETURN NEXT;
        END IF;
    END LOOP;
END $$;

-- The rules that keep jobs of a queue back, one step in the index for each.  Where there are more than a call can look at, it
-- begins at that of any of the jobs.
CREATE FUNCTION lines_held(of_queue text, most integer) RETURNS TABLE (scope text, name text) LANGUAGE plpgsql AS $$
DECLARE
    begun boolean := false;
    first_scope text;
    first_name text;
BEGIN
    SELECT h.hold_scope, h.hold_name INTO first_scope, first_name FROM held AS h
     WHERE h.queue = of_queue AND h.seq >= (
           SELECT min(e.seq) + floor(random() * (max(e.seq) - min(e.seq)))::bigint FROM held AS e WHERE e.queue = of_queue)
     ORDER BY h.seq LIMIT 1;
    scope := first_scope;
    name := first_name;
    WHILE most > 0 AND scope IS NOT NULL AND (NOT begun OR (scope, name) <> (first_scope, first_name)) LOOP
        IF scope <> 'parked' THEN
            RETURN NEXT;
        END IF;
        begun := true;
        most := most - 1;
        SELECT h.hold_scope, h.hold_name INTO scope, name FROM held AS h
         WHERE h.queue = of_queue AND (h.hold_scope, h.hold_name) > (lines_held.scope, lines_held.name)
         ORDER BY h.hold_scope, h.hold_name LIMIT 1;
        IF NOT FOUND THEN
            SELECT h.hold_scope, h.hold_name INTO scope, name FROM held AS h
             WHERE h.queue = of_queue ORDER BY h.hold_scope, h.hold_name LIMIT 1;
        END IF;
    END LOOP;
END $$;

-- Of a key something has left the line or the running, or may not start for another reason: what is held of it may go instead.
CREATE FUNCTION open_keys(t terms, queues text[], keys text[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF array_remove(keys, NULL) <> '{}' AND EXISTS (SELECT FROM rule WHERE kind = 'limit' AND scope IN ('key', 'task_key')) THEN
        INSERT INTO opening (queue, scope, name, at_us)
        SELECT DISTINCT o.queue, 'key', o.key, t.now_us FROM unnest(queues, keys) AS o (queue, key) WHERE o.key IS NOT NULL;
    END IF;
END $$;

-- Forget a bite of what has opened in a queue, if nothing is held there: runs end also where no limit is reached.  One statement,
-- since whoever sets the first job of a group aside opens it in the same step.
CREATE FUNCTION forget_openings(t terms, of_queue text, most integer) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM opening WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM opening WHERE queue = of_queue AND at_us <= t.now_us
           AND NOT EXISTS (SELECT FROM held WHERE queue = of_queue AND hold_scope < 'parked')
           AND NOT EXISTS (SELECT FROM held WHERE queue = of_queue AND hold_scope > 'parked')
         ORDER BY at_us LIMIT most FOR UPDATE SKIP LOCKED));
END $$;

-- The same in a bite of the queues that have some, as nobody may lease from them any more; part of a sweep.
CREATE FUNCTION forget_all_openings(t terms, most integer) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    of_queue text := '';
BEGIN
    FOR n IN 1..most LOOP
        SELECT o.queue INTO of_queue FROM opening AS o WHERE o.queue > of_queue ORDER BY o.queue LIMIT 1;
        EXIT WHEN NOT FOUND;
        PERFORM forget_openings(t, of_queue, most);
    END LOOP;
END $$;

-- Is something held in this group?  It is found by its place, whatever the statistics say.
CREATE FUNCTION is_held(of_queue text, of_scope text, of_name text) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    PERFORM FROM held WHERE queue = of_queue AND hold_scope = of_scope AND hold_name = of_name ORDER BY rank, pos LIMIT 1;
    RETURN FOUND;
END $$;

-- The tasks of a queue, each with a space behind it, of which a limit for each key may keep something back: of many there is mostly
-- nothing held, and so nobody has to ask for each of their keys.
CREATE FUNCTION tasks_held(of_queue text) RETURNS text[] LANGUAGE sql STABLE AS $$
    SELECT ARRAY(
        SELECT left(r.name, -1) FROM (SELECT name FROM rule WHERE kind = 'limit' AND scope = 'task_key' LIMIT bite()) AS r
         WHERE (SELECT true FROM held AS h WHERE h.queue = of_queue AND h.hold_scope = 'task_key'
                   AND h.hold_name >= left(r.name, -1) AND h.hold_name < left(r.name, -2) || '!' ORDER BY h.hold_name LIMIT 1))
$$;

-- The groups of a queue that something may leave, as far as anybody knows: some of those that have opened, those of tasks, and a few
-- of all others, as nobody says so where a rule ends, or a limit on a key counts jobs of several queues.
CREATE FUNCTION lines_open(t terms, of_queue text, most integer, OUT scopes text[], OUT names text[]) LANGUAGE plpgsql AS $$
DECLARE
    place text;
    walked text[] := '{}';
BEGIN
    IF EXISTS (SELECT FROM opening WHERE queue = of_queue AND at_us <= t.now_us) THEN
        WITH gone AS (
            DELETE FROM opening WHERE ctid = ANY (ARRAY(
                SELECT ctid FROM opening WHERE queue = of_queue AND at_us <= t.now_us ORDER BY at_us LIMIT most FOR UPDATE SKIP LOCKED))
            RETURNING scope, name)
        SELECT array_agg(scope) FILTER (WHERE scope <> '*'), array_agg(name) FILTER (WHERE scope <> '*'), min(name) FILTER (WHERE scope = '*')
          INTO scopes, names, place FROM gone;
        SELECT array_agg(g.scope || ' ' || g.name) INTO names FROM (
            SELECT o.scope, o.name FROM unnest(scopes, names) AS o (scope, name) UNION ALL
            SELECT 'task_key', k.task || o.name FROM unnest(scopes, names) AS o (scope, name), unnest(tasks_held(of_queue)) AS k (task)
             WHERE o.scope = 'key') AS g (scope, name)
         WHERE is_held(of_queue, g.scope, g.name);
        IF place IS NOT NULL THEN
            walked := ARRAY(SELECT l.scope || ' ' || l.name
                              FROM lines_after(of_queue, split_part(place, ' ', 1), substr(place, strpos(place, ' ') + 1), '~', most) AS l);
            IF cardinality(walked) > 0 THEN
                INSERT INTO opening (queue, scope, name, at_us) VALUES (of_queue, '*', walked[cardinality(walked)], t.now_us);
            END IF;
        END IF;
    END IF;
    names := ARRAY(
        SELECT DISTINCT n COLLATE "C" FROM (
            SELECT unnest(names) UNION ALL SELECT unnest(walked) UNION ALL
            SELECT l.scope || ' ' || l.name FROM lines_after(of_queue, 'parked', '', 'task_key', bite()) AS l UNION ALL
            SELECT l.scope || ' ' || l.name FROM lines_held(of_queue, few()) AS l) AS g (n) WHERE n IS NOT NULL ORDER BY 1);
    scopes := ARRAY(SELECT split_part(n, ' ', 1) FROM unnest(names) WITH ORDINALITY AS g (n, place) ORDER BY g.place);
    names := ARRAY(SELECT substr(n, strpos(n, ' ') + 1) FROM unnest(names) WITH ORDINALITY AS g (n, place) ORDER BY g.place);
END $$;

-- Let those stand in line again, in their old places, whose rule keeps them back no more, up to `want` of each rule; and up to
-- `more` where there is any room, since other rules keep most of them back.  Gives their ids, and how many of them may leave the
-- line until another one of the same rule may have to stand there.
CREATE FUNCTION unhold(t terms, of_queue text, want integer, more integer, OUT ids text[], OUT enough bigint) LANGUAGE plpgsql AS $$
DECLARE
    lines record := lines_open(t, of_queue, 2 * want + few());
    r rulings := under(t, of_queue, lines.scopes, lines.names);
    l record;
    freed record;
BEGIN
    ids := '{}';
    enough := greatest(want, more);
    PERFORM keep_buckets(r, r.fulls);
    SELECT array_agg(o.scope) AS scopes, array_agg(o.name) AS names, array_agg(o.room) AS rooms,
           array_agg(CASE WHEN o.room = 0 THEN 0 ELSE greatest(least(want, o.room), more) END) AS most, array_agg(o.every_us) AS everys,
           array_agg(o.burst) AS bursts, array_agg(o.full_us) AS fulls INTO l FROM rooms(t, r, lines.scopes, lines.names) AS o;
    SELECT array_agg(f.place) AS places, array_agg(f.n) AS lines INTO freed FROM (
        SELECT h.ctid AS place, o.n FROM unnest(l.scopes, l.names, l.most) WITH ORDINALITY AS o (scope, name, most, n), LATERAL (
               SELECT ctid FROM held WHERE queue = of_queue AND hold_scope = o.scope AND hold_name = o.name
                ORDER BY rank, pos LIMIT o.most FOR UPDATE SKIP LOCKED) AS h LIMIT bite()) AS f;
    IF freed.places IS NOT NULL THEN
        WITH free AS (DELETE FROM held WHERE ctid = ANY (freed.places) RETURNING WAITING_COLUMNS),
        back AS (
            INSERT INTO ready (WAITING_COLUMNS)
            SELECT WAITING_COLUMNS FROM free
            RETURNING id)
        SELECT array_agg(id) INTO ids FROM back;
    END IF;
    -- Those that had as many as could go may have more: these go at once, where there is room, or when the next token comes.
    SELECT least(enough, min(o.most) FILTER (WHERE o.most > 0)), array_agg(o.scope) AS scopes, array_agg(o.name) AS names, array_agg(CASE
               WHEN o.room IS NULL OR o.n < o.room THEN CASE WHEN o.scope IN ('key', 'task_key') THEN t.now_us END
               ELSE nullif(next_token(greatest(o.full_us, t.now_us) + least(o.n, o.room) * o.every_us, t.now_us, o.every_us, o.burst),
                           t.now_us) END) AS times
      INTO enough, l.scopes, l.names, l.fulls
      FROM (SELECT k.scope, k.name, k.room, k.most, k.every_us, k.burst, k.full_us, coalesce(f.n, 0) AS n
              FROM unnest(l.scopes, l.names, l.rooms, l.most, l.everys, l.bursts, l.fulls) WITH ORDINALITY
                   AS k (scope, name, room, most, every_us, burst, full_us, place)
              LEFT JOIN (SELECT u.place, count(*) AS n FROM unnest(freed.lines) AS u (place) GROUP BY u.place) AS f ON f.place = k.place) AS o
     WHERE o.n >= o.most;
    PERFORM open_at(t, of_queue, l.scopes, l.names, l.fulls);
END $$;

-- Look at these groups again at these times, if nobody does before.
CREATE FUNCTION open_at(t terms, of_queue text, scopes text[], names text[], times bigint[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO opening (queue, scope, name, at_us)
    SELECT of_queue, o.scope, o.name, o.at_us FROM unnest(scopes, names, times) AS o (scope, name, at_us)
     WHERE o.at_us IS NOT NULL AND (  -- compared whole, since another index would go through those of all other groups
           SELECT true FROM opening AS p
            WHERE (p.queue, p.scope, p.name, p.at_us) >= (of_queue, o.scope, o.name, 0)
              AND (p.queue, p.scope, p.name, p.at_us) <= (of_queue, o.scope, o.name, o.at_us)
            ORDER BY p.queue, p.scope, p.name, p.at_us LIMIT 1) IS NULL;
END $$;

-- What jobs that are set aside by these of the rules have to wait for.
CREATE FUNCTION open_kept(t terms, of_queue text, r rulings, fulls bigint[], kept_by integer[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM open_at(t, of_queue, array_agg(k.scope), array_agg(k.name), array_agg(k.at_us))
       FROM (SELECT r.scopes[n] AS scope, r.names[n] AS name, r.everys[n] IS NOT NULL AND NOT r.shut[n] AS rated,
                    CASE WHEN r.everys[n] IS NULL OR r.shut[n] THEN t.now_us
                         ELSE next_token(fulls[r.uses[n]], t.now_us, r.everys[n], r.bursts[n]) END AS at_us
               FROM (SELECT DISTINCT b AS n FROM unnest(kept_by) AS b) AS those) AS k
      WHERE k.rated AND k.at_us > t.now_us  -- else a run has to end: of those that do just now, it is not known that something is held
         OR k.scope IN ('key', 'task_key')
            AND NOT is_held(of_queue, k.scope, k.name);
END $$;

-- How many may leave these groups, by these rules; NULL: any number.
CREATE FUNCTION rooms(t terms, r rulings, of_scopes text[], of_names text[])
RETURNS TABLE (scope text, name text, room bigint, every_us bigint, burst integer, full_us bigint) LANGUAGE sql STABLE AS $$
    SELECT g.scope, g.name, room(t.now_us, k.shut, k.n, k.every_us, k.burst, u.run, u.full_us), k.every_us, k.burst, u.full_us
      FROM unnest(of_scopes, of_names) WITH ORDINALITY AS g (scope, name, n)
      LEFT JOIN unnest(r.scopes, r.names, r.shut, r.ns, r.everys, r.bursts, r.uses) AS k (scope, name, shut, n, every_us, burst, use)
        ON k.scope = g.scope AND k.name = g.name
      LEFT JOIN unnest(r.runs, r.fulls) WITH ORDINALITY AS u (run, full_us, use) ON u.use = k.use
     ORDER BY g.n
$$;

-- When the first token comes for one of these groups that waits for it.
CREATE FUNCTION next_token_for(t terms, of_scopes text[], of_names text[], OUT limited boolean, OUT next_us bigint)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    r rulings := rulings_on(t, of_scopes, of_names);
BEGIN
    limited := coalesce(array_remove(r.ns, NULL), '{}') <> '{}';
    IF array_remove(r.everys, NULL) <> '{}' THEN
        r := counted_under(t, r);
        SELECT min(k.next_us) INTO next_us FROM (
            SELECT next_token(r.fulls[u.use], t.now_us, u.every_us, u.burst) AS next_us
              FROM unnest(r.everys, r.bursts, r.uses) AS u (every_us, burst, use) WHERE u.every_us IS NOT NULL) AS k
         WHERE k.next_us > t.now_us;
    END IF;
END $$;

-- When the bucket of this name is full, and what time it is.
CREATE FUNCTION bucket_of(at bigint, of_scope text, of_name text, OUT full_us bigint, OUT now_us bigint) LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT AS $$
BEGIN
    full_us := full_at(of_scope, of_name);
    now_us := moment(at);
END $$;

-- Does a limit keep something back in one of these queues?  Whose end makes room may be elsewhere, and nobody announces it; the
-- first of the tokens comes then.
CREATE FUNCTION kept_back(t terms, queues text[], OUT limited boolean, OUT next_us bigint) LANGUAGE plpgsql STABLE AS $$
DECLARE
    scopes text[];
    names text[];
BEGIN
    SELECT array_agg(l.scope), array_agg(l.name) INTO scopes, names FROM unnest(queues) AS of (queue), LATERAL (
           SELECT l.scope, l.name FROM lines_held(of.queue, 100) AS l UNION ALL
           SELECT 'queue', of.queue WHERE EXISTS (SELECT FROM ready AS y WHERE y.queue = of.queue)) AS l;
    SELECT n.limited, n.next_us INTO limited, next_us FROM next_token_for(t, scopes, names) AS n;
END $$;

-- When the first token comes for anything that waits for it: what is set aside, as leases have written down, or in a queue that is
-- a rate's.
CREATE FUNCTION next_token_of_all(t terms) RETURNS bigint LANGUAGE plpgsql STABLE AS $$
DECLARE
    queues text[];
BEGIN
    IF NOT EXISTS (SELECT FROM rule WHERE every_us IS NOT NULL) THEN
        RETURN NULL;
    END IF;
    queues := ARRAY(SELECT u.name FROM rule AS u WHERE u.scope = 'queue' AND u.every_us IS NOT NULL
                       AND (SELECT true FROM ready AS y WHERE y.queue = u.name LIMIT 1) LIMIT bite());
    RETURN least((SELECT min(o.at_us) FROM opening AS o WHERE o.at_us > t.now_us),
                 (SELECT n.next_us FROM next_token_for(t, array_fill('queue'::text, ARRAY[cardinality(queues)]), queues) AS n));
END $$;

-- Forget buckets that are full, and tokens that have nowhere to go back to; part of a sweep.
CREATE FUNCTION forget_buckets(t terms, most integer) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM bucket WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM bucket WHERE full_minute < t.now_us / 60000000 ORDER BY full_minute LIMIT most FOR UPDATE SKIP LOCKED));
    DELETE FROM unspent WHERE ctid = ANY (ARRAY(
        SELECT u.ctid FROM unspent AS u WHERE (SELECT true FROM bucket AS b WHERE b.scope = u.scope AND b.name = u.name LIMIT 1) IS NULL
         ORDER BY u.number LIMIT most FOR UPDATE SKIP LOCKED));
END $$;

-- A rule has changed: what it, or another one in its place, kept back is looked at.  Those of each key are walked over in bites.
CREATE FUNCTION open_ruled(t terms, of_kind text, of_scope text, of_name text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    of_queue text := '';
    each boolean := of_kind = 'limit' AND right(of_name, 1) = '*';
BEGIN
    FOR n IN 1..CASE WHEN of_scope IN ('key', 'task_key') THEN bite() ELSE 0 END LOOP
        SELECT h.queue INTO of_queue FROM held AS h WHERE h.queue > of_queue ORDER BY h.queue LIMIT 1;
        EXIT WHEN NOT FOUND;
        INSERT INTO opening (queue, scope, name, at_us)
        VALUES (of_queue, CASE WHEN each THEN '*' ELSE of_scope END, CASE WHEN each THEN '' ELSE of_name END, t.now_us);
    END LOOP;
END $$;

-- Set a rule: until a time, for a while from now, or for good.  Says whether it is new, and did not only replace one; NULL where it
-- would be one prefix too many.
CREATE FUNCTION add_rule(
    at bigint, of_kind text, of_scope text, of_name text, of_n integer, who text, reason text, span_us bigint, ends_us bigint,
    of_every_us bigint, of_burst integer, most_prefixes integer
) RETURNS boolean LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t terms := (moment(at), NULL, NULL);
    before record;
    ends bigint := coalesce(t.now_us + span_us, ends_us);
BEGIN
    IF of_kind = 'limit' AND of_scope = 'key' AND right(of_name, 1) = '*' THEN
        LOCK TABLE rule IN SHARE ROW EXCLUSIVE MODE;  -- which leases do not wait for
        IF (SELECT count(*) FROM rule WHERE kind = 'limit' AND scope = 'key' AND right(name, 1) = '*' AND name <> of_name
               AND (until_us IS NULL OR until_us > t.now_us)) >= most_prefixes THEN
            RETURN NULL;
        END IF;
    END IF;
    PERFORM wake(''), open_ruled(t, of_kind, of_scope, of_name);
    LOOP
        INSERT INTO rule (kind, scope, name, n, set_by, why, set_us, until_us, every_us, burst)
        VALUES (of_kind, of_scope, of_name, of_n, who, reason, t.now_us, ends, of_every_us, of_burst) ON CONFLICT (kind, scope, name) DO NOTHING;
        IF FOUND THEN
            RETURN true;
        END IF;
        SELECT until_us INTO before FROM rule WHERE kind = of_kind AND scope = of_scope AND name = of_name FOR UPDATE;
        IF FOUND THEN  -- else somebody has removed it meanwhile
            UPDATE rule SET n = of_n, set_by = who, why = reason, set_us = t.now_us, until_us = ends, every_us = of_every_us,
                   burst = of_burst
             WHERE kind = of_kind AND scope = of_scope AND name = of_name;
            RETURN coalesce(before.until_us <= t.now_us, false);
        END IF;
    END LOOP;
END $$;

-- Says whether it was there, and not over.
CREATE FUNCTION remove_rule(at bigint, of_kind text, of_scope text, of_name text) RETURNS boolean
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    held boolean;
BEGIN
    DELETE FROM rule WHERE kind = of_kind AND scope = of_scope AND name = of_name
    RETURNING coalesce(until_us > moment(at), true) INTO held;
    PERFORM wake(''), open_ruled((moment(at), NULL, NULL), of_kind, of_scope, of_name);
    RETURN coalesce(held, false);
END $$;

-- Remove a bite of the rules that are over; part of a sweep.
CREATE FUNCTION remove_rules_over(t terms, most integer) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    over record;
BEGIN
    FOR over IN
        DELETE FROM rule WHERE ctid = ANY (ARRAY(
            SELECT ctid FROM rule WHERE until_us <= t.now_us ORDER BY until_us LIMIT most FOR UPDATE SKIP LOCKED))
        RETURNING kind, scope, name
    LOOP
        PERFORM open_ruled(t, over.kind, over.scope, over.name);
    END LOOP;
    IF FOUND THEN
        PERFORM wake('');
    END IF;
END $$;
