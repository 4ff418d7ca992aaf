-- Feeds: bounded logs that somebody may follow.

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
