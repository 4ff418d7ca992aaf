"""What becomes of a job after a run: decisions about values, without any I/O."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from msgspec.structs import replace

from propolis.app import verdicts
from propolis.app.context import Job
from propolis.app.flow.continuation import Continuation
from propolis.app.flow.continuation import following as next_jobs
from propolis.app.signature import encode_result
from propolis.app.task import Task
from propolis.core import wire
from propolis.core.job import (
    DONE,
    Cancelled,
    Crashed,
    Dead,
    Done,
    Error,
    Lease,
    Outcome,
    Released,
    Retried,
    Snoozed,
    describe,
    name_of,
    storable,
)
from propolis.core.policy import (
    MILLISECOND,
    OUT_OF_TIME,
    TIMED_OUT,
    Policy,
    Random,
    after_failure,
    after_success,
)
from propolis.core.protocols import MAX_OUTCOME
from propolis.core.strategy import Delete, Repeat, Strategy
from propolis.errors import BadSetting, BrokenPayload, FlowBroken, Misuse, OutcomeTooLarge
from propolis.worker.attempt import Attempt, ChildCrashed, Ended, RaisedInChild, Stop, traceback_of


class Judge:
    """From how a run ended to an outcome.  `random` is the dice of the backoff."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def judge(self, attempt: Attempt, ended: Ended) -> Outcome | None:
        """What becomes of the job.  Pure, but for the dice of the backoff."""
        outcome = self._decide(attempt, ended)
        if outcome is DONE or not isinstance(outcome, Dead):
            return outcome
        return with_last_words(outcome, attempt.job)

    def _decide(self, attempt: Attempt, ended: Ended) -> Outcome | None:
        job, task = attempt.job, attempt.task
        policy = task.policy_for(job.envelope)
        if ended.stop is not None:
            return self._after_stop(job, policy, ended)
        if (error := raised(ended)) is not None:
            kind = None if job.envelope.on_error else kind_of(task, ended)
            strategy = policy.on_error if kind is None else dict(task.options.error_rules)[kind]
            if is_misuse(error) and not (kind is not None and issubclass(kind, Misuse)):
                strategy = ending_of(strategy)  # it would fail again in each run
            return self._after_error(job, strategy, error, ended.others)
        try:
            return self._after_value(attempt, policy, ended.value)
        except OutcomeTooLarge as too_large:
            return self._after_error(job, policy.on_error, too_large, ended.others)

    def _after_stop(self, job: Job, policy: Policy, ended: Ended) -> Outcome | None:
        match ended.stop:
            case None | Stop.LOST:
                return None
            case Stop.CANCELLED:
                return Cancelled()
            case Stop.RELEASED:
                return Released()
            case Stop.TIMEOUT:
                return self.after_timeout(job.lease, policy, OUT_OF_TIME, ended.others)

    def after_timeout(self, lease: Lease, policy: Policy, error: Error, others: int = 0) -> Outcome:
        return after_failure(
            policy.on_timeout, lease, random=self._random, reason=TIMED_OUT, error=error, others=others
        )

    def after_crash(self, attempt: Attempt, crash: ChildCrashed) -> Outcome:
        """A job has no more crashes than its task lets any have, whatever it says of itself."""
        lease, error = attempt.job.lease, Error("ProcessDied", f"its process died: {crash.how}")
        limit = attempt.task.options.max_crashes
        if not crash.blameless and limit <= lease.crashes + 1 < attempt.job.envelope.max_crashes:
            return Dead(reason="crashed", error=error)
        return Crashed(error, blameless=crash.blameless)

    def _after_error(self, job: Job, strategy: Strategy, error: BaseException, others: int) -> Outcome:
        judge = partial(after_failure, strategy, job.lease, random=self._random, others=others)
        match error:
            case RaisedInChild():
                return judge(error=error.error)
            case verdicts.Snooze(after=after):
                return Snoozed(after)
            case verdicts.Discard(reason=reason):
                error_of_verdict = _error_of("Discard", reason)
                return after_failure(
                    ending_of(strategy), job.lease, random=self._random, error=error_of_verdict
                )
            case verdicts.Retry(reason=reason, after=after):
                error_of_verdict = _error_of("Retry", reason)
                outcome = judge(error=error_of_verdict)
                if isinstance(outcome, Retried) and after is not None:
                    return Retried(delay=after, error=error_of_verdict, queue=outcome.queue)
                return outcome
        return judge(error=describe(error, traceback_of(error)))

    def _after_value(self, attempt: Attempt, policy: Policy, value: Any) -> Outcome:
        job, continuation = attempt.job, attempt.continuation
        ttl_ms = job.envelope.result_ttl_ms
        if ttl_ms is None:
            ttl_ms = attempt.task.options.result_ttl_ms
        if (
            ttl_ms is None
            and isinstance(policy.on_success, Delete)
            and not job.emits
            and continuation is None
        ):
            return DONE
        try:
            result = None if ttl_ms is None and continuation is None else encode_result(value)
        except (TypeError, ValueError) as error:
            return _useless("its result cannot be kept", error)
        ttl = None if ttl_ms is None else ttl_ms * MILLISECOND
        done = after_success(policy.on_success, result=result, result_ttl=ttl, emit=job.emissions)
        size = bounded(job.emitted_bytes + len(result or b""))
        if continuation is None or result is None:
            return done
        return self._continued(job, continuation, done, result, size)

    def _continued(
        self, job: Job, continuation: Continuation, done: Done, result: bytes, size: int
    ) -> Outcome:
        """With what follows it in its flow; or, at the end of a chain, with a result for its batch."""
        try:
            following = []
            for each in next_jobs(continuation, job.envelope, result):
                following.append(each)
                size = bounded(size + len(wire.encode(each)))
        except (FlowBroken, BrokenPayload, BadSetting) as error:
            return _useless("its result cannot be handed on", error)
        return replace(
            done, emit=(*done.emit, *following), result=result if continuation.ends else done.result
        )


