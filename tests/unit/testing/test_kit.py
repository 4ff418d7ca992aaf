"""The test kit: where the jobs of an app go in a test, and what can be asked of them."""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest

from propolis import App, Discard, Job
from propolis.core.job import Dead, Done, Retried
from propolis.errors import BadSetting
from propolis.strategies import dead, fixed, repeat
from propolis.values import Durability, State

# --- where things go ---------------------------------------------------------------------


async def test_enqueues_of_both_kinds_handles_and_operations_go_to_the_kit(app: App) -> None:
    seen: list[str] = []

    @app.task(result_ttl="1h")
    async def double(n: int) -> int:
        seen.append(f"double {n}")
        return 2 * n

    async with app.test() as t:
        one, two = await double.aenqueue(1), double.enqueue(2)
        assert [info.id for info in await app.jobs.afind()] == [one.id, two.id]
        assert await t.drain() == 2
        assert seen == ["double 1", "double 2"]
        assert (await one.aresult("1s"), two.result("1s")) == (2, 4)
        assert (await app.queues.acounts())["default"].done == 2


async def test_the_engine_of_the_app_is_back_afterwards_also_after_an_error() -> None:
    app = App("memory://")
    task = app.task(name="task")(lambda: None)
    before = await task.aenqueue()
    engine, url = app.client.engine, app.url
    with suppress(ZeroDivisionError):
        async with app.test():
            assert app.client.engine is not engine
            await task.aenqueue()
            raise ZeroDivisionError
    assert (app.client.engine, app.url) == (engine, url)
    assert [info.id for info in await app.jobs.afind()] == [before.id]
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
    calls: list[str] = []

    @app.on_startup
    async def up(state: SimpleNamespace) -> None:
        calls.append("up")
        state.greeting = "hello"

    @app.on_shutdown
    def down(state: SimpleNamespace) -> None:
        calls.append("down")

    @app.task
    async def greet(job: Job) -> None:
        calls.append(job.state.greeting)

    async with app.test() as t:
        await greet.aenqueue()
        await t.drain()
    assert calls == ["up", "hello", "down"]


async def test_a_start_up_hook_that_raises_fails_the_test_and_lets_go_of_the_app(app: App) -> None:
    app.on_startup(lambda state: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            async with app.test():
                pass
    assert app.middlewares == []


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
        raise Discard("no use")

    async with app.test() as t:
        handles = [await good.aenqueue(), await bad.aenqueue(), await never.aenqueue()]
        assert [t.outcome(handle) for handle in handles] == [None] * 3
        await t.drain()
        assert await handles[0].astatus() is None  # to the app it is as gone as it would be in production
        assert [info.id for info in t.jobs()] == [handle.id for handle in handles]
        assert [info.id for info in t.jobs(task="bad")] == [handles[1].id]
        assert [info.task for info in t.jobs(state=State.DEAD)] == ["bad", "never"]
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
        assert isinstance(t.outcome(handle), Retried)
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
        assert t.job(third).losses == 1


def test_a_plain_test_that_cannot_start_leaves_no_thread_behind(app: App) -> None:
    app.on_startup(lambda state: 1 / 0)
    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError), app.test():
        pass
    assert set(threading.enumerate()) <= before  # and not counted: one of an earlier test may end meanwhile
