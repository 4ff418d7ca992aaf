"""`app.jobs`: see jobs and change their fate."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from typing import Any

from msgspec.structs import replace

from propolis.app.client.blocking import blocking
from propolis.app.client.client import Client
from propolis.app.operate.explain import explain
from propolis.core.job import JobInfo, State
from propolis.core.protocols import Filter, Inspects, Operates, Page
from propolis.core.wire import check_moment

Verb = Callable[..., Awaitable[list[bool]]]

PAGE = 500
EVERYTHING = Filter()


class Jobs:
    """`app.jobs`: see jobs and change their fate."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def aget(self, job_id: str) -> JobInfo | None:
        return await (await self._client.piece(Inspects)).get(job_id)

    async def afind(self, where: Filter = EVERYTHING, *, limit: int = 100) -> list[JobInfo]:
        """The oldest `limit` jobs that match; any of them where storage has many and no order of them.

        It goes on until it has so many, however far that is.
        """
        found: list[JobInfo] = []
        async for page in self._pages(where, limit):
            found += page.jobs
            if len(found) >= limit:
                break
        return found[:limit]

    async def aeach(self, where: Filter = EVERYTHING) -> AsyncIterator[JobInfo]:
        """Every job that matches, page by page."""
        async for page in self._pages(where, PAGE):
            for info in page.jobs:
                yield info

    async def _pages(self, where: Filter, limit: int) -> AsyncIterator[Page]:
        """A page may be empty though there are more."""
        engine = await self._client.piece(Inspects)
        after: int | None = None
        while True:
            page = await engine.find(where, limit=limit, after=after)
            yield page
            if (after := page.after) is None:
                return

    async def aexplain(self, job_id: str) -> list[str]:
        """Why is this job not running?"""
        return await explain(await self._client.piece(Inspects), job_id, self._client.tasks)

    async def acancel(self, *job_ids: str) -> list[bool]:
        return await (await self._client.piece(Operates)).cancel(job_ids)

    async def areplay(self, *job_ids: str) -> list[bool]:
        """Give dead jobs another life."""
        return await (await self._client.piece(Operates)).replay(job_ids)

    async def areplay_all(
        self, where: Filter, *, limit: int | None = None, ended_before: datetime | None = None
    ) -> int:
        """Replay every dead job that matches, the first `limit` of them if given; returns how many."""
        if where.state is None:
            where = replace(where, state=State.DEAD)  # so that nothing else has to be walked through
        return await self._all(where, self.areplay, limit, ended_before)

    async def adelete(self, *job_ids: str) -> list[bool]:
        return await (await self._client.piece(Operates)).delete(job_ids)

    async def apurge(
        self, where: Filter, *, limit: int | None = None, ended_before: datetime | None = None
    ) -> int:
        """Delete every ended job that matches, the first `limit` of them if given; returns how many."""
        return await self._all(where, self.adelete, limit, ended_before)

    async def areschedule(self, job_id: str, due_at: datetime) -> bool:
        """Make a waiting job due at another time; False if it is not waiting."""
        check_moment(f"job {job_id}", due_at)
        return await (await self._client.piece(Operates)).reschedule(job_id, due_at)

    async def _all(self, where: Filter, verb: Verb, limit: int | None, ended_before: datetime | None) -> int:
        changed = taken = 0
        bundle: list[str] = []
        async for info in self.aeach(where):
            if ended_before is not None and (info.ended_at is None or info.ended_at >= ended_before):
                continue
            if taken == limit:
                break
            bundle.append(info.id)
            taken += 1
            if len(bundle) == PAGE:
                changed += sum(await verb(*bundle))
                bundle = []
        return changed + sum(await verb(*bundle))

    get = blocking(aget)
    find = blocking(afind)
    explain = blocking(aexplain)
    cancel = blocking(acancel)
    replay = blocking(areplay)
    replay_all = blocking(areplay_all)
    delete = blocking(adelete)
    purge = blocking(apurge)
    reschedule = blocking(areschedule)


def dead(**fields: Any) -> Filter:
    """The dead jobs that have these fields."""
    return Filter(state=State.DEAD, **fields)
