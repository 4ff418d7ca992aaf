"""The vocabulary: jobs, leases and outcomes.  Plain values, no I/O.

They are msgspec structs rather than dataclasses because one of each is made per job on the hot
path: 0.1 µs against 1.5 µs, and `Job` is decoded from the wire in the same step.  Those that exist by the
thousand are left out of the garbage collector's rounds (`gc=False`): they refer to nothing that refers back.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import count
from typing import Annotated

from msgspec import Meta, Raw, Struct

from skep.duration import Milliseconds
from skep.strategy import Strategy

MAX_CRASHES = 3
NO_ARGS, NO_KWARGS = Raw(b"[]"), Raw(b"{}")  # one of each for all jobs: what is not this very one is written
Moment = Annotated[datetime, Meta(tz=True)]
_DERIVED = uuid.UUID("7c0f5a52-3f86-5d0b-9d5e-5ce9b0a7e1d4")


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


class UniqueUntil(StrEnum):
    """How long a unique key is held: until the job has ended, or only until it starts."""

    ENDED = "ended"
    STARTED = "started"


class Job(
    Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag=1,
    tag_field="v",
    gc=False,
):
    """One call of a task, as its producer describes it; on the wire, one JSON object.

    Times relative to "now" (`delay_ms`, `expires_in_ms`) are measured by the engine's clock from the
    moment of the put, so a producer whose clock is wrong changes nothing.  `chosen` tells that the
    caller made up the id, so that the engine remembers it for a day after the job has gone.
    """

    id: str
    task: str
    queue: str = "default"
    args: Raw = NO_ARGS
    kwargs: Raw = NO_KWARGS
    priority: int = 0
    delay_ms: Milliseconds = 0
    due_at: Moment | None = None
    expires_in_ms: Milliseconds | None = None
    expires_at: Moment | None = None
    timeout_ms: Milliseconds | None = None
    chosen: bool = False
    unique: str | None = None
    unique_until: UniqueUntil = UniqueUntil.ENDED
    key: str | None = None
    batch: str | None = None
    member: int = 0
    max_crashes: int = MAX_CRASHES
    result_ttl_ms: Milliseconds | None = None
    on_success: Strategy | None = None
    on_error: Strategy | None = None
    on_timeout: Strategy | None = None
    headers: dict[str, str] = {}
    # A field called "unknown" on the wire is a stranger too, also when it is empty: hence the length.
    unknown: Annotated[dict[str, Raw], Meta(min_length=1)] = {}


class Error(Struct, frozen=True, omit_defaults=True):
    """An exception as text: it is never rebuilt by importing its class."""

    type: str
    message: str = ""
    traceback: str = ""


Identity = tuple[str, int]


class Lease(Struct, frozen=True, gc=False):
    """The right to run one job until a time.  Its identity is the pair (`id`, `fence`).

    `attempt` is the number of this run, counted from 1; `body` is the job exactly as it was put.
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
    batch: str | None = None


class Done(Struct, frozen=True):
    """It worked.  `keep=None` forgets the job at once; the emissions are put in the same step."""

    result: bytes | None = None
    keep: timedelta | None = None
    emit: tuple[Job, ...] = ()


class Retry(Struct, frozen=True):
    """Run it again, at the back of its queue (or of another), after a delay."""

    delay: timedelta = timedelta(0)
    error: Error | None = None
    queue: str | None = None


class Dead(Struct, frozen=True):
    """It will not be run again.  `keep=None` keeps it for as long as the engine keeps dead jobs.

    Emissions are put in the same step, as those of a job that is done: what goes on whatever became of it.
    """

    reason: str = "failed"
    error: Error | None = None
    keep: timedelta | None = None
    emit: tuple[Job, ...] = ()


class Snooze(Struct, frozen=True):
    """Not now: come back after a delay.  The attempt does not count."""

    delay: timedelta


class Release(Struct, frozen=True):
    """Given back by a worker that shuts down: front of the queue, the attempt does not count."""


