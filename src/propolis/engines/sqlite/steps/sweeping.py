"""What only time brings about."""

from __future__ import annotations

import sqlite3
from datetime import timedelta

from propolis.core.clock import span_until
from propolis.core.protocols import PARKED_LINES, Swept
from propolis.core.transitions import Step, reaped
from propolis.engines.sqlite.rows import SQL, LiveJob, one, text_of
from propolis.engines.sqlite.steps import records
from propolis.engines.sqlite.steps.batches import remove_batch
from propolis.engines.sqlite.steps.lines import stand_due
from propolis.engines.sqlite.steps.operating import remove_on
from propolis.engines.sqlite.steps.rules.groups import open_with_room
from propolis.engines.sqlite.steps.rules.openings import groups_due, open_before, open_on
from propolis.engines.sqlite.steps.rules.rulebook import remove_over
from propolis.engines.sqlite.steps.settling import (
    apply_step,
    expire,
    job_by_number,
    running_job,
    shelve,
    stand_in_front,
    stop,
)
from propolis.engines.sqlite.steps.work import TOLERATED_US, Work

REMEMBERED_US = 10_000_000  # how far the largest time that is remembered may lag behind
LEEWAY = {"tolerated_us": TOLERATED_US, "remembered_us": REMEMBERED_US}


def sweep(work: Work, limit: int, *, reaps: bool = True) -> Swept:
    """It does not reap where those that run may not have been able to say that they do."""
    behind = follow_clock(work, limit)
    rules_over = remove_over(work, limit)
    opened = max(open_on(work, limit), open_with_room(work, groups_due(work, limit)))
    due = work.run("due_anywhere", now_us=work.now_us, most=limit).fetchall()
    promoted = stand_due(work, due)
    lost = [row[0] for row in work.run("lost_leases", now_us=work.now_us, most=limit)] if reaps else []
    ended = _reap(work, lost)
    open_with_room(work, work.groups_freed())
    over = _expire(work, limit)
    removed = _forget_old(work, limit) + records.forget(work, limit)
    remove_on(work, limit)
    next_us = one(work.db, "next_moment", now_us=work.now_us)
    full = (
        behind
        or limit in (promoted, len(lost), len(over), rules_over, opened)
        or removed >= limit
        or work.answered("removals", most=1)
    )
    return Swept(
        promoted,
        len(lost),
        len(over),
        removed,
        span_until(next_us, work.now_us),
        timedelta(0) if full else None,
        records_due=records.kinds_due(work.db, work.now_us),
        ended=(*ended, *over),
        parked=parked_lines(work.db),
    )


def follow_clock(work: Work, limit: int) -> bool:
    """Where the clock was set back, what was counted from it follows, in bites; whether there is more of it.

    Leases end one span from now at the latest (L2), and delays do not grow: but for what was given a time.
    """
    epoch = work.look_at_clock()
    steps = work.run("steps_back").fetchall()
    if not steps:
        return False
    *_, until_us, seq = steps[-1]
    leases = work.run("leases_after", until_us=until_us, seq=seq, now_us=work.now_us, most=limit).fetchall()
    work.run("shorten_leases", now_us=work.now_us, seqs=text_of([seq for _, seq in leases]))
    delayed = work.run("delayed_before", epoch=epoch, most=limit).fetchall()
    for queue, due_us, seq, since in delayed:
        all_us = sum(by_us for ended, by_us, *_ in steps if ended >= since)
        work.run("bring_forward", queue=queue, due_us=due_us, seq=seq, by_us=all_us, epoch=epoch)
        work.run("bring_job_forward", seq=seq, by_us=all_us)
    opened = open_before(work, epoch, limit)
    if limit in (len(leases), len(delayed), opened):
        until_us, seq = leases[-1] if leases else (until_us, seq)
        work.run("keep_followed", until_us=until_us, seq=seq)
        return True
    work.run("forget_steps_back")
    return False


def parked_lines(db: sqlite3.Connection) -> tuple[tuple[str, str], ...]:
    return tuple(db.execute(SQL["parked_lines"], {"most": PARKED_LINES}).fetchall())


def _reap(work: Work, seqs: list[int]) -> list[str]:
    """The ids of those that have ended by it."""
    ended: list[str] = []
    to_front: list[tuple[LiveJob, Step]] = []
    for seq in seqs:
        if not work.answered("job_by_number", seq=seq):  # there is no such job, whoever has taken it away
            work.run("stop_running", seqs=text_of([seq]))
            continue
        job = running_job(work, seq)
        if not job.is_sound:
            stop(work, job)
            shelve(work, job, "running")
            ended.append(job.id)
            continue
        step = reaped(job.running(), work.now_us, work.retention)
        apply_step(work, job, step, to_front)
        if step.state.terminal:
            ended.append(job.id)
    stand_in_front(work, to_front)
    return ended


def _expire(work: Work, limit: int) -> list[str]:
    ended = []
    for seq, expires_us in work.run("expired", now_us=work.now_us, most=limit).fetchall():
        if not work.answered("job_by_number", seq=seq):
            work.run("keep_from_expiring", expires_us=expires_us, seq=seq)
            continue
        job = job_by_number(work, seq)
        expire(work, job)
        ended.append(job.id)
    return ended


def _forget_old(work: Work, limit: int) -> int:
    old = work.run("past_keeping", now_us=work.now_us, most=limit).fetchall()
    if (most := work.retention.dead_max) is not None:
        for queue, n in work.run("full_shelves", most=most, limit=limit).fetchall():
            old += work.run("oldest_dead", queue=queue, most=min(limit, n - most)).fetchall()
    gone = {seq: (queue, state) for seq, queue, state in old}
    for seq, (queue, state) in gone.items():
        work.run("remove_archived", seq=seq)
        work.depart(queue, state)
    for scope, name in work.run("full_buckets", now_us=work.now_us, most=limit).fetchall():
        work.run("forget_bucket", scope=scope, name=name)
        work.db.execute(SQL["forget_busy"], (scope, name, work.now_us))
    work.run("forget_ids", now_us=work.now_us, most=limit)
    work.run("forget_tokens", now_us=work.now_us, most=limit)
    for (batch,) in work.run("batches_over", now_us=work.now_us, most=limit).fetchall():
        remove_batch(work, batch)
    return len(gone)
