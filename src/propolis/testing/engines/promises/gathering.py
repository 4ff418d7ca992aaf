"""Gathering: members of one or of several batches that are leased, or that end, together."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from propolis.core.batch import Batch, BatchState
from propolis.core.envelope import Envelope
from propolis.core.job import Dead, Done, Lease, Outcome, Retried, State
from propolis.core.protocols import Engine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.promises.bundling import ACTS, Act
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.engines.steps import (
    CALLBACKS,
    HOUR,
    Another,
    a_batch,
    a_batch_of,
    a_callback,
    called_back,
    end_next,
    found,
    info_of,
    members_of,
    put_one,
    settle_one,
    status,
    take,
    take_one,
)


class GatheringPromise:
    def as_called(self, calls: list[str]) -> list[str]:
        """The callbacks of several batches that one call has ended: in the order of their ends.

        An engine in which these are several steps may sort them: it puts them as they come.
        """
        return calls

    @pytest.mark.parametrize("act", ACTS.values(), ids=list(ACTS))
    async def test_what_happens_to_one_of_many_members_counts_for_it_alone(
        self, engine: Engine, act: Act
    ) -> None:
        """T3-T7, T9, T12, B1, I8: whatever the engine shares between them."""
        batch = await a_batch_of(engine, 5)
        leases = await take(engine)
        one, others = leases[2], leases[:2] + leases[3:]
        before = [await info_of(engine, lease.id) for lease in others]
        assert [(info.batch, info.member) for info in before] == [(batch.id, n) for n in (0, 1, 3, 4)]

        await act(engine, one)

        assert [await info_of(engine, lease.id) for lease in others] == before
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

            async def fill(jobs: list[Envelope] = jobs, batch: Batch = batch) -> None:
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
        await settle_one(engine, running, Retried())

        await settle_one(engine, lease, Done())

        now = await status(engine, batch.id)
        assert (now.state, now.total) == (BatchState.SUCCESS, 1)
        assert now.finished_at is not None
        assert await called_back(engine) == ["on_succeeded", "on_finished"]
