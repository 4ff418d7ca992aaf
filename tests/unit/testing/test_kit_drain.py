"""The test kit drains: all that is due runs, and nothing else."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from propolis import App
from propolis.testing.kit import kit as kit_module
from propolis.values import State


async def test_nothing_runs_before_the_test_says_so(app: App) -> None:
    @app.task
    async def task() -> None: ...

    async with app.test() as t:
        handle = await task.aenqueue()
        for _ in range(100):
            await asyncio.sleep(0)
        assert t.job(handle).state is State.READY
        assert await t.drain() == 1
        assert t.job(handle).state is State.DONE
        again = await task.aenqueue()
        for _ in range(100):
            await asyncio.sleep(0)
        assert t.job(again).state is State.READY


async def test_drain_follows_jobs_that_enqueue_others_in_whatever_queue(app: App) -> None:
    ran: list[int] = []

    @app.task
    async def down(n: int) -> None:
        ran.append(n)
        if n:
            await down.using(queue=f"queue-{n}").aenqueue(n - 1)

    async with app.test() as t:
        await down.aenqueue(3)
        assert await t.drain() == 4
    assert ran == [3, 2, 1, 0]


async def test_drain_waits_for_real_work_in_threads_and_elsewhere(app: App) -> None:
    go = threading.Event()

    @app.task
    def in_a_thread() -> None:
        go.wait()

    @app.task
    async def outside() -> None:
        await asyncio.to_thread(go.wait)

    async with app.test() as t:
        one, two = await in_a_thread.aenqueue(), await outside.aenqueue()
        asyncio.get_running_loop().call_later(0.01, go.set)
        assert await t.drain() == 2
        assert {t.job(one).state, t.job(two).state} == {State.DONE}


async def test_a_plain_function_may_enqueue_from_its_thread(app: App) -> None:
    @app.task
    def child() -> None: ...

    @app.task
    def parent() -> None:
        child.enqueue()

    async with app.test() as t:
        await parent.aenqueue()
        assert await t.drain() == 2
        t.assert_enqueued(child, count=1)


async def test_drain_does_not_move_the_clock_and_leaves_what_is_not_due(app: App) -> None:
    @app.task
    async def task() -> None: ...

    async with app.test() as t:
        handle = await task.using(delay="1ms").aenqueue()
        before = t.now
        assert await t.drain() == 0
        assert t.now == before
        assert t.job(handle).state is State.READY


async def test_drain_leaves_what_a_rule_keeps_back(app: App) -> None:
    @app.task
    async def task() -> None: ...

    async with app.test() as t:
        await app.queues.apause("default")
        await task.aenqueue()
        assert await t.drain() == 0
        await app.queues.aresume("default")
        assert await t.drain() == 1


async def test_jobs_without_end_are_an_error_that_names_them(app: App) -> None:
    @app.task(name="hydra")
    async def hydra() -> None:
        await hydra.aenqueue()

    async with app.test() as t:
        await hydra.aenqueue()
        with pytest.raises(AssertionError, match=r"no end of it: \d+ runs at 2026-01-01 .* hydra"):
            await t.drain(limit=50)
    async with app.test() as t:
        await hydra.aenqueue()
        with pytest.raises(AssertionError, match="no end of it"):
            await t.advance("1s", limit=50)


async def test_a_job_that_does_not_end_is_an_error_that_names_it(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task(name="hangs")
    async def hangs() -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(kit_module, "GIVE_UP_AFTER", 0.02)
    async with app.test() as t:
        await hangs.aenqueue()
        with pytest.raises(AssertionError, match=r"these go on: hangs .*advance\(\)"):
            await t.drain()


async def test_a_thousand_jobs_are_drained_quickly(app: App) -> None:
    ran: list[int] = []

    @app.task
    async def task(n: int) -> None:
        ran.append(n)

    async with app.test() as t:
        await task.many(range(1000)).aenqueue()
        start = time.process_time()
        assert await t.drain() == 1000
        assert time.process_time() - start < 2
        assert len(t.jobs(state=State.DONE)) == 1000
    assert sorted(ran) == list(range(1000))
