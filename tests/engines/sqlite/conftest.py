"""One handle on a file of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from propolis.engines.sqlite.engine import SQLiteEngine
from propolis.testing.clock import FakeClock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest_asyncio.fixture
async def engine(path: Path, clock: FakeClock) -> AsyncIterator[SQLiteEngine]:
    engine = await SQLiteEngine(path, clock=clock, synchronous="normal").open()
    yield engine
    await engine.close()
