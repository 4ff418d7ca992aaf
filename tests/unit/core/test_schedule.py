"""The instants of schedules: on ordinary days, at the ends of months, and when clocks change."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from propolis.core.clock import EPOCH
from propolis.core.envelope import Envelope
from propolis.core.schedule import (
    Cron,
    Every,
    Misfire,
    Overlap,
    Schedule,
    ScheduleRecord,
    Timing,
    check,
    firing_id,
    next_instant,
)
from propolis.errors import BadSetting

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)

PARIS = "Europe/Paris"
NEW_YORK = "America/New_York"
LORD_HOWE = "Australia/Lord_Howe"  # its clocks change by half an hour


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def firings(timing: Timing, after: datetime, count: int) -> list[datetime]:
    found = [next_instant(timing, after)]
    while len(found) < count:
        found.append(next_instant(timing, found[-1]))
    return found


def clock_in(zone: str, instants: list[datetime]) -> list[str]:
    """What the clock on a wall in that zone shows; a * marks the second time that it does."""
    local = [instant.astimezone(ZoneInfo(zone)) for instant in instants]
    return [f"{moment:%d %H:%M}{'*' if moment.fold else ''}" for moment in local]


# --- cron on ordinary days ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "after", "expected"),
    [
        ("* * * * *", "2026-01-01 00:00", "2026-01-01 00:01"),
        ("*/15 * * * *", "2026-01-01 00:07", "2026-01-01 00:15"),
        ("30 4 * * *", "2026-01-01 04:29:59.999999", "2026-01-01 04:30"),
        ("0 9-17 * * MON-FRI", "2026-01-02 17:30", "2026-01-05 09:00"),
        ("0 0 * * 7", "2026-01-01", "2026-01-04"),
        ("0 0 * * sun", "2026-01-01", "2026-01-04"),
        ("0 0 1 JAN *", "2026-01-01", "2027-01-01"),
        ("0 0 13 * FRI", "2026-02-13", "2026-02-20"),  # either day, as cron has always had it
        ("0 0 L * *", "2026-01-31", "2026-02-28"),
        ("0 0 L 2 *", "2027-12-01", "2028-02-29"),
        ("0 0 31 * *", "2026-01-31", "2026-03-31"),
        ("0 0 30 * *", "2026-01-30", "2026-03-30"),
        ("0 0 29 2 *", "2026-01-01", "2028-02-29"),
        ("0 0 29 2 *", "2096-02-29", "2104-02-29"),  # 2100 is no leap year
        ("0 0 * 2 MON#5", "2026-01-01", "2044-02-29"),
        ("0 0 LW * *", "2026-05-01", "2026-05-29"),
        ("59 23 31 12 *", "2026-12-31 23:59", "2027-12-31 23:59"),
    ],
)
def test_a_cron_expression_gives_the_first_instant_strictly_after(
    expression: str, after: str, expected: str
) -> None:
    assert next_instant(Cron(expression), utc(after)) == utc(expected)


@pytest.mark.parametrize(
    ("expression", "after", "expected"),
    [
        ("*/10 * * * * *", "2026-01-01 00:00:05", "2026-01-01 00:00:10"),
        ("0 * * * * *", "2026-01-01 00:00:05", "2026-01-01 00:01:00"),
        ("30 0 12 * * *", "2026-01-01 12:00:30", "2026-01-02 12:00:30"),
        ("* * * * * *", "2026-01-01 00:00:00.5", "2026-01-01 00:00:01"),
    ],
)
def test_six_fields_begin_with_seconds(expression: str, after: str, expected: str) -> None:
    assert next_instant(Cron(expression), utc(after)) == utc(expected)


@pytest.mark.parametrize(
    ("alias", "expected"),
    [
        ("@yearly", "2027-01-01 00:00"),
        ("@annually", "2027-01-01 00:00"),
        ("@monthly", "2026-06-01 00:00"),
        ("@weekly", "2026-05-24 00:00"),
        ("@daily", "2026-05-21 00:00"),
        ("@midnight", "2026-05-21 00:00"),
        ("@hourly", "2026-05-20 11:00"),
    ],
)
def test_an_alias_stands_for_its_expression(alias: str, expected: str) -> None:
    assert next_instant(Cron(alias), utc("2026-05-20 10:30")) == utc(expected)


def test_a_cron_time_is_a_time_of_its_zone() -> None:
    for zone, expected in [(PARIS, "08:00"), (NEW_YORK, "14:00"), (LORD_HOWE, "22:00"), ("UTC", "09:00")]:
        assert next_instant(Cron("0 9 * * *", zone), utc("2026-01-01 00:00")) == utc(f"2026-01-01 {expected}")


@pytest.mark.parametrize("zone", ["UTC", PARIS])
def test_an_instant_is_in_utc_whatever_the_zone_of_the_question(zone: str) -> None:
    after = datetime(2026, 1, 1, 12, tzinfo=timezone(timedelta(hours=-5)))
    for timing in (Cron("0 * * * *", zone), Every(period_ms=60_000)):
        instant = next_instant(timing, after)
        assert instant.utcoffset() == timedelta(0)
        assert instant == next_instant(timing, after.astimezone(UTC))


# --- when clocks change ------------------------------------------------------------------

# Zone, when its clocks go forward and back in 2026, and by how much.
CHANGES = [
    (PARIS, utc("2026-03-29 01:00"), utc("2026-10-25 01:00"), HOUR),
    (NEW_YORK, utc("2026-03-08 07:00"), utc("2026-11-01 06:00"), HOUR),
    (LORD_HOWE, utc("2026-10-03 15:30"), utc("2026-04-04 15:00"), HOUR / 2),
]


@pytest.mark.parametrize(("zone", "forward", "back", "shift"), CHANGES)
def test_these_are_the_moments_when_the_clocks_change(
    zone: str, forward: datetime, back: datetime, shift: timedelta
) -> None:
    def offset(moment: datetime) -> timedelta:
        return moment.astimezone(ZoneInfo(zone)).utcoffset() or timedelta(0)

    assert offset(forward) - offset(forward - MINUTE) == shift
    assert offset(back - MINUTE) - offset(back) == shift


@pytest.mark.parametrize(
    ("zone", "expression", "after", "shown"),
    [
        (PARIS, "30 2 * * *", "2026-03-27 12:00", ["28 02:30", "29 03:00", "30 02:30"]),
        (PARIS, "0 30 2 * * *", "2026-03-27 12:00", ["28 02:30", "29 03:00", "30 02:30"]),
        (NEW_YORK, "30 2 * * *", "2026-03-06 12:00", ["07 02:30", "08 03:00", "09 02:30"]),
        (LORD_HOWE, "15 2 * * *", "2026-10-02 00:00", ["03 02:15", "04 02:30", "05 02:15"]),
        (PARIS, "15,45 2 * * *", "2026-03-28 12:00", ["29 03:00", "30 02:15", "30 02:45"]),
        (PARIS, "30 2,3 * * *", "2026-03-28 12:00", ["29 03:00", "29 03:30", "30 02:30"]),
        (PARIS, "*/20 30 2 * * *", "2026-03-28 12:00", ["29 03:00", "30 02:30", "30 02:30"]),
        ("America/Santiago", "@daily", "2026-09-05 12:00", ["06 01:00", "07 00:00", "08 00:00"]),
    ],
)
def test_a_time_that_does_not_exist_fires_at_the_first_instant_that_does(
    zone: str, expression: str, after: str, shown: list[str]
) -> None:
    assert clock_in(zone, firings(Cron(expression, zone), utc(after), len(shown))) == shown


def test_the_first_instant_after_a_gap_is_its_end_also_for_a_time_with_seconds() -> None:
    assert next_instant(Cron("30 30 2 * * *", PARIS), utc("2026-03-28 12:00")) == utc("2026-03-29 01:00:00")


@pytest.mark.parametrize(
    ("zone", "expression", "after", "shown"),
    [
        (PARIS, "30 2 * * *", "2026-10-23 12:00", ["24 02:30", "25 02:30", "26 02:30"]),
        (PARIS, "0 30 2 * * *", "2026-10-23 12:00", ["24 02:30", "25 02:30", "26 02:30"]),
        (NEW_YORK, "30 1 * * *", "2026-10-30 12:00", ["31 01:30", "01 01:30", "02 01:30"]),
        (LORD_HOWE, "45 1 * * *", "2026-04-03 00:00", ["04 01:45", "05 01:45", "06 01:45"]),
    ],
)
def test_a_time_that_comes_twice_fires_once(zone: str, expression: str, after: str, shown: list[str]) -> None:
    assert clock_in(zone, firings(Cron(expression, zone), utc(after), len(shown))) == shown


@pytest.mark.parametrize(("zone", "forward", "back", "shift"), CHANGES)
@pytest.mark.parametrize("expression", ["*/10 * * * *", "*/10 */1 * * *", "0 */10 * * * *"])
def test_what_runs_all_the_time_runs_through_a_change(
    zone: str, forward: datetime, back: datetime, shift: timedelta, expression: str
) -> None:
    for change in (forward, back):
        expected = [change - 3 * HOUR + n * 10 * MINUTE for n in range(1, 37)]
        assert firings(Cron(expression, zone), change - 3 * HOUR, 36) == expected


def test_the_minutes_of_one_hour_are_all_there_after_half_an_hour_was_left_out() -> None:
    """CronSim alone begins at 03:30 that day, because it adds whole hours to the clock."""
    cron = Cron("*/10 3 * * *", LORD_HOWE)
    shown = clock_in(LORD_HOWE, firings(cron, utc("2026-10-03 12:00"), 6))
    assert shown == [f"04 03:{minute}0" for minute in range(6)]


def by_hand(
    zone: str, minutes: set[int], hours: set[int], begin: datetime, *, all_the_time: bool
) -> list[datetime]:
    """Every firing of two days, found by looking at the clock on the wall once a minute."""
    found = []
    shown = begin.astimezone(ZoneInfo(zone)).replace(tzinfo=None)
    for instant in (begin + n * MINUTE for n in range(1, 2 * 24 * 60)):
        local = instant.astimezone(ZoneInfo(zone))
        left_out, shown = shown + MINUTE, local.replace(tzinfo=None, fold=0)
        if all_the_time:
            due = shown.minute in minutes and shown.hour in hours
        else:
            due = shown.minute in minutes and shown.hour in hours and not local.fold
            while left_out < shown:  # the clock was turned forward over these
                due = due or (left_out.minute in minutes and left_out.hour in hours)
                left_out += MINUTE
        if due:
            found.append(instant)
    return found


ALL_HOURS, ALL_MINUTES = set(range(24)), set(range(60))


@pytest.mark.parametrize(("zone", "forward", "back", "shift"), CHANGES)
@pytest.mark.parametrize(
    ("expression", "minutes", "hours"),
    [
        ("* * * * *", ALL_MINUTES, ALL_HOURS),
        ("*/20 * * * *", {0, 20, 40}, ALL_HOURS),
        ("25 */2 * * *", {25}, set(range(0, 24, 2))),
        ("*/15 1-3 * * *", {0, 15, 30, 45}, {1, 2, 3}),
        ("10,50 1,2,3 * * *", {10, 50}, {1, 2, 3}),
        ("0 3 * * *", {0}, {3}),
        ("59 1 * * *", {59}, {1}),
    ],
)
def test_from_wherever_one_looks_the_next_instant_is_the_one_found_by_hand(
    zone: str,
    forward: datetime,
    back: datetime,
    shift: timedelta,
    expression: str,
    minutes: set[int],
    hours: set[int],
) -> None:
    all_the_time = "*" in expression.split()[0] + expression.split()[1]
    for change in (forward, back):
        expected = by_hand(zone, minutes, hours, change - 6 * HOUR, all_the_time=all_the_time)
        for moment in (change - 5 * HOUR + n * 17 * MINUTE + timedelta(seconds=1) for n in range(36)):
            assert next_instant(Cron(expression, zone), moment) == next(at for at in expected if at > moment)


@given(
    expression=st.sampled_from(["30 2 * * *", "*/7 * * * *", "15 1,2 * * *", "0 0 1 * *", "45 */3 * * SUN"]),
    zone=st.sampled_from([PARIS, NEW_YORK, LORD_HOWE, "UTC", "Asia/Kolkata"]),
    moment=st.datetimes(datetime(2020, 1, 1), datetime(2040, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001
    later=st.timedeltas(timedelta(0), timedelta(days=2)),
)
def test_looking_later_never_moves_an_instant(
    expression: str, zone: str, moment: datetime, later: timedelta
) -> None:
    cron = Cron(expression, zone)
    instant = next_instant(cron, moment)
    assert instant > moment
    again = next_instant(cron, moment + later)
    assert again == instant if moment + later < instant else again > instant


# --- a fixed period ----------------------------------------------------------------------


def test_a_period_fires_on_its_own_instants_however_late_the_last_firing_was() -> None:
    quarter = Every(period_ms=15 * 60_000)
    for moment in ("10:00", "10:00:00.000001", "10:07", "10:14:59.999999"):
        assert next_instant(quarter, utc(f"2026-01-01 {moment}")) == utc("2026-01-01 10:15")


def test_a_period_counts_from_its_anchor_also_before_it() -> None:
    timing = Every(period_ms=7 * 60_000, anchor=utc("2026-01-01 00:03"))
    assert next_instant(timing, utc("2026-01-01 00:03")) == utc("2026-01-01 00:10")
    assert next_instant(timing, utc("2026-01-01 00:02")) == utc("2026-01-01 00:03")
    assert next_instant(timing, utc("2025-12-31 23:55")) == utc("2025-12-31 23:56")


def test_a_period_takes_no_notice_of_clock_changes_in_the_zone_of_its_anchor() -> None:
    day = Every(period_ms=86_400_000, anchor=datetime(2026, 3, 1, 12, tzinfo=ZoneInfo(PARIS)))
    assert next_instant(day, utc("2026-04-01 11:30")) == utc("2026-04-02 11:00")


@given(
    period_ms=st.integers(1, 10**10),
    anchor=st.datetimes(datetime(1970, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001
    moment=st.datetimes(datetime(1970, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001
)
def test_the_next_of_a_period_is_a_whole_number_of_periods_away_and_the_first(
    period_ms: int, anchor: datetime, moment: datetime
) -> None:
    period = timedelta(milliseconds=period_ms)
    instant = next_instant(Every(period_ms, anchor), moment)
    assert (instant - anchor) % period == timedelta(0)
    assert timedelta(0) < instant - moment <= period


# --- what is refused ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "* * * *",
        "* * * * * * *",
        "60 * * * *",
        "* 24 * * *",
        "* * 0 * *",
        "* * 32 * *",
        "* * * 13 *",
        "* * * * 8",
        "60 * * * * *",
        "5-1 * * * *",
        "*/0 * * * *",
        "a * * * *",
        "@reboot",
        "@noon",
        "0 0 30 2 *",
        "0 0 31 4,6,9,11 *",
        "0 0 */31 * MON#2",  # a first of the month that is a second Monday
        "9" * 5000 + " * * * *",
        "every day",
    ],
)
def test_a_wrong_expression_is_a_bad_setting(expression: str) -> None:
    for zone in ("UTC", PARIS):
        with pytest.raises(BadSetting):
            check(Cron(expression, zone))
        with pytest.raises(BadSetting):
            next_instant(Cron(expression, zone), EPOCH)


@pytest.mark.parametrize(
    "zone",
    ["", "Mars/Olympus", "Europe", "europe/pariss", "../../etc/passwd", "/etc/passwd", "a\0b", "x" * 5000],
)
def test_a_wrong_zone_is_a_bad_setting(zone: str) -> None:
    with pytest.raises(BadSetting, match="write a name such as Europe/Paris"):
        check(Cron("@daily", zone))


@pytest.mark.parametrize(
    "timing",
    [
        Every(period_ms=0),
        Every(period_ms=-1),
        Every(period_ms=10**30),
        Every(period_ms=1, anchor=datetime(2026, 1, 1)),  # noqa: DTZ001 - what is being refused
    ],
)
def test_a_wrong_period_is_a_bad_setting(timing: Every) -> None:
    with pytest.raises(BadSetting):
        check(timing)


@pytest.mark.parametrize("timing", [Cron("@daily"), Cron("0 30 2 * * *", PARIS), Every(1), Every(86_400_000)])
def test_a_good_timing_passes(timing: Timing) -> None:
    check(timing)


@given(st.text(alphabet="0123456789*/-,#LW MONJA@?", max_size=20))
def test_whatever_is_written_is_a_cron_expression_or_a_bad_setting(expression: str) -> None:
    with contextlib.suppress(BadSetting):
        check(Cron(expression))


# --- values ------------------------------------------------------------------------------


def test_the_id_of_a_firing_is_the_same_for_ever_and_whoever_fires_it() -> None:
    """A literal: two versions of propolis that work side by side must not fire an instant each."""
    instant = utc("2026-01-01")
    assert firing_id("nightly", instant) == "9eebf0f7-13d3-5156-998d-915ad71b70f7"
    assert firing_id("nightly", instant.astimezone(ZoneInfo(PARIS))) == firing_id("nightly", instant)
    assert firing_id("nightly", instant + MINUTE) != firing_id("nightly", instant)
    assert firing_id("hourly", instant) != firing_id("nightly", instant)


def test_a_schedule_fires_once_for_what_was_missed_unless_it_says_otherwise() -> None:
    schedule = Schedule(name="nightly", timing=Cron("@daily"), job=Envelope(id="", task="t"))
    assert (schedule.misfire, schedule.overlap, schedule.jitter_ms) == (Misfire.ONCE, Overlap.ALLOW, 0)
    assert not ScheduleRecord(schedule=schedule, next_at=EPOCH).paused
