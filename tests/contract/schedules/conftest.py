"""The engines on which schedules are tried: one further engine is one more parameter of `make`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from propolis.core.protocols import Engine
from propolis.engines.address import Address
from propolis.engines.memory import MemoryEngine
from propolis.engines.postgres.engine import PostgresEngine
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.engine import RedisEngine
from propolis.engines.redis.shards.engine import ShardedEngine
from propolis.engines.redis.shards.shard_map import ShardMap
from propolis.engines.sqlite.engine import SQLiteEngine
from propolis.testing.clock import FakeClock

from .acting import Make


@pytest.fixture
def clock() -> FakeClock:
    """The clock of the engine, which decides; workers have others."""
    return FakeClock()


@pytest.fixture
def memory(clock: FakeClock) -> Make:
    engine = MemoryEngine(clock=clock)
    return lambda: engine


@pytest.fixture
def sqlite(clock: FakeClock, tmp_path: Path) -> Make:
    return lambda: SQLiteEngine(tmp_path / "jobs.db", clock=clock, synchronous="normal")


@pytest.fixture
def postgres(clock: FakeClock, postgres_url: str, empty_schema: str) -> Make:
    return lambda: PostgresEngine(postgres_url, schema=empty_schema, clock=clock)


@pytest.fixture
def redis(clock: FakeClock, valkey_url: str, prefix: str) -> Make:
    return lambda: RedisEngine(target_of(Address(valkey_url)), prefix=f"{prefix}:", clock=clock)


@pytest.fixture
def shards(clock: FakeClock, valkey_url: str, prefix: str) -> Make:
    target = target_of(Address(f"{valkey_url}?connect_within=30s"))
    return lambda: ShardedEngine(target, ShardMap(7), prefix=f"{{{prefix}}}:", clock=clock)


@pytest.fixture(params=["memory", "sqlite", "postgres", "redis"])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes one more handle on the storage of this test, not yet open."""
    found: Make = request.getfixturevalue(request.param)
    return found


@pytest_asyncio.fixture
async def engine(make: Make) -> AsyncIterator[Engine]:
    handle = await make().open()
    yield handle
    await handle.close()
