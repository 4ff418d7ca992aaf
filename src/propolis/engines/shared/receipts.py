"""Which jobs of a put are new (T1): decided here, or as a server has answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from propolis.core.envelope import Envelope
from propolis.core.protocols import Receipt


def decide_receipts(
    jobs: Sequence[Envelope], is_used: Callable[[str], bool], holder_of: Callable[[str], str | None]
) -> list[Receipt]:
    """By what is known of ids and unique keys, and also against the others of the same call."""
    receipts = []
    ids: set[str] = set()
    keys: dict[str, str] = {}
    for job in jobs:
        holder = job.id if job.id in ids or is_used(job.id) else None
        if holder is None and job.unique is not None:
            holder = keys.get(job.unique) or holder_of(job.unique)
        if holder is None:
            ids.add(job.id)
            if job.unique is not None:
                keys[job.unique] = job.id
        receipts.append(Receipt(holder or job.id, created=holder is None))
    return receipts


def all_created_but(jobs: Sequence[Envelope], refused: Iterable[tuple[int, str]]) -> list[Receipt]:
    """Refused are some by their numbers, from 1, each with the id of the job that is in its place."""
    receipts = [Receipt(job.id, True) for job in jobs]
    for n, there in refused:
        receipts[n - 1] = Receipt(there, False)
    return receipts
