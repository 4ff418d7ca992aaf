"""`propolis schedules`."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

import click

from propolis.cli.console.job_views import call_of_job
from propolis.cli.console.output import Cell, shown_span, shown_time
from propolis.cli.console.session import PROBLEMS, Session, looks_at_app, on_app
from propolis.cli.jobs import values_option
from propolis.core.schedule import Cron, Misfire, Schedule, ScheduleRecord, Timing, instants_after, zone_of
from propolis.errors import BadSetting

SHOWN = 5  # instants to come
UNITS_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}


@click.group(invoke_without_command=True)
@looks_at_app
async def schedules(session: Session) -> None:
    """List schedules with their next and last times; show, pause, resume, run or remove one."""
    await list_all(session)


@schedules.command("list")
@looks_at_app
async def list_(session: Session) -> None:
    """List schedules by name."""
    await list_all(session)


@schedules.command()
@click.argument("name")
@values_option
@looks_at_app
async def show(session: Session, name: str, values: bool) -> int | None:
    """Show everything that is known of one schedule, and when it fires next."""
    record = await find(session, name)
    if record is None:
        return PROBLEMS
    call = call_of_job(record.schedule.job, session.app, values=values)
    coming = upcoming(record)
    session.out.document(
        fields_of(session, record) | {"args": call.args, "kwargs": call.kwargs, "upcoming": coming}
    )
    session.out.fields(shown_fields(session, record) | {"call": str(call)})
    if coming and not record.paused:
        session.out.say("\n".join(["upcoming", *(f"  {in_its_zone(record, at)}" for at in coming)]))
    return None


@schedules.command()
@click.argument("name")
@on_app
async def pause(session: Session, name: str) -> int | None:
    """Stop a schedule from firing; jobs that were put go on."""
    return await change(session, name, "paused", session.schedules.apause(name))


@schedules.command()
@click.argument("name")
@on_app
async def resume(session: Session, name: str) -> int | None:
    """Undo pause.  What came due meanwhile was missed: the schedule's misfire policy decides about it."""
    return await change(session, name, "resumed", session.schedules.aresume(name))


@schedules.command()
@click.argument("name")
@on_app
async def run(session: Session, name: str) -> int | None:
    """Put the job of a schedule now, besides its times, and print the id of the job."""
    receipt = await session.schedules.arun(name)
    if receipt is None:
        return unknown(session, name)
    session.out.say(receipt.id)
    if not receipt.created:
        session.out.note("that job has not ended yet, and the schedule does not let its jobs overlap")
    session.out.document({"name": name, "id": receipt.id, "created": receipt.created})
    return None if receipt.created else PROBLEMS


@schedules.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@on_app
async def remove(session: Session, name: str, yes: bool) -> int | None:
    """Forget a schedule; jobs that were put go on.

    A schedule that the code declares comes back with the next worker that starts: pause it instead.
    """
    if await find(session, name) is None:
        return PROBLEMS
    if not yes:
        click.confirm(f"Forget schedule {name!r}?", abort=True, err=True)
    removed = await session.schedules.aremove(name)
    session.out.say(f"{name}: removed" if removed else f"{name}: somebody else has removed it")
    if name in session.app.declared_schedules:
        session.out.note("the code declares this schedule: it comes back with the next worker that starts")
    session.out.document({"name": name, "removed": removed})
    return None


# --- one and all of them -----------------------------------------------------------------


async def list_all(session: Session) -> None:
    records = await session.schedules.alist()
    for record in records:
        session.out.document(fields_of(session, record))
    if not records:
        session.out.note("there is no schedule yet")
        return
    now = await session.now()
    columns = ["name", "when", "task", "next", ">in", "last", "notes"]
    session.out.table(columns, [row_of(session, record, now) for record in records])


async def find(session: Session, name: str) -> ScheduleRecord | None:
    record = await session.schedules.aget(name)
    if record is None:
        unknown(session, name)
    return record


def unknown(session: Session, name: str) -> int:
    session.out.note(f"no such schedule: {name}")
    return PROBLEMS


