"""Run one job: from the bytes of a lease to an outcome, in small named steps."""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import traceback
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

from msgspec.structs import replace

from skep import verdict, wire
from skep.address import masked
from skep.broker import LendsTransactions
from skep.context import Job, Listener
from skep.errors import (
    BrokenPayload,
    EngineUnavailable,
    FlowBroken,
    NoTransactions,
    SkepError,
    UnknownTask,
)
from skep.flow.course import Gather, course_of, gathered, with_first
from skep.job import (
    Broken,
    Dead,
    Done,
    Error,
    Lease,
    Outcome,
    Retry,
    Snooze,
    describe,
)
from skep.operations import Batches
from skep.registry import Registry
from skep.signature import current
from skep.task import Task
from skep.transaction import Transaction
from skep.worker.attempt import Attempt, Ended
from skep.worker.judging import DONE, Judge, with_last_words
from skep.worker.processes import ChildPool, Crashed
from skep.worker.providing import provide
from skep.worker.slots import Slot, Stop
from skep.worker.threads import SlotThread

log = logging.getLogger("skep.worker")

NO_CONNECTION = timedelta(seconds=5)  # until a job is tried again for which no transaction could begin
HOOK_WITHIN = 10.0  # seconds; a hook holds a slot, and nobody can stop it for its job


class Unfit(Exception):
    """What was gathered for a job does not fit its task."""


