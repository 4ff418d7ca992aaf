"""Run one job: from the bytes of a lease to an outcome, in small named steps."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sized
from contextlib import AbstractAsyncContextManager, nullcontext
from datetime import timedelta
from typing import Any, Protocol, cast

from msgspec.structs import replace

from propolis.app import verdicts
from propolis.app.context import Job, Listener, extra_of
from propolis.app.flow.continuation import Gather, continuation_of, gathered, with_first
from propolis.app.operate.batches import StoredBatches
from propolis.app.operate.failure_counts import failure_counts
from propolis.app.registry import Middleware, Registry
from propolis.app.signature import current
from propolis.app.task import Task
from propolis.app.transaction import Transaction
from propolis.core import wire
from propolis.core.job import (
    DONE,
    Broken,
    Cancelled,
    Dead,
    Done,
    Error,
    Identity,
    Lease,
    Outcome,
    Released,
    Retried,
    Snoozed,
    Unknown,
    describe,
    traceback_text,
)
from propolis.core.protocols import Inspects, LendsTransactions, Lent
from propolis.engines.address import masked
from propolis.errors import (
    BrokenPayload,
    ChildNotStarted,
    EngineError,
    EngineUnavailable,
    FlowBroken,
    LeaseLost,
    NoProcess,
    NoTransactions,
    PropolisError,
    UnknownTask,
)
from propolis.worker.attempt import Attempt, ChildCrashed, Ended, Slot, SlotState, Stop
from propolis.worker.calls.performing import call_around, call_task
from propolis.worker.calls.plain_calls import call_either
from propolis.worker.calls.slot_threads import SlotThreads
from propolis.worker.children.processes import ChildPool
from propolis.worker.children.suspects import PutOff, Suspects
from propolis.worker.outcomes import Judge, failures_under_other_rules, raised, with_last_words
from propolis.worker.process.run_log import RunLog

log = logging.getLogger("propolis.worker")

STUCK = Error("TimeoutError", "it ran out of time and does not stop")
NO_CONNECTION = timedelta(seconds=5)  # until a job is tried again for which no transaction could begin
LARGE = 500  # elements; a fan-out of so many takes longer than others should wait
HOOK_WITHIN = 10.0  # seconds; a hook holds a slot, and nobody can stop it for its job


class Unfit(Exception):
    """What was gathered for a job does not fit its task."""


class KnowsLeases(Protocol):
    """Whoever knows whether a leased job may still begin: the keeper."""

    stops_wanted: set[Identity]

    def holds(self, lease: Lease) -> bool: ...


class CountsRuns(Protocol):
    """Whoever counts for breakers how runs end."""

    def count(self, task: Task[..., Any], job: Job, outcome: Outcome | None) -> None: ...


class CountsSettled(Protocol):
    """Whoever sees to the jobs whose end is recorded by their own transaction: the worker."""

    async def send_notes(self) -> None:
        """Store what they have reported, as far as that can be done: after their end it would be refused."""

    def count_settled(self) -> None: ...


class Runner:
    """The one place where a job's code is called."""

    def __init__(
        self,
        registry: Registry,
        leases: KnowsLeases,
        children: ChildPool,
        suspects: Suspects,
        *,
        listener: Listener,
        counter: CountsSettled,
        run_log: RunLog,
        breakers: CountsRuns | None = None,
    ) -> None:
        self._registry = registry
        self._leases = leases
        self._children = children
        self._suspects = suspects
        self._listener = listener
        self._counter = counter
        self._run_log = run_log
        self._breakers = breakers
        self._notes_every_end = run_log.every_end or breakers is not None
        self._judge = Judge(random.random)
        self._threads = SlotThreads()
        self.parked: set[tuple[str, str]] = set()  # queues and tasks of jobs that are not for us
        self.around: Middleware | None = None  # what a test puts around every run, wherever that is

    async def run(self, lease: Lease, slot: Slot) -> None:
        """Everything that happens to a job between its lease and its settling, which is for whoever called
        it: `slot.outcome`, or nothing if that is None."""
        stops = self._leases.stops_wanted
        if stops and (lease.id, lease.fence) in stops:
            slot.outcome = Cancelled()
            return
        if not self._leases.holds(lease):
            return
        attempt: Attempt | None = None
        try:
            attempt = self._prepare(lease)
            self._watch(attempt, slot)
            if lease.losses or lease.crashes:
                ended = await self._perform_suspect(attempt, slot)
            elif attempt.task.transactional:
                ended = await self._perform_in_transaction(attempt, slot)
            else:
                ended = await self._perform(attempt, slot)
            if ended.outcome is not DONE or self._notes_every_end:
                self._note_end(attempt, ended, slot)
            if ended.settled:
                self._counter.count_settled()
            slot.outcome = None if ended.settled else ended.outcome
            if self._registry.hooked:
                slot.report(slot.outcome)
                await self._report(attempt, ended, slot)
        except asyncio.CancelledError:
            raise
        except UnknownTask:
            log.warning(
                "no task named %r: job %s waits for a worker that knows it",
                lease.task,
                lease.id,
                extra=extra_of(lease),
            )
            self.parked.add((lease.queue, lease.task))
            slot.outcome = Unknown()
        except (BrokenPayload, FlowBroken) as error:
            slot.outcome = _broken(lease, error)
        except BaseException as error:  # a backoff that raises, an upgrade that raises, or a mistake of ours
            slot.outcome = _buried(lease, None if attempt is None else attempt.job, error)

    async def _perform_suspect(self, attempt: Attempt, slot: Slot) -> Ended:
        """Where it harms nobody, once it is known that it begins."""
        job = attempt.job
        try:
            async with self._suspects.place_for(attempt, slot):
                if attempt.task.transactional:
                    return await self._perform_in_transaction(attempt, slot)
                return await self._perform(attempt, slot)
        except asyncio.CancelledError as error:  # while it waited for a place
            return self._judged(attempt, self._stopped(slot, error))
        except PutOff as later:
            return _snoozed(later)
        except LeaseLost:
            return Ended()
        except EngineError as error:
            log.warning("job %s has to wait until it can be noted that it begins: %s", job.id, error)
            return Ended(outcome=Snoozed(NO_CONNECTION, asked=False))

    async def _perform_in_transaction(self, attempt: Attempt, slot: Slot) -> Ended:
        """What it writes and its end are one commit; whatever else happens, it is as if it had not run."""
        ended = Ended()
        try:
            async with self._transaction(attempt) as lent:
                attempt.job.transaction = Transaction(lent.connection)
                ended = await self._perform(attempt, slot)
                if isinstance(ended.outcome, Done):
                    slot.commit()
                    await self._counter.send_notes()
                    ended.settled = await lent.settle(attempt.job.lease, ended.outcome)
                    slot.report(None)  # it stands, or its lease is lost: nothing is left to be recorded
                else:
                    slot.report(ended.outcome)
        except asyncio.CancelledError as error:  # while it waited for a connection
            stopped = self._stopped(slot, error)
            return ended if ended.settled else self._judged(attempt, stopped)
        except ChildCrashed as crash:  # while it was settled: if that stands, this is refused
            return Ended(outcome=self._judge.after_crash(attempt, crash))
        except EngineUnavailable as error:
            log.warning("job %s has to wait for a transaction: %s", attempt.job.id, error)
            return Ended(outcome=Snoozed(NO_CONNECTION, asked=False))
        except Exception as error:
            # The commit was refused, or its answer was lost.  In the latter case it may stand: then the fence
            # of this lease is gone, and the failure that is recorded now is refused.
            return ended if ended.settled else self._judged(attempt, Ended(error=error))
        if isinstance(ended.outcome, Done) and not ended.settled:
            log.warning("job %s ended after its lease was lost: it is rolled back", attempt.job.id)
            ended.outcome = None
        return ended

    def _transaction(self, attempt: Attempt) -> AbstractAsyncContextManager[Lent]:
        """The one that its child has begun, and ends; or one here."""
        if attempt.lent is not None:
            return nullcontext(attempt.lent)
        engine = self._registry.client.engine
        if not isinstance(engine, LendsTransactions):
            raise NoTransactions(attempt.task.name, masked(self._registry.url))
        return engine.transaction()

    # --- before --------------------------------------------------------------------------

    def _prepare(self, lease: Lease) -> Attempt:
        envelope = wire.decode(lease.body)
        task = self._registry.task_named(envelope.task)
        job = Job(self._registry, lease, envelope, self._listener)
        continuation = continuation_of(envelope) if envelope.headers else None
        if continuation is not None and continuation.gather is not None:
            return Attempt(job, task, continuation=continuation)
        args, kwargs = task.arguments(envelope)
        return Attempt(job, task, args, kwargs, continuation)

    def _watch(self, attempt: Attempt, slot: Slot) -> None:
        """From here on the worker watches the clock for this job."""
        slot.job = attempt.job
        timeout_ms = attempt.task.timeout_ms(attempt.job.envelope)
        if timeout_ms is not None:
            slot.deadline = slot.started + timeout_ms / 1000

    # --- the run -------------------------------------------------------------------------

    async def _perform(self, attempt: Attempt, slot: Slot) -> Ended:
        """Call it, make of whatever happens a value, and judge that."""
        current.set(attempt.job)
        try:
            if attempt.continuation is not None and attempt.continuation.gather is not None:
                await self._gather(attempt, attempt.continuation.gather)
            if self._registry.hooks["fetched"]:
                await self._call_hooks("fetched", slot, attempt.job)
            if attempt.task.simple and not (attempt.in_child or self._registry.middlewares or self.around):
                value = await attempt.task.function(
                    *attempt.args, **attempt.kwargs
                )  # no detours for most jobs
            else:
                value = await self._call_around(attempt, slot)
        except asyncio.CancelledError as error:
            ended = self._stopped(slot, error)
        except ChildCrashed as crash:
            return Ended(outcome=self._judge.after_crash(attempt, crash))
        except PutOff as later:
            return _snoozed(later)
        except Unfit as error:
            raise BrokenPayload(str(error)) from error
        except BaseException as error:  # also SystemExit and the like: nothing that a job raises stops us
            ended = Ended(error=error, stop=slot.stop)
        else:
            if slot.stop is not None:  # it swallowed its cancellation, but that does not make it in time
                _uncancel()
            ended = Ended(value=value, stop=slot.stop)
        if attempt.task.options.error_rules or attempt.continuation is not None:
            return await self._judged_with_care(attempt, ended, slot)
        return self._judged(attempt, ended)

    async def _judged_with_care(self, attempt: Attempt, ended: Ended, slot: Slot) -> Ended:
        if attempt.task.options.error_rules and attempt.job.lease.failures:
            try:
                ended.others = await self._others(attempt, ended)
            except asyncio.CancelledError as error:  # it is stopped before it is known what its end means
                ended = self._stopped(slot, error)
        if attempt.continuation is None or attempt.task.transactional or not _is_large(ended.value):
            return self._judged(attempt, ended)
        # Not in the event loop, which thousands of jobs to be put next would hold up for seconds.
        slot.report(Released())  # should nobody wait for it: it runs once more
        return cast("Ended", await self._threads.of(slot).call(self._judged, (attempt, ended), {}))

    async def _others(self, attempt: Attempt, ended: Ended) -> int:
        """How many of its failures do not count for the rule that this end falls under."""
        engine, job = self._registry.client.engine, attempt.job
        is_failure = ended.stop is Stop.TIMEOUT or (ended.stop is None and raised(ended) is not None)
        if not is_failure or job.envelope.on_error or not isinstance(engine, Inspects):
            return 0
        try:
            counts = await failure_counts(engine, job.lease)
        except EngineError as error:
            log.warning("all failures of job %s count, as its history cannot be read: %s", job.id, error)
            return 0
        return failures_under_other_rules(attempt.task, ended, counts)

    def _judged(self, attempt: Attempt, ended: Ended) -> Ended:
        ended.outcome = self._judge.judge(attempt, ended)
        return ended

    async def _gather(self, attempt: Attempt, gather: Gather) -> None:
        """The results of a fan-out are its first argument.  An engine that does not answer is an error."""
        batches = StoredBatches(self._registry.client)
        members = [each async for each in batches.amembers(gather.batch, after=gather.after)]
        job, task = attempt.job, attempt.task
        try:
            job.gathered = with_first(gathered(gather, members), job.envelope.args)
        except FlowBroken as error:
            raise verdicts.Discard(str(error)) from error
        try:
            attempt.args, attempt.kwargs = task.arguments(replace(job.envelope, args=job.gathered))
        except BrokenPayload as error:
            raise Unfit(str(error)) from error

    def _stopped(self, slot: Slot, error: asyncio.CancelledError) -> Ended:
        if slot.state is SlotState.DISMISSED:
            raise error  # the worker itself is being torn down
        _uncancel()
        if slot.stop is None:
            return Ended(error=error)  # something inside the job was cancelled, by itself
        return Ended(stop=slot.stop)

    async def _call_around(self, attempt: Attempt, slot: Slot) -> Any:
        if self.around is None:
            return await self._call(attempt, slot)
        return await self.around(attempt.job, lambda: self._call(attempt, slot))

    async def _call(self, attempt: Attempt, slot: Slot) -> Any:
        """In a child, with its middlewares and dependencies, or here."""
        job, task = attempt.job, attempt.task
        if attempt.lent is not None:
            return await attempt.lent.call(job, task)
        if task.options.isolate is not None or attempt.in_child:
            try:
                return await self._children.call(job, task.options, slot)
            except ChildNotStarted as error:
                if not (attempt.in_child or isinstance(error, NoProcess)):
                    raise
                log.warning("job %s has to wait for a process: %s", job.id, error)
                raise PutOff from error
        plain = self._threads.of(slot)
        return await call_around(
            self._registry.middlewares,
            job,
            lambda: call_task(task, job, attempt.args, attempt.kwargs, plain),
            plain,
        )

    @property
    def threads_left(self) -> int:
        """How many threads run on for jobs that were to stop."""
        return self._threads.left

    # --- after ---------------------------------------------------------------------------

    def outcome_of_stuck(self, lease: Lease, slot: Slot) -> Outcome | None:
        """What is recorded for a job that was asked to stop and does not."""
        match slot.stop:
            case Stop.LOST:
                return None
            case Stop.CANCELLED:
                return Cancelled()
            case Stop.TIMEOUT:
                return self._timed_out(lease, slot.job)
            case _:
                return Released()

    def _timed_out(self, lease: Lease, job: Job | None) -> Outcome:
        try:
            envelope = wire.decode(lease.body)
            policy = self._registry.task_named(envelope.task).policy_for(envelope)
            outcome = self._judge.after_timeout(lease, policy, STUCK)
        except BaseException as error:  # as in `run`
            return _buried(lease, job, error)
        return with_last_words(outcome, job) if isinstance(outcome, Dead) and job is not None else outcome

    def _note_end(self, attempt: Attempt, ended: Ended, slot: Slot) -> None:
        if ended.outcome is not DONE or self._run_log.every_end:
            self._run_log.ended(attempt, ended, slot)
        if self._breakers is not None:
            self._breakers.count(attempt.task, attempt.job, ended.outcome)

    async def _report(self, attempt: Attempt, ended: Ended, slot: Slot) -> None:
        """Call the hooks that asked for it; nothing that they do changes the outcome."""
        job = attempt.job
        match ended.outcome:
            case None:
                await self._call_hooks("lost", slot, job)
            case Done():
                await self._call_hooks("finished", slot, job, ended.value)
            case Retried(error=error) | Dead(error=error) if ended.stop is None:
                what = raised(ended) or RuntimeError(error.message if error else "")
                await self._call_hooks("error", slot, job, what)
            case Retried() | Dead():
                await self._call_hooks("timeout", slot, job)
        if isinstance(ended.outcome, Dead):
            await self._call_hooks("dead", slot, job, ended.outcome.reason)

    async def _call_hooks(self, event: str, slot: Slot, *arguments: Any) -> None:
        for hook in self._registry.hooks[event]:
            try:
                async with asyncio.timeout(HOOK_WITHIN):
                    await call_either(self._threads.of(slot), hook, *arguments)
            except asyncio.CancelledError:
                if event == "fetched":  # the job is being stopped before it has begun
                    raise
                log.exception("the hook %s for %s was cancelled", getattr(hook, "__qualname__", hook), event)
            except BaseException:
                log.exception("the hook %s for %s raised", getattr(hook, "__qualname__", hook), event)


def _snoozed(later: PutOff) -> Ended:
    return Ended(outcome=Snoozed(later.delay, asked=False))


def _is_large(value: Any) -> bool:
    """May a fan-out over it be?"""
    return isinstance(value, Sized) and len(value) > LARGE


def _uncancel() -> None:
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()


def _broken(lease: Lease, error: PropolisError) -> Outcome:
    log.error("job %s cannot be run and is kept as broken: %s", lease.id, error, extra=extra_of(lease))
    return Broken(describe(error))


def _buried(lease: Lease, job: Job | None, error: BaseException) -> Outcome:
    log.error("job %s cannot be judged and is buried", lease.id, exc_info=error, extra=extra_of(lease))
    buried = Dead(error=describe(error, traceback_text(error, error.__traceback__)))
    return buried if job is None else with_last_words(buried, job)
