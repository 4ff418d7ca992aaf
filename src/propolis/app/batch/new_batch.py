"""Batches as users write them: many jobs with one end, and a handle on them.

A handle and a writer can nest a batch in theirs, and a batch gives a handle and a writer: that is why these
classes share a module.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Iterable, Iterator
from itertools import chain, islice
from typing import Any, ParamSpec, Unpack

from propolis.app.batch.plan import BatchOptions, BatchPlan, check_batch_is_kept, plan_batch
from propolis.app.batch.stream import BatchStream, Before, stream_all
from propolis.app.client.blocking import blocking, blocking_list
from propolis.app.client.client import Client
from propolis.app.client.puts import MAX_PER_PUT
from propolis.app.client.waiting import wait_until_ended
from propolis.app.operate.batches import StoredBatches
from propolis.app.task import Call, Task
from propolis.core import wire
from propolis.core.batch import Batch, BatchStatus
from propolis.core.duration import Duration
from propolis.core.envelope import Envelope
from propolis.core.job import Member
from propolis.errors import BadSetting, PropolisError, UnknownBatch

P = ParamSpec("P")

IN_ONE_STEP = 10_000  # members that `await app.batch(...)` puts in one atomic step; more of them in pieces


class NewBatch:
    """A batch that is not there yet: `await` it (or `enqueue()`), or fill it in a `with` block.

    Given with its calls, up to 10,000 members are put in one step with the batch, wholly or not at all.
    More of them, and those of a `with` block, go in pieces of 1,000; whoever dies before the end leaves a
    batch that is not sealed: its members run, it is shown as open, it never calls back, and it is forgotten
    after `open_for`.
    """

    def __init__(
        self,
        client: Client,
        plan: BatchPlan,
        calls: Iterable[Envelope],
        *,
        seal: bool,
        before: Before | None = None,
    ) -> None:
        check_batch_is_kept(plan.batch, client.tasks)
        self._client = client
        self._plan = plan
        self._calls = calls
        self._seal = seal
        self._before = before
        self._writer: AsyncBatchWriter | BatchWriter | None = None
        self._is_put = False

    @property
    def id(self) -> str:
        return self._plan.batch.id

    async def aenqueue(self) -> BatchHandle:
        stream = self._stream()
        members = stream.members(self._calls)
        first = list(islice(members, IN_ONE_STEP + 1))
        if len(first) <= IN_ONE_STEP:
            await stream.finish(first, seal=self._seal)
        else:
            await stream_all(stream, chain(first, members), seal=self._seal)
        self._is_put = True
        return BatchHandle(self._client, self.id)

    enqueue = blocking(aenqueue)

    def _stream(self) -> BatchStream:
        if self._is_put or self._writer is not None:
            raise BadSetting(f"batch {self.id} was put already: call app.batch(…) again for another one")
        return BatchStream(self._client, self._plan, before=self._before)

    def __await__(self) -> Generator[Any, Any, BatchHandle]:
        return self.aenqueue().__await__()

    async def __aenter__(self) -> AsyncBatchWriter:
        writer = self._writer = AsyncBatchWriter(self._client, self._stream())
        try:
            await writer.add_many(self._calls)
        except BaseException:
            await writer.close(whole=False, seal=False)
            raise
        return writer

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert isinstance(self._writer, AsyncBatchWriter)
        await self._writer.close(whole=kind is None, seal=self._seal)

    def __enter__(self) -> BatchWriter:
        writer = self._writer = BatchWriter(self._client, self._stream())
        try:
            writer.add_many(self._calls)
        except BaseException:
            writer.close(whole=False, seal=False)
            raise
        return writer

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert isinstance(self._writer, BatchWriter)
        self._writer.close(whole=kind is None, seal=self._seal)


# --- filling -----------------------------------------------------------------------------


class Added:
    """A member that was added.  Await it where there are many: full pieces are put, and memory stays flat."""

    __slots__ = ("_writer", "id")

    def __init__(self, writer: AsyncBatchWriter, job_id: str) -> None:
        self._writer = writer
        self.id = job_id

    def __await__(self) -> Generator[Any, Any, str]:
        yield from self._writer.make_room().__await__()
        return self.id


class AsyncBatchWriter:
    """An open batch inside `async with`: sealed at the end of the block, unless that raises."""

    def __init__(self, client: Client, stream: BatchStream) -> None:
        self._client = client
        self._stream = stream
        self._waiting: list[Envelope] = []
        self._bodies: list[bytes] = []  # of those
        self._putting = asyncio.Lock()

    @property
    def id(self) -> str:
        return self._stream.batch.id

    @property
    def handle(self) -> BatchHandle:
        return BatchHandle(self._client, self.id)

    def add(self, task: Task[P, Any] | Call[P, Any], *args: P.args, **kwargs: P.kwargs) -> Added:
        """Add one job.  `await b.add(…)` puts what has gathered when that is a piece of 1,000."""
        return self.add_job(task.job(*args, **kwargs))

    def add_job(self, job: Envelope) -> Added:
        self.gather(self.members((job,)))
        return Added(self, job.id)

    async def add_many(self, calls: Iterable[Envelope]) -> None:
        """`await b.add_many(task.many(…))`, in flat memory."""
        left = self.members(calls)
        while self.gather(left):
            await self.make_room()

    def members(self, calls: Iterable[Envelope]) -> Iterator[Envelope]:
        return self._stream.members(calls)

    def gather(self, members: Iterator[Envelope]) -> int:
        """Add as many as make a piece full, or one; gives how many.

        Where one cannot be made or stored, this raises, and all others are in.
        """
        made: list[Envelope] = []
        try:
            made.extend(islice(members, max(1, MAX_PER_PUT - len(self._waiting))))
        finally:
            self._keep(made)
        return len(made)

    def _keep(self, members: list[Envelope]) -> None:
        try:
            self._bodies += wire.encode_all(members)
        except PropolisError:
            if len(members) == 1:
                raise
            self._keep_each(members)
        else:
            self._waiting += members

    def _keep_each(self, members: list[Envelope]) -> None:
        """Also those behind one that is wrong: the iterator will not give them again."""
        wrong: list[PropolisError] = []
        for member in members:
            try:
                self._keep([member])
            except PropolisError as error:
                wrong.append(error)
        if wrong:
            raise wrong[0]

    def batch(
        self, calls: Iterable[Envelope] = (), *, seal: bool = True, **options: Unpack[BatchOptions]
    ) -> NewBatch:
        """A batch inside this one, made like `app.batch(…)`: this one ends after it."""
        plan = plan_batch(options, parent=self.id, member=self._stream.take_number())
        return NewBatch(self._client, plan, calls, seal=seal, before=self.open)

    async def open(self) -> None:
        """Store the batch with what was added so far: others may read its status, and nest batches in it."""
        async with self._putting:
            if not self._stream.opened:
                await self._stream.open(self._piece)

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= MAX_PER_PUT

    async def make_room(self) -> None:
        if self.is_full:
            async with self._putting:
                while self.is_full:
                    await self._stream.put(self._piece())

    async def close(self, *, whole: bool, seal: bool) -> None:
        async with self._putting:
            try:
                if whole:
                    while len(self._waiting) > MAX_PER_PUT:
                        await self._stream.put(self._piece())
                    await self._stream.finish(self._piece(), seal=seal)
            finally:
                await self._stream.abandon()

    def _piece(self) -> wire.Piece:
        """The next piece, which is the stream's from now on."""
        piece = wire.Piece(self._waiting[:MAX_PER_PUT], self._bodies[:MAX_PER_PUT])
        del self._waiting[: len(piece)], self._bodies[: len(piece)]
        return piece


