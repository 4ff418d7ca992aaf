"""The Redis engine keeps the contract, on Valkey and on Redis."""

from __future__ import annotations

import pytest

from propolis.core.transitions import Retention
from propolis.engines.address import Address
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.engine import RedisEngine
from propolis.testing.clock import FakeClock
from propolis.testing.engines import EngineContract, OpenEngine


class TestValkey(EngineContract):
    @pytest.fixture
    def open_engine(self, clock: FakeClock, retention: Retention, valkey_url: str, prefix: str) -> OpenEngine:
        target = target_of(Address(f"{valkey_url}?connect_within=30s"))
        return lambda: RedisEngine(target, prefix=prefix, clock=clock, retention=retention)


@pytest.mark.differs_in(
    *["putting", "leasing", "bundling", "ordering", "settling", "uniqueness", "waiting"],
    reason="the scripts are the same as on Valkey, and test_model.py goes through all of them on Redis too",
)
class TestRedis(EngineContract):
    @pytest.fixture
    def open_engine(self, clock: FakeClock, retention: Retention, redis_url: str, prefix: str) -> OpenEngine:
        target = target_of(Address(f"{redis_url}?connect_within=30s"))
        return lambda: RedisEngine(target, prefix=prefix, clock=clock, retention=retention)
