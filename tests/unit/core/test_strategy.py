"""Strategies are values: built by a few functions, compared, stored, and never nonsense."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from propolis.core.duration import LONGEST_MS
from propolis.core.strategy import (
    AT_ONCE,
    Archive,
    Bury,
    Delete,
    Exponential,
    Fixed,
    Repeat,
    RepeatBy,
    Strategy,
    archive,
    dead,
    delete,
    exponential,
    fixed,
    repeat,
    repeat_forever,
)
from propolis.errors import BadDuration, BadSetting


@pytest.mark.parametrize(
    ("built", "value"),
    [
        (delete, Delete()),
        (archive, Archive(keep_ms=7 * 86_400_000)),
        (archive.keep("1h"), Archive(keep_ms=3_600_000)),
        (dead, Bury()),
        (repeat(5), Repeat(times=5, backoff=AT_ONCE, ending=dead)),
        (repeat(0), Repeat(times=0)),
        (repeat(5, "10s"), Repeat(times=5, backoff=Fixed(delay_ms=10_000))),
        (repeat(5, 10), Repeat(times=5, backoff=Fixed(delay_ms=10_000))),
        (repeat(5, timedelta(seconds=10)), Repeat(times=5, backoff=Fixed(delay_ms=10_000))),
        (repeat(5, fixed("10s")), Repeat(times=5, backoff=Fixed(delay_ms=10_000))),
        (repeat(5, exponential()), Repeat(times=5, backoff=Exponential(first_ms=2000))),
        (repeat(5).then(archive), Repeat(times=5, ending=archive)),
        (repeat(5).on("slow"), Repeat(times=5, queue="slow")),
        (repeat(5, "1s").then(delete).on("slow"), Repeat(5, Fixed(1000), delete, "slow")),
        (repeat_forever("1m"), Repeat(times=None, backoff=Fixed(delay_ms=60_000))),
    ],
)
def test_a_strategy_is_the_value_that_it_reads_as(built: Strategy, value: Strategy) -> None:
    assert built == value


def test_an_exponential_backoff_takes_durations() -> None:
    backoff = exponential("1s", factor=3.0, cap="1m", jitter=0.0)
    assert backoff == Exponential(first_ms=1000, factor=3.0, cap_ms=60_000, jitter=0.0)


def test_changing_a_strategy_leaves_the_first_as_it_was() -> None:
    first = repeat(3)
    first.then(delete)
    first.on("slow")
    archive.keep("1s")
    assert first == repeat(3)
    assert archive == Archive()
    with pytest.raises(AttributeError):
        first.times = 4  # type: ignore[misc]  # frozen, and mypy knows


def test_a_function_may_choose_the_delays() -> None:
    strategy = repeat(3, lambda number: number * 10)
    assert isinstance(strategy, RepeatBy)
    assert [strategy.delay(number) for number in (1, 2)] == [10, 20]


def test_a_function_is_kept_when_the_ending_or_the_queue_changes() -> None:
    strategy = repeat_forever(lambda number: number).then(delete).on("slow")
    assert isinstance(strategy, RepeatBy)
    assert (strategy.times, strategy.ending, strategy.queue) == (None, delete, "slow")


@pytest.mark.parametrize(
    "make",
    [
        lambda: repeat(-1),
        lambda: repeat(2**31),
        lambda: Repeat(times=-1),
        lambda: repeat(-1, lambda number: number),
        lambda: Fixed(delay_ms=-1),
        lambda: Fixed(delay_ms=LONGEST_MS + 1),
        lambda: Archive(keep_ms=-1),
        lambda: Archive(keep_ms=10**30),
        lambda: Exponential(first_ms=-1),
        lambda: Exponential(first_ms=1, cap_ms=-1),
        lambda: exponential(factor=0.5),
        lambda: exponential(factor=-2),
        lambda: exponential(factor=math.inf),
        lambda: exponential(factor=math.nan),
        lambda: exponential(jitter=-0.1),
        lambda: exponential(jitter=1.1),
        lambda: exponential(jitter=math.nan),
    ],
)
def test_a_strategy_that_makes_no_sense_cannot_be_made(make: Callable[[], object]) -> None:
    with pytest.raises(BadSetting):
        make()


@pytest.mark.parametrize("make", [fixed, archive.keep, exponential, repeat_forever])
def test_what_is_no_duration_is_refused_at_once(make: Callable[[str], object]) -> None:
    with pytest.raises(BadDuration):
        make("soon")


@pytest.mark.parametrize(
    ("strategy", "wire"),
    [
        (delete, {"do": "delete"}),
        (archive, {"do": "archive"}),
        (archive.keep("1s"), {"do": "archive", "keep_ms": 1000}),
        (dead, {"do": "dead"}),
        (Repeat(), {"do": "repeat"}),
        (
            repeat_forever("1s"),
            {"do": "repeat", "times": None, "backoff": {"kind": "fixed", "delay_ms": 1000}},
        ),
        (
            repeat(5, exponential("2s")).then(archive).on("slow"),
            {
                "do": "repeat",
                "times": 5,
                "backoff": {"kind": "exponential", "first_ms": 2000, "cap_ms": 3_600_000},
                "ending": {"do": "archive"},
                "queue": "slow",
            },
        ),
    ],
)
def test_a_strategy_travels_as_a_small_object(strategy: Strategy, wire: dict[str, Any]) -> None:
    body = msgspec.json.encode(strategy)
    assert msgspec.json.decode(body) == wire
    assert msgspec.json.decode(body, type=Strategy) == strategy


@pytest.mark.parametrize(
    "wire",
    [
        {"do": "explode"},
        {},
        {"do": "repeat", "times": -1},
        {"do": "repeat", "times": 2**31},
        {"do": "repeat", "times": 1.5},
        {"do": "repeat", "ending": {"do": "repeat"}},
        {"do": "repeat", "backoff": {"kind": "fixed", "delay_ms": -1}},
        {"do": "repeat", "backoff": {"kind": "exponential"}},
        {"do": "repeat", "backoff": {"kind": "exponential", "first_ms": 1, "jitter": 2}},
        {"do": "repeat", "backoff": {"kind": "exponential", "first_ms": 1, "factor": 0}},
        {"do": "archive", "keep_ms": 10**30},
    ],
)
def test_nonsense_from_elsewhere_is_refused_by_decoding(wire: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(wire), type=Strategy)
