"""Schedules as values, and the instants at which they fire: pure functions, no I/O.

Instants belong to the schedule, not to the moment at which they are computed: `every 15m` fires
on the quarter hours however late the last firing was.

On the days when clocks change, a cron time that does not exist fires at the first instant that does,
and a time that comes twice fires once.  Only where the minutes or the hours begin with `*`, which
says "all the time" rather than "at this time", are missing times left out and double ones doubled.
That is what cron does, and what people expect of `0 3 * * *` and of `*/5 * * * *`.
"""

from __future__ import annotations

import re
import zoneinfo
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from enum import StrEnum
from itertools import chain, islice, takewhile
from typing import Literal, TypedDict, TypeVar, Unpack
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError
from msgspec import Struct
from msgspec.structs import asdict, replace

from propolis.core.clock import EPOCH
from propolis.core.duration import LONGEST_MS, Duration, milliseconds
from propolis.core.envelope import Envelope, UniqueUntil, check_options
from propolis.core.ids import derive_id
from propolis.errors import BadName, BadSetting

MAX_MISSED = 1000  # instants that one return from a long absence may fire
SHORTEST_MS = 1000  # of a period: what is shorter is a loop, not a schedule
NAME = re.compile(r"[^\s\x00-\x1f\x7f-\x9f]{1,200}")
SCHEDULE_HEADER = "propolis-schedule"
INSTANT_HEADER = "propolis-instant"

_ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}


class Cron(Struct, frozen=True, tag="cron", tag_field="kind", omit_defaults=True, repr_omit_defaults=True):
    """A cron expression in a time zone: five fields, six with seconds first, or an alias such as @daily."""

    expression: str
    tz: str = "UTC"


class Every(Struct, frozen=True, tag="every", tag_field="kind", omit_defaults=True, repr_omit_defaults=True):
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


