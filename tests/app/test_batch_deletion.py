"""Deleting a batch costs what the batch is, not what else there is: counted by the engines, not timed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import asyncpg
import pytest

from propolis.core.job import Done
from propolis.core.protocols import Engine
from propolis.engines.address import Address
from propolis.engines.postgres.engine import PostgresEngine
from propolis.engines.postgres.schema import set_of
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.engine import RedisEngine
from propolis.engines.sqlite.engine import SQLiteEngine
from propolis.testing.engines.samples import HOLDER, SPAN
from propolis.testing.engines.steps import a_batch, members_of
from propolis.testing.servers.redis import RedisServer, redis

MEMBERS = 300
OTHERS = 20
Delete = Callable[[Engine, str], Awaitable[int]]  # tells how much work it was


async def fill(engine: Engine, others: int) -> str:
    """A batch of which some are done, some run and most wait, and so many others before and after it."""
    target = a_batch()
    for number in range(others + 1):
        batch = target if number == others // 2 else a_batch()
        await engine.put_batch(batch, members_of(batch, MEMBERS), seal=False)
        if batch is target and number == 0:  # the first in line are its own
            leases = await engine.lease({"default": 40}, span=SPAN, holder=HOLDER)
            assert await engine.settle([(lease, Done()) for lease in leases[:20]]) == []
    return target.id


async def work(engine: Engine, delete: Delete) -> tuple[int, int]:
    """What it costs to delete a batch that is alone, and one among others."""
    alone = await delete(engine, await fill(engine, 0))
    return alone, await delete(engine, await fill(engine, OTHERS))


async def test_sqlite_looks_only_at_the_batch_that_is_deleted(tmp_path: Path) -> None:
    """S3.13, T14: in steps of its virtual machine."""
    engine = await SQLiteEngine(tmp_path / "jobs.db").open()

    async def delete(engine: Engine, batch: str) -> int:
        assert isinstance(engine, SQLiteEngine)
        writer = engine._file._writer  # nobody else can count its steps
        assert writer is not None
        steps = 0

        def count() -> int:
            nonlocal steps
            steps += 1
            return 0

        writer.set_progress_handler(count, 100)
        assert await engine.delete_batch(batch)
        writer.set_progress_handler(None, 0)
        return steps

    alone, among_others = await work(engine, delete)
    await engine.close()
    assert 0 < among_others < 2 * alone


async def test_postgres_looks_only_at_the_batch_that_is_deleted(postgres_url: str, schema: str) -> None:
    """S3.13, T14: in rows that are read, by an index or not."""
    engine = await PostgresEngine(postgres_url, schema=schema).open()

    async def delete(_: Engine, batch: str) -> int:
        connection = await asyncpg.connect(postgres_url)  # which has counted nothing yet
        async with connection.transaction():
            assert await connection.fetchval(f'SELECT "{set_of(schema)}".delete_batch(NULL, $1, 0, 0)', batch)
            rows = await connection.fetchval(
                "SELECT sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))"
                " FROM pg_stat_xact_user_tables WHERE schemaname = $1",
                schema,
            )
        await connection.close()
        return int(rows)

    alone, among_others = await work(engine, delete)
    await engine.close()
    assert MEMBERS // 2 < among_others < 2 * alone


@pytest.fixture
def valkey() -> Iterator[RedisServer]:
    """Of this test alone, since it counts all commands."""
    with redis() as server:
        yield server


async def test_redis_looks_only_at_the_batch_that_is_deleted(valkey: RedisServer) -> None:
    """S3.13, T14: in commands, none of which walks through the line."""
    engine = await RedisEngine(target_of(Address(valkey.url))).open()
    names: set[str] = set()

    async def delete(engine: Engine, batch: str) -> int:
        valkey.forget_calls()
        assert await engine.delete_batch(batch)
        calls = valkey.calls()
        names.clear()
        names.update(calls)
        return sum(calls.values())

    alone, among_others = await work(engine, delete)
    await engine.close()
    assert MEMBERS < among_others < 2 * alone
    assert names.isdisjoint({"lrange", "hscan", "sscan", "zscan", "scan", "hvals", "hkeys"})
