"""The least that a queue with leases must do on SQLite: one table, bundles of 100, synchronous=FULL.

Take a bundle and commit; delete it and commit.  No retries, priorities, delays, results or history.
"""

from __future__ import annotations

import sqlite3
import time

from adapters.protocol import Bodies, BulkPeer, Bundles, Jobs, main

TABLE = "CREATE TABLE IF NOT EXISTS job (id INTEGER PRIMARY KEY, queue, state, due, until, attempt, body)"
INDEX = "CREATE INDEX IF NOT EXISTS job_line ON job (queue, state, due, id)"
PUT = "INSERT INTO job (queue, state, due, attempt, body) VALUES ('q', 0, 0, 0, ?)"
CLAIM = """
UPDATE job SET state = 1, until = unixepoch() + 15, attempt = attempt + 1
 WHERE id IN (SELECT id FROM job WHERE queue = 'q' AND state = 0 AND due <= unixepoch()
               ORDER BY due, id LIMIT 100)
RETURNING id, body
"""
DELETE = "DELETE FROM job WHERE id = ? AND state = 1"
REAP = "UPDATE job SET state = 0 WHERE queue = 'q' AND state = 1 AND until <= unixepoch()"
IDLE = 0.001


class RawSQLite(BulkPeer):
    distribution = ""
    settings = f"WAL, synchronous=FULL, bundles of 100, lease 15 s; looks again after {IDLE} s when empty"

    def version(self) -> str:
        return f"SQLite {sqlite3.sqlite_version}"

    def send(self, bodies: Bodies) -> None:
        db = self._open()
        for body in bodies:
            db.execute(PUT, (body.encode(),))

    def bulk(self, bundles: Bundles) -> None:
        db = self._open()
        for bundle in bundles.lists():
            db.execute("BEGIN IMMEDIATE")
            db.executemany(PUT, [(body.encode(),) for body in bundle])
            db.execute("COMMIT")

    def work(self, jobs: Jobs) -> None:
        db = self._open()
        reaped = 0.0
        while True:
            if time.monotonic() - reaped > 1:
                db.execute(REAP)
                reaped = time.monotonic()
            rows = db.execute(CLAIM).fetchall()
            if not rows:
                time.sleep(IDLE)
                continue
            for row in rows:
                jobs.run(row[1].decode())
            db.execute("BEGIN IMMEDIATE")
            db.executemany(DELETE, [(row[0],) for row in rows])
            db.execute("COMMIT")

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.url.removeprefix("sqlite:///"), isolation_level=None, timeout=30)
        for statement in ("journal_mode = wal", "synchronous = full", "wal_autocheckpoint = 4000"):
            db.execute(f"PRAGMA {statement}")
        db.execute(TABLE)
        db.execute(INDEX)
        return db


if __name__ == "__main__":
    main(RawSQLite)
