"""Jobs that come in: which of them are new, and their rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from propolis.core import wire
from propolis.core.envelope import Envelope
from propolis.core.protocols import Receipt
from propolis.core.transitions import due_us, expires_us
from propolis.engines.shared.receipts import decide_receipts
from propolis.engines.sqlite.rows import SQL, text_of
from propolis.engines.sqlite.steps.rules.groups import group_for, groups_of_keys, lead
from propolis.engines.sqlite.steps.work import Work


def receipts_for(work: Work, jobs: Sequence[Envelope]) -> list[Receipt]:
    used, keys = _taken(work, jobs)
    return decide_receipts(jobs, used.__contains__, keys.get)


def receipts_again(work: Work, jobs: Sequence[Envelope]) -> list[Receipt]:
    """Of a put that is repeated: each names the job that is there."""
    used, keys = _taken(work, jobs)
    there = (job.id if job.id in used else keys.get(job.unique or "", job.id) for job in jobs)
    return [Receipt(job_id, created=False) for job_id in there]


def _taken(work: Work, jobs: Sequence[Envelope]) -> tuple[set[str], dict[str, str]]:
    """Which of their ids are used, and who holds their keys."""
    ids = text_of([job.id for job in jobs])
    used: set[str] = {row[0] for row in work.run("used_ids", ids=ids, now_us=work.now_us)}
    wanted = [job.unique for job in jobs if job.unique is not None]
    return used, dict(work.run("held_keys", keys=text_of(wanted)).fetchall()) if wanted else {}


def add(work: Work, jobs: Sequence[Envelope], bodies: Sequence[bytes]) -> None:
    if not jobs:
        return
    last = work.back(len(jobs))
    first = last - len(jobs) + 1
    work.db.executemany(
        SQL["add_job"],
        [
            _row(work, seq, job, body)
            for seq, job, body in zip(range(first, last + 1), jobs, bodies, strict=True)
        ],
    )
    held = _join_others(work, first, jobs)
    if held:
        work.run("stand_new_but", first=first, last=last, now_us=work.now_us, held=text_of(held))
    else:
        work.run("stand_new", first=first, last=last, now_us=work.now_us)
    later = 0
    if any(job.due_at is not None or job.delay_ms for job in jobs):
        given = [seq for seq, job in zip(range(first, last + 1), jobs, strict=True) if job.due_at is not None]
        later = work.run(
            "schedule_new",
            first=first,
            last=last,
            now_us=work.now_us,
            epoch=work.epoch,
            given=text_of(given),
        ).rowcount
    if any(job.expires_at is not None or job.expires_in_ms is not None for job in jobs):
        work.run("expire_new", first=first, last=last)
    for job in jobs:
        if job.unique is not None:
            work.run("take_key", key=job.unique, id=job.id)
    _count(work, jobs, later)
    if batches := [job.batch for job in jobs if job.batch is not None]:
        for batch, n in Counter(batches).items():
            if not work.run("grow_batch", id=batch, n=n).rowcount:
                work.run("orphan_members", id=batch, first=first, last=last)


def _join_others(work: Work, first: int, jobs: Sequence[Envelope]) -> list[int]:
    """The numbers of those that are set aside at once, where others of their keys are."""
    keyed: dict[str, list[tuple[int, Envelope]]] = {}
    for seq, job in enumerate(jobs, first):
        if job.key is not None and due_us(job, work.now_us) <= work.now_us:
            keyed.setdefault(job.queue, []).append((seq, job))
    if not keyed or not work.run("any_group").fetchone()[0]:
        return []
    rows = []
    for queue, mine in keyed.items():
        groups = groups_of_keys(work, queue, {job.key or "" for _, job in mine})
        for seq, job in mine if groups else ():
            by = group_for(groups, job.task, job.key or "")
            if by is not None:
                rows.append((queue, *by, job.priority, seq, seq))
                lead(work, queue, by, (job.priority, seq, seq))
                work.move(queue, "ready", "held")
    work.db.executemany(SQL["hold"], rows)
    return [row[-1] for row in rows]


def _count(work: Work, jobs: Sequence[Envelope], later: int) -> None:
    for queue, n in Counter([job.queue for job in jobs]).items():
        work.arrive(queue, "ready", n)
        work.woken.add(queue)
    if later:
        for job in jobs:
            if due_us(job, work.now_us) > work.now_us:
                work.move(job.queue, "ready", "scheduled")


def _row(work: Work, seq: int, job: Envelope, body: bytes) -> tuple[Any, ...]:
    return (
        seq,
        job.id,
        job.task,
        job.queue,
        job.priority,
        seq,
        work.now_us,
        due_us(job, work.now_us),
        expires_us(job, work.now_us),
        job.max_crashes,
        not job.chosen and job.unique is None and job.batch is None,
        job.chosen,
        job.unique,
        job.unique_until if job.unique is not None else None,
        job.key,
        job.batch,
        job.member,
        body,
    )


def emit(work: Work, jobs: Sequence[Envelope]) -> None:
    """Put what follows from a step; what is already there is left out."""
    if jobs:
        fresh = [job for job, receipt in zip(jobs, receipts_for(work, jobs), strict=True) if receipt.created]
        add(work, fresh, [wire.encode(job) for job in fresh])
