-- What the functions build on: the types of their values, and what they see of the tables.  This file is read first.
--
-- Each verb of the engine is one statement for the client, hence one round trip and one commit.  Functions that clients
-- call carry their search_path with them; the others are parts of theirs.
-- The hot ones never scan a table: its statistics may be those of a moment when it was empty, or full.  Before 18 a
-- scan that is forbidden and made all the same counts as so dear that it would be compiled each time, hence no jit.
-- They are in PL/pgSQL, because before 18 functions in SQL that are not inlined are planned anew at every call.
-- The time is an argument, so that tests can move it: NULL means the server's own clock.
--
-- Whoever locks several rows does so in one order, so that nobody waits for a deadlock to be found, which takes a second:
-- chunks and then running jobs by their numbers, batches as lock_batches() does, then ids and keys in theirs.

-- A job on its way between tables.  All that waits has the columns up to `losses`.
CREATE TYPE job AS (
    seq          bigint,
    pos          bigint,
    put_us       bigint,
    due_us       bigint,
    expires_us   bigint,
    fence        bigint,
    started_us   bigint,
    rank         smallint,
    max_crashes  smallint,
    attempts     integer,
    failures     integer,
    crashes      integer,
    queue        text COLLATE "C",
    id           text COLLATE "C",
    task         text COLLATE "C",
    body         bytea,
    chosen       boolean,
    unique_key   text COLLATE "C",
    unique_until text,
    limit_key    text COLLATE "C",
    batch        text COLLATE "C",
    member       integer,
    stepped      boolean,
    error        text,
    progress     text,
    log          text[],
    history      jsonb,
    checkpoint   bytea,
    losses       integer,
    until_us     bigint,
    holder       text,
    cancel       boolean,
    began        boolean,
    number       bigint,
    state        text,
    ended_us     bigint,
    keep_us      bigint,
    reason       text,
    result       bytea
);

-- A live job in brief.
CREATE TYPE brief AS (
    running    boolean,
    seq        bigint,
    due_us     bigint,
    expires_us bigint,
    queue      text COLLATE "C",
    id         text COLLATE "C",
    task       text COLLATE "C",
    batch      text COLLATE "C",
    member     integer,
    stepped    boolean,
    failures   integer,
    crashes    integer,
    losses     integer
);

-- All that waits.  A function and no view, which would show jobs with the rights of whoever installed the set.  (It is inlined,
-- and RETURNS TABLE would lose the collation, and with it the indexes.)
CREATE FUNCTION waiting() RETURNS SETOF brief LANGUAGE sql STABLE AS $$
    SELECT false, seq, due_us, expires_us, queue, id, task, batch, member, stepped, failures, crashes, losses FROM ready UNION ALL
    SELECT false, seq, due_us, expires_us, queue, id, task, batch, member, stepped, failures, crashes, losses FROM scheduled UNION ALL
    SELECT false, seq, due_us, expires_us, queue, id, task, batch, member, stepped, failures, crashes, losses FROM held
$$;

-- And all that runs as a row.
CREATE FUNCTION live() RETURNS SETOF brief LANGUAGE sql STABLE AS $$
    SELECT running, seq, due_us, expires_us, queue, id, task, batch, member, stepped, failures, crashes, losses FROM waiting() UNION ALL
    SELECT true, seq, due_us, expires_us, queue, id, task, batch, member, stepped, failures, crashes, losses FROM running
$$;

-- The members of a chunk.
CREATE FUNCTION members_of(c chunk)
RETURNS TABLE (place bigint, seq bigint, put_us bigint, due_us bigint, rank smallint, max_crashes smallint, id text, task text,
               body bytea, member integer) LANGUAGE sql STABLE AS $$  -- it is inlined
    SELECT c.number + m.n, m.seq, m.put_us, m.due_us, m.rank, m.max_crashes, m.id, m.task, m.body, coalesce(m.number, 0)
      FROM unnest(c.seqs, c.puts_us, c.dues_us, c.ranks, c.max_crashes, c.ids, c.tasks, c.bodies, c.in_batch)
      WITH ORDINALITY AS m (seq, put_us, due_us, rank, max_crashes, id, task, body, number, n)
     WHERE c.gone IS NULL OR get_bit(c.gone, m.n::integer - 1) = 0
$$;

-- What has to be known of a batch to end it.
CREATE TYPE family AS (
    id          text,
    born        bigint,
    calls       jsonb,
    sealed      boolean,
    live        integer,
    dead        integer,
    cancelled   integer,
    keep_for_us bigint,
    finished_us bigint,
    parent      text,
    member      integer
);

-- What all steps of one call have in common.
CREATE TYPE terms AS (
    now_us       bigint,
    dead_us      bigint,  -- how long dead jobs are kept if the outcome does not say
    cancelled_us bigint
);

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

-- What a client gets: leases of one queue, in their order, in arrays; and a floor for the next claim, which is the
-- first place of the last priority.  Those of a chunk have one fence, no numbers and counters of their own, and one batch at most:
-- they are the first runs of plain jobs.  The first row of an answer has only the time, and the numbers of the leases that were lost.
CREATE TYPE leased AS (
    now_us   bigint,
    lost     integer[],
    queue    text,
    number   bigint,
    numbers  bigint[],
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
    pos      bigint,
    checkpoints bytea[],  -- NULL: none of them has one
    losses      integer[]
);

CREATE TYPE feed_head AS (
    name         text,
    last         bigint,
    born         bigint,
    forgotten    bigint,
    n            integer,
    bytes        bigint,
    expires_us   bigint,
    expires_hour bigint
);
