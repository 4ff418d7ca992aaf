"""Mutants of leases: whose they are, how long they last, what a lost one costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from msgspec.structs import replace

from propolis.core.job import (
    Crashed,
    JobInfo,
    Lease,
    Outcome,
    Released,
    Snoozed,
    State,
    Unknown,
)
from propolis.core.protocols import (
    Filter,
    Note,
    Renewal,
    Swept,
)
from propolis.testing.engines.mutants.wrapped import ALL, Mistaken, Settled, Wrapped


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
    """A renewal that comes too late is accepted as if it came in time."""

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
