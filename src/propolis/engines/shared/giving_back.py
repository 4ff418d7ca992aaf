"""Who asked for jobs may go away before they come: then they are given back, and are not leased to nobody."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

from propolis.core.job import Lease, Released
from propolis.core.protocols import Exchange
from propolis.errors import EngineError

log = logging.getLogger("propolis.engines")


class _Settles(Protocol):
    async def settle(self, outcomes: list[tuple[Lease, Released]], /) -> list[Lease]: ...


Exchanges = TypeVar("Exchanges", bound=Callable[..., Awaitable[Exchange]])
_giving: dict[asyncio.Task[None], object] = {}


def gives_back(exchange: Exchanges) -> Exchanges:
    """An `exchange` that goes on when its caller is cancelled, and then releases what it has leased."""

    @wraps(exchange)
    async def guarded(engine: Any, outcomes: Any, wants: Any, **options: Any) -> Exchange:
        if not wants:
            return await exchange(engine, outcomes, wants, **options)
        asked = asyncio.ensure_future(exchange(engine, outcomes, wants, **options))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            if not asked.cancelled():
                giving = asyncio.ensure_future(_give_back(engine, asked))
                _giving[giving] = engine
                giving.add_done_callback(_giving.pop)
            raise

    return cast("Exchanges", guarded)


async def all_given_back(engine: object) -> None:
    """Returns when nothing is on its way to callers of this loop that have gone."""
    loop = asyncio.get_running_loop()
    if mine := [task for task, its in _giving.items() if its is engine and task.get_loop() is loop]:
        await asyncio.wait(mine)


async def _give_back(engine: _Settles, asked: Awaitable[Exchange]) -> None:
    try:
        if leases := (await asked).leases:
            await engine.settle([(lease, Released()) for lease in leases])
    except EngineError as error:
        log.warning("jobs that nobody waits for any more come back when their leases end: %s", error)
