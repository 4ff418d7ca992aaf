"""The sweeper: any worker does what time asks for, beside its other work and one sweep at a time."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

from propolis.app.operate.schedule_records import KIND
from propolis.core.ids import new_id
from propolis.core.protocols import Engine
from propolis.errors import EngineError, StorageBroken
from propolis.worker.settings import Monotonic

log = logging.getLogger("propolis.worker")

SWEEP_EVERY = 1.0
LONG = 5.0  # seconds after which a sweep takes so long that others look meanwhile

Line = tuple[str, str]  # the queue and the task of parked jobs


class FiresSchedules(Protocol):
    """Whoever fires the schedules that are due."""

    async def fire_due(self) -> timedelta | None:
        """Returns when the next one is due, as far as was seen."""


class WatchesUnknown(Protocol):
    """Whoever sees to jobs whose task no worker knows."""

    async def watch(self, parked: tuple[Line, ...]) -> None: ...


class Sweeper:
    """Sweeps when the engine asks for it, or about once a second."""

    def __init__(
        self,
        engine: Engine,
        schedules: FiresSchedules,
        unknown: WatchesUnknown,
        *,
        clock: Monotonic,
        wake: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._schedules = schedules
        self._unknown = unknown
        self._clock = clock
        self._wake = wake
        self._name = new_id()  # among the pumps that sweep
        self._next = 0.0
        self._life: asyncio.Task[None] | None = None
        self._hurried = asyncio.Event()
        self._engine_plans = False
        self._found = False  # by the last sweep: there may be something to lease
        self._at = "sweeping"  # what is being done, for the log
        self.beside = asyncio.Lock()  # one thing at a time is asked beside the pump: it takes one connection
        self.parked: tuple[Line, ...] = ()  # as of the last sweep

    def start(self) -> None:
        """From here on it comes by itself, and nobody waits for it."""
        self._life = asyncio.create_task(self._run(), name="propolis-sweeper")
        self._life.add_done_callback(lambda _: self._wake())

    def check(self) -> None:
        """Raises `StorageBroken`, or whatever else has ended it."""
        if self._life is not None and self._life.done():
            self._life.result()

    async def end(self) -> None:
        if self._life is not None:
            self._life.cancel()
            await asyncio.wait({self._life})

    async def sweep_if_due(self) -> None:
        """For whoever has not started it: where nothing else is to happen before, with all that it raises."""
        if self._clock() >= self._next:
            await self._once()

    def due_in(self) -> float:
        """Seconds until the next one."""
        return max(0.0, self._next - self._clock())

    def hurry(self) -> None:
        """Something may have been put for later, of which only a sweep tells when that is."""
        if not self._engine_plans:
            self._next = min(self._next, self._clock())
            self._hurried.set()

    async def _run(self) -> None:
        while True:
            while (left := self.due_in()) > 0:
                self._hurried.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._hurried.wait()
            late = _Repeated(LONG, self._wake)
            try:
                async with self.beside:
                    await self._logged()
            finally:
                late.cancel()
            if self._found:
                self._wake()

    async def _logged(self) -> None:
        try:
            await self._once()
        except StorageBroken:
            raise
        except EngineError as error:
            log.warning("%s failed, and is tried again soon: %s", self._at, error)
        except Exception:  # a mistake of ours, or of somebody's engine: all else that time asks for goes on
            log.exception("%s failed, and is tried again soon", self._at)

    async def _once(self) -> None:
        pause = SWEEP_EVERY * random.uniform(0.8, 1.2)
        self._next = self._clock() + pause
        self._found = True  # where it fails, somebody should look
        self._at = "sweeping"
        swept = await self._engine.sweep(by=self._name)
        self._engine_plans = swept.again_in is not None
        if swept.again_in is not None:
            pause = swept.again_in.total_seconds()
        elif swept.next_in is not None:
            pause = min(pause, swept.next_in.total_seconds())
        before, self.parked = self.parked, swept.parked
        did = swept.promoted or swept.reaped or swept.parked != before
        self._found = bool(did or not swept.nothing_ready)
        if swept.parked or before:
            await self._unknown.watch(swept.parked)
        if KIND in swept.records_due:
            self._found, self._at = True, "firing schedules"
            if (left := await self._schedules.fire_due()) is not None:
                pause = min(pause, left.total_seconds())
        self._next = self._clock() + pause


class _Repeated:
    """Calls something again and again, until it is cancelled."""

    def __init__(self, every: float, act: Callable[[], None]) -> None:
        self._every = every
        self._act = act
        self._begin()

    def _begin(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._every, self._call)

    def _call(self) -> None:
        self._act()
        self._begin()

    def cancel(self) -> None:
        self._timer.cancel()