async def change(session: Session, name: str, done: str, answer: Awaitable[bool]) -> int | None:
    """Report a change.  Repeating one does no harm, so it is no error either."""
    changed = await answer
    if not changed and await find(session, name) is None:
        return PROBLEMS
    session.out.say(f"{name}: {done}" if changed else f"{name}: nothing to do, it was {done} already")
    session.out.document({"name": name, done: True, "changed": changed})
    return None


# --- for people and programs -------------------------------------------------------------


def row_of(session: Session, record: ScheduleRecord, now: datetime) -> list[Cell]:
    schedule = record.schedule
    left = record.next_at - now
    return [
        schedule.name,
        shown_timing(schedule.timing),
        schedule.job.task,
        record.next_at,
        "" if record.paused else shown_span(left) if left > timedelta(0) else "now",
        record.last_at,
        ", ".join(notes_on(session, record)),
    ]


def notes_on(session: Session, record: ScheduleRecord) -> list[str]:
    notes = ["paused"] if record.paused else []
    if is_left_over(session, record.schedule):
        notes.append("not declared any more")
    return notes


def is_left_over(session: Session, schedule: Schedule) -> bool:
    """Whether other code than this has declared it, so that workers with this code do not fire it."""
    return session.declares and schedule.declared and schedule.name not in session.app.declared_schedules


def shown_timing(timing: Timing) -> str:
    if isinstance(timing, Cron):
        return f"{timing.expression} {timing.tz}"
    return f"every {shown_period(timing.period_ms)}"


def shown_period(period_ms: int) -> str:
    """The whole period, as people write it: 15m, 1h30m, 7d."""
    parts = []
    for unit, size in UNITS_MS.items():
        number, period_ms = divmod(period_ms, size)
        parts += [f"{number}{unit}"] if number else []
    return "".join(parts)


def shown_policy(schedule: Schedule) -> str:
    if schedule.misfire is Misfire.ALL:
        return f"all, up to {schedule.misfire_limit}"
    return schedule.misfire.value


def shown_fields(session: Session, record: ScheduleRecord) -> dict[str, Cell]:
    schedule = record.schedule
    return {
        "name": schedule.name,
        "when": shown_timing(schedule.timing),
        "task": schedule.job.task,
        "queue": schedule.job.queue,
        "next": record.next_at,
        "last": record.last_at,
        "misfire": shown_policy(schedule),
        "overlap": schedule.overlap.value,
        "jitter": shown_period(schedule.jitter_ms) if schedule.jitter_ms else None,
        "from": "code" if schedule.declared else "app.schedules.put",
        "notes": ", ".join(notes_on(session, record)),
    }


def fields_of(session: Session, record: ScheduleRecord) -> dict[str, Any]:
    schedule, timing = record.schedule, record.schedule.timing
    when: dict[str, Any] = {"kind": "every"}
    if isinstance(timing, Cron):
        when = {"kind": "cron", "expression": timing.expression, "tz": timing.tz}
    else:
        when |= {"period_ms": timing.period_ms, "anchor": timing.anchor}
    return {
        "name": schedule.name,
        **when,
        "task": schedule.job.task,
        "queue": schedule.job.queue,
        "next_at": record.next_at,
        "last_at": record.last_at,
        "paused": record.paused,
        "declared": schedule.declared,
        "left_over": is_left_over(session, schedule),
        "misfire": schedule.misfire.value,
        "misfire_limit": schedule.misfire_limit,
        "misfire_after_ms": schedule.misfire_after_ms,
        "overlap": schedule.overlap.value,
        "jitter_ms": schedule.jitter_ms,
    }


def upcoming(record: ScheduleRecord) -> list[datetime]:
    """The next instants; none where this machine does not know the zone."""
    try:
        following = islice(instants_after(record.schedule.timing, record.next_at), SHOWN - 1)
        return [record.next_at, *following]
    except BadSetting:
        return []


def in_its_zone(record: ScheduleRecord, instant: datetime) -> str:
    timing = record.schedule.timing
    if not isinstance(timing, Cron) or timing.tz == "UTC":
        return shown_time(instant)
    return f"{shown_time(instant)}  {instant.astimezone(zone_of(timing.tz)):%a %Y-%m-%d %H:%M:%S %Z}"
