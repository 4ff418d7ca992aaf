"""The PostgreSQL engine against a hand-written loop on the same server with the same durability, in one run.

    python benchmarks/postgres_drain.py [drain backlog held latency callers bulk] [--jobs 30000] [--repeat 3]

`drain` prints jobs per second drained in bundles of 100 with fsync=on and synchronous_commit=on: the raw loop
(one table with a state column, a claim and a delete, each its own commit), the same in one statement, the
engine's two verbs, its exchange, and a worker with no-op tasks.  `backlog` drains while a million jobs wait
and while 20,000 do; `held` drains with a transaction kept open elsewhere and without; `latency` is the time
from a put to the start of the job in an idle worker; `callers` are 64 who enqueue one job after another;
`bulk` puts bundles of all kinds of jobs.  Read the ratios: the speed of a machine varies by the minute.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial
from typing import Any

import asyncpg

from propolis import App
from propolis.core.batch import Batch
from propolis.core.job import Done
from propolis.engines.postgres.engine import PostgresEngine
from propolis.engines.postgres.schema import dropped
from propolis.testing.engines.samples import a_job
from propolis.testing.servers.serving import postgres
from propolis.worker.settings import Mode, Settings
from propolis.worker.worker import Worker

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


async def fill(url: str, schema: str, count: int, **fields: str) -> PostgresEngine:
    engine = await PostgresEngine(url, schema=schema).open()
    for start in range(0, count, 5000):
        await engine.put([a_job(PAYLOAD, **fields) for _ in range(min(5000, count - start))])
    return engine


WAITING = """
INSERT INTO bench.ready (
    seq, pos, put_us, due_us, rank, max_crashes, attempts, failures, crashes, queue, id, task, body, member)
SELECT seq, seq, put_us, due_us, rank, max_crashes, 0, 0, 0, queue, id || '-' || seq, task, body, 0
  FROM (SELECT nextval('bench.back') AS seq, r.*
          FROM (SELECT put_us, due_us, rank, max_crashes, queue, id, task, body
                  FROM bench.ready LIMIT 1) AS r, generate_series(1, $1::int)) AS copies
