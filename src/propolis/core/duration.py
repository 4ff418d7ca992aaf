"""Durations as people write them: "5m", "1h30m", "5 minutes", seconds, or a timedelta."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import Annotated

from msgspec import Meta

from propolis.errors import BadDuration

Duration = str | int | float | timedelta

LONGEST = timedelta(days=36_525)  # a century: what is longer overflows some engine's integers or dates
LONGEST_MS = LONGEST // timedelta(milliseconds=1)
Milliseconds = Annotated[int, Meta(ge=0, le=LONGEST_MS)]

_UNIT_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_UNIT_NAMES = {"ms": "millisecond", "s": "second", "m": "minute", "h": "hour", "d": "day", "w": "week"}
_SECONDS = _UNIT_SECONDS | {
    name + end: _UNIT_SECONDS[unit] for unit, name in _UNIT_NAMES.items() for end in ("", "s")
}
_PART = re.compile(rf" *(\d+(?:\.\d+)?) *({'|'.join(sorted(_SECONDS, key=len, reverse=True))})")
_WHOLE = re.compile(rf"(?:{_PART.pattern})+")


def duration(value: Duration) -> timedelta:
    """The timedelta that `value` means; `BadDuration` if it means none, or less than 0, or over a century."""
    if isinstance(value, bool):
        raise BadDuration(value)
    try:
        result = value if isinstance(value, timedelta) else timedelta(seconds=_seconds(value))
    except (OverflowError, TypeError, ValueError):
        raise BadDuration(value) from None
    if not timedelta(0) <= result <= LONGEST:
        raise BadDuration(value)
    return result


def milliseconds(value: Duration) -> int:
    """`value` as whole milliseconds, the unit of the wire."""
    return round(duration(value) / timedelta(milliseconds=1))


def _seconds(value: str | float) -> float:
    if not isinstance(value, str):
        return value
    if not _WHOLE.fullmatch(value.rstrip(" ")):
        raise BadDuration(value)
    return math.fsum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(value))
