"""Batches as users write them, on the real worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from itertools import chain
from typing import Any, cast

import pytest
from tests.app.shop import Shop, status_of

from propolis import BatchReport, Job, cron, current_job
from propolis.core.batch import callback_id
from propolis.errors import (
    BadName,
    BadSetting,
    UnknownBatch,
)
from propolis.strategies import dead
from propolis.values import BatchState, State

# --- one call ----------------------------------------------------------------------------


async def test_a_batch_calls_back_once_when_all_is_done(shop: Shop) -> None:
    """S3.1, S3.5, S3.10: one job per element, then one callback, in the step that ended the last."""
    async with shop.app.test() as t:
        batch = await shop.app.batch(shop.square.many([1, 2, 3]), **shop.callbacks, note="squares")
        assert (await status_of(batch)).state is BatchState.IN_PROGRESS
        await t.drain()
        status = await status_of(batch)
        assert (status.state, status.total, status.done, status.note) == ("success", 3, 3, "squares")
        assert shop.called_back() == [("succeeded", "success"), ("finished", "success")]
        assert t.job(callback_id(batch.id, "finished")).state is State.DONE


@pytest.mark.parametrize(
    ("good", "bad", "state", "runs"),
    [(19, 0, "success", 19), (0, 2, "dead", 6), (2, 1, "partial-success", 5)],
)
async def test_the_state_sums_up_how_its_members_ended(
    shop: Shop, good: int, bad: int, state: str, runs: int
) -> None:
    """S3.5: with the exact number of runs; on_failed comes with the first that is dead, not the last."""
    async with shop.app.test() as t:
        members = chain(shop.square.many(range(good)), shop.fail.many(range(bad)))
        await shop.app.batch(members, **shop.callbacks)
        await t.advance("1h")
    assert shop.runs.total() == runs
    assert shop.called_back()[-1] == ("finished", state)
    assert [what for what, _ in shop.called_back()] == (
        ["failed", "finished"] if bad else ["succeeded", "finished"]
    )


async def test_status_tells_ids_and_counts_in_every_state(shop: Shop) -> None:
    """S3.4, S3.12: also of those that wait for another attempt."""
    app = shop.app
    reached = asyncio.Event()

    @app.task
    async def hang() -> None:
        reached.set()
        await asyncio.Event().wait()

    async with app.test() as t:
        calls = [shop.square.job(1), shop.fail.job(), shop.fail.job(), hang.job()]
        calls += [shop.square.using(delay="1h").job(2), shop.square.using(delay="1h").job(3)]
        batch = await app.batch(calls)
        ids = [member.id async for member in batch.amembers()]
        await t.advance("30s")
        await app.jobs.acancel(ids[5])
        assert await batch.aids() == {
            "enqueued": [ids[4]],
            "retrying": [ids[1], ids[2]],
            "running": [ids[3]],
            "done": [ids[0]],
            "dead": [],
            "cancelled": [ids[5]],
        }
        status = await status_of(batch)
        assert (status.enqueued, status.retrying, status.running) == (1, 2, 1)
        assert (status.done, status.dead, status.cancelled, status.ended, status.pending) == (1, 0, 1, 2, 4)


async def test_a_callback_gets_the_results_in_the_order_of_the_members(shop: Shop) -> None:
    """S3.19: of those that are done and keep them; in plain functions and in coroutines."""
    app, seen = shop.app, list[Any]()

    @app.task
    async def total(report: BatchReport, job: Job) -> None:
        assert job.id == callback_id(report.id, "finished")
        seen.append((report.total, report.done, report.dead, report.cancelled, await report.aresults(int)))

    @app.task
    def total_too(report: BatchReport) -> None:
        seen.append(report.results(int))

    async with app.test() as t:
        for callback in (total, total_too):
            members = chain(shop.square.many([3, 1]), shop.fail.many([0]), shop.square.many([2]))
            await app.batch(members, callback=callback)
            await t.advance("1h")
    assert seen == [(4, 3, 1, 0, [9, 1, 4]), [9, 1, 4]]


async def test_a_callback_may_have_arguments_and_circumstances_of_its_own(shop: Shop) -> None:
    app, seen = shop.app, list[str]()

    @app.task
    async def tell(job: Job, report: BatchReport, whom: str) -> None:
        assert job is current_job()
        seen.append(f"{whom} {report.state} {job.queue}")

    async with app.test() as t:
        await app.batch(shop.square.many([1]), callback=tell.using(queue="slow").job("ann"))
        await t.drain()
    assert seen == ["ann success slow"]


async def test_a_callback_that_fails_is_retried_and_then_dead(shop: Shop) -> None:
    """S3.9: an ordinary job, which the batch does not wait for."""
    async with shop.app.test() as t:
        batch = await shop.app.batch(shop.square.many([1]), callback=shop.fail)
        await t.advance("1h")
        assert shop.runs["fail"] == 3
        assert t.job(callback_id(batch.id, "finished")).state is State.DEAD
        assert (await status_of(batch)).state is BatchState.SUCCESS


async def test_an_empty_batch_calls_back_at_once(shop: Shop) -> None:
    """S3.16."""
    async with shop.app.test() as t:
        batch = await shop.app.batch(**shop.callbacks)
        assert (await status_of(batch)).state is BatchState.SUCCESS
        await t.drain()
    assert shop.called_back() == [("succeeded", "success"), ("finished", "success")]


async def test_what_is_wrong_with_a_batch_is_wrong_before_anything_is_stored(shop: Shop) -> None:
    """S3.3."""

    @shop.app.task
    async def wants(n: int) -> None: ...

    wrongs: list[dict[str, Any]] = [
        {"callback": wants},
        {"keep_for": "soon"},
        {"delay": "1s", "at": shop.app},
        {"batch_id": "a\0b"},
        {"keep_for": 0, "callback": shop.finished},
        {"keep_for": 0, "on_failed": shop.finished},
    ]
    for wrong in wrongs:
        with pytest.raises((BadSetting, TypeError)):
            await shop.app.batch(shop.square.many([1]), **wrong)
    with pytest.raises(TypeError):
        await shop.app.batch(shop.square.many([1, "two"]))
    assert await shop.app.batches.afind() == []
    assert await shop.app.jobs.afind() == []
    assert issubclass(BadName, BadSetting)


async def test_a_task_that_is_no_callback_gets_no_report(shop: Shop) -> None:
    async with shop.app.test() as t:
        await shop.finished.using(on_error=dead).aenqueue()
        await t.drain()
        [error] = t.errors
    assert "is no callback of a batch" in str(error)


# --- how long ----------------------------------------------------------------------------


def test_what_is_no_job_is_no_member_and_no_callback(shop: Shop) -> None:
    square: Any = shop.square
    members: list[Any] = [5, square, square.step(1)]
    for member in members:
        with pytest.raises(TypeError, match=r"a batch has jobs, and .* is none: write task\.job"):
            shop.app.batch([member]).enqueue()
    for callback in (print, "finished"):
        with pytest.raises(TypeError, match="cannot be called back: give a task"):
            shop.app.batch(callback=cast(Any, callback))
    with pytest.raises(BadSetting, match="batch id"):
        shop.app.batch(batch_id="")
    shop.app.close()


def test_a_callback_that_needs_arguments_is_told_what_callbacks_get(shop: Shop) -> None:
    @shop.app.task
    def long(report: BatchReport, n: int) -> None: ...

    wrong: list[Any] = [long, long.using(queue="slow")]
    for callback in wrong:
        with pytest.raises(
            TypeError, match=r"argument: 'n': a callback gets only a BatchReport, .* give task\.job"
        ):
            shop.app.batch(callback=callback)
    shop.app.batch(callback=long.job(5))
    shop.app.close()


async def test_a_batch_that_was_put_is_not_put_again(shop: Shop) -> None:
    """Its calls may be used up: the second one would be an empty batch with the name of the first."""
    async with shop.app.test():
        new = shop.app.batch(shop.square.many([1]))
        await new
        with pytest.raises(BadSetting, match="was put already"):
            await new
        filled = shop.app.batch()
        async with filled as writer:
            await writer.add(shop.square, 2)
        with pytest.raises(BadSetting, match="was put already"):
            await filled.aenqueue()


def test_a_transaction_is_not_forgotten_on_the_way_to_a_batch(shop: Shop) -> None:
    """What is not put by enqueue() would be there although the transaction was rolled back."""
    call = shop.square.using(tx=object())
    wrong: list[Callable[[], object]] = [
        lambda: call.job(1),
        lambda: shop.app.batch(call.many([1])).enqueue(),
        lambda: shop.app.batch(callback=shop.finished.using(tx=object())),
        lambda: shop.app.schedules.put("daily", cron("@daily"), call, 1),
    ]
    for put in wrong:
        with pytest.raises(BadSetting, match=r"tx= goes with enqueue\(\) and aenqueue\(\) only"):
            put()
    shop.app.close()


async def test_a_batch_is_kept_for_its_time_and_then_forgotten(shop: Shop) -> None:
    """S3.11."""
    async with shop.app.test() as t:
        batch = await shop.app.batch(shop.square.many([1]), keep_for="1h")
        await t.drain()
        await t.advance("59m")
        assert await batch.astatus() is not None
        await t.advance("2m")
        assert await batch.astatus() is None
        with pytest.raises(UnknownBatch):
            await batch.afinished()


async def test_keeping_it_for_no_time_forgets_it_at_once_and_still_calls_back(shop: Shop) -> None:
    """S3.11."""

    @shop.app.task
    async def plain() -> None:
        shop.runs["plain"] += 1

    async with shop.app.test() as t:
        batch = await shop.app.batch(shop.square.many([1, 2]), callback=plain, keep_for=0)
        await t.drain()
        assert await batch.astatus() is None
    assert shop.runs["plain"] == 1


@pytest.mark.parametrize("as_job", [False, True], ids=["task", "job"])
@pytest.mark.parametrize("when", ["callback", "on_succeeded", "on_failed"])
async def test_a_callback_that_would_find_no_report_is_refused_in_every_kind_of_batch(
    shop: Shop, when: str, as_job: bool
) -> None:
    options: Any = {when: shop.finished.job() if as_job else shop.finished, "keep_for": 0}
    async with shop.app.test():
        handle = await shop.app.batch(seal=False)
        async with shop.app.batch(seal=False) as writer:
            for make in (shop.app.batch, handle.batch, writer.batch):
                with pytest.raises(BadSetting, match="can read its BatchReport: keep it for a while"):
                    make(shop.square.many([1]), **options)


async def test_a_report_that_is_gone_is_an_error_of_its_callback(shop: Shop) -> None:
    async with shop.app.test() as t:
        callback = shop.finished.using(delay="2h", on_error=dead)
        await shop.app.batch(shop.square.many([1]), callback=callback, keep_for="1h")
        await t.advance("3h")
        [error] = t.errors
    assert isinstance(error, UnknownBatch)


async def test_a_scheduled_batch_waits(shop: Shop) -> None:
    """S3.18: all of it, or some of its members for themselves."""
    async with shop.app.test() as t:
        calls = [shop.square.job(1), shop.square.using(delay="2h").job(2)]
        batch = await shop.app.batch(calls, delay="1h", **shop.callbacks)
        at = t.now + timedelta(hours=3)
        other = await shop.app.batch(shop.square.many([5]), at=at)
        assert await t.advance("59m") == 0
        assert await t.advance("2m") == 1
        assert (await status_of(batch)).pending == 1
        await t.advance("1h")
        assert shop.called_back()[-1] == ("finished", "success")
        assert (await status_of(other)).pending == 1
        await t.advance("1h")
        assert (await status_of(other)).state is BatchState.SUCCESS


async def test_a_note_that_cannot_be_stored_is_refused(shop: Shop) -> None:
    with pytest.raises(BadSetting, match="the note of a batch has a lone surrogate"):
        await shop.app.batch(shop.square.many([1]), note="\ud800")
