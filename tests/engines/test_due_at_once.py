"""S3.28: many jobs become due in one moment."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from propolis.core.protocols import Engine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.costs.meters import QUIET, metered_redis, metered_sqlite
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.servers.redis import redis

BITE = 1000
MANY = 100_000
MOST_SECONDS = 10  # of a processor, for so many


class Desk(NamedTuple):
    """An engine, what it has done so far, and how many seconds of a processor that took."""

    engine: Engine
    clock: FakeClock
    work: Callable[[], Awaitable[float]]
    seconds: Callable[[], Awaitable[float]]
    most: float  # work for a job


@pytest.fixture
async def desk(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> AsyncIterator[Desk]:
    """PostgreSQL has a test of its own, which counts pages."""
    clock = FakeClock()
    if kind == "sqlite":

        async def process() -> float:
            return time.process_time()

        async with metered_sqlite(tmp_path / "jobs.db", clock) as (engine, meter):
            yield Desk(engine, clock, meter.read, process, most=200)  # VM steps: 149 by measurement
        return

    with redis(settings=QUIET) as server:

        async def commands() -> float:
            return sum(server.calls().values())

        async def thread() -> float:
            return await meter.read() / 1e6

        async with metered_redis(server.url, "due:", clock) as (engine, meter):
            yield Desk(engine, clock, commands, thread, most=9)  # 7.1 by measurement


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("sqlite", 5 * BITE),
        ("sqlite", MANY),
        ("redis", 5 * BITE),
        pytest.param("redis", MANY, marks=pytest.mark.full),
    ],
)
async def test_one_sweeper_promotes_all_in_as_many_sweeps_as_there_are_bites(desk: Desk, size: int) -> None:
    """S3.28: each does the same work, and says that there is more; 100,000 within ten seconds of a core."""
    engine = desk.engine
    for _ in range(0, size, BITE):
        await engine.put([a_job(n, queue=f"q{n % 7}", delay_ms=60_000) for n in range(BITE)])
    desk.clock.advance("1m")

    promoted, again, works = [], [], [await desk.work()]
    began = await desk.seconds()
    while (swept := await engine.sweep(by="one")).promoted:
        promoted.append(swept.promoted)
        again.append(swept.again_in)
        works.append(await desk.work())
    took = await desk.seconds() - began

    assert promoted == [BITE] * (size // BITE)
    assert all(again_in is not None and again_in.total_seconds() <= 0.1 for again_in in again[:-1])
    assert max(after - before for before, after in pairwise(works)) <= desk.most * BITE
    assert took < MOST_SECONDS
    assert sum(counts.ready for counts in (await engine.queues()).values()) == size
    wants = {f"q{n}": 10 for n in range(7)}
    assert len(await engine.lease(wants, span=SPAN, holder=HOLDER)) == 70
