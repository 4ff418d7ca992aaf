"""L2: a clock that goes back, as when a server is restored or a replica with another clock takes over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest_asyncio

from propolis.core.job import Lease, Retried, State
from propolis.core.protocols import Engine
from propolis.engines.address import Address
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.engine import RedisEngine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN, a_job

HOUR = timedelta(hours=1)
SECOND = timedelta(seconds=1)


@pytest_asyncio.fixture
async def clock() -> FakeClock:
    return FakeClock()


@pytest_asyncio.fixture
async def engine(valkey_url: str, prefix: str, clock: FakeClock) -> AsyncIterator[RedisEngine]:
    handle = await RedisEngine(target_of(Address(valkey_url)), prefix=f"{prefix}:", clock=clock).open()
    yield handle
    await handle.close()


async def take(engine: Engine, limit: int = 100) -> list[Lease]:
    return await engine.lease({"default": limit}, span=SPAN, holder=HOLDER)


async def test_a_lease_ends_one_span_after_the_clock_went_back(engine: RedisEngine, clock: FakeClock) -> None:
    """L2: once, however often one sweeps; and what is renewed meanwhile is kept."""
    await engine.put([a_job(id="lost"), a_job(id="kept")])
    leases = {lease.id: lease for lease in await take(engine)}
    clock.set_back(HOUR)
    assert (await engine.sweep()).reaped == 0
    info = await engine.get("lost")
    assert info is not None
    assert info.lease_until == clock.now + SPAN

    clock.advance(SPAN / 2)
    await engine.sweep()
    assert (await engine.renew([leases["kept"]], span=SPAN))[0].until == clock.now + SPAN
    clock.advance(SPAN / 2)
    assert (await engine.sweep()).reaped == 1
    assert [lease.id for lease in await take(engine)] == ["lost"]


async def test_a_small_step_does_not_cut_a_lease_short(engine: RedisEngine, clock: FakeClock) -> None:
    """L2: it never ends before its span is over."""
    await engine.put([a_job()])
    await take(engine)
    clock.set_back(SPAN / 2)
    for _ in range(3):
        assert (await engine.sweep()).reaped == 0
        clock.advance(SPAN / 4)
    assert (await engine.sweep()).reaped == 0
    clock.advance(SPAN / 4)
    assert (await engine.sweep()).reaped == 1


async def test_a_delay_is_not_longer_because_the_clock_went_back(
    engine: RedisEngine, clock: FakeClock
) -> None:
    """L2: of a put, a retry; but a time that was given stays what it was."""
    await engine.put([a_job(id="again")])
    [again] = await take(engine)
    await engine.settle([(again, Retried(60 * SECOND))])
    due_at = clock.now + 60 * SECOND
    await engine.put([a_job(id="delayed", delay_ms=60_000), a_job(id="fixed", due_at=due_at)])
    clock.advance(30 * SECOND)
    await engine.sweep()

    clock.set_back(HOUR)
    await engine.put([a_job(id="new", delay_ms=60_000)])
    await engine.sweep()
    await engine.sweep()
    clock.advance(29 * SECOND)
    assert await take(engine) == []
    clock.advance(2 * SECOND)
    assert sorted(lease.id for lease in await take(engine)) == ["again", "delayed"]
    clock.advance(30 * SECOND)
    assert [lease.id for lease in await take(engine)] == ["new"]
    clock.advance(due_at - clock.now)
    assert [lease.id for lease in await take(engine)] == ["fixed"]


async def test_what_was_scheduled_is_shifted_in_bites(engine: RedisEngine, clock: FakeClock) -> None:
    """L2, L5: in all queues, twice where the clock went back twice."""
    for queue in ("a", "b", "c"):
        await engine.put([a_job(n, queue=queue, delay_ms=60_000) for n in range(300)])
    await engine.sweep()
    clock.set_back(HOUR)
    sweeps = [await engine.sweep(limit=200, by="me") for _ in range(4)]
    assert sweeps[0].again_in == timedelta(milliseconds=10)
    clock.set_back(HOUR)
    for _ in range(8):
        await engine.sweep(limit=200)
    clock.advance(61 * SECOND)
    swept = await engine.sweep(limit=2000)
    assert swept.promoted == 900
    assert {name: counts.ready for name, counts in (await engine.queues()).items()} == dict.fromkeys(
        "abc", 300
    )


async def test_a_clock_that_goes_forward_changes_nothing(engine: RedisEngine, clock: FakeClock) -> None:
    """L2: what is due is due, and what was put stays."""
    await engine.put([a_job(id="later", delay_ms=7_200_000), a_job(id="now")])
    await engine.sweep()
    clock.advance(HOUR)
    await engine.sweep()
    assert [lease.id for lease in await take(engine)] == ["now"]
    info = await engine.get("later")
    assert info is not None
    assert (info.state, info.due_at) == (State.READY, clock.now + HOUR)
