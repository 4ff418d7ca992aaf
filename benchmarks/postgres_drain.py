"""The PostgreSQL engine against a hand-written loop on the same server with the same durability, in one run.

    python benchmarks/postgres_drain.py [--jobs 30000] [--backlog 0] [--held] [--repeat 3]

Prints jobs per second drained in bundles of 100 with fsync=on and synchronous_commit=on: the raw loop (one
table with a state column, a claim and a delete, each its own commit), the same in one statement, the engine's
two verbs, its exchange, and a worker with no-op tasks.  `--held` keeps a transaction open elsewhere for the
whole drain, and `--backlog` leaves that many jobs waiting.  Read the ratios: the speed of a machine varies
from minute to minute.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta

import asyncpg

from skep import App
from skep.brokers.postgres import PostgresBroker
from skep.job import Done
from skep.testing.make import a_job
from skep.testing.servers import postgres
from skep.worker.settings import Mode, Settings
from skep.worker.worker import Worker

BUNDLE = 100
SPAN = timedelta(seconds=15)
PAYLOAD = "x" * 250

RAW_TABLE = """
DROP TABLE IF EXISTS raw;
CREATE TABLE raw (
    id bigserial PRIMARY KEY, queue text, state smallint, until timestamptz, attempt int, body bytea);
CREATE INDEX raw_line ON raw (queue, state, id);
"""
RAW_PUT = (
    "INSERT INTO raw (queue, state, attempt, body) SELECT 'q', 0, 0, $1 FROM generate_series(1, $2::int)"
)
RAW_CLAIM = """
WITH due AS (
    SELECT id FROM raw WHERE queue = 'q' AND state = 0 ORDER BY id LIMIT 100 FOR UPDATE SKIP LOCKED)
UPDATE raw SET state = 1, until = now() + interval '15 s', attempt = attempt + 1
  FROM due WHERE raw.id = due.id RETURNING raw.id, raw.body
"""
RAW_DELETE = "DELETE FROM raw WHERE id = ANY ($1::bigint[]) AND state = 1"
RAW_BOTH = f"WITH gone AS ({RAW_DELETE}), {RAW_CLAIM.strip().removeprefix('WITH ')}"


async def raw_loop(url: str, jobs: int, backlog: int, *, fused: bool = False) -> float:
    """The least that a queue with leases must do: take a bundle, commit; delete it, commit."""
    connection = await asyncpg.connect(url)
    await connection.execute(RAW_TABLE)
    body = b'{"v":1,"task":"noop","args":["' + PAYLOAD.encode() + b'"]}'
    await connection.execute(RAW_PUT, body, jobs + backlog)
    await connection.execute("ANALYZE raw")
    began, done, ids = time.perf_counter(), 0, list[int]()
    while done < jobs:
        if fused:
            rows = await connection.fetch(RAW_BOTH, ids)
        else:
            rows = await connection.fetch(RAW_CLAIM)
            await connection.execute(RAW_DELETE, [row[0] for row in rows])
        ids = [row[0] for row in rows]
        done += len(ids)
    rate = done / (time.perf_counter() - began)
    await connection.execute("DROP TABLE raw")
    await connection.close()
    return rate


async def fill(url: str, schema: str, count: int, **facts: str) -> PostgresBroker:
    engine = await PostgresBroker(url, schema=schema).open()
    for start in range(0, count, 5000):
        await engine.put([a_job(PAYLOAD, **facts) for _ in range(min(5000, count - start))])
    return engine


async def engine_loop(url: str, jobs: int, backlog: int, *, exchange: bool) -> float:
    engine = await fill(url, "bench", jobs + backlog)
    wants = {"default": BUNDLE}
    began, done = time.perf_counter(), 0
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


async def worker_run(url: str, jobs: int) -> float:
    await (await fill(url, "bench", jobs, task="noop")).close()
    app = App(f"{url}?schema=bench")

    @app.task(name="noop")
    async def noop(text: str) -> None:
        pass

    began = time.perf_counter()
    await Worker(app, Settings(mode=Mode.UNTIL_EMPTY)).run()
    rate = jobs / (time.perf_counter() - began)
    await app.aclose()
    return rate


async def fresh(url: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute('DROP SCHEMA IF EXISTS "bench" CASCADE')
    await connection.execute("CHECKPOINT")
    await connection.close()


async def main(arguments: argparse.Namespace) -> None:
    jobs, backlog = arguments.jobs, arguments.backlog
    loops: dict[str, Callable[[str], Awaitable[float]]] = {
        "raw loop": lambda url: raw_loop(url, jobs, backlog),
        "raw, fused": lambda url: raw_loop(url, jobs, backlog, fused=True),
        "lease + settle": lambda url: engine_loop(url, jobs, backlog, exchange=False),
        "exchange": lambda url: engine_loop(url, jobs, backlog, exchange=True),
        "worker": lambda url: worker_run(url, jobs),
    }
    chosen = {name: loop for name, loop in loops.items() if not arguments.only or name in arguments.only}
    rates: dict[str, list[float]] = {name: [] for name in chosen}
    with postgres(durable=True, settings=("shared_buffers=256MB", "max_wal_size=4GB")) as server:
        holder = await asyncpg.connect(server.url)
        if arguments.held:
            await holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM pg_class")
        for turn in range(arguments.repeat):
            for name, loop in chosen.items():
                await fresh(server.url)
                rates[name].append(await loop(server.url))
                print(
                    f"  run {turn + 1}: {name:16} {rates[name][-1]:10,.0f} jobs/s",
                    file=sys.stderr,
                    flush=True,
                )
        await holder.close()
    raw = statistics.median(rates.get("raw loop", [1.0]))
    for name, found in rates.items():
        middle = statistics.median(found)
        print(f"{name:16} {middle:10,.0f} jobs/s  {middle / raw:6.0%} of raw")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=30_000)
    parser.add_argument("--backlog", type=int, default=0)
    parser.add_argument("--held", action="store_true", help="keep a transaction open elsewhere")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", action="append", help="only this loop; may be given again")
    asyncio.run(main(parser.parse_args()))
