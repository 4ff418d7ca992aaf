"""What all mutants begin with: they wrap an engine and misbehave through its public verbs alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from propolis.core.batch import Batch
from propolis.core.envelope import Envelope
from propolis.core.ids import derive_id
from propolis.core.job import (
    JobInfo,
    Lease,
    Outcome,
)
from propolis.core.protocols import (
    Engine,
    Exchange,
    Filter,
    Page,
    Receipt,
)
from propolis.testing.clock import FakeClock

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
