"""Mutants of order and time: who comes first, and when."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from msgspec.structs import replace

from propolis.core.job import (
    JobInfo,
    Lease,
    Outcome,
    Released,
    Retried,
    State,
)
from propolis.core.protocols import (
    Engine,
    Filter,
    Swept,
)
from propolis.core.wire import decode
from propolis.testing.clock import FakeClock
from propolis.testing.engines.mutants.wrapped import ALL, Mistaken, Settled, Wrapped


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
            if info.priority == job.priority and not info.parked
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
