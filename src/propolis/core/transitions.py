"""The transitions of one job as pure functions: from what is known and an outcome to what to record.

Engines written in Python record these steps as they are; engines that decide inside a server (SQL,
Lua) say the same in their own language, and the contract suite compares.
"""

from __future__ import annotations

from datetime import timedelta
from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from propolis.core.clock import from_us, span_us, to_us
from propolis.core.envelope import Envelope
from propolis.core.job import (
    Broken,
    Cancelled,
    Crashed,
    Dead,
    Done,
    Error,
    Event,
    Outcome,
    Released,
    Retried,
    Snoozed,
    State,
    Unknown,
)

NOTE_MAX = 500
MAX_LOSSES = 10  # leases that end in silence, then the job is dead
_FRONT_LOSSES = (
    2  # after which the job goes to the front; from the next one on it waits, twice as long each time
)
_FIRST_PAUSE_US, _MAX_PAUSE_US = 5_000_000, 300_000_000
NOT_BEGUN = "it had not begun"
_NO_DELAY = timedelta(0)


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
    losses: int
    crashes: int
    max_crashes: int
    cancel_requested: bool
    began: bool
    holder: str


class Step(Struct, frozen=True, kw_only=True):
    """What to record: `due_us` for a ready job; for an ended one `keep_us`, until when (None: not at all).

    A `parked` job joins the line of its queue and task from which only a lease that names the task takes.
    """

    state: State
    attempts: int
    failures: int
    losses: int
    crashes: int
    due_us: int = 0
    front: bool = False
    parked: bool = False
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
        case Crashed(error=error, blameless=blameless):
            return _lost(job, now_us, retention) if blameless else _crashed(job, error, now_us, retention)
        case _ if job.cancel_requested:
            return _cancelled(job, now_us, retention)
        case _:
            return _waiting(job, outcome, now_us)


def _waiting(job: Running, outcome: Retried | Snoozed | Released | Unknown, now_us: int) -> Step:
    """The step for a job that is to run again."""
    match outcome:
        case Retried(delay=delay, error=error, queue=queue):
            step = _again(job, "retried", now_us, delay, attempts=job.attempt, note=_line(error))
            return replace(step, failures=job.failures + 1, losses=0, queue=queue, error=error)
        case Snoozed(delay=delay, asked=asked):
            step = _again(job, "snoozed", now_us, delay, attempts=job.attempt - 1)
            return replace(step, losses=0 if asked else job.losses)
        case Released():
            step = _again(job, "released", now_us, _NO_DELAY, attempts=job.attempt - 1)
            return replace(step, front=True)
        case Unknown():
            step = _again(job, "parked", now_us, _NO_DELAY, attempts=job.attempt - 1)
            return replace(step, parked=True)
        case never:
            assert_never(never)


def reaped(job: Running, now_us: int, retention: Retention) -> Step:
    """The step for a lease that nobody renewed (T8).

    A suspect says when it begins; if it has not, its worker died of something else, and nothing is counted.
    """
    if job.began or not (job.losses or job.crashes):
        return _lost(job, now_us, retention)
    if job.cancel_requested:
        return _cancelled(job, now_us, retention)
    step = _again(job, "lost", now_us, _NO_DELAY, attempts=job.attempt - 1, note=NOT_BEGUN)
    return replace(step, front=True)


def _lost(job: Running, now_us: int, retention: Retention) -> Step:
    losses = job.losses + 1
    if job.cancel_requested:
        return replace(_cancelled(job, now_us, retention), losses=losses)
    if losses >= MAX_LOSSES:
        step = _end(job, State.DEAD, now_us, retention.dead_for, reason="lost")
        return replace(step, losses=losses, event=_event(job, "lost", now_us))
    step = _again(job, "lost", now_us, pause_after(losses), attempts=job.attempt)
    return replace(step, losses=losses, front=losses <= _FRONT_LOSSES)


def pause_after(losses: int) -> timedelta:
    """How long a job waits after so many losses: whoever kills its workers should not do so all the time."""
    if losses <= _FRONT_LOSSES:
        return _NO_DELAY
    pause_us = _FIRST_PAUSE_US << (losses - _FRONT_LOSSES - 1)
    return timedelta(microseconds=min(pause_us, _MAX_PAUSE_US))


def _crashed(job: Running, error: Error | None, now_us: int, retention: Retention) -> Step:
    """Its own doing (T8b)."""
    crashes = job.crashes + 1
    if job.cancel_requested:
        return replace(_cancelled(job, now_us, retention), crashes=crashes)
    event = _event(job, "crashed", now_us, _line(error))
    if crashes >= job.max_crashes:
        step = _end(job, State.DEAD, now_us, retention.dead_for, reason="crashed", error=error)
        return replace(step, crashes=crashes, event=event)
    step = _again(job, "crashed", now_us, _NO_DELAY, attempts=job.attempt)
    return replace(step, crashes=crashes, front=True, error=error, event=event)


def _line(error: Error | None) -> str:
    return f"{error.type}: {error.message}" if error else ""


def due_us(job: Envelope, now_us: int) -> int:
    """When the job becomes due, by the engine's clock."""
    if job.due_at is not None:
        return to_us(job.due_at)
    return now_us + job.delay_ms * 1000


def expires_us(job: Envelope, now_us: int) -> int | None:
    """When the job expires, if ever; the earlier one if both are given."""
    if job.expires_at is None and job.expires_in_ms is None:
        return None
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
        losses=job.losses,
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
        losses=job.losses,
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
