"""The jobs that are measured.  One app per run, on a queue that nobody else uses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from propolis.app.application import App
from propolis.bench.target import BenchPlace

PAYLOAD = "x" * 250  # with the envelope around it about 300 bytes, as a mail or a row to import has


class Tasks:
    """`heard` is called when a job that is timed starts; `ran` counts those that are not."""

    def __init__(self, place: BenchPlace, heard: Callable[[float], None] = lambda _: None) -> None:
        self.app = app = App(place.url)
        self.heard = heard
        self.ran = 0
        self.enough = asyncio.Event()
        self._most = 0

        @app.task(name="bench-noop", queue=place.queue)
        async def noop(text: str) -> None:  # noqa: ARG001  # it is there to be carried
            self._count()

        @app.task(name="bench-work", queue=place.queue)
        async def work(us: int) -> None:
            until = time.thread_time() + us / 1e6
            while time.thread_time() < until:
                pass
            self._count()

        @app.task(name="bench-stamp", queue=place.queue)
        async def stamp(sent: float, text: str) -> None:  # noqa: ARG001
            self.heard(time.monotonic() - sent)  # one monotonic clock serves all processes of a machine

        @app.task(name="bench-hold", queue=place.queue)
        async def hold() -> None:
            self.heard(0.0)
            await asyncio.Event().wait()

        self.noop, self.work, self.stamp, self.hold = noop, work, stamp, hold

    def _count(self) -> None:
        self.ran += 1
        if self.ran == self._most:
            self.enough.set()

    def expect(self, jobs: int) -> None:
        """`enough` is set when this many more of those have run."""
        self._most = self.ran + jobs
        self.enough.clear()
