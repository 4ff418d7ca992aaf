"""Engines that are wrong in one way each: a suite that cannot fail proves nothing.

Each mutant wraps any engine and misbehaves through its public verbs alone, so that the same mutants
serve engines that do not exist yet.  `check_engine` must tell every one of them from a right engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, cast

import msgspec
from msgspec.structs import replace

from propolis.core.batch import Batch, BatchStatus
from propolis.core.envelope import Envelope
from propolis.core.ids import derive_id
from propolis.core.job import (
    Crashed,
    Dead,
    Done,
    JobInfo,
    Lease,
    Outcome,
    Released,
    Retried,
    Snoozed,
    State,
    Unknown,
)
from propolis.core.protocols import (
    Engine,
    Exchange,
    Filter,
    Note,
    Page,
    Receipt,
    Renewal,
    Rule,
    RuleKind,
    Scope,
    Swept,
)
from propolis.core.wire import decode
from propolis.testing.clock import FakeClock
from propolis.testing.engines.machine import Difference, check_engine

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

    async def put(self, jobs: Sequence[Envelope], *, token: str | None = None) -> list[Receipt]:
        return await self.engine.put(jobs, token=token)

    async def put_batch(
        self, batch: Batch, jobs: Sequence[Envelope] = (), *, seal: bool = True, token: str | None = None
    ) -> list[Receipt]:
        return await self.engine.put_batch(batch, jobs, seal=seal, token=token)

    async def lease(self, wants: Mapping[str, int], **terms: Any) -> list[Lease]:
        leases = await self.engine.lease(wants, **terms)
        self.newest |= {lease.id: lease for lease in leases}
        return leases

    async def settle(self, outcomes: Settled) -> list[Lease]:
        return await self.engine.settle(outcomes)

    async def exchange(self, outcomes: Settled, wants: Mapping[str, int], **terms: Any) -> Exchange:
        lost = await self.settle(outcomes)
        return Exchange(lost, await self.lease(wants, **terms))

    async def find(self, where: Filter, *, limit: int = 100, after: int | None = None) -> Page:
        page = await self.engine.find(where, limit=limit, after=after)
        return Page([self.show(info) for info in page.jobs], page.after)

    async def get(self, job_id: str) -> JobInfo | None:
        info = await self.engine.get(job_id)
        return None if info is None else self.show(info)

    def show(self, info: JobInfo) -> JobInfo:
        events = [e for n, e in enumerate(info.history) if (info.id, n) not in self.hidden]
        return replace(info, history=tuple(events))

    async def every(self, where: Filter) -> list[JobInfo]:
        return (await self.engine.find(where, limit=ALL)).jobs

    async def hide_last_event(self, job_id: str) -> None:
        info = await self.engine.get(job_id)
        if info is not None:
            self.hidden.add((job_id, len(info.history) - 1))

    async def to_back(self, job_id: str) -> None:
        """Also makes it due now."""
        await self.engine.reschedule(job_id, self.clock.now)
        await self.hide_last_event(job_id)


class Mistaken(Wrapped):
    """Takes outcomes for others."""

    async def settle(self, outcomes: Settled) -> list[Lease]:
        return await self.engine.settle([(lease, self.taken_for(outcome)) for lease, outcome in outcomes])

    def taken_for(self, outcome: Outcome) -> Outcome:
        return outcome


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

    async def lease(self, wants: Mapping[str, int], **terms: Any) -> list[Lease]:
        leases = await super().lease(wants, **terms)
        return [replace(lease, fence=1) for lease in leases]

    def show(self, info: JobInfo) -> JobInfo:
        history = tuple(replace(event, fence=min(event.fence, 1)) for event in super().show(info).history)
        return replace(info, fence=min(info.fence, 1), history=history)


class LeasedTwice(Wrapped):
    """A job that runs is given out again, to the next who asks."""

    async def lease(self, wants: Mapping[str, int], **terms: Any) -> list[Lease]:
        running = {info.id for info in await self.every(Filter(state=State.RUNNING))}
        again = [lease for lease in self.newest.values() if lease.id in running and lease.queue in wants]
        return again[:1] + await super().lease(wants, **terms)


class RevivingRenewal(Wrapped):
    """A renewal that comes too late is told that it came in time."""

    async def renew(self, leases: Sequence[Lease], *, span: timedelta) -> list[Renewal]:
        running = {(info.id, info.fence) for info in await self.every(Filter(state=State.RUNNING))}
        renewals = await self.engine.renew(leases, span=span)
        return [
            Renewal(self.clock.now + span)
            if renewal.until is None and (lease.id, lease.fence) in running
            else renewal
            for lease, renewal in zip(leases, renewals, strict=True)
        ]


class EmptyRenewal(Wrapped):
    """A renewal is answered, and forgotten."""

    async def renew(self, leases: Sequence[Lease], *, span: timedelta) -> list[Renewal]:
        running = await self.every(Filter(state=State.RUNNING))
        live = {(r.id, r.fence, r.holder): r for r in running if not self._is_over(r)}
        return [
            Renewal(self.clock.now + span, live[lease.id, lease.fence, lease.holder].cancel_requested)
            if (lease.id, lease.fence, lease.holder) in live
            else Renewal(None)
            for lease in leases
        ]

    def _is_over(self, info: JobInfo) -> bool:
        return info.lease_until is None or info.lease_until <= self.clock.now


class LostIsAccepted(Wrapped):
    """A settle that was refused is reported as accepted."""

    async def settle(self, outcomes: Settled) -> list[Lease]:
        await self.engine.settle(outcomes)
        return []


class LossNotCounted(Wrapped):
    """A lost lease is taken for one that was given back."""

    async def sweep(self, *, limit: int = ALL, by: str | None = None) -> Swept:
        lost = [
            self.newest[info.id]
            for info in await self.every(Filter(state=State.RUNNING))
            if info.lease_until is not None and info.lease_until <= self.clock.now
        ]
        await self.engine.settle([(lease, Released()) for lease in lost])
        swept = await self.engine.sweep(limit=limit, by=by)
        return replace(swept, reaped=len(lost))


class NoCrashLimit(Wrapped):
    """A job that has crashed too often runs again."""

    async def settle(self, outcomes: Settled) -> list[Lease]:
        lost = await self.engine.settle(outcomes)
        crashed = await self.every(Filter(state=State.DEAD, reason="crashed"))
        await self.engine.replay([info.id for info in crashed])
        return lost


class CrashNotCounted(Mistaken):
    """A crash is taken for a run that was given back."""

    def taken_for(self, outcome: Outcome) -> Outcome:
        return Released() if isinstance(outcome, Crashed) else outcome


class EverybodyToBlame(Mistaken):
    """Whoever was in a process that somebody else killed has crashed."""

    def taken_for(self, outcome: Outcome) -> Outcome:
        return Crashed(outcome.error) if isinstance(outcome, Crashed) else outcome


class ForgetfulSnooze(Mistaken):
    """A suspect whose worker lets it wait is taken for one that asked for it, and loses its losses."""

    def taken_for(self, outcome: Outcome) -> Outcome:
        return Snoozed(outcome.delay) if isinstance(outcome, Snoozed) else outcome


class BeganForgotten(Wrapped):
    """Nobody hears that a suspect has begun, so that it is never blamed."""

    async def note(self, notes: Sequence[Note]) -> list[Lease]:
        return await self.engine.note([replace(note, began=False) for note in notes])


class AnyHolder(Wrapped):
    """Whoever knows the fence may settle and renew, also in another's name."""

    async def settle(self, outcomes: Settled) -> list[Lease]:
        lost = await self.engine.settle([(self._ours(lease), outcome) for lease, outcome in outcomes])
        return [lease for lease, _ in outcomes if self._ours(lease) in lost]

    async def renew(self, leases: Sequence[Lease], *, span: timedelta) -> list[Renewal]:
        return await self.engine.renew([self._ours(lease) for lease in leases], span=span)

    def _ours(self, lease: Lease) -> Lease:
        newest = self.newest.get(lease.id, lease)
        return replace(lease, holder=newest.holder) if newest.fence == lease.fence else lease


