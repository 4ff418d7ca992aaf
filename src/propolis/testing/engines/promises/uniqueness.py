"""Uniqueness: a unique key has one holder at most."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from propolis.core.envelope import UniqueUntil
from propolis.core.job import Done, Retried, State
from propolis.core.protocols import Engine, Receipt
from propolis.testing.clock import FakeClock
from propolis.testing.engines.promises.endings import MORTAL, Way, every_ending, every_return
from propolis.testing.engines.samples import a_job
from propolis.testing.engines.steps import (
    Another,
    a_batch,
    a_dead_job,
    counts,
    found,
    info_of,
    members_of,
    order,
    put_one,
    settle_one,
    take,
    take_one,
)

KEY = "mail:a@b.c"
until_started: dict[str, Any] = {"unique": KEY, "unique_until": UniqueUntil.STARTED}


async def is_free(engine: Engine) -> bool:
    """Whether a job with the key is accepted; it is put on a queue of its own."""
    [receipt] = await engine.put([a_job(unique=KEY, queue="probe")])
    return receipt.created


class UniquenessPromise:
    async def test_a_job_whose_key_is_held_is_refused_and_told_by_whom(self, engine: Engine) -> None:
        """T1, I12."""
        holder = await put_one(engine, unique=KEY)

        receipts = await engine.put([a_job(unique=KEY), a_job(unique=KEY, queue="other"), a_job(unique="b")])

        assert receipts[:2] == [Receipt(holder.id, created=False)] * 2
        assert receipts[2].created
        assert (await info_of(engine, holder.id)).unique == KEY
        assert len(await found(engine)) == 2

    async def test_of_two_jobs_with_one_key_in_a_bundle_the_first_is_put(self, engine: Engine) -> None:
        """T1, I12."""
        first, second = a_job(unique=KEY), a_job(unique=KEY)

        receipts = await engine.put([first, second])

        assert receipts == [Receipt(first.id, created=True), Receipt(first.id, created=False)]
        assert await order(engine) == [first.id]

    async def test_the_id_of_a_refused_job_is_not_used(self, engine: Engine) -> None:
        """T1, I1, I12."""
        await put_one(engine, unique=KEY)
        refused = a_job(unique=KEY, id="invoice-7", chosen=True)
        await engine.put([refused])
        await settle_one(engine, await take_one(engine), Done())

        assert await engine.put([refused]) == [Receipt("invoice-7", created=True)]

    @every_ending
    async def test_a_key_is_free_when_its_job_has_ended(
        self, engine: Engine, clock: FakeClock, ending: Way
    ) -> None:
        """T4, T6, T8, T9, T10, T11, T12, I12."""
        job = await put_one(engine, unique=KEY, **MORTAL)
        assert not await is_free(engine)

        await ending.go(engine, clock, job.id)

        assert await is_free(engine)

    @every_return
    async def test_a_key_is_held_while_its_job_runs_and_comes_back(
        self, engine: Engine, clock: FakeClock, back: Way
    ) -> None:
        """T2, T5, T7, T8, I12."""
        job = await put_one(engine, unique=KEY)
        await back.go(engine, clock, job.id)
        assert not await is_free(engine)

        await take_one(engine)

        assert not await is_free(engine)

    async def test_a_key_may_be_held_only_until_its_job_starts(self, engine: Engine) -> None:
        """T2, I12."""
        await put_one(engine, **until_started)
        assert not await is_free(engine)

        await take_one(engine)

        assert await is_free(engine)

    @every_return
    async def test_a_key_that_was_freed_by_a_start_is_not_taken_again(
        self, engine: Engine, clock: FakeClock, back: Way
    ) -> None:
        """T5, T7, T8, I12."""
        job = await put_one(engine, **until_started)

        await back.go(engine, clock, job.id)

        assert await is_free(engine)
        assert await order(engine) == [job.id]

    async def test_the_end_of_an_early_holder_does_not_free_the_key_of_the_next(self, engine: Engine) -> None:
        """T4, I12."""
        await put_one(engine, **until_started)
        early = await take_one(engine)
        heir = await put_one(engine, unique=KEY)

        await settle_one(engine, early, Done())

        assert await engine.put([a_job(unique=KEY)]) == [Receipt(heir.id, created=False)]

    async def test_a_replayed_job_takes_its_key_again(self, engine: Engine) -> None:
        """T13, I12."""
        job = await a_dead_job(engine, unique=KEY)

        assert await engine.replay([job.id]) == [True]

        assert await engine.put([a_job(unique=KEY)]) == [Receipt(job.id, created=False)]

    async def test_a_job_is_not_replayed_while_somebody_else_holds_its_key(self, engine: Engine) -> None:
        """T13, I12."""
        job = await a_dead_job(engine, unique=KEY)
        await put_one(engine, unique=KEY)

        assert await engine.replay([job.id]) == [False]
        assert (await info_of(engine, job.id)).state is State.DEAD

        await settle_one(engine, await take_one(engine), Done())
        assert await engine.replay([job.id]) == [True]

    async def test_of_two_dead_jobs_with_one_key_one_is_replayed(self, engine: Engine) -> None:
        """T13, I12."""
        first = await a_dead_job(engine, unique=KEY)
        second = await a_dead_job(engine, unique=KEY)

        assert await engine.replay([second.id, first.id]) == [True, False]
        assert await order(engine) == [second.id]

    async def test_dropping_a_queue_frees_the_keys_of_its_jobs(self, engine: Engine) -> None:
        """T9, I12."""
        await put_one(engine, unique=KEY)

        await engine.drop("default")

        assert await is_free(engine)

    async def test_deleting_a_batch_frees_the_keys_of_its_waiting_members(self, engine: Engine) -> None:
        """I12."""
        batch = a_batch()
        await engine.put_batch(batch, members_of(batch, 1, unique=KEY))

        await engine.delete_batch(batch.id)

        assert await is_free(engine)

    async def test_a_job_that_moved_to_another_queue_holds_its_key_there(self, engine: Engine) -> None:
        """T5, I12."""
        await put_one(engine, unique=KEY)
        await settle_one(engine, await take_one(engine), Retried(queue="slow"))
        assert not await is_free(engine)

        await settle_one(engine, await take_one(engine, "slow"), Done())

        assert await is_free(engine)

    @pytest.mark.parametrize("until", list(UniqueUntil), ids=str)
    async def test_of_many_producers_at_once_one_gets_the_key(
        self, engine: Engine, another: Another, until: UniqueUntil
    ) -> None:
        """T1, I12."""
        handles = [engine, *[await another() for _ in range(3)]]

        answers = await asyncio.gather(
            *(handle.put([a_job(unique=KEY, unique_until=until)]) for handle in handles * 4)
        )

        receipts = [receipt for [receipt] in answers]
        [holder] = [receipt.id for receipt in receipts if receipt.created]
        assert {receipt.id for receipt in receipts} == {holder}
        assert (await counts(engine)).ready == 1
        assert len(await take(engine)) == 1
