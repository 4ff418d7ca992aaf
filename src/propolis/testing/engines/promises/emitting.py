"""Emitting: what comes next is put in the step that ends the lease."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise

from propolis.core.ids import derive_id
from propolis.core.job import Dead, Done, State
from propolis.core.protocols import Engine, Rule, RuleKind, Scope
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.engines.steps import (
    a_batch,
    a_done_job,
    called_back,
    counts,
    info_of,
    lose_leases,
    members_of,
    order,
    put_one,
    settle_one,
    status,
    take,
    take_one,
)


class EmittingPromise:
    async def test_a_done_job_puts_what_comes_next_in_the_same_step(self, engine: Engine) -> None:
        """T1, T4, I15."""
        job = await put_one(engine)
        waiting = await put_one(engine)
        one, two, elsewhere = a_job(), a_job(), a_job(queue="other")

        await settle_one(engine, await take_one(engine), Done(emit=(one, two, elsewhere)))

        assert await engine.get(job.id) is None
        assert await order(engine) == [waiting.id, one.id, two.id]
        assert await order(engine, "other") == [elsewhere.id]

    async def test_an_emission_may_be_leased_by_the_exchange_that_put_it(self, engine: Engine) -> None:
        """T2, T4."""
        await put_one(engine)
        lease = await take_one(engine)
        following = a_job()

        swap = await engine.exchange(
            [(lease, Done(emit=(following,)))], {"default": 1}, span=SPAN, holder=HOLDER
        )

        assert [lease.id for lease in swap.leases] == [following.id]

    async def test_an_emission_may_have_a_delay(self, engine: Engine, clock: FakeClock) -> None:
        """T4, I2."""
        await put_one(engine)
        following = a_job(delay_ms=1000)
        await settle_one(engine, await take_one(engine), Done(emit=(following,)))

        assert await take(engine) == []
        clock.advance("1s")
        assert await order(engine) == [following.id]

    async def test_an_emission_whose_id_is_used_is_left_out(self, engine: Engine) -> None:
        """T4, I1."""
        known = await put_one(engine, "first", queue="other")
        gone = await a_done_job(engine, keep=None, chosen=True)
        await put_one(engine)
        new = a_job()

        emit = (a_job("second", id=known.id), gone, new, new)
        await settle_one(engine, await take_one(engine), Done(emit=emit))

        assert await order(engine) == [new.id]
        assert (await info_of(engine, known.id)).queue == "other"

    async def test_an_emission_whose_key_is_held_is_left_out(self, engine: Engine) -> None:
        """T4, I12."""
        holder = await put_one(engine, unique="k", queue="other")
        await put_one(engine)
        new = a_job()

        await settle_one(engine, await take_one(engine), Done(emit=(a_job(unique="k"), new)))

        assert await order(engine) == [new.id]
        assert await order(engine, "other") == [holder.id]

    async def test_an_emission_whose_key_is_freed_later_in_the_call_is_left_out(self, engine: Engine) -> None:
        """T4, I1: what follows from a call follows in the order of its outcomes."""
        await engine.put([a_job("emits"), a_job("ends", unique="k"), a_job("plain")])
        emits, ends, plain = await take(engine)
        outcomes = [(emits, Done(emit=(a_job(unique="k"),))), (ends, Done()), (plain, Done())]

        assert await engine.settle(outcomes) == []
        assert await order(engine) == []

    async def test_an_emission_whose_key_is_freed_earlier_in_the_call_is_put(self, engine: Engine) -> None:
        """T4, I1."""
        await engine.put([a_job("plain"), a_job("ends", unique="k"), a_job("emits")])
        plain, ends, emits = await take(engine)
        again = a_job(unique="k")

        assert await engine.settle([(plain, Done()), (ends, Done()), (emits, Done(emit=(again,)))]) == []
        assert await order(engine) == [again.id]

    async def test_a_job_hands_its_own_key_on(self, engine: Engine) -> None:
        """T4, I12: its key is free in the step that ends it."""
        await put_one(engine, unique="k")
        following = a_job(unique="k")

        await settle_one(engine, await take_one(engine), Done(emit=(following,)))

        assert await order(engine) == [following.id]

    async def test_emissions_are_not_held_to_caps(self, engine: Engine) -> None:
        """T4."""
        await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 1))
        await put_one(engine)

        await settle_one(engine, await take_one(engine), Done(emit=tuple(a_job() for _ in range(5))))

        assert (await counts(engine)).ready == 5

    async def test_a_job_that_runs_twice_is_followed_once(self, engine: Engine, clock: FakeClock) -> None:
        """T4, T8, I1, I5: also when what followed has run and gone."""
        job = await put_one(engine)
        zombie = await take_one(engine)
        await lose_leases(engine, clock)
        following = a_job(id=derive_id(job.id, "next"), chosen=True, queue="next")
        await settle_one(engine, await take_one(engine), Done(emit=(following,)))
        await settle_one(engine, await take_one(engine, "next"), Done())

        assert await engine.settle([(zombie, Done(emit=(following,)))]) == [zombie]
        await engine.put([a_job(id="by-hand")])
        await settle_one(engine, await take_one(engine), Done(emit=(following,)))

        assert await take(engine, "next") == []

    async def test_a_dead_job_puts_what_comes_next_in_the_same_step(self, engine: Engine) -> None:
        """T1, T6, S0.37: what goes on whatever became of it, such as the next turn of a periodic job."""
        job = await put_one(engine, unique="k")
        following, elsewhere = a_job(unique="k"), a_job(queue="other", delay_ms=1000)

        await settle_one(engine, await take_one(engine), Dead("bad", emit=(following, elsewhere)))

        assert (await info_of(engine, job.id)).state is State.DEAD
        assert await order(engine) == [following.id]
        assert (await info_of(engine, elsewhere.id)).queue == "other"

    async def test_a_dead_job_that_is_not_kept_puts_what_comes_next(self, engine: Engine) -> None:
        """T1, T6."""
        job = await put_one(engine)
        following = a_job()

        await settle_one(engine, await take_one(engine), Dead(keep=timedelta(0), emit=(following,)))

        assert await engine.get(job.id) is None
        assert await order(engine) == [following.id]

    async def test_a_lost_lease_puts_nothing_however_it_ended(self, engine: Engine, clock: FakeClock) -> None:
        """T6, I5."""
        await put_one(engine)
        zombie = await take_one(engine)
        await lose_leases(engine, clock)

        assert await engine.settle([(zombie, Dead(emit=(a_job(queue="next"),)))]) == [zombie]

        assert await take(engine, "next") == []

    async def test_a_dead_member_may_add_members_to_its_sealed_batch(self, engine: Engine) -> None:
        """T6, B1, I11."""
        batch = a_batch()
        await engine.put_batch(batch, members_of(batch, 1))
        more = a_job(batch=batch.id, member=1)

        await settle_one(engine, await take_one(engine), Dead(emit=(more,)))

        assert await called_back(engine) == ["on_failed"]
        await settle_one(engine, await take_one(engine), Done())
        assert await called_back(engine) == ["on_failed", "on_finished"]

    async def test_a_chain_is_followed_link_by_link(self, engine: Engine) -> None:
        """T4."""
        links = [a_job(number, id=derive_id("chain", number), chosen=True) for number in range(4)]
        await engine.put(links[:1])

        for link, following in pairwise(links):
            lease = await take_one(engine)
            assert lease.id == link.id
            await settle_one(engine, lease, Done(emit=(following,)))

        assert await order(engine) == [links[-1].id]

    async def test_a_member_may_add_members_to_its_sealed_batch(self, engine: Engine) -> None:
        """T4, B1, I11: and the batch waits for them, also if the member was the last."""
        batch = a_batch()
        await engine.put_batch(batch, members_of(batch, 1))
        more = a_job(batch=batch.id, member=1)

        await settle_one(engine, await take_one(engine), Done(emit=(more,)))

        now = await status(engine, batch.id)
        assert (now.total, now.done, now.enqueued) == (2, 1, 1)
        assert await called_back(engine) == []
        await settle_one(engine, await take_one(engine), Done())
        assert await called_back(engine) == ["on_succeeded", "on_finished"]

    async def test_an_emission_into_a_batch_that_is_gone_is_a_plain_job(self, engine: Engine) -> None:
        """T4, B1, I11: also when there is a batch of that name again."""
        await put_one(engine)
        orphan = a_job(batch="b", member=1)
        await settle_one(engine, await take_one(engine), Done(emit=(orphan,)))
        lease = await take_one(engine)
        batch = a_batch(id="b")
        await engine.put_batch(batch, members_of(batch, 1))

        await settle_one(engine, lease, Done())

        assert lease.id == orphan.id
        now = await status(engine, "b")
        assert (now.total, now.done) == (1, 0)
        assert await called_back(engine) == []

    async def test_an_emission_does_not_reopen_a_finished_batch(self, engine: Engine) -> None:
        """T4, B1, I11: it is put as a plain job."""
        batch = a_batch()
        await engine.put_batch(batch, members_of(batch, 1))
        await settle_one(engine, await take_one(engine), Done())
        before = await status(engine, batch.id)
        await put_one(engine)
        late = a_job(batch=batch.id, member=1)

        await settle_one(engine, await take_one(engine), Done(emit=(late,)))

        assert await status(engine, batch.id) == before
        lease = await take_one(engine)
        await settle_one(engine, lease, Done())
        assert lease.id == late.id
        assert await status(engine, batch.id) == before
        assert await called_back(engine) == ["on_succeeded", "on_finished"]
