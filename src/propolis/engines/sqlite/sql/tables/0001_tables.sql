-- The tables of the SQLite engine.  Their names begin with `propolis_`, since the file may hold other tables.
-- Times are whole microseconds since 1970.
--
-- `propolis_job` holds live jobs only, and on the happy path a row is written once and deleted once: where a job
-- stands is written in the narrow tables `propolis_ready`, `_scheduled`, `_held`, `_parked` and `_running`, of which
-- it is in exactly one.  So the cost of a lease does not depend on payloads, on the backlog or on history.

CREATE TABLE propolis_job (
    seq          INTEGER PRIMARY KEY,          -- the order of puts; also the first place in line
    id           TEXT    NOT NULL,
    task         TEXT    NOT NULL,
    queue        TEXT    NOT NULL,
    priority     INTEGER NOT NULL,
    pos          INTEGER NOT NULL,             -- the place in line: higher is further back
    put_us       INTEGER NOT NULL,
    due_us       INTEGER NOT NULL,
    expires_us   INTEGER,
    max_crashes  INTEGER NOT NULL,
    plain        INTEGER NOT NULL,             -- neither chosen nor unique nor in a batch: ends without a trace
    chosen       INTEGER NOT NULL,
    unique_key   TEXT,
    unique_until TEXT,
    limit_key    TEXT,
    batch        TEXT,
    member       INTEGER NOT NULL,
    stepped      INTEGER NOT NULL DEFAULT 0,   -- a replayed member: its batch has counted it already
    attempts     INTEGER NOT NULL DEFAULT 0,   -- without the attempt that is running now
    failures     INTEGER NOT NULL DEFAULT 0,
    losses       INTEGER NOT NULL DEFAULT 0,
    crashes      INTEGER NOT NULL DEFAULT 0,
    fence        INTEGER NOT NULL DEFAULT 0,   -- of the last lease that ended
    started_us   INTEGER,
    error        TEXT,
    progress     TEXT,
    checkpoint   BLOB,
    log          TEXT,
    history      TEXT,
    body         BLOB    NOT NULL
);
CREATE UNIQUE INDEX propolis_job_id ON propolis_job (id);
-- The live members of batches.
CREATE INDEX propolis_job_batch ON propolis_job (batch, member, id) WHERE batch IS NOT NULL AND NOT stepped;

CREATE TABLE propolis_ready (
    queue    TEXT    NOT NULL,
    priority INTEGER NOT NULL,
    pos      INTEGER NOT NULL,
    seq      INTEGER NOT NULL,
    PRIMARY KEY (queue, priority DESC, pos)
) WITHOUT ROWID;

CREATE TABLE propolis_scheduled (
    queue  TEXT    NOT NULL,
    due_us INTEGER NOT NULL,
    seq    INTEGER NOT NULL,
    epoch  INTEGER,                            -- in which its delay was counted; NULL: it was given a time
    PRIMARY KEY (queue, due_us, seq)
) WITHOUT ROWID;
CREATE INDEX propolis_scheduled_due ON propolis_scheduled (due_us);
CREATE INDEX propolis_scheduled_epoch ON propolis_scheduled (epoch) WHERE epoch IS NOT NULL;

-- Those of the waiting jobs that expire.
CREATE TABLE propolis_expiring (
    expires_us INTEGER NOT NULL,
    seq        INTEGER NOT NULL,
    PRIMARY KEY (expires_us, seq)
) WITHOUT ROWID;

-- Jobs of tasks that whoever leased them did not know, in the order of their puts.
CREATE TABLE propolis_parked (
    queue    TEXT    NOT NULL,
    task     TEXT    NOT NULL,
    priority INTEGER NOT NULL,
    seq      INTEGER NOT NULL,
    PRIMARY KEY (queue, task, priority DESC, seq)
) WITHOUT ROWID;

-- Jobs that a rule on their task, their key or both keeps back are set aside here, with their places, so that no lease walks
-- over them.
CREATE TABLE propolis_held (
    queue    TEXT    NOT NULL,
    scope    TEXT    NOT NULL,
    name     TEXT    NOT NULL,
    priority INTEGER NOT NULL,
    pos      INTEGER NOT NULL,
    seq      INTEGER NOT NULL,
    PRIMARY KEY (queue, scope, name, priority DESC, pos)
) WITHOUT ROWID;
CREATE UNIQUE INDEX propolis_held_seq ON propolis_held (seq);

