"""How attempts and waits end, and what follows from that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from operator import itemgetter
from typing import Any

from propolis.core.clock import span_us
from propolis.core.job import Dead, Done, Error, Lease, Member, Outcome, Released, Snoozed, State, Unknown
from propolis.core.transitions import Step, settled
from propolis.engines.sqlite.rows import BOUNDS, LiveJob, one, text_of
from propolis.engines.sqlite.steps.arrivals import emit
from propolis.engines.sqlite.steps.batches import open_batch, step_batch
from propolis.engines.sqlite.steps.lines import place, unplace
from propolis.engines.sqlite.steps.rules.rulebook import Rulebook
from propolis.engines.sqlite.steps.work import KNOWN_US, Work

_NAMES = itemgetter(4, 6, 7)  # queue, task and key, in a row of `leased`
WORTHWHILE = 10  # jobs of one claim: for fewer, statements of their own cost more than they save
_SETTLED = (None,) * 4  # in its place: of two outcomes of one lease the first counts


def settle(work: Work, outcomes: Sequence[tuple[Lease, Outcome]]) -> list[Lease]:
    outcomes = _end_together(work, outcomes)
    if not outcomes:
        return []
    seqs = text_of([lease.place for lease, _ in outcomes])
    leased: dict[str, Any] = {row[0]: row for row in work.run("leased", seqs=seqs)}
    lost: list[Lease] = []
    ended: list[Any] = []
    released: list[tuple[LiveJob, Step]] = []
    for lease, outcome in outcomes:
        row = leased.get(lease.id) or work.run("leased_as", id=lease.id).fetchone()
        if row is None or row[2] != lease.fence or row[3] != lease.holder:
            lost.append(lease)
            continue
        leased[lease.id] = _SETTLED
        if row[5] and isinstance(outcome, Done) and not outcome.keep:
            _put_next(work, outcome)
            ended.append(row)
        elif not _settle_one(work, row[1], outcome, released):
            lost.append(lease)
    _end_plain(work, ended)
    stand_in_front(work, released)
    return lost


def _end_together(work: Work, outcomes: Sequence[tuple[Lease, Outcome]]) -> Sequence[tuple[Lease, Outcome]]:
    """Gives the rest.  Most were claimed together, of one task, and are done: no row is fetched for these."""
    if len(outcomes) < WORTHWHILE or len({lease.place for lease, _ in outcomes}) < len(outcomes):
        return outcomes
    claims: dict[tuple[str, str, int, str], list[int]] = {}
    for lease, outcome in outcomes:
        if isinstance(outcome, Done) and not (outcome.keep or outcome.emit or outcome.opens):
            claims.setdefault((lease.queue, lease.task, lease.fence, lease.holder), []).append(lease.place)
    ended: set[int] = set()
    for (queue, task, fence, holder), places in claims.items():
        claim = {"queue": queue, "task": task, "fence": fence, "holder": holder, "seqs": text_of(places)}
        if len(places) >= WORTHWHILE and one(work.db, "leased_plain", **claim) == len(places):
            _remove(work, places)
            work.depart(queue, "running", len(places))
            work.count_started(task, None, -len(places))
            ended.update(places)
    return [each for each in outcomes if each[0].place not in ended]


def _remove(work: Work, places: list[int]) -> None:
    seqs = text_of(places)
    work.run("stop_running", seqs=seqs)
    work.run("end_plain", seqs=seqs)


def _end_plain(work: Work, ended: list[Any]) -> None:
    """The common end: done, nothing to keep, no batch to step."""
    if not ended:
        return
    _remove(work, [row[1] for row in ended])
    for (queue, task, key), n in Counter(map(_NAMES, ended)).items():
        work.depart(queue, "running", n)
        work.count_started(task, key, -n)


def _settle_one(work: Work, seq: int, outcome: Outcome, released: list[tuple[LiveJob, Step]]) -> bool:
    job = running_job(work, seq)
    if not job.is_sound:
        stop(work, job)
        shelve(work, job, "running")
        return True
    step = settled(job.running(), outcome, work.now_us, work.retention)
    if step is None:
        return False
    if isinstance(outcome, Done | Dead) and (outcome.emit or outcome.opens):
        _free_key(work, job)  # it may hand its own key on
        _put_next(work, outcome)
    apply_step(work, job, step, released)
    if isinstance(outcome, Released | Snoozed | Unknown) and step.state is State.READY:
        Rulebook(work).give_token_back(job.queue, job.task, job.limit_key)
    return True


def _put_next(work: Work, outcome: Done | Dead) -> None:
    """The batches that it opens, and what it emits."""
    for batch in outcome.opens:
        open_batch(work, batch, emitted=True)
    emit(work, outcome.emit)


def running_job(work: Work, seq: int) -> LiveJob:
    return LiveJob(*work.run("running_job", seq=seq).fetchone())


def job_by_number(work: Work, seq: int) -> LiveJob:
    return LiveJob(*work.run("job_by_number", seq=seq).fetchone())


def live_job(work: Work, job_id: str) -> LiveJob:
    return LiveJob(*work.run("live_job", id=job_id).fetchone())


def shelve(work: Work, job: LiveJob, source: str) -> None:
    """What cannot be read stops nobody: it ends as broken, and what can be read of it is kept (L7)."""
    work.run("mend_job", seq=job.seq, now_us=work.now_us, **BOUNDS)
    mended = job_by_number(work, job.seq)
    error = Error("BrokenRow", "its row in propolis_job held what is no number, or none that can be")
    end_unplaced(work, mended, source, State.DEAD, work.retention.dead_for, "broken", error)


def apply_step(work: Work, job: LiveJob, step: Step, to_front: list[tuple[LiveJob, Step]]) -> None:
    """Record a step of a running job, with all that follows from it."""
    stop(work, job)
    job.fence, job.started_us = job.lease_fence, job.lease_started_us
    if step.state is not State.READY:
        _end(work, job, step, "running")
    elif step.front:
        to_front.append((job, step))
    else:
        make_ready(work, job, step, work.back(), "running")


def stop(work: Work, job: LiveJob) -> None:
    """It runs no more."""
    work.run("stop_running", seqs=text_of([job.seq]))
    work.count_started(job.task, job.limit_key, -1)


def stand_in_front(work: Work, released: list[tuple[LiveJob, Step]]) -> None:
    for job, step in reversed(released):  # the first of them is to stand first
        make_ready(work, job, step, work.front(), "running")


def make_ready(work: Work, job: LiveJob, step: Step, pos: int, source: str, *, given: bool = False) -> None:
    """`source` is where it was: it runs, or the line that it has left."""
    queue = step.queue or job.queue
    work.run(
        "update_job",
        seq=job.seq,
        queue=queue,
        pos=pos,
        due_us=step.due_us,
        attempts=step.attempts,
        failures=step.failures,
        losses=step.losses,
        crashes=step.crashes,
        fence=job.fence,
        started_us=job.started_us,
        error=None if step.error is None else text_of(step.error),
        history=job.history_with(step.event),
    )
    target = place(work, job, queue, pos, step.due_us, parked=step.parked, given=given)
    if queue == job.queue:
        work.move(queue, source, target)
    else:
        work.depart(job.queue, source)
        work.arrive(queue, target)


def _end(work: Work, job: LiveJob, step: Step, source: str) -> None:
    _free_key(work, job)
    if job.chosen:
        work.run("keep_id", id=job.id, until_us=work.now_us + KNOWN_US)
    if step.keep_us is None:
        work.depart(job.queue, source)
    else:
        work.move(job.queue, source, step.state.value)
        _archive(work, job, step, step.keep_us)
    work.run("remove_job", seq=job.seq)
    if job.batch is not None and not job.stepped:
        ended = Member(job.member, job.id, step.state, step.result, step.reason)
        step_batch(work, job.batch, ended, job.seq)


def _free_key(work: Work, job: LiveJob) -> None:
    if job.unique_key is not None:
        work.run("free_key", key=job.unique_key, id=job.id)


def _archive(work: Work, job: LiveJob, step: Step, keep_us: int) -> None:
    work.run(
        "archive",
        seq=job.seq,
        attempts=step.attempts,
        failures=step.failures,
        losses=step.losses,
        crashes=step.crashes,
        fence=job.fence,
        started_us=job.started_us,
        error=None if step.error is None else text_of(step.error),
        history=job.history_with(step.event),
        state=step.state,
        cancel=job.cancel,
        ended_us=work.now_us,
        keep_us=keep_us,
        reason=step.reason,
        result=step.result,
    )


def end_waiting(work: Work, job: LiveJob, state: State, keep: timedelta | None, reason: str | None) -> None:
    end_unplaced(work, job, unplace(work, job), state, keep, reason)


def end_unplaced(
    work: Work,
    job: LiveJob,
    source: str,
    state: State,
    keep: timedelta | None,
    reason: str | None,
    error: Error | None = None,
) -> None:
    """It has left its line already."""
    step = Step(
        state=state,
        attempts=job.attempts,
        failures=job.failures,
        losses=job.losses,
        crashes=job.crashes,
        keep_us=None if keep is None else work.now_us + span_us(keep),
        reason=reason,
        error=error,
    )
    _end(work, job, step, source)


def expire(work: Work, job: LiveJob) -> None:
    end_waiting(work, job, State.DEAD, work.retention.dead_for, "expired")
