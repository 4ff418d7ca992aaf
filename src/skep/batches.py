"""Batches as users write them: many jobs with one end, and what is to happen then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator
from datetime import datetime
from functools import partial
from itertools import chain, islice
from typing import Any, ParamSpec, Protocol, Self, TypedDict, TypeVar, Unpack

from msgspec import Struct
from msgspec.structs import replace

from skep import wire
from skep.batch import BATCH_HEADER, Batch, BatchState, BatchStatus, Member, callback_id
from skep.context import Job as RunningJob
from skep.duration import Duration, milliseconds
from skep.errors import BadSetting, EngineClosed, SkepError, UnknownBatch
from skep.handle import FIRST_LOOK, LAST_LOOK, seconds_to_wait
from skep.job import Job, derive_id, new_id
from skep.operations import Batches
from skep.producer import MOST_PER_PUT, Producer, Puts, surely
from skep.signature import Provided, decoder_for
from skep.task import Call, Task

P = ParamSpec("P")
T = TypeVar("T")

IN_ONE_STEP = 10_000  # members that `await app.batch(...)` puts in one atomic step; more of them in pieces


class MakesJob(Protocol):
    """A task that needs no arguments, or one with its circumstances: `task.using(queue="slow")`."""

    def job(self) -> Job: ...


Callback = MakesJob | Job
Before = Callable[[], Awaitable[None]]


class Said(TypedDict, total=False):
    """What may be said of a nested batch, as of any other."""

    callback: Callback | None
    on_succeeded: Callback | None
    on_failed: Callback | None
    linger: Duration
    open_for: Duration
    delay: Duration | None
    at: datetime | None
    note: str
    batch_id: str | None


class Plan(Struct, frozen=True, kw_only=True):
    """A batch to be opened, and what is said of all its members."""

    batch: Batch
    chosen: bool = False
    fields: dict[str, Any] = {}

    def member(self, job: Job, number: int) -> Job:
        """The job as a member; what it says of its own time stands."""
        if not isinstance(job, Job):
            raise TypeError(f"a batch has jobs, and {job!r} is none: write task.job(…), or task.many(…)")
        if not self.fields or job.delay_ms or job.due_at is not None:
            return replace(job, batch=self.batch.id, member=number)
        return replace(job, batch=self.batch.id, member=number, **self.fields)


def plan_batch(
    *,
    callback: Callback | None = None,
    on_succeeded: Callback | None = None,
    on_failed: Callback | None = None,
    linger: Duration = "7d",
    open_for: Duration = "1d",
    delay: Duration | None = None,
    at: datetime | None = None,
    note: str = "",
    batch_id: str | None = None,
    parent: str | None = None,
    member: int = 0,
) -> Plan:
    """Everything that can be wrong with a batch is wrong here, before anything is stored."""
    if delay is not None and at is not None:
        raise BadSetting("give a delay or a time, not both")
    found_id = new_id() if batch_id is None else batch_id
    batch = Batch(
        id=found_id,
        on_finished=callback_job(callback, found_id, "finished"),
        on_succeeded=callback_job(on_succeeded, found_id, "succeeded"),
        on_failed=callback_job(on_failed, found_id, "failed"),
        linger_ms=milliseconds(linger),
        open_for_ms=milliseconds(open_for),
        parent=parent,
        member=member,
        note=note,
    )
    fields: dict[str, Any] = {}
    if delay is not None:
        fields["delay_ms"] = milliseconds(delay)
    if at is not None:
        fields["due_at"] = at
    plan = Plan(batch=batch, chosen=batch_id is not None, fields=fields)
    wire.check(plan.member(Job(id="x", task="x"), 0))  # the batch's own name among others
    return plan


def callback_job(callback: Callback | None, batch: str, when: str) -> Job | None:
    """The job to put then: its id follows from the batch, so a second one is never put."""
    if callback is None:
        return None
    if not isinstance(callback, Job | Task | Call):
        raise TypeError(f"{callback!r} cannot be called back: give a task, task.using(…) or task.job(…)")
    job = callback if isinstance(callback, Job) else callback.job()
    headers = {**job.headers, BATCH_HEADER: batch}
    made = replace(job, id=callback_id(batch, when), chosen=True, headers=headers)
    wire.encode(made)
    return made


# --- putting -----------------------------------------------------------------------------


class Stream:
    """Puts members piece by piece, so that any number of them needs the memory of one piece, or of two.

    Each piece has a token, so a piece whose answer was lost is repeated without making second jobs.
    """

    def __init__(
        self,
        producer: Producer,
        plan: Plan,
        *,
        number: int = 0,
        opened: bool = False,
        before: Before | None = None,
    ) -> None:
        self._producer = producer
        self._plan = plan
        self._before = before
        self._stream = plan.batch.id if plan.chosen else new_id()
        self._pieces = 0
        self._puts = Puts[None]()
        self._number = number
        self.opened = opened

    @property
    def batch(self) -> Batch:
        return self._plan.batch

    def members(self, jobs: Iterable[Job]) -> Iterator[Job]:
        """The jobs as the next members."""
        for job in jobs:
            yield self._plan.member(job, self.take_number())

    def take_number(self) -> int:
        self._number += 1
        return self._number - 1

    async def put(self, jobs: list[Job], *, seal: bool = False) -> None:
        """The first piece opens the batch; with `seal` it is also the last, all in one step.

        A piece that could not be put is kept here, and put before the next.
        """
        token = derive_id("batch", self._stream, self._pieces)
        self._pieces += 1
        ahead = self._producer.ahead if self.opened else 0
        await self._puts.make(partial(self._put, jobs, seal, token), ahead=ahead)

    async def open(self, first: Callable[[], list[Job]]) -> None:
        """Put the first piece.  Where that is kept from an earlier try, no other one is made."""
        await (self._puts.end() if self._puts else self.put(first()))

    async def _put(self, jobs: list[Job], seal: bool, token: str) -> None:
        try:
            await self._put_once(jobs, seal, token)
        except EngineClosed:  # the app was closed meanwhile: using it again opens it again
            await self._put_once(jobs, seal, token)

    async def _put_once(self, jobs: list[Job], seal: bool, token: str) -> None:
        engine = await self._producer.ready()
        if not self.opened:
            if self._before is not None:
                await self._before()
            await surely(lambda: engine.put_batch(self.batch, jobs, seal=seal, token=token))
            self.opened = True
        elif jobs:  # and not put_batch: a batch that was deleted meanwhile must not come back
            await surely(lambda: engine.put(jobs, token=token))

    async def finish(self, jobs: list[Job], *, seal: bool) -> None:
        """Put the last piece, and seal."""
        in_one_step = seal and not self.opened and not self._puts
        await self.put(jobs, seal=in_one_step)
        await self._puts.end()
        if seal and not in_one_step:
            engine = await self._producer.ready()
            await surely(lambda: engine.seal(self.batch.id))

    async def abandon(self) -> None:
        await self._puts.stop()


class NewBatch:
    """A batch that is not there yet: `await` it (or `enqueue()`), or fill it in a `with` block.

    Given with its calls, up to 10,000 members are put in one step with the batch, wholly or not at all.
    More of them, and those of a `with` block, go in pieces of 1,000; whoever dies before the end leaves a
    batch that is not sealed: its members run, it is shown as open, it never calls back, and it is forgotten
    after `open_for`.
    """

    def __init__(
        self,
        producer: Producer,
        plan: Plan,
        calls: Iterable[Job],
        *,
        seal: bool,
        before: Before | None = None,
    ) -> None:
        self._producer = producer
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
            await _stream_all(stream, chain(first, members), seal=self._seal)
        self._is_put = True
        return BatchHandle(self._producer, self.id)

    def enqueue(self) -> BatchHandle:
        return self._producer.wait(self.aenqueue())

    def _stream(self) -> Stream:
        if self._is_put or self._writer is not None:
            raise BadSetting(f"batch {self.id} was put already: call app.batch(…) again for another one")
        return Stream(self._producer, self._plan, before=self._before)

    def __await__(self) -> Generator[Any, Any, BatchHandle]:
        return self.aenqueue().__await__()

    async def __aenter__(self) -> AsyncBatchWriter:
        writer = self._writer = AsyncBatchWriter(self._producer, self._stream())
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
        writer = self._writer = BatchWriter(self._producer, self._stream())
        try:
            writer.add_many(self._calls)
        except BaseException:
            writer.close(whole=False, seal=False)
            raise
        return writer

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert isinstance(self._writer, BatchWriter)
        self._writer.close(whole=kind is None, seal=self._seal)


async def _stream_all(stream: Stream, members: Iterator[Job], *, seal: bool) -> None:
    piece: list[Job] = []
    try:
        while following := list(islice(members, MOST_PER_PUT)):
            if piece:
                await stream.put(piece)
            piece = following
        await stream.finish(piece, seal=seal)
    finally:
        await stream.abandon()  # what makes the members has failed


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

    def __init__(self, producer: Producer, stream: Stream) -> None:
        self._producer = producer
        self._stream = stream
        self._waiting: list[Job] = []
        self._bodies: list[bytes] = []  # of those
        self._putting = asyncio.Lock()

    @property
    def id(self) -> str:
        return self._stream.batch.id

    @property
    def handle(self) -> BatchHandle:
        return BatchHandle(self._producer, self.id)

    def add(self, task: Task[P, Any] | Call[P, Any], *args: P.args, **kwargs: P.kwargs) -> Added:
        """Add one job.  `await b.add(…)` puts what has gathered when that is a piece of 1,000."""
        return self.add_job(task.job(*args, **kwargs))

    def add_job(self, job: Job) -> Added:
        self.gather(self.members((job,)))
        return Added(self, job.id)

    async def add_many(self, calls: Iterable[Job]) -> None:
        """`await b.add_many(task.many(…))`, in flat memory."""
        left = self.members(calls)
        while self.gather(left):
            await self.make_room()

    def members(self, calls: Iterable[Job]) -> Iterator[Job]:
        return self._stream.members(calls)

    def gather(self, members: Iterator[Job]) -> int:
        """Add as many as make a piece full, or one; gives how many.

        Where one cannot be made or stored, this raises, and all others are in.
        """
        made: list[Job] = []
        try:
            made.extend(islice(members, max(1, MOST_PER_PUT - len(self._waiting))))
        finally:
            self._keep(made)
        return len(made)

    def _keep(self, members: list[Job]) -> None:
        try:
            self._bodies += wire.encode_all(members)
        except SkepError:
            if len(members) == 1:
                raise
            self._keep_each(members)
        else:
            self._waiting += members

    def _keep_each(self, members: list[Job]) -> None:
        """Also those behind one that is wrong: the iterator will not give them again."""
        wrong: list[SkepError] = []
        for member in members:
            try:
                self._keep([member])
            except SkepError as error:
                wrong.append(error)
        if wrong:
            raise wrong[0]

    def batch(self, calls: Iterable[Job] = (), *, seal: bool = True, **said: Unpack[Said]) -> NewBatch:
        """A batch inside this one, made like `app.batch(…)`: this one ends after it."""
        plan = plan_batch(**said, parent=self.id, member=self._stream.take_number())
        return NewBatch(self._producer, plan, calls, seal=seal, before=self.open)

    async def open(self) -> None:
        """Have the batch there, with what was added so far: others may look at it, and be nested in it."""
        async with self._putting:
            if not self._stream.opened:
                await self._stream.open(self._piece)

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= MOST_PER_PUT

    async def make_room(self) -> None:
        if self.is_full:
            async with self._putting:
                while self.is_full:
                    await self._stream.put(self._piece())

    async def close(self, *, whole: bool, seal: bool) -> None:
        async with self._putting:
            try:
                if whole:
                    while len(self._waiting) > MOST_PER_PUT:
                        await self._stream.put(self._piece())
                    await self._stream.finish(self._piece(), seal=seal)
            finally:
                await self._stream.abandon()

    def _piece(self) -> wire.Piece:
        """The next piece, which is the stream's from now on."""
        piece = wire.Piece(self._waiting[:MOST_PER_PUT], self._bodies[:MOST_PER_PUT])
        del self._waiting[: len(piece)], self._bodies[: len(piece)]
        return piece