-- Which tasks and keys, and tasks of one key, of a queue have jobs set aside; `opened`: some of them may go, as far as anybody knows.
CREATE TABLE propolis_group (
    queue  TEXT    NOT NULL,
    scope  TEXT    NOT NULL,
    name   TEXT    NOT NULL,
    opened INTEGER NOT NULL,
    PRIMARY KEY (queue, scope, name)
) WITHOUT ROWID;
CREATE INDEX propolis_group_name ON propolis_group (scope, name);
CREATE INDEX propolis_group_opened ON propolis_group (queue) WHERE opened;

-- How many jobs of a task or a key run, and how many are set aside.
CREATE TABLE propolis_busy (
    scope   TEXT    NOT NULL,
    name    TEXT    NOT NULL,
    running INTEGER NOT NULL,
    held    INTEGER NOT NULL,
    PRIMARY KEY (scope, name)
) WITHOUT ROWID;

CREATE TABLE propolis_running (
    seq        INTEGER PRIMARY KEY,
    fence      INTEGER NOT NULL,
    attempt    INTEGER NOT NULL,
    until_us   INTEGER NOT NULL,
    span_us    INTEGER NOT NULL,               -- how long it was given for
    started_us INTEGER NOT NULL,
    holder     TEXT    NOT NULL,
    cancel     INTEGER NOT NULL DEFAULT 0,
    began      INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX propolis_running_until ON propolis_running (until_us);

CREATE TABLE propolis_archive (
    seq         INTEGER PRIMARY KEY,
    id          TEXT    NOT NULL,
    task        TEXT    NOT NULL,
    queue       TEXT    NOT NULL,
    priority    INTEGER NOT NULL,
    put_us      INTEGER NOT NULL,
    due_us      INTEGER NOT NULL,
    expires_us  INTEGER,
    max_crashes INTEGER NOT NULL,
    chosen      INTEGER NOT NULL,
    unique_key  TEXT,
    unique_until TEXT,
    limit_key   TEXT,
    batch       TEXT,
    member      INTEGER NOT NULL,
    attempts    INTEGER NOT NULL,
    failures    INTEGER NOT NULL,
    losses      INTEGER NOT NULL,
    crashes     INTEGER NOT NULL,
    fence       INTEGER NOT NULL,
    started_us  INTEGER,
    error       TEXT,
    progress    TEXT,
    checkpoint  BLOB,
    log         TEXT,
    history     TEXT,
    body        BLOB    NOT NULL,
    state       TEXT    NOT NULL,
    cancel      INTEGER NOT NULL,
    ended_us    INTEGER NOT NULL,
    keep_us     INTEGER NOT NULL,
    reason      TEXT,
    result      BLOB
);
CREATE UNIQUE INDEX propolis_archive_id ON propolis_archive (id);
CREATE INDEX propolis_archive_keep ON propolis_archive (keep_us);
CREATE INDEX propolis_archive_shelf ON propolis_archive (queue, state, ended_us, seq);

-- Ids that callers chose, for a day after their jobs have ended; and the tokens of puts, for a day.
CREATE TABLE propolis_known (id TEXT PRIMARY KEY, until_us INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX propolis_known_until ON propolis_known (until_us);
CREATE TABLE propolis_token (token TEXT PRIMARY KEY, until_us INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX propolis_token_until ON propolis_token (until_us);

CREATE TABLE propolis_unique_key (key TEXT PRIMARY KEY, id TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE propolis_rule (
    kind     TEXT    NOT NULL,
    scope    TEXT    NOT NULL,
    name     TEXT    NOT NULL,
    n        INTEGER NOT NULL,
    set_by   TEXT    NOT NULL,
    why      TEXT    NOT NULL,
    set_us   INTEGER NOT NULL,
    until_us INTEGER,                          -- from then on it is as if it were not there
    PRIMARY KEY (kind, scope, name)
) WITHOUT ROWID;
CREATE INDEX propolis_rule_until ON propolis_rule (until_us) WHERE until_us IS NOT NULL;

CREATE TABLE propolis_batch (
    id          TEXT PRIMARY KEY,
    body        TEXT    NOT NULL,
    sealed      INTEGER NOT NULL DEFAULT 0,
    live        INTEGER NOT NULL DEFAULT 0,
    done        INTEGER NOT NULL DEFAULT 0,
    dead        INTEGER NOT NULL DEFAULT 0,
    cancelled   INTEGER NOT NULL DEFAULT 0,
    created_us  INTEGER NOT NULL,
    open_us     INTEGER NOT NULL,              -- until when an unsealed batch is kept
    finished_us INTEGER,
    keep_us     INTEGER,
    parent      TEXT,
    member      INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX propolis_batch_parent ON propolis_batch (parent, member, id)
 WHERE parent IS NOT NULL AND finished_us IS NULL;
CREATE INDEX propolis_batch_keep ON propolis_batch (keep_us) WHERE keep_us IS NOT NULL;
CREATE INDEX propolis_batch_open ON propolis_batch (open_us) WHERE sealed = 0;

-- Members that have ended; the live ones are found through propolis_job_batch and propolis_batch_parent.
CREATE TABLE propolis_member (
    batch  TEXT    NOT NULL,
    member INTEGER NOT NULL,
    id     TEXT    NOT NULL,
    seq    INTEGER NOT NULL,                   -- of its job; or of the last job that was put when its batch ended
    state  TEXT    NOT NULL,
    result BLOB,
    reason TEXT,
    PRIMARY KEY (batch, member, id)
) WITHOUT ROWID;

-- What has come and gone per queue, and what is there: put - deleted is the sum of all that follows.
CREATE TABLE propolis_tally (
    queue     TEXT PRIMARY KEY,
    put       INTEGER NOT NULL,
    deleted   INTEGER NOT NULL,
    ready     INTEGER NOT NULL,
    scheduled INTEGER NOT NULL,                -- also those whose time has come, until somebody promotes them
    held      INTEGER NOT NULL,
    parked    INTEGER NOT NULL,
    running   INTEGER NOT NULL,
    done      INTEGER NOT NULL,
    dead      INTEGER NOT NULL,
    cancelled INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX propolis_tally_dead ON propolis_tally (dead) WHERE dead > 0;

-- What a drop or the end of a batch has left to the sweeps: all jobs of it up to a number.  `cancels`: those that
-- wait go as well; else only the members of the batch are forgotten.
CREATE TABLE propolis_removal (
    name     TEXT    PRIMARY KEY,              -- queue:<name> or batch:<id>
    upto     INTEGER NOT NULL,
    removed  INTEGER NOT NULL,
    since_us INTEGER NOT NULL,
    cancels  INTEGER NOT NULL
) WITHOUT ROWID;

-- The counters that only ever move one way: places at the back and at the front.  `largest_us` is the largest time
-- that was seen, about; `epoch` counts how often the clock was set back since.
CREATE TABLE propolis_counter (
    only       INTEGER PRIMARY KEY CHECK (only = 1),
    seq        INTEGER NOT NULL,
    front      INTEGER NOT NULL,
    largest_us INTEGER NOT NULL,
    epoch      INTEGER NOT NULL
);
INSERT INTO propolis_counter VALUES (1, 0, 0, 0, 0);

-- By how much it was set back at the end of an epoch, as long as not everything has followed: leases have up to the one
-- that ends then, of that job.
CREATE TABLE propolis_step_back (
    epoch    INTEGER PRIMARY KEY,
    by_us    INTEGER NOT NULL,
    until_us INTEGER NOT NULL DEFAULT 0,
    seq      INTEGER NOT NULL DEFAULT 0
);

-- Records: small named values with versions.  `version` is drawn from the counter of the store, see swap.
CREATE TABLE propolis_record (
    kind       TEXT    NOT NULL,
    name       TEXT    NOT NULL,
    value      BLOB    NOT NULL,
    version    INTEGER NOT NULL,
    at_us      INTEGER,
    expires_us INTEGER,
    PRIMARY KEY (kind, name)
) WITHOUT ROWID;
CREATE INDEX propolis_record_due ON propolis_record (kind, at_us, name) WHERE at_us IS NOT NULL;
CREATE INDEX propolis_record_next ON propolis_record (at_us) WHERE at_us IS NOT NULL;
CREATE INDEX propolis_record_expiring ON propolis_record (expires_us) WHERE expires_us IS NOT NULL;

-- The last version that was drawn, which outlives the record that had it.
CREATE TABLE propolis_version (only INTEGER PRIMARY KEY CHECK (only = 1), last INTEGER NOT NULL);
INSERT INTO propolis_version VALUES (1, 0);

-- What calls of swap with a token were answered, as JSON.
CREATE TABLE propolis_swap (token TEXT PRIMARY KEY, answers BLOB NOT NULL, until_us INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX propolis_swap_until ON propolis_swap (until_us);

-- Which migrations were run here.  Code that does not know migration `compatible_from` must not use these tables.
CREATE TABLE propolis_migration (
    number          INTEGER PRIMARY KEY,
    checksum        TEXT    NOT NULL,
    compatible_from INTEGER NOT NULL
);
