-- Chunks: plain jobs that were leased together and are one row.

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
        INSERT INTO running (seq, pos, put_us, due_us, fence, number, started_us, rank, max_crashes, attempts, failures, crashes,
                             queue, id, task, body, batch, member, until_us, span_us, holder)
        SELECT m.seq, m.seq, m.put_us, m.due_us, fence, m.place, started_us, m.rank, m.max_crashes, 1, 0, 0, queue, m.id,
               m.task, m.body, batch, m.member, until_us, span_us, holder
          FROM chunk, members_of(chunk) AS m
         WHERE number = of_number AND (numbers IS NULL OR get_bit(bits, (m.place - number)::integer - 1) = 1)
        RETURNING running.number)
    SELECT array_agg((rows.number - of_number)::integer) INTO moved FROM rows;
    IF moved IS NULL THEN
        RETURN 0;
    END IF;
    PERFORM leave_chunk(of_number, moved);
    RETURN cardinality(moved);
END $$;

-- Leases as a client gives them: where they are found, their ids and fences, and the holder of all of them, or one for each.
CREATE FUNCTION by_number(at_numbers bigint[], ids text[], fences bigint[], holders text[], outcomes text[])
RETURNS TABLE (number bigint, id text, fence bigint, holder text, outcome text, place bigint) LANGUAGE sql STABLE AS $$  -- it is inlined
    SELECT l.number, l.id, l.fence, CASE WHEN cardinality(holders) = 1 THEN holders[1] ELSE holders[l.place] END, l.outcome, l.place
      FROM unnest(at_numbers, ids, fences, outcomes) WITH ORDINALITY AS l (number, id, fence, outcome, place)
$$;

-- Those that may be members, by their chunks, each in the order of its members.
CREATE FUNCTION by_chunk(at_numbers bigint[], ids text[], fences bigint[], holders text[], outcomes text[])
RETURNS TABLE (number bigint, fence bigint, holder text, numbers integer[], ids text[], outcomes text[], places integer[],
               last_place integer, plain boolean)
LANGUAGE sql STABLE AS $$  -- it is inlined
    SELECT l.of_chunk, l.fence, l.holder, array_agg((l.number & 1023)::integer), array_agg(l.id), array_agg(l.outcome),
           array_agg(l.place::integer), max(l.place)::integer, bool_and(l.outcome IS NULL)
      FROM (SELECT l.number & -1024 AS of_chunk, l.number, l.id, l.fence, l.holder, l.outcome, l.place
              FROM by_number(at_numbers, ids, fences, holders, outcomes) AS l
             WHERE l.number & 1023 > 0 ORDER BY 1, l.fence, l.holder, l.number, l.place) AS l
     GROUP BY 1, 2, 3 ORDER BY 1
$$;

