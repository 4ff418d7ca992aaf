"""The engines on which limits and breakers are tried: one further engine is one more parameter of `make`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.contract.schedules.acting import Make, app_on
from tests.contract.schedules.conftest import clock, engine, memory, postgres, redis, shards, sqlite

from propolis import App
from propolis.core.protocols import Engine

__all__ = ["clock", "engine", "memory", "postgres", "redis", "shards", "sqlite"]


@pytest.fixture(params=["memory", "sqlite", "postgres", "redis", "shards"])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes one more handle on the storage of this test, not yet open."""
    found: Make = request.getfixturevalue(request.param)
    return found


@pytest_asyncio.fixture
async def app(engine: Engine) -> AsyncIterator[App]:
    yield app_on(engine)
