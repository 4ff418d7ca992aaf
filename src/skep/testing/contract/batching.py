"""Batching: many jobs, one end, one callback."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from skep.batch import Batch, BatchState
from skep.broker import KNOWN_FOR, Engine, Receipt, Rule, RuleKind, Scope
from skep.errors import BatchSealed, QueueFull, UnknownBatch
from skep.job import Dead, Done, Job, Lease, Outcome, Retry, State
from skep.testing.clock import FakeClock
from skep.testing.contract.bundling import ACTS, Act
from skep.testing.contract.endings import MORTAL, Way, every_ending, every_return
from skep.testing.contract.steps import (
    A_MOMENT,
    CALLBACKS,
    HOUR,
    Another,
    a_batch,
    a_callback,
    called_back,
    counts,
    found,
    look,
    members_of,
    put_one,
    settle_one,
    status,
    take,
    take_one,
)
from skep.testing.make import HOLDER, SPAN, a_job

DAY = timedelta(days=1)


async def a_batch_of(engine: Engine, count: int, *, seal: bool = True) -> Batch:
    """A batch with all callbacks and this many members, put on the default queue."""
    batch = a_batch()
    await engine.put_batch(batch, members_of(batch, count), seal=seal)
    return batch


async def end_next(engine: Engine, *outcomes: Outcome) -> None:
    for outcome in outcomes:
        await settle_one(engine, await take_one(engine), outcome)


class Batching:
    def as_called(self, calls: list[str]) -> list[str]:
        """The callbacks of several batches that one call has ended: in the order of their ends.

        An engine in which these are several steps may sort them: it puts them as they come.
        """
        return calls

    async def test_a_batch_is_opened_with_its_members_in_one_step(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T1, B1."""
        batch = a_batch(note="the monthly report")
        jobs = members_of(batch, 3)

        receipts = await engine.put_batch(batch, jobs)

        assert receipts == [Receipt(job.id, created=True) for job in jobs]
        now = await status(engine, batch.id)
        assert (now.state, now.sealed, now.note) == (BatchState.IN_PROGRESS, True, "the monthly report")
        assert (now.total, now.enqueued, now.pending) == (3, 3, 3)
        assert (now.created_at, now.finished_at) == (clock.now, None)
        assert [lease.batch for lease in await take(engine)] == [batch.id] * 3

    async def test_ids_of_batches_may_look_like_anything(self, engine: Engine) -> None:
        """I11: also like what an engine may call a part of another batch."""
        ids = ["b", "b:members", "b:ended", "b:results", "b*", "{b}", "b'--", 'b"', "b\\", "ü b\n"]
        for batch in ids:
            await engine.put_batch(Batch(id=batch), [a_job(batch=batch, member=1)])
        await end_next(engine, *[Done(b"1")] * len(ids))

        for batch in ids:
            assert (await status(engine, batch)).state is BatchState.SUCCESS
            assert [member.result for member in await engine.members(batch)] == [b"1"]
        assert [found.id for found in await engine.batches()] == sorted(ids, key=str.encode)
        for batch in ids:
            assert await engine.delete_batch(batch) is True
        assert await engine.batches() == []

    async def test_a_batch_tells_how_far_its_members_are(self, engine: Engine) -> None:
        """B1."""
        batch = await a_batch_of(engine, 7)
        await end_next(engine, Done(), Dead(), Retry(), Retry(delay=HOUR))
        await take_one(engine)
        [*_, waiting] = await found(engine, batch=batch.id, state=State.READY)
        await engine.cancel([waiting])

        now = await status(engine, batch.id)

        assert (now.total, now.enqueued, now.retrying, now.running) == (7, 1, 2, 1)
        assert (now.done, now.dead, now.cancelled, now.pending) == (1, 1, 1, 4)

    async def test_the_callback_comes_exactly_when_the_last_member_ends(self, engine: Engine) -> None:
        """T4, B1, I11."""
        batch = await a_batch_of(engine, 3)

        await end_next(engine, Done(), Done())
        assert await called_back(engine) == []
        await end_next(engine, Done())

        assert await called_back(engine) == ["on_succeeded", "on_finished"]
        assert (await status(engine, batch.id)).state is BatchState.SUCCESS

    async def test_a_callback_is_an_ordinary_job_under_its_own_id(self, engine: Engine) -> None:
        """T1, B1, I11."""
        batch = await a_batch_of(engine, 1)
        await end_next(engine, Done())

        leases = await take(engine, CALLBACKS)

        assert [lease.id for lease in leases] == [
            a_callback(batch.id, "on_succeeded").id,
            a_callback(batch.id, "on_finished").id,
        ]
        assert await engine.settle([(lease, Done()) for lease in leases]) == []

    @every_ending
    async def test_a_member_ends_its_batch_however_it_ends(
        self, engine: Engine, clock: FakeClock, ending: Way
    ) -> None:
        """T4, T6, T8, T9, T10, T11, T12, B1, I11: so a batch never waits for something that has ended."""
        batch = a_batch()
        [job] = members_of(batch, 1, **MORTAL)
        await engine.put_batch(batch, [job])

        await ending.go(engine, clock, job.id)

        now = await status(engine, batch.id)
        assert (now.done, now.dead, now.cancelled) == {
            State.DONE: (1, 0, 0),
            State.DEAD: (0, 1, 0),
            State.CANCELLED: (0, 0, 1),
        }[ending.state]
        assert now.finished_at == clock.now
        succeeded = ending.state is State.DONE
        assert await called_back(engine) == ["on_succeeded" if succeeded else "on_failed", "on_finished"]

    @every_return
    async def test_a_member_that_comes_back_has_not_ended(
        self, engine: Engine, clock: FakeClock, back: Way
    ) -> None:
        """T5, T7, T8, B1, I11."""
        batch = await a_batch_of(engine, 1)
        [member] = await engine.members(batch.id)

        await back.go(engine, clock, member.id)

        now = await status(engine, batch.id)
        assert (now.total, now.enqueued + now.retrying, now.pending) == (1, 1, 1)
        assert await called_back(engine) == []

    async def test_the_first_member_that_does_not_succeed_calls_on_failed_once(self, engine: Engine) -> None:
        """T6, T9, B1, I11."""
        batch = await a_batch_of(engine, 4)

        await end_next(engine, Done())
        assert await called_back(engine) == []
        await end_next(engine, Dead())
        assert await called_back(engine) == ["on_failed"]
        await end_next(engine, Dead())
        [last] = await found(engine, batch=batch.id, state=State.READY)
        await engine.cancel([last])

        assert await called_back(engine) == ["on_failed", "on_finished"]

    async def test_on_failed_does_not_wait_for_the_seal(self, engine: Engine) -> None:
        """T6, B1."""
        batch = await a_batch_of(engine, 1, seal=False)

        await end_next(engine, Dead())

        assert await called_back(engine) == ["on_failed"]
        assert (await status(engine, batch.id)).state is BatchState.OPEN

    @pytest.mark.parametrize(
        ("outcomes", "state"),
        [
            ([Done(), Done()], BatchState.SUCCESS),
            ([Dead(), Dead()], BatchState.DEAD),
            ([Dead(), Done()], BatchState.PARTIAL_SUCCESS),
            ([Retry(), Done(), Done()], BatchState.SUCCESS),
            ([Retry(), Dead(), Done()], BatchState.PARTIAL_SUCCESS),
        ],
        ids=["all done", "all dead", "mixed", "one retried", "mixed and retried"],
    )
    async def test_the_state_of_a_finished_batch_sums_its_members_up(
        self, engine: Engine, outcomes: list[Outcome], state: BatchState
    ) -> None:
        """B1, I11."""
        batch = await a_batch_of(engine, 2)

        await end_next(engine, *outcomes)

        assert (await status(engine, batch.id)).state is state

    async def test_a_batch_without_callbacks_finishes_too(self, engine: Engine, clock: FakeClock) -> None:
        """B1."""
        batch = Batch(id="plain")
        await engine.put_batch(batch, members_of(batch, 1))

        await end_next(engine, Done())

        assert (await status(engine, "plain")).finished_at == clock.now

    async def test_a_sealed_empty_batch_finishes_at_once(self, engine: Engine, clock: FakeClock) -> None:
        """B1, I11."""
        batch = await a_batch_of(engine, 0)

        now = await status(engine, batch.id)

        assert (now.state, now.total, now.finished_at) == (BatchState.SUCCESS, 0, clock.now)
        assert await called_back(engine) == ["on_succeeded", "on_finished"]

    async def test_an_open_batch_takes_members_until_it_is_sealed(self, engine: Engine) -> None:
        """T1, B1, I11."""
        batch = await a_batch_of(engine, 1, seal=False)
        await end_next(engine, Done())
        assert (await status(engine, batch.id)).state is BatchState.OPEN
        await engine.put([a_job(batch=batch.id, member=1)])

        assert await engine.seal(batch.id) is True
        assert await called_back(engine) == []
        await end_next(engine, Done())

        assert await called_back(engine) == ["on_succeeded", "on_finished"]
        assert (await status(engine, batch.id)).total == 2

    async def test_sealing_an_open_batch_whose_members_have_all_ended_finishes_it(
        self, engine: Engine
    ) -> None:
        """B1, I11."""
        batch = await a_batch_of(engine, 2, seal=False)
        await end_next(engine, Done(), Done())
        assert await called_back(engine) == []

        assert await engine.seal(batch.id) is True

        assert await called_back(engine) == ["on_succeeded", "on_finished"]
        assert await engine.seal(batch.id) is False
        assert await called_back(engine) == ["on_succeeded", "on_finished"]

    async def test_a_sealed_batch_takes_no_members_from_outside(self, engine: Engine) -> None:
        """T1."""
        batch = await a_batch_of(engine, 1)

        with pytest.raises(BatchSealed) as raised:
            await engine.put([a_job(), a_job(batch=batch.id, member=1)])

        assert raised.value.batch == batch.id
        assert (await status(engine, batch.id)).total == 1
        assert (await counts(engine)).put == 1

    async def test_nothing_is_put_into_a_batch_that_is_not_there(self, engine: Engine) -> None:
        """T1."""
        with pytest.raises(UnknownBatch) as raised:
            await engine.put([a_job(), a_job(batch="never", member=1)])

        assert raised.value.batch == "never"
        assert await found(engine) == []

    async def test_a_batch_that_is_there_is_left_as_it_is_and_gets_the_new_members(
        self, engine: Engine
    ) -> None:
        """T1, I1."""
        batch = await a_batch_of(engine, 1, seal=False)
        more = a_job(batch=batch.id, member=1)

        other = Batch(id=batch.id, note="other")
        receipts = await engine.put_batch(other, [more], seal=False)

        assert receipts == [Receipt(more.id, created=True)]
        now = await status(engine, batch.id)
        assert (now.total, now.note) == (2, "")

    async def test_a_batch_put_again_with_its_token_is_the_same_batch(self, engine: Engine) -> None:
        """T1, I1, I11."""
        batch = a_batch()
        jobs = members_of(batch, 2)
        await engine.put_batch(batch, jobs, token="once")

        receipts = await engine.put_batch(batch, jobs, token="once")

        assert receipts == [Receipt(job.id, created=False) for job in jobs]
        assert (await status(engine, batch.id)).total == 2
        await end_next(engine, Done(), Done())
        assert await called_back(engine) == ["on_succeeded", "on_finished"]

    async def test_duplicates_are_not_counted_as_members(self, engine: Engine) -> None:
        """T1, I1, I11, I12."""
        known = await put_one(engine, queue="other")
        batch = a_batch()
        jobs = [
            a_job(id="a", batch=batch.id, member=0, unique="k"),
            a_job(id="a", batch=batch.id, member=1),
            a_job(id="b", batch=batch.id, member=2, unique="k"),
            a_job(id=known.id, batch=batch.id, member=3),
        ]

        receipts = await engine.put_batch(batch, jobs)

        assert [receipt.created for receipt in receipts] == [True, False, False, False]
        assert (await status(engine, batch.id)).total == 1
        await end_next(engine, Done())
        assert await called_back(engine) == ["on_succeeded", "on_finished"]

    async def test_a_member_that_has_gone_and_is_put_again_can_end_again(self, engine: Engine) -> None:
        """I5, I8: how often it counts is left open; that it ends, and whoever is settled with it, is not."""
        batch = a_batch()
        job = a_job(batch=batch.id)
        await engine.put_batch(batch, [job], seal=False)
        await end_next(engine, Done())
        await engine.put([job, other := a_job()])

        leases = await take(engine)
        assert await engine.settle([(lease, Done()) for lease in leases]) == []

        assert {lease.id for lease in leases} == {job.id, other.id}
        assert (await counts(engine)).total == 0

    async def test_a_batch_that_cannot_be_put_whole_is_not_put(self, engine: Engine) -> None:
        """T1."""
        await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 2))
        batch = a_batch()

        with pytest.raises(QueueFull):
            await engine.put_batch(batch, members_of(batch, 3))

        assert await engine.batch(batch.id) is None
        assert await found(engine) == []

    async def test_members_are_listed_by_their_numbers_with_what_became_of_them(self, engine: Engine) -> None:
        """B1, S0.4."""
        batch = a_batch()
        jobs = members_of(batch, 4)
        await engine.put_batch(batch, list(reversed(jobs)))
        await end_next(engine, Done(result=b"3", keep=HOUR), Dead(reason="timeout"), Done())

        members = await engine.members(batch.id)

        assert [(member.member, member.id) for member in members] == [
            (number, job.id) for number, job in enumerate(jobs)
        ]
        states = [member.state for member in members]
        assert states == [State.READY, State.DONE, State.DEAD, State.DONE]
        assert [member.reason for member in members] == [None, None, "timeout", None]
        assert members[3].result == b"3"

    async def test_members_are_listed_page_by_page(self, engine: Engine) -> None:
        """B1."""
        batch = await a_batch_of(engine, 5)

        first = await engine.members(batch.id, limit=3)
        rest = await engine.members(batch.id, limit=3, after=first[-1].member)

        assert [member.member for member in first + rest] == [0, 1, 2, 3, 4]
        assert await engine.members("unknown") == []

    async def test_batches_are_listed_page_by_page(self, engine: Engine) -> None:
        """B1."""
        for name in ("b", "c", "a"):
            await engine.put_batch(Batch(id=name), [a_job(batch=name)])

        first = await engine.batches(limit=2)
        rest = await engine.batches(limit=2, after="b")

        assert [batch.id for batch in first + rest] == ["a", "b", "c"]

    async def test_a_finished_batch_lingers_and_is_then_forgotten(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """B1."""
        batch = a_batch(linger_ms=3_600_000)
        await engine.put_batch(batch, members_of(batch, 1))
        await end_next(engine, Done())
        assert (await status(engine, batch.id)).keep_until == clock.now + HOUR

        clock.advance(HOUR - A_MOMENT)
        await engine.sweep()
        assert await engine.batch(batch.id) is not None
        clock.advance(A_MOMENT)
        await engine.sweep()

        assert await engine.batch(batch.id) is None
        assert await called_back(engine) == ["on_succeeded", "on_finished"]

    async def test_a_batch_that_does_not_linger_is_gone_when_it_finishes(self, engine: Engine) -> None:
        """B1, I11: its callbacks are put all the same."""
        batch = a_batch(linger_ms=0)
        await engine.put_batch(batch, members_of(batch, 1))

        await end_next(engine, Done())

        assert await engine.batch(batch.id) is None
        assert await called_back(engine) == ["on_succeeded", "on_finished"]

    async def test_a_batch_that_nobody_seals_is_forgotten_and_its_members_run_on(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """B1."""
        batch = a_batch(open_for_ms=3_600_000)
        await engine.put_batch(batch, members_of(batch, 1), seal=False)
        clock.advance(HOUR - A_MOMENT)
        await engine.sweep()
        assert await engine.batch(batch.id) is not None

        clock.advance(A_MOMENT)
        await engine.sweep()

        assert await engine.batch(batch.id) is None
        await end_next(engine, Done())
        assert await called_back(engine) == []

    async def test_a_sealed_batch_waits_for_its_members_for_as_long_as_they_take(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """B1, L3."""
        batch = a_batch(open_for_ms=1000, linger_ms=1000)
        await engine.put_batch(batch, members_of(batch, 1))
        clock.advance(DAY * 30)
        await engine.sweep()

        await end_next(engine, Done())

        assert (await status(engine, batch.id)).state is BatchState.SUCCESS

    async def test_a_replayed_member_runs_outside_of_its_finished_batch(self, engine: Engine) -> None:
        """T13, B1, I11: a finished batch is not reopened."""
        batch = await a_batch_of(engine, 1)
        await end_next(engine, Dead())
        before = await status(engine, batch.id)
        [member] = await engine.members(batch.id)

        assert await engine.replay([member.id]) == [True]
        await end_next(engine, Done())

        assert await status(engine, batch.id) == before
        assert await called_back(engine) == ["on_failed", "on_finished"]

    async def test_a_replayed_member_does_not_count_twice_in_a_batch_that_goes_on(
        self, engine: Engine
    ) -> None:
        """T13, B1, I11."""
        batch = await a_batch_of(engine, 2)
        await end_next(engine, Dead())
        [dead] = await found(engine, state=State.DEAD)
        await engine.replay([dead])

        await end_next(engine, Done())
        now = await status(engine, batch.id)
        assert (now.done, now.dead, now.state) == (1, 1, BatchState.PARTIAL_SUCCESS)
        await end_next(engine, Done())

        assert await status(engine, batch.id) == now
        assert await called_back(engine) == ["on_failed", "on_finished"]

    async def test_a_batch_is_deleted_with_its_waiting_members_and_without_a_callback(
        self, engine: Engine
    ) -> None:
        """T14, I8."""
        batch = await a_batch_of(engine, 4)
        running = await take_one(engine)
        await end_next(engine, Retry(delay=HOUR))

        assert await engine.delete_batch(batch.id) is True

        assert await engine.batch(batch.id) is None
        assert await found(engine) == [running.id]
        assert await take(engine) == []
        await settle_one(engine, running, Dead())
        assert await called_back(engine) == []
        now = await counts(engine)
        assert (now.total, now.put, now.deleted, now.cancelled) == (1, 4, 3, 0)

    async def test_deleting_a_batch_leaves_the_members_that_have_ended(self, engine: Engine) -> None:
        """T14."""
        batch = await a_batch_of(engine, 2)
        lease = await take_one(engine)
        await settle_one(engine, lease, Done(keep=HOUR))

        await engine.delete_batch(batch.id)

        assert await found(engine) == [lease.id]

    async def test_deleting_a_batch_that_is_not_there_is_refused(self, engine: Engine) -> None:
        """T14."""
        batch = await a_batch_of(engine, 1)
        await engine.delete_batch(batch.id)

        assert await engine.delete_batch(batch.id) is False
        assert await engine.delete_batch("unknown") is False

    async def test_a_chosen_id_that_was_removed_with_its_batch_is_known_for_a_day(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """I1."""
        batch = a_batch()
        await engine.put_batch(batch, [a_job(id="invoice-7", chosen=True, batch=batch.id)])
        clock.advance(DAY * 3)
        await engine.delete_batch(batch.id)

        clock.advance(KNOWN_FOR - A_MOMENT)
        await engine.sweep()

        assert await engine.put([a_job(id="invoice-7", chosen=True)]) == [Receipt("invoice-7", created=False)]

    async def test_a_nested_batch_is_one_member_of_its_parent(self, engine: Engine) -> None:
        """B1, I11."""
        parent = a_batch()
        await engine.put_batch(parent, members_of(parent, 1), seal=False)
        child = Batch(id="child", parent=parent.id, member=1)
        await engine.put_batch(child, members_of(child, 2))
        await engine.seal(parent.id)
        assert (await status(engine, "child")).parent == parent.id
        assert (await status(engine, parent.id)).total == 2

        await end_next(engine, Done(), Done())
        assert await called_back(engine) == []
        await end_next(engine, Done())

        now = await status(engine, parent.id)
        assert (now.state, now.done) == (BatchState.SUCCESS, 2)
        assert await called_back(engine) == ["on_succeeded", "on_finished"]
        nested = (await engine.members(parent.id))[1]
        assert (nested.member, nested.id, nested.state) == (1, "child", State.DONE)

    async def test_a_nested_batch_that_does_not_succeed_is_a_dead_member(self, engine: Engine) -> None:
        """B1, I11."""
        parent = a_batch()
        await engine.put_batch(parent, seal=False)
        child = Batch(id="child", parent=parent.id)
        await engine.put_batch(child, members_of(child, 2))
        await engine.seal(parent.id)

        await end_next(engine, Done(), Dead())

        now = await status(engine, parent.id)
        assert (now.state, now.dead) == (BatchState.DEAD, 1)
        assert await called_back(engine) == ["on_failed", "on_finished"]

    async def test_a_nested_batch_that_is_deleted_is_a_cancelled_member(self, engine: Engine) -> None:
        """B1, I11, L3: a parent never waits for something that is gone."""
        parent = a_batch()
        await engine.put_batch(parent, seal=False)
        child = Batch(id="child", parent=parent.id)
        await engine.put_batch(child, members_of(child, 2))
        await engine.seal(parent.id)

        await engine.delete_batch("child")

        now = await status(engine, parent.id)
        assert (now.cancelled, now.pending) == (1, 0)
        assert await called_back(engine) == ["on_failed", "on_finished"]

    async def test_a_nested_batch_that_is_swept_unfinished_is_a_cancelled_member(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """B1, I11, L3."""
        parent = a_batch()
        await engine.put_batch(parent, seal=False)
        child = Batch(id="child", parent=parent.id, open_for_ms=3_600_000)
        await engine.put_batch(child, members_of(child, 1), seal=False)
        await engine.seal(parent.id)

        clock.advance(HOUR)
        await engine.sweep()

        assert (await status(engine, parent.id)).cancelled == 1
        assert await called_back(engine) == ["on_failed", "on_finished"]

    async def test_ends_are_passed_up_through_all_generations(self, engine: Engine) -> None:
        """B1, I11."""
        top = a_batch()
        middle, bottom = Batch(id="middle", parent=top.id), Batch(id="bottom", parent="middle", linger_ms=0)
        await engine.put_batch(top, seal=False)
        await engine.put_batch(middle, seal=False)
        await engine.put_batch(bottom, members_of(bottom, 1))
        await engine.seal("middle")
        await engine.seal(top.id)

        await end_next(engine, Done())

        assert (await status(engine, "middle")).state is BatchState.SUCCESS
        assert await called_back(engine) == ["on_succeeded", "on_finished"]

    async def test_a_callback_may_be_a_member_of_the_batch_around_its_own(self, engine: Engine) -> None:
        """B1, I11: that does not end in between, although the inner batch was the last of its members."""
        outer = a_batch()
        await engine.put_batch(outer, seal=False)
        called = a_job(queue=CALLBACKS, batch=outer.id, member=1)
        inner = Batch(id="inner", parent=outer.id, on_finished=called)
        await engine.put_batch(inner, members_of(inner, 2), seal=True)
        await engine.seal(outer.id)

        await end_next(engine, Done(), Done())

        now = await status(engine, outer.id)
        assert (now.total, now.done, now.pending) == (2, 1, 1)
        await settle_one(engine, await take_one(engine, CALLBACKS), Done(result=b"5"))
        assert (await status(engine, outer.id)).state is BatchState.SUCCESS
        members = await engine.members(outer.id)
        assert [(each.id, each.state, each.result) for each in members] == [
            (inner.id, State.DONE, None),
            (called.id, State.DONE, b"5"),
        ]

    async def test_members_that_end_in_one_settle_call_back_once(self, engine: Engine) -> None:
        """B1, I11."""
        await a_batch_of(engine, 5)
        leases = await take(engine)

        await engine.settle([(lease, Done() if n else Dead()) for n, lease in enumerate(leases)])

        assert await called_back(engine) == ["on_failed", "on_finished"]

    async def test_members_that_end_at_once_in_many_hands_call_back_once(
        self, engine: Engine, another: Another
    ) -> None:
        """B1, I11."""
        handles = [engine, *[await another() for _ in range(3)]]
        for _ in range(3):
            await a_batch_of(engine, 16)
            leases = await take(engine)
            await asyncio.gather(
                *(
                    handles[n % 4].exchange([(lease, Done())], {"default": 1}, span=SPAN, holder=HOLDER)
                    for n, lease in enumerate(leases)
                )
            )

        assert await called_back(engine) == ["on_succeeded", "on_finished"] * 3

    async def test_a_member_of_a_batch_is_found_by_it(self, engine: Engine) -> None:
        """B1."""
        batch = await a_batch_of(engine, 2)
        await put_one(engine)
        members = await engine.members(batch.id)

        assert await found(engine, batch=batch.id) == [member.id for member in members]
        assert [(await look(engine, member.id)).member for member in members] == [0, 1]

    async def test_a_member_of_a_deleted_batch_is_no_member_of_a_new_one_of_that_name(
        self, engine: Engine
    ) -> None:
        """B1, I11: it finishes and steps nothing."""
        batch = a_batch()
        await engine.put_batch(batch, members_of(batch, 1))
        old = await take_one(engine)
        await engine.delete_batch(batch.id)
        await engine.put_batch(batch, members_of(batch, 1))

        await settle_one(engine, old, Done())

        now = await status(engine, batch.id)
        assert (now.total, now.done, now.pending) == (1, 0, 1)
        assert await called_back(engine) == []

    @every_return
    async def test_a_member_of_a_deleted_batch_may_still_come_back(
        self, engine: Engine, clock: FakeClock, back: Way
    ) -> None:
        """T5, T7, T8, B1: as a plain job."""
        batch = a_batch()
        [job] = members_of(batch, 1)
        await engine.put_batch(batch, [job])
        await settle_one(engine, await take_one(engine), Dead())
        await engine.delete_batch(batch.id)
        assert await engine.replay([job.id]) == [True]

        await back.go(engine, clock, job.id)

        await end_next(engine, Done())
        assert await called_back(engine) == ["on_failed", "on_finished"]

    async def test_a_member_may_end_on_another_queue(self, engine: Engine) -> None:
        """T5, B1, I11."""
        batch = await a_batch_of(engine, 1)
        await end_next(engine, Retry(queue="slow"))
        assert (await status(engine, batch.id)).retrying == 1

        await settle_one(engine, await take_one(engine, "slow"), Done())

        assert (await status(engine, batch.id)).state is BatchState.SUCCESS

    async def test_members_that_are_refused_are_not_counted(self, engine: Engine) -> None:
        """T1, I11."""
        batch = await a_batch_of(engine, 1, seal=False)
        await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 1))

        with pytest.raises(QueueFull):
            await engine.put([a_job(batch=batch.id, member=1)])

        assert (await status(engine, batch.id)).total == 1
        await engine.seal(batch.id)
        await end_next(engine, Done())
        assert await called_back(engine) == ["on_succeeded", "on_finished"]

    async def test_a_batch_is_deleted_with_the_members_that_a_rule_holds_back(self, engine: Engine) -> None:
        """T14, I8."""
        batch = a_batch()
        await engine.put_batch(batch, members_of(batch, 2, key="x"))
        await engine.add_rule(Rule(RuleKind.PAUSE, Scope.KEY, "x"))
        assert await take(engine) == []
        assert (await status(engine, batch.id)).enqueued == 2

        await engine.delete_batch(batch.id)

        await engine.remove_rule(RuleKind.PAUSE, Scope.KEY, "x")
        assert await take(engine) == []
        assert await found(engine) == []

    # --- members that are leased together ------------------------------------------------

    @pytest.mark.parametrize("act", ACTS.values(), ids=list(ACTS))
    async def test_what_happens_to_one_of_many_members_counts_for_it_alone(
        self, engine: Engine, act: Act
    ) -> None:
        """T3-T7, T9, T12, B1, I8: whatever the engine shares between them."""
        batch = await a_batch_of(engine, 5)
        leases = await take(engine)
        one, others = leases[2], leases[:2] + leases[3:]
        before = [await look(engine, lease.id) for lease in others]
        assert [(record.batch, record.member) for record in before] == [(batch.id, n) for n in (0, 1, 3, 4)]

        await act(engine, one)

        assert [await look(engine, lease.id) for lease in others] == before
        now = await status(engine, batch.id)
        assert (now.total, now.enqueued + now.retrying + now.running + now.ended) == (5, 5)
        assert now.running in (4, 5)
        assert await engine.settle([(lease, Done()) for lease in others]) == []
        listed = await engine.members(batch.id)
        assert [(member.member, member.id) for member in listed] == [(n, leases[n].id) for n in range(5)]
        assert [listed[n].state for n in (0, 1, 3, 4)] == [State.DONE] * 4
        now = await status(engine, batch.id)
        assert (now.finished_at is not None) == listed[2].state.terminal
        assert (now.done, now.dead) == (4 + (listed[2].state is State.DONE), listed[2].state is State.DEAD)

    @pytest.mark.parametrize("backwards", [False, True])
    async def test_members_of_several_batches_end_in_one_settle(
        self, engine: Engine, backwards: bool
    ) -> None:
        """B1, I11: each batch where the last of its own ends."""
        first, second = a_batch(), a_batch()
        for batch in (first, second):
            await engine.put_batch(batch, members_of(batch, 3), seal=False)
            await put_one(engine)
            await engine.put(members_of(batch, 6)[3:])
            await engine.seal(batch.id)
        leases = await take(engine)
        assert [lease.batch for lease in leases] == [
            of and of.id
            for of in (first,) * 3 + (None,) + (first,) * 3 + (second,) * 3 + (None,) + (second,) * 3
        ]

        if backwards:
            leases.reverse()
        assert await engine.settle([(lease, Done()) for lease in leases]) == []

        assert [(await status(engine, batch.id)).done for batch in (first, second)] == [6, 6]
        called = await found(engine, queue=CALLBACKS)
        order = [first, second] if not backwards else [second, first]
        expected = [
            a_callback(batch.id, when).id for batch in order for when in ("on_succeeded", "on_finished")
        ]
        assert self.as_called(called) == self.as_called(expected)

    @pytest.mark.parametrize("member_first", [False, True])
    async def test_what_follows_from_a_settle_is_put_in_the_order_of_its_outcomes(
        self, engine: Engine, member_first: bool
    ) -> None:
        """B1, T4, I15: a callback behind what was emitted before its last member ended."""
        emitter = await put_one(engine)
        batch = await a_batch_of(engine, 1)
        first, last = await take(engine)
        assert (first.id, last.batch) == (emitter.id, batch.id)
        emitted = a_job(id="emitted", chosen=True, queue=CALLBACKS)
        outcomes: list[tuple[Lease, Outcome]] = [(first, Done(emit=(emitted,))), (last, Done())]
        if member_first:
            outcomes.reverse()

        assert await engine.settle(outcomes) == []

        called = [a_callback(batch.id, when).id for when in ("on_succeeded", "on_finished")]
        expected = [*called, "emitted"] if member_first else ["emitted", *called]
        assert self.as_called(await found(engine, queue=CALLBACKS)) == self.as_called(expected)

    async def test_many_batches_end_in_one_settle(self, engine: Engine) -> None:
        """B1, I11."""
        batches = [await a_batch_of(engine, 1 + n % 2) for n in range(30)]
        leases = await take(engine)

        assert await engine.settle([(lease, Done()) for lease in leases]) == []

        assert {(await status(engine, batch.id)).state for batch in batches} == {BatchState.SUCCESS}
        expected = ["on_succeeded", "on_finished"] * 30
        assert self.as_called(await called_back(engine)) == self.as_called(expected)

    async def test_members_of_an_older_batch_of_that_name_count_in_none(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """B1, I11: also where they are leased together with those of the new one."""
        batch = a_batch(open_for_ms=1000)
        old = members_of(batch, 2)
        await engine.put_batch(batch, old, seal=False)
        clock.advance(timedelta(seconds=1))
        await engine.sweep()
        new = members_of(batch, 2)
        await engine.put_batch(batch, new)
        assert [member.id for member in await engine.members(batch.id)] == [job.id for job in new]

        leases = await take(engine)
        now = await status(engine, batch.id)
        assert (now.total, now.enqueued, now.running) == (2, 0, 2)
        assert await engine.settle([(lease, Done()) for lease in leases[:3]]) == []

        assert [lease.id for lease in leases] == [job.id for job in old + new]
        now = await status(engine, batch.id)
        assert (now.total, now.running, now.done) == (2, 1, 1)
        assert await engine.settle([(leases[3], Done())]) == []
        assert await called_back(engine) == ["on_succeeded", "on_finished"]

    async def test_a_batch_is_deleted_without_the_members_of_an_older_one_of_that_name(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T14: they belong to none."""
        batch = a_batch(open_for_ms=1000)
        old = members_of(batch, 2)
        await engine.put_batch(batch, old, seal=False)
        clock.advance(timedelta(seconds=1))
        await engine.sweep()
        await engine.put_batch(batch, members_of(batch, 2))

        assert await engine.delete_batch(batch.id)

        assert [lease.id for lease in await take(engine)] == [job.id for job in old]

    async def test_members_that_end_in_pieces_are_listed_by_their_numbers(self, engine: Engine) -> None:
        """B1: page by page, whatever ended together."""
        batch = await a_batch_of(engine, 9)
        leases = await take(engine)
        for piece in ((1, 3, 5), (8, 0)):
            assert await engine.settle([(leases[n], Done()) for n in piece]) == []
        kept: list[tuple[int, Outcome]] = [
            (2, Done(result=b"2", keep=HOUR)),
            (6, Done(result=b"6")),
            (4, Dead()),
        ]
        assert await engine.settle([(leases[n], outcome) for n, outcome in kept]) == []

        listed, after = [], None
        while page := await engine.members(batch.id, limit=2, after=after):
            listed += page
            after = page[-1].member

        assert [member.id for member in listed] == [lease.id for lease in leases]
        assert [member.state for member in listed] == [
            State.RUNNING if n == 7 else State.DEAD if n == 4 else State.DONE for n in range(9)
        ]
        assert [member.result for member in listed] == [
            str(n).encode() if n in (2, 6) else None for n in range(9)
        ]

    async def test_members_that_share_their_numbers_are_all_listed(self, engine: Engine) -> None:
        """B1: several may add to a batch without knowing of one another."""
        batch = a_batch()
        jobs = members_of(batch, 4) + members_of(batch, 6)
        await engine.put_batch(batch, jobs[:4], seal=False)
        await engine.put(jobs[4:])
        expected = sorted((job.member, job.id) for job in jobs)

        everything = await engine.members(batch.id)
        some = await engine.members(batch.id, limit=3)
        rest = await engine.members(batch.id, after=1)

        assert [(member.member, member.id) for member in everything] == expected
        assert [(member.member, member.id) for member in some] == expected[:3]
        assert [(member.member, member.id) for member in rest] == expected[4:]
        leases = await take(engine)
        assert await engine.settle([(lease, Done()) for lease in leases[1::2]]) == []
        assert [member.id for member in await engine.members(batch.id)] == [name for _, name in expected]

    async def test_a_batch_that_is_drained_while_it_is_filled_ends_once(
        self, engine: Engine, another: Another
    ) -> None:
        """I11, I5: in bundles, by many hands; whoever is the last, exactly one sees it."""
        hands = [engine, *[await another() for _ in range(3)]]
        for turn in range(5):
            batch = a_batch()
            jobs = members_of(batch, 120)
            await engine.put_batch(batch, jobs[:20], seal=False)

            async def fill(jobs: list[Job] = jobs, batch: Batch = batch) -> None:
                for start in range(20, 120, 20):
                    await hands[0].put(jobs[start : start + 20])
                await hands[1].seal(batch.id)

            async def drain(hand: Engine, limit: int, batch: Batch = batch) -> None:
                leases = await take(hand, limit=limit)
                while leases or (await status(hand, batch.id)).finished_at is None:
                    done = [(lease, Done()) for lease in leases]
                    leases = (await hand.exchange(done, {"default": limit}, span=SPAN, holder=HOLDER)).leases

            await asyncio.gather(fill(), *(drain(hand, 3 + 4 * n) for n, hand in enumerate(hands)))

            now = await status(engine, batch.id)
            assert (now.total, now.done, now.pending, now.running) == (120, 120, 0, 0)
            listed = await engine.members(batch.id, limit=200)
            assert [(member.id, member.state) for member in listed] == [(job.id, State.DONE) for job in jobs]
            assert await called_back(engine) == ["on_succeeded", "on_finished"] * (turn + 1)

    async def test_a_batch_does_not_wait_for_a_member_that_is_replayed(self, engine: Engine) -> None:
        """T13, B1, I11: it has counted already, whichever it is, and however many end after it."""
        for nth in range(3):
            batch = await a_batch_of(engine, 3)
            leases = await take(engine)
            again = leases.pop(nth)
            await settle_one(engine, again, Dead())
            assert await engine.replay([again.id]) == [True]

            assert await engine.settle([(lease, Done()) for lease in leases]) == []

            now = await status(engine, batch.id)
            assert (now.state, now.done, now.dead) == (BatchState.PARTIAL_SUCCESS, 2, 1)
            assert now.finished_at is not None
            assert await called_back(engine) == ["on_failed", "on_finished"] * (nth + 1)
            await end_next(engine, Done())  # which calls nobody back
            assert await called_back(engine) == ["on_failed", "on_finished"] * (nth + 1)

    async def test_a_batch_does_not_wait_for_a_job_that_it_did_not_get(self, engine: Engine) -> None:
        """I2, I11: its id was taken by a job that runs, and then waits once more."""
        other = await put_one(engine)
        running = await take_one(engine)
        batch = a_batch()
        member, refused = a_job(batch=batch.id, member=1), a_job(id=other.id, batch=batch.id, member=2)
        receipts = await engine.put_batch(batch, [member, refused])
        assert [receipt.created for receipt in receipts] == [True, False]
        lease = await take_one(engine)
        await settle_one(engine, running, Retry())

        await settle_one(engine, lease, Done())

        now = await status(engine, batch.id)
        assert (now.state, now.total) == (BatchState.SUCCESS, 1)
        assert now.finished_at is not None
        assert await called_back(engine) == ["on_succeeded", "on_finished"]
