"""Records: small named values with versions, changed by compare-and-swap together with puts.

Whatever is neither a job nor a rule that leasing must obey is a record: schedules, workers, breakers,
cursors.  So a new ability needs no new verb of any engine.

And feeds: bounded logs that somebody may follow, such as events, live lines of jobs, streamed results.  A
feed is never the truth about a job: what is published under pressure is dropped, and what is old is
forgotten.  But whoever follows one hears of each entry once, in one order, or that some are missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from enum import Enum, StrEnum
from typing import Final, Literal, NamedTuple, TypedDict

from msgspec import Struct

from propolis.core.batch import Batch
from propolis.core.duration import LONGEST
from propolis.core.envelope import Envelope
from propolis.core.wire import check_moment
from propolis.errors import BadName, BadSetting, RecordTooLarge

MAX_VALUE = 64 * 1024  # bytes of one value
MAX_CHANGES = 1000  # of one call, and as many puts and batches
MAX_BYTES = 4 * 1024 * 1024  # of one call
MAX_NAME = 400  # characters of a kind or a name
MAX_NUMBER = 1 << 63  # no version, and no number of an entry, is so large


class _Keep(Enum):
    KEEP = "keep"


KEEP: Final = _Keep.KEEP
Keep = Literal[_Keep.KEEP]


class Record(Struct, frozen=True, kw_only=True):
    """A value by its kind and its name.  No version of it comes back, also not after it was removed.

    `at` is when somebody should see to it: a reminder, the value is the truth.  At `expires_at` it is gone.
    """

    kind: str
    name: str
    value: bytes
    version: int
    at: datetime | None = None
    expires_at: datetime | None = None


class Change(Struct, frozen=True, kw_only=True):
    """What becomes of one record: a new value, none (it is removed), or the one that it has (`KEEP`).

    `expected` is the version that it must have: 0 where it must not be there, None where any will do.
    `at` may be a time or a delay from now; `at` and `expires_in` are set anew by each change.
    """

    kind: str
    name: str
    value: bytes | Keep | None
    expected: int | None = None
    at: datetime | timedelta | None = None
    expires_in: timedelta | None = None


class Swap(Struct, frozen=True, kw_only=True):
    """Changes and puts that happen together or not at all (R1).

    A put whose id or unique key is taken adds nothing and does not hinder.  `opens` are batches that are
    opened, unsealed, before the jobs are put.  `bounded=False`: caps on queues do not hold for these puts.
    """

    changes: tuple[Change, ...] = ()
    puts: tuple[Envelope, ...] = ()
    opens: tuple[Batch, ...] = ()
    bounded: bool = True


class Refusal(StrEnum):
    """Why a swap did not happen."""

    VERSION = "version"
    QUEUE_FULL = "queue-full"
    NO_BATCH = "no-batch"
    BUSY = "busy"  # somebody's open transaction holds what it needs


class Swapped(Struct, frozen=True):
    """The version that all records of a swap have now; or why nothing was changed, and what is in the way."""

    version: int | None
    refusal: Refusal | None = None
    name: str = ""


class ReadOptions(TypedDict, total=False):
    """Which records of a kind are read: what `Records.records` takes, for whoever passes it on."""

    names: Sequence[str] | None
    after: str | None
    due: bool
    newest: bool
    limit: int


class Reading(NamedTuple):
    """The same, with what nobody has given."""

    names: Sequence[str] | None = None
    after: str | None = None
    due: bool = False
    newest: bool = False
    limit: int = 1000


class Read(Struct, frozen=True):
    """Some records, the name to go on after (None: that was all), and the engine's time."""

    records: list[Record]
    after: str | None
    now: datetime


