"""What becomes of a job after a run: decisions about values, without any I/O."""

from __future__ import annotations

import traceback
from typing import Any

from msgspec.structs import replace

from skep import verdict, wire
from skep.context import Job
from skep.errors import BadSetting, BrokenPayload, FlowBroken
from skep.flow.course import Course
from skep.flow.course import following as next_jobs
from skep.job import Cancelled, Dead, Done, Error, Lease, Outcome, Release, Retry, Snooze, describe, storable
from skep.policy import MILLISECOND, TIMED_OUT, Policy, Random, after_failure, after_success
from skep.signature import encode_value
from skep.strategy import Delete, Repeat
from skep.task import Task
from skep.worker.attempt import Attempt, Ended
from skep.worker.processes import Remote
from skep.worker.slots import Stop

DONE = Done()


class Judge:
    """From how a run ended to an outcome.  `random` is the dice of the backoff."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def judge(self, attempt: Attempt, ended: Ended) -> Outcome | None:
        """What becomes of the job.  Pure, but for the dice of the backoff."""
        outcome = self._decide(attempt, ended)
        return with_last_words(outcome, attempt.job) if isinstance(outcome, Dead) else outcome

    def _decide(self, attempt: Attempt, ended: Ended) -> Outcome | None:
        job, task = attempt.job, attempt.task
        policy = task.options.policy.overridden(job.envelope)
        if ended.stop is not None:
            return self._after_stop(job, policy, ended.stop)
        if ended.error is not None:
            return self._after_error(job, task, policy, ended.error)
        if isinstance(ended.value, verdict.Verdict):
            return self._after_error(job, task, policy, ended.value)
        return self._after_value(attempt, policy, ended.value)

    def _after_stop(self, job: Job, policy: Policy, stop: Stop) -> Outcome | None:
        match stop:
            case Stop.LOST:
                return None
            case Stop.CANCELLED:
                return Cancelled()
            case Stop.RELEASED:
                return Release()
            case Stop.TIMEOUT:
                error = Error("TimeoutError", "it ran out of time and was stopped")
                return self.after_timeout(job.lease, policy, error)

    def after_timeout(self, lease: Lease, policy: Policy, error: Error) -> Outcome:
        return after_failure(policy.on_timeout, lease, random=self._random, reason=TIMED_OUT, error=error)

    def _after_error(self, job: Job, task: Task[..., Any], policy: Policy, error: BaseException) -> Outcome:
        if isinstance(error, Remote):
            strategy = error.strategy or policy.on_error
            return after_failure(strategy, job.lease, random=self._random, error=error.told)
        strategy = policy.on_error if job.envelope.on_error else task.strategy_for(error, policy)
        match error:
            case verdict.Snooze(after=after):
                return Snooze(after)
            case verdict.Failure(reason=reason):
                ending = strategy.ending if isinstance(strategy, Repeat) else strategy
                return after_failure(ending, job.lease, random=self._random, error=_said("Failure", reason))
            case verdict.Retry(reason=reason, after=after):
                told = _said("Retry", reason)
                outcome = after_failure(strategy, job.lease, random=self._random, error=told)
                if isinstance(outcome, Retry) and after is not None:
                    return Retry(delay=after, error=told, queue=outcome.queue)
                return outcome
        told = describe(error, "".join(traceback.format_exception(error)))
        return after_failure(strategy, job.lease, random=self._random, error=told)

    def _after_value(self, attempt: Attempt, policy: Policy, value: Any) -> Outcome:
        job, course = attempt.job, attempt.course
        ttl_ms = job.envelope.result_ttl_ms
        if ttl_ms is None:
            ttl_ms = attempt.task.options.result_ttl_ms
        if ttl_ms is None and isinstance(policy.on_success, Delete) and not job.emits and course is None:
            return DONE
        try:
            result = None if ttl_ms is None and course is None else encode_value(value)
        except (TypeError, ValueError) as error:
            return _useless("its result cannot be kept", error)
        ttl = None if ttl_ms is None else ttl_ms * MILLISECOND
        done = after_success(policy.on_success, result=result, result_ttl=ttl, emit=job.emissions)
        if course is None or result is None:
            return done
        return self._continued(job, course, done, result)

    def _continued(self, job: Job, course: Course, done: Done, result: bytes) -> Outcome:
        """With what follows it in its flow; or, at the end of a chain, with a result for its batch."""
        try:
            following = next_jobs(course, job.envelope, result)
            for each in following:
                wire.encode(each)
        except (FlowBroken, BrokenPayload, BadSetting) as error:
            return _useless("its result cannot be handed on", error)
        return replace(done, emit=(*done.emit, *following), result=result if course.ends else done.result)


def with_last_words(outcome: Dead, job: Job) -> Dead:
    """A periodic job may go on although this turn of it failed."""
    return replace(outcome, emit=job.last_words) if job.last_words else outcome


def _useless(what: str, error: Exception) -> Dead:
    told = describe(error)
    return Dead(reason="failed", error=Error(told.type, f"{what}: {told.message}"))


def _said(verdict: str, reason: str) -> Error:
    return Error(verdict, storable(reason[:2000]))
