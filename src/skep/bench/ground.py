"""Where to measure: beside the jobs that are there, never among them, and gone afterwards.

Each engine has a module `on_<engine>` with a `Ground`; an engine that we do not know is measured on a queue
of its own, without a raw loop.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from msgspec import Struct

from skep.address import Address
from skep.engines import open_engine, target_of

BUNDLE = 100  # jobs that a raw loop takes at once
LEASE_SECONDS = 15

_MODULES = {
    "memory": "on_memory",
    "postgres": "on_postgres",
    "postgresql": "on_postgres",
    "redis": "on_redis",
    "redis+cluster": "on_redis",
    "redis+sentinel": "on_redis",
    "redis+unix": "on_redis",
    "rediss": "on_redis",
    "sqlite": "on_sqlite",
}


class Place(Struct, frozen=True):
    """An engine of one's own, by its URL, and a queue on it."""

    url: str
    queue: str

    @property
    def shared(self) -> bool:
        """Can another process reach it?"""
        return Address(self.url).scheme != "memory"


class Raw(Struct, frozen=True):
    """What the hand-written loop did: jobs per second put in bulk, and taken, run and deleted in bundles."""

    bulk: float
    drain: float


class Ground(Protocol):
    """What must be known of an engine to measure on it."""

    def place(self, url: str) -> AbstractAsyncContextManager[Place]:
        """A place on the engine of `url`, and nothing left of it afterwards."""
        ...

    async def raw(self, place: Place, jobs: int, payload: str) -> Raw | None:
        """The least that a queue with leases must do; None where nobody has written that."""
        ...

    async def about(self, place: Place) -> dict[str, str]:
        """Versions and settings that belong beside the figures."""
        ...


class UnknownGround:
    """An engine of somebody else's."""

    @asynccontextmanager
    async def place(self, url: str) -> AsyncIterator[Place]:
        place = Place(url, fresh_name())
        try:
            yield place
        finally:
            await drop_queue(place)

    async def raw(self, place: Place, jobs: int, payload: str) -> Raw | None:  # noqa: ARG002
        return None

    async def about(self, place: Place) -> dict[str, str]:  # noqa: ARG002
        return {}


def ground_of(url: str) -> Ground:
    """`UnknownEngine` if no engine answers to this URL."""
    address = Address(url)
    target_of(address)
    if address.scheme not in _MODULES:
        return UnknownGround()
    ground: Ground = importlib.import_module(f"skep.bench.{_MODULES[address.scheme]}").Ground()
    return ground


def fresh_name() -> str:
    return f"skep_bench_{secrets.token_hex(4)}"


def with_option(url: str, name: str, value: str) -> str:
    parts = urlsplit(url)
    options = {**dict(parse_qsl(parts.query, keep_blank_values=True)), name: value}
    return urlunsplit(parts._replace(query=urlencode(options)))


async def drop_queue(place: Place) -> None:
    engine = await open_engine(place.url)
    try:
        await engine.drop(place.queue)
    finally:
        await engine.close()


def envelope(payload: str) -> bytes:
    """What a raw loop carries: about as large as the envelope of a job with this payload."""
    return b'{"v":1,"id":"%032d","task":"bench-noop","args":["%s"]}' % (0, payload.encode())