def check_swaps(swaps: Sequence[Swap]) -> None:
    """`BadSetting`, `BadName` or `RecordTooLarge` for what no engine stores."""
    changes = [change for swap in swaps for change in swap.changes]
    puts = sum(map(_puts_of, swaps))
    if len(changes) > MAX_CHANGES or puts > MAX_CHANGES:
        raise BadSetting(
            f"{len(changes):,} changes and {puts:,} jobs and batches are too many for one call: make "
            f"several, of at most {MAX_CHANGES:,} each"
        )
    for swap in swaps:
        names = [(change.kind, change.name) for change in swap.changes]
        if len(set(names)) < len(names):
            raise BadSetting("a swap changes each record once: put the second change into a swap of its own")
    for change in changes:
        _check_name("kind", change.kind)
        _check_name("record", change.name)
        _check_numbers(change)
        if isinstance(change.value, bytes) and len(change.value) > MAX_VALUE:
            raise RecordTooLarge("the value of a record", len(change.value), MAX_VALUE)
    if (whole := sum(map(_bytes_of, swaps))) > MAX_BYTES:
        raise RecordTooLarge("one call of swap", whole, MAX_BYTES)


def check_read(kind: str, which: ReadOptions) -> Reading:
    """`BadSetting` or `BadName` for what no engine reads."""
    reading = Reading(**which)
    _check_name("kind", kind)
    for name in (*(reading.names or ()), *((reading.after,) if reading.after else ())):
        _check_name("record", name)
    if reading.limit < 1:
        raise BadSetting(f"limit={reading.limit}: read at least one record")
    return reading


def bundles(swaps: Sequence[Swap]) -> Iterator[list[Swap]]:
    """These swaps in their order, in as few calls as the limits of one allow."""
    bundle: list[Swap] = []
    changes = puts = size = 0
    for swap in swaps:
        changes, puts = changes + len(swap.changes), puts + _puts_of(swap)
        size += _bytes_of(swap)
        if bundle and (max(changes, puts) > MAX_CHANGES or size > MAX_BYTES):
            yield bundle
            bundle, changes, puts, size = [], len(swap.changes), _puts_of(swap), _bytes_of(swap)
        bundle.append(swap)
    if bundle:
        yield bundle


def _puts_of(swap: Swap) -> int:
    return len(swap.puts) + len(swap.opens)


def _bytes_of(swap: Swap) -> int:
    values = sum(len(change.value) for change in swap.changes if isinstance(change.value, bytes))
    called = [
        job for each in swap.opens for job in (each.on_finished, each.on_succeeded, each.on_failed) if job
    ]
    return values + sum(len(job.args) + len(job.kwargs) for job in (*swap.puts, *called))


def _check_numbers(change: Change) -> None:
    """What cannot be read back would stop every read of its kind (L7)."""
    if isinstance(change.at, datetime):
        check_moment(f"record {change.name!r}", change.at)
    for span in (change.at, change.expires_in):
        if isinstance(span, timedelta) and abs(span) > LONGEST:
            raise BadSetting(f"record {change.name!r}: {span} from now is too far: a century is the limit")
    if change.expected is not None and not 0 <= change.expected < MAX_NUMBER:
        raise BadSetting(f"record {change.name!r}: no record ever has the version {change.expected}")


def _check_name(what: str, name: str) -> None:
    if not 0 < len(name) <= MAX_NAME or "\0" in name or not name.isprintable():
        raise BadName(what, name, f"1 to {MAX_NAME} printable characters")


# --- feeds -------------------------------------------------------------------------------

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
    _check_feed(feed)
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
        _check_feed(feed)
    if len(after) > MAX_CHANGES or limit < 1:
        raise BadSetting(f"follow at most {MAX_CHANGES:,} feeds at once, and at least one entry of each")
    if not all(0 <= (number or 0) < MAX_NUMBER for number in after.values()):
        raise BadSetting("follow a feed after the number of one of its entries, or after 0")


def _check_feed(feed: str) -> None:
    if not 0 < len(feed) <= MAX_FEED_NAME or not feed.isprintable():
        raise BadName("feed", feed, f"1 to {MAX_FEED_NAME} printable characters")
