"""The lines in which jobs wait, what runs, and all jobs by their numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from itertools import takewhile

from propolis.engines.shared.book.keeping import Place
from propolis.engines.shared.book.ordered import Ordered
from propolis.engines.shared.book.stored_entries import StoredEntry, StoredQueue

PIECE = 1024  # numbers


def _stands(place: int, entry: StoredEntry) -> bool:
    return entry.place == place and entry.by is None


class QueueLines:
    """The jobs of one queue: all, by their numbers, and those that stand in line, by priority.

    Whoever leaves a line other than at its front leaves its place behind, which is void then.
    """

    def __init__(self, counts: StoredQueue) -> None:
        self.counts = counts
        self.entries: dict[int, StoredEntry] = {}
        self.lines: dict[int, deque[tuple[int, StoredEntry]]] = {}
        self._priorities: list[int] = []

    def add_line(self, priority: int) -> deque[tuple[int, StoredEntry]]:
        line = self.lines[priority] = deque()
        self._priorities = sorted(self.lines, reverse=True)
        return line

    def take(self, want: int) -> Iterator[StoredEntry]:
        for priority in self._priorities:
            line = self.lines[priority]
            while want > 0 and line:
                place, entry = line.popleft()
                if entry.place == place and entry.by is None:
                    want -= 1
                    yield entry

    def first(self, most: int) -> list[StoredEntry]:
        """The first in line."""
        found: list[StoredEntry] = []
        for priority in self._priorities:
            line = self.lines[priority]
            while line and not _stands(*line[0]):
                line.popleft()
            for place, entry in line:
                if _stands(place, entry):
                    found.append(entry)
                    if len(found) == most:
                        return found
        return found

    @property
    def ended(self) -> int:
        return self.counts.done + self.counts.dead + self.counts.cancelled


class Leases:
    """What runs, by the end of its lease.  Those that end at one moment are few: they were leased at one."""

    def __init__(self) -> None:
        self._ends = Ordered[int]()
        self._ending: dict[int, dict[int, StoredEntry]] = {}

    def add(self, entry: StoredEntry) -> None:
        until_us = entry.ends_us = entry.until_us
        ending = self._ending.get(until_us)
        if ending is None:
            ending = self._ending[until_us] = {}
            self._ends.add(until_us)
        ending[entry.seq] = entry

    def remove(self, entry: StoredEntry) -> None:
        ending = self._ending[entry.ends_us]
        del ending[entry.seq]
        if not ending:
            del self._ending[entry.ends_us]
            self._ends.remove(entry.ends_us)

    def last(self) -> StoredEntry | None:
        end = self._ends.last()
        return None if end is None else next(reversed(self._ending[end].values()))

    def next_us(self, now_us: int) -> int | None:
        return next(self._ends.onwards(now_us + 1), None)

    def over(self, now_us: int) -> Iterator[StoredEntry]:
        for end in takewhile(lambda end: end <= now_us, self._ends.onwards(0)):
            yield from self._ending[end].values()

    def after(self, place: Place) -> Iterator[StoredEntry]:
        """By their ends and numbers, from behind this end and number on."""
        for end in self._ends.onwards(place[0]):
            ending = self._ending[end]
            yield from (ending[seq] for seq in sorted(ending) if (end, seq) > place)


class Numbered:
    """All jobs by their numbers, in pieces: the newest one stays, also while it is empty."""

    def __init__(self) -> None:
        self.newest: dict[int, StoredEntry] = {}
        self.end = PIECE  # of the newest one
        self.pieces = {0: self.newest}
        self._order = [0]

    def begin(self, number: int) -> None:
        """A piece, greater than any before."""
        if not self.newest:
            self.drop(self._order[-1])
        self.newest = self.pieces[number] = {}
        self.end = (number + 1) * PIECE
        self._order.append(number)

    def drop(self, number: int) -> None:
        """An empty one."""
        del self.pieces[number], self._order[bisect_left(self._order, number)]

    def onwards(self, first: int) -> Iterator[StoredEntry]:
        for n in range(bisect_left(self._order, first // PIECE), len(self._order)):
            yield from (entry for seq, entry in self.pieces[self._order[n]].items() if seq >= first)
