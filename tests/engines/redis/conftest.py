"""An engine on a server of tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from propolis.engines.address import Address
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.engine import RedisEngine


@pytest_asyncio.fixture
async def engine(valkey_url: str, prefix: str) -> AsyncIterator[RedisEngine]:
    handle = await RedisEngine(target_of(Address(valkey_url)), prefix=f"{prefix}:").open()
    yield handle
    await handle.close()