-- Break the jobs of these leases out, as far as they are members of chunks.
CREATE FUNCTION break_out_leases(at_numbers bigint[], ids text[], fences bigint[], holders text[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    l record;
BEGIN
    FOR l IN SELECT g.number, g.fence, g.holder, g.numbers, g.ids FROM by_chunk(at_numbers, ids, fences, holders, NULL) AS g LOOP
        PERFORM FROM chunk WHERE number = l.number AND fence = l.fence AND holder = l.holder FOR UPDATE;
        CONTINUE WHEN NOT FOUND;
        PERFORM break_out(l.number, ARRAY(
            SELECT DISTINCT member(chunk, t.id) FROM chunk, unnest(l.numbers, l.ids) AS t (n, id)
             WHERE number = l.number AND member(chunk, t.id) = t.n));
    END LOOP;
END $$;

-- The chunk that a job is a member of.  Chunks that were leased in turn lie side by side, so the first one that reaches so far
-- is mostly it.
CREATE FUNCTION chunk_of(job_id text, OUT number bigint) LANGUAGE plpgsql STABLE SET enable_seqscan = off SET enable_sort = off SET jit = off AS $$
BEGIN
    SELECT c.number INTO chunk_of.number FROM chunk AS c
     WHERE c.last_id >= job_id AND c.first_id <= job_id AND member(c, job_id) > 0 ORDER BY c.last_id LIMIT 1;
END $$;

-- Break a job out, if it is a member of a chunk.
CREATE FUNCTION break_out_job(job_id text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    c record;
BEGIN
    SELECT number, member(chunk, job_id) AS n INTO c FROM chunk WHERE number = chunk_of(job_id) FOR UPDATE;
    IF c.n > 0 THEN
        PERFORM break_out(c.number, ARRAY[c.n]);
    END IF;
END $$;

-- Break out what limits on a queue and on tasks count.
CREATE FUNCTION break_out_limited(of_queues text[], of_tasks text[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    c bigint;
BEGIN
    IF of_queues || of_tasks <> '{}' THEN
        FOR c IN SELECT number FROM chunk WHERE queue = ANY (of_queues) OR tasks && of_tasks ORDER BY number FOR UPDATE LOOP
            PERFORM break_out(c);
        END LOOP;
    END IF;
END $$;

-- Break out the chunks whose leases nobody renewed, oldest first, until there are `most` such jobs.
CREATE FUNCTION break_out_lost(t terms, most integer) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    c bigint;
BEGIN
    FOR c IN SELECT number FROM chunk WHERE until_us <= t.now_us ORDER BY fence, number FOR UPDATE SKIP LOCKED LOOP
        EXIT WHEN most <= 0;
        BEGIN
            most := most - break_out(c);
        EXCEPTION WHEN data_exception OR integrity_constraint_violation THEN
            PERFORM part_failed('break out chunk ' || c, sqlerrm);
        END;
    END LOOP;
END $$;

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
                   o IS NULL OR (o->>'kind' = 'done' AND NOT o ?| '{emit,opens}') AS done,
                   m.id, m.number, decode(o->>'result', 'base64') AS result
              FROM chunk, unnest(chunk.ids, chunk.in_batch) WITH ORDINALITY AS m (id, number, n),
                   (SELECT DISTINCT ON (n, id) n, id, o, place  -- one that is given twice counts once, where it comes first
                      FROM unnest(given_numbers, given_ids, given_outcomes, given_places) AS given (n, id, o, place)
                     ORDER BY n, id, place) AS given
             WHERE chunk.number = of_number AND given.n = m.n AND given.id = m.id
               AND (gone IS NULL OR get_bit(gone, m.n::integer - 1) = 0)
             ORDER BY m.n) AS found;
    RETURN s;
END $$;

-- End leases of members that are done, and break out those with other outcomes, or from which something follows.
-- Gives the numbers, from 1, of the leases that have ended here, and how batches are to step.
CREATE FUNCTION settle_members(
    t terms, at_numbers bigint[], of_ids text[], fences bigint[], holders text[], outcomes text[],
    OUT ended integer[], OUT steps step[]
) LANGUAGE plpgsql AS $$
DECLARE
    l record;
    c record;
    s sorted;
BEGIN
    ended := '{}';
    steps := '{}';
    FOR l IN SELECT g.number, g.fence, g.holder, g.numbers, g.ids, g.outcomes, g.places, g.last_place, g.plain
               FROM by_chunk(at_numbers, of_ids, fences, holders, outcomes) AS g
    LOOP
        IF l.plain THEN
            DELETE FROM chunk WHERE number = l.number AND gone IS NULL AND fence = l.fence AND holder = l.holder AND ids = l.ids
            RETURNING queue, batch, born, in_batch INTO c;
            IF FOUND THEN
                INSERT INTO tally (queue, put, deleted) VALUES (c.queue, 0, cardinality(l.ids));
                ended := ended || l.places;
                IF c.born IS NOT NULL THEN
                    steps := steps || (c.batch, c.born, l.last_place, c.in_batch, l.ids, NULL)::step;
                END IF;
                CONTINUE;
            END IF;
        END IF;
        SELECT queue, batch, born INTO c FROM chunk
         WHERE number = l.number AND fence = l.fence AND holder = l.holder FOR UPDATE;
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
            INSERT INTO tally (queue, put, deleted, kept)
            VALUES (c.queue, 0, cardinality(s.done) - coalesce(cardinality(s.kept), 0), coalesce(cardinality(s.kept), 0));
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
    SELECT m.seq, m.seq, m.put_us, m.due_us, fence, started_us, m.rank, m.max_crashes, 1, 0, 0, queue, m.id, m.task,
           m.body, batch, m.member, 'done', t.now_us, t.now_us + (k.o->>'keep_us')::bigint, decode(k.o->>'result', 'base64')
      FROM chunk, members_of(chunk) AS m, unnest(numbers, outcomes) AS k (n, o)
     WHERE chunk.number = of_number AND m.place = of_number + k.n;
END $$;

-- Renew leases of members: a chunk as a whole if all that it still has are among them, else they are broken out.
-- Gives the numbers, from 1, of those that were renewed here.
CREATE FUNCTION renew_members(now_us bigint, at_numbers bigint[], ids text[], fences bigint[], holders text[], until bigint)
RETURNS SETOF integer
LANGUAGE plpgsql SET enable_nestloop = off SET jit = off AS $$
DECLARE
    l record;
    c record;
BEGIN
    FOR l IN
        SELECT g.number, g.fence, g.holder, g.numbers, g.ids, g.places FROM by_chunk(at_numbers, ids, fences, holders, NULL) AS g
    LOOP
        PERFORM FROM chunk
          WHERE number = l.number AND fence = l.fence AND holder = l.holder AND until_us > now_us FOR UPDATE;
        CONTINUE WHEN NOT FOUND;
        SELECT members, array_agg(DISTINCT m.n) AS found, array_agg(r.place) AS places INTO c
          FROM chunk, unnest(chunk.ids) WITH ORDINALITY AS m (id, n), unnest(l.numbers, l.ids, l.places) AS r (n, id, place)
         WHERE number = l.number AND r.n = m.n AND r.id = m.id AND (gone IS NULL OR get_bit(gone, m.n::integer - 1) = 0)
         GROUP BY members;
        CONTINUE WHEN NOT FOUND;
        IF cardinality(c.found) = c.members THEN
            UPDATE chunk SET until_us = until, span_us = until - now_us WHERE number = l.number;
            RETURN QUERY SELECT unnest(c.places);
        ELSE
            PERFORM break_out(l.number, c.found::integer[]);
        END IF;
    END LOOP;
END $$;
