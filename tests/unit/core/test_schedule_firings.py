"""What a schedule puts, and when: misfires, overlaps, jitter, and what users write."""

from __future__ import annotations

import sys
import zoneinfo
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from propolis.core import wire
from propolis.core.clock import EPOCH
from propolis.core.envelope import UniqueUntil
from propolis.core.schedule import (
    MAX_MISSED,
    Every,
    Firing,
    Misfire,
    Overlap,
    Plan,
    ScheduleRecord,
    Timing,
    cron,
    every,
    firing_id,
    firings,
    jitter_of,
    job_for,
    job_now,
    newest,
    next_instant,
)
from propolis.errors import BadName, BadSetting
from propolis.testing.engines.samples import a_job

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
SECOND, MINUTE, HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)
PARIS, NEW_YORK, LORD_HOWE = "Europe/Paris", "America/New_York", "Australia/Lord_Howe"


def due(plan: Plan, at: datetime, **fields: Any) -> ScheduleRecord:
    """A schedule whose next instant is this one."""
    return ScheduleRecord(schedule=plan.schedule("report", a_job(**fields)), next_at=at)


def steps(plan: Plan, at: datetime, now: datetime) -> list[tuple[datetime, bool]]:
    """The instants that are settled, and whether with a job."""
    return [(step.instant, step.job is not None) for step in firings(due(plan, at), now)]


def fired(plan: Plan, at: datetime, now: datetime) -> list[datetime]:
    return [instant for instant, put in steps(plan, at, now) if put]


# --- misfires ----------------------------------------------------------------------------


@pytest.mark.parametrize("misfire", ["skip", "once", "all"])
def test_an_instant_on_time_fires_whatever_the_policy(misfire: Any) -> None:
    plan = every("1h", misfire=misfire)
    for late in (timedelta(0), SECOND, MINUTE):
        assert steps(plan, NOON, NOON + late) == [(NOON, True)]


@pytest.mark.parametrize("misfire", ["skip", "once", "all"])
def test_instants_that_are_a_little_late_all_fire(misfire: Any) -> None:
    """A worker that is busy for five seconds has missed nothing."""
    plan = every("1s", misfire=misfire)
    assert fired(plan, NOON, NOON + 5 * SECOND) == [NOON + n * SECOND for n in range(6)]


def test_an_instant_that_has_not_come_does_not_fire() -> None:
    assert steps(every("1h"), NOON, NOON - timedelta(microseconds=1)) == []


@pytest.mark.parametrize(
    ("misfire", "limit", "away", "expected"),
    [
        ("skip", 100, 61 * MINUTE, []),
        ("skip", 100, 3 * HOUR, []),
        ("once", 100, 61 * MINUTE, [1]),
        ("once", 100, 3 * HOUR, [3]),
        ("all", 100, 3 * HOUR + MINUTE, [0, 1, 2, 3]),
        ("all", 2, 3 * HOUR + MINUTE, [2, 3]),
        ("all", 4, 3 * HOUR + MINUTE, [0, 1, 2, 3]),
        ("all", 1, 3 * HOUR + MINUTE, [3]),
    ],
)
def test_of_what_was_missed_the_newest_fire(
    misfire: Any, limit: int, away: timedelta, expected: list[int]
) -> None:
    """S3.30: none, one, or all up to a limit."""
    plan = every("1h", misfire=misfire, misfire_limit=limit)
    assert fired(plan, NOON, NOON + away) == [NOON + n * HOUR for n in expected]


def test_after_an_absence_what_came_within_the_patience_counts_as_missed_too() -> None:
    """S3.30: one run, not one and six more for the last minute."""
    plan = every("10s", misfire="once")
    assert fired(plan, NOON, NOON + HOUR + SECOND) == [NOON + HOUR]


def test_patience_is_a_setting() -> None:
    plan = every("1h", misfire="skip", misfire_after="2h")
    assert fired(plan, NOON, NOON + 2 * HOUR) == [NOON, NOON + HOUR, NOON + 2 * HOUR]
    assert fired(plan, NOON, NOON + 2 * HOUR + SECOND) == []


def test_every_step_leads_to_the_next_one_and_the_last_into_the_future() -> None:
    """So that each may be somebody else's, and a crash between any two loses nothing."""
    record = due(every("1h", misfire="all", misfire_limit=3), NOON)
    now = NOON + 10 * HOUR + MINUTE
    path = list(firings(record, now))
    assert [step.next_at for step in path[:-1]] == [step.instant for step in path[1:]]
    assert path[0] == Firing(NOON, None, NOON + 8 * HOUR)
    assert path[-1].next_at > now


