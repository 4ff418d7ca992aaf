"""The command line's small decisions, each a function of values."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import click
import pytest

from propolis import App
from propolis.cli.console.job_views import Shape, redacted, shape
from propolis.cli.console.output import clean, shown_span
from propolis.cli.console.values import moment, span, when
from propolis.cli.top import Speed, View, rates_between
from propolis.cli.worker import Order, declared, lane
from propolis.core.protocols import Counts
from propolis.engines.address import masked_text
from propolis.errors import BadSetting
from propolis.strategies import repeat
from propolis.worker.process.log_lines import LogLines
from propolis.worker.settings import Lane, Mode

NOW = datetime(2030, 1, 1, tzinfo=UTC)


# --- what a terminal gets ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 日本", "plain é 日本"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\x9b2J", "\\x9b2J"),
        ("a\rb\nc\td", "a\\rb\\nc\\td"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\u2066x\u2069", "\\u2066x\\u2069"),
        ("\x7f\x00", "\\x7f\\x00"),
        ("\udc80", "\\udc80"),
    ],
)
def test_what_could_steer_a_terminal_is_spelt_out(text: str, shown: str) -> None:
    """S10."""
    assert clean(text) == shown


def test_lines_stay_lines_where_they_are_meant() -> None:
    assert clean("a\n\tb\x1b\r", lines=True) == "a\n\tb\\x1b\\r"


def test_a_log_line_cannot_steer_a_terminal() -> None:
    """S10."""
    record = logging.LogRecord("propolis", logging.ERROR, "", 1, "job %s", ("\x1b]0;x\x07",), None)
    assert LogLines("%(message)s").format(record) == "job \\x1b]0;x\\x07"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-1, "0s"), (0, "0s"), (59, "59s"), (187, "3m07s"), (7500, "2h05m"), (791_000, "9d03h")],
)
def test_a_span_is_shown_by_its_two_largest_units(seconds: int, shown: str) -> None:
    assert shown_span(timedelta(seconds=seconds)) == shown


# --- secrets -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "bool"),
        (7, "int"),
        (0.5, "float"),
        ("hunter2", "str(7)"),
        ([1, 2], "list(2)"),
        ({"hunter2": 1}, "object(1)"),
    ],
)
def test_a_shape_tells_nothing_of_the_value(value: Any, shown: str) -> None:
    """S12."""
    assert shape(value) == Shape(shown)


def test_what_is_named_like_a_secret_is_hidden_at_any_depth() -> None:
    """S12."""
    value = {"user": "ann", "db": [{"Password": "x", "api_key": "y", "accessToken": ["z"]}]}
    hidden = {"Password": "***", "api_key": "***", "accessToken": "***"}
    assert redacted(value) == {"user": "ann", "db": [hidden]}
    assert redacted("hunter2", "password") == "***"


def test_the_passwords_of_urls_are_masked_wherever_they_stand() -> None:
    """S12."""
    assert masked_text("no answer from redis://u:hunter2@h:1/0") == "no answer from redis://u:***@h:1/0"
    assert masked_text("https://example.org:80/a@b") == "https://example.org:80/a@b"


# --- options -----------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1h30m", 5400), ("15", 15), ("0.5", 0.5)])
def test_a_span_may_be_given_with_units_or_in_seconds(text: str, seconds: float) -> None:
    assert span(text) == timedelta(seconds=seconds)


def test_a_time_without_a_zone_is_local() -> None:
    assert moment("2030-01-01T00:00").utcoffset() is not None
    assert moment("2030-01-01T00:00Z") == NOW
    assert when("2030-01-01T00:00Z") == NOW
    assert when("2h") == timedelta(hours=2)


@pytest.mark.parametrize("text", ["soon", "-3s", "", "1e9"])
def test_what_is_no_span_is_refused_as_usage(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a duration"):
        span(text)
    with pytest.raises(click.BadParameter, match="is not a time"):
        moment(text)


# --- lanes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("mail=20", Lane({"mail": 1}, 20)),
        ("mail", Lane({"mail": 1}, 10)),
        ("mail@3,bulk=20", Lane({"mail": 3, "bulk": 1}, 20)),
        ("mail@3,bulk@1", Lane({"mail": 3, "bulk": 1}, 10)),
        ("tenant:7=2", Lane({"tenant:7": 1}, 2)),
    ],
)
def test_a_lane_is_queues_with_weights_and_slots(text: str, meant: Lane) -> None:
    assert lane(text, 10) == meant


@pytest.mark.parametrize(
    "text", ["", "=3", "mail=", "mail=0", "mail=x", "mail@0=3", "a,,b", "a,a=3", "a b=1", "m=²"]
)
def test_what_is_no_lane_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadSetting, match="mail@3,bulk@1=20"):
        lane(text, 10)


def test_without_queues_a_worker_serves_those_of_the_tasks_and_of_their_repetitions() -> None:
    app = App("memory://")

    @app.task(queue="mail", on_error=repeat(3).on("slow"))
    async def send() -> None: ...

    @app.task(on_error={ValueError: repeat(1).on("odd")})
    async def other() -> None: ...

    assert declared(app, 7) == Lane({"default": 1, "mail": 1, "odd": 1, "slow": 1}, 7)
    with pytest.raises(BadSetting, match="declares no tasks"):
        declared(App("memory://"), 7)


def an_order(**options: Any) -> Order:
    given: dict[str, Any] = {
        "app": "tasks:app",
        "queues": ("mail@3,bulk=20",),
        "concurrency": 10,
        "processes": 4,
        "lease": timedelta(seconds=1.5),
        "grace": timedelta(seconds=28),
        "poll": timedelta(seconds=1),
        "unknown_for": timedelta(minutes=90),
        "mode": None,
        "until_empty": False,
        "once": False,
        "log_level": "info",
        "log_jobs": "sample:9",
        "log_format": "json",
    }
    return Order(**{**given, **options})


def test_the_modes_may_be_named_or_flagged_but_not_mixed() -> None:
    assert an_order().end is Mode.FOREVER
    assert an_order(mode="once").end is Mode.ONCE
    assert an_order(until_empty=True).end is Mode.UNTIL_EMPTY
    assert an_order(mode="once", once=True).end is Mode.ONCE
    with pytest.raises(BadSetting, match="one mode"):
        _ = an_order(mode="forever", once=True).end


def test_each_of_several_processes_gets_the_same_order() -> None:
    arguments = an_order(until_empty=True).for_one_process()
    assert arguments[:4] == ["worker", "tasks:app", "--queue", "mail@3,bulk=20"]
    assert arguments[arguments.index("--processes") + 1] == "1"
    assert arguments[arguments.index("--mode") + 1] == "until-empty"
    assert arguments[arguments.index("--log-jobs") + 1] == "sample:9"
    assert arguments[arguments.index("--log-format") + 1] == "json"
    assert span(arguments[arguments.index("--lease") + 1]) == timedelta(seconds=1.5)
    assert span(arguments[arguments.index("--unknown-for") + 1]) == timedelta(minutes=90)


# --- rates -------------------------------------------------------------------------------


def test_rates_count_what_came_and_what_ended_whether_it_was_kept_or_not() -> None:
    """S1.33."""
    before = View(NOW, {"mail": Counts(ready=10, put=10)}, [])
    after = View(NOW + timedelta(seconds=2), {"mail": Counts(ready=4, done=1, put=14, deleted=9)}, [])
    assert rates_between(before, after) == {"mail": Speed(put=2, ended=5)}


def test_a_rate_is_never_negative_nor_divided_by_nothing() -> None:
    before = View(NOW, {"mail": Counts(dead=5, put=5)}, [])
    replayed = View(NOW + timedelta(seconds=1), {"mail": Counts(ready=5, put=5)}, [])
    assert rates_between(before, replayed) == {"mail": Speed(0, 0)}
    assert rates_between(before, before) == {"mail": Speed(0, 0)}


def test_a_log_message_is_one_line_whatever_is_in_it() -> None:
    """S18: nobody who gets a text into a log writes lines of it; those of a traceback are told apart."""
    forged = "x\n2026-01-01 00:00:00 INFO propolis.worker: all is well\r\x85\u2028\x1b[2J"
    try:
        raise ValueError(forged)
    except ValueError:
        record = logging.LogRecord("name", logging.ERROR, "", 0, "job %s", (forged,), sys.exc_info())
    first, *others = LogLines("%(levelname)s %(message)s").format(record).split("\n")
    assert first.startswith("ERROR job x\\n2026-01-01")
    assert first.isprintable()
    assert len(others) > 3
    assert all(line.startswith("  | ") and line.isprintable() for line in others)
