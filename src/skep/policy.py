"""What an attempt's end means for its job: pure functions from strategies to outcomes.

Engines only record what is decided here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import assert_never

from msgspec import Struct

from skep.duration import duration
from skep.job import Dead, Done, Error, Job, Lease, Outcome, Retry
from skep.strategy import (
    Archive,
    Backoff,
    Bury,
    Delete,
    Ending,
    Exponential,
    Repeat,
    RepeatBy,
    Strategy,
    dead,
    delete,
    exponential,
)

Random = Callable[[], float]

MILLISECOND = timedelta(milliseconds=1)
AT_ONCE = timedelta(0)
FAILED = "failed"
TIMED_OUT = "timeout"


class Policy(Struct, frozen=True):
    """The three strategies of a task, and the defaults of skep.

    Unlike its models, skep retries with backoff and gives up: five repetitions over about a minute
    for an error, two for a timeout, then the dead shelf, where nothing is lost and everything is seen.
    """

    on_success: Strategy = delete
    on_error: Strategy = Repeat(times=5, backoff=exponential("2s", cap="10m"), ending=dead)
    on_timeout: Strategy = Repeat(times=2, backoff=exponential("2s", cap="10m"), ending=dead)

    def overridden(self, job: Job) -> Policy:
        """This policy with what the job itself says in place of what the task says."""
        if job.on_success is None and job.on_error is None and job.on_timeout is None:
            return self
        return Policy(
            on_success=job.on_success or self.on_success,
            on_error=job.on_error or self.on_error,
            on_timeout=job.on_timeout or self.on_timeout,
        )


def after_success(
    strategy: Strategy,
    *,
    result: bytes | None = None,
    result_ttl: timedelta | None = None,
    emit: tuple[Job, ...] = (),
) -> Done:
    """The job worked.  It is kept for its archive time or its result's, whichever is longer."""
    keep = strategy.keep_ms * MILLISECOND if isinstance(strategy, Archive) else None
    if result_ttl is not None:
        keep = max(keep or AT_ONCE, result_ttl)
    return Done(result=result if result_ttl is not None else None, keep=keep, emit=emit)


def after_failure(
    strategy: Strategy, lease: Lease, *, random: Random, reason: str = FAILED, error: Error | None = None
) -> Outcome:
    """The job raised or timed out.  Runs that ended by a crash are not counted against its repetitions."""
    runs = lease.attempt - lease.crashes
    if isinstance(strategy, Repeat):
        if strategy.times is None or runs <= strategy.times:
            return Retry(delay=_delay(strategy, runs, random), error=error, queue=strategy.queue)
        return _end(strategy.ending, reason, error)
    return _end(strategy, reason, error)


def backoff_delay(backoff: Backoff, repetition: int, random: Random) -> timedelta:
    """How long to wait before repetition 1, 2, …"""
    if isinstance(backoff, Exponential):
        full = min(backoff.cap_ms, backoff.first_ms * _power(backoff.factor, repetition - 1))
        return timedelta(milliseconds=full * (1 - backoff.jitter * random()))
    return backoff.delay_ms * MILLISECOND


def _delay(strategy: Repeat, repetition: int, random: Random) -> timedelta:
    if isinstance(strategy, RepeatBy):
        return duration(strategy.delay(repetition))
    return backoff_delay(strategy.backoff, repetition, random)


def _power(factor: float, exponent: int) -> float:
    try:
        return float(factor) ** exponent
    except OverflowError:  # repeat_forever gets there after about a thousand repetitions
        return sys.float_info.max  # not infinity: nothing times infinity is not a number


def _end(ending: Ending, reason: str, error: Error | None) -> Dead:
    match ending:
        case Delete():
            return Dead(reason=reason, error=error, keep=AT_ONCE)
        case Archive(keep_ms=keep_ms):
            return Dead(reason=reason, error=error, keep=keep_ms * MILLISECOND)
        case Bury():
            return Dead(reason=reason, error=error)
        case never:
            assert_never(never)
