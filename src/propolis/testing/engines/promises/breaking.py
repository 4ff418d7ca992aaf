"""Breaking: what cannot be run is set aside as it came, and the queue goes on."""

from __future__ import annotations

import pytest

from propolis.core import wire
from propolis.core.job import Broken, Done, Error, Retried, State, describe
from propolis.core.protocols import Engine
from propolis.core.transitions import Retention
from propolis.errors import BrokenPayload, NewerVersion, PayloadTooLarge, PropolisError, UnknownTask
from propolis.testing.clock import FakeClock
from propolis.testing.engines.steps import (
    A_MOMENT,
    a_dead_job,
    found,
    info_of,
    order,
    put_one,
    settle_one,
    take,
    take_one,
)

REASONS = [
    BrokenPayload("not JSON: unexpected end of input"),
    BrokenPayload("not a job: expected str, got int - at $.task"),
    NewerVersion(2, 1),
    UnknownTask("tests.gone"),
    PayloadTooLarge("the depth of the job", 100_000, 64),
]


class BreakingPromise:
    @pytest.mark.parametrize("reason", REASONS, ids=lambda reason: type(reason).__name__)
    async def test_a_broken_job_is_kept_raw_with_its_reason(
        self, engine: Engine, clock: FakeClock, retention: Retention, reason: PropolisError
    ) -> None:
        """T12, I14, S1.17."""
        job = await put_one(engine, "as it came")
        error = describe(reason)

        await settle_one(engine, await take_one(engine), Broken(error))

        info = await info_of(engine, job.id)
        assert (info.state, info.reason, info.error) == (State.DEAD, "broken", error)
        assert info.body == wire.encode(job)
        assert (info.ended_at, info.keep_until) == (clock.now, clock.now + retention.dead_for)

    async def test_a_broken_job_has_not_failed(self, engine: Engine) -> None:
        """T12, I6."""
        job = await put_one(engine)
        await settle_one(engine, await take_one(engine), Retried())

        await settle_one(engine, await take_one(engine), Broken(Error("BrokenPayload")))

        info = await info_of(engine, job.id)
        assert (info.attempts, info.failures, info.crashes) == (2, 1, 0)

    async def test_the_queue_goes_on_behind_a_broken_job(self, engine: Engine) -> None:
        """T12, S1.17."""
        await put_one(engine)
        waiting = await put_one(engine)

        await settle_one(engine, await take_one(engine), Broken(Error("BrokenPayload")))

        assert await order(engine) == [waiting.id]
        assert await take(engine) == []

    async def test_broken_jobs_are_found_by_their_reason(self, engine: Engine) -> None:
        """T12, S1.17."""
        broken = await a_dead_job(engine, Broken(Error("BrokenPayload")))
        failed = await a_dead_job(engine)

        assert await found(engine, reason="broken") == [broken.id]
        assert await found(engine, state=State.DEAD) == [broken.id, failed.id]

    async def test_a_broken_job_runs_as_it_was_once_it_is_replayed(self, engine: Engine) -> None:
        """T12, T13, I14."""
        job = await a_dead_job(engine, Broken(Error("UnknownTask")))

        assert await engine.replay([job.id]) == [True]

        lease = await take_one(engine)
        assert (lease.body, lease.attempt) == (wire.encode(job), 1)
        await settle_one(engine, lease, Done())

    async def test_a_broken_job_is_forgotten_when_its_time_is_over(
        self, engine: Engine, clock: FakeClock, retention: Retention
    ) -> None:
        """T12, T14."""
        job = await a_dead_job(engine, Broken(Error("BrokenPayload")))

        clock.advance(retention.dead_for - A_MOMENT)
        await engine.sweep()
        assert await found(engine, reason="broken") == [job.id]
        clock.advance(A_MOMENT)
        await engine.sweep()

        assert await engine.get(job.id) is None