class BatchWriter:
    """The same for `with`; adding puts full pieces by itself."""

    def __init__(self, producer: Producer, stream: Stream) -> None:
        self._producer = producer
        self._writer = AsyncBatchWriter(producer, stream)

    @property
    def id(self) -> str:
        return self._writer.id

    @property
    def handle(self) -> BatchHandle:
        return self._writer.handle

    def add(self, task: Task[P, Any] | Call[P, Any], *args: P.args, **kwargs: P.kwargs) -> str:
        """Add one job; returns its id."""
        return self.add_job(task.job(*args, **kwargs))

    def add_job(self, job: Job) -> str:
        added = self._writer.add_job(job)
        self._make_room()
        return added.id

    def _make_room(self) -> None:
        if self._writer.is_full:
            self._producer.wait(self._writer.make_room())

    def add_many(self, calls: Iterable[Job]) -> None:
        left = self._writer.members(calls)
        while self._writer.gather(left):
            self._make_room()

    def batch(self, calls: Iterable[Job] = (), *, seal: bool = True, **said: Unpack[Said]) -> NewBatch:
        """A batch inside this one, made like `app.batch(…)`: this one ends after it."""
        return self._writer.batch(calls, seal=seal, **said)

    def open(self) -> None:
        self._producer.wait(self._writer.open())

    def close(self, *, whole: bool, seal: bool) -> None:
        self._producer.wait(self._writer.close(whole=whole, seal=seal))


