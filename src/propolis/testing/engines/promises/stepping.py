"""Stepping: a clock that goes back keeps no lease of a dead worker, and delays no delay for long.

An engine may leave a step of a second alone, and what it remembers of the time may lag behind by some
seconds: so the steps here are longer, and mostly somebody has swept in the moment before.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from propolis.core.job import Done, Retried, Snoozed
from propolis.core.protocols import Engine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import SPAN, a_job
from propolis.testing.engines.steps import A_MOMENT, HOUR, info_of, put_one, put_some, take, take_one

MINUTE = timedelta(minutes=1)
LAG = timedelta(seconds=10)
AT_ONCE = timedelta(milliseconds=100)
SWEEPER = "sweeper-1"  # whoever sweeps again and again gives a name


async def sweep_on(engine: Engine, limit: int = 1000) -> int:
    """Sweep until nobody has to come back at once, and give how often that was."""
    for sweeps in range(1, 1000):
        again_in = (await engine.sweep(limit=limit, by=SWEEPER)).again_in
        if again_in is None or again_in > AT_ONCE:
            return sweeps
    return pytest.fail("the sweeps come to no end")


async def ends(engine: Engine, *ids: str) -> list[object]:
    """When these leases end."""
    return [(await info_of(engine, each)).lease_until for each in ids]


async def due(engine: Engine) -> list[str]:
    return sorted(lease.id for lease in await take(engine))


class SteppingPromise:
    @pytest.mark.parametrize("step", [HOUR, timedelta(seconds=50), 400 * 24 * HOUR], ids=str)
    async def test_the_lease_of_a_dead_worker_ends_one_span_after_a_step_back(
        self, engine: Engine, clock: FakeClock, step: timedelta
    ) -> None:
        """L2, F38."""
        job = await put_one(engine)
        await take_one(engine)
        clock.advance(SPAN / 3)
        clock.set_back(step)

        await sweep_on(engine)
        assert await ends(engine, job.id) == [clock.now + SPAN]
        clock.advance(SPAN - A_MOMENT)
        assert (await engine.sweep(by=SWEEPER)).reaped == 0
        clock.advance(A_MOMENT)
        assert (await engine.sweep(by=SWEEPER)).reaped == 1

        assert await due(engine) == [job.id]

    async def test_that_is_so_after_a_time_in_which_nothing_ran(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """L2, F38: the lease itself shows what time it was."""
        await engine.sweep(by=SWEEPER)
        job = await put_one(engine)
        for _ in range(60):
            clock.advance(MINUTE)
            await engine.sweep(by=SWEEPER)
        await take_one(engine)
        clock.set_back("50s")

        await sweep_on(engine)

        assert await ends(engine, job.id) == [clock.now + SPAN]

    async def test_a_step_within_the_span_cuts_no_lease_short(self, engine: Engine, clock: FakeClock) -> None:
        """L2, I2: whoever leased or renewed has all of the span."""
        job = await put_one(engine)
        await take_one(engine)
        clock.set_back(SPAN / 2)

        for _ in range(3):
            await sweep_on(engine)
            clock.advance(SPAN / 4)
        assert (await engine.sweep(by=SWEEPER)).reaped == 0
        clock.advance(SPAN / 4)
        assert (await engine.sweep(by=SWEEPER)).reaped == 1
        assert await due(engine) == [job.id]

    @pytest.mark.parametrize("ran_before", [False, True], ids=["first run", "second run"])
    async def test_a_lease_that_is_renewed_after_a_step_is_kept(
        self, engine: Engine, clock: FakeClock, ran_before: bool
    ) -> None:
        """L2, T3: it is shortened once, however often somebody sweeps."""
        kept, lost = await put_some(engine, 2)
        if ran_before:
            await take(engine)
            clock.advance(SPAN)
            assert (await engine.sweep(by=SWEEPER)).reaped == 2
        leases = {lease.id: lease for lease in await take(engine)}
        clock.set_back(HOUR)

        await sweep_on(engine)
        for _ in range(4):
            assert (await engine.renew([leases[kept]], span=SPAN))[0].until == clock.now + SPAN
            clock.advance(SPAN / 2)
            await sweep_on(engine)

        assert await ends(engine, kept) == [clock.now + SPAN / 2]
        assert await due(engine) == [lost]
        assert await engine.settle([(leases[kept], Done())]) == []

    async def test_a_short_lease_does_not_hide_behind_a_long_one(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """L2: each has a span of its own."""
        long, short = await put_some(engine, 2)
        await take_one(engine, span=HOUR)
        clock.advance(HOUR / 2)
        await take_one(engine)
        await engine.sweep(by=SWEEPER)
        clock.set_back("50s")

        end = clock.now + HOUR / 2 + timedelta(seconds=50)
        await sweep_on(engine)

        assert await ends(engine, long, short) == [end, clock.now + SPAN]

    async def test_many_leases_are_shortened_in_bites(self, engine: Engine, clock: FakeClock) -> None:
        """L2, L5: by several sweeps, and delays follow once."""
        delayed = await put_one(engine, delay_ms=2 * 3600_000)
        ids = await put_some(engine, 7)
        for _ in ids:
            await take_one(engine)
            clock.advance(A_MOMENT)
        await engine.sweep(by=SWEEPER)
        clock.set_back(HOUR / 2)
        left = 2 * HOUR - 7 * A_MOMENT

        assert await sweep_on(engine, limit=2) > 2

        assert await ends(engine, *ids) == [clock.now + SPAN] * 7
        assert left <= (await info_of(engine, delayed.id)).due_at - clock.now <= left + LAG
        clock.advance(SPAN)
        assert (await engine.sweep(by=SWEEPER)).reaped == 7

    async def test_a_delay_is_not_longer_because_of_a_step_back(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """L2, F38: of a put, of a retry, of a snooze; a time that was given stays what it is."""
        await self.let_wait(engine, clock.now + 3 * HOUR)
        clock.advance(2 * HOUR)
        await engine.sweep(by=SWEEPER)

        clock.set_back(HOUR)  # an hour is left of each
        await engine.put([a_job(id="new", delay_ms=2 * 3600_000)])
        await sweep_on(engine, limit=2)
        clock.advance(HOUR - A_MOMENT)
        assert await due(engine) == []
        clock.advance(A_MOMENT)
        assert await due(engine) == ["again", "delayed", "snoozed"]
        clock.advance(HOUR)
        assert await due(engine) == ["given", "moved", "new"]

    @staticmethod
    async def let_wait(engine: Engine, due_at: datetime) -> None:
        """Jobs that wait for three hours, each in another way."""
        await engine.put([a_job(id="again"), a_job(id="snoozed")])
        leases = {lease.id: lease for lease in await take(engine)}
        wait = 3 * HOUR
        await engine.settle([(leases["again"], Retried(wait)), (leases["snoozed"], Snoozed(wait))])
        delayed, moved = a_job(id="delayed", delay_ms=3 * 3600_000), a_job(id="moved", delay_ms=1000)
        await engine.put([delayed, moved, a_job(id="given", due_at=due_at)])
        await engine.reschedule("moved", due_at)

    async def test_a_second_step_is_followed_as_well(self, engine: Engine, clock: FakeClock) -> None:
        """L2, L5: also where not everything has followed the first one."""
        ids = await put_some(engine, 5)
        for _ in ids:
            await take_one(engine)
        for number in range(5):
            await put_one(engine, number, delay_ms=600_000)
        await engine.sweep(by=SWEEPER)
        clock.set_back(HOUR)
        await engine.sweep(limit=2, by=SWEEPER)
        clock.set_back(HOUR)

        await sweep_on(engine, limit=2)

        assert await ends(engine, *ids) == [clock.now + SPAN] * 5
        clock.advance("10m")
        assert (await engine.sweep(by=SWEEPER)).reaped == 5
        assert len(await take(engine)) == 10

    async def test_a_clock_that_goes_forward_changes_nothing(self, engine: Engine, clock: FakeClock) -> None:
        """L2: what is due is due, and what waits, waits."""
        later, now = await put_one(engine, delay_ms=2 * 3600_000), await put_one(engine)
        await engine.sweep(by=SWEEPER)
        clock.advance(HOUR)
        await sweep_on(engine)

        assert await due(engine) == [now.id]
        assert (await info_of(engine, later.id)).due_at == clock.now + HOUR
