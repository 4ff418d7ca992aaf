"""Records in a store: a document each, and marks in the order of their times."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from msgspec import Struct
from msgspec.structs import astuple

from propolis.core.clock import from_us
from propolis.core.records import KEEP, Change, Read, Reading, Record, Refusal, Swap, Swapped
from propolis.engines.shared.book.store import Pages, Table, key, number_in
from propolis.engines.shared.record_rows import moment_us, record_of

_PAST_ALL = 1 << 59
_LOOKS = 1000  # at expired records, on the way to others


class StoredRecord(Struct, omit_defaults=True):
    value: bytes
    version: int
    at_us: int | None = None
    expires_us: int | None = None


class StoredRecords:
    """The records as of one moment.  What is changed is written at once."""

    def __init__(self, table: Table, now_us: int) -> None:
        self._pages = Pages(table)
        self._now_us = now_us

    def refusal(self, swap: Swap) -> Swapped | None:
        """Why the changes cannot be made; None if they can."""
        for change in swap.changes:
            held = self._live(change.kind, change.name)
            version = 0 if held is None else held.version
            if (change.value is KEEP and held is None) or change.expected not in (None, version):
                return Swapped(None, Refusal.VERSION, change.name)
        return None

    def apply(self, swap: Swap) -> int:
        """Make the changes of a swap that was checked; gives their version."""
        version = max((self._pages.get("record-version", int) or 0) + 1, self._now_us)
        self._pages.put("record-version", version)
        for change in swap.changes:
            self._change(change, version)
        self._pages.write()
        return version

    def _change(self, change: Change, version: int) -> None:
        name = key("record", change.kind, change.name)
        old = self._pages.get(name, StoredRecord)
        for mark in _marks(change.kind, change.name, old):
            self._pages.table.delete(mark)
        new = None
        if change.value is not None:
            value = old.value if change.value is KEEP and old is not None else change.value
            assert isinstance(value, bytes)  # `refusal` has seen to it
            at_us, expires_us = (moment_us(at, self._now_us) for at in (change.at, change.expires_in))
            new = StoredRecord(value, version, at_us, expires_us)
        self._pages.put(name, new)
        for mark in _marks(change.kind, change.name, new):
            self._pages.mark(mark, change.name)

    def read(self, kind: str, reading: Reading) -> Read:
        names, after, due, newest, limit = reading
        looks = limit + _LOOKS
        if names is not None:
            chosen = iter(sorted(set(names)))
        elif due:
            chosen = islice(self._due(kind, limit + 1), looks)
        else:
            chosen = islice(self._named(kind, after, newest=newest, bite=limit + 1), looks)
        page: list[Record] = []
        last = None
        for looked, name in enumerate(chosen, 1):
            held = self._live(kind, name)
            if held is not None and names is None and len(page) == limit:
                last = page[-1].name
                break
            if held is not None:
                page.append(record_of(kind, name, *astuple(held)))
            last = name if looked == looks else None
        return Read(page, None if due or names is not None else last, from_us(self._now_us))

    def _named(self, kind: str, after: str | None, *, newest: bool, bite: int) -> Iterator[str]:
        begin = key("record", kind)
        start, end = begin + "\0", begin + "\1"
        if after is not None and newest:
            end = key(begin, after)
        elif after is not None:
            start = key(begin, after) + "\0"
        return self._names(start, end, bite, newest=newest)

    def _due(self, kind: str, bite: int) -> Iterator[str]:
        begin = key("record-at", kind)
        return self._names(begin + "\0", key(begin, self._now_us + 1), bite)

    def _names(self, start: str, end: str, bite: int, *, newest: bool = False) -> Iterator[str]:
        """The last parts of these keys, in their order; a bite is read at once."""
        while found := self._pages.table.range(start, end, bite, backwards=newest):
            yield from (name.rpartition("\0")[2] for name, _ in found)
            if newest:
                end = found[-1][0]
            else:
                start = found[-1][0] + "\0"

    def due_kinds(self) -> tuple[str, ...]:
        return tuple(kind for kind in self._pages.names("record-at") if self._has_due(kind))

    def _has_due(self, kind: str) -> bool:
        return any(self._live(kind, name) is not None for name in islice(self._due(kind, 1), _LOOKS))

    def next_us(self) -> int | None:
        """When the next record becomes due, or is to be forgotten; not those that are due already."""
        times = []
        for kind in self._pages.names("record-at"):
            later = key("record-at", kind, self._now_us + 1)
            found = self._pages.between(later, key("record-at", kind, _PAST_ALL), 1)
            times += [number_in(mark, 2) for mark, _ in found]
        times += [number_in(mark, 1) for mark, _ in self._pages.first(1, "record-end")]
        return min((time for time in times if time > self._now_us), default=None)

    def expire(self, limit: int) -> int:
        """Forget what has expired, a bite of it; gives how many."""
        old = self._pages.until(self._now_us, limit, "record-end")
        for mark, name in old:
            self._change(Change(kind=mark.split("\0")[2], name=name, value=None), 0)
        self._pages.write()
        return len(old)

    def _live(self, kind: str, name: str) -> StoredRecord | None:
        held = self._pages.get(key("record", kind, name), StoredRecord)
        return None if held is None or (held.expires_us or self._now_us + 1) <= self._now_us else held


def _marks(kind: str, name: str, held: StoredRecord | None) -> list[str]:
    if held is None:
        return []
    marks = [] if held.at_us is None else [key("record-at", kind, held.at_us, name)]
    return marks if held.expires_us is None else [*marks, key("record-end", held.expires_us, kind, name)]
