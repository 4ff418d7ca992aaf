"""What an attempt's end means for its job: pure functions from strategies to outcomes.

Engines only record what is decided here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from propolis.core.duration import duration
from propolis.core.envelope import Envelope
from propolis.core.job import Dead, Done, Error, Lease, Outcome, Retried
from propolis.core.strategy import (
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
from propolis.errors import BadSetting

Random = Callable[[], float]

MILLISECOND = timedelta(milliseconds=1)
AT_ONCE = timedelta(0)
FAILED = "failed"
TIMED_OUT = "timeout"
OUT_OF_TIME = Error("TimeoutError", "it ran out of time and was stopped")
BACKOFF = exponential("2s", cap="10m")


def retried(times: int) -> Repeat:
    """What `retries=5` is short for."""
    if times < 0:
        raise BadSetting(f"retries={times}: give 0 or more, or on_error=repeat_forever(…)")
    return Repeat(times=times, backoff=BACKOFF, ending=dead)


class Policy(Struct, frozen=True):
    """The three strategies of a task, and the defaults of propolis.

    Unlike its models, propolis retries with backoff and gives up: five repetitions over about a minute
    for an error, two for a timeout, then the dead shelf, where nothing is lost and everything is seen.
    """

    on_success: Strategy = delete
    on_error: Strategy = retried(5)
    on_timeout: Strategy = retried(2)

    def overridden(self, job: Envelope, rules: Iterable[Strategy] = ()) -> Policy:
        """This policy with the strategies of the job itself in place of those of the task.

        A job does not repeat more often than its task would; for an error also by one of its `rules`.
        """
        if job.on_success is None and job.on_error is None and job.on_timeout is None:
            return self
        return Policy(
            on_success=job.on_success or self.on_success,
            on_error=bounded(job.on_error or self.on_error, (self.on_error, *rules)),
            on_timeout=bounded(job.on_timeout or self.on_timeout, (self.on_timeout,)),
        )


def bounded(asked: Strategy, declared: Iterable[Strategy]) -> Strategy:
    """What is asked for, with no more repetitions than any of the declared strategies has."""
    most = max(_times(strategy) for strategy in declared)
    if not isinstance(asked, Repeat) or _times(asked) <= most:
        return asked
    return replace(asked, times=int(most))


def _times(strategy: Strategy) -> float:
    if not isinstance(strategy, Repeat):
        return 0
    return math.inf if strategy.times is None else strategy.times


def after_success(
    strategy: Strategy,
    *,
    result: bytes | None = None,
    result_ttl: timedelta | None = None,
    emit: tuple[Envelope, ...] = (),
) -> Done:
    """The job worked.  It is kept for its archive time or its result's, whichever is longer."""
    keep = strategy.keep_ms * MILLISECOND if isinstance(strategy, Archive) else None
    if result_ttl is not None:
        keep = max(keep or AT_ONCE, result_ttl)
    return Done(result=result if result_ttl is not None else None, keep=keep, emit=emit)


def after_failure(
    strategy: Strategy,
    lease: Lease,
    *,
    random: Random,
    reason: str = FAILED,
    error: Error | None = None,
    others: int = 0,
) -> Outcome:
    """The job raised or timed out.  `others` of its failures fell under other rules, which count their own.

    Runs that were lost, and crashes, are no failures and count against no repetition.
    """
    runs = lease.failures + 1 - others
    if isinstance(strategy, Repeat):
        if strategy.times is None or runs <= strategy.times:
            return Retried(delay=_delay(strategy, runs, random), error=error, queue=strategy.queue)
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
