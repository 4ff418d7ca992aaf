"""Members that are added later, by others, or as batches inside of a batch."""

from __future__ import annotations

import asyncio

import pytest
from tests.app.shop import Shop, status_of

from propolis import Job
from propolis.app.batch.new_batch import BatchHandle
from propolis.errors import (
    BatchSealed,
    UnknownBatch,
)
from propolis.values import BatchState

# --- later additions ---------------------------------------------------------------------


async def test_members_are_added_until_the_batch_is_sealed(shop: Shop) -> None:
    """S3.17: a callback only after that."""
    async with shop.app.test() as t:
        batch = await shop.app.batch(shop.square.many([1]), seal=False, **shop.callbacks)
        await t.drain()
        await batch.aadd(shop.square.many([2, 3]))
        await shop.square.using(batch=batch.id).aenqueue(4)
        await t.drain()
        assert (shop.called_back(), (await status_of(batch)).state) == ([], BatchState.OPEN)
        assert await batch.aseal()
        assert not await batch.aseal()
        await t.drain()
        assert shop.called_back() == [("succeeded", "success"), ("finished", "success")]
        with pytest.raises(BatchSealed):
            await batch.aadd(shop.square.many([5]))
    with pytest.raises(UnknownBatch):
        await BatchHandle(shop.app.client, "nobody").aadd([])


async def test_an_open_stream_may_be_left_open(shop: Shop) -> None:
    async with shop.app.batch(seal=False) as b:
        b.add(shop.square, 1)
    status = await status_of(b.handle)
    assert (status.sealed, status.total) == (False, 1)


async def test_a_member_adds_members_to_its_own_batch(shop: Shop) -> None:
    """S3.17: also if that is sealed, by emitting; they are there before it can end."""
    app = shop.app

    @app.task
    async def spread(job: Job, n: int) -> None:
        for _ in range(n):
            job.emit(spread.using(batch=job.batch), n - 1)

    async with app.test() as t:
        batch = await app.batch(spread.many([3]), callback=shop.finished)
        await t.drain()
        [(what, status)] = shop.reports
        assert (what, status.total, status.done) == ("finished", 16, 16)
        members = [member.id async for member in batch.amembers()]
        assert len(set(members)) == len(members) == 16


async def test_members_that_share_a_number_are_all_listed(shop: Shop) -> None:
    """Added by many at once, they may: also more of them than a page holds."""
    batch = await shop.app.batch(seal=False)
    for _ in range(2):
        await shop.app.client.aput_many([shop.square.using(batch=batch.id).job(n) for n in range(600)])
    await batch.aadd(shop.square.many(range(700)))
    found = [member.id async for member in batch.amembers()]
    assert len(set(found)) == len(found) == 1900
    assert len(await asyncio.to_thread(batch.members)) == 1900


# --- nested ------------------------------------------------------------------------------


async def test_a_batch_ends_after_the_batches_inside_of_it(shop: Shop) -> None:
    """S3.20."""
    app, seen = shop.app, list[str]()

    @app.task
    async def remember(what: str) -> None:
        seen.append(what)

    async with app.test() as t:
        async with app.batch(callback=remember.job("outer")) as outer:
            outer.add(shop.square, 1)
            async with outer.batch(callback=remember.job("inner")) as inner:
                inner.add(shop.square.using(delay="1h"), 2)
            await app.batch(shop.square.many([3]), parent=outer.handle)
        await t.drain()
        assert seen == []
        await t.advance("1h")
        assert seen == ["inner", "outer"]
        status = await status_of(outer.handle)
        assert (status.total, status.done) == (3, 3)
        assert (await status_of(inner.handle)).parent == outer.id


async def test_a_nested_batch_that_fails_makes_its_parent_a_partial_success(shop: Shop) -> None:
    """S3.20."""
    async with shop.app.test() as t:
        async with shop.app.batch(**shop.callbacks) as outer:
            outer.add(shop.square, 1)
            await outer.batch(shop.fail.many([0]))
        await t.advance("1h")
    assert [what for what, _ in shop.called_back()] == ["failed", "finished"]
    assert shop.called_back()[-1] == ("finished", "partial-success")


def test_nested_batches_from_plain_code(shop: Shop) -> None:
    with shop.app.batch() as outer, outer.batch() as inner:
        inner.add(shop.square, 1)
    status = inner.handle.status()
    assert status is not None
    assert (status.parent, status.sealed) == (outer.id, True)
    shop.app.close()
