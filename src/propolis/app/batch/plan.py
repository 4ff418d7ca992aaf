"""A batch before it is stored: its options, its callbacks, and the place of each member."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Protocol, TypedDict

from msgspec import Struct
from msgspec.structs import replace

from propolis.app.client.client import DeclaredTask
from propolis.app.signature import Provided
from propolis.app.task import Call, Task
from propolis.core import wire
from propolis.core.batch import BATCH_HEADER, CALLBACKS, Batch, callback_id
from propolis.core.duration import Duration, milliseconds
from propolis.core.envelope import Envelope, check_options
from propolis.core.ids import new_id
from propolis.errors import BadCall, BadSetting


class MakesJob(Protocol):
    """A task that needs no arguments, or one with its circumstances: `task.using(queue="slow")`."""

    def job(self) -> Envelope: ...


Callback = MakesJob | Envelope


class BatchOptions(TypedDict, total=False):
    """What a batch takes, nested or not."""

    callback: Callback | None
    on_succeeded: Callback | None
    on_failed: Callback | None
    keep_for: Duration
    open_for: Duration
    delay: Duration | None
    at: datetime | None
    note: str
    batch_id: str | None


class ReadsBatch(Provided):
    """What a callback asks for and what is read from its batch, which must therefore be kept until then."""

    __slots__ = ()


class BatchPlan(Struct, frozen=True, kw_only=True):
    """A batch to be opened, and the fields that all its members share."""

    batch: Batch
    chosen: bool = False
    fields: dict[str, Any] = {}

    def member(self, job: Envelope, number: int) -> Envelope:
        """The job as a member.  A job that has a delay or a time of its own keeps it."""
        if not isinstance(job, Envelope):
            raise BadCall(f"a batch has jobs, and {job!r} is none: write task.job(…), or task.many(…)")
        if not self.fields or job.delay_ms or job.due_at is not None:
            return replace(job, batch=self.batch.id, member=number)
        return replace(job, batch=self.batch.id, member=number, **self.fields)


def plan_batch(options: BatchOptions, *, parent: str | None = None, member: int = 0) -> BatchPlan:
    """Everything that can be wrong with a batch is wrong here, before anything is stored."""
    check_options("batch()", BatchOptions, options)
    delay, at, chosen = options.get("delay"), options.get("at"), options.get("batch_id")
    if delay is not None and at is not None:
        raise BadSetting("give a delay or a time, not both")
    wire.check_utf8("the note of a batch", options.get("note", ""))
    batch_id = new_id() if chosen is None else chosen
    batch = Batch(
        id=batch_id,
        on_finished=callback_job(options.get("callback"), batch_id, "finished"),
        on_succeeded=callback_job(options.get("on_succeeded"), batch_id, "succeeded"),
        on_failed=callback_job(options.get("on_failed"), batch_id, "failed"),
        keep_for_ms=milliseconds(options.get("keep_for", "7d")),
        open_for_ms=milliseconds(options.get("open_for", "1d")),
        parent=parent,
        member=member,
        note=options.get("note", ""),
    )
    fields: dict[str, Any] = {}
    if delay is not None:
        fields["delay_ms"] = milliseconds(delay)
    if at is not None:
        fields["due_at"] = at
    plan = BatchPlan(batch=batch, chosen=chosen is not None, fields=fields)
    wire.check(plan.member(Envelope(id="x", task="x"), 0))  # the batch's own name among others
    return plan


def check_batch_is_kept(batch: Batch, tasks: Mapping[str, DeclaredTask]) -> None:
    """`BadSetting` for a callback that would find nothing of its batch."""
    if batch.keep_for_ms:
        return
    for job in (getattr(batch, name) for name in CALLBACKS):
        if job is not None and job.task in tasks and tasks[job.task].asks_for(ReadsBatch):
            raise BadSetting(
                f"with keep_for=0 the batch is gone before {job.task} can read its BatchReport: keep it for "
                f"a while, or give a callback that does without"
            )


def callback_job(callback: Callback | None, batch: str, when: str) -> Envelope | None:
    """The job to put then: its id follows from the batch, so a second one is never put."""
    if callback is None:
        return None
    if not isinstance(callback, Envelope | Task | Call):
        raise BadCall(f"{callback!r} cannot be called back: give a task, task.using(…) or task.job(…)")
    job = callback if isinstance(callback, Envelope) else job_without_arguments(callback)
    headers = {**job.headers, BATCH_HEADER: batch}
    made = replace(job, id=callback_id(batch, when), chosen=True, headers=headers)
    wire.encode(made)
    return made


def job_without_arguments(callback: Task[..., Any] | Call[..., Any]) -> Envelope:
    try:
        return callback.job()
    except TypeError as error:
        raise BadCall(
            f"{error}: a callback gets only a BatchReport, if a parameter is annotated so; for arguments of "
            f"its own give task.job(…)"
        ) from error
