-- The tables of the PostgreSQL engine.  Times are whole microseconds since 1970.
--
-- No schema is named here: the script runs with search_path set to the engine's own schema.
--
-- A job is one row, in exactly one of `ready`, `scheduled`, `held`, `running` and `archive`, and moves
-- between them whole; or it runs as a member of a `chunk`.  So the hot tables hold live jobs only.
-- All have the same columns, those of the type `job`; a column that is NULL costs one bit.  Names are compared
-- as bytes, whatever the locale of the database is.

CREATE TYPE job AS (
    seq          bigint,    -- the order of puts
    pos          bigint,    -- the place in line: higher is further back; at the front it is negative
    put_us       bigint,
    due_us       bigint,
    expires_us   bigint,
    fence        bigint,    -- of the newest lease
    started_us   bigint,    -- when that began
    rank         smallint,  -- the priority with its sign turned, so that every index ascends
    max_crashes  smallint,
    attempts     integer,   -- with the one that is running now
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
    stepped      boolean,   -- its batch has counted it already, or did not take it in
    error        text,
    progress     text,
    log          text[],
    history      jsonb,     -- events as [us, kind, attempt, fence, holder, note]
    hold_scope   text,      -- held: the rule that keeps it back
    hold_name    text,
    until_us     bigint,    -- running: when the lease ends
    holder       text,
    cancel       boolean,   -- running: asked to stop
    state        text,      -- archive: done, dead or cancelled
    ended_us     bigint,
    keep_us      bigint,
    reason       text,
    result       bytea
);

-- Payloads are not compressed: they move often and are read at once.
CREATE TABLE ready OF job (PRIMARY KEY (queue, rank, pos), UNIQUE (id))
    WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
ALTER TABLE ready ALTER body SET STORAGE EXTERNAL;
CREATE INDEX ready_expires ON ready (expires_us) WHERE expires_us IS NOT NULL;
CREATE INDEX ready_batch ON ready (batch, seq) WHERE batch IS NOT NULL;
CREATE INDEX ready_seq ON ready (queue, seq);  -- for those who look page by page; it grows at its end only

CREATE TABLE scheduled OF job (PRIMARY KEY (queue, due_us, seq), UNIQUE (id));
ALTER TABLE scheduled ALTER body SET STORAGE EXTERNAL;
CREATE INDEX scheduled_due ON scheduled (due_us);
CREATE INDEX scheduled_expires ON scheduled (expires_us) WHERE expires_us IS NOT NULL;
CREATE INDEX scheduled_batch ON scheduled (batch, seq) WHERE batch IS NOT NULL;
CREATE INDEX scheduled_seq ON scheduled (queue, seq);

-- Jobs that a rule keeps back are set aside here, with their places, so that no lease walks over them.
CREATE TABLE held OF job (PRIMARY KEY (queue, hold_scope, hold_name, rank, pos), UNIQUE (id));
ALTER TABLE held ALTER body SET STORAGE EXTERNAL;
CREATE INDEX held_expires ON held (expires_us) WHERE expires_us IS NOT NULL;
CREATE INDEX held_batch ON held (batch, seq) WHERE batch IS NOT NULL;
CREATE INDEX held_seq ON held (queue, seq);

