"""A put, with or without a batch: all of it or nothing."""

from __future__ import annotations

from collections.abc import Sequence

from propolis.core.batch import Batch
from propolis.core.envelope import Envelope
from propolis.core.protocols import Receipt
from propolis.engines.sqlite.steps.arrivals import add, receipts_again, receipts_for
from propolis.engines.sqlite.steps.batches import check_open, open_batch, seal_batch
from propolis.engines.sqlite.steps.work import KNOWN_US, WAITING, Work
from propolis.errors import QueueFull


def put(
    work: Work,
    jobs: Sequence[Envelope],
    bodies: Sequence[bytes],
    token: str | None,
    batch: Batch | None = None,
    *,
    seal: bool = False,
) -> list[Receipt]:
    if token is not None and work.answered("known_token", token=token, now_us=work.now_us):
        return receipts_again(work, jobs)
    if batch is not None:
        open_batch(work, batch)
    receipts = receipts_for(work, jobs)
    fresh = [n for n, receipt in enumerate(receipts) if receipt.created]
    check_open(work, {jobs[n].batch for n in fresh})
    add(work, [jobs[n] for n in fresh], [bodies[n] for n in fresh])
    check_room(work, {jobs[n].queue for n in fresh})
    if batch is not None and seal:
        seal_batch(work, batch.id)
    if token is not None:
        work.run("keep_token", token=token, until_us=work.now_us + KNOWN_US)
    return receipts


def check_room(work: Work, queues: set[str]) -> None:
    """After the fact: what raises is rolled back."""
    for queue in queues:
        row = work.run("cap", queue=queue).fetchone()
        if row is not None and (row[1] is None or row[1] > work.now_us):
            tally = work.tally(queue)
            if (would_hold := sum(tally[where] for where in WAITING)) > row[0]:
                raise QueueFull(queue, row[0], would_hold)
