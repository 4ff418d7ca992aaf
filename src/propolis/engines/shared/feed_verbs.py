"""What engines with feeds do alike: what is dropped, and what is waited for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import timedelta
from typing import Protocol

from propolis.core.records import (
    KEEP_BYTES,
    KEEP_ENTRIES,
    KEEP_FOR,
    Bounds,
    FeedPage,
    check_follow,
    check_publish,
)
from propolis.errors import EngineUnavailable, OutcomeUnknown, StorageBroken, StorageFull

log = logging.getLogger("propolis")

AT_ONCE = 100  # publishes of one engine that are under way: what comes beyond is dropped
WITHIN = 2.0  # seconds that one may take
POLL = 0.5  # seconds between two reads where nothing tells of a new entry

_BUSY = (EngineUnavailable, OutcomeUnknown, StorageFull, StorageBroken, TimeoutError)

After = Mapping[str, int | None]
Pages = dict[str, FeedPage]


class Hears(Protocol):
    """Returns, at the latest after so many seconds, when there may be something after these pages."""

    async def __call__(self, pages: Pages, timeout: float) -> None: ...


class FeedVerbs:
    """`publish` and `follow` of an engine that says how to append and to read.

    `dropped` counts the entries that were dropped, or whose storing was not confirmed, since it was made.
    """

    dropped = 0
    _publishing = 0

    async def publish(
        self,
        feed: str,
        entries: Sequence[bytes],
        *,
        keep: int = KEEP_ENTRIES,
        keep_bytes: int = KEEP_BYTES,
        keep_for: timedelta = KEEP_FOR,
    ) -> int | None:
        bounds = Bounds(keep, keep_bytes, keep_for)
        check_publish(feed, entries)
        if not entries:
            return None
        number = None
        if self._publishing < AT_ONCE:
            self._publishing += 1
            try:
                async with asyncio.timeout(WITHIN):
                    number = await self.append_entries(feed, entries, bounds)
            except _BUSY as error:
                log.debug("what was published to %s is dropped: %s", feed, error)
            finally:
                self._publishing -= 1
        if number is None:
            self.dropped += len(entries)
        return number

    async def follow(self, after: After, *, limit: int = 1000, wait: float = 0.0) -> Pages:
        check_follow(after, limit)
        clock = asyncio.get_running_loop().time
        ends = clock() + wait
        pages = await self.feed_pages(after, limit)
        if wait <= 0 or _answers(after, pages):
            return pages
        async with self._hearing(sorted(after)) as hears:
            while True:  # what came before we heard is found by reading once more
                pages = await self.feed_pages(after, limit)
                left = ends - clock()
                if left <= 0 or _answers(after, pages):
                    return pages
                await hears(pages, left)

    async def append_entries(self, feed: str, entries: Sequence[bytes], bounds: Bounds) -> int | None:
        """The number of the last entry; None if they were dropped."""
        raise NotImplementedError

    async def feed_pages(self, after: After, limit: int) -> Pages:
        raise NotImplementedError

    def _hearing(self, feeds: Sequence[str]) -> AbstractAsyncContextManager[Hears]:  # noqa: ARG002  # for others
        """While it is entered, `Hears` misses nothing that comes to these feeds, or returns often."""
        return _polling()


def _answers(after: After, pages: Pages) -> bool:
    return any(page.entries or page.gap for page in pages.values()) or None in after.values()


@asynccontextmanager
async def _polling() -> AsyncIterator[Hears]:
    async def hears(pages: Pages, timeout: float) -> None:  # noqa: ARG001
        await asyncio.sleep(min(POLL, timeout))

    yield hears


def heard_by(event: asyncio.Event) -> Hears:
    """Where an event is set by each new entry."""

    async def hears(pages: Pages, timeout: float) -> None:  # noqa: ARG001
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await event.wait()
        event.clear()

    return hears
