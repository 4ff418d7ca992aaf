"""Batching: many jobs, one end, one callback."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from propolis.core.batch import Batch, BatchState
from propolis.core.job import Dead, Done, Outcome, Retried, State
from propolis.core.protocols import BITE, KNOWN_FOR, Engine, Receipt, Rule, RuleKind, Scope
from propolis.errors import BatchSealed, QueueFull, UnknownBatch
from propolis.testing.clock import FakeClock
from propolis.testing.engines.promises.endings import MORTAL, Way, every_ending, every_return
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.engines.steps import (
    A_MOMENT,
    CALLBACKS,
    HOUR,
    Another,
    a_batch,
    a_batch_of,
    a_callback,
    a_done_job,
    called_back,
    counts,
    end_next,
    found,
    info_of,
    members_of,
    order,
    put_one,
    settle_one,
    status,
    take,
    take_one,
)

DAY = timedelta(days=1)


class BatchingPromise:
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

    async def test_a_large_batch_is_deleted_in_bites_and_nothing_of_it_runs_any_more(
        self, engine: Engine
    ) -> None:
        """L5.3, T14: no callback either, and what is put afterwards is not touched."""
        batch = a_batch()
        for first in range(0, 3 * BITE, BITE):
            members = [a_job(n, batch=batch.id, member=n) for n in range(first, first + BITE)]
            await engine.put_batch(batch, members, seal=first == 2 * BITE)
        running = await take_one(engine)

        assert await engine.delete_batch(batch.id)
        new = await put_one(engine)

        assert await engine.batch(batch.id) is None
        assert set(await order(engine)) <= {new.id}  # what is in its way goes in bites
        await settle_one(engine, running, Done())
        for _ in range(6):
            await engine.sweep()
        assert await found(engine) == [new.id]
        now = await counts(engine)
        assert (now.total, now.put - now.deleted) == (1, 1)
        assert await called_back(engine) == []

    async def test_a_batch_tells_how_far_its_members_are(self, engine: Engine) -> None:
        """B1."""
        batch = await a_batch_of(engine, 7)
        await end_next(engine, Done(), Dead(), Retried(), Retried(delay=HOUR))
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
            ([Retried(), Done(), Done()], BatchState.SUCCESS),
            ([Retried(), Dead(), Done()], BatchState.PARTIAL_SUCCESS),
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

    async def test_a_chosen_id_that_is_taken_takes_no_other_member_from_the_count(
        self, engine: Engine
    ) -> None:
        """T1, B1, I1, I11: whether the job that has it has ended and is kept, runs or waits for its time."""
        ended = await a_done_job(engine, id="ended", chosen=True)
        running = await put_one(engine, id="running", chosen=True)
        await take_one(engine)
        later = await put_one(engine, id="later", chosen=True, delay_ms=60_000)
        batch = a_batch()
        names = [{}, {"id": ended.id}, {"id": running.id}, {"id": later.id}, {}]
        jobs = [a_job(batch=batch.id, member=n, **name) for n, name in enumerate(names)]

        receipts = await engine.put_batch(batch, jobs)

        assert [receipt.created for receipt in receipts] == [True, False, False, False, True]
        assert (await status(engine, batch.id)).total == 2
        await end_next(engine, Done())
        assert await called_back(engine) == []
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

    async def test_a_finished_batch_is_kept_for_a_time_and_then_forgotten(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """B1."""
        batch = a_batch(keep_for_ms=3_600_000)
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

    async def test_a_batch_that_is_not_kept_is_gone_when_it_finishes(self, engine: Engine) -> None:
        """B1, I11: its callbacks are put all the same."""
        batch = a_batch(keep_for_ms=0)
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
        batch = a_batch(open_for_ms=1000, keep_for_ms=1000)
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
        await end_next(engine, Retried(delay=HOUR))

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
        assert [(await info_of(engine, member.id)).member for member in members] == [0, 1]

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
        await end_next(engine, Retried(queue="slow"))
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
