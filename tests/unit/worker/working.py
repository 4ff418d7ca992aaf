"""Workers on the memory engine, for the tests of what they do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from propolis import App
from propolis.app.registry import Registry
from propolis.core.job import JobInfo
from propolis.strategies import fixed, repeat
from propolis.values import State
from propolis.worker import Mode, Settings, Worker
from propolis.worker.settings import Monotonic, monotonic

AT_ONCE = repeat(3, fixed(0))


async def work(app: App, **settings: Any) -> Worker:
    worker = Worker(app, Settings(**{"mode": Mode.UNTIL_EMPTY, **settings}))
    await worker.run()
    return worker


@asynccontextmanager
async def working(app: Registry, *, clock: Monotonic = monotonic, **settings: Any) -> AsyncIterator[Worker]:
    """A worker that serves for as long as the block lasts."""
    worker = Worker(app, Settings(**settings), clock=clock)
    running = asyncio.create_task(worker.run())
    await worker.started.wait()
    try:
        yield worker
    finally:
        worker.stop()
        await running


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)  # no event shows this state


async def until_state(app: App, job_id: str, state: State) -> None:
    async with asyncio.timeout(20):
        while (await record_of(app, job_id)).state is not state:
            await asyncio.sleep(0.005)  # no event shows this state


async def record_of(app: App, job_id: str) -> JobInfo:
    record = await app.jobs.aget(job_id)
    assert record is not None
    return record
