"""The SQLite engine against a hand-written loop on the same disk with the same durability, in one run.

    python benchmarks/sqlite_lease.py [--jobs 30000] [--backlog 1000000] [--repeat 3]

Prints lease + settle per second in bundles of 100, synchronous=FULL: the raw loop (one table, a lease
and a delete, each its own commit), the two verbs of the engine, and its exchange; then the engine with
1,000 and with `--backlog` jobs waiting.  Read the ratios: a machine's speed varies.
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from propolis.core.job import Done
from propolis.engines.sqlite.engine import SQLiteEngine
from propolis.testing.engines.samples import a_job

BUNDLE = 100
SPAN = timedelta(seconds=15)
PAYLOAD = "x" * 250


def raw_loop(path: Path, jobs: int) -> float:
    """The least that a queue with leases must do: take a bundle, commit; delete it, commit."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode = wal")
    db.execute("PRAGMA synchronous = full")
    db.execute("PRAGMA wal_autocheckpoint = 4000")
    db.execute("CREATE TABLE job (id INTEGER PRIMARY KEY, queue, state, due, until, attempt DEFAULT 0, body)")
    db.execute("CREATE INDEX job_line ON job (queue, state, due, id)")
    body = b'{"v":1,"task":"noop","args":["' + PAYLOAD.encode() + b'"]}'
    db.execute("BEGIN IMMEDIATE")
    db.executemany("INSERT INTO job (queue, state, due, body) VALUES ('q', 0, 0, ?)", [(body,)] * jobs)
    db.execute("COMMIT")
    began = time.perf_counter()
    while True:
        db.execute("BEGIN IMMEDIATE")
        rows = db.execute(
            "UPDATE job SET state = 1, until = 5, attempt = attempt + 1 WHERE id IN (SELECT id FROM job"
            " WHERE queue = 'q' AND state = 0 AND due <= 1 ORDER BY due, id LIMIT ?) RETURNING id, body",
            (BUNDLE,),
        ).fetchall()
        db.execute("COMMIT")
        if not rows:
            break
        db.execute("BEGIN IMMEDIATE")
        db.executemany("DELETE FROM job WHERE id = ? AND state = 1", [(row[0],) for row in rows])
        db.execute("COMMIT")
    rate = jobs / (time.perf_counter() - began)
    db.close()
    return rate


async def engine_loop(path: Path, jobs: int, *, backlog: int = 0, exchange: bool = False) -> float:
    engine = await SQLiteEngine(path).open()
    for start in range(0, jobs + backlog, 5000):
        size = min(5000, jobs + backlog - start)
        await engine.put([a_job(PAYLOAD) for _ in range(size)])
    wants = {"default": BUNDLE}
    began = time.perf_counter()
    done = 0
    leases = await engine.lease(wants, span=SPAN, holder="bench")
    while leases and done < jobs:
        done += len(leases)
        outcomes = [(lease, Done()) for lease in leases]
        if exchange:
            leases = (await engine.exchange(outcomes, wants, span=SPAN, holder="bench")).leases
        else:
            await engine.settle(outcomes)
            leases = await engine.lease(wants, span=SPAN, holder="bench")
    rate = done / (time.perf_counter() - began)
    await engine.close()
    return rate


async def main(arguments: argparse.Namespace) -> None:
    jobs = arguments.jobs
    rates: dict[str, list[float]] = {}
    for turn in range(arguments.repeat):
        with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
            place = Path(folder)
            measured = {
                "raw loop": raw_loop(place / "raw.db", jobs),
                "lease + settle": await engine_loop(place / "two.db", jobs),
                "exchange": await engine_loop(place / "one.db", jobs, exchange=True),
            }
        for name, rate in measured.items():
            rates.setdefault(name, []).append(rate)
            print(f"  run {turn + 1}: {name:16} {rate:10,.0f} jobs/s", file=sys.stderr, flush=True)
    raw = statistics.median(rates["raw loop"])
    for name, found in rates.items():
        middle = statistics.median(found)
        print(f"{name:16} {middle:10,.0f} jobs/s  {middle / raw:6.0%} of raw")
    few, many = [], []
    for _ in range(arguments.repeat):
        with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
            few.append(await engine_loop(Path(folder) / "few.db", 20_000, backlog=1000))
            many.append(await engine_loop(Path(folder) / "many.db", 20_000, backlog=arguments.backlog))
    ratio = statistics.median(many) / statistics.median(few)
    print(f"{1000:,} waiting: {statistics.median(few):,.0f} jobs/s")
    print(f"{arguments.backlog:,} waiting: {statistics.median(many):,.0f} jobs/s, {ratio:.0%} of that")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=30_000)
    parser.add_argument("--backlog", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dir", help="where to make the files (default: the system's temporary folder)")
    asyncio.run(main(parser.parse_args()))
