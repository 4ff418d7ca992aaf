"""Feeds in PostgreSQL: a publish is one statement, and so is a look at any number of feeds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import chain, repeat

from propolis.core.clock import span_us
from propolis.core.records import Bounds, FeedEntry, FeedPage
from propolis.engines.postgres.client import PostgresLink
from propolis.engines.postgres.hints import Notifications
from propolis.engines.shared.feed_verbs import POLL, After, FeedVerbs, Hears, Pages, heard_by

FOLLOWED_FOR = timedelta(minutes=1)  # so long those who publish notify, after somebody said to wait
# Seconds until one reads in any case: a publish that was under way when we said so has not notified.
FIRST_READ, READ_EVERY = 1.0, 10.0


class PostgresFeeds(FeedVerbs):
    """The part of the engine that keeps feeds."""

    _link: PostgresLink
    _sql: Mapping[str, str]
    _hints: Notifications

    def _at(self) -> int | None:
        raise NotImplementedError

    async def append_entries(self, feed: str, entries: Sequence[bytes], bounds: Bounds) -> int | None:
        kept = bounds.trimmed(entries)
        passed, keep_us = len(entries) - len(kept), span_us(bounds.keep_for)
        args = (self._at(), feed, kept, passed, bounds.keep, bounds.keep_bytes, keep_us)
        [row] = await self._link.write(self._sql["publish"], *args)
        self._hints.feed_waiters.wake_waiting(feed)
        return int(row[0])

    async def feed_pages(self, after: After, limit: int) -> Pages:
        args = (self._at(), list(after), list(after.values()), limit)
        found = {feed: FeedPage([], number or 0) for feed, number in after.items()}
        seen = set()
        for name, last, gap, number, value in await self._link.read(self._sql["follow"], *args):
            if name not in seen:
                seen.add(name)
                found[name] = FeedPage([], last, gap)
            if number is not None:
                found[name].entries.append(FeedEntry(number, value))
        return found

    @asynccontextmanager
    async def _hearing(self, feeds: Sequence[str]) -> AsyncIterator[Hears]:
        with self._hints.feed_waiters.waiting(feeds) as event:
            heard, looks = heard_by(event), chain([FIRST_READ], repeat(READ_EVERY))
            self._hints.listen((), self._at)
            await self._mark_followed(feeds)

            async def hears(pages: Pages, timeout: float) -> None:
                await heard(pages, min(timeout, next(looks) if self._hints.hears else POLL))
                await self._mark_followed(feeds)

            yield hears

    async def _mark_followed(self, feeds: Sequence[str]) -> None:
        args = (self._at(), list(feeds), span_us(FOLLOWED_FOR))
        await self._link.read(self._sql["mark_followed"], *args)
