"""Durations as people write them."""

from __future__ import annotations

import contextlib
import math
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from propolis.core.duration import LONGEST, LONGEST_MS, Duration, duration, milliseconds
from propolis.errors import BadDuration

DAY_MS = 86_400_000


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("90s", 90),
        ("250ms", 0.25),
        ("5m", 300),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        (" 2 h ", 7200),
        ("1.5h", 5400),
        ("7d", 604_800),
        ("2w", 1_209_600),
        ("1w1d1h1m1s1ms", 694_861.001),
        ("30m1h", 5400),
        ("1m1m", 120),
        ("5 minutes", 300),
        ("1 minute", 60),
        ("1 hour 30 minutes", 5400),
        ("1hour30minutes", 5400),
        ("2 days", 172_800),
        ("1.5 weeks", 907_200),
        ("1 second 1 millisecond", 1.001),
        ("250 milliseconds", 0.25),
        ("1day 1h 1 second", 90_001),
        ("0s", 0),
        (0, 0),
        (15, 15),
        (0.25, 0.25),
        (timedelta(minutes=5), 300),
        ("36525d", 36_525 * 86_400),
    ],
)
def test_a_duration_means_what_it_says(written: Duration, seconds: float) -> None:
    assert duration(written) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "written",
    [
        "",
        " ",
        "5",
        "m",
        "5x",
        "5M",
        "5 Minutes",
        "5 minutess",
        "5 min",
        "1 month",
        "minutes",
        "5 m inutes",
        "-5s",
        "+5s",
        "1e3s",
        ".5s",
        "5.s",
        "5s,",
        "1 0s",
        "5 m s",
        "5\tm",
        "5m\n",
        "1h30",
        "soon",
        "1" * 400 + "s",
        "1" + "0" * 308 + "s" + "1" + "0" * 308 + "s",
        "36526d",
        -1,
        -0.001,
        math.nan,
        math.inf,
        -math.inf,
        10**400,
        1e300,
        True,
        False,
        timedelta(seconds=-1),
        timedelta.max,
    ],
)
def test_what_is_no_duration_is_refused(written: Duration) -> None:
    with pytest.raises(BadDuration) as caught:
        duration(written)
    assert caught.value.value is written


@pytest.mark.parametrize("value", [None, Decimal(1), [1], b"5s", object()])
def test_a_value_of_another_type_is_refused(value: Any) -> None:
    with pytest.raises(BadDuration):
        duration(value)


@pytest.mark.parametrize(
    ("written", "ms"),
    [("1s", 1000), ("1ms", 1), (0.0004, 0), (0.0006, 1), ("1.5ms", 2), (timedelta(microseconds=1499), 1)],
)
def test_milliseconds_are_rounded_to_whole_ones(written: Duration, ms: int) -> None:
    assert milliseconds(written) == ms


def test_a_century_is_the_longest() -> None:
    assert milliseconds(LONGEST) == LONGEST_MS
    with pytest.raises(BadDuration, match="100 years"):
        duration(LONGEST + timedelta(microseconds=1))


@given(st.integers(min_value=0, max_value=LONGEST_MS))
def test_parts_add_up_exactly(ms: int) -> None:
    days, rest = divmod(ms, DAY_MS)
    text = f"{days}d {rest // 1000}s {rest % 1000}ms"
    assert milliseconds(text) == ms
    assert duration(text) == timedelta(milliseconds=ms)


@given(st.timedeltas(min_value=timedelta(0), max_value=LONGEST))
def test_a_timedelta_is_its_own_duration(span: timedelta) -> None:
    assert duration(span) is span


@given(st.text() | st.floats() | st.integers())
def test_whatever_is_written_gives_a_duration_or_the_one_error(written: Duration) -> None:
    with contextlib.suppress(BadDuration):
        assert timedelta(0) <= duration(written) <= LONGEST
