"""Cancelling: a waiting job ends at once, and a running one is asked to stop."""

from __future__ import annotations

from datetime import timedelta

import pytest

from propolis.core.job import (
    Broken,
    Cancelled,
    Dead,
    Done,
    Error,
    Lease,
    Outcome,
    Released,
    Retried,
    Snoozed,
    State,
)
from propolis.core.protocols import Engine
from propolis.core.transitions import Retention
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN
from propolis.testing.engines.steps import (
    HOUR,
    a_cancelled_job,
    a_dead_job,
    a_done_job,
    counts,
    info_of,
    lose_leases,
    put_one,
    put_some,
    settle_one,
    take,
    take_one,
)

STOPPED = Error("Stopped", "on request")


async def asked_to_stop(engine: Engine) -> Lease:
    """A running job that somebody wants stopped."""
    job = await put_one(engine)
    lease = await take_one(engine)
    assert await engine.cancel([job.id]) == [True]
    return lease


class CancellingPromise:
    @pytest.mark.parametrize("delay_ms", [0, 60_000], ids=["ready", "scheduled"])
    async def test_a_waiting_job_is_cancelled_at_once_and_for_good(
        self, engine: Engine, clock: FakeClock, retention: Retention, delay_ms: int
    ) -> None:
        """T9, I7."""
        job = await put_one(engine, delay_ms=delay_ms)

        assert await engine.cancel([job.id]) == [True]

        info = await info_of(engine, job.id)
        assert (info.state, info.reason, info.attempts) == (State.CANCELLED, "cancelled", 0)
        assert (info.ended_at, info.keep_until) == (clock.now, clock.now + retention.cancelled_for)
        clock.advance(HOUR)
        await engine.sweep()
        assert await take(engine) == []
        assert (await counts(engine)).cancelled == 1

    async def test_a_running_job_is_asked_to_stop_and_runs_on(self, engine: Engine) -> None:
        """T3, T9."""
        lease = await asked_to_stop(engine)

        info = await info_of(engine, lease.id)

        assert (info.state, info.cancel_requested, info.fence) == (State.RUNNING, True, lease.fence)
        [renewal] = await engine.renew([lease], span=SPAN)
        assert renewal.cancel_requested

    async def test_a_job_that_stopped_when_asked_is_cancelled(
        self, engine: Engine, clock: FakeClock, retention: Retention
    ) -> None:
        """T10."""
        lease = await asked_to_stop(engine)

        await settle_one(engine, lease, Cancelled(STOPPED))

        info = await info_of(engine, lease.id)
        assert (info.state, info.reason, info.error) == (State.CANCELLED, "cancelled", STOPPED)
        assert (info.attempts, info.failures, info.crashes) == (1, 0, 0)
        assert (info.ended_at, info.keep_until) == (clock.now, clock.now + retention.cancelled_for)

    async def test_a_job_that_nobody_asked_to_stop_cannot_be_settled_as_cancelled(
        self, engine: Engine
    ) -> None:
        """T10, I5."""
        job = await put_one(engine)
        lease = await take_one(engine)

        assert await engine.settle([(lease, Cancelled())]) == [lease]

        assert (await info_of(engine, job.id)).state is State.RUNNING
        await settle_one(engine, lease, Done())

    @pytest.mark.parametrize(
        "outcome",
        [Retried(), Retried(delay=HOUR), Snoozed(timedelta(0)), Snoozed(HOUR), Released()],
        ids=["retry", "retry later", "snooze", "snooze longer", "release"],
    )
    async def test_a_job_that_was_asked_to_stop_is_cancelled_where_it_would_become_ready(
        self, engine: Engine, clock: FakeClock, outcome: Outcome
    ) -> None:
        """T5, T7, T9, I7."""
        lease = await asked_to_stop(engine)

        await settle_one(engine, lease, outcome)

        info = await info_of(engine, lease.id)
        assert (info.state, info.reason, info.ended_at) == (State.CANCELLED, "cancelled", clock.now)
        clock.advance(HOUR)
        await engine.sweep()
        assert await take(engine) == []

    async def test_a_job_that_was_asked_to_stop_is_cancelled_where_it_would_be_reaped(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T8, T9, I7."""
        lease = await asked_to_stop(engine)

        await lose_leases(engine, clock)

        info = await info_of(engine, lease.id)
        assert (info.state, info.reason, info.losses) == (State.CANCELLED, "cancelled", 1)
        assert await take(engine) == []

    @pytest.mark.parametrize(
        ("outcome", "state", "reason"),
        [
            (Done(keep=HOUR), State.DONE, None),
            (Dead(), State.DEAD, "failed"),
            (Broken(STOPPED), State.DEAD, "broken"),
        ],
        ids=["done", "dead", "broken"],
    )
    async def test_a_job_that_ended_before_it_heard_of_the_request_ended_as_it_did(
        self, engine: Engine, outcome: Outcome, state: State, reason: str | None
    ) -> None:
        """T4, T6, T9, T12."""
        lease = await asked_to_stop(engine)

        await settle_one(engine, lease, outcome)

        info = await info_of(engine, lease.id)
        assert (info.state, info.reason) == (state, reason)

    async def test_an_ended_or_unknown_job_cannot_be_cancelled(self, engine: Engine) -> None:
        """T9, I10."""
        done = await a_done_job(engine)
        dead = await a_dead_job(engine)
        cancelled = await a_cancelled_job(engine)

        answers = await engine.cancel([done.id, dead.id, cancelled.id, "unknown"])

        assert answers == [False, False, False, False]
        states = [(await info_of(engine, job.id)).state for job in (done, dead, cancelled)]
        assert states == [State.DONE, State.DEAD, State.CANCELLED]

    async def test_many_jobs_are_cancelled_in_one_call_and_answered_in_its_order(
        self, engine: Engine
    ) -> None:
        """T9."""
        running, waiting = await put_some(engine, 2)
        await take_one(engine)

        answers = await engine.cancel([waiting, "unknown", running, waiting])

        assert answers == [True, False, True, False]
        assert (await info_of(engine, waiting)).state is State.CANCELLED
        assert (await info_of(engine, running)).cancel_requested

    async def test_a_request_to_stop_is_told_in_the_history(self, engine: Engine, clock: FakeClock) -> None:
        """T9."""
        lease = await asked_to_stop(engine)

        [event] = (await info_of(engine, lease.id)).history

        assert (event.kind, event.at) == ("cancel-requested", clock.now)
        assert (event.attempt, event.fence) == (lease.attempt, lease.fence)

    async def test_a_cancelled_job_keeps_others_from_nothing(self, engine: Engine) -> None:
        """T9, I8."""
        first, second, third = await put_some(engine, 3)
        await engine.cancel([first, second])

        leases = await engine.lease({"default": 1}, span=SPAN, holder=HOLDER)

        assert [lease.id for lease in leases] == [third]
