"""Time as engines keep it."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from propolis.core.clock import EPOCH, Clock, SystemClock, from_us, span_us, to_us

MOMENTS = st.datetimes(
    min_value=datetime(2, 1, 1),  # noqa: DTZ001 - hypothesis adds the zone
    max_value=datetime(9998, 12, 31),  # noqa: DTZ001
    timezones=st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes))),
)


@given(MOMENTS)
def test_a_moment_survives_the_way_through_microseconds(moment: datetime) -> None:
    again = from_us(to_us(moment))
    assert again == moment
    assert again.tzinfo is UTC


@given(MOMENTS, MOMENTS)
def test_microseconds_are_ordered_as_moments_are(one: datetime, other: datetime) -> None:
    assert (to_us(one) < to_us(other)) == (one < other)


def test_the_epoch_is_zero_and_time_before_it_is_negative() -> None:
    assert to_us(EPOCH) == 0
    assert to_us(EPOCH - timedelta(microseconds=1)) == -1
    assert from_us(-1_000_000) == datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)


def test_a_naive_moment_is_refused() -> None:
    with pytest.raises(TypeError):
        to_us(datetime(2026, 1, 1))  # noqa: DTZ001 - what is being refused


@pytest.mark.parametrize(
    ("span", "us"),
    [
        (timedelta(0), 0),
        (timedelta(seconds=15), 15_000_000),
        (timedelta(microseconds=1), 1),
        (timedelta(days=36_525), 3_155_760_000_000_000),
    ],
)
def test_a_span_is_whole_microseconds(span: timedelta, us: int) -> None:
    assert span_us(span) == us


def test_the_system_clock_is_the_wall_clock() -> None:
    clock: Clock = SystemClock()
    before = time.time_ns() // 1000
    now_us = clock.now_us()
    assert before <= now_us <= time.time_ns() // 1000
