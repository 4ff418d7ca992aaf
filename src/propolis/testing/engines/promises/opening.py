"""Opening: an outcome opens batches in the step that ends the lease, and its emissions may be members."""

from __future__ import annotations

from propolis.core.batch import BatchState
from propolis.core.ids import derive_id
from propolis.core.job import Dead, Done, State
from propolis.core.protocols import Engine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.engines.steps import (
    a_batch,
    a_batch_of,
    called_back,
    end_next,
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


class OpeningPromise:
    async def test_a_done_job_opens_a_batch_for_what_it_emits(self, engine: Engine) -> None:
        """T4, B1, I11."""
        await put_one(engine)
        batch = a_batch(note="of a job")
        emit = tuple(members_of(batch, 2))

        await settle_one(engine, await take_one(engine), Done(emit=emit, opens=(batch,)))

        now = await status(engine, batch.id)
        assert (now.state, now.total, now.enqueued, now.note) == (BatchState.OPEN, 2, 2, "of a job")
        assert [member.id for member in await engine.members(batch.id)] == [job.id for job in emit]
        assert await engine.seal(batch.id)
        await end_next(engine, Done(), Done())
        assert await called_back(engine) == ["on_succeeded", "on_finished"]

    async def test_a_job_may_open_batches_and_emit_nothing(self, engine: Engine) -> None:
        """T4: it need not be kept, nor be special in any other way."""
        await put_one(engine)
        one, two = a_batch(), a_batch()

        await settle_one(engine, await take_one(engine), Done(opens=(one, two)))

        assert {batch.id: batch.sealed for batch in await engine.batches()} == {one.id: False, two.id: False}
        await engine.put(members_of(one, 1))
        assert (await status(engine, one.id)).total == 1

    async def test_each_of_a_large_bundle_opens_its_batch(self, engine: Engine) -> None:
        """T4: also where jobs that were leased together end together."""
        await put_some(engine, 30)
        batches = [a_batch() for _ in range(30)]
        ends = [Done(opens=(batch,)) for batch in batches]

        assert await engine.settle(list(zip(await take(engine), ends, strict=True))) == []

        assert {batch.id for batch in await engine.batches()} == {batch.id for batch in batches}

    async def test_a_dead_job_opens_a_batch_for_what_it_emits(self, engine: Engine) -> None:
        """T6, B1."""
        job = await put_one(engine)
        batch = a_batch()

        await settle_one(
            engine, await take_one(engine), Dead("bad", emit=tuple(members_of(batch, 1)), opens=(batch,))
        )

        assert (await info_of(engine, job.id)).state is State.DEAD
        assert (await status(engine, batch.id)).total == 1

    async def test_an_exchange_opens_a_batch_before_it_leases_a_member(self, engine: Engine) -> None:
        """T2, T4."""
        await put_one(engine)
        lease, batch = await take_one(engine), a_batch()
        [member] = members_of(batch, 1)

        swap = await engine.exchange(
            [(lease, Done(emit=(member,), opens=(batch,)))], {"default": 1}, span=SPAN, holder=HOLDER
        )

        assert [(lease.id, lease.batch) for lease in swap.leases] == [(member.id, batch.id)]
        assert (await status(engine, batch.id)).running == 1

    async def test_what_follows_in_the_same_call_finds_the_batch(self, engine: Engine) -> None:
        """I16."""
        await engine.put([a_job("opens"), a_job("plain"), a_job("emits")])
        opens, plain, emits = await take(engine)
        batch = a_batch()
        outcomes = [
            (opens, Done(opens=(batch,))),
            (plain, Done()),
            (emits, Done(emit=tuple(members_of(batch, 1)))),
        ]

        assert await engine.settle(outcomes) == []
        assert (await status(engine, batch.id)).total == 1

    async def test_a_batch_that_is_there_stays_as_it_is(self, engine: Engine) -> None:
        """T4, I11: as when it is opened once more by a put."""
        batch = await a_batch_of(engine, 1)
        await put_one(engine, queue="other")
        more = a_job(batch=batch.id, member=1)
        other = a_batch(id=batch.id, note="another", on_finished=None)

        lease = await take_one(engine, "other")
        await settle_one(engine, lease, Done(emit=(more,), opens=(other, other)))

        now = await status(engine, batch.id)
        assert (now.sealed, now.total, now.note) == (True, 2, "")
        await end_next(engine, Done(), Done())
        assert await called_back(engine) == ["on_succeeded", "on_finished"]

    async def test_a_lost_lease_opens_nothing(self, engine: Engine, clock: FakeClock) -> None:
        """T4, T6, I5."""
        await put_one(engine)
        zombie = await take_one(engine)
        await lose_leases(engine, clock)
        batch = a_batch()

        for outcome in (Done(opens=(batch,)), Dead(emit=tuple(members_of(batch, 1)), opens=(batch,))):
            assert await engine.settle([(zombie, outcome)]) == [zombie]

        assert await engine.batches() == []

    async def test_a_job_that_runs_twice_opens_one_batch(self, engine: Engine, clock: FakeClock) -> None:
        """T4, T8, I1, I5, I11: its worker was taken for dead, its settle is repeated, and it is replayed."""
        job = await put_one(engine)
        batch = a_batch(id=derive_id(job.id, "batch"))
        member = a_job(id=derive_id(job.id, "member"), chosen=True, queue="members", batch=batch.id)
        ends = Dead(emit=(member,), opens=(batch,))
        zombie = await take_one(engine)
        await lose_leases(engine, clock)
        lease = await take_one(engine)

        await settle_one(engine, lease, ends)
        assert await engine.settle([(lease, ends), (zombie, ends)]) == [lease, zombie]
        await engine.seal(batch.id)
        await settle_one(engine, await take_one(engine, "members"), Done())
        before = await status(engine, batch.id)
        assert await engine.replay([job.id]) == [True]
        await settle_one(engine, await take_one(engine), ends)

        assert [found.id for found in await engine.batches()] == [batch.id]
        assert await status(engine, batch.id) == before
        assert await take(engine, "members") == []
        assert await called_back(engine) == ["on_succeeded", "on_finished"]

    async def test_a_member_opens_a_batch_inside_of_its_own(self, engine: Engine) -> None:
        """T4, B1, I11: which is sealed, and waits for it, also if the member was the last."""
        outer = await a_batch_of(engine, 1)
        inner = a_batch(parent=outer.id, member=1, on_finished=None, on_succeeded=None)
        emit = tuple(members_of(inner, 1, queue="inner"))

        await settle_one(engine, await take_one(engine), Done(emit=emit, opens=(inner,)))

        now = await status(engine, outer.id)
        assert (now.total, now.done, now.running) == (2, 1, 1)
        assert await called_back(engine) == []
        await engine.seal(inner.id)
        await settle_one(engine, await take_one(engine, "inner"), Done())
        assert await called_back(engine) == ["on_succeeded", "on_finished"]

    async def test_a_batch_whose_parent_is_over_stands_alone(self, engine: Engine) -> None:
        """T4, B1, I11: it counts neither in one that has finished nor in one that is gone."""
        outer = await a_batch_of(engine, 1)
        await end_next(engine, Done())
        before = await status(engine, outer.id)
        late, orphan = a_batch(parent=outer.id, member=1), a_batch(parent="gone", member=1)
        await put_one(engine)

        await settle_one(engine, await take_one(engine), Done(opens=(late, orphan)))

        assert (await status(engine, late.id)).parent == outer.id
        assert [await engine.seal(batch.id) for batch in (late, orphan)] == [True, True]
        assert await status(engine, outer.id) == before
        assert [member.member for member in await engine.members(outer.id)] == [0]
        assert await order(engine) == []