class Runner:
    """The one place where a job's code is called."""

    def __init__(
        self,
        registry: Registry,
        listener: Listener,
        children: ChildPool,
        *,
        settled: Callable[[], None] = lambda: None,
    ) -> None:
        """`settled` is called for each job whose end is recorded here, not by whoever gets its outcome."""
        self._settled = settled
        self._registry = registry
        self._listener = listener
        self._children = children
        self._judge = Judge(random.random)

    async def run(self, lease: Lease, slot: Slot) -> Outcome | None:
        """Everything that happens to a job between its lease and its settling.  None: nothing to record."""
        attempt: Attempt | None = None
        try:
            attempt = self._prepare(lease)
            self._watch(attempt, slot)
            if attempt.task.transactional:
                return await self._run_in_transaction(attempt, slot)
            ended = await self._perform(attempt, slot)
            outcome = self._judge.judge(attempt, ended)
            if outcome is not DONE:
                _tell_of_failure(attempt, outcome)
            if self._registry.hooked:
                slot.outcome = outcome  # it is over: from here on nothing can stop it
                await self._report(attempt, ended, outcome)
            return outcome
        except (BrokenPayload, FlowBroken, UnknownTask) as error:
            return self._broken(lease, error)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a backoff that raises, an upgrade that raises, or a mistake of ours
            log.exception("job %s cannot be judged and is buried", lease.id)
            buried = Dead(error=describe(error, "".join(traceback.format_exception(error))))
            return buried if attempt is None else with_last_words(buried, attempt.job)

    async def _run_in_transaction(self, attempt: Attempt, slot: Slot) -> Outcome | None:
        """What it writes and its end are one commit; whatever else happens, it is as if it had not run."""
        settled = False
        try:
            async with self._lender(attempt.task).transaction() as lent:
                attempt.job.transaction = Transaction(lent.connection)
                ended = await self._perform(attempt, slot)
                outcome = self._judge.judge(attempt, ended)
                if isinstance(outcome, Done):
                    slot.committing = True  # from here on nobody stops it: its fence decides
                    settled = await lent.settle(attempt.job.lease, outcome)
                else:
                    slot.outcome = outcome  # it is over: only the rollback is still to come
        except asyncio.CancelledError as error:  # while it waited for a connection
            ended = self._stopped(slot, error)
            outcome = self._judge.judge(attempt, ended)
        except EngineUnavailable as error:
            log.warning("job %s has to wait for a transaction: %s", attempt.job.id, error)
            return Snooze(NO_CONNECTION)
        except Exception as error:
            # The commit was refused, or its answer was lost.  In the latter case it may stand: then the fence
            # of this lease is gone, and the failure that is recorded now is refused.
            ended = Ended(error=error)
            outcome = self._judge.judge(attempt, ended)
        if isinstance(outcome, Done) and not settled:
            log.warning("job %s ended after its lease was lost: it is rolled back", attempt.job.id)
            outcome = None
        _tell_of_failure(attempt, outcome)
        if self._registry.hooked:
            slot.committing, slot.outcome = True, None if settled else outcome
            await self._report(attempt, ended, outcome)
        if settled:
            self._settled()
            return None
        return outcome

    def _lender(self, task: Task[..., Any]) -> LendsTransactions:
        engine = self._registry.engine
        if not isinstance(engine, LendsTransactions):
            raise NoTransactions(task.name, masked(self._registry.url))
        return engine

    # --- before --------------------------------------------------------------------------

    def _prepare(self, lease: Lease) -> Attempt:
        envelope = wire.decode(lease.body)
        task = self._registry.task_named(envelope.task)
        job = Job(self._registry, lease, envelope, self._listener)
        course = course_of(envelope) if envelope.headers else None
        if course is not None and course.gather is not None:
            return Attempt(job, task, course=course)
        args, kwargs = task.arguments(envelope)
        return Attempt(job, task, args, kwargs, course)

    def _watch(self, attempt: Attempt, slot: Slot) -> None:
        """From here on somebody looks at the clock for this job."""
        slot.job = attempt.job
        timeout_ms = attempt.job.envelope.timeout_ms or attempt.task.options.timeout_ms
        if timeout_ms is not None:
            slot.deadline = slot.started + timeout_ms / 1000

    def _broken(self, lease: Lease, error: SkepError) -> Outcome:
        log.error("job %s cannot be run and is kept as broken: %s", lease.id, error)
        return Broken(describe(error))

    # --- the run -------------------------------------------------------------------------

    async def _perform(self, attempt: Attempt, slot: Slot) -> Ended:
        """Call it, and make of whatever happens a value."""
        current.set(attempt.job)
        try:
            if attempt.course is not None and attempt.course.gather is not None:
                await self._gather(attempt, attempt.course.gather)
            if self._registry.hooks["fetched"]:
                await self.tell("fetched", attempt.job)
            if self._registry.middlewares:
                value = await self._wrapped(attempt, slot)
            elif attempt.task.simple and not attempt.job.lease.crashes:
                value = await attempt.task.function(
                    *attempt.args, **attempt.kwargs
                )  # no detours for most jobs
            else:
                value = await self._call(attempt, slot)
        except asyncio.CancelledError as error:
            return self._stopped(slot, error)
        except Crashed:
            return Ended(stop=Stop.LOST)  # counted already, so its lease has ended
        except Unfit as error:
            raise BrokenPayload(str(error)) from error
        except BaseException as error:  # also SystemExit and the like: nothing that a job raises stops us
            return Ended(error=error, stop=slot.stop)
        if slot.stop is not None:  # it swallowed its cancellation, but that does not make it in time
            _uncancel()
        return Ended(value=value, stop=slot.stop)

    async def _gather(self, attempt: Attempt, gather: Gather) -> None:
        """The results of a fan-out are its first argument.  An engine that does not answer is an error."""
        batches = Batches(self._registry)
        members = [each async for each in batches.amembers(gather.batch, after=gather.after)]
        job, task = attempt.job, attempt.task
        try:
            job.gathered = with_first(gathered(gather, members), job.envelope.args)
        except FlowBroken as error:
            raise verdict.Failure(str(error)) from error
        try:
            attempt.args, attempt.kwargs = task.arguments(replace(job.envelope, args=job.gathered))
        except BrokenPayload as error:
            raise Unfit(str(error)) from error

    def _stopped(self, slot: Slot, error: asyncio.CancelledError) -> Ended:
        if slot.lane.ending and slot.stop is None:
            raise error  # the worker itself is being torn down
        _uncancel()
        if slot.stop is None:
            return Ended(error=error)  # something inside the job was cancelled, by itself
        return Ended(stop=slot.stop)

    async def _wrapped(self, attempt: Attempt, slot: Slot) -> Any:
        """Through the middlewares, the first declared outermost."""

        def around(index: int) -> Callable[[], Any]:
            if index == len(self._registry.middlewares):
                return lambda: self._call(attempt, slot)
            return lambda: self._registry.middlewares[index](attempt.job, around(index + 1))

        return await around(0)()

    async def _call(self, attempt: Attempt, slot: Slot) -> Any:
        task = attempt.task
        if task.options.isolate is not None or (
            not task.transactional and self._children.wants(attempt.job.lease)
        ):
            return await self._children.call(attempt.job, task.options, slot)
        if not task.signature.provided:
            return await self._call_here(task, attempt.args, attempt.kwargs, slot)
        async with AsyncExitStack() as stack:
            provided = await provide(task.signature, attempt.job, stack)
            return await self._call_here(task, attempt.args, {**attempt.kwargs, **provided}, slot)

    async def _call_here(
        self, task: Task[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], slot: Slot
    ) -> Any:
        if task.is_async:
            return await task.function(*args, **kwargs)
        thread = slot.resource
        if not isinstance(thread, SlotThread):
            thread = slot.resource = SlotThread()
        try:
            return _finished(await thread.call(task.function, args, kwargs))
        finally:
            if thread.left:  # it runs on: nobody listens to it any more, and the slot gets a new one
                slot.resource = None
                log.error(
                    "job %s is stuck: its thread cannot be stopped", slot.lease.id if slot.lease else "?"
                )

    # --- after ---------------------------------------------------------------------------

    def timed_out(self, lease: Lease, error: Error, job: Job | None) -> Outcome:
        """The outcome for a job that is past its time and does not stop."""
        envelope = wire.decode(lease.body)
        policy = self._registry.task_named(envelope.task).options.policy.overridden(envelope)
        outcome = self._judge.after_timeout(lease, policy, error)
        return with_last_words(outcome, job) if isinstance(outcome, Dead) and job is not None else outcome

    async def _report(self, attempt: Attempt, ended: Ended, outcome: Outcome | None) -> None:
        """Let those know who asked for it; nothing they do changes the outcome."""
        job = attempt.job
        match outcome:
            case None:
                await self.tell("lost", job)
            case Done():
                await self.tell("finished", job, ended.value)
            case Retry(error=error) | Dead(error=error) if ended.stop is None:
                await self.tell("error", job, _raised(ended) or RuntimeError(error.message if error else ""))
            case Retry() | Dead():
                await self.tell("timeout", job)
        if isinstance(outcome, Dead):
            await self.tell("dead", job, outcome.reason)

    async def tell(self, event: str, *facts: Any) -> None:
        for hook in self._registry.hooks[event]:
            try:
                answer = hook(*facts)
                if inspect.isawaitable(answer):
                    async with asyncio.timeout(HOOK_WITHIN):
                        await answer
            except asyncio.CancelledError:
                if event == "fetched":  # the job is being stopped before it has begun
                    raise
                log.exception("the hook %s for %s was cancelled", getattr(hook, "__qualname__", hook), event)
            except BaseException:
                log.exception("the hook %s for %s raised", getattr(hook, "__qualname__", hook), event)