# --- rules per exception -----------------------------------------------------------------


def raised(ended: Ended) -> BaseException | None:
    """What the job raised, or the verdict that it returned."""
    return ended.value if isinstance(ended.value, verdicts.Verdict) else ended.error


def kind_of(task: Task[..., Any], ended: Ended) -> type[BaseException] | None:
    """The class whose rule of the task is for this end; None for all that has no rule, as a timeout."""
    error = raised(ended)
    if error is None or ended.stop is not None:
        return None
    if isinstance(error, RaisedInChild):
        return None if error.rule is None else task.options.error_rules[error.rule][0]
    return task.rule_for(type(error))


def is_misuse(error: BaseException) -> bool:
    return error.misuse if isinstance(error, RaisedInChild) else isinstance(error, Misuse)


def ending_of(strategy: Strategy) -> Strategy:
    """What is left of a strategy where nothing is to be repeated."""
    return strategy.ending if isinstance(strategy, Repeat) else strategy


def failures_under_other_rules(task: Task[..., Any], ended: Ended, counts: Counter[str]) -> int:
    """How many of the failures so far fell under another rule than this one: each rule counts its own.

    They are counted by the names of what was raised.  What has none that a class here is called counts as
    this one's: so nothing is repeated more often than its rule says.
    """
    kinds = _kinds_by_name(task, set(counts))
    own = kind_of(task, ended)
    return sum(counts[name] for name, found in kinds.items() if own not in found)


def _kinds_by_name(task: Task[..., Any], names: set[str]) -> dict[str, set[type[BaseException] | None]]:
    """The rules under which classes of these names fall."""
    found: dict[str, set[type[BaseException] | None]] = {}
    ahead: list[type[BaseException]] = [BaseException]
    seen: set[type[BaseException]] = set()
    while ahead:
        kind = ahead.pop()
        if kind in seen:
            continue
        seen.add(kind)
        ahead += type.__subclasses__(kind)
        if (name := name_of(kind)) in names:
            found.setdefault(name, set()).add(task.rule_for(kind))
    return found


def with_last_words(outcome: Dead, job: Job) -> Dead:
    """A periodic job may go on although this turn of it failed."""
    return replace(outcome, emit=job.last_words) if job.last_words else outcome


def bounded(size: int) -> int:
    """The bytes of an outcome, so far; `OutcomeTooLarge`."""
    if size > MAX_OUTCOME:
        raise OutcomeTooLarge(size, MAX_OUTCOME)
    return size


def _useless(what: str, error: Exception) -> Dead:
    described = describe(error)
    return Dead(reason="failed", error=Error(described.type, f"{what}: {described.message}"))


def _error_of(verdict: str, reason: str) -> Error:
    return Error(verdict, storable(reason[:2000]))
