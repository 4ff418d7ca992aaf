"""The book over a store: a document for each job, queue and batch, and marks that follow from them.

A mark is a key that is there while something is true of a job: it stands in a line, waits for a time, is
kept.  Which marks a job has is a function of the job (`marks_of`), so that nothing is moved by hand; each
call reads a range of them, a bite at most.

    job <id>                            all that is known of it
    seq <number>                        every job, in the order of the puts; also as of <queue> <number>
    line <queue> <rank> <place>         those that can be leased, the first to go first
    held <queue> <rank> <place>         those that a rule was seen to keep back
    parked <queue> <task> <rank> <number>  those that wait for somebody who knows their task
    due <queue> <time> <number>         those that are not due yet; also as timer <time> <number>
    expiry, until, keep <time> <number> when they expire, are lost, are forgotten
    kept <queue> <state> <time> …       those that have ended

Those of rules are named in `stored_rules`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from propolis.core.batch import Batch, BatchStatus
from propolis.core.envelope import Envelope
from propolis.core.job import Member, State
from propolis.core.protocols import BITE, COUNTED, REMOVALS, Counts, Filter, Page, Scope
from propolis.core.records import Reading
from propolis.core.transitions import Retention, due_us, expires_us
from propolis.engines.shared.book.keeping import Place
from propolis.engines.shared.book.steps import Removal
from propolis.engines.shared.book.store import Table, key, number_in
from propolis.engines.shared.book.stored_entries import (
    Memo,
    Numbers,
    StoredBatch,
    StoredEntry,
    StoredQueue,
    Tally,
    marks_of,
    tallies_of,
)
from propolis.engines.shared.book.stored_rules import FEW, StoredRules

SCAN = 10_000  # jobs that a look reads


class StoreBook(StoredRules):
    """The steps of one call."""

    def __init__(self, table: Table, now_us: int, retention: Retention) -> None:
        super().__init__(table, now_us, retention)
        self.numbers = self.pages.get("numbers", Numbers) or Numbers()
        self.removals = self._removals()
        self._stored: dict[str, tuple[set[str], list[Tally]]] = {}  # the marks and tallies that are stored

    def _removals(self) -> dict[str, Removal]:
        found = self.records().read(REMOVALS, Reading(limit=BITE)).records
        return {record.name: msgspec.json.decode(record.value, type=Removal) for record in found}

    def write(self) -> None:
        self.pages.write()

    def _draw(self, name: str, value: int) -> int:
        setattr(self.numbers, name, value)
        self.pages.put("numbers", self.numbers)
        return value

    # --- jobs ----------------------------------------------------------------------------

    def entry(self, job_id: str) -> StoredEntry | None:
        entry = self.pages.get(key("job", job_id), StoredEntry)
        if entry is not None and job_id not in self._stored:
            self._stored[job_id] = (marks_of(entry), tallies_of(entry))
        return entry

    def there(self, job_id: str) -> StoredEntry:
        entry = self.entry(job_id)
        assert entry is not None  # a mark names it
        return entry

    def save(self, entry: StoredEntry) -> None:
        gone = self._mark(entry, marks_of(entry))
        self.pages.put(key("job", entry.job.id), entry)
        self.follow(entry, gone)

    def _mark(self, entry: StoredEntry, new_marks: set[str]) -> set[str]:
        """Bring marks and counts in line with the job; gives the marks that are gone."""
        marks, tallies = self._stored.get(entry.job.id, (set(), []))
        new_tallies = tallies_of(entry)
        for mark in marks - new_marks:
            self.pages.table.delete(mark)
        for mark in new_marks - marks:
            self.pages.mark(mark, entry.job.id)
        if tallies != new_tallies:
            self._count(tallies, -1)
            self._count(new_tallies, 1)
        self._stored[entry.job.id] = (new_marks, new_tallies)
        return marks - new_marks

    def _unmark(self, entry: StoredEntry) -> set[str]:
        marks, tallies = self._stored.pop(entry.job.id, (set(), []))
        for mark in marks:
            self.pages.table.delete(mark)
        self._count(tallies, -1)
        return marks

    def _count(self, tallies: list[Tally], by: int) -> None:
        for kind, name, *rest in tallies:
            if kind == "queue":
                self._count_queue(name, rest[0], by)
            elif kind == "running":
                tally = key(kind, name, rest[0])
                self.pages.put(tally, (self.pages.get(tally, int) or 0) + by or None)
            elif (held := self.batch_of(name)) is not None and held.number == int(rest[0]):
                setattr(held, rest[1], getattr(held, rest[1]) + by)
                self.changed_batch(held)

    def _count_queue(self, name: str, what: str, by: int = 1) -> None:
        queue = self.pages.get(key("queue", name), StoredQueue) or StoredQueue()
        setattr(queue, what, getattr(queue, what) + by)
        self.pages.put(key("queue", name), queue)

    def create(self, job: Envelope, body: bytes) -> StoredEntry:
        head = Envelope(
            id=job.id,
            task=job.task,
            priority=job.priority,
            chosen=job.chosen,
            unique=job.unique,
            unique_until=job.unique_until,
            key=job.key,
            batch=job.batch,
            member=job.member,
            max_crashes=job.max_crashes,
        )
        entry = StoredEntry(
            head,
            body,
            self._draw("seq", self.numbers.seq + 1),
            job.queue,
            self.now_us,
            due_us(job, self.now_us),
            expires_us(job, self.now_us),
        )
        self._count_queue(job.queue, "put")
        if job.unique is not None:
            self.hold_key(job.unique, job.id)
        return entry

    def place(self, entry: StoredEntry, *, front: bool = False) -> None:
        entry.by = None
        if entry.due_us > self.now_us:
            entry.place = None
        elif front:
            entry.place = self._draw("front", self.numbers.front - 1)
        else:
            entry.place = self._draw("back", self.numbers.back + 1)
        self.save(entry)

    def take(self, queue: str, want: int) -> Iterator[StoredEntry]:
        if want <= 0:
            return
        self._join_due(queue)
        if self.ruled:
            for rule in self.rules_over(FEW):
                self.remove_rule(rule)
            self.let_turns_come(BITE)
            if self.room(Scope.QUEUE, queue) == 0:
                return
            self._walk()
            self._thaw(queue)
        looks = want + BITE
        while want > 0 and looks > 0 and (line := self.first_in_line(queue, min(want, looks))):
            self.line_changed = False
            for entry in line:
                looks -= 1
                if self.goes(entry):
                    want -= 1
                    yield entry
                elif entry.state is State.READY and (by := self.kept_back(entry)) is not None:
                    if by[0] is Scope.QUEUE:
                        return
                    entry.by = by
                    self.save(entry)
                if self.line_changed:
                    break

    def _join_due(self, queue: str) -> None:
        for _, job_id in self.pages.until(self.now_us, BITE, "due", queue):
            self.place(self.there(job_id))

    def first_in_line(self, queue: str, most: int) -> list[StoredEntry]:
        return [self.there(job_id) for _, job_id in self.pages.first(most, "line", queue)]

    def park(self, entry: StoredEntry) -> None:
        entry.by, entry.place = None, entry.seq
        self.save(entry)

    def parked(self, queue: str, task: str) -> Iterator[StoredEntry]:
        return (self.there(job_id) for _, job_id in self.pages.first(BITE, "parked", queue, task))

    def parked_lines(self, most: int) -> tuple[tuple[str, str], ...]:
        if not self.pages.has("parked"):
            return ()
        queues = self.pages.names("parked")[:most]
        return tuple((queue, task) for queue in queues for task in self.pages.names("parked", queue))[:most]

    def started(self, entry: StoredEntry) -> None:
        self.save(entry)

    def stopped(self, entry: StoredEntry) -> None:
        """Nothing yet: what becomes of it is saved in the same call."""

    def changed(self, entry: StoredEntry) -> None:
        self.save(entry)

    def shelve(self, entry: StoredEntry) -> None:
        self.save(entry)
        most = self.retention.dead_max
        queue = self.pages.get(key("queue", entry.queue), StoredQueue)
        if entry.state is State.DEAD and most is not None and queue is not None:
            for _, job_id in self.pages.first(min(BITE, queue.dead - most), "kept", entry.queue, "dead"):
                self.forget(self.there(job_id))

    def forget(self, entry: StoredEntry) -> None:
        marks = self._unmark(entry)
        self._count_queue(entry.queue, "deleted")
        self.pages.put(key("job", entry.job.id), None)
        self.follow(entry, marks)

    def move(self, entry: StoredEntry, queue: str) -> None:
        self._count_queue(entry.queue, "deleted")
        self._count_queue(queue, "put")
        entry.queue = queue

    def waiting(self, queue: str) -> int:
        found = self.pages.get(key("queue", queue), StoredQueue) or StoredQueue()
        return found.ready + found.scheduled + found.parked

    def running_in(self, scope: Scope, name: str) -> int:
        return self.pages.get(key("running", scope, name), int) or 0

    def last_number(self) -> int:
        return self.numbers.seq

    def of_queue(self, queue: str, most: int, upto: int) -> list[StoredEntry]:
        rows = self.pages.between(key("of", queue) + "\0", key("of", queue, upto + 1), BITE + most)
        found = (self.there(job_id) for _, job_id in rows)
        return [entry for entry in found if entry.state is not State.RUNNING][:most]

    def close_queue(self, queue: str) -> None:
        found = self.pages.get(key("queue", queue), StoredQueue)
        if found is not None and found.put == found.deleted:
            self.pages.put(key("queue", queue), None)

    # --- names ---------------------------------------------------------------------------

    def holder_of(self, key_held: str) -> str | None:
        return self.pages.get(key("unique", key_held), str)

    def hold_key(self, key_held: str, job_id: str | None) -> None:
        self.pages.put(key("unique", key_held), job_id)

    def recall(self, kind: str, name: str) -> bytes | None:
        memo = self.pages.get(key("memo", kind, name), Memo)
        return None if memo is None or memo.until_us <= self.now_us else memo.value

    def remember(self, kind: str, name: str, value: bytes, until_us: int) -> None:
        self.pages.put(key("memo", kind, name), Memo(until_us, value))
        self.pages.mark(key("memo-end", until_us, kind, name))

    # --- batches -------------------------------------------------------------------------

    def batch_of(self, batch: str) -> StoredBatch | None:
        return self.pages.get(key("batch", batch), StoredBatch)

    def create_batch(self, batch: Batch) -> StoredBatch:
        held = StoredBatch(batch, self._draw("seq", self.numbers.seq + 1), self.now_us)
        self.changed_batch(held)
        return held

    def set_member(self, held: StoredBatch, member: Member) -> None:
        self.pages.put(key("member", held.number, member.member, member.id), member)
        self.changed_batch(held)

    def changed_batch(self, held: StoredBatch) -> None:
        self._mark_batch(held, held.over_us)
        self.pages.put(key("batch", held.batch.id), held)

    def _mark_batch(self, held: StoredBatch, over_us: int | None) -> None:
        if held.marked_us != over_us:
            if held.marked_us is not None:
                self.pages.table.delete(key("batch-end", held.marked_us, held.batch.id))
            if over_us is not None:
                self.pages.mark(key("batch-end", over_us, held.batch.id), held.batch.id)
            held.marked_us = over_us

    def forget_batch(self, held: StoredBatch) -> None:
        self._mark_batch(held, None)
        self.pages.put(key("batch", held.batch.id), None)
        self.pages.mark(key("wipe", held.number))

    def waiting_members(self, held: StoredBatch) -> tuple[list[StoredEntry], bool]:
        members = [each for _, each in self.pages.listed(Member, *_within("member", held.number), BITE)]
        return self._waiting(members, held.number), len(members) == BITE

    def _waiting(self, members: Sequence[Member], number: int) -> list[StoredEntry]:
        entries = [self.entry(member.id) for member in members if not member.state.terminal]
        return [e for e in entries if e and e.state is State.READY and e.joined == number]

    # --- time ----------------------------------------------------------------------------

    def ending_last(self) -> StoredEntry | None:
        marks = self.pages.listed(str, *_within("until"), 1, backwards=True)
        return self.there(marks[0][1]) if marks else None

    def ending_first(self, after: Place, limit: int) -> list[StoredEntry]:
        marks = self.pages.between(key("until", *after) + "\0", "until\1", limit)
        return [self.there(job_id) for _, job_id in marks]

    def due_first(self, after: Place, limit: int) -> list[StoredEntry]:
        marks = self.pages.between(key("timer", *after) + "\0", "timer\1", limit)
        return [self.there(job_id) for _, job_id in marks]

    def promote(self, limit: int) -> int:
        self.let_turns_come(limit)
        due = self.pages.until(self.now_us, limit, "timer")
        for _, job_id in due:
            self.place(self.there(job_id))
        return len(due)

    def lost(self, limit: int) -> list[StoredEntry]:
        over = [self.there(job_id) for _, job_id in self.pages.until(self.now_us, limit, "until")]
        return sorted(over, key=lambda entry: (entry.fence, entry.seq))

    def expired(self, limit: int) -> list[StoredEntry]:
        over = [self.there(job_id) for _, job_id in self.pages.until(self.now_us, limit, "expiry")]
        return sorted(over, key=lambda entry: entry.seq)

    def old_batches(self, limit: int) -> list[StoredBatch]:
        names = [name for _, name in self.pages.until(self.now_us, limit, "batch-end")]
        return [held for name in names if (held := self.batch_of(name)) is not None]

    def forget_old(self, limit: int) -> int:
        old = self.pages.until(self.now_us, limit, "keep")
        for _, job_id in old:
            self.forget(self.there(job_id))
        for mark, _ in self.pages.until(self.now_us, limit, "memo-end"):
            _, _, kind, name = mark.split("\0", 3)
            self.pages.table.delete(mark)
            if self.recall(kind, name) is None:
                self.pages.put(key("memo", kind, name), None)
        self._wipe(limit)
        self.forget_buckets(limit)
        if self.ruled:
            self._walk()
            self._thaw()
        return len(old) + self.records().expire(limit)

    def _wipe(self, limit: int) -> None:
        """Members of a batch that is gone; where it was deleted, the jobs that wait go as well."""
        for mark, _ in self.pages.first(1, "wipe"):
            number = number_in(mark, 1)
            members = self.pages.listed(Member, *_within("member", number), limit)
            more = len(members) == limit
            for name, removal in list(self.removals.items()):
                if name.startswith("batch:") and removal.upto == number:
                    going = self._waiting([member for _, member in members], number)
                    for entry in going:
                        self.cast_out(entry)
                    further = replace(removal, removed=removal.removed + len(going))
                    self.keep_removal(name, further if more else None)
            for name, _ in members:
                self.pages.put(name, None)
            if not more:
                self.pages.table.delete(mark)

    def next_us(self) -> int | None:
        later = [
            self.pages.between(key(kind, self.now_us + 1), kind + "\1", 1)
            for kind in ("timer", "until", "rule-end", "turn")
        ]
        times = [number_in(found[0][0], 1) for found in later if found]
        record_us = self.records().next_us()
        return min([*times, record_us] if record_us is not None else times, default=None)

    # --- looks ---------------------------------------------------------------------------

    def queues(self, limit: int, after: str | None) -> dict[str, Counts]:
        start, end = _within("queue")
        found = self.pages.listed(
            StoredQueue, start if after is None else key("queue", after) + "\0", end, limit
        )
        return {name.split("\0")[1]: self._counts(name.split("\0")[1], queue) for name, queue in found}

    def _counts(self, name: str, queue: StoredQueue) -> Counts:
        due = len(self.pages.until(self.now_us, COUNTED, "due", name))
        return Counts(
            ready=queue.ready + due,
            scheduled=queue.scheduled - due,
            parked=queue.parked,
            running=queue.running,
            done=queue.done,
            dead=queue.dead,
            cancelled=queue.cancelled,
            put=queue.put,
            deleted=queue.deleted,
            more=due == COUNTED,
        )

    def find(self, where: Filter, limit: int, after: int | None) -> Page:
        """What it has not found after reading many it looks for in the next page."""
        found: list[StoredEntry] = []
        entries = self.by_number((after or 0) + 1, SCAN)
        for entry in entries:
            if entry.matches(where, self.now_us):
                if len(found) == limit:
                    return Page([entry.info() for entry in found], found[-1].seq)
                found.append(entry)
        more = entries[-1].seq if len(entries) == SCAN else None
        return Page([entry.info() for entry in found], more)

    def by_number(self, first: int, most: int) -> list[StoredEntry]:
        rows = self.pages.between(key("seq", first), "seq\1", most)
        return [self.there(job_id) for _, job_id in rows]

    def position(self, entry: StoredEntry) -> int:
        before = 0
        for kind in ("line", "held"):
            line = key(kind, entry.queue, -entry.job.priority)
            end = line + "\1" if entry.place is None else key(line, entry.place)
            before += len(self.pages.between(key(kind, entry.queue) + "\0", end, SCAN))
        due = [self.there(name) for _, name in self.pages.until(self.now_us, SCAN, "due", entry.queue)]
        return before + sum(_turn(other) < _turn(entry) for other in due)

    def batches(self, limit: int, after: str | None) -> list[StoredBatch]:
        start = "batch\0" if after is None else key("batch", after) + "\0"
        return [held for _, held in self.pages.listed(StoredBatch, start, "batch\1", limit)]

    def status(self, held: StoredBatch) -> BatchStatus:
        return held.status(enqueued=held.enqueued, retrying=held.retrying)

    def members(self, held: StoredBatch, limit: int, after: int | None) -> list[Member]:
        start, end = _within("member", held.number)
        start = start if after is None else key("member", held.number, after + 1)
        return [self._live(member) for _, member in self.pages.listed(Member, start, end, limit)]

    def _live(self, member: Member) -> Member:
        entry = None if member.state.terminal else self.entry(member.id)
        return member if entry is None else Member(member.member, member.id, entry.state)


def _within(*prefix: str | int) -> tuple[str, str]:
    return key(*prefix) + "\0", key(*prefix) + "\1"


def _turn(entry: StoredEntry) -> tuple[int, bool, int, int]:
    """When it is leased, among those that are due."""
    return (-entry.job.priority, entry.place is None, entry.place or entry.due_us, entry.seq)
