"""A fleet shares the sweeping out, on engines that plan who comes back when."""

from __future__ import annotations

from datetime import timedelta

import pytest
from tests.worker.sweepers import Sweepers

from propolis.core.protocols import Engine
from propolis.engines.address import Address
from propolis.engines.postgres.engine import PostgresEngine
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.engine import RedisEngine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import SPAN, a_job
from propolis.testing.engines.steps import take_one
from propolis.testing.servers.redis import redis


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=["postgres", "redis"])
def engine(request: pytest.FixtureRequest, clock: FakeClock) -> Engine:
    if request.param == "postgres":
        url, schema = request.getfixturevalue("postgres_url"), request.getfixturevalue("schema")
        return PostgresEngine(url, schema=schema, clock=clock)
    url, prefix = request.getfixturevalue("valkey_url"), request.getfixturevalue("prefix")
    return RedisEngine(target_of(Address(url)), prefix=f"{prefix}:", clock=clock)


async def test_a_fleet_shares_the_sweeping_out(engine: Engine, clock: FakeClock) -> None:
    """S2.28, L2: alone one comes back after a moment; many come in turns, in ten seconds no more than 25."""
    await engine.open()
    fleet = Sweepers(engine, clock)
    assert await fleet.one("first") in (1, 3)
    await fleet.start(f"worker {n}" for n in range(100))
    await fleet.pauses(60)  # at first they do not rely on one another
    for _ in range(12):
        pauses = await fleet.pauses(10)
        assert 8 <= len(pauses) <= 25
        assert min(pauses[1:]) >= 0.3 - 1e-6
    assert (await engine.sweep()).again_in is None  # one who will not come back is not counted
    await engine.close()


async def test_those_who_started_together_and_die_together_leave_no_long_gap(
    engine: Engine, clock: FakeClock
) -> None:
    """L2, F01: as the workers of one machine do."""
    await engine.open()
    fleet = Sweepers(engine, clock)
    await fleet.start(f"worker {n}" for n in range(60))
    await fleet.pauses(300)
    fleet.die(f"worker {n}" for n in range(30))
    assert max(await fleet.pauses(100)) <= 10
    await engine.close()


@pytest.mark.parametrize("workers", [1, 20, 100])
async def test_a_fleet_that_is_started_anew_does_not_wait_for_the_old_one(
    engine: Engine, clock: FakeClock, workers: int
) -> None:
    """L2, F01: leases that were lost with the old one are found in time."""
    await engine.open()
    fleet = Sweepers(engine, clock)
    await fleet.start(f"old {n}" for n in range(100))
    await fleet.pauses(120)
    await fleet.start(f"new {n}" for n in range(workers))
    assert max(await fleet.pauses(150)) <= 5
    await engine.close()


async def test_one_who_leaves_something_undone_comes_back_at_once(engine: Engine, clock: FakeClock) -> None:
    """S2.28, L2: few sweeps must not mean that what is past its time waits for long."""

    async def at_once() -> list[bool]:
        pauses = [(await engine.sweep(by="one", limit=2)).again_in for _ in range(2)]
        return [pause is not None and pause <= timedelta(milliseconds=10) for pause in pauses]

    await engine.open()
    await engine.put([a_job(delay_ms=1000) for _ in range(3)])
    clock.advance("1s")
    assert await at_once() == [True, False]
    for _ in range(3):
        await take_one(engine)
    clock.advance(SPAN)
    assert await at_once() == [True, False]
    await engine.put([a_job(expires_in_ms=1000, queue="other") for _ in range(3)])
    clock.advance("1s")
    assert await at_once() == [True, False]
    await engine.close()


async def test_a_sweep_of_redis_does_not_look_into_each_queue(clock: FakeClock) -> None:
    """L2: some have a queue for each of their customers."""
    with redis() as server:  # of this test alone, since it counts all commands
        engine = await RedisEngine(target_of(Address(server.url)), clock=clock).open()
        later = {n: n * 1000 for n in (1, 2, 2000)}
        await engine.put([a_job(queue=f"of-{n}", delay_ms=later.get(n, 0)) for n in range(3000)])
        clock.advance("2s")
        server.forget_calls()

        swept = await engine.sweep()

        assert sum(server.calls().values()) < 100
        assert swept.promoted == 2
        assert swept.next_in == timedelta(seconds=1998)
        await engine.close()
