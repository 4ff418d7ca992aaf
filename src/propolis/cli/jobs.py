"""`propolis jobs`, and what it shares with `dead` and `broken`: lists, and all that is known of one job."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, TypedDict, Unpack

import click
from msgspec.structs import replace

from propolis.app.operate.jobs import LIVE
from propolis.cli.console.job_views import (
    ShownCall,
    all_fields,
    call_of,
    progress_of,
    short_fields,
    shown_value,
    state_of,
)
from propolis.cli.console.output import Cell, counted, shown_span
from propolis.cli.console.session import PROBLEMS, Session, looks_at_app, on_app
from propolis.cli.console.values import STATES, filter_for_state, filter_options
from propolis.core.job import JobInfo, State
from propolis.core.protocols import Filter
from propolis.errors import BadSetting

MAX_SHOWN = 50
MAX_LIMIT = 1_000_000  # a list is held in memory
FIELDS = (
    *("queue", "state", "reason", "priority", "unique", "key", "batch"),
    *("put_at", "due_at", "expires_at", "started_at", "holder", "lease_until", "ended_at", "keep_until"),
)

limit_option = click.option(
    "--limit",
    type=click.IntRange(1, MAX_LIMIT),
    default=MAX_SHOWN,
    show_default=True,
    help="Show at most so many.",
)
key_option = click.option("--key", help="Only those of this key: they are looked for among all the others.")
values_option = click.option(
    "--args", "values", is_flag=True, help="Show arguments, result and checkpoint, not only their shape."
)


class CancelOptions(TypedDict):
    """How many are cancelled, and whether they are."""

    limit: int | None
    dry_run: bool
    yes: bool


@click.group()
def jobs() -> None:
    """List, count, show, explain, cancel, replay or delete jobs."""


@jobs.command("list")
@filter_options
@click.option("--state", type=click.Choice(STATES), help="Only those in this state.")
@key_option
@limit_option
@looks_at_app
async def list_(
    session: Session, /, state: str | None, key: str | None, limit: int, **filters: Any
) -> int | None:
    """List jobs, the oldest first."""
    return await list_jobs(session, filter_for_state(state, filters), limit, key)


@jobs.command()
@filter_options
@click.option("--state", type=click.Choice(STATES), help="Only those in this state.")
@key_option
@looks_at_app
async def count(session: Session, /, state: str | None, key: str | None, **filters: Any) -> None:
    """Count jobs by their state.  It reads all of them; `propolis queues` counts whole queues at once."""
    await say_counts(session, await session.jobs.acount(filter_for_state(state, filters), key=key))


@jobs.command()
@click.argument("job_id", metavar="ID")
@values_option
@looks_at_app
async def show(session: Session, job_id: str, values: bool) -> int | None:
    """Show everything that is known of one job: its life so far, progress, log and error."""
    return await show_job(session, job_id, Filter(), values=values)


@jobs.command()
@click.argument("job_id", metavar="ID")
@looks_at_app
async def explain(session: Session, job_id: str) -> int | None:
    """Say why a job is not running."""
    reasons = await session.jobs.aexplain(job_id)
    for reason in reasons:
        session.out.say(reason)
    session.out.document({"id": job_id, "reasons": reasons})
    return PROBLEMS if await session.jobs.aget(job_id) is None else None


@jobs.command()
@click.argument("job_ids", metavar="[ID]…", nargs=-1)
@click.option("--queue", help="All of this queue that have not ended.")
@click.option("--task", help="All of this task.")
@click.option("--key", help="All of this key.")
@click.option("--limit", type=click.IntRange(1), help="At most so many, the oldest first.")
@click.option("--dry-run", is_flag=True, help="Only count them.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@on_app
async def cancel(
    session: Session,
    job_ids: tuple[str, ...],
    queue: str | None,
    task: str | None,
    key: str | None,
    **how: Unpack[CancelOptions],
) -> int | None:
    """End jobs that wait, and ask those that run to stop: by id, or all of a queue, a task or a key.

    Of many it first says how many there are.  What is put meanwhile may stay: pause them first.
    """
    which = Filter(queue=queue, task=task)
    if bool(job_ids) == (which != Filter() or key is not None):
        raise BadSetting("say which: ids, or --queue, --task, --key")
    if not job_ids:
        return await cancel_all(session, which, key, **how)
    answers = await session.jobs.acancel(*job_ids)
    return report(session, "cancelled", "unknown, or ended already", zip(job_ids, answers, strict=True))


async def cancel_all(
    session: Session, which: Filter, key: str | None, *, limit: int | None, dry_run: bool, yes: bool
) -> int | None:
    if dry_run or not yes:
        found = [await session.jobs.acount(replace(which, state=state), key=key) for state in LIVE]
        await say_counts(session, {state: n for counts in found for state, n in counts.items()})
        if dry_run:
            return None
        click.confirm("Cancel them?", abort=True, err=True)
    cancelled = await session.jobs.acancel_all(which, key=key, limit=limit)
    session.out.say(f"{counted(cancelled)} cancelled")
    session.out.document({"cancelled": cancelled})
    return None if cancelled else PROBLEMS


async def say_counts(session: Session, counts: dict[State, int]) -> None:
    session.out.say(", ".join(f"{n} {state.value}" for state, n in counts.items()) or "no job matches")
    session.out.document({state.value: counts.get(state, 0) for state in State})


@jobs.command()
@click.argument("job_ids", metavar="ID…", nargs=-1, required=True)
@on_app
async def replay(session: Session, job_ids: tuple[str, ...]) -> int | None:
    """Give dead jobs a new life; jobs that wait for their time become due now."""
    answers = [await replay_one(session, job_id) for job_id in job_ids]
    why = "unknown, running, ended well, or its unique key is taken"
    return report(session, "replayed", why, zip(job_ids, answers, strict=True))


@jobs.command()
@click.argument("job_ids", metavar="ID…", nargs=-1, required=True)
@on_app
async def delete(session: Session, job_ids: tuple[str, ...]) -> int | None:
    """Forget jobs that have ended."""
    answers = await session.jobs.adelete(*job_ids)
    why = "unknown, or not ended: cancel it first"
    return report(session, "deleted", why, zip(job_ids, answers, strict=True))


async def replay_one(session: Session, job_id: str) -> bool:
    info = await session.jobs.aget(job_id)
    if info is None or info.state is not State.READY:
        return all(await session.jobs.areplay(job_id))
    now = await session.now()
    # A job that is due keeps its place in line: there is nothing to do for it.
    return info.due_at <= now or await session.jobs.areschedule(job_id, now)


def report(session: Session, done: str, why_not: str, answers: Iterable[tuple[str, bool]]) -> int | None:
    """Say what became of each job; it is a problem if one of them was left as it was."""
    code = None
    for job_id, ok in answers:
        session.out.say(f"{job_id}: {done if ok else f'not {done}: {why_not}'}")
        session.out.document({"id": job_id, done: ok})
        code = code if ok else PROBLEMS
    return code


# --- lists -------------------------------------------------------------------------------


async def list_jobs(session: Session, where: Filter, limit: int, key: str | None = None) -> int | None:
    found = await session.jobs.afind(where, key=key, limit=limit)
    if not found:
        session.out.note("no job matches")
        return PROBLEMS
    now = await session.now()
    for info in found:
        session.out.document(short_fields(info, now))
    columns = ["id", "task", "queue", "state", ">attempts", ">age", "notes"]
    session.out.table(columns, [row_of(info, now) for info in found])
    if len(found) == limit:
        session.out.note(f"the first {limit}: --limit shows more")
    return None


def row_of(info: JobInfo, now: datetime) -> list[Cell]:
    error = info.error.type if info.error else None
    notes = ["parked" if info.parked else None, info.reason, error, info.holder, progress_of(info)]
    return [
        info.id,
        info.task,
        info.queue,
        state_of(info, now),
        info.attempts,
        shown_span(now - info.put_at),
        ", ".join(note for note in notes if note),
    ]


# --- one job -----------------------------------------------------------------------------


async def show_job(session: Session, job_id: str, where: Filter, *, values: bool) -> int | None:
    info = await session.jobs.aget(job_id)
    if info is None or not is_meant(info, where):
        session.out.note(f"no such job: {job_id}")
        return PROBLEMS
    now = await session.now()
    fields = all_fields(info, session.app, now, values=values)
    session.out.document(fields)
    session.out.fields(shown_fields(info, fields, call_of(info, session.app, values=values)))
    if info.history:
        session.out.say("history")
        columns = ["at", "event", ">attempt", ">fence", "holder", "note"]
        session.out.table(columns, [event_row(event) for event in fields["history"]])
    return None


def is_meant(info: JobInfo, where: Filter) -> bool:
    return where.state in (None, info.state) and where.reason in (None, info.reason)


def shown_fields(info: JobInfo, fields: dict[str, Any], call: ShownCall) -> dict[str, Cell]:
    error = fields["error"] or {}
    return {
        "id": info.id,
        "task": info.task,
        "call": str(call) if call.undecodable is None else f"undecodable: {call.undecodable}",
        "raw": fields.get("raw"),
        **{name: fields[name] for name in FIELDS},
        "attempts": (f"{info.attempts} ({info.failures} failed, {info.losses} lost, {info.crashes} crashed)"),
        "stop wanted": "yes" if info.cancel_requested else None,
        "progress": progress_of(info),
        **{
            name: None if fields[name] is None else shown_value(fields[name])
            for name in ("result", "checkpoint")
        },
        "error": f"{error['type']}: {error['message']}" if error else None,
        "traceback": error.get("traceback"),
        "log": "\n".join(fields["log"]),
    }


def event_row(event: dict[str, Any]) -> list[Cell]:
    return [event[name] for name in ("at", "kind", "attempt", "fence", "holder", "note")]
