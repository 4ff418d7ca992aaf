"""L2: a server whose clock goes back, as when another one with another clock takes over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
import pytest_asyncio

from propolis.core.job import Done, Lease
from propolis.engines.postgres.engine import PostgresEngine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN, a_job

HOUR = timedelta(hours=1)
LOOK = timedelta(minutes=1)  # as often a sweep writes the time down


@pytest_asyncio.fixture
async def clock() -> FakeClock:
    return FakeClock()


@pytest_asyncio.fixture
async def engine(postgres_url: str, schema: str, clock: FakeClock) -> AsyncIterator[PostgresEngine]:
    handle = await PostgresEngine(postgres_url, schema=schema, clock=clock).open()
    yield handle
    await handle.close()


async def take(engine: PostgresEngine) -> dict[str, Lease]:
    leases = await engine.lease({"default": 100}, span=SPAN, holder=HOLDER)
    return {lease.id: lease for lease in leases}


@pytest.mark.parametrize("failed", [False, True], ids=["in a chunk", "in rows of their own"])
async def test_a_lease_of_before_ends_soon_and_what_is_renewed_is_kept(
    engine: PostgresEngine, clock: FakeClock, failed: bool
) -> None:
    """L2, F38: once, however often the clock is looked at."""
    await engine.put([a_job(id="kept"), a_job(id="lost")])
    if failed:
        await take(engine)
        clock.advance(SPAN)
        assert (await engine.sweep(by="me")).reaped == 2
    clock.advance(LOOK)
    await engine.sweep(by="me")
    clock.advance(LOOK / 2)
    leases = await take(engine)

    clock.set_back(HOUR)
    assert (await engine.sweep(by="me")).reaped == 0
    for _ in range(2):
        assert (await engine.renew([leases["kept"]], span=2 * LOOK))[0].until == clock.now + 2 * LOOK
        clock.advance(LOOK / 2 + SPAN / 2)
        reaped = (await engine.sweep(by="me")).reaped
    assert reaped == 1
    assert [*await take(engine)] == ["lost"]
    assert await engine.settle([(leases["kept"], Done())]) == []


async def test_no_lease_is_cut_short_by_a_clock_that_goes_back(
    engine: PostgresEngine, clock: FakeClock
) -> None:
    await engine.put([a_job()])
    await engine.sweep(by="me")
    leases = await take(engine)
    clock.set_back(HOUR)
    await engine.sweep(by="me")
    clock.advance(SPAN - timedelta(microseconds=1))
    assert (await engine.sweep(by="me")).reaped == 0
    assert await engine.settle([(lease, Done()) for lease in leases.values()]) == []
