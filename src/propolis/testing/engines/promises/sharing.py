"""Sharing: many handles on one storage behave as one, at the same time and one after another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from propolis.core.batch import Batch
from propolis.core.job import Dead, Done, State
from propolis.core.protocols import Counts, Durability, Engine, Receipt, Renewal, Rule, RuleKind, Scope
from propolis.errors import EngineClosed, QueueFull
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import SPAN, a_job
from propolis.testing.engines.steps import (
    HOUR,
    Another,
    OpenEngine,
    a_dead_job,
    a_done_job,
    bare,
    counts,
    found,
    info_of,
    lose_leases,
    members_of,
    order,
    put_one,
    put_some,
    settle_one,
    status,
    take,
    take_one,
)

ROUNDS = 50
LARGE = 1500


class SharingPromise:
    @pytest_asyncio.fixture
    async def handles(self, another: Another) -> list[Engine]:
        """Eight handles on one storage."""
        return [await another() for _ in range(8)]

    @pytest_asyncio.fixture
    async def durable(self, open_engine: OpenEngine) -> AsyncIterator[Engine]:
        """A handle on a storage that outlives it; the test closes it."""
        engine = await open_engine().open()
        if engine.durability is Durability.MEMORY:
            await engine.close()
            pytest.skip("nothing in this engine outlives its handle, as its durability says")
        yield engine
        await engine.close()

    async def test_of_many_who_want_one_job_exactly_one_gets_it(self, handles: list[Engine]) -> None:
        """T2, I2, S0.10, S2.7."""
        for _ in range(ROUNDS):
            job = await put_one(handles[0])

            answers = await asyncio.gather(*(take(handle, limit=1) for handle in handles * 2))

            [lease] = [lease for leases in answers for lease in leases]
            assert lease.id == job.id
            await settle_one(handles[0], lease, Done())

    async def test_those_who_did_not_get_a_job_get_the_next_one_at_once(self, handles: list[Engine]) -> None:
        """T2, L1, S2.7: losing a race costs nothing."""
        ids = await put_some(handles[0], len(handles) * 4)

        answers = await asyncio.gather(*(take(handle, limit=1) for handle in handles * 4))

        leases = [lease for leases in answers for lease in leases]
        assert sorted(lease.id for lease in leases) == sorted(ids)
        assert {lease.attempt for lease in leases} == {1}

    async def test_many_workers_do_every_job_once(self, handles: list[Engine]) -> None:
        """T2, T4, I2, I8, S0.21."""
        ids = await put_some(handles[0], 200)
        done: list[str] = []

        async def work(handle: Engine) -> None:
            while leases := await take(handle, limit=7):
                assert await handle.settle([(lease, Done()) for lease in leases]) == []
                done.extend(lease.id for lease in leases)

        await asyncio.gather(*(work(handle) for handle in handles))

        assert sorted(done) == sorted(ids)
        assert (await counts(handles[0])).total == 0

    async def test_a_limit_holds_for_all_together(self, handles: list[Engine]) -> None:
        """T2, I2."""
        await handles[0].add_rule(Rule(RuleKind.LIMIT, Scope.QUEUE, "default", 3))
        await put_some(handles[0], 20)

        answers = await asyncio.gather(*(take(handle, limit=1) for handle in handles * 2))

        assert sum(len(leases) for leases in answers) == 3

    async def test_a_cap_holds_for_all_together(self, handles: list[Engine]) -> None:
        """T1."""
        await handles[0].add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 5))

        answers = await asyncio.gather(
            *(handle.put([a_job()]) for handle in handles * 2), return_exceptions=True
        )

        assert sum(isinstance(answer, QueueFull) for answer in answers) == 11
        assert (await counts(handles[0])).ready == 5

    async def test_a_queue_is_made_by_whoever_comes_first(self, handles: list[Engine]) -> None:
        """T1, S0.7."""
        await asyncio.gather(*(put_one(handle, queue="new") for handle in handles))

        assert (await counts(handles[0], "new")).ready == len(handles)

    async def test_a_queue_dropped_by_many_is_dropped_once(self, handles: list[Engine]) -> None:
        """T14, S0.7."""
        await put_some(handles[0], 5)

        gone = await asyncio.gather(*(handle.drop("default") for handle in handles))

        assert sum(gone) == 5

    async def test_one_job_comes_of_an_id_that_many_put_at_once(self, handles: list[Engine]) -> None:
        """T1, I1."""
        answers = await asyncio.gather(
            *(handle.put([a_job(id="invoice-7", chosen=True)]) for handle in handles * 2)
        )

        created = [receipt.created for [receipt] in answers]
        assert sorted(created) == [False] * 15 + [True]
        assert (await counts(handles[0])).put == 1

    async def test_one_put_comes_of_a_token_that_many_use_at_once(self, handles: list[Engine]) -> None:
        """T1, I1."""
        jobs = [a_job(), a_job()]

        await asyncio.gather(*(handle.put(jobs, token="once") for handle in handles * 2))

        assert await order(handles[0]) == [job.id for job in jobs]

    async def test_of_many_settles_of_one_lease_exactly_one_is_accepted(self, handles: list[Engine]) -> None:
        """T4, T6, I5."""
        job = await put_one(handles[0])
        lease = await take_one(handles[0])

        answers = await asyncio.gather(
            *(
                handle.settle([(lease, Done(keep=HOUR) if number % 2 else Dead())])
                for number, handle in enumerate(handles * 2)
            )
        )

        assert sum(lost == [] for lost in answers) == 1
        assert (await info_of(handles[0], job.id)).state in (State.DONE, State.DEAD)
        assert (await counts(handles[0])).total == 1

    async def test_what_one_handle_did_the_others_see(self, engine: Engine, another: Another) -> None:
        """I8, L4: no step needs the handle that did the one before."""
        other = await another()
        job = await put_one(engine)
        lease = await take_one(other)

        assert (await info_of(engine, job.id)).fence == lease.fence
        assert await engine.renew([lease], span=SPAN) == [Renewal(lease.until)]
        await engine.add_rule(Rule(RuleKind.PAUSE, Scope.QUEUE, "default"))
        await settle_one(engine, lease, Dead())
        assert await other.replay([job.id]) == [True]
        assert await take(other) == []
        await other.remove_rule(RuleKind.PAUSE, Scope.QUEUE, "default")
        assert await order(engine) == [job.id]

    async def test_opening_or_closing_a_second_time_does_nothing(self, engine: Engine) -> None:
        """S0.2."""
        await put_one(engine)

        assert await engine.open() is engine
        assert (await counts(engine)).ready == 1
        await engine.close()
        await engine.close()

    async def test_a_closed_handle_refuses(self, engine: Engine) -> None:
        """S0.2."""
        await engine.close()

        with pytest.raises(EngineClosed):
            await engine.put([a_job()])
        with pytest.raises(EngineClosed):
            await take(engine)

    async def test_jobs_outlive_the_handle_that_put_them(self, durable: Engine, another: Another) -> None:
        """T1, I8, S1.3."""
        job = await put_one(durable, "hello", priority=5)
        scheduled = await put_one(durable, delay_ms=60_000)
        dead = await a_dead_job(durable, queue="other")
        done = await a_done_job(durable, queue="other")
        names = [job.id, scheduled.id, dead.id, done.id]
        before = ([await info_of(durable, name) for name in names], await durable.queues())
        await durable.close()

        again = await another()

        assert ([await info_of(again, name) for name in names], await again.queues()) == before
        assert await order(again) == [job.id]

    async def test_a_lease_outlives_the_handle_that_took_it(
        self, durable: Engine, another: Another, clock: FakeClock
    ) -> None:
        """T2, T3, T4, I2, I5, S1.3."""
        await put_one(durable)
        lease = await take_one(durable)
        await durable.close()

        again = await another()

        assert await take(again) == []
        clock.advance("1s")
        assert await again.renew([lease], span=SPAN) == [Renewal(clock.now + SPAN)]
        await settle_one(again, lease, Done())
        assert await found(again) == []

    async def test_a_job_whose_handle_died_comes_back_with_a_greater_fence(
        self, durable: Engine, another: Another, clock: FakeClock
    ) -> None:
        """T8, I3, S1.3."""
        await put_one(durable)
        lease = await take_one(durable)
        await durable.close()

        again = await another()
        await lose_leases(again, clock)
        heir = await take_one(again)

        assert heir.fence > lease.fence
        assert await again.settle([(lease, Done())]) == [lease]

    async def test_fences_go_on_growing_after_a_restart(self, durable: Engine, another: Another) -> None:
        """I3."""
        job = await put_one(durable)
        first = await take_one(durable)
        await settle_one(durable, first, Dead())
        await durable.replay([job.id])
        await durable.close()

        second = await take_one(await another())

        assert second.fence > first.fence

    async def test_order_outlives_a_restart(
        self, durable: Engine, another: Another, clock: FakeClock
    ) -> None:
        """I15."""
        lost, *waiting = await put_some(durable, 3)
        await take_one(durable)
        await lose_leases(durable, clock)
        await durable.close()

        again = await another()
        late = await put_one(again)

        assert await order(again) == [lost, *waiting, late.id]

    async def test_what_is_known_outlives_a_restart(self, durable: Engine, another: Another) -> None:
        """I1, I12."""
        job = await a_done_job(durable, keep=None, id="invoice-7", chosen=True)
        await durable.put([a_job(id="a")], token="once")
        holder = await put_one(durable, unique="k")
        await durable.close()

        again = await another()

        assert await again.put([job]) == [Receipt("invoice-7", created=False)]
        assert await again.put([a_job(id="a")], token="once") == [Receipt("a", created=False)]
        assert await again.put([a_job(unique="k")]) == [Receipt(holder.id, created=False)]

    async def test_rules_and_batches_outlive_a_restart(self, durable: Engine, another: Another) -> None:
        """I11."""
        rule = Rule(RuleKind.LIMIT, Scope.QUEUE, "default", 1)
        batch = Batch(id="b", on_finished=a_job(queue="callbacks"))
        await durable.add_rule(rule)
        await durable.put_batch(batch, members_of(batch, 1))
        before = await status(durable, "b")
        await durable.close()

        again = await another()

        assert bare(await again.rules()) == [rule]
        assert await status(again, "b") == before
        await settle_one(again, await take_one(again), Done())
        assert (await counts(again, "callbacks")).ready == 1

    async def test_every_verb_takes_a_large_bundle(self, engine: Engine) -> None:
        """T1, T2, T3, T6, T9, T13, T14."""
        jobs = [a_job(number) for number in range(LARGE)]
        ids = [job.id for job in jobs]
        assert all(receipt.created for receipt in await engine.put(jobs))

        leases = await take(engine, limit=LARGE)
        assert [lease.id for lease in leases] == ids
        assert all(renewal.until for renewal in await engine.renew(leases, span=SPAN))
        assert await engine.settle([(lease, Dead()) for lease in leases]) == []
        assert await engine.replay(ids) == [True] * LARGE
        assert await engine.cancel(ids) == [True] * LARGE
        assert await engine.delete(ids) == [True] * LARGE

        assert (await counts(engine)) == Counts(put=LARGE, deleted=LARGE)
