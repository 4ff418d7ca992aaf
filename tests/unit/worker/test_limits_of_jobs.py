"""What a job may ask for, how its failures are counted, and what can be a task at all."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.worker.working import record_of, work

from propolis import App
from propolis.errors import BadSetting
from propolis.strategies import dead, fixed, repeat, repeat_forever
from propolis.values import State
from propolis.worker import Lane, Mode, Settings, Worker

ONE_SLOT = [Lane({"default": 1}, 1)]


class WobblyThing(ValueError): ...


class WobblierStill(WobblyThing): ...


@pytest.mark.parametrize(
    ("raised", "runs"),
    [
        ([WobblyThing, WobblyThing, WobblyThing], 3),  # repeat(2)
        ([WobblyThing, KeyError, WobblyThing, KeyError], 4),  # each within its own: repeat(2) and repeat(1)
        ([KeyError, WobblyThing, KeyError], 3),
        (
            [OSError, WobblierStill, WobblyThing, OSError, KeyError, OSError],
            6,
        ),  # the general rule too
    ],
)
async def test_each_rule_for_an_exception_counts_its_own(
    app: App, raised: list[type[Exception]], runs: int
) -> None:
    """W.6, S1.9: a subclass counts with its rule; the last one of the list exhausts its rule."""
    ran: list[str] = []

    @app.task(
        on_error={
            WobblyThing: repeat(2, fixed(0)),
            KeyError: repeat(1, fixed(0)),
            Exception: repeat(2, fixed(0)),
        }
    )
    async def fail() -> None:
        kind = raised[len(ran)]
        ran.append(kind.__name__)
        raise kind("so")

    handle = await fail.aenqueue()
    await work(app)
    assert len(ran) == runs
    record = await record_of(app, handle.id)
    assert (record.state, record.failures) == (State.DEAD, runs)


async def test_a_rule_counts_its_own_also_where_the_history_has_forgotten_it(app: App) -> None:
    """W.6: a hundred events are kept; and a job that is replayed begins again."""
    lives = [
        [KeyError, *[WobblyThing] * 130, KeyError, *[WobblyThing] * 130, KeyError],
        [*[WobblyThing] * 230, KeyError, KeyError, KeyError],
    ]
    ahead: list[type[Exception]] = []

    @app.task(on_error={WobblyThing: repeat_forever(fixed(0)), KeyError: repeat(2, fixed(0))})
    async def fail() -> None:
        raise ahead.pop(0)("so")

    handle = await fail.aenqueue()
    for life in lives:
        ahead += life
        await work(app)
        record = await record_of(app, handle.id)
        assert (record.state, record.failures, ahead) == (State.DEAD, len(life), [])
        assert await app.jobs.areplay(handle.id) == [True]


async def test_a_job_has_no_more_time_than_its_task_gives_to_any(app: App) -> None:
    """W.8: `using` refuses it, and what a stranger has put is bounded."""

    @app.task(timeout="20ms", on_timeout=dead)
    async def sleep() -> None:
        await asyncio.sleep(600)

    @app.task(name="longer", timeout="1s", max_timeout="1m")
    async def longer() -> None: ...

    with pytest.raises(BadSetting, match="max_timeout"):
        sleep.using(timeout="21ms")
    sleep.using(timeout="19ms")
    longer.using(timeout="1m")
    with pytest.raises(BadSetting, match="60 s"):
        longer.using(timeout="61s")
    with pytest.raises(BadSetting, match="more than its max_timeout"):
        app.task(name="wrong", timeout="2s", max_timeout="1s")(longer.function)

    job = replace(sleep.job(), timeout_ms=600_000)
    await app.client.aput(job)
    async with asyncio.timeout(20):
        await work(app)
    assert (await record_of(app, job.id)).reason == "timeout"


async def test_a_job_is_not_repeated_more_often_than_its_task(app: App) -> None:
    """W.8."""
    runs: list[str] = []

    @app.task(on_error=repeat(1, fixed(0)))
    async def fail() -> None:
        runs.append("")
        raise ValueError

    for beyond in (repeat(2), repeat_forever(0)):
        with pytest.raises(BadSetting, match="repeats more often"):
            fail.using(on_error=beyond)
    fail.using(on_error=dead)
    job = replace(fail.job(), on_error=repeat_forever(0))
    await app.client.aput(job)
    await work(app)
    assert len(runs) == 2
    assert (await record_of(app, job.id)).state is State.DEAD


async def test_threads_that_never_end_are_bounded(app: App) -> None:
    """F58, W.8: from so many on the worker ends, loudly, and whoever watches over it starts another."""
    forever = threading.Event()

    @app.task(timeout="1ms", abandon=True, on_timeout=dead)
    def endless() -> None:
        forever.wait(60)

    await endless.many([()] * 20).aenqueue()
    worker = Worker(app, Settings(mode=Mode.FOREVER, lanes=ONE_SLOT, max_stuck=3))
    try:
        async with asyncio.timeout(30):
            with pytest.raises(Exception, match="3 jobs do not stop"):
                await worker.run()
    finally:
        forever.set()
    counts = await app.queues.acounts()
    assert counts["default"].ready >= 15  # what it could not run is there for the next


class BrokenWords(Exception):
    def __init__(self, raises: type[BaseException]) -> None:
        super().__init__()
        self._raises = raises

    def __str__(self) -> str:
        raise self._raises

    __repr__ = __str__


@pytest.mark.parametrize("raises", [ValueError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("is_async", [True, False])
async def test_an_error_that_cannot_be_read_is_an_error(
    app: App, raises: type[BaseException], is_async: bool
) -> None:
    """W.9."""

    def body() -> None:
        raise BrokenWords(raises)

    async def async_body() -> None:
        raise BrokenWords(raises)

    function: Any = async_body if is_async else body
    task: Any = app.task(name="fail", on_error=dead)(function)
    handle = await task.aenqueue()
    await work(app)
    record = await record_of(app, handle.id)
    assert record.error is not None
    assert (record.state, record.error.type) == (State.DEAD, "BrokenWords")
    assert "cannot be read" in record.error.message


class Callables:
    """Objects that can be called, made to look like functions."""

    def __init__(self, function: Any) -> None:
        functools.update_wrapper(self, function)  # type: ignore[arg-type]  # it has a __call__ where it is used


class PlainCallable(Callables):
    def __call__(self, number: int) -> int:
        return number + 1


class AsyncCallable(Callables):
    async def __call__(self, number: int) -> int:
        await asyncio.sleep(0)
        return number + 1


class GeneratorCallable(Callables):
    def __call__(self, number: int) -> Iterator[int]:
        yield number


def shape(number: int) -> int:
    return number


async def test_an_object_that_can_be_called_is_a_task_or_refused(app: App) -> None:
    """W.9: an object whose call is a coroutine function is awaited; partials are refused at declaration."""
    for kind in (PlainCallable, AsyncCallable):
        task: Any = app.task(name=kind.__name__, result_ttl="1h")(kind(shape))
        handle = await task.aenqueue(1)
        await work(app)
        assert await handle.aresult() == 2

    half = functools.partial(shape, 1)
    for what in (half, functools.update_wrapper(half, shape), object(), GeneratorCallable(shape)):
        with pytest.raises(BadSetting):
            app.task(name="refused")(what)  # type: ignore[call-overload]  # as somebody might


async def test_a_timeout_of_zero_patience_is_not_needed_for_a_stuck_coroutine(app: App) -> None:
    """W.8: coroutines that ignore their cancellation count too."""
    over = asyncio.Event()

    @app.task(timeout="1ms", on_timeout=dead)
    async def stubborn() -> None:
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue

    await stubborn.many([()] * 5).aenqueue()
    worker = Worker(app, Settings(lanes=ONE_SLOT, max_stuck=2, stuck_after=timedelta(milliseconds=1)))
    try:
        async with asyncio.timeout(30):
            with pytest.raises(Exception, match="2 jobs do not stop"):
                await worker.run()
    finally:
        over.set()
