-- Limits that are rates, and limits for each key.  Code that does not know this one keeps the others.

-- A start each so often, of which so many are saved up; NULL: it is no rate.
ALTER TABLE rule ADD COLUMN every_us bigint, ADD COLUMN burst integer;
CREATE INDEX rule_prefix ON rule (name) WHERE kind = 'limit' AND scope = 'key' AND right(name, 1) = '*';
CREATE INDEX rule_rate ON rule (scope, name) WHERE every_us IS NOT NULL;

-- When the bucket of a queue, a task or a key is full again; none is kept of one that is full.  Whoever leases under a limit for
-- each key locks the row of the key, since others that are under it need not wait.  Half of each page stays free, and the index
-- has minutes, so that most updates write none.
CREATE TABLE bucket (
    scope       text   COLLATE "C",
    name        text   COLLATE "C",
    full_us     bigint NOT NULL,
    full_minute bigint NOT NULL,                -- in which minute it is forgotten
    PRIMARY KEY (scope, name)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX bucket_full ON bucket (full_minute);

-- Tokens of runs that did not count.  Rows are only added, as a run may end in a transaction that stays open, and nobody is to wait
-- for that; whoever leases next under that name puts them back.
CREATE TABLE unspent (
    number   bigint  PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    scope    text    COLLATE "C" NOT NULL,
    name     text    COLLATE "C" NOT NULL,
    at_us    bigint  NOT NULL,
    every_us bigint  NOT NULL,                  -- as the rate was then
    burst    integer NOT NULL
);
CREATE INDEX unspent_name ON unspent (scope, name);

-- Groups of keys in which something is held and may go from a time on, so that no lease looks at all of them: a run of that key has
-- ended, a token comes, or a rule has changed; `*` and a place in the order of groups: all that come after it.  Rows are only added,
-- for the same reason.
CREATE TABLE opening (
    queue text   COLLATE "C" NOT NULL,
    scope text   COLLATE "C" NOT NULL,
    name  text   COLLATE "C" NOT NULL,
    at_us bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX opening_at ON opening (queue, at_us);
CREATE INDEX opening_next ON opening (at_us);
CREATE INDEX opening_name ON opening (queue, scope, name, at_us);
ALTER TABLE opening REPLICA IDENTITY FULL;

-- Whoever may work with jobs may work with these.
DO $$
DECLARE
    may record;
BEGIN
    FOR may IN
        SELECT a.privilege_type, CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS who
          FROM pg_catalog.pg_class AS c, aclexplode(c.relacl) AS a WHERE c.oid = 'known'::regclass AND a.grantee <> c.relowner
    LOOP
        EXECUTE format('GRANT %s ON bucket, opening, unspent TO %s', may.privilege_type, may.who);
    END LOOP;
END $$;