TIMINGS = st.sampled_from(
    [
        every("1s").timing,
        every("7m").timing,
        every("1d", anchor=NOON).timing,
        cron("*/5 * * * * *").timing,
        cron("30 2 * * *", tz=PARIS).timing,
        cron("*/20 * * * *", tz=LORD_HOWE).timing,
        cron("15 1,2 * * *", tz=NEW_YORK).timing,
        cron("0 0 1 1 *").timing,
    ]
)
MOMENTS = st.datetimes(datetime(2026, 1, 1), datetime(2027, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001
SPANS = st.one_of(st.timedeltas(timedelta(0), 5 * MINUTE), st.timedeltas(timedelta(0), 90 * 24 * HOUR))


@given(timing=TIMINGS, moment=MOMENTS, span=st.timedeltas(timedelta(0), HOUR), most=st.integers(0, 20))
def test_the_newest_instants_are_the_last_of_all(
    timing: Timing, moment: datetime, span: timedelta, most: int
) -> None:
    first = next_instant(timing, moment)
    until = first + span
    every_one = [first]
    while (following := next_instant(timing, every_one[-1])) <= until:
        every_one.append(following)
    assert newest(timing, first, until, most) == (every_one[-most:] if most else [])


@given(
    timing=TIMINGS,
    misfire=st.sampled_from(Misfire),
    limit=st.integers(1, 20),
    moment=MOMENTS,
    away=SPANS,
    crashes=st.lists(st.integers(0, 3), max_size=5),
)
def test_whoever_crashes_where_no_instant_fires_twice_nor_out_of_order(
    timing: Timing, misfire: Misfire, limit: int, moment: datetime, away: timedelta, crashes: list[int]
) -> None:
    """S2.26: each of several schedulers stops after some steps, and the next goes on from what is stored."""
    plan = Plan(timing=timing, misfire=misfire, misfire_limit=limit, misfire_after_ms=60_000)
    record = due(plan, next_instant(timing, moment))
    now = record.next_at + away
    seen: list[Firing] = []
    for most in [*crashes, 200]:
        for _, step in zip(range(most), firings(record, now), strict=False):
            seen.append(step)
            record = ScheduleRecord(schedule=record.schedule, next_at=step.next_at)
    instants = [step.instant for step in seen]
    assert instants == sorted(set(instants))
    if away > MINUTE:
        most = {Misfire.SKIP: 0, Misfire.ONCE: 1, Misfire.ALL: limit}[misfire]
        assert sum(step.job is not None for step in seen) <= most


def test_a_year_away_from_a_schedule_of_every_second_is_not_counted_through() -> None:
    steps_taken = list(firings(due(cron("* * * * * *", misfire="all"), NOON), NOON + 365 * 24 * HOUR))
    assert len(steps_taken) == 101


# --- over real changes of clocks ---------------------------------------------------------


@pytest.mark.parametrize(
    ("zone", "begin", "end", "days"),
    [
        (PARIS, "2026-03-25", "2026-04-02", 8),
        (PARIS, "2026-10-21", "2026-10-29", 8),
        (NEW_YORK, "2026-03-04", "2026-03-12", 8),
        (NEW_YORK, "2026-10-28", "2026-11-05", 8),
        (LORD_HOWE, "2026-04-01", "2026-04-09", 8),
        (LORD_HOWE, "2026-09-30", "2026-10-08", 8),
    ],
)
@pytest.mark.parametrize("at", ["0 2 * * *", "30 1 * * *", "15 2 * * *", "30 2 * * *", "0 3 * * *"])
def test_a_daily_job_runs_once_on_every_day_also_when_clocks_change(
    zone: str, begin: str, end: str, days: int, at: str
) -> None:
    """F39, S2.27."""
    start = datetime.fromisoformat(begin).replace(tzinfo=ZoneInfo(zone))
    until = datetime.fromisoformat(end).replace(tzinfo=ZoneInfo(zone))
    plan = cron(at, tz=zone, misfire="all")
    instants = fired(plan, next_instant(plan.timing, start), until)
    assert [instant.astimezone(ZoneInfo(zone)).day for instant in instants] == [
        (start + timedelta(days=n)).day for n in range(days)
    ]


@pytest.mark.parametrize("zone", [PARIS, NEW_YORK, LORD_HOWE])
def test_an_interval_does_not_drift_over_a_year_of_clock_changes(zone: str) -> None:
    """S2.27."""
    plan = every("6h", anchor=datetime(2026, 1, 1, tzinfo=ZoneInfo(zone)), misfire="all", misfire_limit=1000)
    begin = next_instant(plan.timing, NOON)
    instants = fired(plan, begin, begin + timedelta(days=200))
    assert instants == [begin + n * 6 * HOUR for n in range(801)][-1000:]


# --- overlaps ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overlap", "unique", "until", "key"),
    [
        ("allow", None, UniqueUntil.ENDED, None),
        ("skip", "schedule:report", UniqueUntil.ENDED, None),
        ("queue-one", "schedule:report", UniqueUntil.STARTED, "schedule:report"),
    ],
)
def test_an_overlap_policy_is_a_key_that_the_engine_keeps(
    overlap: Any, unique: str | None, until: UniqueUntil, key: str | None
) -> None:
    schedule = every("1h", overlap=overlap).schedule("report", a_job())
    for job in (job_for(schedule, NOON), job_now(schedule, "by-hand", NOON)):
        assert (job.unique, job.unique_until, job.key) == (unique, until, key)


# --- what is put -------------------------------------------------------------------------


def test_the_job_of_an_instant_is_the_pattern_with_an_id_of_its_own() -> None:
    pattern = a_job(1, queue="mail", priority=7, timeout_ms=5, expires_in_ms=9, headers={"a": "b"})
    schedule = cron("@daily").schedule("report", pattern)
    job = job_for(schedule, NOON)
    assert (job.id, job.chosen) == (firing_id("report", NOON), True)
    assert (job.task, job.args, job.queue, job.priority) == (pattern.task, pattern.args, "mail", 7)
    assert (job.timeout_ms, job.expires_in_ms, job.due_at) == (5, 9, None)
    assert job.headers == {
        "a": "b",
        "propolis-schedule": "report",
        "propolis-instant": "2026-01-01T12:00:00+00:00",
    }
    wire.encode(job)


def test_a_schedule_put_again_is_the_same_value() -> None:
    """So that a worker that starts has nothing to write."""
    plan = cron("@daily")
    first, second = (plan.schedule("report", a_job(1)) for _ in range(2))
    assert first == second


def test_jitter_is_the_same_for_all_and_within_its_bound() -> None:
    schedule = every("1m", jitter="30s").schedule("report", a_job())
    instants = [NOON + n * MINUTE for n in range(200)]
    delays = [jitter_of(schedule, instant) for instant in instants]
    assert delays == [jitter_of(schedule, instant) for instant in instants]
    assert all(timedelta(0) <= delay < timedelta(seconds=30) for delay in delays)
    assert len(set(delays)) > 150
    assert [job_for(schedule, at).due_at for at in instants] == [
        at + delay for at, delay in zip(instants, delays, strict=True)
    ]


def test_two_schedules_of_one_time_are_spread() -> None:
    one, other = (every("1m", jitter="30s").schedule(name, a_job()) for name in ("one", "other"))
    assert jitter_of(one, NOON) != jitter_of(other, NOON)


# --- what users write --------------------------------------------------------------------


def test_a_plan_says_what_it_was_told() -> None:
    plan = cron(
        "0 9 * * mon-fri",
        tz=PARIS,
        misfire="all",
        misfire_limit=3,
        misfire_after="5m",
        overlap="skip",
        jitter="1m",
    )
    assert plan.schedule("report", a_job(), declared=True).declared
    assert (plan.misfire, plan.misfire_limit, plan.misfire_after_ms) == (Misfire.ALL, 3, 300_000)
    assert (plan.overlap, plan.jitter_ms) == (Overlap.SKIP, 60_000)
    assert every("15m").timing == Every(900_000, EPOCH)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: cron("never"), "not a cron expression"),
        (lambda: cron("@daily", tz="Mars/Olympus"), "not a time zone"),
        (
            lambda: cron("@daily", misfire="twice"),  # type: ignore[arg-type]  # what is being refused
            "'skip', 'once', 'all'",
        ),
        (
            lambda: cron("@daily", overlap="queue"),  # type: ignore[arg-type]  # what is being refused
            "'allow', 'skip', 'queue-one'",
        ),
        (lambda: cron("@daily", misfire_limit=0), "from 1 to"),
        (lambda: cron("@daily", misfire_limit=MAX_MISSED + 1), "from 1 to"),
        (lambda: cron("@daily", jitter="soon"), "soon"),
        (lambda: every("100ms"), "at least 1s"),
        (lambda: every("1h", anchor=datetime(2026, 1, 1)), "no time zone"),  # noqa: DTZ001
        (lambda: every("1h").schedule("", a_job()), "1 to 200 characters"),
        (lambda: every("1h").schedule("a b", a_job()), "no white space"),
        (lambda: every("1h").schedule("x", a_job(delay_ms=1)), "leave delay"),
        (lambda: every("1h").schedule("x", a_job(due_at=NOON)), "leave delay"),
        (lambda: every("1h").schedule("x", a_job(expires_at=NOON)), "leave delay"),
        (lambda: every("1h").schedule("x", a_job(chosen=True)), "leave delay"),
        (lambda: every("1h").schedule("x", a_job(batch="b")), "batch"),
        (lambda: every("1h", overlap="skip").schedule("x", a_job(unique="u")), "leave unique= out"),
        (lambda: every("1h", overlap="queue-one").schedule("x", a_job(key="k")), "leave key= out"),
    ],
)
def test_a_plan_that_could_not_work_is_refused_at_once(wrong: Any, message: str) -> None:
    with pytest.raises((BadSetting, BadName, ValueError), match=message):
        wrong()


@pytest.fixture
def no_zones(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without a time zone database, neither the system's nor the package's."""
    monkeypatch.setitem(sys.modules, "tzdata", None)
    zoneinfo.reset_tzpath(to=[])
    ZoneInfo.clear_cache()
    yield
    zoneinfo.reset_tzpath()
    ZoneInfo.clear_cache()


@pytest.mark.usefixtures("no_zones")
def test_a_machine_without_a_time_zone_database_says_what_to_install() -> None:
    with pytest.raises(BadSetting, match="pip install tzdata"):
        cron("@daily", tz=PARIS)
    assert fired(cron("@daily", tz="UTC"), NOON, NOON) == [NOON]  # which needs none
