"""Waiting for the end of a job, a batch or a flow: the engine is asked again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from propolis.app.signature import current
from propolis.core.duration import Duration, duration
from propolis.errors import WaitsForever

T = TypeVar("T")

FIRST_PAUSE = 0.002  # seconds until it is asked again; then 1.5 times more,
LAST_PAUSE = 0.25  # up to this


async def wait_until_ended(ask: Callable[[], Awaitable[T | None]], timeout: Duration | None, what: str) -> T:
    """The first answer that is not None; `TimeoutError`, which names what it was for, if none comes in time.

    `WaitsForever` for a job that would hold its slot until another has ended, which may need that slot.
    """
    if timeout is None and current.get() is not None:
        raise WaitsForever
    seconds = None if timeout is None else duration(timeout).total_seconds()
    try:
        async with asyncio.timeout(seconds):
            return await _answer(ask)
    except TimeoutError:
        raise TimeoutError(f"{what} has not ended within {seconds:g} s: is there a worker for it?") from None


async def _answer(ask: Callable[[], Awaitable[T | None]]) -> T:
    pause = FIRST_PAUSE
    while (answer := await ask()) is None:
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, LAST_PAUSE)
    return answer
