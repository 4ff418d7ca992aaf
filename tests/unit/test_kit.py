"""The test kit: the real worker in virtual time, and what tests can do to it and ask of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from skep import (
    App,
    Durability,
    Failure,
    Job,
    Retry,
    Snooze,
    State,
    archive,
    dead,
    exponential,
    fixed,
    repeat,
)
from skep.broker import Swept
from skep.errors import BadSetting
from skep.job import Dead, Done
from skep.job import Retry as RetryOutcome
from skep.schedule import Every, Schedule, firing_id, next_instant
from skep.testing import kit as kit_module
from skep.testing.kit import AnyJob, Kit

HOURLY = exponential("1h", cap="8h", jitter=0)


@pytest.fixture
def app() -> App:
    return App("sqlite:////nowhere/to/be/found.db")  # nothing may touch the app's own engine


def kinds(t: Kit, handle: AnyJob) -> list[str]:
    return [event.kind for event in t.history(handle)]


# --- where things go ---------------------------------------------------------------------


async def test_enqueues_of_both_kinds_handles_and_operations_go_to_the_kit(app: App) -> None:
    seen: list[str] = []

    @app.task(result_ttl="1h")
    async def double(n: int) -> int:
        seen.append(f"double {n}")
        return 2 * n

    async with app.test() as t:
        one, two = await double.aenqueue(1), double.enqueue(2)
        assert [record.id for record in await app.jobs.afind()] == [one.id, two.id]
        assert await t.drain() == 2
        assert seen == ["double 1", "double 2"]
        assert (await one.aresult("1s"), two.result("1s")) == (2, 4)
        assert (await app.queues.acounts())["default"].done == 2


async def test_the_engine_of_the_app_is_back_afterwards_also_after_an_error() -> None:
    app = App("memory://")
    task = app.task(name="task")(lambda: None)
    before = await task.aenqueue()
    engine, url = app.engine, app.url
    with suppress(ZeroDivisionError):
        async with app.test():
            assert app.engine is not engine
            await task.aenqueue()
            raise ZeroDivisionError
    assert (app.engine, app.url) == (engine, url)
    assert [record.id for record in await app.jobs.afind()] == [before.id]
    assert app.middlewares == []
    await app.aclose()


async def test_a_second_kit_inside_the_first_is_refused_and_one_after_it_starts_empty(app: App) -> None:
    task = app.task(name="task")(lambda: None)
    async with app.test() as t:
        with pytest.raises(BadSetting, match="tested already"):
            async with app.test():
                pass
        await task.aenqueue()
        assert await t.drain() == 1
    async with app.test() as t:
        assert t.jobs() == []
        assert await t.drain() == 0


async def test_two_apps_have_clocks_and_jobs_of_their_own(app: App) -> None:
    other = App("memory://")
    ran: list[str] = []
    here = app.task(name="here")(lambda: ran.append("here"))
    there = other.task(name="there")(lambda: ran.append("there"))
    async with app.test() as t, other.test() as u:
        await here.using(delay="1h").aenqueue()
        await there.using(delay="1h").aenqueue()
        await u.advance("2h")
        assert ran == ["there"]
        assert t.now + timedelta(hours=2) == u.now
        t.assert_not_enqueued(there)
        await t.advance("2h")
    assert ran == ["there", "here"]


async def test_a_floor_of_durability_is_for_the_real_engine() -> None:
    app = App("memory://", durability=Durability.POWER)
    task = app.task(name="task")(lambda: None)
    async with app.test() as t:
        await task.aenqueue()
        assert await t.drain() == 1


async def test_an_app_that_is_closed_inside_goes_on_with_the_kit(app: App) -> None:
    task = app.task(name="task")(lambda: None)
    async with app.test() as t:
        await task.aenqueue()
        await app.aclose()
        await task.aenqueue()
        assert await t.drain() == 2


async def test_the_hooks_of_a_worker_are_called_and_what_they_leave_is_there(app: App) -> None:
    told: list[str] = []

    @app.on_startup
    async def up(state: SimpleNamespace) -> None:
        told.append("up")
        state.greeting = "hello"

    @app.on_shutdown
    def down(state: SimpleNamespace) -> None:
        told.append("down")

    @app.task
    async def greet(job: Job) -> None:
        told.append(job.state.greeting)

    async with app.test() as t:
        await greet.aenqueue()
        await t.drain()
    assert told == ["up", "hello", "down"]


async def test_a_start_up_hook_that_raises_fails_the_test_and_lets_go_of_the_app(app: App) -> None:
    app.on_startup(lambda state: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            async with app.test():
                pass
    assert app.middlewares == []


# --- drain -------------------------------------------------------------------------------


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


# --- advance -----------------------------------------------------------------------------


async def test_a_chain_of_retries_over_hours_takes_no_time(app: App) -> None:
    times: list[timedelta] = []

    @app.task(on_error=repeat(5, HOURLY).then(dead))
    async def flaky() -> None:
        times.append(t.now - start)
        raise OSError("down")

    async with app.test() as t:
        start = t.now
        handle = await flaky.aenqueue()
        began = time.monotonic()
        assert await t.advance("24h") == 6
        assert time.monotonic() - began < 5
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


async def test_schedules_are_met_at_each_of_their_instants(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[timedelta] = []

    @app.task
    async def tick() -> None:
        times.append(t.now - start)

    async with app.test() as t:
        start = t.now
        schedule = Schedule(name="ticks", timing=Every(900_000), job=tick.job())
        await t.engine.put_schedule(schedule, next_instant(schedule.timing, start))
        monkeypatch.setattr(t.engine, "sweep", firing(t))
        await t.advance("1h")
    assert times == [timedelta(minutes=minutes) for minutes in (15, 30, 45, 60)]


def firing(t: Kit) -> Callable[..., Awaitable[Swept]]:
    """A sweep that also fires what is due, as a worker would."""
    sweep = t.engine.sweep

    async def fire_and_sweep(*, limit: int = 1000) -> Swept:
        for due in await t.engine.schedules(due=True):
            name, timing = due.schedule.name, due.schedule.timing
            fired = replace(due.schedule.job, id=firing_id(name, due.next_at), chosen=True)
            assert await t.engine.fire(name, due.next_at, fired, next_instant(timing, due.next_at))
        return await sweep(limit=limit)

    return fire_and_sweep


async def test_the_clock_starts_where_the_test_wants_it(app: App) -> None:
    start = datetime(2030, 5, 6, 7, 8, 9, tzinfo=UTC)
    async with app.test(start=start) as t:
        assert t.now == t.clock.now == start
        await t.advance("51s")
        assert t.now == start + timedelta(seconds=51)


# --- what goes wrong ---------------------------------------------------------------------


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
        record = t.job(handle)
        assert (record.state, record.crashes, record.attempts) == (State.DONE, 1, 2)
        [event] = t.history(handle)
        assert (event.kind, event.attempt, event.holder) == ("crashed", 1, "worker-1")
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
        assert (ran, t.job(handle).crashes) == ([1, 2], 1)


async def test_a_job_that_fails_when_the_worker_is_killed_is_not_recorded_as_failed(app: App) -> None:
    @app.task
    async def fails() -> None:
        raise OSError

    async with app.test() as t:
        handle = await fails.aenqueue()
        await t.kill_worker(during=fails)
        record = t.job(handle)
        assert (record.state, record.failures) == (State.RUNNING, 0)


async def test_a_plain_function_can_be_killed_as_well(app: App) -> None:
    ran: list[int] = []

    @app.task
    def charge(job: Job) -> None:
        ran.append(job.attempt)

    async with app.test() as t:
        handle = await charge.aenqueue()
        await t.kill_worker(during=charge)
        await t.advance("15s")
        assert (ran, t.job(handle).crashes) == ([1, 2], 1)


async def test_a_job_that_was_running_already_is_killed_where_it_is(app: App) -> None:
    @app.task(name="waits")
    async def waits() -> None:
        await asyncio.Event().wait()

    async with app.test(patience="10ms") as t:
        handle = await waits.aenqueue()
        await t.advance(0)
        await t.kill_worker(during="waits")
        await t.advance("15s")
        record = t.job(handle)
        assert (record.state, record.crashes, record.holder) == (State.RUNNING, 1, "worker-2")


async def test_a_job_that_kills_its_worker_again_and_again_ends_as_dead(app: App) -> None:
    @app.task
    async def poison() -> None: ...

    async with app.test() as t:
        handle = await poison.aenqueue()
        for _ in range(3):
            await t.kill_worker(during=poison)
            t.clock.advance("15s")
        await t.drain()
        assert (t.job(handle).state, t.job(handle).reason) == (State.DEAD, "crashed")
        assert kinds(t, handle) == ["crashed"] * 3


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
    told: list[str] = []
    app.on_startup(lambda state: told.append("up"))
    app.on_shutdown(lambda state: told.append("down"))

    @app.task
    async def task() -> None: ...

    async with app.test() as t:
        handle = await task.aenqueue()
        await t.kill_worker()
        assert told == ["up", "up"]
        assert t.job(handle).state is State.READY
        assert await t.drain() == 1
        assert (t.job(handle).crashes, kinds(t, handle)) == (0, [])
    assert told == ["up", "up", "down"]


async def test_a_run_that_loses_its_lease_is_stopped_and_the_job_runs_again(app: App) -> None:
    began: list[int] = []
    stopped: list[int] = []
    lost: list[str] = []
    go = asyncio.Event()
    app.on_lost(lambda job: lost.append(job.id))

    @app.task
    async def slow(job: Job) -> None:
        began.append(job.fence)
        try:
            await go.wait()
        except asyncio.CancelledError:
            stopped.append(job.fence)
            raise

    async with app.test(patience="10ms") as t:
        handle = await slow.aenqueue()
        await t.lose_lease(handle)
        assert (began, stopped, lost) == ([1], [1], [handle.id])
        assert (t.job(handle).state, t.job(handle).crashes) == (State.READY, 1)
        go.set()
        assert await t.drain() == 1
        assert (began, t.job(handle).state, kinds(t, handle)) == ([1, 2], State.DONE, ["crashed"])


async def test_a_run_that_ends_after_its_lease_is_refused_and_the_job_runs_again(app: App) -> None:
    ran: list[int] = []

    @app.task
    async def quick(job: Job) -> None:
        ran.append(job.fence)

    async with app.test() as t:
        handle = await quick.aenqueue()
        await t.lose_lease(handle.id)
        assert (ran, t.job(handle).state, t.outcome(handle)) == ([1], State.READY, None)
        assert await t.drain() == 1
        assert (ran, t.job(handle).state, t.job(handle).crashes) == ([1, 2], State.DONE, 1)


async def test_a_lease_cannot_be_lost_by_a_job_that_does_not_run(app: App) -> None:
    @app.task
    async def task() -> None: ...

    async with app.test() as t:
        handle = await task.using(delay="1h").aenqueue()
        with pytest.raises(AssertionError, match=f"no job {handle.id} is running"):
            await t.lose_lease(handle)


# --- what can be asked -------------------------------------------------------------------


async def test_enqueued_jobs_are_found_by_what_the_task_would_get(app: App) -> None:
    @app.task(name="mail", queue="mail")
    async def mail(to: str, subject: str = "hi", *, copies: int = 1) -> None: ...

    @app.task(name="other")
    async def other(when: datetime) -> None: ...

    async with app.test() as t:
        t.assert_not_enqueued(mail)
        await mail.aenqueue("a@b.c", subject="hi")
        await mail.using(delay="5m", queue="slow").aenqueue("x@y.z", copies=2)
        await t.drain()
        t.assert_enqueued(mail)
        t.assert_enqueued(mail, count=2)
        t.assert_enqueued(mail, "a@b.c", "hi", queue="mail", delay=0, count=1)
        t.assert_enqueued(mail, to="x@y.z", copies=2, queue="slow", delay="300s")
        t.assert_not_enqueued(mail, "a@b.c", "ho")
        t.assert_not_enqueued(mail, queue="default")
        t.assert_not_enqueued(other)
        await other.using(at=t.now + timedelta(hours=1)).aenqueue(t.now)
        t.assert_enqueued(other, t.now, delay="1h")


async def test_a_failed_assertion_shows_what_was_enqueued_instead(app: App) -> None:
    @app.task(name="mail")
    async def mail(to: str, subject: str = "hi") -> None: ...

    async with app.test() as t:
        with pytest.raises(AssertionError, match=r"^mail\(\.\.\.\) was not enqueued; nothing was enqueued$"):
            t.assert_enqueued(mail)
        await mail.using(delay="5m", queue="slow").aenqueue("x@y.z")
        with pytest.raises(AssertionError) as failed:
            t.assert_enqueued(mail, "a@b.c", queue="q", delay="1m")
        assert str(failed.value) == (
            "mail('a@b.c') in queue 'q' with a delay of 0:01:00 was not enqueued; enqueued were (1):\n"
            "  mail('x@y.z') in queue 'slow', delay 0:05:00: ready"
        )
        with pytest.raises(AssertionError, match=r"mail\(\.\.\.\) was enqueued 1 times, not 2"):
            t.assert_enqueued(mail, count=2)
        with pytest.raises(AssertionError, match=r"mail\(\.\.\.\) was enqueued; "):
            t.assert_not_enqueued(mail)
        with pytest.raises(TypeError):
            t.assert_enqueued(mail, 1)
        await mail.many(["a"] * 30).aenqueue()
        with pytest.raises(AssertionError, match=r"\.\.\. and 11 more$"):
            t.assert_enqueued(mail, count=1)


async def test_ended_jobs_can_still_be_asked_for(app: App) -> None:
    @app.task(name="good")
    async def good() -> None: ...

    @app.task(name="bad", on_error=repeat(1, fixed(0)).then(dead))
    async def bad() -> None:
        raise OSError("down")

    @app.task(name="never")
    async def never() -> None:
        raise Failure("no use")

    async with app.test() as t:
        handles = [await good.aenqueue(), await bad.aenqueue(), await never.aenqueue()]
        assert [t.outcome(handle) for handle in handles] == [None] * 3
        await t.drain()
        assert await handles[0].astatus() is None  # to the app it is as gone as it would be in production
        assert [record.id for record in t.jobs()] == [handle.id for handle in handles]
        assert [record.id for record in t.jobs(task="bad")] == [handles[1].id]
        assert [record.task for record in t.jobs(state=State.DEAD)] == ["bad", "never"]
        assert t.jobs(task=good, state=State.DEAD) == []
        assert t.outcome(handles[0]) == Done()
        match t.outcome(handles[1]):
            case Dead(error=error):
                assert error is not None
                assert error.message == "down"
            case other:
                pytest.fail(f"{other}")
        assert [type(error) for error in t.errors] == [OSError, OSError]
        with pytest.raises(LookupError):
            t.job("no such job")


async def test_the_outcome_is_that_of_the_last_run(app: App) -> None:
    @app.task(on_error=repeat(1, fixed("1m")).then(dead))
    async def flaky(job: Job) -> None:
        if job.attempt == 1:
            raise OSError

    async with app.test() as t:
        handle = await flaky.aenqueue()
        await t.drain()
        assert isinstance(t.outcome(handle), RetryOutcome)
        await t.advance("1m")
        assert t.outcome(handle) == Done()


# --- plain tests -------------------------------------------------------------------------


def test_a_plain_test_does_the_same_without_an_event_loop(app: App) -> None:
    ran: list[int] = []

    @app.task(on_error=repeat(1, fixed("1h")).then(dead))
    async def flaky(job: Job) -> None:
        ran.append(job.attempt)
        if job.attempt == 1:
            raise OSError

    with app.test() as t:
        handle = flaky.enqueue()
        t.assert_enqueued(flaky, count=1)
        assert t.drain() == 1
        assert t.advance("1h") == 1
        assert (ran, t.job(handle).state, len(t.errors)) == ([1, 2], State.DONE, 1)
        other = flaky.enqueue()
        t.kill_worker(during=flaky)
        assert t.job(other).state is State.RUNNING
        third = flaky.using(delay="1s").enqueue()
        t.clock.advance("1s")
        t.lose_lease(third)
        assert t.job(third).crashes == 1


def test_a_plain_test_that_cannot_start_leaves_no_thread_behind(app: App) -> None:
    app.on_startup(lambda state: 1 / 0)
    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError), app.test():
        pass
    assert set(threading.enumerate()) <= before  # and not counted: one of an earlier test may end meanwhile
