-- The tables of the SQLite engine.  Times are whole microseconds since 1970.
--
-- `job` holds live jobs only, and on the happy path a row is written once and deleted once: where a job
-- stands is told by the narrow tables `ready`, `scheduled`, `held` and `running`, of which it is in exactly one.
-- So the cost of a lease does not depend on payloads, on the backlog or on history.

CREATE TABLE job (
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
    crashes      INTEGER NOT NULL DEFAULT 0,
    fence        INTEGER NOT NULL DEFAULT 0,   -- of the last lease that ended
    started_us   INTEGER,
    error        TEXT,
    progress     TEXT,
    log          TEXT,
    history      TEXT,
    body         BLOB    NOT NULL
);
CREATE UNIQUE INDEX job_id ON job (id);
CREATE INDEX job_expires ON job (expires_us) WHERE expires_us IS NOT NULL;
CREATE INDEX job_batch ON job (batch, member) WHERE batch IS NOT NULL;

CREATE TABLE ready (
    queue    TEXT    NOT NULL,
    priority INTEGER NOT NULL,
    pos      INTEGER NOT NULL,
    seq      INTEGER NOT NULL,
    PRIMARY KEY (queue, priority DESC, pos)
) WITHOUT ROWID;

CREATE TABLE scheduled (
    queue  TEXT    NOT NULL,
    due_us INTEGER NOT NULL,
    seq    INTEGER NOT NULL,
    PRIMARY KEY (queue, due_us, seq)
) WITHOUT ROWID;
CREATE INDEX scheduled_due ON scheduled (due_us);

-- Jobs that a rule keeps back are set aside here, with their places, so that no lease walks over them.
CREATE TABLE held (
    queue    TEXT    NOT NULL,
    scope    TEXT    NOT NULL,
    name     TEXT    NOT NULL,
    priority INTEGER NOT NULL,
    pos      INTEGER NOT NULL,
    seq      INTEGER NOT NULL,
    PRIMARY KEY (queue, scope, name, priority DESC, pos)
) WITHOUT ROWID;

CREATE TABLE running (
    fence      INTEGER PRIMARY KEY,
    seq        INTEGER NOT NULL,
    attempt    INTEGER NOT NULL,
    until_us   INTEGER NOT NULL,
    span_us    INTEGER NOT NULL,               -- how long it was given for
    started_us INTEGER NOT NULL,
    holder     TEXT    NOT NULL,
    cancel     INTEGER NOT NULL DEFAULT 0
);

CREATE TABLE archive (
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
    crashes     INTEGER NOT NULL,
    fence       INTEGER NOT NULL,
    started_us  INTEGER,
    error       TEXT,
    progress    TEXT,
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
CREATE UNIQUE INDEX archive_id ON archive (id);
CREATE INDEX archive_keep ON archive (keep_us);
CREATE INDEX archive_shelf ON archive (queue, state, ended_us, seq);

-- Ids that callers chose, for a day after their jobs have ended; and the tokens of puts, for a day.
CREATE TABLE known (id TEXT PRIMARY KEY, until_us INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX known_until ON known (until_us);
CREATE TABLE token (token TEXT PRIMARY KEY, until_us INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX token_until ON token (until_us);

CREATE TABLE unique_key (key TEXT PRIMARY KEY, id TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE rule (
    kind  TEXT    NOT NULL,
    scope TEXT    NOT NULL,
    name  TEXT    NOT NULL,
    n     INTEGER NOT NULL,
    PRIMARY KEY (kind, scope, name)
) WITHOUT ROWID;

CREATE TABLE batch (
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
CREATE INDEX batch_parent ON batch (parent, member) WHERE parent IS NOT NULL;
CREATE INDEX batch_keep ON batch (keep_us) WHERE keep_us IS NOT NULL;
CREATE INDEX batch_open ON batch (open_us) WHERE sealed = 0;

-- Members that have ended; the live ones are found through job_batch and batch_parent.
CREATE TABLE member (
    batch  TEXT    NOT NULL,
    member INTEGER NOT NULL,
    id     TEXT    NOT NULL,
    state  TEXT    NOT NULL,
    result BLOB,
    reason TEXT,
    PRIMARY KEY (batch, member, id)
) WITHOUT ROWID;

CREATE TABLE schedule (
    name    TEXT PRIMARY KEY,
    body    TEXT    NOT NULL,
    next_us INTEGER NOT NULL,
    last_us INTEGER,
    paused  INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;

-- What has come and gone per queue: jobs that are there = put - deleted.
CREATE TABLE tally (queue TEXT PRIMARY KEY, put INTEGER NOT NULL, deleted INTEGER NOT NULL) WITHOUT ROWID;

-- The counters that only ever move one way: places at the back and at the front, and fences.
CREATE TABLE counter (only INTEGER PRIMARY KEY CHECK (only = 1), seq INTEGER, front INTEGER, fence INTEGER);
INSERT INTO counter VALUES (1, 0, 0, 0);
