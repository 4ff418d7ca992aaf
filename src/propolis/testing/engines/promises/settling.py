"""Settling: how an attempt ended is recorded once, with all that follows."""

from __future__ import annotations

from datetime import timedelta

import pytest
from msgspec.structs import replace

from propolis.core import wire
from propolis.core.job import Broken, Dead, Done, Error, Outcome, Released, Retried, Snoozed, State
from propolis.core.protocols import Counts, Engine
from propolis.core.transitions import Retention
from propolis.testing.clock import FakeClock
from propolis.testing.engines.promises.endings import MORTAL, Way, every_ending, every_outcome
from propolis.testing.engines.samples import SPAN
from propolis.testing.engines.steps import (
    A_MOMENT,
    HOUR,
    a_cancelled_job,
    a_done_job,
    counts,
    info_of,
    order,
    put_one,
    put_some,
    settle_one,
    take,
    take_one,
)

OOPS = Error(type="ValueError", message="oops", traceback="line 1")


class SettlingPromise:
    async def test_a_done_job_is_forgotten_at_once_unless_it_is_to_be_kept(self, engine: Engine) -> None:
        """T4, S0.25, S1.5."""
        plain, zero = await put_some(engine, 2)
        first, second = await take(engine)

        lost = await engine.settle([(first, Done(result=b"1")), (second, Done(keep=timedelta(0)))])

        assert lost == []
        assert await engine.get(plain) is None
        assert await engine.get(zero) is None
        assert (await counts(engine)).total == 0

    async def test_a_done_job_that_is_kept_has_its_result_and_its_times(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T4, S0.4, S0.25."""
        job = await put_one(engine, "hello")
        lease = await take_one(engine)
        clock.advance("2s")

        await settle_one(engine, lease, Done(result=b'{"a": 1}', keep=HOUR))

        info = await info_of(engine, job.id)
        assert (info.state, info.result, info.reason) == (State.DONE, b'{"a": 1}', None)
        assert (info.attempts, info.failures, info.crashes) == (1, 0, 0)
        assert (info.ended_at, info.keep_until) == (clock.now, clock.now + HOUR)
        assert info.body == wire.encode(job)

    async def test_a_retried_job_is_the_same_job_with_one_failure_more(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T5, S0.30, S1.4: its id is stable, and there is no moment without it."""
        job = await put_one(engine)
        lease = await take_one(engine)

        await settle_one(engine, lease, Retried(delay=timedelta(seconds=3), error=OOPS))

        info = await info_of(engine, job.id)
        assert (info.state, info.due_at) == (State.READY, clock.now + timedelta(seconds=3))
        assert (info.attempts, info.failures, info.crashes) == (1, 1, 0)
        clock.advance("3s")
        again = await take_one(engine)
        assert (again.id, again.body) == (lease.id, lease.body)
        assert (again.attempt, again.failures) == (2, 1)

    async def test_a_job_retried_on_another_queue_belongs_to_that_queue(self, engine: Engine) -> None:
        """T5, I8."""
        job = await put_one(engine)
        await settle_one(engine, await take_one(engine), Retried(queue="slow"))

        assert (await info_of(engine, job.id)).queue == "slow"
        assert (await counts(engine, "slow")).ready == 1
        lease = await take_one(engine, "slow")
        assert (lease.id, lease.queue, lease.attempt) == (job.id, "slow", 2)

    async def test_a_job_retried_on_its_own_queue_has_not_moved(self, engine: Engine) -> None:
        """T5, I8."""
        await put_one(engine)
        await settle_one(engine, await take_one(engine), Retried(queue="default"))

        assert await counts(engine) == Counts(ready=1, put=1)

    async def test_a_dead_job_is_kept_with_its_reason_and_error(
        self, engine: Engine, clock: FakeClock, retention: Retention
    ) -> None:
        """T6, S0.26, S1.4, S1.8, S4.11."""
        job = await put_one(engine, "hello")

        await settle_one(engine, await take_one(engine), Dead(reason="timeout", error=OOPS))

        info = await info_of(engine, job.id)
        assert (info.state, info.reason, info.error) == (State.DEAD, "timeout", OOPS)
        assert (info.attempts, info.failures, info.crashes) == (1, 1, 0)
        assert (info.ended_at, info.keep_until) == (clock.now, clock.now + retention.dead_for)
        assert info.body == wire.encode(job)
        assert await take(engine) == []

    async def test_a_dead_job_may_be_kept_for_its_own_time_or_not_at_all(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T6, S0.26."""
        kept, gone = await put_some(engine, 2)
        first, second = await take(engine)

        await engine.settle([(first, Dead(keep=HOUR)), (second, Dead(keep=timedelta(0)))])

        assert (await info_of(engine, kept)).keep_until == clock.now + HOUR
        assert await engine.get(gone) is None

    @pytest.mark.parametrize(
        "outcome", [Snoozed(timedelta(0)), Snoozed(HOUR), Released()], ids=["snooze", "delay", "release"]
    )
    async def test_a_job_that_is_given_back_keeps_its_counters(
        self, engine: Engine, clock: FakeClock, outcome: Outcome
    ) -> None:
        """T7, I6, S2.16."""
        job = await put_one(engine)
        await settle_one(engine, await take_one(engine), Retried())

        await settle_one(engine, await take_one(engine), outcome)

        info = await info_of(engine, job.id)
        assert info.state is State.READY
        assert (info.attempts, info.failures, info.crashes) == (1, 1, 0)
        clock.advance(HOUR)
        assert (await take_one(engine)).attempt == 2

    async def test_one_settle_records_many_outcomes(self, engine: Engine) -> None:
        """T4, T5, T6, T7, T12, S1.4."""
        done, retried, dead, released, broken = await put_some(engine, 5)
        outcomes: list[Outcome] = [Done(keep=HOUR), Retried(), Dead(), Released(), Broken(OOPS)]

        lost = await engine.settle(list(zip(await take(engine), outcomes, strict=True)))

        assert lost == []
        states = [(await info_of(engine, name)).state for name in (done, dead, broken)]
        assert states == [State.DONE, State.DEAD, State.DEAD]
        assert await order(engine) == [released, retried]

    async def test_settling_nothing_is_fine(self, engine: Engine) -> None:
        """T4."""
        assert await engine.settle([]) == []

    @every_outcome
    async def test_a_second_settle_of_a_lease_changes_nothing(self, engine: Engine, outcome: Outcome) -> None:
        """T4, T5, T6, T7, T12, I5, I10, S1.5, S4.9: at most one accepted settle for each fence."""
        job = await put_one(engine)
        lease = await take_one(engine)
        await settle_one(engine, lease, Done(result=b"1", keep=HOUR))
        before = await info_of(engine, job.id)

        assert await engine.settle([(lease, outcome)]) == [lease]

        assert await info_of(engine, job.id) == before
        assert (await counts(engine)).total == 1

    @every_outcome
    async def test_a_lease_given_twice_to_one_settle_is_lost_the_second_time(
        self, engine: Engine, outcome: Outcome
    ) -> None:
        """I5."""
        job = await put_one(engine)
        lease = await take_one(engine)

        assert await engine.settle([(lease, Dead(reason="first")), (lease, outcome)]) == [lease]

        assert (await info_of(engine, job.id)).reason == "first"
        assert (await counts(engine)).total == 1

    @pytest.mark.parametrize("keep", [None, HOUR], ids=["forgotten", "kept"])
    async def test_a_lease_given_twice_takes_no_other_of_its_call_along(
        self, engine: Engine, keep: timedelta | None
    ) -> None:
        """I5, I8: jobs that were leased together end one by one."""
        _, other = await put_some(engine, 2)
        first, second = await take(engine)
        done = Done(keep=keep)

        assert await engine.settle([(first, done), (first, done)]) == [first]

        assert (await info_of(engine, other)).state is State.RUNNING
        assert (await counts(engine)).total == (1 if keep is None else 2)
        assert await engine.settle([(second, Done())]) == []

    async def test_lost_leases_are_named_in_the_order_of_the_call_and_do_not_stop_the_others(
        self, engine: Engine
    ) -> None:
        """I5, S1.6."""
        _, kept, _ = await put_some(engine, 3)
        first, second, third = await take(engine)
        await engine.settle([(first, Done()), (third, Done())])

        lost = await engine.settle([(third, Done()), (second, Done(keep=HOUR)), (first, Done())])

        assert lost == [third, first]
        assert (await info_of(engine, kept)).state is State.DONE

    @every_outcome
    async def test_a_lease_that_nobody_gave_cannot_be_settled(self, engine: Engine, outcome: Outcome) -> None:
        """I5, S4.6."""
        job = await put_one(engine)
        lease = await take_one(engine)
        unknown, next_one = replace(lease, id="unknown"), replace(lease, fence=lease.fence + 1)

        assert await engine.settle([(unknown, outcome), (next_one, outcome)]) == [unknown, next_one]

        assert (await info_of(engine, job.id)).state is State.RUNNING

    async def test_a_lease_that_has_ended_can_be_settled_until_somebody_reaps_it(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T4, I5, S1.15."""
        job = await put_one(engine)
        lease = await take_one(engine)
        clock.advance(SPAN * 2)

        await settle_one(engine, lease, Done(keep=HOUR))

        info = await info_of(engine, job.id)
        assert (info.state, info.crashes) == (State.DONE, 0)
        assert (await engine.sweep()).reaped == 0

    @every_ending
    async def test_an_end_never_changes(self, engine: Engine, clock: FakeClock, ending: Way) -> None:
        """I10: not by time, not by a sweep, not by an operator who comes late."""
        job = await put_one(engine, **MORTAL)
        await ending.go(engine, clock, job.id)
        before = await info_of(engine, job.id)

        clock.advance(HOUR - A_MOMENT)
        await engine.sweep()

        assert await engine.cancel([job.id]) == [False]
        assert not await engine.reschedule(job.id, clock.now)
        assert await info_of(engine, job.id) == before
        assert (before.state, before.reason) == (ending.state, ending.reason)

    async def test_an_archived_job_keeps_its_id_and_payload_whether_it_ran_or_not(
        self, engine: Engine
    ) -> None:
        """T4, T9, S0.4: and archiving it again is refused."""
        ran = await a_done_job(engine)
        never_ran = await a_cancelled_job(engine)

        assert (await info_of(engine, ran.id)).body == wire.encode(ran)
        assert (await info_of(engine, never_ran.id)).body == wire.encode(never_ran)
        assert (await info_of(engine, never_ran.id)).attempts == 0
        assert await engine.cancel([ran.id, never_ran.id]) == [False, False]
