"""The lines in which jobs wait."""

from __future__ import annotations

from collections.abc import Iterable

from propolis.core.protocols import BITE
from propolis.engines.sqlite.rows import LiveJob
from propolis.engines.sqlite.steps.rules.groups import join_others, leave
from propolis.engines.sqlite.steps.work import Work


def place(
    work: Work, job: LiveJob, queue: str, pos: int, due: int, *, parked: bool = False, given: bool = False
) -> str:
    """Let a job wait, and give the name of its kind of line; `given`: until a time, and not for a while."""
    if job.expires_us is not None:
        work.run("let_expire", expires_us=job.expires_us, seq=job.seq)
    if parked:
        work.run("park", queue=queue, task=job.task, priority=job.priority, seq=job.seq)
        return "parked"
    work.woken.add(queue)
    if due > work.now_us:
        work.run("schedule", queue=queue, due_us=due, seq=job.seq, epoch=None if given else work.epoch)
        return "scheduled"
    if join_others(work, queue, job.task, job.limit_key, (job.priority, pos, job.seq)):
        return "held"
    work.run("stand", queue=queue, priority=job.priority, pos=pos, seq=job.seq)
    return "ready"


def unplace(work: Work, job: LiveJob) -> str:
    """Out of whichever line a waiting job stands in, of which it gives the kind."""
    if job.expires_us is not None:
        work.run("keep_from_expiring", expires_us=job.expires_us, seq=job.seq)
    if work.run("unstand", queue=job.queue, priority=job.priority, pos=job.pos).rowcount:
        return "ready"
    if work.run("unschedule", queue=job.queue, due_us=job.due_us, seq=job.seq).rowcount:
        return "scheduled"
    if leave(work, job.seq):
        return "held"
    work.run("unpark", queue=job.queue, task=job.task, priority=job.priority, seq=job.seq)
    return "parked"


def promote(work: Work, queue: str, most: int = BITE) -> int:
    """Those whose time has come join the back of their line, in the order of their times."""
    return stand_due(work, work.run("due", queue=queue, now_us=work.now_us, most=most).fetchall())


def stand_due(work: Work, due: Iterable[tuple[str, int, int]]) -> int:
    promoted = 0
    for queue, due_us, seq in due:
        pos = work.back()
        row = work.run("stand_due", seq=seq, pos=pos).fetchone()
        work.run("unschedule_due", queue=queue, due_us=due_us, seq=seq)
        if row is None:  # there is no such job, whoever has taken it away
            continue
        priority, task, key = row
        joined = join_others(work, queue, task, key, (priority, pos, seq))
        if not joined:
            work.run("stand", queue=queue, priority=priority, pos=pos, seq=seq)
        work.move(queue, "scheduled", "held" if joined else "ready")
        work.woken.add(queue)
        promoted += 1
    return promoted
