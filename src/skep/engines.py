"""From a URL to an engine.  Only the engine that is asked for is imported."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Protocol, cast

from skep.address import Address, masked
from skep.broker import Durability, Engine
from skep.clock import Clock
from skep.errors import DriverMissing, DurabilityTooLow, UnknownEngine

GROUP = "skep.engines"  # the entry points by which other packages offer engines

_OWN = {
    "memory": "skep.brokers.memory:from_url",
    "postgres": "skep.brokers.postgres:from_url",
    "postgresql": "skep.brokers.postgres:from_url",
    "redis": "skep.brokers.redis:from_url",
    "redis+cluster": "skep.brokers.redis_spread:from_url",
    "redis+sentinel": "skep.brokers.redis:from_url",
    "redis+unix": "skep.brokers.redis:from_url",
    "rediss": "skep.brokers.redis:from_url",
    "rediss+cluster": "skep.brokers.redis_spread:from_url",
    "rediss+sentinel": "skep.brokers.redis:from_url",
    "sqlite": "skep.brokers.sqlite:from_url",
}

_EXTRAS = {"asyncpg": "postgres", "hiredis": "redis"}  # of our own package, by the module that they bring

_ADVICE = {
    Durability.PROCESS: "choose an engine that outlives the process, such as sqlite:///jobs.db",
    Durability.POWER: "let the engine sync each commit (SQLite: synchronous=full, and not on tmpfs)",
    Durability.NODE: "choose an engine with a synchronous copy on another machine",
}


class MakeEngine(Protocol):
    def __call__(self, address: Address, clock: Clock | None) -> Engine: ...


def make_engine(url: str, *, clock: Clock | None = None) -> Engine:
    """The engine that `url` names, not yet opened; `UnknownEngine` or `BadSetting` if there is none."""
    address = Address(url)
    module, _, name = target_of(address).partition(":")
    try:
        make = cast("MakeEngine", getattr(importlib.import_module(module), name))
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        raise DriverMissing(f"{address.scheme}://", error.name, _EXTRAS[error.name]) from error
    return make(address, clock)


def target_of(address: Address) -> str:
    """Where the engine of this URL is made, as "module:name"; nothing is imported."""
    if own := _OWN.get(address.scheme):
        return own
    offered = {point.name: point.value for point in entry_points(group=GROUP)}
    if address.scheme not in offered:
        raise UnknownEngine(masked(address.url), sorted(f"{scheme}://" for scheme in {*_OWN, *offered}))
    return offered[address.scheme]


async def open_engine(url: str, *, clock: Clock | None = None, floor: Durability | None = None) -> Engine:
    """`make_engine`, opened, and refused if it keeps less than `floor` asks for."""
    engine = make_engine(url, clock=clock)
    await engine.open()
    try:
        require(engine, floor)
    except DurabilityTooLow:
        await engine.close()
        raise
    return engine


def require(engine: Engine, floor: Durability | None) -> None:
    """`DurabilityTooLow` if the engine keeps less than `floor` asks for."""
    if floor is not None and engine.durability < floor:
        raise DurabilityTooLow(engine.durability.name.lower(), floor.name.lower(), _ADVICE[floor])
