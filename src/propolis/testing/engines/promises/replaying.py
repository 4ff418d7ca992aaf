"""Replaying: a dead job gets a new life under its old name."""

from __future__ import annotations

from datetime import timedelta

from propolis.core import wire
from propolis.core.job import Crashed, Dead, Error, Retried, State
from propolis.core.protocols import Engine
from propolis.core.transitions import Retention
from propolis.testing.clock import FakeClock
from propolis.testing.engines.steps import (
    a_cancelled_job,
    a_dead_job,
    a_done_job,
    counts,
    info_of,
    lose_a_run,
    lose_leases,
    put_one,
    settle_one,
    take,
    take_one,
)


class ReplayingPromise:
    async def test_a_replayed_job_begins_again(self, engine: Engine, clock: FakeClock) -> None:
        """T13, I3, I14."""
        job = await put_one(engine, "hello")
        await settle_one(engine, await take_one(engine), Retried())
        await take_one(engine)
        await lose_leases(engine, clock)
        last = await take_one(engine)
        await settle_one(engine, last, Dead(error=Error("ValueError")))

        assert await engine.replay([job.id]) == [True]

        info = await info_of(engine, job.id)
        assert (info.state, info.due_at) == (State.READY, clock.now)
        assert (info.attempts, info.failures, info.crashes) == (0, 0, 0)
        assert (info.reason, info.error, info.ended_at) == (None, None, None)
        lease = await take_one(engine)
        assert (lease.attempt, lease.failures, lease.crashes) == (1, 0, 0)
        assert lease.body == wire.encode(job)
        assert lease.fence > last.fence

    async def test_only_a_dead_job_can_be_replayed(self, engine: Engine) -> None:
        """T13, I7, I10."""
        done = await a_done_job(engine)
        cancelled = await a_cancelled_job(engine)
        running = await put_one(engine)
        await take_one(engine)
        ready = await put_one(engine)

        answers = await engine.replay([done.id, cancelled.id, running.id, ready.id, "unknown"])

        assert answers == [False, False, False, False, False]
        now = await counts(engine)
        assert (now.done, now.cancelled, now.running, now.ready) == (1, 1, 1, 1)

    async def test_many_jobs_are_replayed_in_the_order_of_the_call(self, engine: Engine) -> None:
        """T13, I15."""
        first, second = await a_dead_job(engine), await a_dead_job(engine)

        assert await engine.replay([second.id, "unknown", first.id]) == [True, False, True]

        assert [lease.id for lease in await take(engine)] == [second.id, first.id]

    async def test_a_second_replay_is_refused(self, engine: Engine) -> None:
        """T13."""
        job = await a_dead_job(engine)

        assert await engine.replay([job.id, job.id]) == [True, False]
        assert await engine.replay([job.id]) == [False]
        assert len(await take(engine)) == 1

    async def test_an_expired_job_has_no_expiry_in_its_new_life(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T11, T13."""
        job = await put_one(engine, expires_in_ms=1000)
        clock.advance("1s")
        await engine.sweep()

        assert await engine.replay([job.id]) == [True]

        assert (await info_of(engine, job.id)).expires_at is None
        clock.advance("1h")
        await engine.sweep()
        assert (await take_one(engine)).id == job.id

    async def test_a_crashed_job_has_all_its_crashes_and_losses_before_it_again(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T8, T8b, T13, I6."""
        job = await put_one(engine, max_crashes=2)
        await lose_a_run(engine, clock)
        for _ in range(2):
            await settle_one(engine, await take_one(engine), Crashed())
        await engine.replay([job.id])
        assert (await info_of(engine, job.id)).losses == 0

        await settle_one(engine, await take_one(engine), Crashed())
        once = await info_of(engine, job.id)
        await settle_one(engine, await take_one(engine), Crashed())
        twice = await info_of(engine, job.id)

        assert (once.state, once.crashes) == (State.READY, 1)
        assert (twice.state, twice.crashes) == (State.DEAD, 2)

    async def test_a_replayed_job_waits_neither_for_its_old_delay_nor_for_its_old_retention(
        self, engine: Engine, clock: FakeClock, retention: Retention
    ) -> None:
        """T13, T14."""
        job = await put_one(engine, delay_ms=60_000)
        clock.advance("1m")
        await settle_one(engine, await take_one(engine), Dead(keep=timedelta(minutes=5)))
        await engine.replay([job.id])

        clock.advance(retention.dead_for * 2)
        await engine.sweep()

        assert (await take_one(engine)).id == job.id

    async def test_a_replayed_job_can_die_again(self, engine: Engine) -> None:
        """T6, T13, I8."""
        job = await a_dead_job(engine)
        await engine.replay([job.id])
        await settle_one(engine, await take_one(engine), Dead(reason="again"))

        assert (await info_of(engine, job.id)).reason == "again"
        now = await counts(engine)
        assert (now.dead, now.put, now.deleted, now.total) == (1, 1, 0, 1)

    async def test_a_replay_is_told_in_the_history(self, engine: Engine, clock: FakeClock) -> None:
        """T13."""
        job = await a_dead_job(engine)
        clock.advance("1s")
        await engine.replay([job.id])

        *_, event = (await info_of(engine, job.id)).history

        assert (event.kind, event.at) == ("replayed", clock.now)

    async def test_a_replayed_job_cannot_be_deleted(self, engine: Engine) -> None:
        """T13, T14."""
        job = await a_dead_job(engine)
        await engine.replay([job.id])

        assert await engine.delete([job.id]) == [False]
        assert (await take_one(engine)).id == job.id
