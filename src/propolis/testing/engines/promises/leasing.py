"""Leasing: a job that is leased is given to nobody else."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta

from propolis.core import wire
from propolis.core.job import Dead, Done, Lease, Released, Retried, Snoozed, State
from propolis.core.protocols import Engine, Filter, Swept, pop
from propolis.testing.clock import FakeClock
from propolis.testing.engines.promises.endings import MORTAL, Way, every_ending
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.engines.steps import (
    A_MOMENT,
    HOUR,
    a_done_job,
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


class LeasingPromise:
    async def test_a_lease_tells_its_holder_what_to_run_and_until_when(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T2, I13, I14, S0.3."""
        job = await put_one(engine, "hello", queue="mail", task="tests.send")
        put_at = clock.now
        clock.advance("1s")

        lease = await take_one(engine, "mail")

        assert (lease.id, lease.task, lease.queue, lease.batch) == (job.id, "tests.send", "mail", None)
        assert lease.body == wire.encode(job)
        assert (lease.attempt, lease.failures, lease.crashes) == (1, 0, 0)
        assert (lease.put_at, lease.until) == (put_at, clock.now + SPAN)

    async def test_a_leased_job_is_running_in_the_hands_of_its_holder(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T2, I8."""
        job = await put_one(engine)
        lease = await take_one(engine)

        info = await info_of(engine, job.id)

        assert (info.state, info.holder, info.fence) == (State.RUNNING, HOLDER, lease.fence)
        assert (info.started_at, info.lease_until) == (clock.now, clock.now + SPAN)
        assert info.attempts == 1

    async def test_a_leased_job_is_given_to_nobody_else(self, engine: Engine, clock: FakeClock) -> None:
        """T2, I2, S0.10, S2.5."""
        await put_one(engine)
        await take_one(engine)

        assert await take(engine) == []
        clock.advance(SPAN - A_MOMENT)
        await engine.sweep()
        assert await take(engine) == []

    async def test_a_job_is_in_exactly_one_place_at_each_point_of_its_life(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T1, T2, T5, T8, T4, I8, S1.3."""
        seen = []

        async def note() -> None:
            now = await counts(engine)
            seen.append((now.ready, now.scheduled, now.running, now.done))

        job = await put_one(engine, delay_ms=1000)
        await note()
        clock.advance("1s")
        await note()
        await take_one(engine)
        await note()
        await lose_leases(engine, clock)
        await note()
        await settle_one(engine, await take_one(engine), Retried(delay=timedelta(seconds=5)))
        await note()
        clock.advance("5s")
        await settle_one(engine, await take_one(engine), Done(keep=HOUR))
        await note()

        waiting, scheduled, running, done = (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)
        assert seen == [scheduled, waiting, running, waiting, scheduled, done]
        assert await found(engine) == [job.id]

    async def test_an_empty_queue_gives_an_empty_list(self, engine: Engine) -> None:
        """T2."""
        assert await take(engine, "mail") == []
        assert await engine.lease({}, span=SPAN, holder=HOLDER) == []

    async def test_looking_for_work_in_vain_leaves_nothing_behind(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T2, I8, S1.27."""
        await a_done_job(engine, keep=None)
        before = await engine.queues()

        for _ in range(3):
            assert await take(engine) == []
            assert await engine.sweep() == Swept()
            clock.advance(SPAN)

        assert await engine.queues() == before
        assert (await engine.find(Filter())).jobs == []

    async def test_each_queue_gives_at_most_what_was_wanted_from_it(self, engine: Engine) -> None:
        """T2."""
        mail = await put_some(engine, 3, queue="mail")
        sms = await put_some(engine, 3, queue="sms")

        leases = await engine.lease({"mail": 2, "sms": 1, "none": 5}, span=SPAN, holder=HOLDER)

        assert [lease.id for lease in leases] == [*mail[:2], *sms[:1]]

    async def test_queues_are_served_in_the_order_of_the_wants_up_to_the_limit(self, engine: Engine) -> None:
        """T2."""
        mail = await put_some(engine, 2, queue="mail")
        sms = await put_some(engine, 2, queue="sms")

        leases = await engine.lease({"sms": 5, "mail": 5}, span=SPAN, holder=HOLDER, limit=3)

        assert [lease.id for lease in leases] == [*sms, *mail[:1]]

    async def test_a_queue_that_nobody_wants_is_left_alone(self, engine: Engine) -> None:
        """T2."""
        await put_one(engine, queue="mail")

        assert await take(engine, "sms") == []
        assert await engine.lease({"mail": 0}, span=SPAN, holder=HOLDER) == []
        assert (await counts(engine, "mail")).ready == 1

    async def test_leases_of_one_call_end_together_and_are_distinct(self, engine: Engine) -> None:
        """T2."""
        ids = await put_some(engine, 5)

        leases = await take(engine, limit=10)

        assert [lease.id for lease in leases] == ids
        assert len({(lease.id, lease.fence) for lease in leases}) == 5
        assert len({lease.until for lease in leases}) == 1

    async def test_each_run_of_its_own_counts_as_one_more_attempt(self, engine: Engine) -> None:
        """T2, T5, I6."""
        await put_one(engine)
        attempts = []
        for _ in range(3):
            lease = await take_one(engine)
            attempts.append((lease.attempt, lease.failures))
            await settle_one(engine, lease, Retried())

        assert attempts == [(1, 0), (2, 1), (3, 2)]

    async def test_what_was_no_run_of_its_own_never_costs_an_attempt(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T2, T7, I6, S2.16: a job never dies without having been run."""
        job = await put_one(engine, delay_ms=1000)
        clock.advance(timedelta(days=30))
        for outcome in (Released(), Snoozed(timedelta(0))) * 5:
            await settle_one(engine, await take_one(engine), outcome)
            await engine.sweep()

        lease = await take_one(engine)

        assert (lease.id, lease.attempt, lease.failures, lease.crashes) == (job.id, 1, 0, 0)

    @every_ending
    async def test_an_ended_job_is_never_leased(self, engine: Engine, clock: FakeClock, ending: Way) -> None:
        """T2, I2, I10, S1.5."""
        job = await put_one(engine, **MORTAL)
        await ending.go(engine, clock, job.id)

        clock.advance(HOUR / 2)
        await engine.sweep()

        assert await take(engine) == []
        assert (await info_of(engine, job.id)).state is ending.state

    async def test_an_exchange_settles_and_then_leases(self, engine: Engine) -> None:
        """T2, T4, T5: what the settling made ready may be leased by the same call."""
        done, again, waiting = await put_some(engine, 3)
        first, second = await take(engine, limit=2)

        swap = await engine.exchange(
            [(first, Done()), (second, Retried())], {"default": 5}, span=SPAN, holder=HOLDER
        )

        assert swap.lost == []
        assert [lease.id for lease in swap.leases] == [waiting, again]
        assert await engine.get(done) is None

    async def test_an_exchange_names_the_leases_that_were_lost_and_leases_all_the_same(
        self, engine: Engine
    ) -> None:
        """T2, I5, S1.6."""
        ended = await put_one(engine)
        waiting = await put_one(engine)
        lease = await take_one(engine)
        await settle_one(engine, lease, Dead())

        swap = await engine.exchange([(lease, Done())], {"default": 5}, span=SPAN, holder=HOLDER, limit=1)

        assert swap.lost == [lease]
        assert [lease.id for lease in swap.leases] == [waiting.id]
        assert (await info_of(engine, ended.id)).state is State.DEAD

    async def test_an_exchange_of_nothing_is_a_lease(self, engine: Engine) -> None:
        """T2."""
        ids = await put_some(engine, 3)

        swap = await engine.exchange([], {"default": 2}, span=SPAN, holder=HOLDER)

        assert [lease.id for lease in swap.leases] == ids[:2]

    async def test_a_popped_job_never_comes_back_and_a_leased_one_does(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T2, T4, T8, S0.8: at most once, and at least once."""
        popped, leased = await put_some(engine, 2)

        [lease] = await pop(engine, "default")
        await take_one(engine)  # and its holder dies
        await lose_leases(engine, clock)

        assert lease.id == popped
        assert await engine.get(popped) is None
        assert await order(engine) == [leased]

    async def test_pop_takes_as_many_as_are_there(self, engine: Engine) -> None:
        """T2, T4, S0.8."""
        await engine.put([a_job("a"), a_job("b"), a_job("c")])

        popped = await pop(engine, "default", limit=2)

        assert [wire.decode_args(wire.decode(lease.body).args) for lease in popped] == [["a"], ["b"]]
        assert len(await pop(engine, "default", limit=2)) == 1
        assert await pop(engine, "default") == []

    async def test_a_caller_that_goes_away_leaves_nothing_leased_to_nobody(self, engine: Engine) -> None:
        """T7, L1: in whichever of its steps it is cancelled."""
        ids = await put_some(engine, 40)
        given: set[str] = set()

        for turns in range(40):
            asking = asyncio.ensure_future(engine.lease({"default": 1}, span=SPAN, holder=HOLDER))
            for _ in range(turns * turns):
                await asyncio.sleep(0)
            asking.cancel()
            with suppress(asyncio.CancelledError):
                given |= {lease.id for lease in await asking}

        rest: list[Lease] = []
        async with asyncio.timeout(30):
            while len(rest) < len(ids) - len(given):
                rest += await take(engine)
        assert {lease.id for lease in rest} == set(ids) - given
        assert {lease.attempt for lease in rest} <= {1}
