"""What is kept of each job and each batch."""

from __future__ import annotations

from datetime import datetime

from msgspec import Struct

from propolis.core.batch import Batch, BatchState, BatchStatus, batch_state
from propolis.core.clock import from_us, moment
from propolis.core.envelope import Envelope
from propolis.core.job import Error, Event, JobInfo, Lease, Progress, State
from propolis.core.protocols import HISTORY_EVENTS, Filter, Scope
from propolis.core.transitions import Running


class Entry(Struct, omit_defaults=True):
    """One job and all that is known of it.

    `joined` is the number of the batch that still waits for it; 0: none does.  `span_us` is how long its
    lease was given for.  `behind_us` is by how much the clock had gone back, in all, when its delay was
    counted; where it was `given` a time, that stays what it is.
    """

    job: Envelope
    body: bytes
    seq: int
    queue: str
    put_us: int
    due_us: int
    expires_us: int | None = None
    state: State = State.READY
    attempts: int = 0
    failures: int = 0
    losses: int = 0
    crashes: int = 0
    fence: int = 0
    parked: bool = False
    joined: int = 0
    started_us: int | None = None
    until_us: int = 0
    span_us: int = 0
    given: bool = False
    behind_us: int = 0
    holder: str | None = None
    cancel_requested: bool = False
    ended_us: int | None = None
    keep_us: int | None = None
    reason: str | None = None
    error: Error | None = None
    result: bytes | None = None
    progress: Progress | None = None
    checkpoint: bytes | None = None
    began: bool = False
    log: tuple[str, ...] = ()
    history: tuple[Event, ...] = ()

    def running(self) -> Running:
        return Running(
            fence=self.fence,
            attempt=self.attempts,
            failures=self.failures,
            losses=self.losses,
            crashes=self.crashes,
            max_crashes=self.job.max_crashes,
            cancel_requested=self.cancel_requested,
            began=self.began,
            holder=self.holder or "",
        )

    def lease(self, until: datetime) -> Lease:
        return Lease(
            self.job.id,
            self.fence,
            self.job.task,
            self.queue,
            self.body,
            self.attempts,
            self.failures,
            self.crashes,
            until,
            from_us(self.put_us),
            self.holder or "",
            self.losses,
            self.job.batch,
            self.checkpoint,
        )

    @property
    def has_run(self) -> bool:
        return bool(self.failures or self.losses or self.crashes)

    def add_event(self, event: Event) -> None:
        self.history = (*self.history, event)[-HISTORY_EVENTS:]

    def scopes(self) -> list[tuple[Scope, str]]:
        """What a rule may name that holds for this job."""
        scopes = [(Scope.QUEUE, self.queue), (Scope.TASK, self.job.task)]
        return scopes if self.job.key is None else [*scopes, (Scope.KEY, self.job.key)]

    def matches(self, where: Filter, now_us: int) -> bool:
        return (
            where.queue in (None, self.queue)
            and where.task in (None, self.job.task)
            and where.state in (None, self.state)
            and where.reason in (None, self.reason)
            and where.batch in (None, self.job.batch)
            and where.scheduled in (None, self.state is State.READY and self.due_us > now_us)
        )

    def info(self) -> JobInfo:
        running = self.state is State.RUNNING
        return JobInfo(
            id=self.job.id,
            task=self.job.task,
            queue=self.queue,
            state=self.state,
            body=self.body,
            priority=self.job.priority,
            put_at=from_us(self.put_us),
            due_at=from_us(self.due_us),
            expires_at=moment(self.expires_us),
            attempts=self.attempts,
            failures=self.failures,
            losses=self.losses,
            crashes=self.crashes,
            fence=self.fence,
            parked=self.parked,
            holder=self.holder if running else None,
            started_at=moment(self.started_us),
            lease_until=from_us(self.until_us) if running else None,
            cancel_requested=self.cancel_requested,
            ended_at=moment(self.ended_us),
            keep_until=moment(self.keep_us),
            reason=self.reason,
            error=self.error,
            result=self.result,
            unique=self.job.unique,
            key=self.job.key,
            batch=self.job.batch,
            member=self.job.member,
            progress=self.progress,
            checkpoint=self.checkpoint,
            began=running and self.began,
            log=self.log,
            history=self.history,
        )


class HeldBatch(Struct, omit_defaults=True):
    """A batch and its counts.

    `number` tells it from an older one of its id; `joined` is that of the batch around it, while that waits.
    """

    batch: Batch
    number: int
    created_us: int
    joined: int = 0
    sealed: bool = False
    failed: bool = False
    finished_us: int | None = None
    keep_us: int | None = None
    total: int = 0
    done: int = 0
    dead: int = 0
    cancelled: int = 0

    @property
    def live(self) -> int:
        return self.total - self.done - self.dead - self.cancelled

    @property
    def over_us(self) -> int | None:
        """When it is forgotten; None: not as long as a member lives."""
        if self.sealed:
            return self.keep_us
        return self.created_us + self.batch.open_for_ms * 1000

    def count(self, state: State) -> None:
        """A member has ended so."""
        self.done += state is State.DONE
        self.dead += state is State.DEAD
        self.cancelled += state is State.CANCELLED

    def state(self) -> BatchState:
        return batch_state(
            sealed=self.sealed, total=self.total, done=self.done, dead=self.dead, cancelled=self.cancelled
        )

    def status(self, *, enqueued: int, retrying: int) -> BatchStatus:
        return BatchStatus(
            id=self.batch.id,
            state=self.state(),
            sealed=self.sealed,
            total=self.total,
            enqueued=enqueued,
            retrying=retrying,
            running=self.live - enqueued - retrying,
            done=self.done,
            dead=self.dead,
            cancelled=self.cancelled,
            created_at=from_us(self.created_us),
            finished_at=moment(self.finished_us),
            keep_until=moment(self.keep_us),
            parent=self.batch.parent,
            note=self.batch.note,
        )