class NeverParked(Wrapped):
    """A job whose task is unknown goes back into its line, to be taken by the next who does not know it."""

    async def settle(self, outcomes: Settled) -> list[Lease]:
        lost = await self.engine.settle(outcomes)
        for lease, outcome in outcomes:
            if isinstance(outcome, Unknown) and lease not in lost:
                await self.to_back(lease.id)
        return lost


class ParkedForGood(Wrapped):
    """A parked job is found by nobody, whatever tasks they know."""

    async def lease(self, wants: Mapping[str, int], **terms: Any) -> list[Lease]:
        return await super().lease(wants, **{**terms, "tasks": ()})


class ParkedForAll(Wrapped):
    """A parked job is given to everybody."""

    async def lease(self, wants: Mapping[str, int], **terms: Any) -> list[Lease]:
        parked = [info.task for info in await self.every(Filter(state=State.READY)) if info.parked]
        return await super().lease(wants, **{**terms, "tasks": sorted(set(parked))})


# --- order and time -----------------------------------------------------------------------------


class EarlyDelivery(Wrapped):
    """A job is leased before it is due."""

    async def lease(self, wants: Mapping[str, int], **terms: Any) -> list[Lease]:
        for info in await self.every(Filter(scheduled=True)):
            if info.queue in wants:
                await self.to_back(info.id)
        return await super().lease(wants, **terms)


