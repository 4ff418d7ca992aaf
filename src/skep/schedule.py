"""Schedules as values, and the instants at which they fire: pure functions, no I/O.

Instants belong to the schedule, not to when somebody looked: `every 15m` fires on the quarter
hours however late the last firing was.

On the days when clocks change, a cron time that does not exist fires at the first instant that does,
and a time that comes twice fires once.  Only where the minutes or the hours begin with `*`, which
says "all the time" rather than "at this time", are missing times left out and double ones doubled.
That is what cron does, and what people expect of `0 3 * * *` and of `*/5 * * * *`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from enum import StrEnum
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError
from msgspec import Struct

from skep.clock import EPOCH
from skep.duration import LONGEST_MS, milliseconds
from skep.errors import BadSetting
from skep.job import Job, derive_id

_ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}


class Cron(Struct, frozen=True, tag="cron", tag_field="kind", omit_defaults=True):
    """A cron expression in a time zone: five fields, six with seconds first, or an alias such as @daily."""

    expression: str
    tz: str = "UTC"


class Every(Struct, frozen=True, tag="every", tag_field="kind", omit_defaults=True):
    """A fixed period, counted from an anchor so that all processes agree on the instants."""

    period_ms: int
    anchor: datetime = EPOCH


Timing = Cron | Every


class Misfire(StrEnum):
    """What to do with instants that passed while no worker was there."""

    SKIP = "skip"
    ONCE = "once"
    ALL = "all"


class Overlap(StrEnum):
    """What to do when the job of the last instant has not ended yet."""

    ALLOW = "allow"
    SKIP = "skip"
    QUEUE_ONE = "queue-one"


class Schedule(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job to put at each instant of a timing.  `job` is the pattern; each firing gets its own id."""

    name: str
    timing: Timing
    job: Job
    misfire: Misfire = Misfire.ONCE
    misfire_limit: int = 100
    misfire_after_ms: int = milliseconds("1m")
    overlap: Overlap = Overlap.ALLOW
    jitter_ms: int = 0


class ScheduleRecord(Struct, frozen=True, kw_only=True):
    """A schedule as the engine holds it: its next instant, and the last one that was settled."""

    schedule: Schedule
    next_at: datetime
    last_at: datetime | None = None
    paused: bool = False


def firing_id(name: str, instant: datetime) -> str:
    """The id of the job of one instant: the same whoever fires it, so that it is put once."""
    return derive_id("schedule", name, instant.astimezone(UTC).isoformat())


def next_instant(timing: Timing, after: datetime) -> datetime:
    """The first instant strictly after `after`, in UTC."""
    if isinstance(timing, Every):
        period = timedelta(milliseconds=timing.period_ms)
        anchor = timing.anchor.astimezone(UTC)  # sums inside a zone would follow its clock changes
        return anchor + ((after - anchor) // period + 1) * period
    return _next_cron(timing, after)


def check(timing: Timing) -> None:
    """`BadSetting` now rather than at the first firing."""
    if isinstance(timing, Every):
        if not 0 < timing.period_ms <= LONGEST_MS:
            raise BadSetting("a period must be longer than nothing, and at most 100 years")
        if timing.anchor.tzinfo is None:
            raise BadSetting(f"the anchor {timing.anchor} has no time zone: give an aware datetime")
    next_instant(timing, EPOCH)


def _next_cron(timing: Cron, after: datetime) -> datetime:
    zone = _zone(timing.tz)
    expression = _ALIASES.get(timing.expression, timing.expression)
    local = after.astimezone(zone)
    # Seen from inside an hour that comes twice, the next instant may be back at its beginning.
    start = local.replace(tzinfo=None) - max(_turned_back(local), timedelta(0))
    found: list[datetime] = []
    for wall in _walls(expression, start):
        found += [instant for instant in _instants(wall.replace(tzinfo=zone), expression) if instant > after]
        if found and not _turned_back(wall.replace(tzinfo=zone)) > timedelta(0):
            return min(found)
    raise BadSetting(f"{timing.expression!r} never comes")


def _walls(expression: str, start: datetime) -> Iterator[datetime]:
    """What a clock on the wall shows at each match, without a thought for time zones."""
    try:
        yield from CronSim(expression, start)
    except (CronSimError, ValueError) as error:
        raise BadSetting(f"{expression!r} is not a cron expression: {error}") from error


def _instants(wall: datetime, expression: str) -> list[datetime]:
    """When a clock in the zone of `wall` shows it: once, twice, or, where it is turned forward, never."""
    minute, hour = expression.split()[-5:-3]
    all_the_time = minute.startswith("*") or hour.startswith("*")
    turned_back = _turned_back(wall)
    if turned_back < timedelta(0):
        return [] if all_the_time else [_first_after_gap(wall)]
    first = wall.astimezone(UTC)
    return [first, first + turned_back] if all_the_time else [first]


def _turned_back(wall: datetime) -> timedelta:
    """How far the clock is turned back over this time, so that it comes twice; negative: it never comes."""
    before, after = wall.replace(fold=0).utcoffset(), wall.replace(fold=1).utcoffset()
    assert before is not None  # the time has a zone
    assert after is not None
    return before - after


def _first_after_gap(wall: datetime) -> datetime:
    while _turned_back(wall) < timedelta(0):
        wall = wall.replace(second=0) + timedelta(minutes=1)
    return wall.astimezone(UTC)


def _zone(name: str) -> tzinfo:
    if name == "UTC":  # also where there is no time zone database
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise BadSetting(f"{name!r} is not a time zone: write a name such as Europe/Paris") from error
