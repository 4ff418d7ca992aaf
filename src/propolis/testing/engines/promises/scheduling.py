"""Scheduling: no job is leased before its time, and the time is the engine's."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

from propolis.core.job import Retried, Snoozed, State
from propolis.core.protocols import Engine
from propolis.testing.clock import START, FakeClock
from propolis.testing.engines.samples import SPAN, a_job
from propolis.testing.engines.steps import (
    A_MOMENT,
    HOUR,
    a_cancelled_job,
    a_dead_job,
    a_done_job,
    counts,
    found,
    info_of,
    order,
    put_one,
    settle_one,
    take,
    take_one,
)

YEAR = timedelta(days=365)


class SchedulingPromise:
    async def test_a_delayed_job_is_not_leased_before_its_time(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T2, I2, S0.11."""
        job = await put_one(engine, delay_ms=5000)

        assert await take(engine) == []
        clock.advance(timedelta(seconds=5) - A_MOMENT)
        await engine.sweep()
        assert await take(engine) == []
        clock.advance(A_MOMENT)
        assert await order(engine) == [job.id]

    async def test_a_job_may_be_due_at_a_moment(self, engine: Engine, clock: FakeClock) -> None:
        """T1, T2, I2."""
        moment = clock.now + YEAR
        job = await put_one(engine, due_at=moment)

        clock.advance(YEAR - A_MOMENT)
        assert await take(engine) == []
        clock.advance(A_MOMENT)

        assert (await info_of(engine, job.id)).due_at == moment
        assert await order(engine) == [job.id]

    async def test_a_moment_that_has_passed_is_now(self, engine: Engine, clock: FakeClock) -> None:
        """T1, T2, I15, S3.29."""
        waiting = await put_one(engine)
        overdue = await put_one(engine, due_at=clock.now - YEAR)

        assert await order(engine) == [waiting.id, overdue.id]

    async def test_a_delayed_job_keeps_nobody_busy_meanwhile(self, engine: Engine) -> None:
        """S0.11."""
        await put_one(engine, delay_ms=5000, priority=100)
        plain = await put_one(engine)

        assert await order(engine) == [plain.id]

    async def test_every_moment_is_read_from_the_engines_clock(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T1, T2, T6, I13, S1.30, S4.27: the clock of this machine, or of any worker, changes nothing."""
        clock.advance(HOUR)
        job = await put_one(engine, delay_ms=1000, expires_in_ms=60_000)
        due_at = clock.now + timedelta(seconds=1)
        clock.advance("1s")
        lease = await take_one(engine)
        clock.advance("1s")
        await settle_one(engine, lease, Retried())

        info = await info_of(engine, job.id)

        assert await engine.now() == clock.now == START + HOUR + timedelta(seconds=2)
        assert (info.put_at, info.due_at) == (START + HOUR, clock.now)
        assert info.expires_at == START + HOUR + timedelta(minutes=1)
        assert (info.started_at, lease.until) == (due_at, due_at + SPAN)

    async def test_a_delay_is_counted_from_the_put_and_a_retrys_from_its_settle(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T1, T5, T7."""
        job = await put_one(engine, delay_ms=1000)
        clock.advance("3s")
        await settle_one(engine, await take_one(engine), Retried(delay=timedelta(seconds=10)))
        retried = await info_of(engine, job.id)
        clock.advance("10s")
        await settle_one(engine, await take_one(engine), Snoozed(HOUR))
        snoozed = await info_of(engine, job.id)

        assert retried.due_at == START + timedelta(seconds=13)
        assert snoozed.due_at == START + timedelta(seconds=13) + HOUR
        assert (retried.state, snoozed.state) == (State.READY, State.READY)

    async def test_a_retry_or_snooze_is_not_leased_before_its_delay_is_over(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T5, T7, I2."""
        await put_one(engine)
        for outcome in (Retried(delay=HOUR), Snoozed(HOUR)):
            await settle_one(engine, await take_one(engine), outcome)
            clock.advance(HOUR - A_MOMENT)
            await engine.sweep()
            assert await take(engine) == []
            clock.advance(A_MOMENT)

        assert (await take_one(engine)).attempt == 2

    async def test_scheduled_and_ready_are_told_apart_by_the_time(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """I8, S0.5: also before anybody has leased or swept."""
        scheduled = await put_one(engine, delay_ms=1000)
        ready = await put_one(engine)

        before = await counts(engine)
        assert (before.ready, before.scheduled, before.waiting) == (1, 1, 2)
        assert await found(engine, scheduled=True) == [scheduled.id]
        assert await found(engine, state=State.READY, scheduled=False) == [ready.id]

        clock.advance("1s")
        after = await counts(engine)
        assert (after.ready, after.scheduled, after.waiting) == (2, 0, 2)
        assert await found(engine, scheduled=True) == []

    async def test_a_sweep_promotes_what_is_due_and_tells_when_to_come_back(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """L1."""
        await engine.put([a_job(delay_ms=1000), a_job(delay_ms=2000), a_job(delay_ms=3000)])
        first = await engine.sweep()
        clock.advance("2s")
        second = await engine.sweep()
        clock.advance("1s")
        third = await engine.sweep()

        assert (first.promoted, first.next_in) == (0, timedelta(seconds=1))
        assert (second.promoted, second.next_in) == (2, timedelta(seconds=1))
        assert (third.promoted, third.next_in) == (1, None)

    async def test_one_who_sweeps_by_name_is_told_to_come_when_there_is_something_to_do(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """L1: alone, it is told no later moment than that; and what it does is what everybody does."""
        await engine.put([a_job(delay_ms=300)])
        first = await engine.sweep(by="one")
        clock.advance("300ms")
        second = await engine.sweep(by="one")

        assert (first.promoted, first.next_in) == (0, timedelta(milliseconds=300))
        assert first.again_in is None or first.again_in == first.next_in
        assert (second.promoted, second.next_in) == (1, None)

    async def test_a_sweep_does_each_kind_of_work_up_to_its_limit(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """L1."""
        await engine.put([a_job(delay_ms=1000) for _ in range(5)])
        clock.advance("1s")

        promoted = [(await engine.sweep(limit=2)).promoted for _ in range(4)]

        assert promoted == [2, 2, 1, 0]
        assert (await counts(engine)).ready == 5

    async def test_a_sweep_tells_when_the_first_lease_ends(self, engine: Engine, clock: FakeClock) -> None:
        """S2.5: exactly the time that remains."""
        await engine.put([a_job(), a_job(delay_ms=60_000)])
        lease = await take_one(engine)
        clock.advance("5s")

        assert (await engine.sweep()).next_in == lease.until - clock.now

    async def test_a_waiting_job_can_be_made_due_earlier(self, engine: Engine, clock: FakeClock) -> None:
        """I2."""
        job = await put_one(engine, delay_ms=60_000)

        assert await engine.reschedule(job.id, clock.now)

        assert (await info_of(engine, job.id)).due_at == clock.now
        assert await order(engine) == [job.id]

    async def test_a_waiting_job_can_be_made_due_later(self, engine: Engine, clock: FakeClock) -> None:
        """I2."""
        job = await put_one(engine)

        assert await engine.reschedule(job.id, clock.now + HOUR)

        clock.advance(HOUR - A_MOMENT)
        assert await take(engine) == []
        clock.advance(A_MOMENT)
        assert await order(engine) == [job.id]

    async def test_only_a_waiting_job_can_be_rescheduled(self, engine: Engine, clock: FakeClock) -> None:
        """I10."""
        done = await a_done_job(engine)
        dead = await a_dead_job(engine)
        cancelled = await a_cancelled_job(engine)
        running = await put_one(engine)
        await take(engine)

        for name in (done.id, dead.id, cancelled.id, running.id, "unknown"):
            assert not await engine.reschedule(name, clock.now + HOUR)

        assert (await info_of(engine, dead.id)).state is State.DEAD
        assert (await counts(engine)).running == 1

    async def test_a_moment_may_be_in_any_time_zone_and_far_away(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T1, I13."""
        there = timezone(timedelta(hours=5, minutes=30))
        local = await put_one(engine, due_at=(clock.now + HOUR).astimezone(there))
        far = await put_one(engine, due_at=datetime(9998, 12, 31, tzinfo=UTC))

        assert (await engine.sweep()).next_in == HOUR

        assert (await info_of(engine, local.id)).due_at == clock.now + HOUR
        assert (await info_of(engine, far.id)).due_at.year == 9998
        clock.advance(HOUR)
        assert await order(engine) == [local.id]
