-- The tables of the PostgreSQL engine.  Times are whole microseconds since 1970.
--
-- No schema is named here: the script runs with search_path set to the engine's own schema.
--
-- A job is one row, in exactly one of `ready`, `scheduled`, `held`, `running` and `archive`, and moves
-- between them whole; or it runs as a member of a `chunk`.  So the hot tables hold live jobs only.
-- All have the same columns, those of the type `stored_job`; a column that is NULL costs one bit.  Names are compared
-- as bytes, whatever the locale of the database is.

CREATE TYPE stored_job AS (
    seq          bigint,    -- the order of puts
    pos          bigint,    -- the place in line: higher is further back; at the front it is negative
    put_us       bigint,
    due_us       bigint,
    expires_us   bigint,
    fence        bigint,    -- of the newest lease: at least the microsecond in which that began
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
    hold_scope   text COLLATE "C",  -- held: the rule that keeps it back; or `parked`, and the task
    hold_name    text COLLATE "C",
    until_us     bigint,    -- running: when the lease ends
    holder       text,
    cancel       boolean,   -- running: asked to stop
    state        text,      -- archive: done, dead or cancelled
    ended_us     bigint,
    keep_us      bigint,
    reason       text,
    result       bytea,
    checkpoint   bytea,     -- what a run has saved for the next
    began        boolean,   -- running: its own code does
    losses       integer,   -- NULL: none
    number       bigint,    -- running: where it is found
    span_us      bigint     -- running: how long the lease was given for
);

-- Payloads are not compressed: they move often and are read at once.
CREATE TABLE ready OF stored_job (PRIMARY KEY (queue, rank, pos), UNIQUE (id))
    WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
ALTER TABLE ready ALTER body SET STORAGE EXTERNAL;
CREATE INDEX ready_expires ON ready (expires_us) WHERE expires_us IS NOT NULL;
CREATE INDEX ready_batch ON ready (batch, seq) WHERE batch IS NOT NULL;
CREATE INDEX ready_member ON ready (batch, member) WHERE batch IS NOT NULL;
CREATE INDEX ready_seq ON ready (queue, seq);  -- for whoever reads page by page; it grows at its end only

CREATE TABLE scheduled OF stored_job (PRIMARY KEY (queue, due_us, seq), UNIQUE (id));
ALTER TABLE scheduled ALTER body SET STORAGE EXTERNAL;
CREATE INDEX scheduled_due ON scheduled (due_us, seq);
CREATE INDEX scheduled_expires ON scheduled (expires_us) WHERE expires_us IS NOT NULL;
CREATE INDEX scheduled_batch ON scheduled (batch, seq) WHERE batch IS NOT NULL;
CREATE INDEX scheduled_member ON scheduled (batch, member) WHERE batch IS NOT NULL;
CREATE INDEX scheduled_seq ON scheduled (queue, seq);

-- Jobs that a rule keeps back are set aside here, with their places, so that no lease walks over them.
CREATE TABLE held OF stored_job (PRIMARY KEY (queue, hold_scope, hold_name, rank, pos), UNIQUE (id));
ALTER TABLE held ALTER body SET STORAGE EXTERNAL;
CREATE INDEX held_expires ON held (expires_us) WHERE expires_us IS NOT NULL;
CREATE INDEX held_batch ON held (batch, seq) WHERE batch IS NOT NULL;
CREATE INDEX held_member ON held (batch, member) WHERE batch IS NOT NULL;
CREATE INDEX held_seq ON held (queue, seq);
CREATE INDEX held_parked ON held (queue, hold_name) WHERE hold_scope = 'parked';

