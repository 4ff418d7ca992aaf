"""The memory engine keeps the contract."""

from __future__ import annotations

import pytest

from propolis.core.transitions import Retention
from propolis.engines.memory import MemoryEngine
from propolis.testing.clock import FakeClock
from propolis.testing.engines import EngineContract, OpenEngine


class TestMemory(EngineContract):
    @pytest.fixture
    def open_engine(self, clock: FakeClock, retention: Retention) -> OpenEngine:
        engine = MemoryEngine(clock=clock, retention=retention)
        return lambda: engine
