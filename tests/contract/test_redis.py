"""The Redis engine keeps the contract, on Valkey and on Redis."""

from __future__ import annotations

import pytest

from skep.address import Address
from skep.brokers.redis import RedisBroker
from skep.brokers.redis_link import target_of
from skep.life import Retention
from skep.testing.clock import FakeClock
from skep.testing.contract import BrokerContract, OpenEngine


class TestValkey(BrokerContract):
    @pytest.fixture
    def open_engine(self, clock: FakeClock, retention: Retention, valkey_url: str, prefix: str) -> OpenEngine:
        target = target_of(Address(f"{valkey_url}?connect_within=30s"))
        return lambda: RedisBroker(target, prefix=prefix, clock=clock, retention=retention)


class TestRedis(BrokerContract):
    @pytest.fixture
    def open_engine(self, clock: FakeClock, retention: Retention, redis_url: str, prefix: str) -> OpenEngine:
        target = target_of(Address(f"{redis_url}?connect_within=30s"))
        return lambda: RedisBroker(target, prefix=prefix, clock=clock, retention=retention)
