"""Ordering: first in, first out, except where the contract says front or back."""

from __future__ import annotations

from datetime import timedelta

from propolis.core.job import Released, Retried, Snoozed
from propolis.core.protocols import Engine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import SPAN, a_job
from propolis.testing.engines.steps import (
    a_dead_job,
    lose_leases,
    order,
    put_one,
    put_some,
    settle_one,
    take,
    take_one,
)


class OrderingPromise:
    async def test_the_first_in_is_the_first_out(self, engine: Engine) -> None:
        """T1, T2, I15, S4.20."""
        early = await put_some(engine, 3)
        late = await put_some(engine, 3)

        taken = [(await take_one(engine)).id for _ in range(4)]

        assert taken + await order(engine) == early + late

    async def test_order_is_that_of_the_puts_and_not_of_the_ids(self, engine: Engine) -> None:
        """I15."""
        await engine.put([a_job(id="c"), a_job(id="a"), a_job(id="b")])

        assert await order(engine) == ["c", "a", "b"]

    async def test_a_higher_priority_goes_first_and_within_it_the_oldest(self, engine: Engine) -> None:
        """I15."""
        for name, priority in (("a", 0), ("b", 100), ("c", -100), ("d", 5), ("e", 100), ("f", 0)):
            await put_one(engine, id=name, priority=priority)

        assert await order(engine) == ["b", "e", "d", "a", "f", "c"]

    async def test_a_retried_job_goes_to_the_back(self, engine: Engine) -> None:
        """T5, I15, S1.7."""
        first, second, third = await put_some(engine, 3)

        await settle_one(engine, await take_one(engine), Retried())

        assert await order(engine) == [second, third, first]

    async def test_a_job_retried_on_another_queue_goes_to_the_back_of_that_one(self, engine: Engine) -> None:
        """T5, I15."""
        moved = await put_one(engine)
        waiting = await put_one(engine, queue="slow")

        await settle_one(engine, await take_one(engine), Retried(queue="slow"))

        assert await order(engine, "default") == []
        assert await order(engine, "slow") == [waiting.id, moved.id]

    async def test_a_snoozed_job_without_a_delay_goes_to_the_back(self, engine: Engine) -> None:
        """T7, I15."""
        first, second = await put_some(engine, 2)

        await settle_one(engine, await take_one(engine), Snoozed(timedelta(0)))

        assert await order(engine) == [second, first]

    async def test_a_released_job_goes_to_the_front(self, engine: Engine) -> None:
        """T7, I15."""
        _, second, third = await put_some(engine, 3)
        await take_one(engine)
        released = await take_one(engine)

        await settle_one(engine, released, Released())

        assert released.id == second
        assert await order(engine) == [second, third]

    async def test_jobs_released_by_one_settle_stand_in_the_order_of_the_call(self, engine: Engine) -> None:
        """T7, I15."""
        a, b, c, d = await put_some(engine, 4)
        first, second, third = await take(engine, limit=3)

        await engine.settle([(third, Released()), (first, Released()), (second, Released())])

        assert await order(engine) == [c, a, b, d]

    async def test_the_last_released_stands_before_those_released_earlier(self, engine: Engine) -> None:
        """T7, I15."""
        a, b, c = await put_some(engine, 3)
        first, second = await take(engine, limit=2)

        await settle_one(engine, first, Released())
        await settle_one(engine, second, Released())

        assert await order(engine) == [b, a, c]

    async def test_a_lost_job_goes_to_the_front(self, engine: Engine, clock: FakeClock) -> None:
        """T8, I15, S1.12."""
        ids = await put_some(engine, 3)
        await take_one(engine)

        await lose_leases(engine, clock)

        assert await order(engine) == ids

    async def test_jobs_reaped_by_one_sweep_stand_in_the_order_of_their_leases(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T8, I15, S1.12."""
        a, b, c, d = await put_some(engine, 4)
        await take(engine, limit=2)
        clock.advance("1s")
        await take_one(engine)

        await lose_leases(engine, clock)

        assert await order(engine) == [a, b, c, d]

    async def test_the_front_is_that_of_the_jobs_own_priority(self, engine: Engine, clock: FakeClock) -> None:
        """T7, T8, I15."""
        lost, released, waiting = await put_some(engine, 3)
        _, lease = await take(engine, limit=2)
        urgent = await put_one(engine, priority=1)

        await settle_one(engine, lease, Released())
        await lose_leases(engine, clock)

        assert await order(engine) == [urgent.id, lost, released, waiting]

    async def test_the_back_is_that_of_the_jobs_own_priority(self, engine: Engine) -> None:
        """T5, I15."""
        [urgent] = await put_some(engine, 1, priority=1)
        plain = await put_some(engine, 2)

        await settle_one(engine, await take_one(engine), Retried())

        assert await order(engine) == [urgent, *plain]

    async def test_jobs_that_became_due_join_the_back_in_the_order_of_their_times(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T2, I15, S0.11, S3.29."""
        late = await put_one(engine, delay_ms=2000)
        soon = await put_one(engine, delay_ms=1000)
        waiting = await put_one(engine)

        clock.advance("2s")

        assert await order(engine) == [waiting.id, soon.id, late.id]

    async def test_jobs_that_became_due_at_one_moment_join_in_the_order_of_their_puts(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T2, I15."""
        moment = clock.now + timedelta(seconds=1)
        await engine.put([a_job(id="b", due_at=moment), a_job(id="a", due_at=moment)])
        await engine.put([a_job(id="c", delay_ms=1000)])

        clock.advance("5s")

        assert await order(engine) == ["b", "a", "c"]

    async def test_a_scheduled_job_gets_its_place_when_somebody_leases_after_its_time(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T2, I15."""
        scheduled = await put_one(engine, delay_ms=1000)
        clock.advance("1s")
        put_before_the_lease = await put_one(engine)

        first = await take_one(engine)
        put_after_the_lease = await put_one(engine)

        assert first.id == put_before_the_lease.id
        assert await order(engine) == [scheduled.id, put_after_the_lease.id]

    async def test_a_scheduled_job_gets_its_place_when_somebody_sweeps_after_its_time(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T2, I15."""
        scheduled = await put_one(engine, delay_ms=1000)
        clock.advance("1s")
        await engine.sweep()
        waiting = await put_one(engine)

        assert await order(engine) == [scheduled.id, waiting.id]

    async def test_a_due_job_of_high_priority_joins_the_back_of_that_priority(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T2, I15."""
        urgent = await put_one(engine, priority=1, delay_ms=1000)
        plain = await put_one(engine)
        urgent_before = await put_one(engine, priority=1)

        clock.advance("1s")

        assert await order(engine) == [urgent_before.id, urgent.id, plain.id]

    async def test_retries_and_snoozes_with_a_delay_join_the_back_when_they_are_due(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T5, T7, I15, S3.28: as other scheduled jobs do."""
        retried, snoozed, waiting = await put_some(engine, 3)
        first, second = await take(engine, limit=2)
        await engine.settle(
            [(first, Retried(delay=timedelta(seconds=2))), (second, Snoozed(timedelta(seconds=1)))]
        )
        later = await put_one(engine)

        clock.advance("2s")

        assert await order(engine) == [waiting, later.id, snoozed, retried]

    async def test_a_rescheduled_job_loses_its_place(self, engine: Engine, clock: FakeClock) -> None:
        """I15."""
        now, soon, waiting = await put_some(engine, 3)

        assert await engine.reschedule(soon, clock.now + timedelta(seconds=1))
        assert await engine.reschedule(now, clock.now)
        clock.advance("1s")

        assert await order(engine) == [waiting, now, soon]

    async def test_a_replayed_job_goes_to_the_back(self, engine: Engine) -> None:
        """T13, I15."""
        dead = await a_dead_job(engine)
        waiting = await put_one(engine)

        await engine.replay([dead.id])

        assert await order(engine) == [waiting.id, dead.id]

    async def test_each_queue_has_its_own_order(self, engine: Engine, clock: FakeClock) -> None:
        """I15."""
        a = await put_one(engine, queue="a", delay_ms=1000)
        b = await put_one(engine, queue="b", delay_ms=1000)
        clock.advance("1s")
        taken = await order(engine, "a")
        late = await put_one(engine, queue="b")

        assert taken == [a.id]
        assert await order(engine, "b") == [late.id, b.id]  # a lease from a gives nobody a place in b

    async def test_position_counts_those_that_go_before(self, engine: Engine) -> None:
        """I15."""
        first, second = await put_some(engine, 2)
        urgent = await put_one(engine, priority=1)
        await put_one(engine, queue="other")

        positions = [await engine.position(name) for name in (urgent.id, first, second)]

        assert positions == [0, 1, 2]

    async def test_position_follows_the_front_and_the_back(self, engine: Engine) -> None:
        """T5, T7, I15."""
        retried, released, waiting = await put_some(engine, 3)
        first, second = await take(engine, limit=2)
        await engine.settle([(first, Retried()), (second, Released())])

        positions = [await engine.position(name) for name in (released, waiting, retried)]

        assert positions == [0, 1, 2]

    async def test_only_a_job_that_is_ready_and_due_has_a_position(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """I15."""
        running = await put_one(engine)
        await take(engine, span=SPAN)
        dead = await a_dead_job(engine)
        scheduled = await put_one(engine, delay_ms=1000)

        for name in (running.id, dead.id, scheduled.id, "unknown"):
            assert await engine.position(name) is None
        clock.advance("1s")
        await engine.sweep()
        assert await engine.position(scheduled.id) == 0
