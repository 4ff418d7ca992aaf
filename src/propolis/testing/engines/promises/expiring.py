"""Expiring: a job that waited too long is not run."""

from __future__ import annotations

from datetime import timedelta

from propolis.core.job import Done, Retried, State
from propolis.core.protocols import Engine, Rule, RuleKind, Scope
from propolis.core.transitions import Retention
from propolis.testing.clock import FakeClock
from propolis.testing.engines.steps import A_MOMENT, HOUR, info_of, order, put_one, settle_one, take, take_one

MINUTE = timedelta(minutes=1)


class ExpiringPromise:
    async def test_a_job_that_has_expired_ends_instead_of_being_leased(
        self, engine: Engine, clock: FakeClock, retention: Retention
    ) -> None:
        """T11, I2."""
        job = await put_one(engine, expires_in_ms=60_000)
        clock.advance(MINUTE)

        assert await take(engine) == []

        info = await info_of(engine, job.id)
        assert (info.state, info.reason) == (State.DEAD, "expired")
        assert (info.attempts, info.failures, info.crashes) == (0, 0, 0)
        assert (info.ended_at, info.keep_until) == (clock.now, clock.now + retention.dead_for)

    async def test_a_job_that_has_expired_ends_in_a_sweep(self, engine: Engine, clock: FakeClock) -> None:
        """T11."""
        job = await put_one(engine, expires_at=clock.now + MINUTE)
        clock.advance(MINUTE)

        assert (await engine.sweep()).expired == 1

        info = await info_of(engine, job.id)
        assert (info.state, info.reason) == (State.DEAD, "expired")
        assert (await engine.sweep()).expired == 0

    async def test_a_job_is_not_expired_before_its_time(self, engine: Engine, clock: FakeClock) -> None:
        """T11, I2."""
        job = await put_one(engine, expires_in_ms=60_000)
        clock.advance(MINUTE - A_MOMENT)

        assert (await engine.sweep()).expired == 0
        assert await order(engine) == [job.id]

    async def test_the_earlier_of_two_expiries_counts(self, engine: Engine, clock: FakeClock) -> None:
        """T11."""
        one = await put_one(engine, expires_in_ms=60_000, expires_at=clock.now + HOUR)
        two = await put_one(engine, expires_in_ms=3_600_000, expires_at=clock.now + MINUTE)

        clock.advance(MINUTE)
        await engine.sweep()

        assert [(await info_of(engine, job.id)).reason for job in (one, two)] == ["expired", "expired"]

    async def test_expired_jobs_do_not_stand_in_the_way(self, engine: Engine, clock: FakeClock) -> None:
        """T2, T11."""
        for _ in range(3):
            await put_one(engine, expires_in_ms=60_000)
        good = await put_one(engine)
        clock.advance(MINUTE)

        assert (await take_one(engine)).id == good.id

    async def test_a_job_may_expire_before_it_is_due(self, engine: Engine, clock: FakeClock) -> None:
        """T11."""
        job = await put_one(engine, delay_ms=3_600_000, expires_in_ms=60_000)
        clock.advance(MINUTE)

        assert (await engine.sweep()).expired == 1
        assert (await info_of(engine, job.id)).reason == "expired"

    async def test_a_running_job_does_not_expire(self, engine: Engine, clock: FakeClock) -> None:
        """T4, T11."""
        job = await put_one(engine, expires_in_ms=60_000)
        lease = await take_one(engine, span=HOUR)
        clock.advance(MINUTE * 2)

        assert (await engine.sweep()).expired == 0

        await settle_one(engine, lease, Done(keep=HOUR))
        assert (await info_of(engine, job.id)).state is State.DONE

    async def test_a_job_that_expired_while_it_ran_is_not_run_again(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T5, T11."""
        job = await put_one(engine, expires_in_ms=60_000)
        lease = await take_one(engine, span=HOUR)
        clock.advance(MINUTE)
        await settle_one(engine, lease, Retried())

        assert await take(engine) == []

        info = await info_of(engine, job.id)
        assert (info.state, info.reason) == (State.DEAD, "expired")
        assert (info.attempts, info.failures) == (1, 1)

    async def test_a_job_expires_in_a_paused_queue_too(self, engine: Engine, clock: FakeClock) -> None:
        """T11."""
        await engine.add_rule(Rule(RuleKind.PAUSE, Scope.QUEUE, "default"))
        job = await put_one(engine, expires_in_ms=60_000)
        clock.advance(MINUTE)

        assert (await engine.sweep()).expired == 1
        assert (await info_of(engine, job.id)).reason == "expired"

    async def test_a_sweep_expires_up_to_its_limit(self, engine: Engine, clock: FakeClock) -> None:
        """T11."""
        for _ in range(3):
            await put_one(engine, expires_in_ms=60_000)
        clock.advance(MINUTE)

        assert [(await engine.sweep(limit=2)).expired for _ in range(3)] == [2, 1, 0]

    async def test_jobs_that_expire_in_one_sweep_end_in_the_order_of_their_puts(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T11, I16."""
        later = await put_one(engine, expires_in_ms=10_000)
        sooner = await put_one(engine, expires_in_ms=5_000)
        clock.advance(MINUTE)

        assert (await engine.sweep()).ended == (later.id, sooner.id)
