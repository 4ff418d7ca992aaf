"""Mutants of batches: their callbacks, their seal, their counts."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from propolis.core.batch import Batch, BatchStatus
from propolis.core.envelope import Envelope
from propolis.core.job import (
    Lease,
    State,
)
from propolis.core.protocols import (
    Engine,
    Filter,
    Receipt,
)
from propolis.testing.clock import FakeClock
from propolis.testing.engines.mutants.wrapped import OneWayPut, Settled


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
