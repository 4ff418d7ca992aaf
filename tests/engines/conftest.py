"""Engines of each kind, for what all of them have to do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from propolis.core.protocols import Engine
from propolis.engines.address import Address
from propolis.engines.memory import MemoryEngine
from propolis.engines.postgres.engine import PostgresEngine
from propolis.engines.redis.client.link import RedisLink
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.engine import RedisEngine
from propolis.engines.redis.shards.engine import ShardedEngine
from propolis.engines.redis.shards.shard_map import ShardMap
from propolis.engines.sqlite.engine import SQLiteEngine


@pytest.fixture(params=["memory", "sqlite", "postgres", "redis", "shards"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Engine]:
    if request.param == "memory":
        only = MemoryEngine()
        return lambda: only
    if request.param == "sqlite":
        return lambda: SQLiteEngine(tmp_path / "jobs.db")
    if request.param == "postgres":
        url, schema = request.getfixturevalue("postgres_url"), request.getfixturevalue("schema")
        return lambda: PostgresEngine(url, schema=schema)
    target = target_of(Address(request.getfixturevalue("valkey_url")))
    prefix = request.getfixturevalue("prefix")
    if request.param == "redis":
        return lambda: RedisEngine(target, prefix=f"{prefix}:")
    return lambda: ShardedEngine(target, ShardMap(4), prefix=f"{{{prefix}}}:")


@pytest_asyncio.fixture
async def handles(make: Callable[[], Engine]) -> AsyncIterator[list[Engine]]:
    handles = [await make().open() for _ in range(2)]
    yield handles
    for handle in handles:
        await handle.close()


@pytest_asyncio.fixture
async def link(valkey_url: str) -> AsyncIterator[RedisLink]:
    """As any other client of the server has one."""
    handle = RedisLink(target_of(Address(valkey_url)))
    await handle.open()
    yield handle
    await handle.close()
