"""What is kept of each job, queue and batch."""

from __future__ import annotations

import heapq
from collections import deque

from msgspec import field

from propolis.core.job import Member
from propolis.engines.shared.book.entries import Entry, HeldBatch

PROMOTED_AT_ONCE = 1000


class MemoryEntry(Entry):
    """`ticket` is its place in line: an old ticket is void."""

    ticket: int = 0


class WaitingLines:
    """The waiting jobs of one queue: a line per priority, and those that are not yet due."""

    def __init__(self) -> None:
        self.lines: dict[int, deque[tuple[int, MemoryEntry]]] = {}
        self.priorities: list[int] = []
        self.scheduled: list[tuple[int, int, int, MemoryEntry]] = []
        self.put = 0
        self.deleted = 0

    def line(self, priority: int) -> deque[tuple[int, MemoryEntry]]:
        line = self.lines.get(priority)
        if line is None:
            line = self.lines[priority] = deque()
            self.priorities = sorted(self.lines, reverse=True)
        return line

    def stand(self, entry: MemoryEntry, *, front: bool = False) -> None:
        entry.ticket += 1
        line = self.line(entry.job.priority)
        if front:
            line.appendleft((entry.ticket, entry))
        else:
            line.append((entry.ticket, entry))

    def schedule(self, entry: MemoryEntry) -> None:
        entry.ticket += 1
        heapq.heappush(self.scheduled, (entry.due_us, entry.seq, entry.ticket, entry))

    def promote(self, now_us: int, most: int = PROMOTED_AT_ONCE) -> int:
        """Move what has become due to the back of its line."""
        promoted = 0
        while promoted < most and self.scheduled and self.scheduled[0][0] <= now_us:
            _, _, ticket, entry = heapq.heappop(self.scheduled)
            if entry.ticket == ticket:
                self.stand(entry)
                promoted += 1
        return promoted

    def line_at(self, now_us: int) -> list[MemoryEntry]:
        """The jobs that are due, in the order in which they would be leased; nothing moves."""
        standing = [
            entry for p in self.priorities for ticket, entry in self.lines[p] if entry.ticket == ticket
        ]
        due = sorted(item for item in self.scheduled if item[0] <= now_us and item[3].ticket == item[2])
        return sorted([*standing, *(item[3] for item in due)], key=lambda entry: -entry.job.priority)

    def next_due(self) -> int | None:
        while self.scheduled and self.scheduled[0][3].ticket != self.scheduled[0][2]:
            heapq.heappop(self.scheduled)
        return self.scheduled[0][0] if self.scheduled else None


class MemoryBatch(HeldBatch):
    """With its members by their ids."""

    members: dict[str, Member] = field(default_factory=dict)
