"""What operators see of batches and do with them, and what a batch costs."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.app.shop import Shop, status_of

from propolis import App
from propolis.app.loading import load_app
from propolis.core.batch import callback_id
from propolis.core.ids import derive_id
from propolis.values import Filter, State
from propolis.worker import Mode, Settings, Worker


async def test_deleting_a_batch_removes_what_waits_and_calls_nobody(shop: Shop) -> None:
    """S3.13: ready, scheduled and retrying members go; running ones finish."""
    app = shop.app
    go_on = asyncio.Event()

    @app.task
    async def slow() -> None:
        await go_on.wait()
        shop.runs["slow"] += 1

    async with app.test() as t:
        calls = [slow.job(), shop.fail.job(), shop.square.using(delay="1h").job(1)]
        batch = await app.batch(calls, **shop.callbacks)
        await t.advance("1s")
        await app.batch(shop.square.many([7]))  # a stranger's
        shop.runs.clear()
        assert await batch.adelete()
        assert not await batch.adelete()
        go_on.set()
        await t.advance("2h")
        assert shop.runs == {"slow": 1, "square": 1}
    assert shop.called_back() == []


async def test_cancelling_a_batch_ends_it_and_calls_back(shop: Shop) -> None:
    """F42: cancelled members count as ended, also those of nested batches."""
    async with shop.app.test() as t:
        async with shop.app.batch(callback=shop.finished) as outer:
            outer.add(shop.square, 1)
            await outer.batch(shop.square.many(range(3)))
        assert await outer.handle.acancel() == 4
        await t.drain()
        assert await outer.handle.acancel() == 0
    assert shop.called_back() == [("finished", "dead")]
    assert shop.runs["square"] == 0


async def test_replaying_dead_members_reopens_nothing_and_is_recorded(shop: Shop) -> None:
    """S3.5, T13."""
    async with shop.app.test() as t:
        batch = await shop.app.batch(shop.fail.many([1, 2]), **shop.callbacks)
        await t.advance("1h")
        before = await status_of(batch)
        assert await batch.areplay() == 2
        await t.advance("1h")
        assert await status_of(batch) == before
        for member in await t.engine.members(batch.id):
            assert "replayed" in [event.kind for event in t.history(member.id)]
    assert [what for what, _ in shop.called_back()] == ["failed", "finished"]
    assert shop.runs["fail"] == 12


async def test_a_crash_at_any_member_delays_the_callback_and_does_not_double_it(shop: Shop) -> None:
    """S3.7, S3.8, S3.15: killed in the middle of a member, at its very end, and in the callback."""
    async with shop.app.test() as t:
        batch = await shop.app.batch(shop.square.many([1, 2]), callback=shop.finished)
        await t.kill_worker(during=shop.square)
        await t.drain()
        assert shop.called_back() == []
        await t.advance("15s")
        [first] = shop.reports
        assert first[1].done == 2
        other = await shop.app.batch(shop.square.many([3]), callback=shop.finished)
        member = (await other.aids())["enqueued"][0]
        await t.lose_lease(member)
        await t.drain()
        await t.advance("15s")
        assert len(t.jobs(task=shop.finished)) == 2
        third = await shop.app.batch(shop.square.many([4]), callback=shop.finished)
        await t.kill_worker(during=shop.finished)
        await t.advance("15s")
        assert t.job(callback_id(third.id, "finished")).losses == 1
        assert len(t.jobs(task=shop.finished)) == 3
    assert batch.id != third.id


def test_every_verb_for_plain_code(shop: Shop) -> None:
    app = shop.app
    with app.test() as t:
        batch = app.batch(shop.square.many([1, 2]), seal=False).enqueue()
        batch.add(shop.square.many([3]))
        assert batch.seal()
        assert len(batch.ids()["enqueued"]) == 3
        t.drain()
        assert batch.finished(timeout="1s").done == 3
        assert [member.result for member in batch.members()] == [b"1", b"4", b"9"]
        assert (batch.cancel(), batch.replay()) == (0, 0)
        assert app.batches.get(batch.id) == app.batches.find()[0] == batch.status()
        assert app.batches.members(batch.id) == batch.members()
        assert app.batches.ids(batch.id) == batch.ids()
        assert not app.batches.seal(batch.id)
        assert (app.batches.cancel(batch.id), app.batches.replay(batch.id)) == (0, 0)
        assert app.batches.delete(batch.id)
        assert not batch.delete()
        other = app.batch(shop.square.many([4])).enqueue()
        with pytest.raises(TimeoutError, match="has not ended"):
            other.finished(timeout="20ms")
    assert repr(batch) == f"<BatchHandle {batch.id}>"


async def test_batches_are_listed(shop: Shop) -> None:
    made = [await shop.app.batch(shop.square.many([n])) for n in range(3)]
    listed = await shop.app.batches.afind(limit=2)
    assert [status.id for status in listed] == sorted(batch.id for batch in made)[:2]
    [last] = await shop.app.batches.afind(after=listed[-1].id)
    assert last.id == max(batch.id for batch in made)
    assert len(await shop.app.jobs.afind(Filter(batch=last.id))) == 1


async def test_being_a_member_takes_no_call_more(shop: Shop) -> None:
    """S3.14: nothing is asked before a member runs, and its batch steps in the call that settles it."""
    calls: dict[str, Counter[str]] = {}
    for kind in ("plain", "member"):
        async with shop.app.test() as t:
            counted = calls[kind] = Counter()
            if kind == "plain":
                await shop.square.many(range(100)).aenqueue()
            else:
                await shop.app.batch(shop.square.many(range(100)))
            count_calls(t.engine, counted)
            await t.drain()
    assert calls["member"] == calls["plain"]
    assert calls["plain"]["exchange"]


def count_calls(engine: Any, counted: Counter[str]) -> None:
    def counting(name: str, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            counted[name] += 1
            return real(*args, **options)

        return call

    for name in ("lease", "settle", "exchange", "get", "batch", "members", "put", "note"):
        setattr(engine, name, counting(name, getattr(engine, name)))


def isolated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> App:
    """An app that child processes can make again, with an engine that they can reach."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "unit" / "app"))
    monkeypatch.setenv("ISOLATED_FLOW_URL", f"sqlite:///{folder}/jobs.db")
    monkeypatch.delitem(sys.modules, "isolated_flow", raising=False)  # and back again after this test
    app = load_app("isolated_flow:app")
    assert isinstance(app, App)
    return app


