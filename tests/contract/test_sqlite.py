"""The SQLite engine keeps the contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from propolis.core.transitions import Retention
from propolis.engines.sqlite.engine import SQLiteEngine
from propolis.testing.clock import FakeClock
from propolis.testing.engines import EngineContract, OpenEngine


class TestSQLite(EngineContract):
    @pytest.fixture
    def open_engine(self, clock: FakeClock, retention: Retention, tmp_path: Path) -> OpenEngine:
        return lambda: SQLiteEngine(tmp_path / "jobs.db", clock=clock, retention=retention)
