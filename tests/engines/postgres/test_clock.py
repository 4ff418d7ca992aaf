"""L2: a server whose clock goes back, as when another one with another clock takes over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import asyncpg
import pytest
import pytest_asyncio

from propolis.core.job import Done, Lease, Retried, Snoozed
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


async def test_a_delay_is_not_longer_because_the_clock_went_back(
    engine: PostgresEngine, clock: FakeClock
) -> None:
    """L2, F38: of a put, a retry, a snooze; but a time that was given stays what it was."""
    await engine.put([a_job(id="again"), a_job(id="snoozed")])
    leases = await take(engine)
    await engine.settle([(leases["again"], Retried(3 * HOUR)), (leases["snoozed"], Snoozed(3 * HOUR))])
    due_at = clock.now + 3 * HOUR
    await engine.put(
        [
            a_job(id="delayed", delay_ms=3 * 3600_000),
            a_job(id="fixed", due_at=due_at),
            a_job(id="moved", delay_ms=1000),
        ]
    )
    await engine.reschedule("moved", due_at)
    clock.advance(2 * HOUR)
    await engine.sweep(by="me")

    clock.set_back(HOUR)  # an hour is left of each
    await engine.put([a_job(id="new", delay_ms=2 * 3600_000)])
    for _ in range(3):
        await engine.sweep(by="me")
    clock.advance(HOUR - LOOK)
    assert await take(engine) == {}
    clock.advance(LOOK)
    assert sorted(await take(engine)) == ["again", "delayed", "snoozed"]
    clock.advance(HOUR)
    assert sorted(await take(engine)) == ["fixed", "moved", "new"]
    found = await engine.get("delayed")
    assert found is not None
    assert (found.history[0].kind, found.history[0].note) == ("clock", "went back by 3600 s")


async def test_what_was_scheduled_is_shifted_in_bites(engine: PostgresEngine, clock: FakeClock) -> None:
    """L2, L5: also where the clock went back twice before all had followed."""
    await engine.put([a_job(n, delay_ms=600_000) for n in range(25)])
    await engine.sweep(by="me")
    clock.set_back(HOUR)
    swept = await engine.sweep(limit=10, by="me")
    assert swept.again_in == timedelta(milliseconds=10)
    clock.set_back(HOUR)
    sweeps = 1
    while (await engine.sweep(limit=10, by="me")).again_in == timedelta(milliseconds=10):
        sweeps += 1
    assert sweeps == 6  # three for each step
    clock.advance(timedelta(minutes=10) - LOOK)
    assert await take(engine) == {}
    clock.advance(LOOK)
    assert len(await take(engine)) == 25


async def test_a_history_that_cannot_be_read_keeps_no_delay_from_following(
    engine: PostgresEngine, clock: FakeClock, postgres_url: str, schema: str
) -> None:
    """L7: nor a sweep from its other work."""
    damages = ['"junk"', "7", "{}", "[]", '[["junk"]]', "[[1e300]]", "[7]", "null"]
    await engine.put([a_job(id=f"{n}", delay_ms=3 * 3600_000) for n in range(len(damages) + 1)])
    connection = await asyncpg.connect(postgres_url)
    for n, damage in enumerate(damages):
        await connection.execute(f"UPDATE \"{schema}\".scheduled SET history = '{damage}' WHERE id = '{n}'")
    await connection.close()
    clock.advance(2 * HOUR)
    await engine.sweep(by="me")
    clock.set_back(HOUR)
    for _ in range(3):
        await engine.sweep(by="me")
    clock.advance(HOUR)
    assert len(await take(engine)) == len(damages) + 1
