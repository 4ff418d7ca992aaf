"""The vocabulary: states, leases and outcomes.  Plain values, no I/O.

They are msgspec structs rather than dataclasses because one of each is made per job on the hot
path: 0.1 µs against 1.5 µs.  Those that exist by the thousand are left out of the garbage collector's rounds
(`gc=False`): they refer to nothing that refers back.  What is decoded from the wire is an `Envelope`, in
core/envelope.py.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from traceback import TracebackException
from types import TracebackType

from msgspec import Struct

from propolis.core.batch import Batch
from propolis.core.envelope import Envelope

MAX_PART = 2000  # characters of what a traceback shows of one frame, or of a message
MAX_TRACEBACK = 200_000  # characters of all of it: more than 1,000 frames, as the interpreter allows, take


class State(StrEnum):
    """Where a job is in its life.  "Scheduled" is a ready job that is not yet due."""

    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    DEAD = "dead"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self not in (State.READY, State.RUNNING)


class Error(Struct, frozen=True, omit_defaults=True, repr_omit_defaults=True):
    """An exception as text: it is never rebuilt by importing its class."""

    type: str
    message: str = ""
    traceback: str = ""


Identity = tuple[str, int]


class Lease(Struct, frozen=True, gc=False):
    """The right to run one job until a time.  Its identity is (`id`, `fence`, `holder`).

    `attempt` is the number of this run, counted from 1; `body` is the job exactly as it was put;
    `checkpoint` is what an earlier run has saved last.  `place` is for the engine that gave the lease.
    """

    id: str
    fence: int
    task: str
    queue: str
    body: bytes
    attempt: int
    failures: int
    crashes: int
    until: datetime
    put_at: datetime
    holder: str
    losses: int = 0
    batch: str | None = None
    checkpoint: bytes | None = None
    place: int = 0

    @property
    def is_suspect(self) -> bool:
        """Did an earlier run of this job end in silence, or take its process with it?"""
        return self.losses > 0 or self.crashes > 0


class Done(Struct, frozen=True):
    """It worked.  `keep=None` forgets the job at once; the emissions are put in the same step.

    `opens` are batches that are opened before that, unsealed; one whose id is there stays as it is.
    """

    result: bytes | None = None
    keep: timedelta | None = None
    emit: tuple[Envelope, ...] = ()
    opens: tuple[Batch, ...] = ()


DONE = Done()  # as most runs end: nothing is kept, and nothing follows


class Retried(Struct, frozen=True):
    """Run it again, at the back of its queue (or of another), after a delay."""

    delay: timedelta = timedelta(0)
    error: Error | None = None
    queue: str | None = None


class Dead(Struct, frozen=True):
    """It will not be run again.  `keep=None` keeps it for as long as the engine keeps dead jobs.

    Emissions are put and batches opened in the same step, as those of a job that is done: what goes on
    whatever became of it.
    """

    reason: str = "failed"
    error: Error | None = None
    keep: timedelta | None = None
    emit: tuple[Envelope, ...] = ()
    opens: tuple[Batch, ...] = ()


class Snoozed(Struct, frozen=True):
    """Not now: come back after a delay.  The attempt does not count.

    `asked` by the task itself it is a sign of life, and the losses are forgotten.
    """

    delay: timedelta
    asked: bool = True


class Released(Struct, frozen=True):
    """Given back by a worker that shuts down: front of the queue, the attempt does not count."""


class Cancelled(Struct, frozen=True):
    """It was stopped because an operator asked for it."""

    error: Error | None = None


class Broken(Struct, frozen=True):
    """It cannot be run as it is; kept raw, and replayable once code or payload are mended."""

    error: Error


class Crashed(Struct, frozen=True):
    """The process that ran it was seen to die: by its own doing, or `blameless`, by something else's."""

    error: Error | None = None
    blameless: bool = False


class Unknown(Struct, frozen=True):
    """Whoever leased it does not know its task: it is parked, for a lease that names the task."""


Outcome = Done | Retried | Dead | Snoozed | Released | Cancelled | Broken | Crashed | Unknown


class Event(Struct, frozen=True, omit_defaults=True, repr_omit_defaults=True):
    """One line of a job's history: why the next run, if there is one, is a further run."""

    at: datetime
    kind: str
    attempt: int = 0
    fence: int = 0
    holder: str = ""
    note: str = ""


class Progress(Struct, frozen=True, omit_defaults=True, repr_omit_defaults=True):
    done: float = 0
    total: float | None = None
    note: str = ""


class JobInfo(Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Everything an engine knows of a job, for whoever inspects it."""

    id: str
    task: str
    queue: str
    state: State
    body: bytes
    priority: int
    put_at: datetime
    due_at: datetime
    expires_at: datetime | None = None
    attempts: int = 0
    failures: int = 0
    losses: int = 0
    crashes: int = 0
    fence: int = 0
    parked: bool = False
    holder: str | None = None
    started_at: datetime | None = None
    lease_until: datetime | None = None
    cancel_requested: bool = False
    ended_at: datetime | None = None
    keep_until: datetime | None = None
    reason: str | None = None
    error: Error | None = None
    result: bytes | None = None
    unique: str | None = None
    key: str | None = None
    batch: str | None = None
    member: int = 0
    progress: Progress | None = None
    checkpoint: bytes | None = None
    began: bool = False
    log: tuple[str, ...] = ()
    history: tuple[Event, ...] = ()


class Member(Struct, frozen=True, repr_omit_defaults=True):
    """One job (or nested batch) of a batch, and how far it is."""

    member: int
    id: str
    state: State
    result: bytes | None = None
    reason: str | None = None


def describe(error: BaseException, traceback: str = "") -> Error:
    """`error` as a value of bounded size that every engine can store, whatever its class does wrong."""
    try:
        message = str(error)
    except BaseException as broken:
        message = f"(its message cannot be read: {type(broken).__qualname__})"
    return Error(
        type=name_of(type(error)),
        message=storable(message[:2000]),
        traceback=storable(traceback[-8000:]),
    )


def traceback_text(error: BaseException, frames: TracebackType | None) -> str:
    """As Python shows it, of bounded size: with each frame, and the beginning and the end of long texts."""
    return joined(traceback_parts(error, frames))


def traceback_parts(error: BaseException, frames: TracebackType | None) -> list[str]:
    """Of any size: what Python shows of each frame, and of each error."""
    return list(TracebackException(type(error), error, frames, compact=True).format())


def joined(parts: list[str]) -> str:
    return shortened("".join(shortened(part, MAX_PART) for part in parts), MAX_TRACEBACK)


def shortened(text: str, most: int) -> str:
    """`text`, or what it begins and ends with and how much is left out."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... ({len(text) - 2 * half:,} characters) ... {text[-half:]}"


def name_of(kind: type[BaseException]) -> str:
    """How errors of this class are called in an `Error`."""
    return storable(kind.__qualname__[:200])


def storable(text: str) -> str:
    """`text` without NUL, which PostgreSQL refuses, and lone surrogates, which are not UTF-8.

    File names bring the latter: Python spells their undecodable bytes so.
    """
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()
