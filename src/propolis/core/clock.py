"""Time as engines keep it: whole microseconds since 1970, from one clock that tests can move."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


class Clock(Protocol):
    """What an engine asks for the time.  Engines with a server of their own ask that server instead."""

    def now_us(self) -> int: ...


class SystemClock:
    """The machine's wall clock."""

    def now_us(self) -> int:
        return time.time_ns() // 1000


def to_us(moment: datetime) -> int:
    return (moment - EPOCH) // MICROSECOND


def from_us(us: int) -> datetime:
    return EPOCH + timedelta(microseconds=us)


EARLIEST_US = to_us(datetime.min.replace(tzinfo=UTC))
LATEST_US = to_us(datetime.max.replace(tzinfo=UTC))


def moment(us: object) -> datetime | None:
    """None also for what is no time, or one that no datetime can be: a foreign hand may have written it."""
    return from_us(us) if isinstance(us, int) and EARLIEST_US <= us <= LATEST_US else None


def span_us(span: timedelta) -> int:
    return span // MICROSECOND


def span_until(us: int | None, now_us: int) -> timedelta | None:
    return None if us is None else timedelta(microseconds=us - now_us)
