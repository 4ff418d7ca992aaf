"""The memory engine keeps the contract."""

from __future__ import annotations

import pytest

from skep.brokers.memory import MemoryBroker
from skep.life import Retention
from skep.testing.clock import FakeClock
from skep.testing.contract import BrokerContract, OpenEngine


class TestMemory(BrokerContract):
    @pytest.fixture
    def open_engine(self, clock: FakeClock, retention: Retention) -> OpenEngine:
        engine = MemoryBroker(clock=clock, retention=retention)
        return lambda: engine
