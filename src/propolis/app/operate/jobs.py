"""`app.jobs`: see jobs and change their fate."""

from __future__ import annotations

from collections import Counter
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
LIVE = (State.READY, State.RUNNING)  # what waits first: it cannot begin to run while it is gone through
EVERYTHING = Filter()


class Jobs:
    """`app.jobs`: see jobs and change their fate."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def aget(self, job_id: str) -> JobInfo | None:
        return await (await self._client.piece(Inspects)).get(job_id)

    async def afind(
        self, where: Filter = EVERYTHING, *, key: str | None = None, limit: int = 100
    ) -> list[JobInfo]:
        """The oldest `limit` jobs that match; any of them where storage has many and no order of them.

        It goes on until it has so many, however far that is.  Engines have no index of keys: those of a `key`
        are found among all that match `where`, so name its queue or task if they are known.
        """
        found: list[JobInfo] = []
        async for page in self._pages(where, limit if key is None else PAGE):
            found += _of_key(page.jobs, key)
            if len(found) >= limit:
                break
        return found[:limit]

    async def aeach(self, where: Filter = EVERYTHING, *, key: str | None = None) -> AsyncIterator[JobInfo]:
        """Every job that matches, page by page."""
        async for page in self._pages(where, PAGE):
            for info in _of_key(page.jobs, key):
                yield info

    async def acount(self, where: Filter = EVERYTHING, *, key: str | None = None) -> dict[State, int]:
        """How many jobs match, by their state.  It reads all that match `where`, page by page.

        For whole queues `app.queues.counts()` reads nothing.
        """
        counts = Counter([info.state async for info in self.aeach(where, key=key)])
        return {state: counts[state] for state in State if counts[state]}

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

    async def acancel_all(
        self, where: Filter = EVERYTHING, *, key: str | None = None, limit: int | None = None
    ) -> int:
        """Cancel every job that matches and has not ended, the first `limit` of them if given; how many.

        What waits ends at once, what runs is asked to stop.  They go in bites; of what is put meanwhile some
        may stay: pause the key, the task or the queue first where none is to.
        """
        states = LIVE if where.state is None else (where.state,)
        cancelled = 0
        for state in states:
            left = None if limit is None else limit - cancelled
            cancelled += await self._all(replace(where, state=state), self.acancel, left, None, key)
        return cancelled

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

    async def _all(
        self,
        where: Filter,
        verb: Verb,
        limit: int | None,
        ended_before: datetime | None,
        key: str | None = None,
    ) -> int:
        changed = taken = 0
        bundle: list[str] = []
        async for info in self.aeach(where, key=key):
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
    count = blocking(acount)
    cancel = blocking(acancel)
    cancel_all = blocking(acancel_all)
    replay = blocking(areplay)
    replay_all = blocking(areplay_all)
    delete = blocking(adelete)
    purge = blocking(apurge)
    reschedule = blocking(areschedule)


def _of_key(jobs: list[JobInfo], key: str | None) -> list[JobInfo]:
    return jobs if key is None else [info for info in jobs if info.key == key]


def dead(**fields: Any) -> Filter:
    """The dead jobs that have these fields."""
    return Filter(state=State.DEAD, **fields)
