"""What is not as it should be in the keys of one app, and how it is mended: see decision 0062.

Redis has no snapshot in which everything could be read while others go on.  So each fault is one that a
script sees whole, in one step; but for jobs that stand in no list, which nobody can see without a walk
through it.  To look, the lists are read bite by bite, until nothing more is found of those that are missing.
To mend, they are walked: each entry moves into the head of the line, so that none is overlooked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Any, Protocol

BITE = 500  # jobs, entries or places that one call looks at
PIECES = 5  # of the members of a batch: up to a thousand each
TIMES = 3  # so often the members of a batch are counted, where it goes on meanwhile
LIVE = (b"waiting", b"retrying", b"running")


class RunsScripts(Protocol):
    """Runs a script of the engine by its name."""

    def __call__(self, name: str, *args: bytes | str | int, reads: bool = False) -> Awaitable[Any]: ...


@dataclass(frozen=True)
class Misplaced:
    """A job that is not where it can be seen at once: it may still stand in the list of its line."""

    id: bytes
    queue: bytes
    missing: bytes
    priority: int
    number: int
    entry: bytes

    @property
    def line(self) -> tuple[bytes, int]:
        return self.queue, self.priority

    def __str__(self) -> str:
        if self.missing == b"leased":
            return f"job {_text(self.id)} of queue {_text(self.queue)} had a lease that never ends"
        return f"job {_text(self.id)} of queue {_text(self.queue)} stood nowhere"


async def repair(call: RunsScripts, *, mend: bool, alone: bool) -> list[str]:
    """A sentence for each fault; `mend`: none of them is left.

    Where an app has shards (`alone` is False), keys and batches are not looked at: their jobs may be in other
    shards, or on their way.
    """
    sentences = await _jobs(call, mend=mend)
    async for queue in _queues(call):
        sentences += await _places(call, queue, mend=mend)
    sentences += await _strays(call, mend=mend)
    if alone:
        sentences += await _keys(call, mend=mend)
        async for batch in _batches(call):
            sentences += await _batch(call, batch, mend=mend)
    async for queue in _queues(call):
        _, _, counted, there = await call("recount", queue, int(mend), reads=not mend)
        if counted != there:
            sentences.append(f"queue {_text(queue)} counted {counted} jobs, and {there} are there")
    return sentences


def _text(name: bytes) -> str:
    return name.decode(errors="replace")


def _queues(call: RunsScripts) -> AsyncIterator[bytes]:
    return _named(call, "queues")


def _batches(call: RunsScripts) -> AsyncIterator[bytes]:
    return _named(call, "batch_statuses")


async def _named(call: RunsScripts, script: str) -> AsyncIterator[bytes]:
    """The first of each row, page by page; a page that leads back ends it, since damage has no order."""
    after = b""
    while page := await call(script, BITE, after, reads=True):
        for name, *_ in page:
            yield name
        if page[-1][0] <= after:
            return
        after = page[-1][0]


# --- jobs without a place ----------------------------------------------------------------------


async def _jobs(call: RunsScripts, *, mend: bool) -> list[str]:
    misplaced = await _misplaced(call)
    while await _seek(call, misplaced):
        """What was found has only moved while the lists were read: so may others have."""
    sentences = await _walk(call, misplaced) if mend else []
    left = sorted(misplaced.values(), key=lambda job: job.number)
    for first in range(0, len(left), BITE):
        some = {job.id: job for job in left[first : first + BITE]}
        pairs = [text for job in some.values() for text in (job.id, job.entry)]
        sentences += [str(some[id]) for id in await call("stand_again", int(mend), *pairs, reads=not mend)]
    return sentences


async def _misplaced(call: RunsScripts) -> dict[bytes, Misplaced]:
    found: dict[bytes, Misplaced] = {}
    cursor = b"0"
    while True:
        cursor, rows = await call("misplaced", cursor, BITE, reads=True)
        for job_id, queue, missing, priority, number, entry in rows:
            found[entry] = Misplaced(job_id, queue, missing, int(priority), int(number), entry)
        if cursor == b"0":
            return found


async def _seek(call: RunsScripts, misplaced: dict[bytes, Misplaced]) -> int:
    """Take those away that stand in the lists of their lines; gives how many these are."""
    before = len(misplaced)
    for queue, priority in {job.line for job in misplaced.values() if job.missing == b"line"}:
        async for right, _ in _entries(call, queue, priority):
            for entry in right:
                misplaced.pop(entry, None)
    return before - len(misplaced)


async def _entries(
    call: RunsScripts, queue: bytes, priority: int
) -> AsyncIterator[tuple[list[bytes], list[bytes]]]:
    """Those that are right, and those that are not; the list before the one into which its head moves."""
    for kind in ("line", "tidied"):
        after, size = 0, BITE
        while size == BITE:
            right, wrong, size = await call("entries", kind, queue, priority, after, BITE, reads=True)
            yield right, wrong
            after += size


async def _walk(call: RunsScripts, misplaced: dict[bytes, Misplaced]) -> list[str]:
    """Take those away that stand in their lines after all, though perhaps in one that nobody looked for."""
    sentences: list[str] = []
    for queue, priority in {job.line for job in misplaced.values() if job.missing == b"line"}:
        async for entries, forgotten in _moved(call, queue, priority):
            if forgotten:
                sentences.append(f"nobody looked for jobs of priority {priority} of queue {_text(queue)}")
            for entry in entries:
                misplaced.pop(entry, None)
    return sentences


async def _moved(call: RunsScripts, queue: bytes, priority: int) -> AsyncIterator[tuple[list[bytes], bool]]:
    """The entries of a list as they move, and whether nobody looked for them."""
    had, left = 1, 1
    while had and left:  # somebody has begun to tidy it: what moved before was not seen
        entries, had, left, forgotten = await call("walk_line", queue, priority, BITE)
        yield [] if had else entries, bool(forgotten)
    if had:
        _, _, left, _ = await call("walk_line", queue, priority, 0)
    todo = left  # what comes later is none of those that are sought
    while todo > 0:
        entries, _, left, _ = await call("walk_line", queue, priority, BITE)
        yield entries, False
        todo = min(todo - BITE, left)


# --- places without a job ----------------------------------------------------------------------


async def _places(call: RunsScripts, queue: bytes, *, mend: bool) -> list[str]:
    found: Counter[str] = Counter()
    places, priorities, _, _ = await call("recount", queue, 0, reads=True)
    for place in places:
        cursor = b"0"
        while True:
            cursor, n = await call("empty_places", queue, place, cursor, BITE, int(mend), reads=not mend)
            found[_text(place)] += n
            if cursor == b"0":
                break
    for priority in map(int, priorities):
        wrong = [entry async for _, entries in _entries(call, queue, priority) for entry in entries]
        found["ready"] += len(wrong)
        if wrong and mend:
            async for _ in _moved(call, queue, priority):
                """What is not right is left behind."""
    return [
        f"a place among the {place} jobs of queue {_text(queue)} was that of no job"
        for place, n in found.items()
        for _ in range(n)
    ]


# --- what limits count -------------------------------------------------------------------------


async def _strays(call: RunsScripts, *, mend: bool) -> list[str]:
    """What a limit counts though it does not run, where there is a job that the limit may keep back."""
    counts: set[bytes] = set()
    cursor = b"0"
    while True:
        cursor, names = await call("counts_of_limits", cursor, BITE, reads=True)
        counts.update(names)
        if cursor == b"0":
            break
    found: dict[tuple[bytes, bytes], None] = {}
    for on in sorted(counts):
        while True:
            cursor, strays = await call("strays", on, cursor, BITE, int(mend), reads=not mend)
            found.update(dict.fromkeys((on, stray) for stray in strays))
            if cursor == b"0":
                break
    return [f"job {_text(stray)} was counted under {_text(on)}, and does not run" for on, stray in found]


# --- unique keys and batches -------------------------------------------------------------------


async def _keys(call: RunsScripts, *, mend: bool) -> list[str]:
    found: dict[bytes, bytes] = {}
    cursor = b"0"
    while True:
        cursor, flat = await call("orphaned_keys", cursor, BITE, int(mend), reads=not mend)
        found.update(zip(flat[::2], flat[1::2], strict=True))
        if cursor == b"0":
            break
    return [
        f"the unique key {_text(key)!r} was held by job {_text(job_id)}, which is gone"
        for key, job_id in sorted(found.items())
    ]


async def _batch(call: RunsScripts, batch: bytes, *, mend: bool) -> list[str]:
    """What it counts is wrong if it has not changed while its members were counted, and they differ."""
    for _ in range(TIMES):
        counts, live = await _members(call, batch)
        if counts is None:
            return []
        total, done, dead, cancelled, *by_state = counts
        there = [live[state] for state in LIVE]
        if total - done - dead - cancelled == sum(there) and by_state == there:
            return []
        again = await call("recount_batch", batch, 0, 0, reads=True)
        if again and again[0] == counts and (not mend or await call("mend_batch", batch, *counts, *there)):
            coming = total - done - dead - cancelled
            return [f"batch {_text(batch)} counted {coming} members to come, and {sum(there)} are there"]
    return []


async def _members(call: RunsScripts, batch: bytes) -> tuple[list[int] | None, Counter[bytes]]:
    """What a batch counted before its members were looked at, and as what these count."""
    states: dict[bytes, bytes] = {}
    counts: list[int] | None = None
    first, more = 0, 1
    while more:
        answer = await call("recount_batch", batch, first, PIECES, reads=True)
        if not answer:
            return None, Counter()
        seen, flat, more = answer
        counts = counts or seen
        states.update(zip(flat[::2], flat[1::2], strict=True))
        first += PIECES
    return counts, Counter(states.values())
