"""One attempt: the slot in which a job runs, what its task is called with, and how the run ended."""

from __future__ import annotations

import asyncio
from enum import Enum
from types import FrameType, TracebackType
from typing import Any, Protocol

from msgspec import Struct

from propolis.app.context import Job
from propolis.app.flow.continuation import Continuation
from propolis.app.task import Task
from propolis.core.job import Error, Lease, Outcome, traceback_text
from propolis.core.protocols import Lent
from propolis.worker.settings import Monotonic


class Stop(Enum):
    """Why a run is stopped from outside."""

    TIMEOUT = "timeout"
    LOST = "lost"
    CANCELLED = "cancelled"
    RELEASED = "released"


class Resource(Protocol):
    """What a slot keeps from one job to the next: a thread."""

    def end(self) -> None: ...


class SlotState(Enum):
    """What a slot is doing."""

    IDLE = "it waits for a job"
    RUNNING = "a job runs"
    STOPPING = "a job runs and has been asked to stop"
    COMMITTING = "the run is over, and its end is being recorded together with what it wrote"
    REPORTING = "the run is over, its outcome is known, and only a rollback and hooks are still at work"
    ABANDONED = "it is left to a job that does not stop, and ends with it"
    DISMISSED = "the worker is being torn down, and nothing of the run is recorded"


NEXT_STATES = {
    SlotState.IDLE: {SlotState.RUNNING, SlotState.DISMISSED},
    SlotState.RUNNING: set(SlotState) - {SlotState.RUNNING},
    SlotState.STOPPING: {SlotState.REPORTING, SlotState.IDLE, SlotState.ABANDONED, SlotState.DISMISSED},
    SlotState.COMMITTING: {SlotState.REPORTING, SlotState.IDLE, SlotState.ABANDONED, SlotState.DISMISSED},
    SlotState.REPORTING: {SlotState.REPORTING, SlotState.IDLE, SlotState.ABANDONED, SlotState.DISMISSED},
    SlotState.ABANDONED: set[SlotState](),
    SlotState.DISMISSED: set[SlotState](),
}
LEFT = (SlotState.ABANDONED, SlotState.DISMISSED)  # whatever the run still does there changes nothing
IDLE, RUNNING = SlotState.IDLE, SlotState.RUNNING  # read for every job: quicker than through their class
ABANDONED, DISMISSED = LEFT
OVER = (SlotState.COMMITTING, SlotState.REPORTING)  # nothing can stop it any more


class Slot:
    """One job at a time.  Whoever stops it says why; whoever abandons it settles its job.

    Its methods are the ways from one state to another, as NEXT_STATES has them.
    """

    __slots__ = (
        "asked_at",
        "clock",
        "deadline",
        "job",
        "lease",
        "outcome",
        "resource",
        "started",
        "state",
        "stop",
        "task",
    )

    def __init__(self, clock: Monotonic) -> None:
        self.state = SlotState.IDLE
        self.clock = clock
        self.lease: Lease | None = None  # of the job that it has; None while it is idle
        self.job: Job | None = None  # what runs, as it knows itself
        self.started = 0.0
        self.deadline: float | None = None
        self.stop: Stop | None = None  # why it has been asked to stop, and when
        self.asked_at: float | None = None
        self.outcome: Outcome | None = None  # once it is known, unless it is recorded already
        self.resource: Resource | None = None
        self.task: asyncio.Task[None] | None = None

    # --- once per job, and therefore without the table ---------------------------------------

    def begin(self, lease: Lease, now: float) -> None:
        assert self.state is IDLE
        self.state = RUNNING
        self.lease = lease
        self.job = None
        self.started = now
        self.deadline = None
        self.stop = None
        self.asked_at = None
        self.outcome = None

    def finish(self) -> bool:
        """It is ready for the next job; False if it is not to have one."""
        state = self.state
        if state is ABANDONED or state is DISMISSED:
            return False
        assert state is not IDLE
        self.state = IDLE
        self.lease = None
        return True

    def is_running(self, job: object) -> bool:
        return self.lease is not None and self.job is job

    # --- now and then ----------------------------------------------------------------------

    def ask_to_stop(self, reason: Stop, now: float) -> None:
        """Cancel what runs here, unless it has come to its end.  The first reason stands."""
        if self.state is SlotState.RUNNING and self.task is not None:
            self._become(SlotState.STOPPING)
            self.stop = reason
            self.asked_at = now
            self.task.cancel()

    def commit(self) -> None:
        """From here on nobody stops it: its fence decides."""
        self._become(SlotState.COMMITTING)

    def report(self, outcome: Outcome | None) -> None:
        """It is over, and this is left to be recorded: from here on nothing can stop it."""
        self._become(SlotState.REPORTING)
        self.outcome = outcome

    def stopping_for(self, now: float) -> float:
        """How many seconds ago it was asked to stop; 0 if nobody asked, or if it has come to its end."""
        return now - self.asked_at if self.state is SlotState.STOPPING and self.asked_at is not None else 0.0

    def unrecorded(self, otherwise: Outcome) -> Outcome | None:
        """What whoever does not wait for its end has to record: `otherwise`, unless its outcome is known."""
        return self.outcome if self.state is SlotState.REPORTING else otherwise

    def abandon(self) -> None:
        """Leave it to its job, whose outcome somebody else settles."""
        self._become(SlotState.ABANDONED)

    def dismiss(self) -> None:
        """Cancel it with whatever runs here, of which nothing is recorded."""
        self._become(SlotState.DISMISSED)
        if self.task is not None:
            self.task.cancel()

    def _become(self, state: SlotState) -> None:
        if self.state not in LEFT:
            assert state in NEXT_STATES[self.state], f"from {self.state.name} to {state.name}"
            self.state = state