@pytest.mark.parametrize("how", ["async", "thread", "process"])
async def test_what_a_task_emits_is_put_when_it_is_done_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """S0.39, T4: wherever it runs; with ids that follow from its own, so a second run makes no second job."""
    app = isolated(tmp_path, monkeypatch)
    handle = await app.tasks[f"emit_{how}"].aenqueue()
    await Worker(app, Settings(mode=Mode.UNTIL_EMPTY)).run()
    record = await handle.astatus()
    assert record is not None
    assert (record.state, record.attempts) == (State.DONE, 2)
    found = await app.jobs.afind(Filter(task="emitted"))
    assert [each.id for each in found] == [derive_id(handle.id, "emit", n) for n in range(2)]
    assert [each.state for each in found] == [State.DONE] * 2
    await app.aclose()


async def test_a_callback_in_a_child_process_gets_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = isolated(tmp_path, monkeypatch)
    batch = await app.batch(app.tasks["double_apart"].many([1, 2]), callback=app.tasks["report_apart"].job())
    await Worker(app, Settings(mode=Mode.UNTIL_EMPTY)).run()
    record = await app.jobs.aget(callback_id(batch.id, "finished"))
    assert record is not None
    assert record.result == b'"success: 2 of 2"'
    await app.aclose()


async def test_a_hundred_batches_of_two_call_back_a_hundred_times(shop: Shop) -> None:
    """F42, S3.6: members that end in the same moment."""
    async with shop.app.test() as t:
        for _ in range(100):
            await shop.app.batch(shop.square.many([1, 2]), callback=shop.finished)
        await t.drain()
        assert len(t.jobs(task=shop.finished)) == 100
    assert [status.done for _, status in shop.reports] == [2] * 100
