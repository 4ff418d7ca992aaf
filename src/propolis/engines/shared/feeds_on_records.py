"""Feeds for any engine that keeps records.

The head of a feed is a record of the kind `feed`.  What was published together is another one, a *bundle*, of
a kind of the feed's own, named after its last number: so bundles are read in their order.  A bundle knows the
number before it and how much came before it, so that a gap is seen and the ring is measured without counting.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Generator, Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

import msgspec
from msgspec import Struct

from propolis.core.clock import to_us
from propolis.core.protocols import Records
from propolis.core.records import MAX_VALUE, Bounds, Change, FeedEntry, FeedPage, Read, Record, Swap
from propolis.engines.shared.feed_verbs import After, FeedVerbs, Pages

HEADS = "feed"
TRIES = 100  # to be the next, while others publish to the same feed
FORGOTTEN_AT_ONCE = 100  # bundles

_chance = random.Random()  # not the one of the program, which may be seeded or watched


class _Head(Struct, array_like=True):
    last: int
    born: int  # its first number: whoever has read less has read from a feed that was forgotten since
    count: int  # entries since then, and their bytes
    size: int
    gone_count: int = 0  # those that were forgotten, as far as is known
    gone_size: int = 0

    def exceeds(self, bounds: Bounds) -> bool:
        return self.count - self.gone_count > bounds.keep or self.size - self.gone_size > bounds.keep_bytes


class _Bundle(Struct, array_like=True):
    first: int
    values: list[bytes]
    before: int  # the number of the entry before these; 0: there was none
    born: int
    count: int  # of what came before
    size: int

    @property
    def last(self) -> int:
        return self.first + len(self.values) - 1


_packed = msgspec.msgpack.encode
_head = msgspec.msgpack.Decoder(_Head)
_bundle = msgspec.msgpack.Decoder(_Bundle)


class Asked(NamedTuple):
    """What is to be read: the record of a name, or the first ones of a kind."""

    kind: str
    name: str | None
    limit: int


Appending = Generator[Asked, Read, tuple[int, Swap]]


def appending(feed: str, entries: Sequence[bytes], bounds: Bounds) -> Appending:
    """Asks for what it must know; gives the last number, and the swap that stores the entries."""
    read = yield Asked(HEADS, feed, 1)
    found = read.records[0] if read.records else None
    head, bundles = _with(found, to_us(read.now), entries, bounds)
    changes = [_change(feed, bundle, bounds.keep_for) for bundle in bundles]
    if head.exceeds(bounds):
        oldest = yield Asked(_kind(feed), None, min(2 * len(entries) + 2, FORGOTTEN_AT_ONCE))
        changes += _forgotten(head, oldest.records, bounds)
    lasting = bounds.keep_for
    if found is not None and found.expires_at is not None:
        lasting = max(lasting, found.expires_at - read.now)  # it outlives its bundles
    version = 0 if found is None else found.version
    changes.append(Change(kind=HEADS, name=feed, value=_packed(head), expected=version, expires_in=lasting))
    return head.last, Swap(changes=tuple(changes))


async def append(records: Records, feed: str, entries: Sequence[bytes], bounds: Bounds) -> int | None:
    """Where each read and the swap is a step of its own: again, if somebody else was faster."""
    for _ in range(TRIES):
        steps = appending(feed, entries, bounds)
        asked = next(steps)
        try:
            while True:
                names = None if asked.name is None else [asked.name]
                asked = steps.send(await records.records(asked.kind, names=names, limit=asked.limit))
        except StopIteration as end:
            number, swap = end.value
        [answer] = await records.swap([swap])
        if answer.refusal is None:
            return int(number)
        await asyncio.sleep(_chance.uniform(0, 0.005))
    return None


def _with(
    found: Record | None, now_us: int, entries: Sequence[bytes], bounds: Bounds
) -> tuple[_Head, list[_Bundle]]:
    """The head with these entries, and the bundles that they make."""
    head = _Head(0, now_us, 0, 0) if found is None else _head.decode(found.value)
    kept = bounds.trimmed(entries)
    first = max(head.last + 1, now_us) + len(entries) - len(kept)
    before = head.last if len(kept) == len(entries) else first - 1
    bundles = []
    for values in _bundled(kept):
        bundles.append(_Bundle(first, values, before, head.born, head.count, head.size))
        before = bundles[-1].last
        first = before + 1
        head.count += len(values)
        head.size += sum(map(len, values))
    head.last = before
    return head, bundles


def _bundled(entries: Sequence[bytes]) -> Iterator[list[bytes]]:
    """As few as their size allows: one is the value of a record."""
    bundle: list[bytes] = []
    room = 0
    for entry in entries:
        room -= len(entry) + 5
        if room < 0 and bundle:
            yield bundle
            bundle = []
        if not bundle:
            room = MAX_VALUE - 100 - len(entry) - 5
        bundle.append(entry)
    yield bundle


def _forgotten(head: _Head, oldest: Sequence[Record], bounds: Bounds) -> Iterator[Change]:
    """The oldest bundles, as far as there is no room for them."""
    for record in oldest:
        bundle = _bundle.decode(record.value)
        head.gone_count, head.gone_size = bundle.count, bundle.size  # also what has expired by itself
        if not head.exceeds(bounds):
            return
        head.gone_count += len(bundle.values)
        head.gone_size += sum(map(len, bundle.values))
        yield Change(kind=record.kind, name=record.name, value=None)


def _change(feed: str, bundle: _Bundle, lasting: timedelta) -> Change:
    return Change(kind=_kind(feed), name=_name(bundle.last), value=_packed(bundle), expires_in=lasting)


async def pages(records: Records, after: After, limit: int) -> Pages:
    """One call tells of which feeds there is anything new."""
    heads = {record.name: record for record in (await records.records(HEADS, names=list(after))).records}
    found = {}
    for feed, number in after.items():
        if feed not in heads:
            found[feed] = FeedPage([], number or 0)
            continue
        head = _head.decode(heads[feed].value)
        if number is None or head.last <= number:
            found[feed] = FeedPage([], head.last)
        else:
            read = await records.records(_kind(feed), after=_name(number), limit=limit)
            found[feed] = _page(head, [_bundle.decode(each.value) for each in read.records], number, limit)
    return found


def _page(head: _Head, bundles: Sequence[_Bundle], after: int, limit: int) -> FeedPage:
    """Bundles are read after the head: one that is not there any more was forgotten."""
    entries: list[FeedEntry] = []
    gap = not bundles
    for bundle in bundles:
        if len(entries) >= limit:
            break
        gap = gap or bundle.before > after or 0 < after < bundle.born
        for number, value in enumerate(bundle.values, bundle.first):
            if number > after:
                entries.append(FeedEntry(number, value))
        after = bundle.last
    last = max(head.last, entries[-1].number if entries else 0)
    return FeedPage(entries[:limit], last, gap)


def _kind(feed: str) -> str:
    return f"{HEADS}:{feed}"


def _name(number: int) -> str:
    return f"{number:016d}"


class FeedsOnRecords(FeedVerbs):
    """Feeds beside the records of an engine that has none of its own; whoever follows reads now and then."""

    def __init__(self, records: Records) -> None:
        self._records = records

    async def append_entries(self, feed: str, entries: Sequence[bytes], bounds: Bounds) -> int | None:
        return await append(self._records, feed, entries, bounds)

    async def feed_pages(self, after: After, limit: int) -> Pages:
        return await pages(self._records, after, limit)
