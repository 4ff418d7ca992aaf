"""Crashing: a job whose holder is gone comes back, but not for ever."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from skep.broker import Engine
from skep.job import MAX_CRASHES, Done, Event, Retry, State
from skep.life import Retention
from skep.testing.clock import FakeClock
from skep.testing.contract.steps import (
    A_MOMENT,
    Another,
    counts,
    found,
    look,
    lose_leases,
    order,
    put_one,
    put_some,
    settle_one,
    take,
    take_one,
)
from skep.testing.make import HOLDER, SPAN


class Crashing:
    async def test_a_job_whose_lease_was_lost_is_ready_again_with_one_crash_more(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T8, I6, S0.28, S2.6: a crash is no failure, and no attempt is taken back."""
        job = await put_one(engine)
        await take_one(engine)
        clock.advance(SPAN)

        assert (await engine.sweep()).reaped == 1

        record = await look(engine, job.id)
        assert (record.state, record.attempts, record.failures, record.crashes) == (State.READY, 1, 0, 1)
        again = await take_one(engine)
        assert (again.id, again.attempt, again.failures, again.crashes) == (job.id, 2, 0, 1)

    async def test_a_lease_is_not_reaped_before_its_end(self, engine: Engine, clock: FakeClock) -> None:
        """T8, I2, S2.5."""
        job = await put_one(engine)
        await take_one(engine)
        clock.advance(SPAN - A_MOMENT)

        swept = await engine.sweep()

        assert (swept.reaped, swept.next_in) == (0, A_MOMENT)
        assert (await look(engine, job.id)).state is State.RUNNING

    async def test_only_lost_leases_are_reaped(self, engine: Engine, clock: FakeClock) -> None:
        """T8, I2."""
        await put_some(engine, 3)
        lost = await take_one(engine, span=timedelta(seconds=1))
        held = await take_one(engine, span=timedelta(seconds=60))
        settled = await take_one(engine, span=timedelta(seconds=1))
        await settle_one(engine, settled, Done())
        clock.advance("30s")

        assert (await engine.sweep()).reaped == 1

        assert await order(engine) == [lost.id]
        assert (await look(engine, held.id)).state is State.RUNNING

    async def test_without_a_sweep_nobody_takes_over(self, engine: Engine, clock: FakeClock) -> None:
        """T8, S1.16: taking lost jobs back is the work of whoever sweeps, and of nobody else."""
        job = await put_one(engine)
        await take_one(engine)

        clock.advance(SPAN * 100)

        assert await take(engine) == []
        assert (await look(engine, job.id)).state is State.RUNNING

    @pytest.mark.parametrize("limit", [1, MAX_CRASHES])
    async def test_a_job_that_crashes_too_often_is_dead(
        self, engine: Engine, clock: FakeClock, retention: Retention, limit: int
    ) -> None:
        """T8, I6, S4.4."""
        job = await put_one(engine, max_crashes=limit)
        for _ in range(limit):
            assert (await look(engine, job.id)).state is State.READY
            await take_one(engine)
            await lose_leases(engine, clock)

        record = await look(engine, job.id)
        assert (record.state, record.reason) == (State.DEAD, "crashed")
        assert (record.attempts, record.failures, record.crashes) == (limit, 0, limit)
        assert (record.ended_at, record.keep_until) == (clock.now, clock.now + retention.dead_for)
        assert await take(engine) == []

    async def test_three_crashes_are_the_limit_unless_the_job_says_otherwise(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T8, I6."""
        plain, tough = await put_one(engine), await put_one(engine, max_crashes=4)
        for _ in range(3):
            await take(engine)
            await lose_leases(engine, clock)

        assert (await look(engine, plain.id)).state is State.DEAD
        assert (await look(engine, tough.id)).state is State.READY

    async def test_crashes_and_failures_are_counted_apart(self, engine: Engine, clock: FakeClock) -> None:
        """T5, T8, I6, S0.28, S0.29."""
        job = await put_one(engine)
        for _ in range(2):
            await settle_one(engine, await take_one(engine), Retry())
            await take_one(engine)
            await lose_leases(engine, clock)

        record = await look(engine, job.id)
        assert (record.attempts, record.failures, record.crashes) == (4, 2, 2)

    async def test_a_crash_is_told_in_the_history(self, engine: Engine, clock: FakeClock) -> None:
        """T8."""
        job = await put_one(engine, max_crashes=2)
        first = await take_one(engine)
        await lose_leases(engine, clock)
        at = clock.now
        second = await take_one(engine)
        await lose_leases(engine, clock)

        assert (await look(engine, job.id)).history == (
            Event(at, "crashed", attempt=1, fence=first.fence, holder=HOLDER),
            Event(clock.now, "crashed", attempt=2, fence=second.fence, holder=HOLDER),
        )

    async def test_any_number_of_sweepers_reap_a_lease_once(
        self, engine: Engine, another: Another, clock: FakeClock
    ) -> None:
        """T8, I6, S1.14, S4.3."""
        job = await put_one(engine)
        handles = [engine, *[await another() for _ in range(3)]]
        await take_one(engine)
        clock.advance(SPAN)

        swept = await asyncio.gather(*(handle.sweep() for handle in handles * 5))

        assert sum(one.reaped for one in swept) == 1
        assert (await look(engine, job.id)).crashes == 1

    async def test_six_sweepers_and_two_jobs_make_four_runs(
        self, engine: Engine, another: Another, clock: FakeClock
    ) -> None:
        """T8, S1.14."""
        handles = [await another() for _ in range(6)]
        ids = await put_some(engine, 2)
        runs = await order(engine)
        for _ in range(3):
            clock.advance(SPAN)
            await asyncio.gather(*(handle.sweep() for handle in handles))
            leases = await take(engine)
            runs += [lease.id for lease in leases]
            await engine.settle([(lease, Done()) for lease in leases])

        assert runs == ids * 2
        assert await found(engine) == []

    async def test_a_sweep_reaps_up_to_its_limit(self, engine: Engine, clock: FakeClock) -> None:
        """T8, I15."""
        ids = await put_some(engine, 5)
        await take(engine)
        clock.advance(SPAN)

        reaped = [(await engine.sweep(limit=2)).reaped for _ in range(4)]

        assert reaped == [2, 2, 1, 0]
        assert sorted(await order(engine)) == sorted(ids)
        assert (await counts(engine)).running == 5