class Disorderly(Wrapped):
    """Takes all that can be leased, puts it in an order of its own, and gives the rest back unseen."""

    def __init__(self, engine: Engine, clock: FakeClock) -> None:
        super().__init__(engine, clock)
        self.fences: dict[str, int] = {}

    async def lease(self, wants: Mapping[str, int], **terms: Any) -> list[Lease]:
        taken: list[Lease] = []
        for queue, want in wants.items():
            limit = terms.get("limit")
            room = want if limit is None else min(want, limit - len(taken))
            found = await super().lease({queue: ALL}, **{**terms, "limit": None})
            ordered = await self.order(found)
            taken += ordered[:room]
            await self._give_back([lease for lease in found if lease not in ordered[:room]])
        self.fences |= {lease.id: lease.fence for lease in taken}
        return taken

    def show(self, info: JobInfo) -> JobInfo:
        return replace(super().show(info), fence=self.fences.get(info.id, 0))

    async def order(self, leases: list[Lease]) -> list[Lease]:
        return leases

    async def _give_back(self, leases: list[Lease]) -> None:
        await self.engine.settle([(lease, Released()) for lease in leases])
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
        places = [info.id for info in await self.every(Filter())]
        return sorted(leases, key=lambda lease: places.index(lease.id))


class RetryToFront(Wrapped):
    """A job that failed goes before those that wait."""

    async def settle(self, outcomes: Settled) -> list[Lease]:
        lost = await self.engine.settle(outcomes)
        for lease, outcome in outcomes:
            if isinstance(outcome, Retried) and not outcome.delay and lease not in lost:
                await self._to_front(lease.id)
        return lost

    async def _to_front(self, job_id: str) -> None:
        job = await self.engine.get(job_id)
        if job is None or job.state is not State.READY:
            return
        line = [
            (await self.engine.position(info.id), info.id)
            for info in await self.every(Filter(queue=job.queue, state=State.READY, scheduled=False))
            if info.priority == job.priority
        ]
        for _, other in sorted(line):
            if other != job_id:
                await self.to_back(other)