"""


async def stuff(url: str, count: int) -> None:
    """Have that many more wait behind those that do: copies of one, since putting a million takes long."""
    connection = await asyncpg.connect(url)
    await connection.execute(WAITING, count, timeout=600)
    await connection.close()


async def engine_loop(url: str, jobs: int, backlog: int, *, exchange: bool) -> float:
    engine = await fill(url, "bench", jobs)
    if backlog:
        await stuff(url, backlog)
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
    await connection.execute(dropped("bench"))
    await connection.execute("CHECKPOINT")
    await connection.close()


async def drain(url: str, options: argparse.Namespace) -> None:
    jobs = options.jobs
    loops: dict[str, Callable[[], Awaitable[float]]] = {
        "raw loop": lambda: raw_loop(url, jobs, 0),
        "raw, fused": lambda: raw_loop(url, jobs, 0, fused=True),
        "lease + settle": lambda: engine_loop(url, jobs, 0, exchange=False),
        "exchange": lambda: engine_loop(url, jobs, 0, exchange=True),
        "worker": lambda: worker_run(url, jobs),
    }
    await compare(url, {name: loops[name] for name in options.only or loops}, options.repeat)


async def backlog(url: str, options: argparse.Namespace) -> None:
    few, many = 20_000, 1_000_000
    loops: dict[str, Callable[[], Awaitable[float]]] = {
        "20,000 waiting": lambda: engine_loop(url, few, 0, exchange=True),
        "1,000,000 waiting": lambda: engine_loop(url, few, many - few, exchange=True),
    }
    await compare(url, loops, options.repeat)


async def held(url: str, options: argparse.Namespace) -> None:
    async def with_a_snapshot() -> float:
        holder = await asyncpg.connect(url)
        await holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM pg_class")
        rate = await worker_run(url, 150_000)
        await holder.close()
        return rate

    loops: dict[str, Callable[[], Awaitable[float]]] = {
        "alone": lambda: worker_run(url, 150_000),
        "snapshot held": with_a_snapshot,
    }
    await compare(url, loops, options.repeat)


async def compare(url: str, loops: dict[str, Callable[[], Awaitable[float]]], repeat: int) -> None:
    """Take turns, and compare each with the first of the same turn."""
    rates: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(repeat):
        for name, loop in loops.items():
            await fresh(url)
            rates[name].append(await loop())
            tell(f"  run {turn + 1}: {name:18} {rates[name][-1]:10,.0f} jobs/s")
    first = next(iter(rates.values()))
    for name, found in rates.items():
        ratio = statistics.median(rate / other for rate, other in zip(found, first, strict=True))
        best = max(found) / max(first)
        print(f"{name:18} {statistics.median(found):10,.0f} jobs/s  {ratio:6.0%}  (best of each: {best:.0%})")


async def latency(url: str, options: argparse.Namespace) -> None:
    """From before the put, by another engine, to the first line of the task."""
    await fresh(url)
    app = App(f"{url}?schema=bench")
    started = asyncio.Queue[float]()

    @app.task(name="tick")
    async def tick() -> None:
        started.put_nowait(time.perf_counter())

    worker = Worker(app, Settings())
    running = asyncio.create_task(worker.run())
    producer = await PostgresEngine(url, schema="bench").open()
    waits: list[float] = []
    for _ in range(50 + 200 * options.repeat):
        await asyncio.sleep(0.01)
        began = time.perf_counter()
        await producer.put([a_job(task="tick")])
        waits.append((await started.get() - began) * 1000)
    worker.stop()
    await running
    await producer.close()
    await app.aclose()
    cuts = statistics.quantiles(waits[50:], n=100)
    print(f"latency            p50 {cuts[49]:6.1f} ms   p99 {cuts[98]:6.1f} ms")


async def callers(url: str, options: argparse.Namespace) -> None:
    await fresh(url)
    app = App(f"{url}?schema=bench")

    @app.task(name="noop")
    async def noop(text: str) -> None:
        pass

    await noop.aenqueue(PAYLOAD)

    async def call(count: int) -> None:
        for _ in range(count):
            await noop.aenqueue(PAYLOAD)

    rates = []
    for turn in range(options.repeat):
        began = time.perf_counter()
        await asyncio.gather(*(call(200) for _ in range(64)))
        rates.append(64 * 200 / (time.perf_counter() - began))
        tell(f"  run {turn + 1}: 64 callers {rates[-1]:10,.0f} jobs/s")
    await app.aclose()
    print(f"64 callers         {statistics.median(rates):10,.0f} jobs/s  (best {max(rates):,.0f})")


async def bulk(url: str, options: argparse.Namespace) -> None:
    kinds: dict[str, Callable[[int], dict[str, Any]]] = {
        "plain": lambda _: {},
        "chosen": lambda _: {"chosen": True},
        "unique": lambda n: {"unique": f"key {n}"},
        "members": lambda n: {"batch": "batch", "member": n},
        "delayed": lambda _: {"delay_ms": 3_600_000},
        "expiring": lambda _: {"expires_in_ms": 3_600_000},
    }

    async def put(kind: str) -> float:
        engine = await PostgresEngine(url, schema="bench").open()
        await engine.put_batch(Batch(id="batch"), seal=False)
        jobs = [a_job(PAYLOAD, **kinds[kind](n)) for n in range(options.jobs)]
        began = time.perf_counter()
        for start in range(0, len(jobs), 5000):
            await engine.put(jobs[start : start + 5000])
        rate = len(jobs) / (time.perf_counter() - began)
        await engine.close()
        return rate

    await compare(url, {kind: partial(put, kind) for kind in kinds}, options.repeat)


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


CASES = {
    "drain": drain,
    "backlog": backlog,
    "held": held,
    "latency": latency,
    "callers": callers,
    "bulk": bulk,
}


async def main(options: argparse.Namespace) -> None:
    with postgres(durable=True, settings=("shared_buffers=256MB", "max_wal_size=4GB")) as server:
        for case in options.cases:
            await CASES[case](server.url, options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], default=["drain"])
    parser.add_argument("--jobs", type=int, default=30_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", action="append", help="of `drain`, only this loop; may be given again")
    asyncio.run(main(parser.parse_args()))
