"""The lines of a log: as text and as JSON, and the job that runs in those of the app's own."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import pytest
from tests.unit.worker.working import work

from propolis import App, Depends, Job
from propolis.logs import JobFilter, add_job
from propolis.strategies import dead
from propolis.worker.process.log_lines import (
    FORMAT,
    JsonLines,
    LogFormat,
    LogLines,
    LogSetup,
    log_as,
    log_setup,
)

HOSTILE = 'x\n{"level": "INFO"}\r\x85\u2028\x1b[2J\u202egnp.exe'
shop = logging.getLogger("tests.shop")


class Written:
    """What the app writes through a handler with these lines."""

    def __init__(self, formatter: logging.Formatter, job_filter: JobFilter | None) -> None:
        self._text = io.StringIO()
        self.handler = logging.StreamHandler(self._text)
        self.handler.setFormatter(formatter)
        if job_filter is not None:
            self.handler.addFilter(job_filter)

    @property
    def lines(self) -> list[str]:
        return self._text.getvalue().splitlines()

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


def written(formatter: logging.Formatter, job_filter: JobFilter | None) -> Iterator[Written]:
    found, level = Written(formatter, job_filter), shop.level
    shop.addHandler(found.handler)
    shop.setLevel(logging.INFO)
    yield found
    shop.setLevel(level)
    shop.removeHandler(found.handler)


@pytest.fixture
def as_json() -> Iterator[Written]:
    yield from written(JsonLines(), JobFilter(outside=None))


@pytest.fixture
def as_text() -> Iterator[Written]:
    yield from written(LogLines("%(levelname)s %(name)s: %(message)s"), JobFilter(outside=None))


@pytest.fixture
def own_lines() -> Iterator[Written]:
    yield from written(logging.Formatter("%(task)s %(job)s %(attempt)s: %(message)s"), JobFilter())


# --- the job of a line -------------------------------------------------------------------


async def test_lines_of_an_app_have_the_job_that_runs(app: App, own_lines: Written) -> None:
    """In coroutines, threads, dependencies and hooks, and in tasks and threads that they start."""

    def provided() -> int:
        shop.info("provider")
        return 1

    @app.on_finished
    async def finished(job: Job, result: object) -> None:
        shop.info("hook")

    @app.task(name="awaited")
    async def awaited(one: Annotated[int, Depends(provided)]) -> None:
        shop.info("coroutine %d", one)
        await asyncio.create_task(asyncio.to_thread(shop.info, "thread of a task"))

    @app.task(name="plain", on_error=dead)
    def plain() -> None:
        shop.info("thread")

    first = await awaited.aenqueue()  # type: ignore[call-arg]  # the worker gives it
    second = await plain.aenqueue()
    shop.info("outside")
    await work(app)
    assert sorted(own_lines.lines) == sorted(
        [
            "- - -: outside",
            *(
                f"awaited {first.id} 1: {what}"
                for what in ("provider", "coroutine 1", "thread of a task", "hook")
            ),
            *(f"plain {second.id} 1: {what}" for what in ("thread", "hook")),
        ]
    )


async def test_what_a_record_has_already_stays(app: App, as_json: Written) -> None:
    @app.task(name="charge")
    async def charge() -> None:
        shop.info("charged", extra={"task": "a to-do", "customer": 5})

    handle = await charge.aenqueue()
    await work(app)
    [line] = as_json.objects
    assert (line["task"], line["job"], line["customer"]) == ("a to-do", handle.id, 5)


async def test_an_event_of_structlog_has_the_job_too(app: App) -> None:
    events = []

    @app.task(name="charge")
    async def charge() -> None:
        events.append(add_job(None, "info", {"event": "charged", "queue": "at the till"}))

    handle = await charge.aenqueue()
    await work(app)
    [event] = events
    assert event.pop("worker")
    assert event == {
        "event": "charged",
        "queue": "at the till",
        "job": handle.id,
        "task": "charge",
        "attempt": 1,
    }
    assert add_job(None, "info", {"event": "outside"}) == {"event": "outside"}


# --- text --------------------------------------------------------------------------------


async def test_a_line_of_text_names_its_job_once(app: App, as_text: Written) -> None:
    @app.task(name="charge")
    async def charge(job: Job) -> None:
        shop.info("charged")
        shop.info("charged by %s", job.id)

    handle = await charge.aenqueue()
    shop.info("outside")
    await work(app)
    assert as_text.lines == [
        f"INFO {shop.name}: outside",
        f"INFO {shop.name}: charged [charge {handle.id}, attempt 1]",
        f"INFO {shop.name}: charged by {handle.id}",
    ]


def test_the_time_of_a_line_is_that_of_logging_itself() -> None:
    for created in (1_900_000_000.0, 1_900_000_000.999, 1_900_000_001.5, 1_899_999_999.25):
        record = logging.makeLogRecord({"created": created, "msecs": created % 1 * 1000, "msg": "x"})
        assert LogLines(FORMAT).format(record) == logging.Formatter(FORMAT).format(record)
        given = logging.Formatter("%(asctime)s", "%d.%m.%Y").format(record)
        assert LogLines("%(asctime)s", "%d.%m.%Y").format(record) == given


# --- JSON --------------------------------------------------------------------------------


def test_a_line_of_json_has_its_fields_in_their_order(as_json: Written) -> None:
    before = logging.getLogger().level
    shop.info("charged %d", 5, extra={"customer": {"id": 7}, "none": None, "level": "forged"})
    assert logging.getLogger().level == before
    [line] = as_json.objects
    assert list(line) == ["time", "level", "logger", "message", "customer"]
    assert (line["level"], line["logger"], line["message"]) == ("INFO", shop.name, "charged 5")
    assert line["customer"] == {"id": 7}


def test_the_time_is_utc() -> None:
    record = logging.makeLogRecord({"created": 1_900_000_000.25, "msecs": 250.0, "msg": "x"})
    assert json.loads(JsonLines().format(record))["time"] == "2030-03-17T17:46:40.250Z"


def test_whatever_is_in_it_is_one_line_and_comes_back(as_json: Written) -> None:
    """S10."""
    shop.info("no such %s", HOSTILE, extra={"given": HOSTILE})
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        shop.exception("it failed", stack_info=True)
    assert all(line.isprintable() for line in as_json.lines)
    first, second = as_json.objects
    assert first["given"] == HOSTILE
    assert first["message"] == f"no such {HOSTILE}"
    assert second["traceback"].startswith("Traceback (most recent call last):\n")
    assert "gnp.exe" in second["traceback"]
    assert second["stack"].startswith("Stack (most recent call last):\n")


def test_what_is_no_utf_8_is_spelt_out() -> None:
    """As Python has the names of files; several readers of JSON refuse half a character."""
    record = logging.makeLogRecord({"msg": "no such \ud800", "given": "\udcff", "\udcfe": 1})
    line = json.loads(JsonLines().format(record))
    assert (line["message"], line["given"], line["\\udcfe"]) == ("no such \\ud800", "\\udcff", 1)


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


class Unshowable:
    def __str__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1 + 2j, "(1+2j)"),
        (2**70, 2**70),
        ({"a": {1, 2}}, {"a": [1, 2]}),
        ({None: object}, {"None": "<class 'object'>"}),
        (CYCLE, "[[...]]"),
        (float("nan"), None),
        (Unshowable(), "(a Unshowable that cannot be shown: ZeroDivisionError)"),
    ],
)
def test_a_field_that_has_no_json_is_text(as_json: Written, value: object, shown: object) -> None:
    shop.info("charged", extra={"given": value})
    assert as_json.objects[0]["given"] == shown


def test_passwords_of_urls_are_masked_in_every_field(as_json: Written) -> None:
    url = "postgresql://me:hunter2@host/db"
    shop.info("at %s", url, extra={"url": url, "urls": [{"first": url, "n": 1}]})
    try:
        raise ValueError(url)
    except ValueError:
        shop.exception("it failed")
    assert "hunter2" not in as_json.lines[0]
    assert as_json.objects[0]["urls"] == [{"first": "postgresql://me:***@host/db", "n": 1}]
    assert "ValueError: postgresql://me:***@host/db" in as_json.objects[1]["traceback"]


# --- setting it up -----------------------------------------------------------------------


@contextmanager
def nothing_set_up() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("propolis")
    handlers, levels = root.handlers, (root.level, own.level)
    root.handlers = []
    try:
        yield
    finally:
        root.handlers = handlers
        root.setLevel(levels[0])
        own.setLevel(levels[1])


@pytest.mark.parametrize("log_format", LogFormat)
def test_another_process_can_log_as_this_one(log_format: LogFormat) -> None:
    setup = LogSetup(logging.WARNING, logging.DEBUG, log_format)
    with nothing_set_up():
        assert log_setup() is None
        log_as(setup)
        assert log_setup() == setup


def test_where_the_app_has_set_logging_up_it_stays_so() -> None:
    with nothing_set_up():
        logging.basicConfig(level=logging.ERROR, format="%(message)s")
        log_as(LogSetup(logging.INFO, logging.DEBUG, LogFormat.JSON))
        assert log_setup() == LogSetup(logging.ERROR, logging.DEBUG, LogFormat.TEXT)
        [handler] = logging.getLogger().handlers
        assert handler.filters == []