class _Policies(Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    timing: Timing
    misfire: Misfire = Misfire.ONCE
    misfire_limit: int = 100
    misfire_after_ms: int = milliseconds("1m")
    overlap: Overlap = Overlap.ALLOW
    jitter_ms: int = 0


class Schedule(_Policies, frozen=True, kw_only=True, omit_defaults=True):
    """A job to put at each instant of a timing.  `job` is the pattern; each firing gets its own id.

    `declared` ones belong to code: only workers which run that code fire them.
    """

    name: str
    job: Envelope
    declared: bool = False


class ScheduleRecord(Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """A schedule as it is stored: with its next instant, and the last one that was settled."""

    schedule: Schedule
    next_at: datetime
    last_at: datetime | None = None
    paused: bool = False


class Plan(_Policies, frozen=True, kw_only=True):
    """A timing with its policies: everything of a schedule but its name and its job."""

    def schedule(self, name: str, job: Envelope, *, declared: bool = False) -> Schedule:
        """This plan for a job.  `BadSetting` for a name or a job that cannot be scheduled."""
        if not NAME.fullmatch(name) or not name.isprintable():
            raise BadName("schedule", name, "1 to 200 characters, no white space, no control characters")
        _check_pattern(name, job, self.overlap)
        pattern = replace(job, id=derive_id("pattern", name))  # so that putting it again changes nothing
        return Schedule(name=name, job=pattern, declared=declared, **asdict(self))


class Firing(Struct, frozen=True):
    """One step of a schedule: settle `instant` with this job, if any, and go on to `next_at`."""

    instant: datetime
    job: Envelope | None
    next_at: datetime


# --- what users write --------------------------------------------------------------------

MisfireName = Literal["skip", "once", "all"]
OverlapName = Literal["allow", "skip", "queue-one"]


class SchedulePolicies(TypedDict, total=False):
    """What becomes of instants that were missed, and of jobs that meet: see docs/schedules.md."""

    misfire: MisfireName
    misfire_limit: int
    misfire_after: Duration
    overlap: OverlapName
    jitter: Duration


def cron(expression: str, *, tz: str = "UTC", **policies: Unpack[SchedulePolicies]) -> Plan:
    """At the times of a cron expression, as clocks in `tz` show them; see docs/schedules.md."""
    if not all(isinstance(text, str) for text in (expression, tz)):
        call = f"cron({expression!r}, tz={tz!r})"
        raise BadSetting(f'{call}: write text, as in cron("@daily", tz="Europe/Paris")')
    check_options("cron()", SchedulePolicies, policies)
    return _plan(Cron(expression, tz), policies)


def every(period: Duration, *, anchor: datetime | None = None, **policies: Unpack[SchedulePolicies]) -> Plan:
    """At whole numbers of periods from the anchor (1970, in UTC): "15m" means on the quarter hours."""
    timing = Every(milliseconds(period), EPOCH if anchor is None else anchor)
    if timing.period_ms < SHORTEST_MS:
        raise BadSetting(f"a schedule of every {timing.period_ms} ms is too fast: give at least 1s")
    check_options("every()", SchedulePolicies, policies)
    return _plan(timing, policies)


def _plan(timing: Timing, policies: SchedulePolicies) -> Plan:
    check(timing)
    limit = policies.get("misfire_limit", 100)
    if not 1 <= limit <= MAX_MISSED:
        raise BadSetting(f"misfire_limit={limit!r}: give a number from 1 to {MAX_MISSED:,}")
    return Plan(
        timing=timing,
        misfire=_choice(Misfire, "misfire", policies.get("misfire", "once")),
        misfire_limit=limit,
        misfire_after_ms=milliseconds(policies.get("misfire_after", "1m")),
        overlap=_choice(Overlap, "overlap", policies.get("overlap", "allow")),
        jitter_ms=milliseconds(policies.get("jitter", 0)),
    )


_E = TypeVar("_E", Misfire, Overlap)


def _choice(kind: type[_E], what: str, given: str) -> _E:
    try:
        return kind(given)
    except ValueError as error:
        known = ", ".join(repr(one.value) for one in kind)
        raise BadSetting(f"{what}={given!r} is unknown: use one of {known}") from error


def _check_pattern(name: str, job: Envelope, overlap: Overlap) -> None:
    """The schedule itself says when, and gives each of its jobs an id."""
    if job.delay_ms or job.due_at is not None or job.chosen or job.expires_at is not None:
        raise BadSetting(f"schedule {name!r}: leave delay, at, job_id and a fixed time of expiry to it")
    if job.batch is not None:
        raise BadSetting(f"schedule {name!r}: its jobs cannot join a batch, which would never end")
    if overlap is not Overlap.ALLOW and job.unique is not None:
        raise BadSetting(
            f"schedule {name!r}: overlap={overlap.value!r} needs the unique key: leave unique= out"
        )
    if overlap is Overlap.QUEUE_ONE and job.key is not None:
        raise BadSetting(f"schedule {name!r}: overlap={overlap.value!r} needs the key: leave key= out")


# --- what a schedule puts ----------------------------------------------------------------


def overlap_key(name: str) -> str:
    """The unique key, and the key with a limit of one, by which engines keep its jobs apart."""
    return f"schedule:{name}"


def job_for(schedule: Schedule, instant: datetime) -> Envelope:
    """The job of one instant: the same whoever makes it."""
    job = replace(schedule.job, id=firing_id(schedule.name, instant), chosen=True)
    if schedule.jitter_ms:
        job = replace(job, due_at=instant + jitter_of(schedule, instant))
        if job.expires_in_ms is not None:  # it counts from the firing, and should from when the job is due
            job = replace(job, expires_in_ms=job.expires_in_ms + schedule.jitter_ms)
    return _marked(schedule, job, instant)


def job_now(schedule: Schedule, job_id: str, now: datetime) -> Envelope:
    """A job outside of the instants, by hand; the overlap policy holds for it as well."""
    return _marked(schedule, replace(schedule.job, id=job_id), now)


def _marked(schedule: Schedule, job: Envelope, instant: datetime) -> Envelope:
    headers = {SCHEDULE_HEADER: schedule.name, INSTANT_HEADER: instant.astimezone(UTC).isoformat()}
    job = replace(job, headers={**job.headers, **headers})
    match schedule.overlap:
        case Overlap.ALLOW:
            return job
        case Overlap.SKIP:
            return replace(job, unique=overlap_key(schedule.name))
        case Overlap.QUEUE_ONE:
            key = overlap_key(schedule.name)
            return replace(job, unique=key, unique_until=UniqueUntil.STARTED, key=key)


def jitter_of(schedule: Schedule, instant: datetime) -> timedelta:
    """How much later than its instant this job becomes due: drawn from its id, so that all agree."""
    drawn = UUID(firing_id(schedule.name, instant)).int % 2**32
    return timedelta(milliseconds=schedule.jitter_ms * drawn // 2**32)


# --- the instants ------------------------------------------------------------------------


def declared_again(schedule: Schedule, old: ScheduleRecord | None, now: datetime) -> ScheduleRecord:
    """A schedule as it is stored in place of an old one.

    While its timing is the same it keeps its next instant, and it stays paused if it was.
    """
    if old is None:
        return ScheduleRecord(schedule=schedule, next_at=next_instant(schedule.timing, now))
    if old.schedule.timing != schedule.timing:
        old = replace(old, next_at=next_instant(schedule.timing, now))
    return replace(old, schedule=schedule)


def settled(record: ScheduleRecord, now: datetime, most: int) -> tuple[ScheduleRecord, list[Envelope]]:
    """The schedule with up to `most` of its due instants settled, and the jobs to put in the same step."""
    jobs = []
    for step in () if record.paused else islice(firings(record, now), most):
        record = replace(record, last_at=step.instant, next_at=step.next_at)
        jobs += [] if step.job is None else [step.job]
    return record, jobs


def firings(record: ScheduleRecord, now: datetime) -> Iterator[Firing]:
    """The steps that bring a schedule from its next instant up to now, each of them whole in itself.

    Later than its patience, everything up to now counts as missed, and the policy says how many of those
    instants fire, the newest ones: none, one, or up to a limit.  The others are settled without a job.
    """
    schedule, instant = record.schedule, record.next_at
    if now - instant > timedelta(milliseconds=schedule.misfire_after_ms):
        kept = newest(schedule.timing, instant, now, _most(schedule))
        first = kept[0] if kept else next_instant(schedule.timing, now)
        if first > instant:
            yield Firing(instant, None, first)
            instant = first
    while instant <= now:
        following = next_instant(schedule.timing, instant)
        yield Firing(instant, job_for(schedule, instant), following)
        instant = following


def _most(schedule: Schedule) -> int:
    return {Misfire.SKIP: 0, Misfire.ONCE: 1, Misfire.ALL: schedule.misfire_limit}[schedule.misfire]


def newest(timing: Timing, first: datetime, until: datetime, most: int) -> list[datetime]:
    """The last `most` instants from `first`, which is one, to `until`, in their order.

    Searches at the end, and further back only while too few are found: what ran every second and was away
    for a year has 31 million instants.
    """
    if most == 0:
        return []
    span = timedelta(minutes=1)
    while (start := until - span) > first:
        found = _last(timing, next_instant(timing, start), until, most)
        if len(found) == most:
            return found
        span *= 2
    return _last(timing, first, until, most)


def _last(timing: Timing, first: datetime, until: datetime, most: int) -> list[datetime]:
    instants = chain([first], instants_after(timing, first))
    return list(deque(takewhile(lambda instant: instant <= until, instants), maxlen=most))


def instants_after(timing: Timing, instant: datetime) -> Iterator[datetime]:
    """Every instant strictly after this one, for ever."""
    while True:
        instant = next_instant(timing, instant)
        yield instant


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
    zone = zone_of(timing.tz)
    expression = _ALIASES.get(timing.expression, timing.expression)
    if expression.startswith("@"):
        raise BadSetting(f"{expression!r} is not a cron expression: use one of {', '.join(_ALIASES)}")
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
        raise BadSetting(
            f"{expression!r} is not a cron expression ({error}): write minute, hour, day, month and weekday,"
            ' as in "0 9 * * mon-fri"'
        ) from error


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


def zone_of(name: str) -> tzinfo:
    """`BadSetting` for a name that means no time zone, or none that this machine knows."""
    if name == "UTC":  # also where there is no time zone database
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        if not zoneinfo.available_timezones():
            no_zones = f"this machine has no time zone database to find {name!r} in: pip install tzdata"
            raise BadSetting(no_zones) from error
        raise BadSetting(f"{name!r} is not a time zone: write a name such as Europe/Paris") from error
