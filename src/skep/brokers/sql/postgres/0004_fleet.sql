-- How all that sweep share the work, so that a large fleet asks no more of the server than a small one.

-- Who sweeps, and when each has said to come back.  Whoever is late for long is gone.
CREATE TABLE sweeper (name text COLLATE "C" PRIMARY KEY, back_us bigint NOT NULL) WITH (fillfactor = 50);

-- When it was last looked for transactions that are too old.  Whoever writes here or above has locked this row.
CREATE TABLE watch (looked_us bigint NOT NULL);
INSERT INTO watch VALUES (0);

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
-- those of one machine, which may die together, do not stay together.  Whoever is new, or sees that somebody has not come,
-- does not rely on the others, who may all be gone, and comes between them.  The last to come before something is to be
-- done (next_us, or NULL) comes back for that; if it does not, the next one finds it.  Whoever has left something undone
-- comes back at once.
CREATE FUNCTION come_back(now_us bigint, who text, next_us bigint, undone boolean) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    each bigint := 600000;
    soon bigint := 10000000;
    late bigint := 30000000;
    longest bigint := 120000000;
    others bigint;
    soonest bigint;
    back bigint;
BEGIN
    PERFORM FROM watch FOR UPDATE;  -- the last lock of a sweep, so that no two take the same moment
    SELECT count(*), min(s.back_us) FILTER (WHERE s.back_us > now_us) INTO others, soonest
      FROM sweeper s WHERE s.name <> who;
    back := coalesce(free_moment(who, now_us + 1000000, each, longest, 1 + (random() * others / 4)::bigint),
                     now_us + longest * (0.8 + 0.4 * random()));
    IF NOT EXISTS (SELECT FROM sweeper s WHERE s.name = who)
       OR EXISTS (SELECT FROM sweeper s WHERE s.name <> who AND s.back_us < now_us - 500000) THEN
        back := least(back, free_moment(who, now_us + 1000000, each / 2, soon, 1));
    END IF;
    IF undone THEN
        back := now_us + 10000;
    ELSIF next_us < back AND (soonest IS NULL OR next_us <= soonest) THEN
        back := next_us;
    END IF;
    INSERT INTO sweeper VALUES (who, back) ON CONFLICT (name) DO UPDATE SET back_us = excluded.back_us;
    DELETE FROM sweeper s WHERE s.back_us < now_us - late OR s.back_us > now_us + 2 * longest;
    RETURN back;
END $$;

-- Whether it is time to look for old transactions: for one of all that ask in a minute.
CREATE FUNCTION should_look(now_us bigint) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    UPDATE watch SET looked_us = now_us WHERE abs(now_us - looked_us) >= 60000000;
    RETURN FOUND;
END $$;

-- Sweep, and be told when to come back and whether to look; `who` is NULL for those who will not come back.
CREATE FUNCTION sweep_by(
    at bigint, most integer, dead_us bigint, cancelled_us bigint, dead_max bigint, who text,
    OUT promoted integer, OUT reaped integer, OUT expired integer, OUT removed integer, OUT now_us bigint,
    OUT next_us bigint, OUT schedules_due boolean, OUT again_us bigint, OUT look boolean
) LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    SELECT s.promoted, s.reaped, s.expired, s.removed, s.now_us, s.next_us, s.schedules_due
      INTO promoted, reaped, expired, removed, now_us, next_us, schedules_due
      FROM sweep(at, most, dead_us, cancelled_us, dead_max) AS s;
    look := false;
    IF who IS NOT NULL THEN
        again_us := come_back(
            now_us, who, next_us,
            greatest(promoted, reaped, expired, removed) >= most
                OR EXISTS (SELECT FROM token k WHERE k.until_us <= sweep_by.now_us)
                OR EXISTS (SELECT FROM known k WHERE k.until_us <= sweep_by.now_us));
        look := should_look(now_us);
    END IF;
END $$;