class LentInChild(Lent, Protocol):
    """A transaction that a child has begun, in which the job runs there."""

    async def call(self, job: Job, task: Task[..., Any]) -> Any: ...


class Attempt(Struct):
    """One run of one job, ready to be performed; only what a fan-out has left is gathered when it starts."""

    job: Job
    task: Task[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    continuation: Continuation | None = None
    in_child: bool = False  # a suspect, of which the next death is to be its own only
    lent: LentInChild | None = None  # the same, if its task is transactional


class Ended(Struct):
    """How a run ended: it returned, raised, or was stopped; and what becomes of its job."""

    value: Any = None
    error: BaseException | None = None
    stop: Stop | None = None
    outcome: Outcome | None = None  # None: there is nothing to record, since the lease is lost
    others: int = 0  # failures of earlier runs that fell under other rules than this end
    settled: bool = False  # its outcome is recorded already, together with what it wrote


class ChildCrashed(Exception):
    """The process of the job has died; `blameless`, if something else may have killed it."""

    def __init__(self, how: str, blameless: bool) -> None:
        super().__init__(how)
        self.how = how
        self.blameless = blameless


class RaisedInChild(Exception):
    """What a job raised in its child process, as data: its class is not rebuilt here."""

    def __init__(self, error: Error, rule: int | None, *, misuse: bool = False) -> None:
        super().__init__(f"{error.type}: {error.message}")
        self.error = error
        self.rule = rule  # the place of the task's rule for it
        self.misuse = misuse  # was it a `Misuse`?
        self.add_note(error.traceback)


# --- what is shown of an error: from the first line of the job's own code on -----------------

OURS = "propolis"
CALLERS = (f"{OURS}.worker", f"{OURS}.testing.kit", "asyncio", "contextlib")  # on the way to that code


def traceback_of(error: BaseException) -> str:
    return traceback_text(error, own_frames(error))


def own_frames(error: BaseException) -> TracebackType | None:
    """Without the way to the first frame of the job's own code; all frames of an error that is ours alone."""
    if isinstance(error, RaisedInChild):
        return None  # its note has them
    frames = error.__traceback__
    while frames is not None and _is_of(frames.tb_frame, *CALLERS):
        frames = frames.tb_next
    if frames is None or _is_of(frames.tb_frame, OURS):
        return error.__traceback__
    return frames


def _is_of(frame: FrameType, *packages: str) -> bool:
    names = frame.f_globals
    found = names.get("__package__") or names.get("__name__", "")  # in a child that may be __main__
    return any(found == package or found.startswith(f"{package}.") for package in packages)