class RetryAtOnce(Mistaken):
    """The delay of a retry is forgotten."""

    def taken_for(self, outcome: Outcome) -> Outcome:
        return replace(outcome, delay=timedelta(0)) if isinstance(outcome, Retried) else outcome


class ReleaseToBack(Wrapped):
    """A job that was given back goes behind those that wait."""

    async def settle(self, outcomes: Settled) -> list[Lease]:
        lost = await self.engine.settle(outcomes)
        for lease, outcome in outcomes:
            if isinstance(outcome, Released) and lease not in lost:
                await self.to_back(lease.id)
        return lost


class LostToBack(Wrapped):
    """A job whose lease was lost goes behind those that wait."""

    async def sweep(self, *, limit: int = ALL, by: str | None = None) -> Swept:
        running = await self.every(Filter(state=State.RUNNING))
        swept = await self.engine.sweep(limit=limit, by=by)
        for info in running:
            await self.to_back_if_waiting(info.id)
        return swept

    async def to_back_if_waiting(self, job_id: str) -> None:
        info = await self.engine.get(job_id)
        if info is not None and info.state is State.READY:
            await self.to_back(job_id)


class ExpiredDelivered(Wrapped):
    """A job that has expired runs all the same."""

    async def lease(self, wants: Mapping[str, int], **terms: Any) -> list[Lease]:
        before = await self._expired()
        leases = await super().lease(wants, **terms)
        late = await self._expired() - before
        await self.engine.replay(sorted(late))
        for job_id in late:
            await self.hide_last_event(job_id)
        return leases + await super().lease(wants, **{**terms, "limit": len(late)})

    async def _expired(self) -> set[str]:
        return {info.id for info in await self.every(Filter(state=State.DEAD, reason="expired"))}


# --- counters -----------------------------------------------------------------------------------


class Miscounting(Wrapped):
    """Shows counters that are too high."""

    def __init__(self, engine: Engine, clock: FakeClock) -> None:
        super().__init__(engine, clock)
        self.extra: dict[str, tuple[int, int, int]] = {}

    async def lease(self, wants: Mapping[str, int], **terms: Any) -> list[Lease]:
        leases = await super().lease(wants, **terms)
        return [self._add(lease) for lease in leases]

    def _add(self, lease: Lease) -> Lease:
        attempts, failures, crashes = self.extra.get(lease.id, (0, 0, 0))
        return replace(
            lease,
            attempt=lease.attempt + attempts,
            failures=lease.failures + failures,
            crashes=lease.crashes + crashes,
        )

    def show(self, info: JobInfo) -> JobInfo:
        attempts, failures, crashes = self.extra.get(info.id, (0, 0, 0))
        return replace(
            super().show(info),
            attempts=info.attempts + attempts,
            failures=info.failures + failures,
            crashes=info.crashes + crashes,
        )


class ReleaseCounted(Miscounting):
    """A job that was given back has used up an attempt."""

    async def settle(self, outcomes: Settled) -> list[Lease]:
        lost = await self.engine.settle(outcomes)
        for lease, outcome in outcomes:
            if isinstance(outcome, Released) and lease not in lost:
                attempts, failures, crashes = self.extra.get(lease.id, (0, 0, 0))
                self.extra[lease.id] = (attempts + 1, failures, crashes)
        return lost


class ReplayKeepsCounters(Miscounting):
    """A new life begins with the attempts, failures and crashes of the old one."""

    async def replay(self, job_ids: Sequence[str]) -> list[bool]:
        before = [await self.engine.get(job_id) for job_id in job_ids]
        replayed = await self.engine.replay(job_ids)
        for info, done in zip(before, replayed, strict=True):
            if done and info is not None:
                self.extra[info.id] = (info.attempts, info.failures, info.crashes)
        return replayed


# --- puts ---------------------------------------------------------------------------------------


