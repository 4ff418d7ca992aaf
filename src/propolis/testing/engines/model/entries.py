"""What the model of the contract stores, and how an engine would show it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from propolis.core.batch import Batch, BatchState, BatchStatus
from propolis.core.envelope import Envelope
from propolis.core.job import Error, Event, JobInfo, State
from propolis.core.protocols import Counts, Scope, task_key
from propolis.errors import PropolisError


class Refused(Exception):
    """A put that must be refused, and every error that would be a right answer to it."""

    def __init__(self, reasons: Iterable[type[PropolisError]]) -> None:
        super().__init__("refused")
        self.reasons = frozenset(reasons)


@dataclass(slots=True, eq=False)
class ModelEntry:
    """A job and everything that is known of it."""

    job: Envelope
    body: bytes
    queue: str
    put_at: datetime
    due_at: datetime
    expires_at: datetime | None
    has_key: bool
    member_of: Group | None = None
    state: State = State.READY
    attempts: int = 0
    failures: int = 0
    losses: int = 0
    crashes: int = 0
    parked: bool = False
    fence: int = 0
    holder: str | None = None
    lease_until: datetime | None = None
    cancel_requested: bool = False
    ended_at: datetime | None = None
    keep_until: datetime | None = None
    reason: str | None = None
    error: Error | None = None
    result: bytes | None = None
    checkpoint: bytes | None = None
    began: bool = False
    history: list[Event] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Part:
    """One member of a batch: pending while its state is not terminal.  A nested batch has no entry."""

    member: int
    id: str
    entry: ModelEntry | None
    state: State = State.RUNNING
    result: bytes | None = None
    reason: str | None = None


@dataclass(slots=True, eq=False)
class Group:
    """A batch and its members."""

    batch: Batch
    created_at: datetime
    parent: Group | None
    sealed: bool = False
    failed: bool = False
    finished_at: datetime | None = None
    parts: list[Part] = field(default_factory=list)

    @property
    def pending(self) -> list[Part]:
        return [part for part in self.parts if not part.state.terminal]

    def ended_as(self, state: State) -> int:
        return sum(part.state is state for part in self.parts)


def shown_job(entry: ModelEntry) -> JobInfo:
    return JobInfo(
        id=entry.job.id,
        task=entry.job.task,
        queue=entry.queue,
        state=entry.state,
        body=entry.body,
        priority=entry.job.priority,
        put_at=entry.put_at,
        due_at=entry.due_at,
        expires_at=entry.expires_at,
        attempts=entry.attempts,
        failures=entry.failures,
        losses=entry.losses,
        crashes=entry.crashes,
        parked=entry.parked,
        fence=entry.fence,
        holder=entry.holder,
        lease_until=entry.lease_until,
        cancel_requested=entry.cancel_requested,
        ended_at=entry.ended_at,
        keep_until=entry.keep_until,
        reason=entry.reason,
        error=entry.error,
        result=entry.result,
        checkpoint=entry.checkpoint,
        began=entry.began and entry.state is State.RUNNING,
        unique=entry.job.unique,
        key=entry.job.key,
        batch=entry.job.batch,
        member=entry.job.member,
        history=tuple(entry.history),
    )


def shown_batch(group: Group) -> BatchStatus:
    waiting = [p.entry for p in group.pending if p.entry is not None and p.entry.state is State.READY]
    retrying = sum(entry.failures + entry.losses + entry.crashes > 0 for entry in waiting)
    return BatchStatus(
        id=group.batch.id,
        state=batch_state(group),
        sealed=group.sealed,
        total=len(group.parts),
        enqueued=len(waiting) - retrying,
        retrying=retrying,
        running=len(group.pending) - len(waiting),
        done=group.ended_as(State.DONE),
        dead=group.ended_as(State.DEAD),
        cancelled=group.ended_as(State.CANCELLED),
        created_at=group.created_at,
        finished_at=group.finished_at,
        keep_until=keep_until(group),
        parent=group.batch.parent,
        note=group.batch.note,
    )


def by_priority(entries: Iterable[ModelEntry]) -> list[ModelEntry]:
    return sorted(entries, key=lambda entry: -entry.job.priority)


def name_in(entry: ModelEntry, scope: Scope) -> str | None:
    match scope:
        case Scope.QUEUE:
            return entry.queue
        case Scope.TASK:
            return entry.job.task
        case Scope.KEY:
            return entry.job.key
        case Scope.TASK_KEY:
            return None if entry.job.key is None else task_key(entry.job.task, entry.job.key)


def expiry(job: Envelope, now: datetime) -> datetime | None:
    ends = [] if job.expires_at is None else [job.expires_at]
    if job.expires_in_ms is not None:
        ends.append(now + timedelta(milliseconds=job.expires_in_ms))
    return min(ends, default=None)


def member_state(part: Part) -> State:
    if part.state.terminal or part.entry is None:
        return part.state
    return part.entry.state


def keep_until(group: Group) -> datetime | None:
    if group.finished_at is None:
        return None
    return group.finished_at + timedelta(milliseconds=group.batch.keep_for_ms)


def batch_state(group: Group) -> BatchState:
    if not group.sealed:
        return BatchState.OPEN
    if group.pending:
        return BatchState.IN_PROGRESS
    done = group.ended_as(State.DONE)
    if done == len(group.parts):
        return BatchState.SUCCESS
    return BatchState.PARTIAL_SUCCESS if done else BatchState.DEAD


def counted(entries: Sequence[ModelEntry], now: datetime) -> Counts:
    scheduled = sum(entry.state is State.READY and entry.due_at > now for entry in entries)
    parked = sum(entry.parked for entry in entries)
    by_state = {state: sum(entry.state is state for entry in entries) for state in State}
    return Counts(
        ready=by_state[State.READY] - scheduled - parked,
        scheduled=scheduled,
        parked=parked,
        running=by_state[State.RUNNING],
        done=by_state[State.DONE],
        dead=by_state[State.DEAD],
        cancelled=by_state[State.CANCELLED],
    )
