"""What somebody may do to a fleet that is at work: to other queues than the one that is watched.

Each takes a `Bench`, and ends what it has begun.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import cast

import asyncpg
from msgspec.structs import replace

from propolis.core.ids import new_id
from propolis.core.protocols import Rule, RuleKind, Scope
from propolis.engines.postgres.engine import PostgresEngine
from propolis.errors import PropolisError
from propolis.testing.engines.samples import a_job
from propolis.testing.engines.steps import a_batch

from .fleet import wait_for
from .load import OTHER_TASK, Bench

Disturbance = Callable[[Bench], None]


def pause(bench: Bench) -> None:
    """Its queue, its task, then its key; all of it runs afterwards."""
    bench.app.queues.pause("other")
    ids = bench.put_waiting()
    bench.go_on()
    bench.app.queues.pause(task=OTHER_TASK)
    bench.app.queues.resume("other")
    bench.go_on()
    bench.app.queues.pause(key="tenant")
    bench.app.queues.resume(task=OTHER_TASK)
    bench.go_on()
    bench.app.queues.resume(key="tenant")
    wait_for(lambda: bench.ended() >= ids)


def cancel(bench: Bench) -> None:
    """Most of what waits, by those who look for it one by one; it never runs, and the rest does."""
    bench.app.queues.pause("other")
    ids = sorted(bench.put_waiting())
    cancelled = ids[: len(ids) * 6 // 10]
    for first in range(0, len(cancelled), 1000):
        bundle = cancelled[first : first + 1000]
        assert bench.app.jobs.cancel(*bundle) == [True] * len(bundle)
    bench.others -= set(cancelled)
    bench.go_on()
    bench.app.queues.resume("other")
    wait_for(lambda: bench.ended() >= set(ids) - set(cancelled))


def drop(bench: Bench) -> None:
    bench.app.queues.pause("other")
    bench.put_waiting()
    bench.app.queues.drop("other")
    bench.go_on()
    wait_for(lambda: not bench.waiting_elsewhere())
    bench.app.queues.resume("other")


def delete_batch(bench: Bench) -> None:
    bench.app.queues.pause("other")
    batch = a_batch()
    bench.put_batch(batch)
    assert bench.app.batches.delete(batch.id)
    bench.go_on()
    wait_for(lambda: not bench.waiting_elsewhere())
    bench.app.queues.resume("other")


def idle_in_batch(bench: Bench) -> None:
    """F50: a caller has put a member of a batch in its transaction, another member ends, and he thinks."""
    batch = a_batch()
    member = a_job(0, task="count", queue="other", batch=batch.id, delay_ms=1000)

    async def think(connection: asyncpg.Connection) -> None:
        engine = cast("PostgresEngine", await bench.app.ready())
        await engine.put_batch(batch, [member], seal=False)
        async with rolled_back(connection):
            await engine.put_in(connection, [replace(member, id=new_id(), member=1, delay_ms=0)])
            await asyncio.to_thread(bench.goes_on_for_long)
        await engine.delete_batch(batch.id)

    bench.with_connection(think)
    bench.others.add(member.id)


def idle_with_a_key(bench: Bench) -> None:
    """F50: and another one wants the same, who hears that it is busy, or waits; but nobody else does."""

    async def think(connection: asyncpg.Connection) -> None:
        engine = cast("PostgresEngine", await bench.app.ready())
        async with rolled_back(connection):
            await engine.put_in(connection, [a_job(0, task="count", queue="other", unique="thought of")])
            job = a_job(0, task="count", queue="other", unique="thought of")
            bench.others.add(job.id)
            also = asyncio.create_task(engine.put([job]))
            await asyncio.to_thread(bench.goes_on_for_long)
        with suppress(PropolisError):
            await also

    bench.with_connection(think)


def idle_with_a_cap(bench: Bench) -> None:
    """F50: caps count what is committed, so that nobody waits for whoever may commit."""

    async def think(connection: asyncpg.Connection) -> None:
        engine = cast("PostgresEngine", await bench.app.ready())
        await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "other", 10))
        async with rolled_back(connection):
            await engine.put_in(connection, [a_job(0, task="count", queue="other")])
            job = a_job(0, task="count", queue="other")
            bench.others.add(job.id)
            await engine.put([job])
            await asyncio.to_thread(bench.goes_on_for_long)
        await engine.remove_rule(RuleKind.CAP, Scope.QUEUE, "other")

    bench.with_connection(think)


def publication(bench: Bench) -> None:
    """F52."""

    async def publish(connection: asyncpg.Connection) -> None:
        await connection.execute("CREATE PUBLICATION everything FOR ALL TABLES")
        await asyncio.to_thread(bench.goes_on_for_long)
        await connection.execute("DROP PUBLICATION everything")

    bench.with_connection(publish)


@asynccontextmanager
async def rolled_back(connection: asyncpg.Connection) -> AsyncIterator[None]:
    transaction = connection.transaction()
    await transaction.start()
    try:
        yield
    finally:
        await transaction.rollback()


FROZEN = """
import asyncio, os, signal, sys, asyncpg
from propolis import App
from propolis.testing.engines.samples import a_job

async def main():
    engine = await App(sys.argv[1]).ready()
    connection = await asyncpg.connect(sys.argv[2], statement_cache_size=0)
    await connection.execute("BEGIN")
    await engine.put_in(connection, [a_job(0, task="count", queue="other", unique="frozen")])
    print("frozen", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)

asyncio.run(main())
"""


def frozen_pooled_client(bench: Bench) -> None:
    """F51: stopped between its statement and its commit, behind a pooler."""
    url = f"{bench.pooled}?schema={bench.schema}"
    program = [sys.executable, "-c", FROZEN, url, bench.pooled]
    frozen = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    try:
        assert frozen.stdout is not None
        assert frozen.stdout.readline() == "frozen\n"
        bench.goes_on_for_long()
    finally:
        os.kill(frozen.pid, signal.SIGKILL)
        frozen.communicate()


EVERYWHERE: dict[str, Disturbance] = {
    "pause": pause,
    "cancel": cancel,
    "drop": drop,
    "delete_batch": delete_batch,
}
ON_POSTGRES: dict[str, Disturbance] = {
    "idle in a batch": idle_in_batch,
    "idle with a key": idle_with_a_key,
    "idle with a cap": idle_with_a_cap,
    "publication": publication,
    "frozen pooled client": frozen_pooled_client,
}
