"""Mutants that count wrongly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from propolis.core.job import (
    JobInfo,
    Lease,
    Released,
)
from propolis.core.protocols import (
    Engine,
)
from propolis.testing.clock import FakeClock
from propolis.testing.engines.mutants.wrapped import Settled, Wrapped


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
