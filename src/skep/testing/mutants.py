"""Engines that are wrong in one way each: a suite that cannot fail proves nothing.

Each mutant wraps any engine and misbehaves through its public verbs alone, so that the same mutants
serve engines that do not exist yet.  `check_engine` must tell every one of them from a right engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar, cast

import msgspec
from msgspec.structs import replace

from skep.batch import Batch, BatchStatus
from skep.broker import Engine, Exchange, Filter, Page, Receipt, Renewal, Rule, RuleKind, Scope, Swept
from skep.job import Dead, Done, Job, Lease, Outcome, Record, Release, Retry, State, derive_id
from skep.testing.clock import FakeClock
from skep.testing.machine import Difference, check_engine
from skep.wire import decode

ALL = 1000
Settled = Sequence[tuple[Lease, Outcome]]


class Wrapped:
    """Passes every verb on.  What a mutant does behind the curtain leaves no event in the history."""

    def __init__(self, engine: Engine, clock: FakeClock) -> None:
        self.engine = engine
        self.clock = clock
        self.newest: dict[str, Lease] = {}
        self.hidden: set[tuple[str, int]] = set()

    def __getattr__(self, name: str) -> object:
        return getattr(self.engine, name)

    async def put(self, jobs: Sequence[Job], *, token: str | None = None) -> list[Receipt]:
        return await self.engine.put(jobs, token=token)

    async def put_batch(
        self, batch: Batch, jobs: Sequence[Job] = (), *, seal: bool = True, token: str | None = None
    ) -> list[Receipt]:
        return await self.engine.put_batch(batch, jobs, seal=seal, token=token)

    async def lease(
        self, wants: Mapping[str, int], *, span: timedelta, holder: str, limit: int | None = None
    ) -> list[Lease]:
        leases = await self.engine.lease(wants, span=span, holder=holder, limit=limit)
        self.newest |= {lease.id: lease for lease in leases}
        return leases

    async def settle(self, outcomes: Settled) -> list[Lease]:
        return await self.engine.settle(outcomes)

    async def exchange(
        self,
        outcomes: Settled,
        wants: Mapping[str, int],
        *,
        span: timedelta,
        holder: str,
        limit: int | None = None,
    ) -> Exchange:
        lost = await self.settle(outcomes)
        return Exchange(lost, await self.lease(wants, span=span, holder=holder, limit=limit))

    async def find(self, where: Filter, *, limit: int = 100, after: int | None = None) -> Page:
        page = await self.engine.find(where, limit=limit, after=after)
        return Page([self.show(record) for record in page.records], page.after)

    async def get(self, job_id: str) -> Record | None:
        record = await self.engine.get(job_id)
        return None if record is None else self.show(record)

    def show(self, record: Record) -> Record:
        told = [e for n, e in enumerate(record.history) if (record.id, n) not in self.hidden]
        return replace(record, history=tuple(told))

    async def every(self, where: Filter) -> list[Record]:
        return (await self.engine.find(where, limit=ALL)).records

    async def hide_last_event(self, job_id: str) -> None:
        record = await self.engine.get(job_id)
        if record is not None:
            self.hidden.add((job_id, len(record.history) - 1))

    async def to_back(self, job_id: str) -> None:
        """Also makes it due now."""
        await self.engine.reschedule(job_id, self.clock.now)
        await self.hide_last_event(job_id)


# --- leases -------------------------------------------------------------------------------------


class NoFence(Wrapped):
    """Whoever once had a lease of the job may settle and renew the present one."""

    async def settle(self, outcomes: Settled) -> list[Lease]:
        present = [(self.newest.get(lease.id, lease), outcome) for lease, outcome in outcomes]
        lost = await self.engine.settle(present)
        return [lease for lease, _ in outcomes if self.newest.get(lease.id, lease) in lost]

    async def renew(self, leases: Sequence[Lease], *, span: timedelta) -> list[Renewal]:
        return await self.engine.renew([self.newest.get(lease.id, lease) for lease in leases], span=span)


class StillFence(NoFence):
    """Every lease of a job has the same fence."""

    async def lease(
        self, wants: Mapping[str, int], *, span: timedelta, holder: str, limit: int | None = None
    ) -> list[Lease]:
        leases = await super().lease(wants, span=span, holder=holder, limit=limit)
        return [replace(lease, fence=1) for lease in leases]

    def show(self, record: Record) -> Record:
        history = tuple(replace(event, fence=min(event.fence, 1)) for event in super().show(record).history)
        return replace(record, fence=min(record.fence, 1), history=history)


class LeasedTwice(Wrapped):
    """A job that runs is given out again, to the next who asks."""

    async def lease(
        self, wants: Mapping[str, int], *, span: timedelta, holder: str, limit: int | None = None
    ) -> list[Lease]:
        running = {record.id for record in await self.every(Filter(state=State.RUNNING))}
        again = [lease for lease in self.newest.values() if lease.id in running and lease.queue in wants]
        return again[:1] + await super().lease(wants, span=span, holder=holder, limit=limit)


class RevivingRenewal(Wrapped):
    """A renewal that comes too late is told that it came in time."""

    async def renew(self, leases: Sequence[Lease], *, span: timedelta) -> list[Renewal]:
        running = {record.fence for record in await self.every(Filter(state=State.RUNNING))}
        renewals = await self.engine.renew(leases, span=span)
        return [
            Renewal(self.clock.now + span) if renewal.until is None and lease.fence in running else renewal
            for lease, renewal in zip(leases, renewals, strict=True)
        ]


class EmptyRenewal(Wrapped):
    """A renewal is answered, and forgotten."""

    async def renew(self, leases: Sequence[Lease], *, span: timedelta) -> list[Renewal]:
        live = {r.fence: r for r in await self.every(Filter(state=State.RUNNING)) if not self._is_over(r)}
        return [
            Renewal(self.clock.now + span, live[lease.fence].cancel_requested)
            if lease.fence in live
            else Renewal(None)
            for lease in leases
        ]

    def _is_over(self, record: Record) -> bool:
        return record.lease_until is None or record.lease_until <= self.clock.now


class LostIsAccepted(Wrapped):
    """A settle that was refused is reported as accepted."""

    async def settle(self, outcomes: Settled) -> list[Lease]:
        await self.engine.settle(outcomes)
        return []


class CrashNotCounted(Wrapped):
    """A lost lease is taken for one that was given back."""

    async def sweep(self, *, limit: int = ALL, by: str | None = None) -> Swept:
        lost = [
            self.newest[record.id]
            for record in await self.every(Filter(state=State.RUNNING))
            if record.lease_until is not None and record.lease_until <= self.clock.now
        ]
        await self.engine.settle([(lease, Release()) for lease in lost])
        swept = await self.engine.sweep(limit=limit, by=by)
        return replace(swept, reaped=len(lost))


class NoCrashLimit(Wrapped):
    """A job that has crashed too often runs again."""

    async def sweep(self, *, limit: int = ALL, by: str | None = None) -> Swept:
        swept = await self.engine.sweep(limit=limit, by=by)
        crashed = await self.every(Filter(state=State.DEAD, reason="crashed"))
        await self.engine.replay([record.id for record in crashed])
        return swept


# --- order and time -----------------------------------------------------------------------------


class EarlyDelivery(Wrapped):
    """A job is leased before it is due."""

    async def lease(
        self, wants: Mapping[str, int], *, span: timedelta, holder: str, limit: int | None = None
    ) -> list[Lease]:
        for record in await self.every(Filter(scheduled=True)):
            if record.queue in wants:
                await self.to_back(record.id)
        return await super().lease(wants, span=span, holder=holder, limit=limit)


class Disorderly(Wrapped):
    """Takes all that can be leased, puts it in an order of its own, and gives the rest back unseen."""

    def __init__(self, engine: Engine, clock: FakeClock) -> None:
        super().__init__(engine, clock)
        self.fences: dict[str, int] = {}

    async def lease(
        self, wants: Mapping[str, int], *, span: timedelta, holder: str, limit: int | None = None
    ) -> list[Lease]:
        taken: list[Lease] = []
        for queue, want in wants.items():
            room = want if limit is None else min(want, limit - len(taken))
            found = await super().lease({queue: ALL}, span=span, holder=holder)
            ordered = await self.order(found)
            taken += ordered[:room]
            await self._give_back([lease for lease in found if lease not in ordered[:room]])
        self.fences |= {lease.id: lease.fence for lease in taken}
        return taken

    def show(self, record: Record) -> Record:
        return replace(super().show(record), fence=self.fences.get(record.id, 0))

    async def order(self, leases: list[Lease]) -> list[Lease]:
        return leases

    async def _give_back(self, leases: list[Lease]) -> None:
        await self.engine.settle([(lease, Release()) for lease in leases])
        for lease in leases:
            await self.hide_last_event(lease.id)


class LastInFirstOut(Disorderly):
    """The job that came last is the first to go."""

    async def order(self, leases: list[Lease]) -> list[Lease]:
        return sorted(
            leases, key=lambda lease: (decode(lease.body).priority, leases.index(lease)), reverse=True
        )


class PriorityIgnored(Disorderly):
    """Jobs of different priorities go in the order of their puts."""

    async def order(self, leases: list[Lease]) -> list[Lease]:
        if len({decode(lease.body).priority for lease in leases}) == 1:
            return leases
        places = [record.id for record in await self.every(Filter())]
        return sorted(leases, key=lambda lease: places.index(lease.id))


class RetryToFront(Wrapped):
    """A job that failed goes before those that wait."""

    async def settle(self, outcomes: Settled) -> list[Lease]:
        lost = await self.engine.settle(outcomes)
        for lease, outcome in outcomes:
            if isinstance(outcome, Retry) and not outcome.delay and lease not in lost:
                await self._to_front(lease.id)
        return lost

    async def _to_front(self, job_id: str) -> None:
        job = await self.engine.get(job_id)
        if job is None or job.state is not State.READY:
            return
        line = [
            (await self.engine.position(record.id), record.id)
            for record in await self.every(Filter(queue=job.queue, state=State.READY, scheduled=False))
            if record.priority == job.priority
        ]
        for _, other in sorted(line):
            if other != job_id:
                await self.to_back(other)


class RetryAtOnce(Wrapped):
    """The delay of a retry is forgotten."""

    async def settle(self, outcomes: Settled) -> list[Lease]:
        hasty = [
            (lease, replace(outcome, delay=timedelta(0)) if isinstance(outcome, Retry) else outcome)
            for lease, outcome in outcomes
        ]
        return await self.engine.settle(hasty)


class ReleaseToBack(Wrapped):
    """A job that was given back goes behind those that wait."""

    async def settle(self, outcomes: Settled) -> list[Lease]:
        lost = await self.engine.settle(outcomes)
        for lease, outcome in outcomes:
            if isinstance(outcome, Release) and lease not in lost:
                await self.to_back(lease.id)
        return lost


class CrashedToBack(Wrapped):
    """A job whose lease was lost goes behind those that wait."""

    async def sweep(self, *, limit: int = ALL, by: str | None = None) -> Swept:
        running = await self.every(Filter(state=State.RUNNING))
        swept = await self.engine.sweep(limit=limit, by=by)
        for record in running:
            await self.to_back_if_waiting(record.id)
        return swept

    async def to_back_if_waiting(self, job_id: str) -> None:
        record = await self.engine.get(job_id)
        if record is not None and record.state is State.READY:
            await self.to_back(job_id)


class ExpiredDelivered(Wrapped):
    """A job that has expired runs all the same."""

    async def lease(
        self, wants: Mapping[str, int], *, span: timedelta, holder: str, limit: int | None = None
    ) -> list[Lease]:
        before = await self._expired()
        leases = await super().lease(wants, span=span, holder=holder, limit=limit)
        late = await self._expired() - before
        await self.engine.replay(sorted(late))
        for job_id in late:
            await self.hide_last_event(job_id)
        return leases + await super().lease(wants, span=span, holder=holder, limit=len(late))

    async def _expired(self) -> set[str]:
        return {record.id for record in await self.every(Filter(state=State.DEAD, reason="expired"))}


# --- counters -----------------------------------------------------------------------------------


class Miscounting(Wrapped):
    """Shows counters that are too high."""

    def __init__(self, engine: Engine, clock: FakeClock) -> None:
        super().__init__(engine, clock)
        self.extra: dict[str, tuple[int, int, int]] = {}

    async def lease(
        self, wants: Mapping[str, int], *, span: timedelta, holder: str, limit: int | None = None
    ) -> list[Lease]:
        leases = await super().lease(wants, span=span, holder=holder, limit=limit)
        return [self._add(lease) for lease in leases]

    def _add(self, lease: Lease) -> Lease:
        attempts, failures, crashes = self.extra.get(lease.id, (0, 0, 0))
        return replace(
            lease,
            attempt=lease.attempt + attempts,
            failures=lease.failures + failures,
            crashes=lease.crashes + crashes,
        )

    def show(self, record: Record) -> Record:
        attempts, failures, crashes = self.extra.get(record.id, (0, 0, 0))
        return replace(
            super().show(record),
            attempts=record.attempts + attempts,
            failures=record.failures + failures,
            crashes=record.crashes + crashes,
        )


class ReleaseCounted(Miscounting):
    """A job that was given back has used up an attempt."""

    async def settle(self, outcomes: Settled) -> list[Lease]:
        lost = await self.engine.settle(outcomes)
        for lease, outcome in outcomes:
            if isinstance(outcome, Release) and lease not in lost:
                attempts, failures, crashes = self.extra.get(lease.id, (0, 0, 0))
                self.extra[lease.id] = (attempts + 1, failures, crashes)
        return lost


class ReplayKeepsCounters(Miscounting):
    """A new life begins with the attempts, failures and crashes of the old one."""

    async def replay(self, job_ids: Sequence[str]) -> list[bool]:
        before = [await self.engine.get(job_id) for job_id in job_ids]
        replayed = await self.engine.replay(job_ids)
        for record, done in zip(before, replayed, strict=True):
            if done and record is not None:
                self.extra[record.id] = (record.attempts, record.failures, record.crashes)
        return replayed


# --- puts ---------------------------------------------------------------------------------------


class Putting(Wrapped):
    """`put` and `put_batch` go one way, so that a mutant has one place to go wrong."""

    async def put(self, jobs: Sequence[Job], *, token: str | None = None) -> list[Receipt]:
        return await self.accept(jobs, token, None, seal=False)

    async def put_batch(
        self, batch: Batch, jobs: Sequence[Job] = (), *, seal: bool = True, token: str | None = None
    ) -> list[Receipt]:
        return await self.accept(jobs, token, batch, seal=seal)

    async def accept(
        self, jobs: Sequence[Job], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        if batch is None:
            return await self.engine.put(jobs, token=token)
        return await self.engine.put_batch(batch, jobs, seal=seal, token=token)

    async def put_copy(self, job: Job) -> None:
        """The same once more, as if it were another job."""
        copy = replace(job, id=derive_id("copy", job.id), unique=None, batch=None)
        await self.engine.put([copy])


class PutTwiceById(Putting):
    """An id that is there already makes a second job."""

    async def accept(
        self, jobs: Sequence[Job], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        receipts = await super().accept(jobs, token, batch, seal=seal)
        for job, receipt in zip(jobs, receipts, strict=True):
            if token is None and not receipt.created and receipt.id == job.id:
                await self.put_copy(job)
        return receipts


class ChosenIdForgotten(Putting):
    """An id that was chosen is free again when its job has gone."""

    async def accept(
        self, jobs: Sequence[Job], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        receipts = await super().accept(jobs, token, batch, seal=seal)
        for job, receipt in zip(jobs, receipts, strict=True):
            if token is None and not receipt.created and await self.engine.get(receipt.id) is None:
                await self.put_copy(job)
        return receipts


class TokenForgotten(Putting):
    """A call that is repeated with its token is a new call."""

    async def accept(
        self,
        jobs: Sequence[Job],
        token: str | None,  # noqa: ARG002 - forgotten
        batch: Batch | None,
        *,
        seal: bool,
    ) -> list[Receipt]:
        return await super().accept(jobs, None, batch, seal=seal)


class LastOfBundleLost(Putting):
    """The last job of a bundle is acknowledged and lost."""

    async def accept(
        self, jobs: Sequence[Job], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        receipts = await super().accept(jobs, token, batch, seal=seal)
        if len(jobs) > 1 and receipts[-1].created:
            await self.engine.cancel([jobs[-1].id])
            await self.engine.delete([jobs[-1].id])
        return receipts


class UniqueIgnored(Putting):
    """A unique key that is held does not keep a second job out."""

    async def accept(
        self, jobs: Sequence[Job], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        receipts = await super().accept(jobs, token, batch, seal=seal)
        for job, receipt in zip(jobs, receipts, strict=True):
            if not receipt.created and receipt.id != job.id:
                await self.put_copy(job)
        return receipts


class UniqueNeverFreed(Putting):
    """A unique key stays with the first job that ever had it."""

    def __init__(self, engine: Engine, clock: FakeClock) -> None:
        super().__init__(engine, clock)
        self.holders: dict[str, str] = {}

    async def accept(
        self, jobs: Sequence[Job], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        barred = [job for job in jobs if self.holders.get(job.unique or "", job.id) != job.id]
        free = [job for job in jobs if job not in barred]
        receipts = iter(await super().accept(free, token, batch, seal=seal))
        answers = [
            Receipt(self.holders[job.unique or ""], created=False) if job in barred else next(receipts)
            for job in jobs
        ]
        for job, answer in zip(jobs, answers, strict=True):
            if answer.created and job.unique is not None:
                self.holders[job.unique] = job.id
        return answers


class PayloadRewritten(Wrapped):
    """The payload is parsed and written again: the same values, other bytes."""

    async def lease(
        self, wants: Mapping[str, int], *, span: timedelta, holder: str, limit: int | None = None
    ) -> list[Lease]:
        leases = await super().lease(wants, span=span, holder=holder, limit=limit)
        return [replace(lease, body=msgspec.json.encode(msgspec.json.decode(lease.body))) for lease in leases]


# --- outcomes -----------------------------------------------------------------------------------


class EmissionsDropped(Wrapped):
    """What a job emits is never put."""

    async def settle(self, outcomes: Settled) -> list[Lease]:
        silent = [
            (lease, replace(outcome, emit=()) if isinstance(outcome, Done) else outcome)
            for lease, outcome in outcomes
        ]
        return await self.engine.settle(silent)


class LastWordsDropped(Wrapped):
    """What a job emits is put only if it has succeeded."""

    async def settle(self, outcomes: Settled) -> list[Lease]:
        silent = [
            (lease, replace(outcome, emit=()) if isinstance(outcome, Dead) else outcome)
            for lease, outcome in outcomes
        ]
        return await self.engine.settle(silent)


class LostLeaseEmits(Wrapped):
    """What a job emits is put, though its lease was lost."""

    async def settle(self, outcomes: Settled) -> list[Lease]:
        lost = await self.engine.settle(outcomes)
        for lease, outcome in outcomes:
            if isinstance(outcome, Done) and lease in lost:
                await self.engine.put([replace(job, batch=None) for job in outcome.emit])
        return lost


class ResultLost(Wrapped):
    """A job that is to be kept is forgotten with its result."""

    async def settle(self, outcomes: Settled) -> list[Lease]:
        short = [
            (lease, replace(outcome, keep=None) if isinstance(outcome, Done) else outcome)
            for lease, outcome in outcomes
        ]
        return await self.engine.settle(short)


class CancelIgnored(Wrapped):
    """A waiting job that was cancelled is still there to be leased."""

    async def cancel(self, job_ids: Sequence[str]) -> list[bool]:
        waiting = {record.id for record in await self.every(Filter(state=State.READY))}
        answers = iter(await self.engine.cancel([job_id for job_id in job_ids if job_id not in waiting]))
        return [True if job_id in waiting else next(answers) for job_id in job_ids]


class CancelNotAsked(Wrapped):
    """A running job that was cancelled is not told of it."""

    async def cancel(self, job_ids: Sequence[str]) -> list[bool]:
        running = {record.id for record in await self.every(Filter(state=State.RUNNING))}
        answers = iter(await self.engine.cancel([job_id for job_id in job_ids if job_id not in running]))
        return [True if job_id in running else next(answers) for job_id in job_ids]


# --- rules --------------------------------------------------------------------------------------


class RuleIgnored(Wrapped):
    """A rule of this kind is listed, and does nothing."""

    kind: ClassVar[RuleKind]

    def __init__(self, engine: Engine, clock: FakeClock) -> None:
        super().__init__(engine, clock)
        self.listed: dict[tuple[Scope, str], Rule] = {}

    async def add_rule(self, rule: Rule) -> bool:
        if rule.kind is not self.kind:
            return await self.engine.add_rule(rule)
        known = self.listed.get((rule.scope, rule.name))
        self.listed[rule.scope, rule.name] = rule
        return rule != known

    async def remove_rule(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        if kind is not self.kind:
            return await self.engine.remove_rule(kind, scope, name)
        return self.listed.pop((scope, name), None) is not None

    async def rules(self) -> list[Rule]:
        return [*await self.engine.rules(), *self.listed.values()]


class PauseIgnored(RuleIgnored):
    kind = RuleKind.PAUSE


class BlockIgnored(RuleIgnored):
    kind = RuleKind.BLOCK


class LimitIgnored(RuleIgnored):
    kind = RuleKind.LIMIT


class CapIgnored(RuleIgnored):
    kind = RuleKind.CAP


# --- batches and schedules ----------------------------------------------------------------------


class NoCallback(Putting):
    """Nothing is put when a batch ends."""

    async def accept(
        self, jobs: Sequence[Job], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        if batch is not None:
            batch = replace(batch, on_finished=None, on_succeeded=None, on_failed=None)
        return await super().accept(jobs, token, batch, seal=seal)


class NoFailedCallback(Putting):
    """Nothing is put when the first member fails."""

    async def accept(
        self, jobs: Sequence[Job], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        batch = None if batch is None else replace(batch, on_failed=None)
        return await super().accept(jobs, token, batch, seal=seal)


class CallbackTwice(Putting):
    """The callback of a batch is put a second time, as another job."""

    def __init__(self, engine: Engine, clock: FakeClock) -> None:
        super().__init__(engine, clock)
        self.callbacks: dict[str, Job] = {}

    async def accept(
        self, jobs: Sequence[Job], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        if batch is not None and batch.on_finished is not None:
            self.callbacks[batch.on_finished.id] = batch.on_finished
        return await super().accept(jobs, token, batch, seal=seal)

    async def settle(self, outcomes: Settled) -> list[Lease]:
        lost = await self.engine.settle(outcomes)
        for record in await self.every(Filter(state=State.READY)):
            if record.id in self.callbacks:
                await self.put_copy(self.callbacks.pop(record.id))
        return lost


class SealedAtOnce(Putting):
    """A batch that was to stay open is sealed."""

    async def accept(
        self,
        jobs: Sequence[Job],
        token: str | None,
        batch: Batch | None,
        *,
        seal: bool,  # noqa: ARG002
    ) -> list[Receipt]:
        return await super().accept(jobs, token, batch, seal=True)


class MemberCountedTwice(Putting):
    """A member that is put again counts as one more."""

    def __init__(self, engine: Engine, clock: FakeClock) -> None:
        super().__init__(engine, clock)
        self.extra: dict[str, int] = {}

    async def accept(
        self, jobs: Sequence[Job], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        receipts = await super().accept(jobs, token, batch, seal=seal)
        for job, receipt in zip(jobs, receipts, strict=True):
            if job.batch is not None and not receipt.created:
                self.extra[job.batch] = self.extra.get(job.batch, 0) + 1
        return receipts

    async def batches(self, *, limit: int = 100, after: str | None = None) -> list[BatchStatus]:
        found = await self.engine.batches(limit=limit, after=after)
        return [replace(batch, total=batch.total + self.extra.get(batch.id, 0)) for batch in found]


class DueSchedulesUntold(Wrapped):
    """A sweep never tells that a schedule is due, so nobody ever fires one."""

    async def sweep(self, **asked: Any) -> Swept:
        return replace(await self.engine.sweep(**asked), schedules_due=False)


class FiredTwice(Wrapped):
    """An instant of a schedule is settled by everybody who tries."""

    def __init__(self, engine: Engine, clock: FakeClock) -> None:
        super().__init__(engine, clock)
        self.fired: set[tuple[str, datetime]] = set()

    async def fire(self, name: str, instant: datetime, job: Job | None, next_at: datetime) -> bool:
        if (name, instant) in self.fired and job is not None:
            await self.engine.put([replace(job, id=derive_id("copy", job.id), unique=None)])
            return True
        fired = await self.engine.fire(name, instant, job, next_at)
        if fired:
            self.fired.add((name, instant))
        return fired


MUTANTS: dict[str, type[Wrapped]] = {
    "no fence": NoFence,
    "a fence that stands still": StillFence,
    "a running job leased twice": LeasedTwice,
    "a renewal that revives": RevivingRenewal,
    "a renewal without effect": EmptyRenewal,
    "a lost lease accepted": LostIsAccepted,
    "a crash not counted": CrashNotCounted,
    "no limit to crashes": NoCrashLimit,
    "early delivery": EarlyDelivery,
    "last in, first out": LastInFirstOut,
    "priority ignored": PriorityIgnored,
    "a retry to the front": RetryToFront,
    "a retry without its delay": RetryAtOnce,
    "a release to the back": ReleaseToBack,
    "a crash to the back": CrashedToBack,
    "an expired job delivered": ExpiredDelivered,
    "a release that counts": ReleaseCounted,
    "a replay that resets nothing": ReplayKeepsCounters,
    "a second job by id": PutTwiceById,
    "a chosen id forgotten": ChosenIdForgotten,
    "a token forgotten": TokenForgotten,
    "a job of a bundle lost": LastOfBundleLost,
    "a unique key ignored": UniqueIgnored,
    "a unique key never freed": UniqueNeverFreed,
    "a payload rewritten": PayloadRewritten,
    "emissions dropped": EmissionsDropped,
    "last words dropped": LastWordsDropped,
    "emissions of a lost lease": LostLeaseEmits,
    "a result lost": ResultLost,
    "a cancelled job kept": CancelIgnored,
    "a running job not asked to stop": CancelNotAsked,
    "a pause ignored": PauseIgnored,
    "a block ignored": BlockIgnored,
    "a limit ignored": LimitIgnored,
    "a cap ignored": CapIgnored,
    "no callback": NoCallback,
    "no callback for a failure": NoFailedCallback,
    "a callback twice": CallbackTwice,
    "a batch sealed too early": SealedAtOnce,
    "a member counted twice": MemberCountedTwice,
    "a schedule fired twice": FiredTwice,
    "due schedules untold": DueSchedulesUntold,
}


def catch(
    mutant: type[Wrapped],
    make: Callable[[FakeClock], Engine],
    *,
    examples: int = 300,
    steps: int = 50,
    seed: int | None = None,
) -> bool:
    """Whether `check_engine` tells this mutant of the engine from a right one.

    It stops at the first difference.  False means that the suite is blind in one eye.
    """

    def broken(clock: FakeClock) -> Engine:
        return cast(Engine, mutant(make(clock), clock))

    try:
        check_engine(broken, examples=examples, steps=steps, seed=seed, shrink=False)
    except Difference:
        return True
    return False
