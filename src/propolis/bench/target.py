"""Where to measure: beside the jobs that are there, never among them, and gone afterwards.

An engine of ours may have a module `on_<engine>`, whose function `target` makes its target.  Any other engine
is measured on a queue of its own, without a raw loop.
"""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from msgspec import Struct

from propolis.engines import open_engine, target_of
from propolis.engines.address import Address, masked

BUNDLE = 100  # jobs that a raw loop takes at once
LEASE_SECONDS = 15
_ENGINES = "propolis.engines."


class BenchPlace(Struct, frozen=True):
    """An engine of one's own, by its URL, and a queue on it."""

    url: str
    queue: str

    def __repr__(self) -> str:
        return f"BenchPlace({masked(self.url)!r}, {self.queue!r})"

    @property
    def shared(self) -> bool:
        """Can another process reach it?"""
        return Address(self.url).scheme != "memory"


class Raw(Struct, frozen=True):
    """What the hand-written loop did: jobs per second put in bulk, and taken, run and deleted in bundles."""

    bulk: float
    drain: float


class BenchTarget(Protocol):
    """What must be known of an engine to measure on it."""

    def place(self, url: str) -> AbstractAsyncContextManager[BenchPlace]:
        """A place on the engine of `url`, and nothing left of it afterwards."""
        ...

    async def raw(self, place: BenchPlace, jobs: int, payload: str) -> Raw | None:
        """The least that a queue with leases must do; None where nobody has written that."""
        ...

    async def about(self, place: BenchPlace) -> dict[str, str]:
        """Versions and settings that belong beside the figures."""
        ...


class UnknownTarget:
    """An engine of somebody else's."""

    @asynccontextmanager
    async def place(self, url: str) -> AsyncIterator[BenchPlace]:
        place = BenchPlace(url, fresh_name())
        try:
            yield place
        finally:
            await drop_queue(place)

    async def raw(self, place: BenchPlace, jobs: int, payload: str) -> Raw | None:  # noqa: ARG002
        return None

    async def about(self, place: BenchPlace) -> dict[str, str]:  # noqa: ARG002
        return {}


def bench_target(url: str) -> BenchTarget:
    """`UnknownEngine` if no engine answers to this URL."""
    module = target_of(Address(url))
    if not module.startswith(_ENGINES):
        return UnknownTarget()
    name = f"propolis.bench.on_{module.removeprefix(_ENGINES).partition('.')[0]}"
    if importlib.util.find_spec(name) is None:
        return UnknownTarget()
    target: BenchTarget = importlib.import_module(name).target()
    return target


def fresh_name() -> str:
    return f"propolis_bench_{secrets.token_hex(4)}"


def with_option(url: str, name: str, value: str) -> str:
    return Address(url).with_option(name, value)


async def drop_queue(place: BenchPlace) -> None:
    engine = await open_engine(place.url)
    try:
        await engine.drop(place.queue)
    finally:
        await engine.close()


def envelope(payload: str) -> bytes:
    """What a raw loop carries: about as large as the envelope of a job with this payload."""
    return b'{"v":1,"id":"%032d","task":"bench-noop","args":["%s"]}' % (0, payload.encode())