def _finished(value: Any) -> Any:
    """A plain function that only made a coroutine or a generator has not done its work."""
    if inspect.iscoroutine(value):
        value.close()
        raise TypeError(
            "it returned a coroutine that nobody awaits: an `async def` behind a plain decorator?"
        )
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        raise TypeError("it returned a generator that nobody runs")
    return value


def _raised(ended: Ended) -> BaseException | None:
    """What the job raised, or said by a verdict."""
    return ended.value if isinstance(ended.value, verdict.Verdict) else ended.error


def _uncancel() -> None:
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()


def _tell_of_failure(attempt: Attempt, outcome: Outcome | None) -> None:
    """In the log, for whoever looks there first.  The history of the job has the same."""
    match outcome:
        case Retry(delay=delay, error=Error() as error):
            log.warning(
                "%s failed and runs again %s: %s: %s",
                _named(attempt),
                f"after {delay.total_seconds():g} s" if delay else "at once",
                error.type,
                error.message,
            )
        case Dead(reason=reason, error=Error() as error):
            log.error(
                "%s is dead (%s): %s: %s%s",
                _named(attempt),
                reason,
                error.type,
                error.message,
                error.traceback and f"\n{error.traceback.rstrip()}",
            )


def _named(attempt: Attempt) -> str:
    return f"{attempt.task.name} {attempt.job.id}, attempt {attempt.job.attempt},"
