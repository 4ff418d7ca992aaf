"""Mutants of puts: what is added, once, as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from propolis.core.batch import Batch
from propolis.core.envelope import Envelope
from propolis.core.job import (
    Lease,
)
from propolis.core.protocols import (
    Engine,
    Receipt,
)
from propolis.testing.clock import FakeClock
from propolis.testing.engines.mutants.wrapped import OneWayPut, Wrapped


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
