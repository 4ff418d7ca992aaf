"""Batches as values: many jobs with one end.  Users make them with what is in `app/batch`."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from msgspec import Struct

from propolis.core.duration import milliseconds
from propolis.core.envelope import Envelope
from propolis.core.ids import derive_id

BATCH_HEADER = "propolis-batch"  # on a callback: the batch that it is called for
CALLBACKS = ("on_finished", "on_succeeded", "on_failed")  # of a `Batch`


class BatchState(StrEnum):
    OPEN = "open"
    IN_PROGRESS = "in-progress"
    SUCCESS = "success"
    DEAD = "dead"
    PARTIAL_SUCCESS = "partial-success"


class Batch(Struct, frozen=True, kw_only=True, omit_defaults=True, repr_omit_defaults=True):
    """What ends when the last of its members ends, and the jobs to put then.

    Each callback is an ordinary job, put exactly once in the step that ends the last member
    (`on_failed`: that buries or cancels the first one).  Give it the id of `callback_id`.
    """

    id: str
    on_finished: Envelope | None = None
    on_succeeded: Envelope | None = None
    on_failed: Envelope | None = None
    keep_for_ms: int = milliseconds("7d")
    open_for_ms: int = milliseconds("1d")
    parent: str | None = None
    member: int = 0
    note: str = ""


class BatchStatus(Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """How far a batch is.  `retrying` are the waiting members that have failed or crashed before."""

    id: str
    state: BatchState
    sealed: bool
    total: int
    enqueued: int
    retrying: int
    running: int
    done: int
    dead: int
    cancelled: int
    created_at: datetime
    finished_at: datetime | None
    keep_until: datetime | None
    parent: str | None = None
    note: str = ""

    @property
    def ended(self) -> int:
        return self.done + self.dead + self.cancelled

    @property
    def pending(self) -> int:
        return self.total - self.ended


def callback_id(batch: str, when: str) -> str:
    """The id of a batch's callback: the same for ever, so that a second put is a no-op."""
    return derive_id("batch", batch, when)


def batch_state(*, sealed: bool, total: int, done: int, dead: int, cancelled: int) -> BatchState:
    """The state of a batch with these counts; cancelled members count as not successful."""
    if not sealed:
        return BatchState.OPEN
    if done + dead + cancelled < total:
        return BatchState.IN_PROGRESS
    if done == total:
        return BatchState.SUCCESS
    return BatchState.PARTIAL_SUCCESS if done else BatchState.DEAD


def callbacks(batch: Batch, state: BatchState, *, first_failure: bool, finished: bool) -> list[Envelope]:
    """The jobs to put when a member has ended, or the batch was sealed, and this is its state now."""
    wanted = [
        batch.on_failed if first_failure else None,
        batch.on_succeeded if finished and state is BatchState.SUCCESS else None,
        batch.on_finished if finished else None,
    ]
    return [job for job in wanted if job is not None]
