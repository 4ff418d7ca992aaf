-- Limits that are rates, and limits for each key that begins with something, or for each key of a task.
-- Older code does not open the groups that it would have to.
-- compatible_from: 2

ALTER TABLE propolis_rule ADD COLUMN every_us INTEGER;                -- a start each so often; NULL: no rate
ALTER TABLE propolis_rule ADD COLUMN burst INTEGER NOT NULL DEFAULT 1;
-- Those for each key of many.  There are few for keys that begin with something, so that a call may read all of them.
CREATE INDEX propolis_rule_each ON propolis_rule (scope, name) WHERE kind = 'limit' AND substr(name, -1) = '*';
CREATE INDEX propolis_rule_scope ON propolis_rule (scope) WHERE kind <> 'cap';
CREATE INDEX propolis_rule_rate ON propolis_rule (scope, name) WHERE every_us IS NOT NULL;

-- When the bucket of a queue, a task or a key is full again.  What is full is forgotten.
ALTER TABLE propolis_busy ADD COLUMN full_us INTEGER NOT NULL DEFAULT 0;
CREATE INDEX propolis_busy_full ON propolis_busy (full_us) WHERE full_us > 0;

-- What is set aside goes from there: an open group stands with its first job (`priority`, `pos`, `seq`) among those that
-- may be leased next.  A closed one does not know its first job, and has no room, until something opens it: the end of a
-- run, a change of a rule, or its time, `opens_us`, where it waits for a token; `epoch` is that in which this was counted.
-- `key`: also of the groups of one task and key, which wait for others of their key as well.
ALTER TABLE propolis_group ADD COLUMN priority INTEGER;
ALTER TABLE propolis_group ADD COLUMN pos INTEGER;
ALTER TABLE propolis_group ADD COLUMN seq INTEGER;
ALTER TABLE propolis_group ADD COLUMN opens_us INTEGER;
ALTER TABLE propolis_group ADD COLUMN epoch INTEGER;
ALTER TABLE propolis_group ADD COLUMN key TEXT;
UPDATE propolis_group SET key = CASE scope WHEN 'key' THEN name ELSE substr(name, instr(name, ' ') + 1) END
 WHERE scope IN ('key', 'task_key');
DELETE FROM propolis_group WHERE NOT EXISTS (
    SELECT 1 FROM propolis_held h
     WHERE h.queue = propolis_group.queue AND h.scope = propolis_group.scope AND h.name = propolis_group.name);
UPDATE propolis_group SET opened = 1, (priority, pos, seq) = (
    SELECT priority, pos, seq FROM propolis_held h
     WHERE h.queue = propolis_group.queue AND h.scope = propolis_group.scope AND h.name = propolis_group.name
     ORDER BY priority DESC, pos LIMIT 1);
DROP INDEX propolis_group_opened;
CREATE INDEX propolis_group_opened ON propolis_group (queue, priority DESC, pos) WHERE opened;
CREATE INDEX propolis_group_key ON propolis_group (key, queue, scope, name) WHERE key IS NOT NULL;
CREATE INDEX propolis_group_opens ON propolis_group (opens_us) WHERE opens_us IS NOT NULL;
CREATE INDEX propolis_group_epoch ON propolis_group (epoch) WHERE epoch IS NOT NULL;
UPDATE propolis_busy SET held = 0;             -- groups tell that
DELETE FROM propolis_busy WHERE running = 0;

-- Rules for many keys that are new, or gone: the groups of these keys open bite by bite, and so far that is done.
CREATE TABLE propolis_opening (
    scope TEXT NOT NULL,
    name  TEXT NOT NULL,
    place TEXT NOT NULL,                       -- of the last group, as JSON
    PRIMARY KEY (scope, name)
) WITHOUT ROWID;
