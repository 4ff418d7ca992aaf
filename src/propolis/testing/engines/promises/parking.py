"""Parking: a job whose task nobody knew waits, out of the way, for somebody who does."""

from __future__ import annotations

from datetime import timedelta

from propolis.core.job import Done, Event, Lease, State, Unknown
from propolis.core.protocols import Engine, Rule, RuleKind, Scope
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN
from propolis.testing.engines.steps import (
    counts,
    found,
    info_of,
    lose_leases,
    order,
    put_one,
    put_some,
    settle_one,
    take,
    take_one,
)

NEW = "tests.new"
OTHER = "tests.other"


async def park(engine: Engine) -> None:
    """Whatever waits in the default queue is taken by somebody who knows none of it."""
    leases = await take(engine)
    assert await engine.settle([(lease, Unknown()) for lease in leases]) == []


async def take_known(engine: Engine, *tasks: str, limit: int = 100) -> list[Lease]:
    return await engine.lease({"default": limit}, span=SPAN, holder=HOLDER, tasks=tasks)


class ParkingPromise:
    async def test_a_job_of_an_unknown_task_is_parked_and_loses_nothing(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T12b: the attempt does not count, and the history says why there will be another run."""
        job = await put_one(engine, task=NEW)
        lease = await take_one(engine)

        await settle_one(engine, lease, Unknown())

        info = await info_of(engine, job.id)
        assert (info.state, info.parked, info.attempts, info.failures) == (State.READY, True, 0, 0)
        assert info.history == (Event(clock.now, "parked", attempt=1, fence=lease.fence, holder=HOLDER),)
        now = await counts(engine)
        assert (now.parked, now.ready + now.held, now.waiting, now.total) == (1, 0, 1, 1)

    async def test_only_a_lease_that_names_the_task_takes_a_parked_job(self, engine: Engine) -> None:
        """T12b."""
        parked = await put_one(engine, task=NEW)
        await park(engine)
        plain = await put_one(engine, task=OTHER)

        assert await order(engine) == [plain.id]
        assert await take_known(engine, OTHER) == []
        [lease] = await take_known(engine, OTHER, NEW)

        assert (lease.id, lease.attempt) == (parked.id, 1)
        assert (await info_of(engine, parked.id)).parked is False
        await settle_one(engine, lease, Done())

    async def test_parked_jobs_come_in_the_order_of_their_puts_and_before_the_others(
        self, engine: Engine
    ) -> None:
        """T12b, I15: by priority, then as they were put, whoever gave them back first."""
        ids = await put_some(engine, 3, task=NEW)
        urgent = await put_one(engine, task=NEW, priority=10)
        leases = await take(engine)
        await engine.settle([(lease, Unknown()) for lease in reversed(leases)])
        plain = await put_one(engine, task=OTHER, priority=100)

        taken = [lease.id for lease in await take_known(engine, NEW)]

        assert taken == [urgent.id, *ids, plain.id]

    async def test_no_more_are_taken_than_were_wanted(self, engine: Engine) -> None:
        """T12b, T2."""
        parked = await put_some(engine, 3, task=NEW)
        await park(engine)
        await put_some(engine, 3, task=OTHER)

        assert [lease.id for lease in await take_known(engine, NEW, limit=2)] == parked[:2]
        assert [lease.id for lease in await take_known(engine, NEW, limit=1)] == parked[2:]

    async def test_a_sweep_names_the_lines_in_which_jobs_are_parked(self, engine: Engine) -> None:
        """T12b."""
        await put_some(engine, 2, task=NEW)
        await put_one(engine, task=OTHER)
        await park(engine)

        assert (await engine.sweep()).parked == (("default", NEW), ("default", OTHER))
        await take_known(engine, NEW)
        assert (await engine.sweep()).parked == (("default", OTHER),)

    async def test_a_pause_holds_for_parked_jobs_too(self, engine: Engine) -> None:
        """T12b, I2: of the queue, of the task and of a key."""
        job = await put_one(engine, task=NEW, key="k")
        await park(engine)

        for scope, name in ((Scope.QUEUE, "default"), (Scope.TASK, NEW), (Scope.KEY, "k")):
            await engine.add_rule(Rule(RuleKind.PAUSE, scope, name))
            assert await take_known(engine, NEW) == []
            await engine.remove_rule(RuleKind.PAUSE, scope, name)

        assert (await info_of(engine, job.id)).parked
        assert [lease.id for lease in await take_known(engine, NEW)] == [job.id]

    async def test_a_parked_job_expires(self, engine: Engine, clock: FakeClock) -> None:
        """T11, T12b."""
        swept, met = [await put_one(engine, task=NEW, expires_in_ms=60_000) for _ in range(2)]
        await park(engine)
        clock.advance("1m")

        assert await take_known(engine, NEW) == []
        await engine.sweep()

        infos = [await info_of(engine, job.id) for job in (swept, met)]
        assert [(info.state, info.reason, info.parked) for info in infos] == [
            (State.DEAD, "expired", False)
        ] * 2

    async def test_a_parked_job_can_be_cancelled_rescheduled_and_dropped(self, engine: Engine) -> None:
        """T9, T12b, T14."""
        cancelled, later, dropped = await put_some(engine, 3, task=NEW)
        await park(engine)

        assert await engine.cancel([cancelled]) == [True]
        assert await engine.reschedule(later, await engine.now())
        assert await order(engine) == [later]
        assert await engine.drop("default") == 2
        assert await found(engine) == [later]
        assert dropped not in await found(engine)
        assert (await engine.sweep()).parked == ()

    async def test_a_parked_job_has_no_place_in_line(self, engine: Engine) -> None:
        """T12b."""
        job = await put_one(engine, task=NEW)
        await park(engine)

        assert await engine.position(job.id) is None

    async def test_a_job_that_was_asked_to_stop_is_not_parked(self, engine: Engine) -> None:
        """T10, T12b."""
        job = await put_one(engine, task=NEW)
        lease = await take_one(engine)
        await engine.cancel([job.id])

        await settle_one(engine, lease, Unknown())

        assert (await info_of(engine, job.id)).state is State.CANCELLED

    async def test_a_parked_job_that_is_lost_in_its_run_is_an_ordinary_one_again(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T8, T12b."""
        job = await put_one(engine, task=NEW)
        await park(engine)
        await take_known(engine, NEW)
        await lose_leases(engine, clock)

        lease = await take_one(engine)
        assert (lease.id, lease.losses) == (job.id, 1)

    async def test_exchange_names_tasks_as_well(self, engine: Engine) -> None:
        """T12b."""
        job = await put_one(engine, task=NEW)
        await park(engine)

        answer = await engine.exchange(
            [], {"default": 5}, span=timedelta(seconds=5), holder=HOLDER, tasks=[NEW]
        )

        assert [lease.id for lease in answer.leases] == [job.id]
