"""The test kit advances: what becomes due runs at its own instant, in virtual time."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest

from propolis import App, Job, Retry, Snooze, every
from propolis.strategies import archive, dead, exponential, fixed, repeat
from propolis.testing.kit.kit import AnyJob, Kit
from propolis.values import State

HOURLY = exponential("1h", cap="8h", jitter=0)


def kinds(t: Kit, handle: AnyJob) -> list[str]:
    return [event.kind for event in t.history(handle)]


async def test_a_chain_of_retries_over_hours_takes_no_time(app: App) -> None:
    times: list[timedelta] = []

    @app.task(on_error=repeat(5, HOURLY).then(dead))
    async def flaky() -> None:
        times.append(t.now - start)
        raise OSError("down")

    async with app.test() as t:
        start = t.now
        handle = await flaky.aenqueue()
        began = time.process_time()
        assert await t.advance("24h") == 6
        assert time.process_time() - began < 5
        assert [span // timedelta(hours=1) for span in times] == [0, 1, 3, 7, 15, 23]
        assert all(not span % timedelta(hours=1) for span in times)
        assert t.now == start + timedelta(hours=24)
        assert (t.job(handle).state, t.job(handle).reason) == (State.DEAD, "failed")
        assert kinds(t, handle) == ["retried"] * 5
        assert [str(error) for error in t.errors] == ["down"] * 6


async def test_due_jobs_run_at_their_own_instants_in_their_order(app: App) -> None:
    seen: list[tuple[str, timedelta]] = []

    @app.task
    async def note(name: str) -> None:
        seen.append((name, t.now - start))

    async with app.test() as t:
        start = t.now
        await note.using(delay="2h").aenqueue("later")
        await note.using(at=start + timedelta(minutes=5)).aenqueue("soon")
        await note.aenqueue("now")
        assert await t.advance("1h") == 2
        assert seen == [("now", timedelta(0)), ("soon", timedelta(minutes=5))]
        assert await t.advance("1h") == 1
        assert seen[2:] == [("later", timedelta(hours=2))]


async def test_a_snooze_and_a_retry_with_its_own_delay_come_back_in_virtual_time(app: App) -> None:
    times: list[timedelta] = []

    @app.task
    async def patient(job: Job) -> None:
        times.append(t.now - start)
        if len(times) == 1:
            raise Snooze("6h")
        if len(times) == 2:
            raise Retry("not yet", after="30m")

    async with app.test() as t:
        start = t.now
        handle = await patient.aenqueue()
        await t.advance("1d")
        assert times == [timedelta(0), timedelta(hours=6), timedelta(hours=6, minutes=30)]
        assert kinds(t, handle) == ["snoozed", "retried"]
        assert t.errors == []


@pytest.mark.parametrize("fraction", [0, 1, 26_783])  # the last one makes a sum of floats too large
async def test_a_timeout_comes_exactly_in_virtual_time(app: App, fraction: int) -> None:
    stopped: list[timedelta] = []

    @app.task(timeout="31s", on_timeout=repeat(1, fixed("1m")).then(archive))
    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(t.now - start)

    async with app.test(patience="10ms") as t:
        await t.advance(timedelta(microseconds=fraction))
        start = t.now
        handle = await slow.aenqueue()
        await t.advance("30.999s")
        assert t.job(handle).state is State.RUNNING
        await t.advance("1ms")
        assert stopped == [timedelta(seconds=31)]
        assert t.job(handle).state is State.READY
        await t.advance("1h")  # the second run is stopped on the way
        assert stopped == [timedelta(seconds=31), timedelta(seconds=122)]
        assert t.job(handle).state is State.DEAD
        assert t.job(handle).reason == "timeout"


async def test_a_thread_that_outlives_its_timeout_is_left_behind(app: App) -> None:
    go = threading.Event()

    @app.task(timeout="10s", abandon=True, on_timeout=dead)
    def stuck() -> None:
        go.wait()

    async with app.test(patience="10ms") as t:
        handle = await stuck.aenqueue()
        await t.advance("10s")
        assert t.job(handle).state is State.DEAD
        go.set()


async def test_a_coroutine_that_ignores_its_timeout_is_given_up(app: App) -> None:
    go = asyncio.Event()

    @app.task(timeout="10s", on_timeout=dead)
    async def stubborn() -> None:
        while not go.is_set():
            with suppress(asyncio.CancelledError):
                await go.wait()

    async with app.test(patience="10ms") as t:
        handle = await stubborn.aenqueue()
        await t.advance("10s")
        assert t.job(handle).state is State.RUNNING
        await t.advance("6s")
        assert t.job(handle).state is State.DEAD
        go.set()


async def test_the_lease_of_a_long_run_is_kept(app: App) -> None:
    go = asyncio.Event()

    @app.task
    async def long() -> None:
        await go.wait()

    async with app.test(patience="10ms") as t:
        handle = await long.aenqueue()
        await t.advance("10m")
        assert (t.job(handle).state, t.job(handle).crashes) == (State.RUNNING, 0)
        go.set()
        assert await t.drain() == 1
        assert (t.job(handle).state, kinds(t, handle)) == (State.DONE, [])


async def test_a_run_that_the_test_lets_go_ends_before_the_clock_moves(app: App) -> None:
    go, answer = asyncio.Event(), asyncio.Event()
    ended: list[datetime] = []

    @app.task
    async def waits() -> None:
        await go.wait()
        await answer.wait()
        ended.append(t.now)

    async with app.test() as t:
        start = t.now
        await waits.aenqueue()
        await t.advance(0)
        go.set()
        asyncio.get_running_loop().call_later(0.01, answer.set)  # something takes real time
        assert await t.advance("1h") == 1
        assert ended == [start]


async def test_a_run_may_wait_for_a_later_job(app: App) -> None:
    go = asyncio.Event()

    @app.task
    async def waits() -> None:
        await go.wait()
        for _ in range(10):
            await asyncio.sleep(0)

    @app.task
    async def opens() -> None:
        go.set()

    async with app.test(patience="10ms") as t:
        handle = await waits.aenqueue()
        await opens.using(delay="1h").aenqueue()
        assert await t.advance("1h") == 2
        assert t.job(handle).ended_at == t.now


async def test_a_running_job_hears_of_its_cancellation(app: App) -> None:
    @app.task
    async def long() -> None:
        await asyncio.Event().wait()

    async with app.test(patience="10ms") as t:
        handle = await long.aenqueue()
        await t.advance(0)
        assert await handle.acancel()
        await t.drain()
        assert t.job(handle).state is State.CANCELLED


async def test_a_waiting_job_expires(app: App) -> None:
    @app.task
    async def task() -> None: ...

    async with app.test() as t:
        handle = await task.using(delay="2h", expires="1h").aenqueue()
        assert await t.advance("3h") == 0
        assert (t.job(handle).state, t.job(handle).reason) == (State.DEAD, "expired")


async def test_schedules_are_met_at_each_of_their_instants(app: App) -> None:
    times: list[timedelta] = []

    @app.task
    async def tick() -> None:
        times.append(t.now - start)

    async with app.test() as t:
        start = t.now
        await app.schedules.aput("ticks", every("15m"), tick)
        await t.advance("1h")
    assert times == [timedelta(minutes=minutes) for minutes in (15, 30, 45, 60)]


async def test_the_clock_starts_where_the_test_wants_it(app: App) -> None:
    start = datetime(2030, 5, 6, 7, 8, 9, tzinfo=UTC)
    async with app.test(start=start) as t:
        assert t.now == t.clock.now == start
        await t.advance("51s")
        assert t.now == start + timedelta(seconds=51)


# --- limits ------------------------------------------------------------------------------


async def test_rates_let_jobs_start_at_their_times(app: App) -> None:
    """And not one microsecond early."""
    started: list[tuple[str, float]] = []

    @app.task
    async def call(key: str) -> None:
        started.append((key, (t.now - begin).total_seconds()))

    async with app.test() as t:
        begin = t.now
        await app.limits.aput("k:*", rate="100/s", burst=3)
        for n in range(50):
            await call.using(key=f"k:{n % 2}").aenqueue(f"k:{n % 2}")
        assert await t.drain() == 6
        assert await t.advance(timedelta(microseconds=9999)) == 0
        assert await t.advance(timedelta(microseconds=1)) == 2
        assert await t.advance("1s") == 42

    for key in ("k:0", "k:1"):
        times = [at for of, at in started if of == key]
        assert times == [0.0] * 3 + [round(n / 100, 6) for n in range(1, 23)]


async def test_limits_let_so_many_run_at_once(app: App) -> None:
    running: list[int] = []
    most = 0

    @app.task
    async def work(n: int) -> None:
        nonlocal most
        running.append(n)
        most = max(most, len(running))
        await asyncio.sleep(0)
        running.remove(n)

    async with app.test() as t:
        await app.limits.aput(task=work.name, at_once=3)
        for n in range(20):
            await work.aenqueue(n)
        assert await t.drain() == 20
    assert most == 3