class Cancelled(Struct, frozen=True):
    """It was stopped because an operator asked for it."""

    error: Error | None = None


class Broken(Struct, frozen=True):
    """It cannot be run as it is; kept raw, and replayable once code or payload are mended."""

    error: Error


Outcome = Done | Retry | Dead | Snooze | Release | Cancelled | Broken


class Event(Struct, frozen=True, omit_defaults=True):
    """One line of a job's history: why the next run, if there is one, is a second run."""

    at: datetime
    kind: str
    attempt: int = 0
    fence: int = 0
    holder: str = ""
    note: str = ""


class Progress(Struct, frozen=True, omit_defaults=True):
    done: float = 0
    total: float | None = None
    note: str = ""


class Record(Struct, frozen=True, kw_only=True):
    """Everything an engine knows of a job, for those who look."""

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
    crashes: int = 0
    fence: int = 0
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
    log: tuple[str, ...] = ()
    history: tuple[Event, ...] = ()


def new_id() -> str:
    """A fresh UUIDv7: sortable by time, and by order within a millisecond; safe across forks and threads."""
    now = time.time_ns() // 1_000_000
    beginning = _beginning
    if beginning.millisecond != now:
        beginning = _begin(now)
    return f"{beginning.text}{next(beginning.numbers):012x}"


def is_own(job_id: str) -> bool:
    """Whether `new_id` has made it in this very process, not long ago: who else has it has it from us."""
    first = _made.get(job_id[:_STAMP], _made_before.get(job_id[:_STAMP]))
    if first is None or len(job_id) != 36:
        return False
    return 0 <= int(job_id[_STAMP:], 16) - first < 1 << 32


class _Beginning:
    """What the ids of one millisecond have in common: randomness is drawn once, and counted up from there."""

    __slots__ = ("first", "millisecond", "numbers", "text")

    def __init__(self, millisecond: int) -> None:
        drawn = int.from_bytes(os.urandom(10), "big")
        self.millisecond = millisecond
        self.first = drawn & (1 << 47) - 1  # of the last 48 bits, with room to grow
        self.numbers = count(self.first)
        stamp, variant = millisecond & 0xFFFF_FFFF_FFFF, 0x8000 | drawn >> 47 & 0x3FFF
        self.text = f"{stamp >> 16:08x}-{stamp & 0xFFFF:04x}-7{drawn >> 68:03x}-{variant:04x}-"


def _begin(millisecond: int) -> _Beginning:
    global _beginning, _made, _made_before
    _beginning = made = _Beginning(millisecond)  # two threads may do so at once: each has its own randomness
    if len(_made) >= _MADE_MOST:  # and if both do this, some are forgotten too early, which does no harm
        _made, _made_before = {}, _made
    _made[made.text] = made.first
    return made


def _begin_again() -> None:
    """In a fork: it must not go on where its parent goes on."""
    global _made, _made_before
    _made, _made_before = {}, {}
    _begin(-1)


_STAMP = 24  # characters that the ids of one millisecond have in common
_MADE_MOST = 5000
_made: dict[str, int] = {}  # how the ids of the last milliseconds begin, and the first number of each
_made_before: dict[str, int] = {}  # those before
_beginning = _Beginning(-1)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)


def derive_id(*parts: object) -> str:
    """An id that follows from its parts: the same every time, so that putting it twice makes one job."""
    return str(uuid.uuid5(_DERIVED, "\0".join(str(part) for part in parts)))


def describe(error: BaseException, traceback: str = "") -> Error:
    """`error` as a value of bounded size that every engine can store, whatever its class does wrong."""
    try:
        message = str(error)
    except Exception as broken:
        message = f"(its message cannot be read: {type(broken).__qualname__})"
    return Error(
        type=storable(type(error).__qualname__[:200]),
        message=storable(message[:2000]),
        traceback=storable(traceback[-8000:]),
    )


def storable(text: str) -> str:
    """`text` without NUL, which PostgreSQL refuses, and lone surrogates, which are not UTF-8.

    File names bring the latter: Python spells their undecodable bytes so.
    """
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()
