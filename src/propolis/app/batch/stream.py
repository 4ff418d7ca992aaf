"""Putting the members of a batch piece by piece."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from itertools import islice

from msgspec.structs import replace

from propolis.app.batch.plan import BatchPlan
from propolis.app.client.client import Client
from propolis.app.client.puts import MAX_PER_PUT, Puts, retry_until_answered
from propolis.core.batch import Batch
from propolis.core.envelope import Envelope
from propolis.core.ids import derive_id, new_id
from propolis.core.protocols import Batches
from propolis.errors import EngineClosed

Before = Callable[[], Awaitable[None]]


class BatchStream:
    """Puts members piece by piece, so that any number of them needs the memory of one piece, or of two.

    Each piece has a token, so a piece whose answer was lost is repeated without making second jobs.
    """

    def __init__(
        self,
        client: Client,
        plan: BatchPlan,
        *,
        number: int = 0,
        opened: bool = False,
        before: Before | None = None,
    ) -> None:
        self._client = client
        self._plan = replace(plan, batch=client.stamped_batch(plan.batch))
        self._before = before
        self._stream = plan.batch.id if plan.chosen else new_id()
        self._pieces = 0
        self._puts = Puts[None]()
        self._number = number
        self.opened = opened

    @property
    def batch(self) -> Batch:
        return self._plan.batch

    def members(self, jobs: Iterable[Envelope]) -> Iterator[Envelope]:
        """The jobs as the next members."""
        for job in jobs:
            yield self._plan.member(job, self.take_number())

    def take_number(self) -> int:
        self._number += 1
        return self._number - 1

    async def put(self, jobs: list[Envelope], *, seal: bool = False) -> None:
        """The first piece opens the batch; with `seal` it is also the last, all in one step.

        A piece that could not be put is kept here, and put before the next.
        """
        token = derive_id("batch", self._stream, self._pieces)
        self._pieces += 1
        jobs = self._client.stamped(jobs)
        ahead = self._client.ahead if self.opened else 0
        await self._puts.make(partial(self._put, jobs, seal, token), ahead=ahead)

    async def open(self, first: Callable[[], list[Envelope]]) -> None:
        """Put the first piece.  Where that is kept from an earlier try, no other one is made."""
        await (self._puts.end() if self._puts else self.put(first()))

    async def _put(self, jobs: list[Envelope], seal: bool, token: str) -> None:
        try:
            await self._put_once(jobs, seal, token)
        except EngineClosed:  # the app was closed meanwhile: using it again opens it again
            await self._put_once(jobs, seal, token)

    async def _put_once(self, jobs: list[Envelope], seal: bool, token: str) -> None:
        if not self.opened:
            engine = await self._client.piece(Batches)
            if self._before is not None:
                await self._before()
            await retry_until_answered(lambda: engine.put_batch(self.batch, jobs, seal=seal, token=token))
            self.opened = True
        elif jobs:  # and not put_batch: a batch that was deleted meanwhile must not come back
            core = await self._client.ready()
            await retry_until_answered(lambda: core.put(jobs, token=token))

    async def finish(self, jobs: list[Envelope], *, seal: bool) -> None:
        """Put the last piece, and seal."""
        in_one_step = seal and not self.opened and not self._puts
        await self.put(jobs, seal=in_one_step)
        await self._puts.end()
        if seal and not in_one_step:
            engine = await self._client.piece(Batches)
            await retry_until_answered(lambda: engine.seal(self.batch.id))

    async def abandon(self) -> None:
        await self._puts.stop()


async def stream_all(stream: BatchStream, members: Iterator[Envelope], *, seal: bool) -> None:
    piece: list[Envelope] = []
    try:
        while following := list(islice(members, MAX_PER_PUT)):
            if piece:
                await stream.put(piece)
            piece = following
        await stream.finish(piece, seal=seal)
    finally:
        await stream.abandon()  # what makes the members has failed
