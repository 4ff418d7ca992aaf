"""Mutants of outcomes: what follows from the end of a run, from a note and from a cancellation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from propolis.core.job import (
    Dead,
    Done,
    Lease,
    Outcome,
    State,
)
from propolis.core.protocols import (
    Filter,
    Note,
    Swept,
)
from propolis.testing.engines.mutants.wrapped import Mistaken, Settled, Wrapped


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