-- No index on until_us: a renewal then touches no index at all, and those that run are few.
CREATE TABLE running OF job (PRIMARY KEY (fence), UNIQUE (id))
    WITH (fillfactor = 90, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
ALTER TABLE running ALTER body SET STORAGE EXTERNAL;
CREATE INDEX running_batch ON running (batch, seq) WHERE batch IS NOT NULL;

-- What one claim took of one queue, as one row instead of many: plain jobs in their first run, of one batch or of none.
--
-- Member n, from 1, has the fence `number + n`; fences that end with ten zeros are those of `running`.  A member
-- is gone when its bit is set.  Whatever is more than being renewed or done with the others happens to
-- rows in `running`, which members become by break_out().  Arrays lie outside of the row, so that
-- renewing it or setting a bit copies none of them.  No row is kept without members.
CREATE TABLE chunk (
    number      bigint   PRIMARY KEY,
    started_us  bigint   NOT NULL,
    until_us    bigint   NOT NULL,
    members     integer  NOT NULL,                  -- those that are not gone
    gone        bit(1023),                          -- NULL: none
    queue       text     COLLATE "C" NOT NULL,
    holder      text,
    first_id    text     COLLATE "C" NOT NULL,      -- the least of the ids, and the greatest: new ids are past both
    last_id     text     COLLATE "C" NOT NULL,
    batch       text     COLLATE "C",
    born        bigint,                             -- of that batch; NULL: they count in none
    ids         text[]   COLLATE "C" NOT NULL,
    tasks       text[]   COLLATE "C" NOT NULL,
    bodies      bytea[]  NOT NULL,
    seqs        bigint[] NOT NULL,
    puts_us     bigint[] NOT NULL,
    dues_us     bigint[] NOT NULL,
    ranks       smallint[] NOT NULL,
    max_crashes smallint[] NOT NULL,
    in_batch    integer[]                           -- their numbers there
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
ALTER TABLE chunk ALTER ids SET STORAGE EXTERNAL, ALTER tasks SET STORAGE EXTERNAL, ALTER bodies SET STORAGE EXTERNAL,
    ALTER seqs SET STORAGE EXTERNAL, ALTER puts_us SET STORAGE EXTERNAL, ALTER dues_us SET STORAGE EXTERNAL,
    ALTER ranks SET STORAGE EXTERNAL, ALTER max_crashes SET STORAGE EXTERNAL, ALTER in_batch SET STORAGE EXTERNAL;
CREATE INDEX chunk_last_id ON chunk (last_id);

CREATE TABLE archive OF job (PRIMARY KEY (seq), UNIQUE (id));
CREATE INDEX archive_keep ON archive (keep_us);
CREATE INDEX archive_shelf ON archive (queue, ended_us, seq) WHERE state = 'dead';
CREATE INDEX archive_seq ON archive (queue, state, seq);
CREATE INDEX archive_batch ON archive (batch, seq) WHERE batch IS NOT NULL;

CREATE VIEW waiting AS
    SELECT * FROM ready UNION ALL SELECT * FROM scheduled UNION ALL SELECT * FROM held;

CREATE VIEW live AS
    SELECT false AS running, waiting.* FROM waiting UNION ALL SELECT true, running.* FROM running;

-- The members of a chunk as the jobs that they are.
CREATE FUNCTION members_of(c chunk) RETURNS SETOF job LANGUAGE sql STABLE AS $$
    SELECT m.seq, m.seq, m.put_us, m.due_us, NULL::bigint, c.number + m.n, c.started_us, m.rank, m.max_crashes, 1, 0, 0,
           c.queue, m.id, m.task, m.body, NULL::boolean, NULL::text, NULL::text, NULL::text, c.batch,
           coalesce(m.number, 0), NULL::boolean,
           NULL::text, NULL::text, NULL::text[], NULL::jsonb, NULL::text, NULL::text, c.until_us, c.holder, NULL::boolean,
           NULL::text, NULL::bigint, NULL::bigint, NULL::text, NULL::bytea
      FROM unnest(c.seqs, c.puts_us, c.dues_us, c.ranks, c.max_crashes, c.ids, c.tasks, c.bodies, c.in_batch)
      WITH ORDINALITY AS m (seq, put_us, due_us, rank, max_crashes, id, task, body, number, n)
     WHERE c.gone IS NULL OR get_bit(c.gone, m.n::integer - 1) = 0
$$;

CREATE VIEW every_job AS
    SELECT 'ready' AS stands, waiting.* FROM waiting UNION ALL
    SELECT 'running', running.* FROM running UNION ALL
    SELECT 'running', m.* FROM chunk, members_of(chunk) AS m UNION ALL
    SELECT archive.state, archive.* FROM archive;

-- They only ever move one way, and unlike rows nobody waits for them.
CREATE SEQUENCE back AS bigint;
CREATE SEQUENCE front AS bigint INCREMENT -1;
CREATE SEQUENCE fence AS bigint INCREMENT 1024 START 1024;  -- room for the members of a chunk

-- Ids that callers chose: while their jobs live (until_us is NULL) and for a day after that.
CREATE TABLE known (id text COLLATE "C" PRIMARY KEY, until_us bigint);
CREATE INDEX known_until ON known (until_us) WHERE until_us IS NOT NULL;

-- The tokens of puts, for a day.
CREATE TABLE token (token text COLLATE "C" PRIMARY KEY, until_us bigint NOT NULL);
CREATE INDEX token_until ON token (until_us);

CREATE TABLE unique_key (key text COLLATE "C" PRIMARY KEY, id text NOT NULL);

CREATE TABLE rule (kind text COLLATE "C", scope text COLLATE "C", name text COLLATE "C", n integer NOT NULL, PRIMARY KEY (kind, scope, name));

-- A job counts in the batch that it names if that was born before the job was put.  So those of a batch that is gone step
-- nothing, also if there is one of that name again, and nobody has to look for them.
CREATE TABLE batch (
    id          text    COLLATE "C" PRIMARY KEY,
    born        bigint  NOT NULL,               -- its place in the order of puts
    body        text    NOT NULL,
    calls       jsonb   NOT NULL,               -- what to put on_failed, on_succeeded and on_finished
    sealed      boolean NOT NULL DEFAULT false,
    live        integer NOT NULL DEFAULT 0,
    done        integer NOT NULL DEFAULT 0,
    dead        integer NOT NULL DEFAULT 0,
    cancelled   integer NOT NULL DEFAULT 0,
    linger_us   bigint  NOT NULL,
    created_us  bigint  NOT NULL,
    open_us     bigint  NOT NULL,               -- until when an unsealed batch is kept
    finished_us bigint,
    keep_us     bigint,
    parent      text    COLLATE "C",
    member      integer NOT NULL,
    newest      text    COLLATE "C"             -- the member that was put last, or another one
);
CREATE INDEX batch_parent ON batch (parent, member) WHERE parent IS NOT NULL;
CREATE INDEX batch_keep ON batch (keep_us) WHERE keep_us IS NOT NULL;
CREATE INDEX batch_open ON batch (open_us) WHERE NOT sealed;

-- Members that are done and not yet counted in their batch.  Rows are only added, so that workers do not wait for one
-- another; whoever may end the last member adds them up: see step_done().
CREATE TABLE batch_tally (batch text COLLATE "C" NOT NULL, n integer NOT NULL);
CREATE INDEX batch_tally_batch ON batch_tally (batch);

-- Members that have ended: those that did so together and in the same way are one row.  The live ones are found through
-- the indexes on batch and parent, and in the chunks.
CREATE TABLE ended (
    batch   text      COLLATE "C" NOT NULL,
    first   integer   NOT NULL,                 -- the least of the numbers, and the greatest
    last    integer   NOT NULL,
    n       integer   NOT NULL,                 -- how many they are
    state   text      NOT NULL,
    reason  text,
    numbers integer[] NOT NULL,
    ids     text[]    COLLATE "C" NOT NULL,
    results bytea[]                             -- NULL: none of them left one
) WITH (toast_tuple_target = 8160);             -- a hundred ids stay in the row
CREATE INDEX ended_batch ON ended (batch, first);
ALTER TABLE ended ALTER numbers SET STORAGE EXTERNAL, ALTER ids SET STORAGE EXTERNAL;

CREATE TABLE schedule (
    name    text    COLLATE "C" PRIMARY KEY,
    body    text    NOT NULL,
    timing  text    NOT NULL,
    next_us bigint  NOT NULL,
    last_us bigint,
    paused  boolean NOT NULL DEFAULT false
);

-- What has come and gone per queue: jobs that are there = put - deleted.  Rows are only added, so that
-- workers do not wait for one another, and a sweep adds them up.
CREATE TABLE tally (queue text COLLATE "C" NOT NULL, put bigint NOT NULL, deleted bigint NOT NULL);
CREATE INDEX tally_queue ON tally (queue);

-- Which migrations this schema has.
CREATE TABLE migration (number integer PRIMARY KEY, installed_at timestamptz NOT NULL DEFAULT now());
