"""The SQLite engine keeps the contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from skep.brokers.sqlite import SQLiteBroker
from skep.life import Retention
from skep.testing.clock import FakeClock
from skep.testing.contract import BrokerContract, OpenEngine


class TestSQLite(BrokerContract):
    @pytest.fixture
    def open_engine(self, clock: FakeClock, retention: Retention, tmp_path: Path) -> OpenEngine:
        return lambda: SQLiteBroker(tmp_path / "jobs.db", clock=clock, retention=retention)