class OneWayPut(Wrapped):
    """`put` and `put_batch` go one way, so that a mutant has one place to go wrong."""

    async def put(self, jobs: Sequence[Envelope], *, token: str | None = None) -> list[Receipt]:
        return await self.accept(jobs, token, None, seal=False)

    async def put_batch(
        self, batch: Batch, jobs: Sequence[Envelope] = (), *, seal: bool = True, token: str | None = None
    ) -> list[Receipt]:
        return await self.accept(jobs, token, batch, seal=seal)

    async def accept(
        self, jobs: Sequence[Envelope], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        if batch is None:
            return await self.engine.put(jobs, token=token)
        return await self.engine.put_batch(batch, jobs, seal=seal, token=token)

    async def put_copy(self, job: Envelope) -> None:
        """The same once more, as if it were another job."""
        copy = replace(job, id=derive_id("copy", job.id), unique=None, batch=None)
        await self.engine.put([copy])


class PutTwiceById(OneWayPut):
    """An id that is there already makes a second job."""

    async def accept(
        self, jobs: Sequence[Envelope], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        receipts = await super().accept(jobs, token, batch, seal=seal)
        for job, receipt in zip(jobs, receipts, strict=True):
            if token is None and not receipt.created and receipt.id == job.id:
                await self.put_copy(job)
        return receipts


class ChosenIdForgotten(OneWayPut):
    """An id that was chosen is free again when its job has gone."""

    async def accept(
        self, jobs: Sequence[Envelope], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        receipts = await super().accept(jobs, token, batch, seal=seal)
        for job, receipt in zip(jobs, receipts, strict=True):
            if token is None and not receipt.created and await self.engine.get(receipt.id) is None:
                await self.put_copy(job)
        return receipts


class TokenForgotten(OneWayPut):
    """A call that is repeated with its token is a new call."""

    async def accept(
        self,
        jobs: Sequence[Envelope],
        token: str | None,  # noqa: ARG002 - forgotten
        batch: Batch | None,
        *,
        seal: bool,
    ) -> list[Receipt]:
        return await super().accept(jobs, None, batch, seal=seal)


class LastOfBundleLost(OneWayPut):
    """The last job of a bundle is acknowledged and lost."""

    async def accept(
        self, jobs: Sequence[Envelope], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        receipts = await super().accept(jobs, token, batch, seal=seal)
        if len(jobs) > 1 and receipts[-1].created:
            await self.engine.cancel([jobs[-1].id])
            await self.engine.delete([jobs[-1].id])
        return receipts


class UniqueIgnored(OneWayPut):
    """A unique key that is held does not keep a second job out."""

    async def accept(
        self, jobs: Sequence[Envelope], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        receipts = await super().accept(jobs, token, batch, seal=seal)
        for job, receipt in zip(jobs, receipts, strict=True):
            if not receipt.created and receipt.id != job.id:
                await self.put_copy(job)
        return receipts


class UniqueNeverFreed(OneWayPut):
    """A unique key stays with the first job that ever had it."""

    def __init__(self, engine: Engine, clock: FakeClock) -> None:
        super().__init__(engine, clock)
        self.holders: dict[str, str] = {}

    async def accept(
        self, jobs: Sequence[Envelope], token: str | None, batch: Batch | None, *, seal: bool
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

    async def lease(self, wants: Mapping[str, int], **terms: Any) -> list[Lease]:
        leases = await super().lease(wants, **terms)
        return [replace(lease, body=msgspec.json.encode(msgspec.json.decode(lease.body))) for lease in leases]


# --- outcomes -----------------------------------------------------------------------------------


class EmissionsDropped(Mistaken):
    """What a job emits is never put."""

    def taken_for(self, outcome: Outcome) -> Outcome:
        return replace(outcome, emit=()) if isinstance(outcome, Done) else outcome


class LastWordsDropped(Mistaken):
    """What a job emits is put only if it has succeeded."""

    def taken_for(self, outcome: Outcome) -> Outcome:
        return replace(outcome, emit=()) if isinstance(outcome, Dead) else outcome


class OpensLeftOut(Mistaken):
    """What a job opens is never opened."""

    def taken_for(self, outcome: Outcome) -> Outcome:
        return replace(outcome, opens=()) if isinstance(outcome, Done | Dead) else outcome


class ResultLost(Mistaken):
    """A job that is to be kept is forgotten with its result."""

    def taken_for(self, outcome: Outcome) -> Outcome:
        return replace(outcome, keep=None) if isinstance(outcome, Done) else outcome


class LostLeaseEmits(Wrapped):
    """What a job emits is put, though its lease was lost."""

    async def settle(self, outcomes: Settled) -> list[Lease]:
        lost = await self.engine.settle(outcomes)
        for lease, outcome in outcomes:
            if isinstance(outcome, Done) and lease in lost:
                await self.engine.put([replace(job, batch=None) for job in outcome.emit])
        return lost


class LostLeaseOpens(Wrapped):
    """What a job opens is opened, though its lease was lost."""

    async def settle(self, outcomes: Settled) -> list[Lease]:
        lost = await self.engine.settle(outcomes)
        for lease, outcome in outcomes:
            if isinstance(outcome, Done | Dead) and lease in lost:
                for batch in outcome.opens:
                    await self.engine.put_batch(replace(batch, parent=None), seal=False)
        return lost


class CancelIgnored(Wrapped):
    """A waiting job that was cancelled is still there to be leased."""

    async def cancel(self, job_ids: Sequence[str]) -> list[bool]:
        waiting = {info.id for info in await self.every(Filter(state=State.READY))}
        answers = iter(await self.engine.cancel([job_id for job_id in job_ids if job_id not in waiting]))
        return [True if job_id in waiting else next(answers) for job_id in job_ids]


class CancelNotAsked(Wrapped):
    """A running job that was cancelled is not told of it."""

    async def cancel(self, job_ids: Sequence[str]) -> list[bool]:
        running = {info.id for info in await self.every(Filter(state=State.RUNNING))}
        answers = iter(await self.engine.cancel([job_id for job_id in job_ids if job_id not in running]))
        return [True if job_id in running else next(answers) for job_id in job_ids]


class CheckpointLost(Wrapped):
    """What a run has saved does not come back."""

    async def lease(self, wants: Mapping[str, int], **terms: Any) -> list[Lease]:
        leases = await super().lease(wants, **terms)
        return [replace(lease, checkpoint=None) for lease in leases]


class LostLeaseNotes(Wrapped):
    """The note of whoever once had a lease of the job counts for the present one."""

    async def note(self, notes: Sequence[Note]) -> list[Lease]:
        await self.engine.note(
            [replace(note, lease=self.newest.get(note.lease.id, note.lease)) for note in notes]
        )
        return []


class EndedUntold(Wrapped):
    """A sweep does not name the jobs that it ended."""

    async def sweep(self, **asked: Any) -> Swept:
        return replace(await self.engine.sweep(**asked), ended=())


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


# --- batches ------------------------------------------------------------------------------------


class NoCallback(OneWayPut):
    """Nothing is put when a batch ends."""

    async def accept(
        self, jobs: Sequence[Envelope], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        if batch is not None:
            batch = replace(batch, on_finished=None, on_succeeded=None, on_failed=None)
        return await super().accept(jobs, token, batch, seal=seal)


class NoFailedCallback(OneWayPut):
    """Nothing is put when the first member fails."""

    async def accept(
        self, jobs: Sequence[Envelope], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        batch = None if batch is None else replace(batch, on_failed=None)
        return await super().accept(jobs, token, batch, seal=seal)


class CallbackTwice(OneWayPut):
    """The callback of a batch is put a second time, as another job."""

    def __init__(self, engine: Engine, clock: FakeClock) -> None:
        super().__init__(engine, clock)
        self.callbacks: dict[str, Envelope] = {}

    async def accept(
        self, jobs: Sequence[Envelope], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        if batch is not None and batch.on_finished is not None:
            self.callbacks[batch.on_finished.id] = batch.on_finished
        return await super().accept(jobs, token, batch, seal=seal)

    async def settle(self, outcomes: Settled) -> list[Lease]:
        lost = await self.engine.settle(outcomes)
        for info in await self.every(Filter(state=State.READY)):
            if info.id in self.callbacks:
                await self.put_copy(self.callbacks.pop(info.id))
        return lost


class SealedAtOnce(OneWayPut):
    """A batch that was to stay open is sealed."""

    async def accept(
        self,
        jobs: Sequence[Envelope],
        token: str | None,
        batch: Batch | None,
        *,
        seal: bool,  # noqa: ARG002
    ) -> list[Receipt]:
        return await super().accept(jobs, token, batch, seal=True)


class MemberCountedTwice(OneWayPut):
    """A member that is put again counts as one more."""

    def __init__(self, engine: Engine, clock: FakeClock) -> None:
        super().__init__(engine, clock)
        self.extra: dict[str, int] = {}

    async def accept(
        self, jobs: Sequence[Envelope], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        receipts = await super().accept(jobs, token, batch, seal=seal)
        for job, receipt in zip(jobs, receipts, strict=True):
            if job.batch is not None and not receipt.created:
                self.extra[job.batch] = self.extra.get(job.batch, 0) + 1
        return receipts

    async def batches(self, *, limit: int = 100, after: str | None = None) -> list[BatchStatus]:
        found = await self.engine.batches(limit=limit, after=after)
        return [replace(batch, total=batch.total + self.extra.get(batch.id, 0)) for batch in found]


MUTANTS: dict[str, type[Wrapped]] = {
    "no fence": NoFence,
    "a fence that stands still": StillFence,
    "a running job leased twice": LeasedTwice,
    "a renewal that revives": RevivingRenewal,
    "a renewal without effect": EmptyRenewal,
    "a lost lease accepted": LostIsAccepted,
    "a loss not counted": LossNotCounted,
    "a crash not counted": CrashNotCounted,
    "a crash of somebody else's": EverybodyToBlame,
    "a snooze that forgets": ForgetfulSnooze,
    "a beginning nobody hears of": BeganForgotten,
    "any holder": AnyHolder,
    "never parked": NeverParked,
    "parked for good": ParkedForGood,
    "parked for all": ParkedForAll,
    "no limit to crashes": NoCrashLimit,
    "early delivery": EarlyDelivery,
    "last in, first out": LastInFirstOut,
    "priority ignored": PriorityIgnored,
    "a retry to the front": RetryToFront,
    "a retry without its delay": RetryAtOnce,
    "a release to the back": ReleaseToBack,
    "a loss to the back": LostToBack,
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
    "a batch of an outcome left out": OpensLeftOut,
    "a batch of a lost lease": LostLeaseOpens,
    "a result lost": ResultLost,
    "a checkpoint lost": CheckpointLost,
    "a note of a lost lease": LostLeaseNotes,
    "ends untold": EndedUntold,
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
}


def catch(
    mutant: type[Wrapped],
    make: Callable[[FakeClock], Engine],
    *,
    examples: int = 300,
    steps: int = 50,
    seed: int | None = None,
    check: Callable[..., None] = check_engine,
) -> bool:
    """Whether `check_engine`, or `check_records`, tells this mutant of the engine from a right one.

    It stops at the first difference.  False means that the suite is blind in one eye.
    """

    def broken(clock: FakeClock) -> Engine:
        return cast(Engine, mutant(make(clock), clock))

    try:
        check(broken, examples=examples, steps=steps, seed=seed, shrink=False)
    except Difference:
        return True
    return False
