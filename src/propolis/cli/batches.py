"""`propolis batches`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

import click
from msgspec.structs import asdict

from propolis.cli.console.output import Cell, shown_span
from propolis.cli.console.session import PROBLEMS, Session, looks_at_app, on_app
from propolis.cli.jobs import MAX_SHOWN, limit_option
from propolis.core.batch import BatchStatus
from propolis.core.job import Member
from propolis.engines.address import masked_text

WIDTH = 40  # characters of a progress bar
DONE, FAILED, LEFT = "█", "▒", "░"


@click.group()
def batches() -> None:
    """List, show, seal, cancel, replay or delete batches."""


@batches.command("list")
@limit_option
@looks_at_app
async def list_(session: Session, limit: int) -> int | None:
    """List batches, the oldest first."""
    found = await session.batches.afind(limit=limit)
    for status in found:
        session.out.document(fields_of(status))
    if not found:
        session.out.note("there is no batch")
        return PROBLEMS
    now = await session.now()
    columns = ["id", "state", ">total", ">done", ">dead", ">cancelled", ">left", ">age", ">took", "note"]
    session.out.table(columns, [row_of(status, now) for status in found])
    states = Counter(status.state.value for status in found)
    session.out.note(", ".join(f"{count:,} {state}" for state, count in sorted(states.items())))
    if len(found) == limit:
        session.out.note(f"the first {limit}: --limit shows more")
    return None


@batches.command()
@click.argument("batch_id", metavar="ID")
@click.option(
    "--members", is_flag=True, help=f"Also show the members: those that failed first, at most {MAX_SHOWN}."
)
@looks_at_app
async def show(session: Session, batch_id: str, members: bool) -> int | None:
    """Show how far a batch is."""
    status = await session.batches.aget(batch_id)
    if status is None:
        return unknown(session, batch_id)
    listed = await listed_members(session, batch_id) if members else []
    fields = fields_of(status)
    session.out.document(fields | ({"members": [member_fields(each) for each in listed]} if members else {}))
    session.out.fields(shown_fields(status))
    if listed:
        columns = [">member", "id", "state", "reason"]
        session.out.table(columns, [[each.member, each.id, each.state.value, each.reason] for each in listed])
        if status.total > len(listed):
            session.out.note(f"{len(listed)} of {status.total:,} members")
    return None


@batches.command()
@click.argument("batch_id", metavar="ID")
@on_app
async def seal(session: Session, batch_id: str) -> int | None:
    """Say that no more members will come, so that the batch may end and call back."""
    if await session.batches.aget(batch_id) is None:
        return unknown(session, batch_id)
    sealed = await session.batches.aseal(batch_id)
    session.out.say(f"{batch_id}: sealed" if sealed else f"{batch_id}: nothing to do, it was sealed already")
    session.out.document({"id": batch_id, "sealed": True, "changed": sealed})
    return None


@batches.command()
@click.argument("batch_id", metavar="ID")
@on_app
async def cancel(session: Session, batch_id: str) -> int | None:
    """End the members that wait and ask those that run to stop; the batch calls back when all have ended."""
    return await change(session, batch_id, "cancelled", session.batches.acancel)


@batches.command()
@click.argument("batch_id", metavar="ID")
@on_app
async def replay(session: Session, batch_id: str) -> int | None:
    """Give the dead members another life, outside of what the batch counts."""
    return await change(session, batch_id, "replayed", session.batches.areplay)


@batches.command()
@click.argument("batch_id", metavar="ID")
@click.option("--yes", is_flag=True, help="Do not ask.")
@on_app
async def delete(session: Session, batch_id: str, yes: bool) -> int | None:
    """Forget a batch and the members that wait; those that run finish, and there is no callback."""
    if not yes:
        click.confirm(f"Forget batch {batch_id!r} and its waiting members?", abort=True, err=True)
    if not await session.batches.adelete(batch_id):
        return unknown(session, batch_id)
    session.out.say(f"{batch_id}: deleted")
    session.out.document({"id": batch_id, "deleted": True})
    return None


async def change(
    session: Session, batch_id: str, done: str, verb: Callable[[str], Awaitable[int]]
) -> int | None:
    if await session.batches.aget(batch_id) is None:
        return unknown(session, batch_id)
    count = await verb(batch_id)
    members = "1 member" if count == 1 else f"{count:,} members"
    session.out.say(f"{batch_id}: {members} {done}")
    session.out.document({"id": batch_id, done: count})
    return None


def unknown(session: Session, batch_id: str) -> int:
    session.out.note(f"no such batch: {batch_id}: it was never made, was deleted, or its time is over")
    return PROBLEMS


# --- what is shown -----------------------------------------------------------------------


async def listed_members(session: Session, batch_id: str) -> list[Member]:
    """Those that ended badly, then the others, as far as there is room."""
    bad: list[Member] = []
    others: list[Member] = []
    async for member in session.batches.amembers(batch_id):
        listed = bad if member.reason is not None else others
        if len(listed) < MAX_SHOWN:
            listed.append(member)
        if len(bad) == MAX_SHOWN:
            break
    return [*bad, *others][:MAX_SHOWN]


def fields_of(status: BatchStatus) -> dict[str, Any]:
    took = took_of(status)
    return asdict(status) | {
        "state": status.state.value,
        "note": masked_text(status.note),
        "pending": status.pending,
        "took_s": None if took is None else took.total_seconds(),
    }


def member_fields(member: Member) -> dict[str, Any]:
    """All but the result, which may hold a secret: `propolis jobs show` has it."""
    return {
        "member": member.member,
        "id": member.id,
        "state": member.state.value,
        "reason": member.reason,
    }


def row_of(status: BatchStatus, now: datetime) -> list[Cell]:
    numbers = (status.total, status.done, status.dead, status.cancelled, status.pending)
    age, took = now - status.created_at, took_of(status)
    spans = (shown_span(age), None if took is None else shown_span(took))
    return [status.id, status.state.value, *numbers, *spans, masked_text(status.note)]


def took_of(status: BatchStatus) -> timedelta | None:
    """How long it took, from its first member to the end of its last."""
    return status.finished_at - status.created_at if status.finished_at else None


def shown_fields(status: BatchStatus) -> dict[str, Cell]:
    took = took_of(status)
    return {
        "id": status.id,
        "note": masked_text(status.note),
        "state": status.state.value,
        "progress": bar(status),
        "enqueued": status.enqueued or None,
        "retrying": status.retrying or None,
        "running": status.running or None,
        "done": status.done or None,
        "dead": status.dead or None,
        "cancelled": status.cancelled or None,
        "parent": status.parent,
        "created_at": status.created_at,
        "finished_at": status.finished_at,
        "took": None if took is None else shown_span(took),
        "keep_until": status.keep_until,
    }


def bar(status: BatchStatus, width: int = WIDTH) -> str:
    """What has ended, well or not, and what is left; a bar is full only when nothing is left."""
    failed = status.dead + status.cancelled
    share = 1.0 if not status.total else status.ended / status.total
    full = width if share == 1.0 else min(width - 1, int(width * share))
    bad = 0 if not failed else max(1, full * failed // status.ended) if full else 0
    drawn = DONE * (full - bad) + FAILED * bad + LEFT * (width - full)
    return f"{drawn} {status.ended:,} of {status.total:,}{'' if status.sealed else ', open'}"
