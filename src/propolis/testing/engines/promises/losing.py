"""Losing: a job whose holder is gone comes back, but not for ever."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from propolis.core.job import Crashed, Done, Event, Outcome, Released, Retried, Snoozed, State
from propolis.core.protocols import Engine
from propolis.core.transitions import MAX_LOSSES, NOT_BEGUN, Retention
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN
from propolis.testing.engines.steps import (
    A_MOMENT,
    Another,
    counts,
    found,
    info_of,
    lose_a_run,
    lose_leases,
    order,
    put_one,
    put_some,
    settle_one,
    take,
    take_one,
)


class LosingPromise:
    async def test_a_job_whose_lease_was_lost_is_ready_again_with_one_loss_more(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T8, I6, S0.28, S2.6: a loss is no failure and no crash, and no attempt is taken back."""
        job = await put_one(engine)
        await take_one(engine)
        clock.advance(SPAN)

        assert (await engine.sweep()).reaped == 1

        info = await info_of(engine, job.id)
        assert (info.state, info.attempts, info.failures) == (State.READY, 1, 0)
        assert (info.losses, info.crashes) == (1, 0)
        again = await take_one(engine)
        assert (again.id, again.attempt, again.failures) == (job.id, 2, 0)
        assert (again.losses, again.crashes, again.is_suspect) == (1, 0, True)

    async def test_a_lease_is_not_reaped_before_its_end(self, engine: Engine, clock: FakeClock) -> None:
        """T8, I2, S2.5."""
        job = await put_one(engine)
        await take_one(engine)
        clock.advance(SPAN - A_MOMENT)

        swept = await engine.sweep()

        assert (swept.reaped, swept.next_in) == (0, A_MOMENT)
        assert (await info_of(engine, job.id)).state is State.RUNNING

    async def test_a_sweep_names_the_jobs_that_it_ended(self, engine: Engine, clock: FakeClock) -> None:
        """T8, T11: dead or cancelled by it, and not those that run again."""
        stopped, again = await put_one(engine), await put_one(engine)
        await take(engine)
        await engine.cancel([stopped.id])
        expired = await put_one(engine, queue="other", expires_in_ms=1000)
        clock.advance(SPAN)

        swept = await engine.sweep()

        assert swept.ended == (stopped.id, expired.id)
        assert await order(engine) == [again.id]
        assert (await engine.sweep()).ended == ()

    async def test_a_sweep_names_at_most_what_it_was_asked_to_end(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T8."""
        ids = await put_some(engine, 5)
        await take(engine)
        await engine.cancel(ids)
        clock.advance(SPAN)

        named: list[str] = []
        while swept := (await engine.sweep(limit=2)).ended:
            assert len(swept) <= 2
            named += swept

        assert sorted(named) == sorted(ids)

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
        assert (await info_of(engine, held.id)).state is State.RUNNING

    async def test_without_a_sweep_nobody_takes_over(self, engine: Engine, clock: FakeClock) -> None:
        """T8, S1.16: taking lost jobs back is the work of whoever sweeps, and of nobody else."""
        job = await put_one(engine)
        await take_one(engine)

        clock.advance(SPAN * 100)

        assert await take(engine) == []
        assert (await info_of(engine, job.id)).state is State.RUNNING

    async def test_a_job_that_is_lost_too_often_is_dead(
        self, engine: Engine, clock: FakeClock, retention: Retention
    ) -> None:
        """T8, I6, S4.4: at once for the first two times, then after pauses that grow; and not for ever."""
        job = await put_one(engine, max_crashes=1)
        pauses = []
        for losses in range(1, MAX_LOSSES):
            await lose_a_run(engine, clock)
            info = await info_of(engine, job.id)
            assert (info.state, info.losses, info.crashes) == (State.READY, losses, 0)
            pauses.append((info.due_at - clock.now).total_seconds())
            clock.advance(max(info.due_at - clock.now, timedelta(0)))
        await lose_a_run(engine, clock)

        assert pauses == [0, 0, 5, 10, 20, 40, 80, 160, 300]
        info = await info_of(engine, job.id)
        assert (info.state, info.reason) == (State.DEAD, "lost")
        assert (info.attempts, info.failures, info.losses) == (MAX_LOSSES, 0, MAX_LOSSES)
        assert (info.ended_at, info.keep_until) == (clock.now, clock.now + retention.dead_for)
        assert [event.kind for event in info.history] == ["lost"] * MAX_LOSSES
        assert await take(engine) == []

    async def test_a_job_that_waits_after_a_third_loss_is_not_leased_early(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T8, I2."""
        job = await put_one(engine)
        for _ in range(3):
            await lose_a_run(engine, clock)

        clock.advance(timedelta(seconds=5) - A_MOMENT)
        assert await take(engine) == []
        clock.advance(A_MOMENT)
        assert (await take_one(engine)).id == job.id

    async def test_a_suspect_that_had_not_begun_is_not_blamed(self, engine: Engine, clock: FakeClock) -> None:
        """T8, F57: any number of times; it goes to the front, and the run does not count."""
        job, behind = await put_one(engine), await put_one(engine)
        await lose_a_run(engine, clock)
        for _ in range(MAX_LOSSES + 2):
            suspect = await take_one(engine)
            assert (suspect.id, suspect.losses, suspect.attempt) == (job.id, 1, 2)
            await lose_leases(engine, clock)

        info = await info_of(engine, job.id)
        assert (info.state, info.losses, info.attempts) == (State.READY, 1, 1)
        assert {(event.kind, event.note) for event in info.history[1:]} == {("lost", NOT_BEGUN)}
        assert await order(engine) == [job.id, behind.id]

    @pytest.mark.parametrize(
        ("outcome", "left"),
        [
            (Retried(), 0),
            (Snoozed(timedelta(0)), 0),
            (Snoozed(timedelta(0), asked=False), 2),
            (Released(), 2),
            (Crashed(), 2),
        ],
        ids=["retried", "snoozed", "snoozed by its worker", "released", "crashed"],
    )
    async def test_a_sign_of_life_forgets_the_losses(
        self, engine: Engine, clock: FakeClock, outcome: Outcome, left: int
    ) -> None:
        """T5, T7, T8b."""
        job = await put_one(engine)
        for _ in range(2):
            await lose_a_run(engine, clock)

        await settle_one(engine, await take_one(engine), outcome)

        assert (await info_of(engine, job.id)).losses == left

    async def test_losses_and_failures_are_counted_apart(self, engine: Engine, clock: FakeClock) -> None:
        """T5, T8, I6, S0.28, S0.29."""
        job = await put_one(engine)
        for _ in range(2):
            await settle_one(engine, await take_one(engine), Retried())
            await lose_a_run(engine, clock)

        info = await info_of(engine, job.id)
        assert (info.attempts, info.failures, info.losses, info.crashes) == (4, 2, 1, 0)

    async def test_a_loss_is_told_in_the_history(self, engine: Engine, clock: FakeClock) -> None:
        """T8."""
        job = await put_one(engine)
        first = await lose_a_run(engine, clock)
        at = clock.now
        second = await lose_a_run(engine, clock)

        assert (await info_of(engine, job.id)).history == (
            Event(at, "lost", attempt=1, fence=first.fence, holder=HOLDER),
            Event(clock.now, "lost", attempt=2, fence=second.fence, holder=HOLDER),
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
        assert (await info_of(engine, job.id)).losses == 1

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
