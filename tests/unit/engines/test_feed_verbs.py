"""What all engines with feeds do alike."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from propolis.core.records import Bounds
from propolis.engines.shared.feed_verbs import AT_ONCE, FeedVerbs


class Slow(FeedVerbs):
    """Stores nothing before it is let go."""

    def __init__(self) -> None:
        self.stored = 0
        self.let_go = asyncio.Event()

    async def append_entries(self, feed: str, entries: Sequence[bytes], bounds: Bounds) -> int | None:
        await self.let_go.wait()
        self.stored += len(entries)
        return self.stored


async def test_what_is_published_while_too_much_is_under_way_is_dropped_at_once() -> None:
    feeds = Slow()
    publishing = [asyncio.create_task(feeds.publish("f", [b"1"])) for _ in range(AT_ONCE)]
    await asyncio.sleep(0)  # they are under way

    assert await feeds.publish("f", [b"2", b"3"]) is None

    assert feeds.dropped == 2
    feeds.let_go.set()
    assert await asyncio.gather(*publishing) == list(range(1, AT_ONCE + 1))
    assert await feeds.publish("f", [b"4"]) == AT_ONCE + 1
    assert feeds.dropped == 2
