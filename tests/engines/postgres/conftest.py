"""An engine and a connection of its own for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest_asyncio

from propolis.engines.postgres.engine import PostgresEngine


@pytest_asyncio.fixture
async def engine(postgres_url: str, schema: str) -> AsyncIterator[PostgresEngine]:
    handle = await PostgresEngine(postgres_url, schema=schema).open()
    yield handle
    await handle.close()


@pytest_asyncio.fixture
async def connection(postgres_url: str) -> AsyncIterator[asyncpg.Connection]:
    opened = await asyncpg.connect(postgres_url)
    yield opened
    await opened.close()
