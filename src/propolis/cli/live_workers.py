"""`propolis workers`."""

from __future__ import annotations

from datetime import datetime

import click
from msgspec.structs import asdict

from propolis.app.operate.workers import WorkerInfo
from propolis.cli.console.output import Cell, shown_span
from propolis.cli.console.session import Session, looks_at_app


@click.command()
@looks_at_app
async def workers(session: Session) -> None:
    """List the workers that are alive: each process that works is one.

    One that was killed is listed for three minutes more: see the column "seen".
    """
    found = await session.workers.alist()
    now = await session.now()
    if not found:
        session.out.note("no worker is alive")
    for worker in found:
        session.out.document(asdict(worker))
    columns = ["worker", "state", "queues", ">slots", ">tasks", "version", "code", "set", ">up", ">seen"]
    if found:
        session.out.table(columns, [row_of(worker, now) for worker in found])


def row_of(worker: WorkerInfo, now: datetime) -> list[Cell]:
    more = [f"{worker.more_queues:,} more"] if worker.more_queues else []
    return [
        worker.id,
        worker.state.value,
        ", ".join([*worker.queues, *more]),
        worker.slots,
        len(worker.tasks) + worker.more_tasks,
        worker.version,
        worker.code,
        worker.function_set,
        shown_span(now - worker.started_at),
        shown_span(now - worker.seen_at),
    ]
