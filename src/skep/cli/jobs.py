"""`skep jobs`, and what it shares with the shelves: lists, and one job with all that is known of it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import click

from skep.broker import Filter
from skep.cli.output import Cell, shown_span
from skep.cli.records import Call, all_facts, call_of, progress_of, short_facts, shown_value
from skep.cli.session import PROBLEMS, Session, on_app
from skep.cli.values import STATES, filter_for_state, filter_options
from skep.job import Record, State

MOST = 50
FACTS = (
    *("queue", "state", "reason", "priority", "unique", "key", "batch"),
    *("put_at", "due_at", "expires_at", "started_at", "holder", "lease_until", "ended_at", "keep_until"),
)

limit_option = click.option(
    "--limit", type=click.IntRange(1), default=MOST, show_default=True, help="Show at most so many."
)
values_option = click.option(
    "--args", "values", is_flag=True, help="Show arguments and result, not only their shape."
)


@click.group()
def jobs() -> None:
    """List, show, explain, cancel, retry or delete jobs."""


@jobs.command("list")
@filter_options
@click.option("--state", type=click.Choice(STATES), help="Only those in this state.")
@limit_option
@on_app
async def list_(session: Session, /, state: str | None, limit: int, **facts: Any) -> int | None:
    """List jobs, the oldest first."""
    return await list_jobs(session, filter_for_state(state, facts), limit)


@jobs.command()
@click.argument("job_id", metavar="ID")
@values_option
@on_app
async def show(session: Session, job_id: str, values: bool) -> int | None:
    """Everything that is known of one job: its life so far, progress, log and error."""
    return await show_job(session, job_id, Filter(), values=values)


@jobs.command()
@click.argument("job_id", metavar="ID")
@on_app
async def explain(session: Session, job_id: str) -> int | None:
    """Why is this job not running?"""
    reasons = await session.jobs.aexplain(job_id)
    for reason in reasons:
        session.out.say(reason)
    session.out.document({"id": job_id, "reasons": reasons})
    return PROBLEMS if await session.jobs.aget(job_id) is None else None


@jobs.command()
@click.argument("job_ids", metavar="ID…", nargs=-1, required=True)
@on_app
async def cancel(session: Session, job_ids: tuple[str, ...]) -> int | None:
    """End jobs that wait, and ask those that run to stop."""
    answers = await session.jobs.acancel(*job_ids)
    return report(session, "cancelled", "unknown, or ended already", zip(job_ids, answers, strict=True))


@jobs.command()
@click.argument("job_ids", metavar="ID…", nargs=-1, required=True)
@on_app
async def retry(session: Session, job_ids: tuple[str, ...]) -> int | None:
    """Run jobs again: dead ones get a new life, those that wait for their time become due now."""
    answers = [await retry_one(session, job_id) for job_id in job_ids]
    why = "unknown, running, ended well, or its unique key is taken"
    return report(session, "retried", why, zip(job_ids, answers, strict=True))


@jobs.command()
@click.argument("job_ids", metavar="ID…", nargs=-1, required=True)
@on_app
async def delete(session: Session, job_ids: tuple[str, ...]) -> int | None:
    """Forget jobs that have ended."""
    answers = await session.jobs.adelete(*job_ids)
    why = "unknown, or not ended: cancel it first"
    return report(session, "deleted", why, zip(job_ids, answers, strict=True))


async def retry_one(session: Session, job_id: str) -> bool:
    record = await session.jobs.aget(job_id)
    if record is None or record.state is not State.READY:
        return all(await session.jobs.areplay(job_id))
    now = await (await session.app.ready()).now()
    # One that is due keeps its place in line: there is nothing to do for it.
    return record.due_at <= now or await session.jobs.areschedule(job_id, now)


def report(session: Session, done: str, why_not: str, answers: Iterable[tuple[str, bool]]) -> int | None:
    """What became of each job; a problem if any of them was left as it was."""
    code = None
    for job_id, ok in answers:
        session.out.say(f"{job_id}: {done if ok else f'not {done}: {why_not}'}")
        session.out.document({"id": job_id, done: ok})
        code = code if ok else PROBLEMS
    return code


# --- lists -------------------------------------------------------------------------------


async def list_jobs(session: Session, where: Filter, limit: int) -> int | None:
    records = await session.jobs.afind(where, limit=limit)
    for record in records:
        session.out.document(short_facts(record))
    if not records:
        session.out.note("no job matches")
        return PROBLEMS
    now = await (await session.app.ready()).now()
    columns = ["id", "task", "queue", "state", ">attempts", ">age", "notes"]
    session.out.table(columns, [row_of(record, now) for record in records])
    if len(records) == limit:
        session.out.note(f"the first {limit}: --limit shows more")
    return None


def row_of(record: Record, now: datetime) -> list[Cell]:
    scheduled = record.state is State.READY and record.due_at > now
    notes = [record.reason, record.error.type if record.error else None, record.holder, progress_of(record)]
    return [
        record.id,
        record.task,
        record.queue,
        "scheduled" if scheduled else record.state.value,
        record.attempts,
        shown_span(now - record.put_at),
        ", ".join(note for note in notes if note),
    ]


# --- one job -----------------------------------------------------------------------------


async def show_job(session: Session, job_id: str, where: Filter, *, values: bool) -> int | None:
    record = await session.jobs.aget(job_id)
    if record is None or not on_shelf(record, where):
        session.out.note(f"no such job: {job_id}")
        return PROBLEMS
    facts = all_facts(record, session.app, values=values)
    session.out.document(facts)
    session.out.facts(shown_facts(record, facts, call_of(record, session.app, values=values)))
    if record.history:
        session.out.say("history")
        columns = ["at", "event", ">attempt", ">fence", "holder", "note"]
        session.out.table(columns, [event_row(event) for event in facts["history"]])
    return None


def on_shelf(record: Record, where: Filter) -> bool:
    return where.state in (None, record.state) and where.reason in (None, record.reason)


def shown_facts(record: Record, facts: dict[str, Any], call: Call) -> dict[str, Cell]:
    error = facts["error"] or {}
    return {
        "id": record.id,
        "task": record.task,
        "call": str(call) if call.undecodable is None else f"undecodable: {call.undecodable}",
        "raw": facts.get("raw"),
        **{name: facts[name] for name in FACTS},
        "attempts": f"{record.attempts} ({record.failures} failed, {record.crashes} crashed)",
        "stop wanted": "yes" if record.cancel_requested else None,
        "progress": progress_of(record),
        "result": None if facts["result"] is None else shown_value(facts["result"]),
        "error": f"{error['type']}: {error['message']}" if error else None,
        "traceback": error.get("traceback"),
        "log": "\n".join(facts["log"]),
    }


def event_row(event: dict[str, Any]) -> list[Cell]:
    return [event[name] for name in ("at", "kind", "attempt", "fence", "holder", "note")]