class BatchWriter:
    """The same for `with`; adding puts full pieces by itself."""

    def __init__(self, client: Client, stream: BatchStream) -> None:
        self._client = client
        self._writer = AsyncBatchWriter(client, stream)

    @property
    def id(self) -> str:
        return self._writer.id

    @property
    def handle(self) -> BatchHandle:
        return self._writer.handle

    def add(self, task: Task[P, Any] | Call[P, Any], *args: P.args, **kwargs: P.kwargs) -> str:
        """Add one job; returns its id."""
        return self.add_job(task.job(*args, **kwargs))

    def add_job(self, job: Envelope) -> str:
        added = self._writer.add_job(job)
        self._make_room()
        return added.id

    def _make_room(self) -> None:
        if self._writer.is_full:
            self._client.wait(self._writer.make_room())

    def add_many(self, calls: Iterable[Envelope]) -> None:
        left = self._writer.members(calls)
        while self._writer.gather(left):
            self._make_room()

    def batch(
        self, calls: Iterable[Envelope] = (), *, seal: bool = True, **options: Unpack[BatchOptions]
    ) -> NewBatch:
        """A batch inside this one, made like `app.batch(…)`: this one ends after it."""
        return self._writer.batch(calls, seal=seal, **options)

    def open(self) -> None:
        self._client.wait(self._writer.open())

    def close(self, *, whole: bool, seal: bool) -> None:
        self._client.wait(self._writer.close(whole=whole, seal=seal))


