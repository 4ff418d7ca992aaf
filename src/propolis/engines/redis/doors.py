"""What stands at doors, listed: it was pushed by strangers, and nobody has taken it in yet."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Protocol

from propolis.core.job import JobInfo, State
from propolis.core.protocols import Filter, Page
from propolis.engines.redis.codec import seen_at_door

DOORS = 1 << 62  # cursors from here on are places at doors: all others are numbers of puts


class HasDoors(Protocol):
    async def now(self) -> datetime: ...

    def doors(self, only: str | None) -> AsyncIterator[tuple[str, int]]:
        """The queues at whose doors something stands, and how much."""
        ...

    async def pushed(self, queue: str, first: int) -> list[bytes]:
        """A bite of that, without those that come before the `first`."""
        ...


def may_stand_at_doors(where: Filter) -> bool:
    return where.state in (None, State.READY) and where.reason is None and not where.scheduled


async def with_doors(page: Page, engines: Sequence[HasDoors], where: Filter, limit: int) -> Page:
    """What stands at doors comes after the last page of what was taken in."""
    if page.after is not None or not may_stand_at_doors(where):
        return page
    more = await at_doors(engines, where, limit - len(page.jobs), DOORS)
    return Page([*page.jobs, *more.jobs], more.after)


async def at_doors(engines: Sequence[HasDoors], where: Filter, limit: int, after: int) -> Page:
    """From that place on; what is taken in meanwhile moves the others nearer."""
    found: list[JobInfo] = []
    last, passed, now = after, DOORS, await engines[0].now()
    for engine in engines:
        async for queue, n in engine.doors(where.queue):
            at = min(n, after - passed) if after > passed else 0
            while at < n and (bite := await engine.pushed(queue, at)):
                for text in bite:
                    at += 1
                    info = seen_at_door(queue, text, now)
                    if where.task in (None, info.task) and where.batch in (None, info.batch):
                        if len(found) == limit:
                            return Page(found, last)
                        found.append(info)
                        last = passed + at
            passed += n
    return Page(found, None)
