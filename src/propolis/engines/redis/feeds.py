"""Feeds in Redis: of each a hash for its head and a stream with numbers of our own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from propolis.core.clock import span_us
from propolis.core.records import Bounds, FeedEntry, FeedPage
from propolis.engines.redis.client.link import Link
from propolis.engines.shared.feed_verbs import After, FeedVerbs, Hears, Pages

READ_EVERY = 10.0  # seconds after which one reads in any case


class RedisFeeds(FeedVerbs):
    """The part of the engine that keeps feeds."""

    _link: Link
    _prefix: str

    async def _call(self, name: str, *args: bytes | str | int, reads: bool = False) -> Any:
        raise NotImplementedError

    async def append_entries(self, feed: str, entries: Sequence[bytes], bounds: Bounds) -> int | None:
        kept = bounds.trimmed(entries)
        passed, keep_us = len(entries) - len(kept), span_us(bounds.keep_for)
        return int(await self._call("publish", feed, passed, bounds.keep, bounds.keep_bytes, keep_us, *kept))

    async def feed_pages(self, after: After, limit: int) -> Pages:
        args: list[str | int] = []
        for feed, number in after.items():
            args += (feed, "" if number is None else number)
        answers = await self._call("follow", limit, *args, reads=True)
        return {
            feed: _page(answer, number or 0)
            for (feed, number), answer in zip(after.items(), answers, strict=True)
        }

    @asynccontextmanager
    async def _hearing(self, feeds: Sequence[str]) -> AsyncIterator[Hears]:  # noqa: ARG002  # pages have them
        async def hears(pages: Pages, timeout: float) -> None:
            await self.feed_news({feed: page.last for feed, page in pages.items()}, min(timeout, READ_EVERY))

        yield hears

    async def feed_news(self, after: Mapping[str, int], timeout: float) -> None:
        """Until there is an entry after these numbers; often enough also where nothing tells of it."""
        streams = {f"{self._prefix}feed:{feed}".encode(): number for feed, number in after.items()}
        await self._link.wait_for_entries(self._prefix.encode(), streams, timeout)


def _page(answer: Sequence[Any], after: int) -> FeedPage:
    if not answer:
        return FeedPage([], after)
    last, gap, entries = answer
    return FeedPage(
        [FeedEntry(int(number.partition(b"-")[0]), fields[1]) for number, fields in entries],
        int(last),
        bool(gap),
    )


async def first_of(waits: Sequence[Any]) -> None:
    """Until one of them is over; the others are given up."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
