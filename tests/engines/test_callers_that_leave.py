"""Callers that go away while they wait for an answer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path

import asyncpg
import pytest

from propolis.core.job import Done, Lease
from propolis.core.protocols import Engine
from propolis.engines.address import Address
from propolis.engines.memory import MemoryEngine
from propolis.engines.postgres import client
from propolis.engines.postgres.engine import PostgresEngine
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.engine import RedisEngine
from propolis.engines.redis.shards.engine import ShardedEngine
from propolis.engines.redis.shards.shard_map import ShardMap
from propolis.engines.sqlite.engine import SQLiteEngine
from propolis.testing.engines.samples import HOLDER, a_job
from propolis.testing.servers.redis import redis
from propolis.testing.servers.serving import database

A_DAY = timedelta(days=1)  # no test waits for the end of such a lease
COUNT_OTHERS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"


class Storage:
    """One that nobody else uses, so that whoever is connected to it is one of ours."""

    def __init__(self, engine: Engine, connected: Callable[[], Awaitable[int]]) -> None:
        self.engine = engine
        self.connected = connected


@pytest.fixture(params=["memory", "sqlite", "postgres", "redis", "shards"])
def storage(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Storage]:
    monkeypatch.setattr(client, "SPARE_FOR", 0.1)  # of PostgreSQL: those that were needed for a moment
    monkeypatch.setattr(client, "THIRD_FOR", 0.1)

    async def nobody() -> int:
        return 0

    async def files() -> int:
        return sum(path.startswith(str(tmp_path)) for path in open_files())

    async def sessions() -> int:
        connection = await asyncpg.connect(server)
        count: int = await connection.fetchval(COUNT_OTHERS)
        await connection.close()
        return count

    async def clients() -> int:
        return int(valkey.info("clients")["connected_clients"])

    with ExitStack() as stack:
        match request.param:
            case "memory":
                yield Storage(MemoryEngine(), nobody)
            case "sqlite":
                yield Storage(SQLiteEngine(tmp_path / "jobs.db"), files)
            case "postgres":
                server = stack.enter_context(database(request.getfixturevalue("postgres_url")))
                yield Storage(PostgresEngine(server), sessions)
            case kind:
                valkey = stack.enter_context(redis())
                target = target_of(Address(valkey.url))
                one: Engine = RedisEngine(target, prefix="p:")
                if kind == "shards":
                    one = ShardedEngine(target, ShardMap(4), prefix="{p}:")
                yield Storage(one, clients)


def open_files() -> list[str]:
    """Those of this process; none where nobody says."""
    found = []
    with suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # the one by which we look
                found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> int:
    return 10_000 if request.config.getoption("--full") else 60


async def test_a_caller_that_leaves_takes_no_job_along(storage: Storage, rounds: int) -> None:
    """S4.5: wherever it is cancelled, the next one has the job, long before a lease would have ended.

    Nor does it leave a connection behind: neither ours nor the server's.
    """
    engine = await storage.engine.open()
    assert await engine.lease({"default": 10}, span=A_DAY, holder=HOLDER) == []
    before = await storage.connected()
    for number in range(rounds):
        [receipt] = await engine.put([a_job(number)])
        leases = await cancelled_after(engine, steps=number % 12)
        async with asyncio.timeout(20):
            while not leases:
                leases = await engine.lease({"default": 10}, span=A_DAY, holder=HOLDER)
        assert [(lease.id, lease.attempt, lease.crashes) for lease in leases] == [(receipt.id, 1, 0)]
        assert await engine.settle([(lease, Done()) for lease in leases]) == []

    counts = (await engine.queues())["default"]
    assert (counts.put, counts.deleted, counts.running, counts.total) == (rounds, rounds, 0, 0)
    async with asyncio.timeout(60):
        while await storage.connected() > before:
            await asyncio.sleep(0.02)  # a spare one is closed soon
    await engine.close()


async def cancelled_after(engine: Engine, *, steps: int) -> list[Lease]:
    """What a call has got that is cancelled after so many steps of the loop; nothing if it was."""
    call = asyncio.create_task(engine.lease({"default": 10}, span=A_DAY, holder=HOLDER))
    for _ in range(steps):
        await asyncio.sleep(0)
    call.cancel()
    try:
        return await call
    except asyncio.CancelledError:
        return []
