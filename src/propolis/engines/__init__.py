"""From a URL to an engine.  Only the engine that is asked for is imported."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Protocol, TypeVar, cast

import propolis.engines.forks  # noqa: F401  # registered before what is below, so that it is run after that
from propolis.core.clock import Clock
from propolis.core.protocols import Core, Durability, Engine
from propolis.engines.address import Address, masked
from propolis.engines.shared import log_lines  # noqa: F401  # from here on, what all of us log is one line each
from propolis.engines.table import ENGINES, EXTRAS
from propolis.errors import BadSetting, DriverMissing, DurabilityTooLow, UnknownEngine

__all__ = ["GROUP", "Address", "MakeEngine", "make_engine", "open_engine", "piece_of", "require", "target_of"]

Piece = TypeVar("Piece")

GROUP = "propolis.engines"  # the entry points by which other packages offer engines

_ADVICE = {
    Durability.PROCESS: "choose an engine that outlives the process, such as sqlite:///jobs.db",
    Durability.POWER: "let the engine sync each commit (SQLite: synchronous=full, and not on tmpfs;"
    " PostgreSQL: fsync and synchronous_commit on; Redis: appendonly yes and appendfsync always)",
    Durability.NODE: "let the engine wait for a copy on another machine"
    " (PostgreSQL: synchronous_standby_names; Redis: copies=1 in the URL)",
}


# A fork waits for it: a child could never import what another thread had begun to import.
_importing = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_importing.acquire, after_in_parent=_importing.release, after_in_child=_importing.release
    )


class MakeEngine(Protocol):
    def __call__(self, address: Address, clock: Clock | None) -> Engine: ...


def make_engine(url: str, *, clock: Clock | None = None) -> Engine:
    """The engine that `url` names, not yet opened; `UnknownEngine` or `BadSetting` if there is none."""
    address = Address(url)
    module, _, name = target_of(address).partition(":")
    try:
        with _importing:
            make = cast("MakeEngine", getattr(importlib.import_module(module), name))
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        raise DriverMissing(f"{address.scheme}://", error.name, EXTRAS[error.name]) from error
    return make(address, clock)


def target_of(address: Address) -> str:
    """Where the engine of this URL is made, as "module:name"; nothing is imported."""
    if own := ENGINES.get(address.scheme):
        return own
    offered = {point.name: point.value for point in entry_points(group=GROUP)}
    if address.scheme not in offered:
        raise UnknownEngine(address.shown, sorted(f"{scheme}://" for scheme in {*ENGINES, *offered}))
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


def durability_of(name: Durability | str | None) -> Durability | None:
    """A level by its name, as in "power"; `BadSetting` if there is none."""
    if name is None or isinstance(name, Durability):
        return name
    levels = {level.name.lower(): level for level in Durability}
    if name not in levels:
        raise BadSetting(f"durability={name!r} is unknown: use one of {', '.join(map(repr, levels))}")
    return levels[name]


def require(engine: Engine, floor: Durability | None) -> None:
    """`DurabilityTooLow` if the engine keeps less than `floor` asks for."""
    if floor is not None and engine.durability < floor:
        raise DurabilityTooLow(engine.durability.name.lower(), floor.name.lower(), _ADVICE[floor])


def piece_of(
    engine: Core, piece: Callable[..., Piece], *, url: str | None = None, use: str = "is needed here"
) -> Piece:
    """The engine as one that has this piece of the contract; `BadSetting` where it lacks it.

    `use` goes on after "which".  The piece is a callable here: mypy takes no protocol for a `type[Piece]`.
    """
    kind = cast("type[Piece]", piece)
    if isinstance(engine, kind):
        return engine
    name = type(engine).__name__ + ("" if url is None else f", the engine of {masked(url)},")
    raise BadSetting(
        f"{name} lacks the piece {kind.__name__}, which {use}: take another engine, or do without"
    )
