"""The transitions of one job as pure functions: from what is known and an outcome to what to record.

Engines written in Python record these steps as they are; engines that decide inside a server (SQL,
Lua) say the same in their own language, and the contract suite compares.
"""

from __future__ import annotations

from datetime import timedelta
from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from skep.clock import from_us, span_us, to_us
from skep.job import (
    Broken,
    Cancelled,
    Dead,
    Done,
    Error,
    Event,
    Job,
    Outcome,
    Release,
    Retry,
    Snooze,
    State,
)

NOTE_MAX = 500


class Retention(Struct, frozen=True, kw_only=True):
    """How long jobs that nobody asked to keep are kept; `dead_max` bounds the dead shelf of each queue."""

    dead_for: timedelta = timedelta(days=90)
    dead_max: int | None = None
    cancelled_for: timedelta = timedelta(days=7)


RETENTION = Retention()


class Running(Struct, frozen=True):
    """What the transitions need to know of a running job."""

    fence: int
    attempt: int
    failures: int
    crashes: int
    max_crashes: int
    cancel_requested: bool
    holder: str


class Step(Struct, frozen=True, kw_only=True):
    """What to record: `due_us` for a ready job; for an ended one `keep_us`, until when (None: not at all)."""

    state: State
    attempts: int
    failures: int
    crashes: int
    due_us: int = 0
    front: bool = False
    queue: str | None = None
    event: Event | None = None
    keep_us: int | None = None
    reason: str | None = None
    error: Error | None = None
    result: bytes | None = None


def settled(job: Running, outcome: Outcome, now_us: int, retention: Retention) -> Step | None:
    """The step for an outcome; None where the outcome is refused as if the lease were lost."""
    match outcome:
        case Done(result=result, keep=keep):
            return _end(job, State.DONE, now_us, keep, result=result)
        case Dead(reason=reason, error=error, keep=keep):
            keep = retention.dead_for if keep is None else keep
            return _end(job, State.DEAD, now_us, keep, reason=reason, error=error, failures=job.failures + 1)
        case Broken(error=error):
            return _end(job, State.DEAD, now_us, retention.dead_for, reason="broken", error=error)
        case Cancelled(error=error):
            if not job.cancel_requested:
                return None
            return _end(
                job, State.CANCELLED, now_us, retention.cancelled_for, reason="cancelled", error=error
            )
        case _ if job.cancel_requested:
            return _cancelled(job, now_us, retention)
        case Retry(delay=delay, error=error, queue=queue):
            note = f"{error.type}: {error.message}" if error else ""
            step = _again(job, "retried", now_us, delay, attempts=job.attempt, note=note)
            return replace(step, failures=job.failures + 1, queue=queue, error=error)
        case Snooze(delay=delay):
            return _again(job, "snoozed", now_us, delay, attempts=job.attempt - 1)
        case Release():
            step = _again(job, "released", now_us, timedelta(0), attempts=job.attempt - 1)
            return replace(step, front=True)
        case never:
            assert_never(never)


def reaped(job: Running, now_us: int, retention: Retention) -> Step:
    """The step for a lease that nobody renewed."""
    crashes = job.crashes + 1
    if job.cancel_requested:
        return replace(_cancelled(job, now_us, retention), crashes=crashes)
    if crashes >= job.max_crashes:
        step = _end(job, State.DEAD, now_us, retention.dead_for, reason="crashed")
        return replace(step, crashes=crashes, event=_event(job, "crashed", now_us))
    return replace(
        _again(job, "crashed", now_us, timedelta(0), attempts=job.attempt), crashes=crashes, front=True
    )


def due_us(job: Job, now_us: int) -> int:
    """When the job becomes due, by the engine's clock."""
    if job.due_at is not None:
        return to_us(job.due_at)
    return now_us + job.delay_ms * 1000


def expires_us(job: Job, now_us: int) -> int | None:
    """When the job expires, if ever; the earlier one if both are given."""
    ends = []
    if job.expires_at is not None:
        ends.append(to_us(job.expires_at))
    if job.expires_in_ms is not None:
        ends.append(now_us + job.expires_in_ms * 1000)
    return min(ends, default=None)


def _again(job: Running, kind: str, now_us: int, delay: timedelta, *, attempts: int, note: str = "") -> Step:
    return Step(
        state=State.READY,
        attempts=attempts,
        failures=job.failures,
        crashes=job.crashes,
        due_us=now_us + span_us(delay),
        event=_event(job, kind, now_us, note),
    )


def _end(
    job: Running,
    state: State,
    now_us: int,
    keep: timedelta | None,
    *,
    reason: str | None = None,
    error: Error | None = None,
    result: bytes | None = None,
    failures: int | None = None,
) -> Step:
    return Step(
        state=state,
        attempts=job.attempt,
        failures=job.failures if failures is None else failures,
        crashes=job.crashes,
        keep_us=now_us + span_us(keep) if keep else None,
        reason=reason,
        error=error,
        result=result,
    )


def _cancelled(job: Running, now_us: int, retention: Retention) -> Step:
    """It was asked to stop, so it does not become ready again."""
    return _end(job, State.CANCELLED, now_us, retention.cancelled_for, reason="cancelled")


def _event(job: Running, kind: str, now_us: int, note: str = "") -> Event:
    return Event(from_us(now_us), kind, job.attempt, job.fence, job.holder, note[:NOTE_MAX])
