"""L2: a server whose clock goes back, as when another one with another clock takes over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import asyncpg
import pytest_asyncio

from propolis.core.job import Lease, Retried, Snoozed
from propolis.core.protocols import Filter
from propolis.engines.postgres.engine import PostgresEngine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.engines.steps import A_MOMENT, HOUR


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
    clock.advance(HOUR - A_MOMENT)
    assert await take(engine) == {}
    clock.advance(A_MOMENT)
    assert sorted(await take(engine)) == ["again", "delayed", "snoozed"]
    clock.advance(HOUR)
    assert sorted(await take(engine)) == ["fixed", "moved", "new"]
    found = await engine.get("delayed")
    assert found is not None
    assert (found.history[0].kind, found.history[0].note) == ("clock", "went back by 3600 s")


async def test_a_delay_that_was_counted_just_before_that_time_follows_as_well(
    engine: PostgresEngine, clock: FakeClock
) -> None:
    """L2: as the last sweep before the step has seen its place; what came after the step stays."""
    await engine.put([a_job(id="again")])
    await engine.settle([((await take(engine))["again"], Retried(3 * HOUR))])
    await engine.put([a_job(id="put", delay_ms=3 * 3600_000)])
    due_at = clock.now + 3 * HOUR
    clock.advance(timedelta(seconds=30))
    await engine.sweep(by="me")
    clock.advance(2 * HOUR)
    await engine.sweep(by="me")
    clock.set_back(2 * HOUR)
    await engine.put([a_job(id="new", delay_ms=3 * 3600_000)])
    for _ in range(3):
        await engine.sweep(by="me")

    found = {job_id: await engine.get(job_id) for job_id in ("again", "put", "new")}
    assert {job_id: job.due_at - due_at for job_id, job in found.items() if job is not None} == {
        "again": -2 * HOUR,
        "put": -2 * HOUR,
        "new": timedelta(seconds=30),
    }


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
    assert sweeps == 5  # of six, three for each step: after the last one nobody has to come back at once
    clock.advance(timedelta(minutes=10) - A_MOMENT)
    assert await take(engine) == {}
    clock.advance(A_MOMENT)
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


async def test_leases_are_shortened_in_bites(
    engine: PostgresEngine, clock: FakeClock, connection: asyncpg.Connection, schema: str
) -> None:
    """L2, L5: those of chunks and those that are rows, in the order of their ends."""
    await engine.put([a_job(n) for n in range(12)])
    for limit in (1, 2, 1, 2, 1, 2, 1, 2):
        await engine.lease({"default": limit}, span=SPAN, holder=HOLDER)
        clock.advance(A_MOMENT)
    assert await connection.fetchval(f"""SELECT count(*) FROM "{schema}".chunk""") == 4
    clock.set_back(HOUR)
    sweeps = 1
    while (await engine.sweep(limit=3, by="me")).again_in == timedelta(milliseconds=10):
        sweeps += 1
    assert sweeps == 3
    page = await engine.find(Filter())
    assert [info.lease_until for info in page.jobs] == [clock.now + SPAN] * 12


async def test_a_clock_that_is_slewed_is_no_reason_to_write(
    engine: PostgresEngine, clock: FakeClock, connection: asyncpg.Connection, schema: str
) -> None:
    """L2."""
    await engine.put([a_job(), a_job(delay_ms=3600_000)])
    await engine.lease({"default": 1}, span=SPAN, holder=HOLDER)
    await engine.sweep(by="me")
    versions = " UNION ALL ".join(
        f"""SELECT tableoid, ctid FROM "{schema}".{table}""" for table in ("watch", "chunk", "scheduled")
    )
    before = await connection.fetch(versions)
    for _ in range(3):
        clock.set_back("300ms")
        await engine.sweep(by="me")
    assert await connection.fetch(versions) == before


async def test_a_lease_that_somebody_is_at_is_passed_by(
    engine: PostgresEngine, clock: FakeClock, connection: asyncpg.Connection, schema: str
) -> None:
    """L2, L6: and seen to as soon as it is let go."""
    await engine.put([a_job(id="held"), a_job(id="free")])
    for _ in range(2):
        await engine.lease({"default": 1}, span=SPAN, holder=HOLDER)
    clock.set_back(HOUR)
    async with connection.transaction():
        await connection.execute(f"""SELECT FROM "{schema}".running WHERE id = 'held' FOR UPDATE""")
        await engine.sweep(by="me")
        ends = {info.id: info.lease_until for info in (await engine.find(Filter())).jobs}
        assert ends == {"held": clock.now + HOUR + SPAN, "free": clock.now + SPAN}
    await engine.sweep(by="me")
    assert (await engine.find(Filter(queue="default"))).jobs[0].lease_until == clock.now + SPAN
