"""Engines that keep feeds keep the promises about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from propolis.core.protocols import Engine, Feeds, Records
from propolis.core.transitions import Retention
from propolis.engines.address import Address
from propolis.engines.memory import MemoryEngine
from propolis.engines.postgres.engine import PostgresEngine
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.engine import RedisEngine
from propolis.engines.redis.shards.engine import ShardedEngine
from propolis.engines.redis.shards.shard_map import ShardMap
from propolis.engines.shared.feeds_on_records import FeedsOnRecords
from propolis.engines.sqlite.engine import SQLiteEngine
from propolis.testing.clock import FakeClock
from propolis.testing.engines import OpenEngine
from propolis.testing.engines.records import FeedsContract


class TestMemory(FeedsContract):
    @pytest.fixture
    def open_engine(self, clock: FakeClock, retention: Retention) -> OpenEngine:
        engine = MemoryEngine(clock=clock, retention=retention)
        return lambda: engine


class TestSQLite(FeedsContract):
    @pytest.fixture
    def open_engine(self, clock: FakeClock, retention: Retention, tmp_path: Path) -> OpenEngine:
        return lambda: SQLiteEngine(tmp_path / "jobs.db", clock=clock, retention=retention)


class TestPostgres(FeedsContract):
    @pytest.fixture
    def open_engine(
        self, clock: FakeClock, retention: Retention, postgres_url: str, empty_schema: str
    ) -> OpenEngine:
        return lambda: PostgresEngine(postgres_url, schema=empty_schema, clock=clock, retention=retention)


class TestValkey(FeedsContract):
    @pytest.fixture
    def open_engine(self, clock: FakeClock, retention: Retention, valkey_url: str, prefix: str) -> OpenEngine:
        target = target_of(Address(f"{valkey_url}?connect_within=30s"))
        return lambda: RedisEngine(target, prefix=prefix, clock=clock, retention=retention)


class TestShards(FeedsContract):
    @pytest.fixture
    def open_engine(self, clock: FakeClock, retention: Retention, valkey_url: str, prefix: str) -> OpenEngine:
        target = target_of(Address(f"{valkey_url}?connect_within=30s"))
        return lambda: ShardedEngine(
            target, ShardMap(7), prefix=f"{{{prefix}}}:", clock=clock, retention=retention
        )


class TestOnRecords(TestSQLite):
    """What an engine without feeds has, if it keeps records."""

    def feeds_of(self, engine: Engine) -> Feeds:
        assert isinstance(engine, Records)
        return FeedsOnRecords(engine)
