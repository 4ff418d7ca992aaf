"""`app.batches`: how far batches are, and what becomes of them."""

from __future__ import annotations

from collections.abc import AsyncIterator

from propolis.app.client.blocking import blocking, blocking_list
from propolis.app.client.client import Client
from propolis.app.operate.jobs import PAGE, Jobs, dead
from propolis.core.batch import BatchStatus
from propolis.core.job import Member, State
from propolis.core.protocols import Batches, Filter, Operates

MEMBER_STATES = ("enqueued", "retrying", "running", "done", "dead", "cancelled")


class StoredBatches:
    """`app.batches`: how far they are, and what becomes of them."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def aget(self, batch: str) -> BatchStatus | None:
        return await (await self._client.piece(Batches)).batch(batch)

    async def afind(self, *, limit: int = 100, after: str | None = None) -> list[BatchStatus]:
        """In the order of their ids, which is that of their making unless these were chosen."""
        return await (await self._client.piece(Batches)).batches(limit=limit, after=after)

    async def amembers(self, batch: str, *, after: int | None = None) -> AsyncIterator[Member]:
        """Every member in the order of the numbers, page by page; with `after`, those behind that number.

        Members that were added by several at once may share a number, so each page begins
        with the last number of the page before.
        """
        engine = await self._client.piece(Batches)
        seen, limit = set[str](), PAGE
        while page := await engine.members(batch, limit=limit, after=after):
            for member in page:
                if member.id not in seen:
                    yield member
            if len(page) < limit:
                return
            last = page[-1].member
            seen = {member.id for member in page if member.member == last}
            if len(seen) == limit:  # a whole page of one number: only a larger one gets beyond it
                limit *= 2
            after = last - 1

    async def aids(self, batch: str) -> dict[str, list[str]]:
        """The ids of the members, by what they are: enqueued, retrying, running, done, dead, cancelled."""
        waiting_jobs = Jobs(self._client).aeach(Filter(batch=batch, state=State.READY))
        again = {info.id async for info in waiting_jobs if info.failures or info.losses or info.crashes}
        ids: dict[str, list[str]] = {name: [] for name in MEMBER_STATES}
        async for member in self.amembers(batch):
            waiting = "retrying" if member.id in again else "enqueued"
            ids[waiting if member.state is State.READY else member.state.value].append(member.id)
        return ids

    async def aseal(self, batch: str) -> bool:
        return await (await self._client.piece(Batches)).seal(batch)

    async def acancel(self, batch: str) -> int:
        """End what waits and ask what runs to stop, also in nested batches; returns how many jobs."""
        engine, operator = await self._client.piece(Batches), await self._client.piece(Operates)
        live = [member.id async for member in self.amembers(batch) if not member.state.terminal]
        changed = 0
        for start in range(0, len(live), PAGE):
            ids = live[start : start + PAGE]
            answers = await operator.cancel(ids)
            changed += sum(answers)
            for member, cancelled in zip(ids, answers, strict=True):
                if not cancelled and await engine.batch(member) is not None:
                    changed += await self.acancel(member)
        return changed

    async def areplay(self, batch: str) -> int:
        """Give the dead members another life, which is in their history and not in the batch's counts."""
        return await Jobs(self._client).areplay_all(dead(batch=batch))

    async def adelete(self, batch: str) -> bool:
        """Forget it with the members that wait; those that run finish; no callback.  False: unknown."""
        return await (await self._client.piece(Batches)).delete_batch(batch)

    get = blocking(aget)
    find = blocking(afind)
    members = blocking_list(amembers)
    ids = blocking(aids)
    seal = blocking(aseal)
    cancel = blocking(acancel)
    replay = blocking(areplay)
    delete = blocking(adelete)