# --- a batch that is stored --------------------------------------------------------------


class BatchHandle:
    """A batch by its id.  Every verb also for asynchronous code, with an `a`."""

    def __init__(self, client: Client, batch_id: str) -> None:
        self._client = client
        self._batches = StoredBatches(client)
        self.id = batch_id

    def __repr__(self) -> str:
        return f"<BatchHandle {self.id}>"

    async def astatus(self) -> BatchStatus | None:
        """How far it is; None if it was deleted or its time is over."""
        return await self._batches.aget(self.id)

    async def aids(self) -> dict[str, list[str]]:
        """The ids of its members, by what they are: enqueued, retrying, running, done, dead, cancelled."""
        return await self._batches.aids(self.id)

    def amembers(self) -> AsyncIterator[Member]:
        """Its members in the order of their numbers, with the results of those that left one."""
        return self._batches.amembers(self.id)

    async def aadd(self, calls: Iterable[Envelope]) -> None:
        """More members: `await handle.aadd(task.many(…))`.  `BatchSealed` if that has been done."""
        status = await self.astatus()
        if status is None:
            raise UnknownBatch(self.id)
        stream = BatchStream(
            self._client, BatchPlan(batch=Batch(id=self.id)), number=status.total, opened=True
        )
        await stream_all(stream, stream.members(calls), seal=False)

    async def aseal(self) -> bool:
        """No more members will come: it may end.  False if it is sealed already."""
        return await self._batches.aseal(self.id)

    async def afinished(self, timeout: Duration | None = None) -> BatchStatus:
        """Wait for its end.  `TimeoutError`; `UnknownBatch` if it is not kept, or was deleted."""
        return await wait_until_ended(self._ended, timeout, f"batch {self.id}")

    async def _ended(self) -> BatchStatus | None:
        status = await self.astatus()
        if status is None:
            raise UnknownBatch(self.id)
        return None if status.finished_at is None else status

    async def acancel(self) -> int:
        """End the members that wait and ask those that run to stop; returns how many.  It does call back."""
        return await self._batches.acancel(self.id)

    async def areplay(self) -> int:
        """Give the dead members another life, outside of what the batch counts; returns how many."""
        return await self._batches.areplay(self.id)

    async def adelete(self) -> bool:
        """Forget it with the members that wait; those that run finish; no callback.  False: unknown."""
        return await self._batches.adelete(self.id)

    def batch(
        self, calls: Iterable[Envelope] = (), *, seal: bool = True, **options: Unpack[BatchOptions]
    ) -> NewBatch:
        """A batch inside this one, which must still be open."""
        return NewBatch(self._client, plan_batch(options, parent=self.id), calls, seal=seal)

    status = blocking(astatus)
    ids = blocking(aids)
    members = blocking_list(amembers)
    add = blocking(aadd)
    seal = blocking(aseal)
    finished = blocking(afinished)
    cancel = blocking(acancel)
    replay = blocking(areplay)
    delete = blocking(adelete)
