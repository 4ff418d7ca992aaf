"""The app of each test here: on the memory engine, and its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from propolis import App


@pytest.fixture
async def app() -> AsyncIterator[App]:
    app = App("memory://")
    yield app
    await app.aclose()
