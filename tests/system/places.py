"""Engines that a test may mistreat: each has a server of its own, and a proxy before it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from propolis.testing.servers.proxy import Proxy
from propolis.testing.servers.redis import RedisServer
from propolis.testing.servers.serving import PostgresServer


@dataclass
class Place:
    """Where jobs are kept, and the way there that a test disturbs."""

    url: str
    through_proxy: str
    server: PostgresServer | RedisServer | None = None
    proxy: Proxy | None = None


@asynccontextmanager
async def sqlite(folder: Path) -> AsyncIterator[Place]:
    yield Place(url := f"sqlite:///{folder}/jobs.db", url)


@asynccontextmanager
async def postgres(folder: Path) -> AsyncIterator[Place]:
    server = PostgresServer(folder, durable=True)
    server.start()
    try:
        async with Proxy(server.port) as proxy:
            by_proxy = f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres?patience=3s"
            yield Place(server.url, by_proxy, server, proxy)
    finally:
        server.stop()


@asynccontextmanager
async def redis(folder: Path) -> AsyncIterator[Place]:
    server = RedisServer(folder / "redis", durable=True, settings={"appendfsync": "always"})
    server.start()
    try:
        async with Proxy(server.port) as proxy:
            by_proxy = f"redis://127.0.0.1:{proxy.port}/0?patience=3s"
            yield Place(server.url, by_proxy, server, proxy)
    finally:
        server.stop()


Where = Callable[[Path], AbstractAsyncContextManager[Place]]