# --- looking -----------------------------------------------------------------------------


class BatchHandle:
    """A batch by its id.  Every verb also for asynchronous code, with an `a`."""

    def __init__(self, producer: Producer, batch_id: str) -> None:
        self._producer = producer
        self._batches = Batches(producer)
        self.id = batch_id

    def __repr__(self) -> str:
        return f"<BatchHandle {self.id}>"

    async def astatus(self) -> BatchStatus | None:
        """How far it is; None if it was deleted or its linger time is over."""
        return await self._batches.aget(self.id)

    async def aids(self) -> dict[str, list[str]]:
        """The ids of its members, by what they are: enqueued, retrying, running, done, dead, cancelled."""
        return await self._batches.aids(self.id)

    def amembers(self) -> AsyncIterator[Member]:
        """Its members in the order of their numbers, with the results of those that left one."""
        return self._batches.amembers(self.id)

    async def aadd(self, calls: Iterable[Job]) -> None:
        """More members: `await handle.aadd(task.many(…))`.  `BatchSealed` if that has been done."""
        status = await self.astatus()
        if status is None:
            raise UnknownBatch(self.id)
        stream = Stream(self._producer, Plan(batch=Batch(id=self.id)), number=status.total, opened=True)
        await _stream_all(stream, stream.members(calls), seal=False)

    async def aseal(self) -> bool:
        """No more members will come: it may end.  False if it is sealed already."""
        return await self._batches.aseal(self.id)

    async def afinished(self, timeout: Duration | None = None) -> BatchStatus:
        """Wait for its end.  `TimeoutError`; `UnknownBatch` if it does not linger, or was deleted."""
        seconds = seconds_to_wait(timeout)
        try:
            async with asyncio.timeout(seconds):
                return await self._ended()
        except TimeoutError:
            raise TimeoutError(f"batch {self.id} has not ended within {timeout}") from None

    async def _ended(self) -> BatchStatus:
        pause = FIRST_LOOK
        while True:
            status = await self.astatus()
            if status is None:
                raise UnknownBatch(self.id)
            if status.finished_at is not None:
                return status
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, LAST_LOOK)

    async def acancel(self) -> int:
        """End the members that wait and ask those that run to stop; returns how many.  It does call back."""
        return await self._batches.acancel(self.id)

    async def areplay(self) -> int:
        """Give the dead members another life, outside of what the batch counts; returns how many."""
        return await self._batches.areplay(self.id)

    async def adelete(self) -> bool:
        """Forget it with the members that wait; those that run finish; no callback.  False: unknown."""
        return await self._batches.adelete(self.id)

    def batch(self, calls: Iterable[Job] = (), *, seal: bool = True, **said: Unpack[Said]) -> NewBatch:
        """A batch inside this one, which must still be open."""
        return NewBatch(self._producer, plan_batch(**said, parent=self.id), calls, seal=seal)

    def status(self) -> BatchStatus | None:
        return self._producer.wait(self.astatus())

    def ids(self) -> dict[str, list[str]]:
        return self._producer.wait(self.aids())

    def members(self) -> list[Member]:
        return self._batches.members(self.id)

    def add(self, calls: Iterable[Job]) -> None:
        self._producer.wait(self.aadd(calls))

    def seal(self) -> bool:
        return self._producer.wait(self.aseal())

    def finished(self, timeout: Duration | None = None) -> BatchStatus:
        return self._producer.wait(self.afinished(timeout))

    def cancel(self) -> int:
        return self._producer.wait(self.acancel())

    def replay(self) -> int:
        return self._producer.wait(self.areplay())

    def delete(self) -> bool:
        return self._producer.wait(self.adelete())


class BatchReport(Provided):
    """How a batch ended, for a parameter of its callback annotated with this.

    It is read when the callback starts, so the batch must linger until then.
    """

    __slots__ = ("batch", "status")

    def __init__(self, batch: BatchHandle, status: BatchStatus) -> None:
        self.batch = batch
        self.status = status

    @classmethod
    async def given(cls, job: RunningJob) -> Self:
        batch_id = job.headers.get(BATCH_HEADER)
        if batch_id is None:
            raise BadSetting(f"{job.task} asks for a BatchReport, and job {job.id} is no callback of a batch")
        handle = BatchHandle(job.app, batch_id)
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

    def results(self, kind: type[T]) -> list[T]:
        return self.batch._producer.wait(self.aresults(kind))
