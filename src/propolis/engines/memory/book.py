"""What the memory engine holds: the book, of which what every job passes through is plain objects.

A job that only waits its turn, or runs, has no marks: it stands in the line of its queue, or among the
leases.  All else (what is due later, expires, is set aside, parked or kept; rules, batches, ids) is as in any
store, in a table of this process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from propolis.core.envelope import Envelope
from propolis.core.job import Lease, State
from propolis.core.protocols import BITE, Counts, Rule, Scope, Swept
from propolis.core.transitions import Retention, due_us, expires_us
from propolis.engines.memory.entries import PIECE, Leases, Numbered, QueueLines
from propolis.engines.shared.book.keeping import Place
from propolis.engines.shared.book.store import HeldTable, LivePages, key
from propolis.engines.shared.book.stored import SCAN, StoreBook
from propolis.engines.shared.book.stored_entries import StoredEntry, StoredQueue, Tally, marks_at_rest
from propolis.engines.shared.from_exchange import ClaimTerms
from propolis.engines.shared.waiters import Waiters

UNCOUNTED = 100
FIRST_PLACE = 1 << 50  # more than any number of a job


class Book(StoreBook):
    """All jobs, queues, batches and rules."""

    def __init__(self, waiters: Waiters, retention: Retention) -> None:
        super().__init__(HeldTable(), 0, retention)
        self.pages = LivePages()
        self.numbers.back = FIRST_PLACE
        self.entries: dict[str, StoredEntry] = {}
        self.lines: dict[str, QueueLines] = {}
        self._numbered = Numbered()
        self._leases = Leases()
        self._running = Counter[tuple[Scope, str]]()
        self._uncounted: dict[int, StoredEntry] = {}  # what runs and is not counted there yet
        self._unique: dict[str, str] = {}
        self._remembers = False  # whether any id or token was ever to be known
        self._waiters = waiters

    def _draw(self, name: str, value: int) -> int:
        if name == "back":
            value += 1  # places are even
        setattr(self.numbers, name, value)
        return value

    # --- jobs ----------------------------------------------------------------------------

    def entry(self, job_id: str) -> StoredEntry | None:
        return self.entries.get(job_id)

    def there(self, job_id: str) -> StoredEntry:
        return self.entries[job_id]

    def used(self, job_id: str) -> bool:
        return job_id in self.entries or (self._remembers and super().used(job_id))

    def create(self, job: Envelope, body: bytes) -> StoredEntry:
        numbers, now_us = self.numbers, self.now_us
        numbers.seq = seq = numbers.seq + 1
        lines = self.lines.get(job.queue) or self._add_queue(job.queue)
        if seq >= self._numbered.end:
            self._numbered.begin(seq // PIECE)
        entry = self._numbered.newest[seq] = lines.entries[seq] = self.entries[job.id] = StoredEntry(
            job, body, seq, job.queue, now_us, due_us(job, now_us), expires_us(job, now_us)
        )
        lines.counts.put += 1
        if job.unique is not None:
            self._unique[job.unique] = job.id
        return entry

    def _add_queue(self, queue: str) -> QueueLines:
        lines = self.lines[queue] = QueueLines(StoredQueue())
        self.pages.put(key("queue", queue), lines.counts)
        return lines

    def place(self, entry: StoredEntry, *, front: bool = False) -> None:
        left_line = self.ruled and self._stood(entry)
        if front or entry.due_us > self.now_us or entry.expires_us is not None:
            super().place(entry, front=front)
        else:
            numbers = self.numbers
            numbers.back = entry.place = place = numbers.back + 2
            entry.by = None
            lines, priority = self.lines[entry.queue], entry.job.priority
            line = lines.lines.get(priority)
            if line is None:
                line = lines.add_line(priority)
            line.append((place, entry))
            if entry.joined or self._stored:
                self._save_unmarked(entry)
        if left_line:
            self.let_next_go(entry)
        self._waiters.wake(entry.queue)

    def save(self, entry: StoredEntry) -> None:
        if entry.state is State.RUNNING:
            self._leases.remove(entry)
            self._leases.add(entry)
            return
        is_set_aside, has_ended = entry.by is not None, entry.state is not State.READY
        left_line = self.ruled and (is_set_aside or has_ended) and self._stood(entry)
        if has_ended:
            entry.place = None
        self._mark(entry, marks_at_rest(entry))
        if left_line:
            self.let_next_go(entry)

    def _save_unmarked(self, entry: StoredEntry) -> None:
        if entry.joined or entry.job.id in self._stored:
            self._mark(entry, set())

    def _stood(self, entry: StoredEntry) -> bool:
        """Did it stand in line, when its marks or its place were last written?"""
        marks, _ = self._stored.get(entry.job.id, (set(), []))
        return any(mark.startswith("line\0") for mark in marks) if marks else entry.place is not None

    def _count(self, tallies: list[Tally], by: int) -> None:
        """What waits its turn or runs is counted without."""
        super()._count([t for t in tallies if t[0] != "running" and t[2] not in ("ready", "running")], by)

    def take(self, queue: str, want: int) -> Iterator[StoredEntry]:
        """Where nothing is kept back, removed or marked, nobody need look twice at what goes."""
        lines = self.lines.get(queue)
        if lines is None or self.ruled or self.removals:
            return super().take(queue, want)
        if self._stored:
            self._join_due(queue)
            if self.pages.has("line", queue):
                return super().take(queue, want)
        return lines.take(want)

    def first_in_line(self, queue: str, most: int) -> list[StoredEntry]:
        """Those without marks, and those with, by their places."""
        lines = self.lines.get(queue)
        standing = [] if lines is None else lines.first(most)
        marked = super().first_in_line(queue, most) if self._stored else []
        if marked:
            standing = sorted(standing + marked, key=lambda entry: (-entry.job.priority, entry.place))[:most]
        return standing

    # --- what runs -----------------------------------------------------------------------

    def lease(self, claim: ClaimTerms) -> list[Lease]:
        self._waiters.looked(claim.wants)
        if len(self._uncounted) > UNCOUNTED:
            self._count_running()
        return super().lease(claim)

    def started(self, entry: StoredEntry) -> None:
        left_line = self.ruled and self._stood(entry)
        entry.place = None
        self._leases.add(entry)
        self._uncounted[entry.seq] = entry
        if entry.joined or self._stored:
            self._save_unmarked(entry)
        if left_line:
            self.let_next_go(entry)

    def stopped(self, entry: StoredEntry) -> None:
        self._leases.remove(entry)
        if self._uncounted.pop(entry.seq, None) is None:
            for scope in entry.scopes():
                self._running[scope] -= 1
                if not self._running[scope]:
                    del self._running[scope]
        if self.ruled:
            self.let_next_go(entry)

    def running_in(self, scope: Scope, name: str) -> int:
        if self._uncounted:
            self._count_running()
        return self._running[scope, name]

    def _count_running(self) -> None:
        """Most end before anybody wants to know how many there are."""
        for entry in self._uncounted.values():
            self._running.update(entry.scopes())
        self._uncounted.clear()

    # --- what is gone --------------------------------------------------------------------

    def forget(self, entry: StoredEntry) -> None:
        seq, job_id = entry.seq, entry.job.id
        left_line = self.ruled and self._stood(entry)
        if job_id in self._stored:
            self._unmark(entry)
        del self.entries[job_id], self.lines[entry.queue].entries[seq]
        piece = self._numbered.pieces[seq // PIECE]
        del piece[seq]
        if not piece and piece is not self._numbered.newest:
            self._numbered.drop(seq // PIECE)
        entry.place = None
        if left_line:
            self.let_next_go(entry)

    def move(self, entry: StoredEntry, queue: str) -> None:
        if entry.job.id in self._stored:
            self._unmark(entry)
        del self.lines[entry.queue].entries[entry.seq]
        lines = self.lines.get(queue) or self._add_queue(queue)
        lines.entries[entry.seq] = entry
        lines.counts.put += 1
        entry.queue = queue

    def waiting(self, queue: str) -> int:
        lines = self.lines.get(queue)
        return 0 if lines is None else len(lines.entries) - self.running_in(Scope.QUEUE, queue) - lines.ended

    def of_queue(self, queue: str, most: int, upto: int) -> list[StoredEntry]:
        lines = self.lines.get(queue)
        some = [] if lines is None else islice(lines.entries.values(), BITE + most)
        return [each for each in some if each.state is not State.RUNNING and each.seq <= upto][:most]

    def close_queue(self, queue: str) -> None:
        lines = self.lines.get(queue)
        if lines is not None and not lines.entries:
            del self.lines[queue]
            self.pages.put(key("queue", queue), None)

    # --- names and rules -----------------------------------------------------------------

    def holder_of(self, key_held: str) -> str | None:
        return self._unique.get(key_held)

    def hold_key(self, key_held: str, job_id: str | None) -> None:
        if job_id is None:
            del self._unique[key_held]
        else:
            self._unique[key_held] = job_id

    def remember(self, kind: str, name: str, value: bytes, until_us: int) -> None:
        self._remembers = True
        super().remember(kind, name, value, until_us)

    def set_rule(self, rule: Rule) -> None:
        super().set_rule(rule)
        self._waiters.wake()

    def remove_rule(self, rule: Rule) -> None:
        super().remove_rule(rule)
        self.see_rules()
        self._waiters.wake()

    def release(self, entry: StoredEntry) -> None:
        if entry.place is not None and entry.place > FIRST_PLACE and entry.place % 2 == 0:
            entry.place -= 1  # what stands in line at its old place is void
        super().release(entry)
        self._waiters.wake(entry.queue)

    # --- time ----------------------------------------------------------------------------

    def sweep(self, limit: int) -> Swept:
        token_us = self.next_token_us()
        swept = super().sweep(limit)
        if self.ruled:
            self.see_rules()
        if self.next_token_us() != token_us:
            self._waiters.wake()  # there may be one, or it comes at another time
        return swept

    def ending_last(self) -> StoredEntry | None:
        return self._leases.last()

    def ending_first(self, after: Place, limit: int) -> list[StoredEntry]:
        return list(islice(self._leases.after(after), limit))

    def lost(self, limit: int) -> list[StoredEntry]:
        over = islice(self._leases.over(self.now_us), limit)
        return sorted(over, key=lambda entry: (entry.fence, entry.seq))

    def next_us(self) -> int | None:
        times = (super().next_us(), self._leases.next_us(self.now_us))
        return min((time for time in times if time is not None), default=None)

    # --- looks ---------------------------------------------------------------------------

    def _counts(self, name: str, queue: StoredQueue) -> Counts:
        lines = self.lines[name]
        queue.running = self.running_in(Scope.QUEUE, name)
        queue.deleted = queue.put - len(lines.entries)
        queue.ready = self.waiting(name) - queue.scheduled - queue.parked
        return super()._counts(name, queue)

    def by_number(self, first: int, most: int) -> list[StoredEntry]:
        return list(islice(self._numbered.onwards(first), most))

    def position(self, entry: StoredEntry) -> int:
        """As in `find`, no further than a look goes."""
        before = super().position(entry)
        turn = (-entry.job.priority, entry.place is None, entry.place or 0)
        standing = self.lines[entry.queue].first(SCAN)
        return before + sum((-e.job.priority, False, e.place or 0) < turn for e in standing)
