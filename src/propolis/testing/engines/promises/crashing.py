"""Crashing: a run whose process was seen to die counts, but not for ever, and not for what others did."""

from __future__ import annotations

from datetime import timedelta

import pytest

from propolis.core.envelope import MAX_CRASHES
from propolis.core.job import Crashed, Error, Event, Retried, State
from propolis.core.protocols import Engine
from propolis.core.transitions import MAX_LOSSES, Retention
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER
from propolis.testing.engines.steps import a_batch_of as batch_of
from propolis.testing.engines.steps import called_back, info_of, order, put_one, settle_one, take, take_one

SEGFAULT = Error("Crashed", "killed by SIGSEGV")


class CrashingPromise:
    async def test_a_job_that_took_its_process_with_it_goes_to_the_front(self, engine: Engine) -> None:
        """T8b, I15: one crash more, and neither a failure nor a loss."""
        job, behind = await put_one(engine), await put_one(engine)

        await settle_one(engine, await take_one(engine), Crashed(SEGFAULT))

        info = await info_of(engine, job.id)
        assert (info.state, info.attempts, info.failures) == (State.READY, 1, 0)
        assert (info.losses, info.crashes, info.error) == (0, 1, SEGFAULT)
        again = await take_one(engine)
        assert (again.id, again.attempt, again.crashes, again.is_suspect) == (job.id, 2, 1, True)
        assert await order(engine) == [behind.id]

    @pytest.mark.parametrize("limit", [1, MAX_CRASHES])
    async def test_a_job_that_crashes_too_often_is_dead(
        self, engine: Engine, clock: FakeClock, retention: Retention, limit: int
    ) -> None:
        """T8b, I6, S4.4."""
        job = await put_one(engine, max_crashes=limit)
        for _ in range(limit):
            assert (await info_of(engine, job.id)).state is State.READY
            await settle_one(engine, await take_one(engine), Crashed(SEGFAULT))

        info = await info_of(engine, job.id)
        assert (info.state, info.reason, info.error) == (State.DEAD, "crashed", SEGFAULT)
        assert (info.attempts, info.failures, info.losses, info.crashes) == (limit, 0, 0, limit)
        assert (info.ended_at, info.keep_until) == (clock.now, clock.now + retention.dead_for)
        assert await take(engine) == []

    async def test_a_retry_does_not_forget_the_crashes(self, engine: Engine) -> None:
        """T5, T8b, I6."""
        job = await put_one(engine)
        await settle_one(engine, await take_one(engine), Crashed())
        await settle_one(engine, await take_one(engine), Retried())

        info = await info_of(engine, job.id)
        assert (info.failures, info.crashes) == (1, 1)

    async def test_a_crash_is_told_in_the_history(self, engine: Engine, clock: FakeClock) -> None:
        """T8b."""
        job = await put_one(engine)
        lease = await take_one(engine)
        await settle_one(engine, lease, Crashed(SEGFAULT))

        note = "Crashed: killed by SIGSEGV"
        assert (await info_of(engine, job.id)).history == (
            Event(clock.now, "crashed", attempt=1, fence=lease.fence, holder=HOLDER, note=note),
        )

    async def test_whoever_is_blameless_has_a_loss_and_no_crash(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T8b: with the pauses and the limit of a loss."""
        job = await put_one(engine, max_crashes=1)
        for losses in range(1, MAX_LOSSES):
            await settle_one(engine, await take_one(engine), Crashed(SEGFAULT, blameless=True))
            info = await info_of(engine, job.id)
            assert (info.state, info.losses, info.crashes) == (State.READY, losses, 0)
            assert (info.due_at > clock.now) is (losses > 2)
            clock.advance(max(info.due_at - clock.now, timedelta(0)))

        await settle_one(engine, await take_one(engine), Crashed(blameless=True))

        info = await info_of(engine, job.id)
        assert (info.state, info.reason, info.losses) == (State.DEAD, "lost", MAX_LOSSES)
        assert {event.kind for event in info.history} == {"lost"}

    @pytest.mark.parametrize("blameless", [False, True])
    async def test_a_job_that_was_asked_to_stop_does_not_come_back(
        self, engine: Engine, blameless: bool
    ) -> None:
        """T8b, T10."""
        job = await put_one(engine)
        lease = await take_one(engine)
        await engine.cancel([job.id])

        await settle_one(engine, lease, Crashed(blameless=blameless))

        info = await info_of(engine, job.id)
        assert (info.state, info.losses, info.crashes) == (
            State.CANCELLED,
            int(blameless),
            int(not blameless),
        )

    async def test_a_member_that_crashed_for_the_last_time_steps_its_batch(self, engine: Engine) -> None:
        """T8b, B1."""
        await batch_of(engine, 1)
        for _ in range(MAX_CRASHES):
            await settle_one(engine, await take_one(engine), Crashed())

        assert await called_back(engine) == ["on_failed", "on_finished"]
