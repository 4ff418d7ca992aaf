"""How a batch ended, as its callback sees it."""

from __future__ import annotations

from typing import Self, TypeVar

from propolis.app.batch.new_batch import BatchHandle
from propolis.app.batch.plan import ReadsBatch
from propolis.app.client.blocking import blocking
from propolis.app.client.client import Client
from propolis.app.context import Job
from propolis.app.signature import decoder_for
from propolis.core.batch import BATCH_HEADER, BatchState, BatchStatus
from propolis.errors import BadSetting, UnknownBatch

T = TypeVar("T")


class BatchReport(ReadsBatch):
    """How a batch ended, for a parameter of its callback annotated with this.

    It is read when the callback starts, so the batch must be kept until then.
    """

    __slots__ = ("batch", "status")

    def __init__(self, batch: BatchHandle, status: BatchStatus) -> None:
        self.batch = batch
        self.status = status

    @classmethod
    async def given(cls, job: Job) -> Self:
        batch_id = job.headers.get(BATCH_HEADER)
        if batch_id is None:
            raise BadSetting(f"{job.task} asks for a BatchReport, and job {job.id} is no callback of a batch")
        handle = BatchHandle(job.app.client, batch_id)
        status = await handle.astatus()
        if status is None:
            raise UnknownBatch(batch_id)
        return cls(handle, status)

    def __repr__(self) -> str:
        return f"<BatchReport {self.id}: {self.state.value}, {self.done} of {self.total} done>"

    @property
    def id(self) -> str:
        return self.status.id

    @property
    def state(self) -> BatchState:
        return self.status.state

    @property
    def total(self) -> int:
        return self.status.total

    @property
    def done(self) -> int:
        return self.status.done

    @property
    def dead(self) -> int:
        return self.status.dead

    @property
    def cancelled(self) -> int:
        return self.status.cancelled

    async def aresults(self, kind: type[T]) -> list[T]:
        """What the members returned, in their order, of those that are done and kept it (`result_ttl=`)."""
        decoder = decoder_for(kind)
        members = self.batch.amembers()
        return [decoder.decode(member.result) async for member in members if member.result is not None]

    results = blocking(aresults)

    @property
    def _client(self) -> Client:
        return self.batch._client
