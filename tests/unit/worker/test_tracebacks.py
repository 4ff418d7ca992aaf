"""A traceback begins with the first frame of the task; that of a child process is in test_processes.py."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from traceback import extract_tb
from typing import Annotated

import pytest
from tests.unit.worker.working import record_of, work

from propolis import App, BatchReport, Depends, Job
from propolis.core.job import Error
from propolis.strategies import dead
from propolis.worker.process.log_lines import FORMAT, JsonLines, LogLines

HERE = Path(__file__).name


async def error_of(app: App, job_id: str) -> Error:
    error = (await record_of(app, job_id)).error
    assert error is not None
    return error


def frames_of(traceback: str) -> list[tuple[str, str]]:
    """File and function of each frame."""
    lines = [line.split('"') for line in traceback.splitlines() if line.startswith("  File ")]
    return [(Path(file).name, rest.rpartition(" in ")[2]) for _, file, rest in lines]


def deeper() -> None:
    raise ValueError("no")


async def fail() -> None:
    deeper()


def fail_in_thread() -> None:
    deeper()


async def broken() -> AsyncIterator[int]:
    deeper()
    yield 1


def broken_in_thread() -> Iterator[int]:
    deeper()
    yield 1


async def needs(value: Annotated[int, Depends(broken)]) -> None: ...


def needs_in_thread(value: Annotated[int, Depends(broken_in_thread)]) -> None: ...


@pytest.mark.parametrize(
    ("function", "first"),
    [
        (fail, "fail"),
        (fail_in_thread, "fail_in_thread"),
        (needs, "broken"),
        (needs_in_thread, "broken_in_thread"),
    ],
)
async def test_a_traceback_begins_where_the_code_of_the_task_does(
    app: App, caplog: pytest.LogCaptureFixture, function: Callable[..., object], first: str
) -> None:
    handle = await app.task(on_error=dead)(function).aenqueue()
    await work(app)
    error = await error_of(app, handle.id)
    assert frames_of(error.traceback) == [(HERE, first), (HERE, "deeper")]
    [logged] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert logged.exc_info is not None
    assert [frame.name for frame in extract_tb(logged.exc_info[2])] == [first, "deeper"]


async def test_a_middleware_is_code_of_the_app_as_well(app: App) -> None:
    @app.middleware
    async def around(job: Job, call: Callable[[], Awaitable[object]]) -> object:
        return await call()

    handle = await app.task(on_error=dead)(fail).aenqueue()
    await work(app)
    frames = frames_of((await error_of(app, handle.id)).traceback)
    assert (frames[0], frames[-1]) == ((HERE, "around"), (HERE, "deeper"))


async def test_the_test_kit_is_no_code_of_the_task(app: App) -> None:
    async with app.test() as t:
        handle = await app.task(on_error=dead)(fail).aenqueue()
        await t.drain()
        error = await error_of(app, handle.id)
    assert frames_of(error.traceback)[0] == (HERE, "fail")


async def test_an_error_of_ours_keeps_the_whole_traceback(app: App) -> None:
    @app.task(on_error=dead)
    async def no_callback(report: BatchReport) -> None: ...

    handle = await no_callback.aenqueue()
    await work(app)
    frames = frames_of((await error_of(app, handle.id)).traceback)
    assert (frames[0][0], frames[-1]) == ("runner.py", ("report.py", "given"))


async def test_what_the_task_calls_of_ours_is_shown(app: App) -> None:
    @app.task(on_error=dead)
    async def save(job: Job) -> None:
        await job.save(object())

    handle = await save.aenqueue()
    await work(app)
    frames = frames_of((await error_of(app, handle.id)).traceback)
    assert (frames[0], frames[-1][0]) == ((HERE, "save"), "signature.py")


MUCH = "x" * 50_000_000


def fail_with_much() -> None:
    raise ValueError(MUCH)


def fail_because_of_much() -> None:
    try:
        fail_with_much()
    except ValueError as error:
        raise KeyError("no") from error


def fail_with_a_note() -> None:
    error = ValueError("no")
    error.add_note(MUCH)
    raise error


def fail_in_groups() -> None:
    raise ExceptionGroup("no", [ValueError(MUCH) for _ in range(3)])


@pytest.mark.parametrize("function", [fail_with_much, fail_because_of_much, fail_with_a_note, fail_in_groups])
async def test_an_error_of_much_text_is_shown_with_its_frames_and_both_ends_of_the_text(
    app: App, caplog: pytest.LogCaptureFixture, function: Callable[[], None]
) -> None:
    """All of it was logged, and what was stored had no frame."""
    handle = await app.task(on_error=dead)(function).aenqueue()
    await work(app)
    error = await error_of(app, handle.id)
    assert f"in {function.__name__}" in error.traceback
    assert len(error.message) <= 2000
    [logged] = [record for record in caplog.records if record.levelno == logging.ERROR]
    for formatter in (logging.Formatter(), LogLines(FORMAT), JsonLines()):
        line = formatter.format(logged)
        assert len(line) < 40_000
        assert f"in {function.__name__}" in line
        assert "characters)" in line
