"""Feeds: bounded logs that somebody may follow, such as events, live lines of jobs, streamed results.

A feed is never the truth about a job: what is published under pressure is dropped, and what is old is
forgotten.  But whoever follows one hears of each entry once, in one order, or that some are missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from msgspec import Struct

from propolis.core.duration import LONGEST
from propolis.core.records import MAX_CHANGES, MAX_NAME, MAX_NUMBER
from propolis.errors import BadName, BadSetting, RecordTooLarge

MAX_ENTRY = 60 * 1024  # bytes of one entry
MAX_PUBLISH = 2 * 1024 * 1024  # bytes of one call
MAX_FEED_NAME = MAX_NAME - 10
KEEP_ENTRIES, KEEP_BYTES, KEEP_FOR = 1000, 1024 * 1024, timedelta(days=1)
MAX_KEEP, MAX_KEEP_BYTES = 100_000, 64 * 1024 * 1024


class Bounds(Struct, frozen=True):
    """How much of a feed is kept: so many entries, so many bytes, so long after somebody last wrote to it.

    The newest entry stays in any case; entries that were published together may be forgotten together.
    """

    keep: int = KEEP_ENTRIES
    keep_bytes: int = KEEP_BYTES
    keep_for: timedelta = KEEP_FOR

    def __post_init__(self) -> None:
        if not (0 < self.keep <= MAX_KEEP and 0 < self.keep_bytes <= MAX_KEEP_BYTES):
            raise BadSetting(
                f"a feed keeps 1 to {MAX_KEEP:,} entries and at most {MAX_KEEP_BYTES:,} bytes, "
                f"not {self.keep:,} and {self.keep_bytes:,}"
            )
        if not timedelta(0) < self.keep_for <= LONGEST:
            raise BadSetting("a feed is kept for a while: give keep_for a positive time, a century at most")

    def trimmed(self, entries: Sequence[bytes]) -> Sequence[bytes]:
        """Those of one call that are stored: its last ones, if it brings more than is kept."""
        first, size = len(entries) - 1, len(entries[-1])
        while first > 0 and len(entries) - first < self.keep:
            size += len(entries[first - 1])
            if size > self.keep_bytes:
                break
            first -= 1
        return entries[first:]


class FeedEntry(Struct, frozen=True):
    number: int
    value: bytes


class FeedPage(Struct, frozen=True):
    """Entries of one feed, oldest first; the number of its last one; whether some before these are missing.

    Of a feed that is not there, `last` is the number that was asked with.
    """

    entries: list[FeedEntry]
    last: int
    gap: bool = False

    @property
    def after(self) -> int:
        """Where to go on."""
        return self.entries[-1].number if self.entries else self.last


def check_publish(feed: str, entries: Sequence[bytes]) -> None:
    """`BadSetting`, `BadName` or `RecordTooLarge` for what no engine publishes."""
    _check_name(feed)
    if len(entries) > MAX_CHANGES:
        raise BadSetting(
            f"{len(entries):,} entries are too many for one call: publish at most {MAX_CHANGES:,}"
        )
    sizes = [len(entry) for entry in entries]
    if max(sizes, default=0) > MAX_ENTRY:
        raise RecordTooLarge("an entry of a feed", max(sizes), MAX_ENTRY)
    if sum(sizes) > MAX_PUBLISH:
        raise RecordTooLarge("one call of publish", sum(sizes), MAX_PUBLISH)


def check_follow(after: Mapping[str, int | None], limit: int) -> None:
    for feed in after:
        _check_name(feed)
    if len(after) > MAX_CHANGES or limit < 1:
        raise BadSetting(f"follow at most {MAX_CHANGES:,} feeds at once, and at least one entry of each")
    if not all(0 <= (number or 0) < MAX_NUMBER for number in after.values()):
        raise BadSetting("follow a feed after the number of one of its entries, or after 0")


def _check_name(feed: str) -> None:
    if not 0 < len(feed) <= MAX_FEED_NAME or not feed.isprintable():
        raise BadName("feed", feed, f"1 to {MAX_FEED_NAME} printable characters")
