"""The test kit lets things go wrong: workers are killed, and leases are lost."""

from __future__ import annotations

import asyncio

import pytest

from propolis import App, Job
from propolis.core.job import Done
from propolis.testing.kit.kit import AnyJob, Kit
from propolis.values import State


def kinds(t: Kit, handle: AnyJob) -> list[str]:
    return [event.kind for event in t.history(handle)]


async def test_a_worker_killed_during_a_job_leaves_it_to_the_next_one(app: App) -> None:
    began: list[int] = []
    ended: list[int] = []
    go = asyncio.Event()

    @app.task
    async def charge(job: Job) -> None:
        began.append(job.attempt)
        await go.wait()
        ended.append(job.attempt)

    async with app.test(patience="10ms") as t:
        handle = await charge.aenqueue()
        await t.kill_worker(during=charge)
        go.set()
        assert (began, ended, t.job(handle).state) == ([1], [], State.RUNNING)
        assert await t.drain() == 0
        await t.advance("14.999s")
        assert began == [1]
        await t.advance("1ms")
        assert (began, ended) == ([1, 2], [2])
        info = t.job(handle)
        assert (info.state, info.losses, info.attempts) == (State.DONE, 1, 2)
        [event] = t.history(handle)
        assert (event.kind, event.attempt, event.holder) == ("lost", 1, "worker-1")
        assert isinstance(t.outcome(handle), Done)


async def test_a_job_that_never_waits_has_done_its_work_when_the_worker_is_killed(app: App) -> None:
    ran: list[int] = []

    @app.task
    async def charge(job: Job) -> None:
        ran.append(job.attempt)

    async with app.test() as t:
        handle = await charge.aenqueue()
        await t.kill_worker(during=charge)
        assert (ran, t.job(handle).state, t.outcome(handle)) == ([1], State.RUNNING, None)
        await t.advance("15s")
        assert (ran, t.job(handle).losses) == ([1, 2], 1)


async def test_a_job_that_fails_when_the_worker_is_killed_is_not_recorded_as_failed(app: App) -> None:
    @app.task
    async def fails() -> None:
        raise OSError

    async with app.test() as t:
        handle = await fails.aenqueue()
        await t.kill_worker(during=fails)
        info = t.job(handle)
        assert (info.state, info.failures) == (State.RUNNING, 0)


async def test_a_plain_function_can_be_killed_as_well(app: App) -> None:
    ran: list[int] = []

    @app.task
    def charge(job: Job) -> None:
        ran.append(job.attempt)

    async with app.test() as t:
        handle = await charge.aenqueue()
        await t.kill_worker(during=charge)
        await t.advance("15s")
        assert (ran, t.job(handle).losses) == ([1, 2], 1)


async def test_a_job_that_was_running_already_is_killed_where_it_is(app: App) -> None:
    @app.task(name="waits")
    async def waits() -> None:
        await asyncio.Event().wait()

    async with app.test(patience="10ms") as t:
        handle = await waits.aenqueue()
        await t.advance(0)
        await t.kill_worker(during="waits")
        await t.advance("15s")
        info = t.job(handle)
        assert (info.state, info.losses, info.holder) == (State.RUNNING, 1, "worker-2")


async def test_a_job_that_kills_its_worker_again_and_again_ends_as_dead(app: App) -> None:
    @app.task
    async def poison() -> None: ...

    async with app.test() as t:
        handle = await poison.aenqueue()
        for _ in range(10):
            await t.kill_worker(during=poison)
            t.clock.advance("15s")
            await t.engine.sweep()
            t.clock.advance("5m")  # the longest pause
        await t.drain()
        assert (t.job(handle).state, t.job(handle).reason) == (State.DEAD, "lost")
        assert kinds(t, handle) == ["lost"] * 10


async def test_a_kill_during_a_job_that_is_not_there_is_an_error(app: App) -> None:
    @app.task(name="absent")
    async def absent() -> None: ...

    async with app.test() as t:
        with pytest.raises(AssertionError, match=r"no job of absent is running.*nothing was enqueued"):
            await t.kill_worker(during=absent)
        await absent.using(delay="1h").aenqueue()
        with pytest.raises(AssertionError, match="no job of absent is running"):
            await t.kill_worker(during=absent)


async def test_killing_an_idle_worker_changes_nothing_for_jobs_and_calls_no_shutdown_hook(app: App) -> None:
    calls: list[str] = []
    app.on_startup(lambda state: calls.append("up"))
    app.on_shutdown(lambda state: calls.append("down"))

    @app.task
    async def task() -> None: ...

    async with app.test() as t:
        handle = await task.aenqueue()
        await t.kill_worker()
        assert calls == ["up", "up"]
        assert t.job(handle).state is State.READY
        assert await t.drain() == 1
        assert (t.job(handle).losses, kinds(t, handle)) == (0, [])
    assert calls == ["up", "up", "down"]


async def test_a_run_that_loses_its_lease_is_stopped_and_the_job_runs_again(app: App) -> None:
    began: list[int] = []
    stopped: list[int] = []
    lost: list[str] = []
    go = asyncio.Event()
    app.on_lost(lambda job: lost.append(job.id))

    @app.task
    async def slow(job: Job) -> None:
        began.append(job.attempt)
        try:
            await go.wait()
        except asyncio.CancelledError:
            stopped.append(job.attempt)
            raise

    async with app.test(patience="10ms") as t:
        handle = await slow.aenqueue()
        await t.lose_lease(handle)
        assert (began, stopped, lost) == ([1], [1], [handle.id])
        assert (t.job(handle).state, t.job(handle).losses) == (State.READY, 1)
        go.set()
        assert await t.drain() == 1
        assert (began, t.job(handle).state, kinds(t, handle)) == ([1, 2], State.DONE, ["lost"])


async def test_a_run_that_ends_after_its_lease_is_refused_and_the_job_runs_again(app: App) -> None:
    ran: list[int] = []

    @app.task
    async def quick(job: Job) -> None:
        ran.append(job.attempt)

    async with app.test() as t:
        handle = await quick.aenqueue()
        await t.lose_lease(handle.id)
        assert (ran, t.job(handle).state, t.outcome(handle)) == ([1], State.READY, None)
        assert await t.drain() == 1
        assert (ran, t.job(handle).state, t.job(handle).losses) == ([1, 2], State.DONE, 1)


async def test_a_lease_cannot_be_lost_by_a_job_that_does_not_run(app: App) -> None:
    @app.task
    async def task() -> None: ...

    async with app.test() as t:
        handle = await task.using(delay="1h").aenqueue()
        with pytest.raises(AssertionError, match=f"no job {handle.id} is running"):
            await t.lose_lease(handle)
