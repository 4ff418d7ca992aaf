"""SQLite: a file beside the one that is named, on the same disk with the same settings."""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from propolis.bench.target import BUNDLE, BenchPlace, BenchTarget, Raw, envelope, fresh_name
from propolis.engines.address import Address
from propolis.errors import EngineUnavailable

TABLE = """
CREATE TABLE job (id INTEGER PRIMARY KEY, queue, state, due, until, attempt DEFAULT 0, body);
CREATE INDEX job_line ON job (queue, state, due, id);
"""
PUT = "INSERT INTO job (queue, state, due, body) VALUES ('q', 0, 0, ?)"
LEASE = """
UPDATE job SET state = 1, until = unixepoch() + 15, attempt = attempt + 1
 WHERE id IN (SELECT id FROM job WHERE queue = 'q' AND state = 0 AND due <= unixepoch()
               ORDER BY due, id LIMIT ?)
RETURNING id, body
"""
DELETE = "DELETE FROM job WHERE id = ? AND state = 1"


class SQLiteTarget:
    @asynccontextmanager
    async def place(self, url: str) -> AsyncIterator[BenchPlace]:
        name = fresh_name()
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=_folder(url)) as own:
            query = url.partition("?")[2]
            yield BenchPlace(f"sqlite:///{quote(own)}/jobs.db" + (f"?{query}" if query else ""), name)

    async def raw(self, place: BenchPlace, jobs: int, payload: str) -> Raw:
        """Take a bundle, commit; delete it, commit."""
        file = Path(Address(place.url).path[1:]).with_name("raw.db")
        with closing(sqlite3.connect(file, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode = wal")
            db.execute(f"PRAGMA synchronous = {_synchronous(place)}")
            db.execute("PRAGMA wal_autocheckpoint = 4000")
            db.executescript(TABLE)
            bodies = [(envelope(payload),)] * 1000
            began = time.perf_counter()
            for start in range(0, jobs, 1000):
                with _commit(db):
                    db.executemany(PUT, bodies[: jobs - start])
            put = time.perf_counter()
            while True:
                with _commit(db):
                    rows = db.execute(LEASE, (BUNDLE,)).fetchall()
                if not rows:
                    break
                with _commit(db):
                    db.executemany(DELETE, [(row[0],) for row in rows])
            ended = time.perf_counter()
        for suffix in ("", "-wal", "-shm"):
            file.with_name(file.name + suffix).unlink(missing_ok=True)
        return Raw(jobs / (put - began), jobs / (ended - put))

    async def about(self, place: BenchPlace) -> dict[str, str]:
        return {"sqlite": sqlite3.sqlite_version, "synchronous": _synchronous(place)}


def target() -> BenchTarget:
    return SQLiteTarget()


def _folder(url: str) -> Path:
    folder = Path(Address(url).path[1:]).resolve().parent
    if not folder.is_dir():
        raise EngineUnavailable(f"there is no folder {folder}: make it, or give another path")
    return folder


def _synchronous(place: BenchPlace) -> str:
    return "normal" if Address(place.url).options.get("synchronous", "full").lower() == "normal" else "full"


@contextmanager
def _commit(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    yield
    db.execute("COMMIT")
