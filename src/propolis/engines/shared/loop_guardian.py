"""What belongs to one event loop is released when that loop ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress


class LoopGuardian:
    """Calls `release` once, in its loop: when the loop ends, or at `close`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, release: Callable[[], Awaitable[None]], *, name: str
    ) -> None:
        self._loop = loop
        self._release = release
        # A loop that ends cancels what still runs in it: that is how we hear of it.
        self._task = loop.create_task(self._guard(), name=name)

    @property
    def done(self) -> bool:
        return self._task.done()

    async def close(self) -> None:
        """From any loop; only its own waits until everything is released."""
        if self._loop is asyncio.get_running_loop():
            self._task.cancel()
            await asyncio.wait({self._task})
        elif self._loop.is_running():
            with suppress(RuntimeError):  # it has just ended
                self._loop.call_soon_threadsafe(self._task.cancel)

    async def _guard(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await self._release()
