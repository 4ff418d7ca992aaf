-- Records: small named values with versions, changed together with puts.  And feeds: bounded logs that somebody may follow.

CREATE FUNCTION live(r records, now_us bigint) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT r.version IS NOT NULL AND (r.expires_us IS NULL OR r.expires_us > now_us)
$$;

-- A version for records of which the newest has `last`, if that can be one.
CREATE FUNCTION next_version(now_us bigint, last bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    drawn bigint := greatest(nextval('record_version'), now_us, CASE WHEN last < 9007199254740992 THEN last + 1 END);
BEGIN
    RETURN setval('record_version', drawn);
END $$;

-- Many swaps (R1), each {changes, puts, opens, bounded}.  Gives for each [version] or [null, refusal, name].
CREATE FUNCTION swap(at bigint, swaps jsonb, of_token text, known_us bigint) RETURNS jsonb
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t terms := (moment(at), 0, 0);
    s jsonb;
    given jsonb;
    known jsonb;
    places bigint := coalesce(pg_sequence_last_value('back'), 0);
BEGIN
    IF of_token IS NOT NULL THEN
        INSERT INTO swap_answer (token, answers, until_us) VALUES (of_token, NULL, t.now_us + known_us)
        ON CONFLICT (token) DO UPDATE SET answers = NULL, until_us = excluded.until_us
         WHERE swap_answer.until_us <= t.now_us;
        IF NOT FOUND THEN  -- somebody has made this call, and we have waited for the end of it
            SELECT answers INTO known FROM swap_answer WHERE token = of_token;
            RETURN known;
        END IF;
    END IF;
    BEGIN
        -- In one order, so that two calls wait for each other and do not lock each other out.
        PERFORM FROM (
            SELECT DISTINCT (c->>'kind') COLLATE "C" AS kind, (c->>'name') COLLATE "C" AS name
              FROM jsonb_array_elements(swaps) AS each, jsonb_array_elements(each->'changes') AS c ORDER BY 1, 2) AS named,
            LATERAL (SELECT FROM records AS r WHERE r.kind = named.kind AND r.name = named.name FOR UPDATE) AS locked;
        given := swap_all(t, swaps);
    EXCEPTION WHEN lock_not_available THEN  -- by what somebody holds: one by one, so that the others happen
        PERFORM hurry();
    END;
    IF given IS NULL THEN
        given := '[]';
        FOR s IN SELECT jsonb_array_elements(swaps) LOOP
            given := given || jsonb_build_array(swap_one(t, s));
        END LOOP;
    END IF;
    UPDATE swap_answer SET answers = given WHERE token = of_token;
    IF coalesce(pg_sequence_last_value('back'), 0) / 1024 > places / 1024 THEN
        PERFORM add_up_in_turn(1, 0);
    END IF;
    RETURN given;
END $$;

-- All of them set by set, where each has one change, nothing but its version can refuse it, and no two name the same record,
-- job or unique key: so ten thousand schedules fire in a second.  They share a version.  NULL where that is not so.
CREATE FUNCTION swap_all(t terms, swaps jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    numbers bigint[];
    kinds text[];
    names text[];
    versions bigint[];
    alike boolean;
    refused bigint[];
    drawn bigint;
    jobs job[];
BEGIN
    SELECT array_agg(s.n), array_agg(c->>'kind'), array_agg(c->>'name'), array_agg((c->>'expected')::bigint),
           count(*) > count(DISTINCT (c->>'kind', c->>'name'))
               OR NOT bool_and(swap @@ '$.changes.size() == 1'
                               AND CASE (c->>'expected')::bigint WHEN 0 THEN c ? 'value' AND swap @@ '$.puts.size() == 0'
                                                                 ELSE c ? 'expected' END)
      INTO numbers, kinds, names, versions, alike
      FROM jsonb_array_elements(swaps) WITH ORDINALITY AS s (swap, n), jsonb_array_elements(swap->'changes') AS c;
    IF coalesce(alike, true) OR swaps @? '$[*].opens[*]' OR swaps @? '$[*].puts[*].batch'
       OR (SELECT count(*) > count(DISTINCT p->>'id') OR count(p->>'unique') > count(DISTINCT p->>'unique')
             FROM jsonb_path_query(swaps, '$[*].puts[*]') AS p)
       OR EXISTS (SELECT FROM rule WHERE kind = 'cap') AND swaps @? '$[*] ? (@.bounded == true)' THEN
        RETURN NULL;
    END IF;
    SELECT coalesce(array_agg(e.n) FILTER (WHERE CASE WHEN live(r, t.now_us) THEN r.version ELSE 0 END <> e.version), '{}'),
           next_version(t.now_us, coalesce(max(r.version), 0))
      INTO refused, drawn
      FROM unnest(numbers, kinds, names, versions) AS e (n, kind, name, version)
      LEFT JOIN records AS r ON r.kind = e.kind AND r.name = e.name;
    refused := refused || ARRAY(
        SELECT n FROM (
            SELECT n, c FROM jsonb_array_elements(swaps) WITH ORDINALITY AS s (swap, n), jsonb_array_elements(swap->'changes') AS c
             WHERE n <> ALL (refused)
             ORDER BY (c->>'kind') COLLATE "C", (c->>'name') COLLATE "C") AS each
         WHERE NOT change_record(t, c, drawn));
    jobs := ARRAY(
        SELECT drafted(p, t.now_us)
          FROM jsonb_array_elements(swaps) WITH ORDINALITY AS s (swap, n), jsonb_array_elements(swap->'puts') AS p
         WHERE n <> ALL (refused));
    IF jobs <> '{}' THEN
        PERFORM FROM add_jobs(t, jobs, false);
        PERFORM wake(queue) FROM (SELECT DISTINCT queue FROM unnest(jobs)) AS each;
    END IF;
    RETURN (SELECT jsonb_agg(
                CASE WHEN n <> ALL (refused) THEN to_jsonb(ARRAY[drawn])
                     ELSE jsonb_build_array(NULL, 'version', names[array_position(numbers, n)]) END ORDER BY n)
              FROM generate_series(1, jsonb_array_length(swaps)::bigint) AS n);
END $$;

-- One of them.  Whatever is refused after the first write is undone by the exception.
CREATE FUNCTION swap_one(t terms, s jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    detail text;
BEGIN
    RETURN coalesce(refusal(t, s), to_jsonb(ARRAY[change_all(t, s)]));
EXCEPTION WHEN SQLSTATE 'PP001' OR SQLSTATE 'PP002' THEN
    GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL;
    RETURN jsonb_build_array(NULL, 'no-batch', detail);
WHEN SQLSTATE 'PP003' THEN
    GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL;
    RETURN jsonb_build_array(NULL, 'queue-full', detail::jsonb->>'queue');
WHEN SQLSTATE 'PP005' THEN
    GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL;
    RETURN jsonb_build_array(NULL, 'version', detail);
WHEN lock_not_available THEN
    PERFORM hurry();
    RETURN jsonb_build_array(NULL, 'busy', '');
END $$;

-- Why the versions do not allow a swap; NULL if they do.
CREATE FUNCTION refusal(t terms, s jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    c jsonb;
    found_version bigint;
BEGIN
    FOR c IN SELECT jsonb_array_elements(s->'changes') LOOP
        SELECT CASE WHEN live(r, t.now_us) THEN r.version ELSE 0 END INTO found_version
          FROM records AS r WHERE r.kind = c->>'kind' AND r.name = c->>'name' FOR UPDATE;
        found_version := coalesce(found_version, 0);
        IF (c->>'expected')::bigint <> found_version OR (c ? 'keep' AND found_version = 0) THEN
            RETURN jsonb_build_array(NULL, 'version', c->>'name');
        END IF;
    END LOOP;
    RETURN NULL;
END $$;

-- Make the changes and puts of a swap whose versions are right; gives the new version.
CREATE FUNCTION change_all(t terms, s jsonb) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    last bigint := (
        SELECT max((SELECT r.version FROM records AS r WHERE r.kind = c->>'kind' AND r.name = c->>'name'))
          FROM jsonb_array_elements(s->'changes') AS c);
    drawn bigint := next_version(t.now_us, coalesce(last, 0));
    d jsonb;
BEGIN
    FOR d IN SELECT jsonb_array_elements(s->'changes') LOOP
        IF NOT change_record(t, d, drawn) THEN
            RAISE EXCEPTION USING errcode = 'PP005', message = 'version', detail = d->>'name';
        END IF;
    END LOOP;
    FOR d IN SELECT jsonb_array_elements(s->'opens') LOOP
        PERFORM open_batch(t, d);
    END LOOP;
    PERFORM put_drafts(t, s->'puts', (s->>'bounded')::boolean);
    RETURN drawn;
END $$;

-- False: somebody has stored it since we looked, when it was not there to be locked.
CREATE FUNCTION change_record(t terms, c jsonb, drawn bigint) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    at_moment bigint := coalesce((c->>'at_us')::bigint, t.now_us + (c->>'at_in_us')::bigint);
    ends bigint := t.now_us + (c->>'expires_in_us')::bigint;
BEGIN
    IF c ? 'keep' THEN
        UPDATE records SET version = drawn, at_us = at_moment, expires_us = ends, expires_hour = ends / 3600000000
         WHERE kind = c->>'kind' AND name = c->>'name';
    ELSIF NOT c ? 'value' THEN
        DELETE FROM records WHERE kind = c->>'kind' AND name = c->>'name';
    ELSE
        INSERT INTO records AS r (kind, name, value, version, at_us, expires_us, expires_hour)
        VALUES (c->>'kind', c->>'name', decode(c->>'value', 'base64'), drawn, at_moment, ends, ends / 3600000000)
        ON CONFLICT (kind, name) DO UPDATE SET value = excluded.value, version = excluded.version,
               at_us = excluded.at_us, expires_us = excluded.expires_us, expires_hour = excluded.expires_hour
         WHERE c->>'expected' IS NULL OR (c->>'expected')::bigint = CASE WHEN live(r, t.now_us) THEN r.version ELSE 0 END;
        RETURN FOUND;
    END IF;
    RETURN true;
END $$;

-- Forget what has expired, a bite of it.
CREATE FUNCTION forget_records(t terms, most integer) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    n integer;
BEGIN
    DELETE FROM swap_answer WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM swap_answer WHERE until_us <= t.now_us LIMIT most FOR UPDATE SKIP LOCKED));
    DELETE FROM records WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM records WHERE expires_hour <= t.now_us / 3600000000 AND expires_us <= t.now_us
         LIMIT most FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS n = ROW_COUNT;
    RETURN n;
END $$;

-- The kinds of which some records are due: kinds are few, each is found from the one before it.
CREATE FUNCTION kinds_due(now_us bigint) RETURNS text[] LANGUAGE sql STABLE AS $$
    WITH RECURSIVE of_kind AS (
        (SELECT kind FROM records WHERE at_us IS NOT NULL ORDER BY kind LIMIT 1)
        UNION ALL
        SELECT (SELECT r.kind FROM records AS r WHERE r.at_us IS NOT NULL AND r.kind > of_kind.kind ORDER BY r.kind LIMIT 1)
          FROM of_kind WHERE of_kind.kind IS NOT NULL)
    SELECT coalesce(array_agg(kind ORDER BY kind), '{}') FROM of_kind
     WHERE kind IS NOT NULL
       AND EXISTS (SELECT FROM records AS r WHERE r.kind = of_kind.kind AND r.at_us <= now_us AND live(r, now_us))
$$;

-- --- feeds ----------------------------------------------------------------------------------

-- Append entries to a feed; `passed` more came before them that are not even stored.  Gives the number of the last one.
-- Its commit does not wait for the disk, and it does not wait long for others: a feed may lose its last moment.
CREATE FUNCTION publish(
    at bigint, of_feed text, entries bytea[], passed integer, keep integer, keep_bytes bigint, keep_us bigint
) RETURNS bigint LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    now_us bigint := moment(at);
    h feed_head;
    first bigint;
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true), set_config('lock_timeout', '1s', true);
    LOOP
        SELECT f.name, f.last, f.born, f.forgotten, f.n, f.bytes, f.expires_us, f.expires_hour INTO h
          FROM feed AS f WHERE f.name = of_feed FOR UPDATE;
        EXIT WHEN FOUND;
        INSERT INTO feed (name, last, born, forgotten, n, bytes, expires_us, expires_hour)
        VALUES (of_feed, 0, 0, 0, 0, 0, 0, 0) ON CONFLICT DO NOTHING;
    END LOOP;
    first := greatest(h.last + 1, now_us);
    IF h.expires_us <= now_us THEN
        h.born := first;
        h.forgotten := 0;
    END IF;
    first := first + passed;
    IF passed > 0 THEN
        h.forgotten := first - 1;
    END IF;
    IF passed > 0 OR h.expires_us <= now_us THEN
        DELETE FROM feed_entry WHERE feed = of_feed;
        h.n := 0;
        h.bytes := 0;
    END IF;
    INSERT INTO feed_entry (feed, number, value)
    SELECT of_feed, first + e.place - 1, e.value FROM unnest(entries) WITH ORDINALITY AS e(value, place);
    h.last := first + cardinality(entries) - 1;
    h.n := h.n + cardinality(entries);
    h.bytes := h.bytes + (SELECT sum(length(e)) FROM unnest(entries) AS e);
    IF h.n > keep OR h.bytes > keep_bytes THEN
        h := forget_entries(h, keep, keep_bytes, 2 * cardinality(entries) + 10);
    END IF;
    UPDATE feed SET last = h.last, born = h.born, forgotten = h.forgotten, n = h.n, bytes = h.bytes,
           expires_us = now_us + keep_us, expires_hour = (now_us + keep_us) / 3600000000
     WHERE name = of_feed;
    IF EXISTS (SELECT FROM feed_follower AS f WHERE f.feed = of_feed AND f.until_us > now_us) THEN
        PERFORM wake(E'\n!' || of_feed);
    END IF;
    RETURN h.last;
END $$;

-- Forget the oldest entries for which there is no room, `most` of them; gives the head as it is then.
CREATE FUNCTION forget_entries(h feed_head, keep integer, keep_bytes bigint, most integer) RETURNS feed_head LANGUAGE plpgsql AS $$
DECLARE
    before bigint := h.forgotten;
    oldest record;
BEGIN
    -- From where the last ones went, so that nothing is searched among rows that are dead.
    FOR oldest IN
        SELECT e.number, length(e.value) AS size FROM feed_entry AS e
         WHERE e.feed = h.name AND e.number > before AND e.number < h.last ORDER BY e.number LIMIT most
    LOOP
        EXIT WHEN h.n <= keep AND h.bytes <= keep_bytes;
        h.n := h.n - 1;
        h.bytes := h.bytes - oldest.size;
        h.forgotten := oldest.number;
    END LOOP;
    DELETE FROM feed_entry AS e WHERE e.feed = h.name AND e.number > before AND e.number <= h.forgotten;
    RETURN h;
END $$;

-- Somebody waits for these feeds.
CREATE FUNCTION mark_followed(at bigint, feeds text[], for_us bigint) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    now_us bigint := moment(at);
BEGIN
    INSERT INTO feed_follower AS f (feed, until_us)
    SELECT name, now_us + for_us FROM unnest(feeds) AS name
     WHERE NOT EXISTS (SELECT FROM feed_follower AS m WHERE m.feed = name AND m.until_us > now_us + for_us / 2)
     ORDER BY name
        ON CONFLICT (feed) DO UPDATE SET until_us = excluded.until_us;
END $$;

-- Forget the feeds that nobody wrote to, a bite of their entries; gives how many feeds are gone.
CREATE FUNCTION forget_feeds(t terms, most integer) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    f text;
    gone integer;
    entries integer := 0;
    feeds integer := 0;
BEGIN
    DELETE FROM feed_follower WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM feed_follower WHERE until_us <= t.now_us LIMIT most FOR UPDATE SKIP LOCKED));
    FOR f IN
        SELECT name FROM feed WHERE expires_hour <= t.now_us / 3600000000 AND expires_us <= t.now_us
         LIMIT most FOR UPDATE SKIP LOCKED
    LOOP
        DELETE FROM feed_entry WHERE ctid = ANY (ARRAY(
            SELECT ctid FROM feed_entry WHERE feed = f ORDER BY number LIMIT most - entries));
        GET DIAGNOSTICS gone = ROW_COUNT;
        entries := entries + gone;
        EXIT WHEN entries >= most;
        DELETE FROM feed WHERE name = f;
        feeds := feeds + 1;
    END LOOP;
    RETURN feeds;
END $$;
