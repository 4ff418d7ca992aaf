"""What the book keeps of each job, batch and queue, and the marks and counts that follow from a job."""

from __future__ import annotations

from msgspec import Struct

from propolis.core.job import State
from propolis.core.protocols import Scope
from propolis.engines.shared.book.entries import Entry, HeldBatch
from propolis.engines.shared.book.store import key


class Numbers(Struct):
    """What was drawn last.  The front grows downwards."""

    seq: int = 0
    back: int = 0
    front: int = 0


class StoredEntry(Entry, omit_defaults=True):
    """`place` is its place in line; None: it has none.  `by` is what the rule names that keeps it back.

    `ends_us` is not stored: the end of its lease under which it is found in this process.
    """

    place: int | None = None
    by: tuple[Scope, str] | None = None
    ends_us: int = 0


class StoredBatch(HeldBatch, omit_defaults=True):
    """With the number of members that wait: for the first time, or once more."""

    enqueued: int = 0
    retrying: int = 0
    marked_us: int | None = None  # the time under which it stands among those to be forgotten


class StoredQueue(Struct, omit_defaults=True):
    ready: int = 0
    scheduled: int = 0
    parked: int = 0
    running: int = 0
    done: int = 0
    dead: int = 0
    cancelled: int = 0
    put: int = 0
    deleted: int = 0


class Bucket(Struct, omit_defaults=True):
    """When it is full, and when a token comes that somebody waits for."""

    full_us: int = 0
    turn_us: int | None = None


class Memo(Struct):
    until_us: int
    value: bytes


Tally = tuple[str, ...]


def marks_of(entry: StoredEntry) -> set[str]:
    """The keys that are there because the job is as it is."""
    numbers = {key("seq", entry.seq), key("of", entry.queue, entry.seq)}
    if entry.state is State.RUNNING:
        return numbers | {key("until", entry.until_us, entry.seq)}
    return numbers | marks_at_rest(entry)


def marks_at_rest(entry: StoredEntry) -> set[str]:
    """Those of a job that does not run, without those of its number."""
    if entry.state is not State.READY:
        kept = key("kept", entry.queue, entry.state, entry.ended_us or 0, entry.seq)
        return {kept, key("keep", entry.keep_us or 0, entry.seq)}
    marks = _waiting_marks(entry)
    if entry.expires_us is not None:
        marks.add(key("expiry", entry.expires_us, entry.seq))
    return marks


def _waiting_marks(entry: StoredEntry) -> set[str]:
    if entry.place is None:
        return {key("due", entry.queue, entry.due_us, entry.seq), key("timer", entry.due_us, entry.seq)}
    if entry.parked:
        return {key("parked", entry.queue, entry.job.task, -entry.job.priority, entry.seq)}
    place = (entry.queue, -entry.job.priority, entry.place)
    if entry.by is None:
        return {key("line", *place)}
    marks = {key("held", *place), key("held-by", *entry.by, *place)}
    if entry.by[0] is Scope.KEY:
        marks.add(key("held-of", entry.by[1], entry.job.task, *place))
    return marks


def tallies_of(entry: StoredEntry) -> list[Tally]:
    """What the job is counted in."""
    is_scheduled = entry.state is State.READY and entry.place is None
    where = "scheduled" if is_scheduled else "parked" if entry.parked else entry.state.value
    tallies: list[Tally] = [("queue", entry.queue, where)]
    if entry.state is State.RUNNING:
        tallies += [("running", scope, name) for scope, name in entry.scopes()]
    elif entry.joined:
        again = "retrying" if entry.has_run else "enqueued"
        tallies.append(("batch", entry.job.batch or "", str(entry.joined), again))
    return tallies