-- Limits count by task and queue, and stop where there is no room.  A renewal writes every index, but few jobs run long enough.
CREATE TABLE running OF stored_job (PRIMARY KEY (number), UNIQUE (id))
    WITH (fillfactor = 90, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
ALTER TABLE running ALTER body SET STORAGE EXTERNAL;
CREATE INDEX running_batch ON running (batch, seq) WHERE batch IS NOT NULL;
CREATE INDEX running_member ON running (batch, member) WHERE batch IS NOT NULL;
CREATE INDEX running_key ON running (limit_key) WHERE limit_key IS NOT NULL;
CREATE INDEX running_until ON running (until_us);
CREATE INDEX running_task ON running (task);
CREATE INDEX running_seq ON running (queue, seq);

-- What one claim took of one queue, as one row instead of many: plain jobs in their first run, of one batch or of none.
--
-- Member n, from 1, is found as `number + n`; numbers that end with ten zeros are those of `running`.  Fence and holder are
-- those of all members.  A member is gone when its bit is set.  Whatever is more than being renewed or done with the others happens to
-- rows in `running`, which members become by break_out().  Arrays lie outside of the row, so that
-- renewing it or setting a bit copies none of them.  No row is kept without members.
CREATE TABLE chunk (
    number      bigint   PRIMARY KEY,
    fence       bigint   NOT NULL,
    started_us  bigint   NOT NULL,
    until_us    bigint   NOT NULL,
    span_us     bigint   NOT NULL,                  -- how long it was given for
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
CREATE INDEX chunk_until ON chunk (until_us);

CREATE TABLE archive OF stored_job (PRIMARY KEY (seq), UNIQUE (id));
CREATE INDEX archive_keep ON archive (keep_us);
CREATE INDEX archive_shelf ON archive (queue, ended_us, seq) WHERE state = 'dead';
CREATE INDEX archive_seq ON archive (queue, state, seq);
CREATE INDEX archive_batch ON archive (batch, seq) WHERE batch IS NOT NULL;

-- They only ever move one way, and unlike rows nobody waits for them.
CREATE SEQUENCE back AS bigint;
CREATE SEQUENCE front AS bigint INCREMENT -1;
CREATE SEQUENCE number AS bigint INCREMENT 1024 START 1024;  -- room for the members of a chunk

-- Ids that callers chose: while their jobs live (until_us is NULL) and for a day after that.
CREATE TABLE known (id text COLLATE "C" PRIMARY KEY, until_us bigint);
CREATE INDEX known_until ON known (until_us) WHERE until_us IS NOT NULL;

-- The tokens of puts, for a day.
CREATE TABLE token (token text COLLATE "C" PRIMARY KEY, until_us bigint NOT NULL);
CREATE INDEX token_until ON token (until_us);

CREATE TABLE unique_key (key text COLLATE "C" PRIMARY KEY, id text NOT NULL);

-- A rule with an end is from then on as if it were not there, and removed by a sweep.
CREATE TABLE rule (
    kind text COLLATE "C", scope text COLLATE "C", name text COLLATE "C", n integer NOT NULL, set_by text NOT NULL, why text NOT NULL,
    set_us bigint NOT NULL, until_us bigint, PRIMARY KEY (kind, scope, name)
);
CREATE INDEX rule_until ON rule (until_us) WHERE until_us IS NOT NULL;

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
    keep_for_us   bigint  NOT NULL,
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

-- Members that are done and not yet counted in their batch, and such that have joined it in a transaction of a caller's.  Rows
-- are only added, so that workers do not wait for one another, and nobody for that caller; whoever may end the last member
-- adds them up: see step_done().
CREATE TABLE batch_tally (batch text COLLATE "C" NOT NULL, n integer NOT NULL, joined integer NOT NULL DEFAULT 0);
CREATE INDEX batch_tally_batch ON batch_tally (batch);

-- Members that have ended: those that did so together and in the same way, and whose numbers / 1024 are the same, are one
-- row, so that a page reads no more than its neighbours.  The live ones are found through the indexes on batch and parent, and
-- in the chunks.
CREATE TABLE ended (
    batch   text      COLLATE "C" NOT NULL,
    born    bigint    NOT NULL,                 -- of the batch: what is left of one that is gone is none of the next
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

-- What has come and gone per queue: jobs that are there = put - deleted, and of those in the archive, and dead there.  Rows are
-- only added, so that workers do not wait for one another, and a sweep adds them up in `total`.
CREATE TABLE tally (
    queue   text   COLLATE "C" NOT NULL,
    put     bigint NOT NULL,
    deleted bigint NOT NULL,
    kept    bigint NOT NULL DEFAULT 0,
    dead    bigint NOT NULL DEFAULT 0
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX tally_queue ON tally (queue);

CREATE TABLE total (
    queue   text   COLLATE "C" PRIMARY KEY,
    put     bigint NOT NULL,
    deleted bigint NOT NULL,
    kept    bigint NOT NULL,
    dead    bigint NOT NULL
) WITH (fillfactor = 50);
CREATE INDEX total_dead ON total (dead) WHERE dead > 0;

-- What `drop` and `delete_batch` have left for sweeps: the jobs of this queue or batch with places in the order of puts after
-- `since` and up to `until`.  Nobody leases them any more.
CREATE TABLE removal (
    scope    text   COLLATE "C",                 -- queue or batch
    name     text   COLLATE "C",
    since    bigint NOT NULL,
    until    bigint NOT NULL,
    began_us bigint NOT NULL,
    removed  bigint NOT NULL,
    PRIMARY KEY (scope, name)
);

-- Which migrations this schema has.  Code that does not know the migration `compatible_from` cannot use it.
CREATE TABLE migration (
    number          integer     PRIMARY KEY,
    checksum        text        NOT NULL,       -- of the file
    compatible_from integer     NOT NULL,
    installed_at    timestamptz NOT NULL DEFAULT now()
);

-- The sets of functions beside it, each in a schema of its own: the newest has the greatest number, and is behind the doors.
CREATE TABLE function_set (
    name         text COLLATE "C" PRIMARY KEY,
    number       integer     NOT NULL UNIQUE GENERATED BY DEFAULT AS IDENTITY,
    knows        integer     NOT NULL,          -- the newest migration that its code knew
    installed_at timestamptz NOT NULL DEFAULT now()
);

-- Which installation of propolis this is, so that nobody puts jobs into another one by mistake, and where it notifies.
CREATE TABLE installation (id text PRIMARY KEY, channel text NOT NULL);
INSERT INTO installation VALUES (gen_random_uuid()::text, 'propolis:' || current_schema());

-- Queues that have got something in a transaction whose commit nobody will announce.
CREATE TABLE unannounced (queue text COLLATE "C" NOT NULL);

-- The names of those who sweep, when each is to come back, since when it has come, and what time it was when it last did.
-- Whoever is late for long is gone.
CREATE TABLE sweeper (
    name text COLLATE "C" PRIMARY KEY, back_us bigint NOT NULL, since_us bigint NOT NULL, seen_us bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);

-- When somebody last searched for transactions that are too old.  Whoever writes here or above has locked this row.
-- Where the clock went back: by how much, to when, and how far the delays that were counted before have followed, and the leases.
CREATE TABLE watch (
    looked_us    bigint NOT NULL,
    shift_us     bigint,            -- NULL: all have
    stepped_us   bigint,
    shifted_due  bigint,
    shifted_seq  bigint,
    shortened_us bigint             -- up to leases that end then; NULL: all have
);
INSERT INTO watch VALUES (0);

-- Where somebody publishes all tables of the database, the server refuses to remove or change rows that it could not name to a
-- subscriber: so tables without a key, which would cost every put and every end an entry in its index, name them by all they have.
ALTER TABLE batch_tally REPLICA IDENTITY FULL;
ALTER TABLE ended REPLICA IDENTITY FULL;
ALTER TABLE tally REPLICA IDENTITY FULL;
ALTER TABLE unannounced REPLICA IDENTITY FULL;
ALTER TABLE watch REPLICA IDENTITY FULL;

-- Records: small named values with versions.  Half of each page stays free, and no index holds the exact time of expiry:
-- so the heartbeats of workers, which move only that time, write no index (with a column for the hour 100 % of such
-- updates are HOT, with the time itself none).
-- (`record` is the name of a type that every server has.)
CREATE TABLE records (
    kind         text COLLATE "C" NOT NULL,
    name         text COLLATE "C" NOT NULL,
    value        bytea  NOT NULL,
    version      bigint NOT NULL,
    at_us        bigint,
    expires_us   bigint,
    expires_hour bigint,
    PRIMARY KEY (kind, name)
) WITH (fillfactor = 50);
CREATE INDEX record_due ON records (kind, at_us, name) WHERE at_us IS NOT NULL;
CREATE INDEX record_next ON records (at_us) WHERE at_us IS NOT NULL;
CREATE INDEX record_expires ON records (expires_hour) WHERE expires_hour IS NOT NULL;

-- The largest version that was drawn, so that none comes back when a record was removed and the clock was set back.
CREATE SEQUENCE record_version;

-- What calls of swap with a token were answered.
CREATE TABLE swap_answer (token text COLLATE "C" PRIMARY KEY, answers jsonb, until_us bigint NOT NULL);
CREATE INDEX swap_answer_until ON swap_answer (until_us);

-- The heads of feeds.  Whoever publishes locks one, so that numbers become visible in their order: those of a sequence do not,
-- and a reader who has seen 2 would never see a 1 that is committed later.
CREATE TABLE feed (
    name         text COLLATE "C" PRIMARY KEY,
    last         bigint  NOT NULL,  -- the number of the newest entry
    born         bigint  NOT NULL,  -- its first number: whoever has read less has read from a feed that was forgotten since
    forgotten    bigint  NOT NULL,  -- the number of the newest entry that is gone
    n            integer NOT NULL,  -- how many entries there are, and their bytes
    bytes        bigint  NOT NULL,
    expires_us   bigint  NOT NULL,
    expires_hour bigint  NOT NULL
) WITH (fillfactor = 50);
CREATE INDEX feed_expires ON feed (expires_hour);

CREATE TABLE feed_entry (
    feed   text COLLATE "C" NOT NULL,
    number bigint NOT NULL,
    value  bytea  NOT NULL,
    PRIMARY KEY (feed, number)
);

-- Until when somebody waits for these feeds: for others there are no notifications.
CREATE TABLE feed_follower (feed text COLLATE "C" PRIMARY KEY, until_us bigint NOT NULL);
CREATE INDEX feed_follower_until ON feed_follower (until_us);

-- --- doors ----------------------------------------------------------------------------------
--
-- They are called by SQL that is not ours, and stay as they are: a further parameter, even one with a default, would make
-- every call of today ambiguous.  What they do is a function of the newest set.

-- Put one job of a task.  Gives its id, or that of the job in its place.
CREATE FUNCTION enqueue(task text, payload jsonb, options jsonb DEFAULT '{}') RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    answer text;
BEGIN
    EXECUTE format('SELECT %I.enqueue_task($1, $2, $3)', (SELECT s.name FROM function_set AS s ORDER BY s.number DESC LIMIT 1))
       INTO answer USING task, payload, options;
    RETURN answer;
END $$;

-- Put one job, given as its envelope.  Gives its id, or that of the job in its place.
CREATE FUNCTION enqueue(envelope text) RETURNS text LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    answer text;
BEGIN
    EXECUTE format('SELECT %I.enqueue_envelope($1)', (SELECT s.name FROM function_set AS s ORDER BY s.number DESC LIMIT 1))
       INTO answer USING envelope;
    RETURN answer;
END $$;
