"""One transaction, as the steps inside of it see it."""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from propolis.core.clock import span_us
from propolis.core.protocols import KNOWN_FOR, Scope
from propolis.core.transitions import Retention
from propolis.engines.sqlite.rows import SQL, are_sound, text_of

KNOWN_US = span_us(KNOWN_FOR)
TOLERATED_US = 1_000_000  # a clock that is corrected by less is left alone

TALLIES = ("put", "deleted", "ready", "scheduled", "held", "parked", "running", "done", "dead", "cancelled")
_ARRIVED = {"put", "ready"}  # what most puts change
WAITING = ("ready", "scheduled", "held", "parked")
Named = tuple[Scope, str]  # a task, a key, or a task of one key
Changes = defaultdict[str, int]
Place = tuple[int, int, int]  # the priority, the place in line and the number of a job
_no_changes: partial[Changes] = partial(defaultdict, int)


class Opened(NamedTuple):
    """A group of jobs that were set aside, with its first job, if it has any."""

    queue: str
    by: Named
    first: Place | None
    is_closed: bool = False  # as it is written down, and it waits for no time


def first_of(priority: int | None, pos: int, seq: int) -> Place | None:
    return None if priority is None else (priority, pos, seq)


def _sound(running: Any, full_us: Any) -> tuple[int, int]:
    return int(running), full_us if are_sound((full_us,)) else 0


class Work:
    """One transaction.  Counters and tallies are read once, and written back by `flush`.

    `tallies` are what changes in the numbers of each queue; `started` those of tasks and keys, and `freed`
    the names of which a run has ended.  `full_us` is when buckets are full again from which tokens were
    taken, or to which some were given back: those are `refunded`.  `led` are jobs that were set aside in
    groups which may not be written down as open.
    `woken` are the queues that got something (None: any may have).  Whoever `joins` the transaction
    of a caller may have waited for others since it was `now_us`.
    """

    def __init__(
        self, db: sqlite3.Connection, now_us: int, retention: Retention, *, joins: bool = False
    ) -> None:
        self.db = db
        self.now_us = now_us
        self._joins = joins
        self.woken: set[str | None] = set()
        self.retention = retention
        self._counters: list[int] | None = None
        self._epoch: int | None = None
        self.tallies: defaultdict[str, Changes] = defaultdict(_no_changes)
        self.started: defaultdict[Named, int] = defaultdict(int)  # and no Counter, which takes longer to make
        self.full_us: dict[Named, int] = {}
        self.freed: set[Named] = set()
        self.refunded: set[Named] = set()
        self.led: list[tuple[str, Named, Place]] = []
        self._busy: dict[Named, tuple[int, int]] = {}

    def run(self, statement: str, **values: Any) -> sqlite3.Cursor:
        return self.db.execute(SQL[statement], values)

    def answered(self, statement: str, **values: Any) -> bool:
        """Whether the statement has given a row."""
        return self.run(statement, **values).fetchone() is not None

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """A part of the transaction that happens wholly or not at all, counters and tallies included."""
        before = (
            self._counters and [*self._counters],
            self._epoch,
            self.started.copy(),
            self.full_us.copy(),
            {*self.freed},
            {*self.refunded},
            {*self.woken},
        )
        tallies = {queue: changes.copy() for queue, changes in self.tallies.items()}
        self.db.execute("SAVEPOINT part")
        try:
            yield
        except BaseException:
            self.db.execute("ROLLBACK TO part")
            self._counters, self._epoch, self.started, self.full_us, self.freed, self.refunded, self.woken = (
                before
            )
            self.tallies = defaultdict(_no_changes, tallies)
            raise
        finally:
            self.db.execute("RELEASE part")

    # --- numbers -------------------------------------------------------------------------

    def move(self, queue: str, source: str, target: str, n: int = 1) -> None:
        """So many jobs of a queue are no longer one thing but another: names of `TALLIES`."""
        changes = self.tallies[queue]
        changes[source] -= n
        changes[target] += n

    def arrive(self, queue: str, where: str, n: int = 1) -> None:
        changes = self.tallies[queue]
        changes["put"] += n
        changes[where] += n

    def depart(self, queue: str, where: str, n: int = 1) -> None:
        changes = self.tallies[queue]
        changes["deleted"] += n
        changes[where] -= n

    def tally(self, queue: str) -> Counter[str]:
        """The numbers of a queue as they will be."""
        row = self.run("tally", queue=queue).fetchone()
        found = Counter(self.tallies.get(queue, {}))
        if row is not None:
            found.update(dict(zip(TALLIES, row, strict=True)))
        return found

    def running_of(self, scope: Scope, name: str) -> int:
        if scope is Scope.QUEUE:
            return self.tally(name)["running"]
        return self._busy_with(scope, name)[0] + self.started[scope, name]

    def full_at(self, scope: Scope, name: str) -> int:
        """When its bucket is full again, as far as it is known."""
        changed = self.full_us.get((scope, name))
        return self._busy_with(scope, name)[1] if changed is None else changed

    def _busy_with(self, scope: Scope, name: str) -> tuple[int, int]:
        found = self._busy.get((scope, name))
        if found is None:
            row = self.run("busy_with", scope=scope, name=name).fetchone()
            found = self._busy[scope, name] = _sound(*row) if row else (0, 0)
        return found

    def look_up_keys(self, keys: Iterable[str]) -> None:
        """How many of each of them run: at once, and not one by one."""
        new = {key for key in keys if (Scope.KEY, key) not in self._busy}
        if len(new) > 1:
            found = {name: _sound(*row) for name, *row in self.run("busy_keys", keys=text_of([*new]))}
            self._busy.update({(Scope.KEY, key): found.get(key, (0, 0)) for key in new})

    def count_started(self, task: str, key: str | None, by: int) -> None:
        """So many more of this task and this key run, or fewer."""
        self.started[Scope.TASK, task] += by
        if by < 0:
            self.freed.add((Scope.TASK, task))
        if key is not None:
            self.started[Scope.KEY, key] += by
            if by < 0:
                self.freed.add((Scope.KEY, key))

    # --- groups of jobs that were set aside ----------------------------------------------

    def groups_freed(self) -> list[Opened]:
        """Those that may go since a run has ended, or a token was given back, until now."""
        freed, refunded = self.freed, self.refunded
        self.freed, self.refunded = set(), set()
        if not (freed or refunded) or not self.run("any_group").fetchone()[0]:
            return []
        found = self._closed(freed)
        return found + self._closed(refunded, all_of_keys=True) if refunded else found

    def _closed(self, names: set[Named], *, all_of_keys: bool = False) -> list[Opened]:
        keys = [] if all_of_keys else [name for scope, name in names if scope is Scope.KEY]
        rows = self.run("closed_of_keys", keys=text_of(keys)).fetchall() if keys else []
        found = [
            Opened(queue, (Scope(scope), name), first_of(*first), is_closed=True)
            for queue, scope, name, *first in rows
        ]
        for scope, name in names:
            if scope is not Scope.KEY or all_of_keys:
                found += self.closed_groups(scope, name)
        return found

    def closed_groups(self, scope: Scope, name: str) -> list[Opened]:
        """Of a queue, a task or a key: with those of tasks of this key."""
        if scope is Scope.KEY:
            rows = self.run("closed_groups_of_key", key=name)
        else:
            rows = self.run("closed_groups", scope=scope, name=name)
        return [self.group_at(*row) for row in rows.fetchall()]

    def group_at(self, queue: str, scope: str, name: str) -> Opened:
        """A group with its first job, as it is."""
        first = self.run("first_of", queue=queue, scope=scope, name=name).fetchone()
        return Opened(queue, (Scope(scope), name), first)

    def open_groups(self, groups: Iterable[Opened]) -> int:
        """From now on these may go, as far as anybody knows; what has no jobs is forgotten."""
        opened = 0
        for queue, by, first, _ in groups:
            opened += 1
            if first is None:
                self.db.execute(SQL["forget_group"], (queue, *by))
            else:
                self.db.execute(SQL["open_group"], (*first, queue, *by))
            self.woken.add(queue)
        return opened

    def _keep_started(self) -> None:
        changes = [(*named, n) for named, n in self.started.items() if n and named not in self.full_us]
        buckets = [(*named, self.started[named], full_us) for named, full_us in self.full_us.items()]
        if changes:
            self.db.executemany(SQL["keep_busy"], changes)
        if buckets:
            self.db.executemany(SQL["keep_bucket"], buckets)
        ended = [(scope, name, self.now_us) for scope, name, n, *_ in changes + buckets if n <= 0]
        if ended:
            self.db.executemany(SQL["forget_busy"], ended)
        self.started.clear()
        self.full_us.clear()
        self._busy.clear()

    def flush(self) -> None:
        """Write the counters and the tallies; the last thing before the commit."""
        if self._counters is not None:
            seq, front = self._counters
            self.run("keep_counters", seq=seq, front=front, now_us=self.now_us)
        self._keep_started()
        self.open_groups(self.groups_freed())
        for queue, changes in self.tallies.items():
            if (
                changes.keys() == _ARRIVED
                and self.db.execute(SQL["keep_arrivals"], (changes["put"], changes["ready"], queue)).rowcount
            ):
                continue
            if any(changes.values()):
                self.db.execute(SQL["keep_tally"], (queue, *[changes.get(each, 0) for each in TALLIES]))

    def _count(self, which: int, by: int) -> int:
        """Move a counter on and give its new value."""
        if self._counters is None:
            self._counters = list(self.run("counters").fetchone())
        self._counters[which] += by
        return self._counters[which]

    def back(self, n: int = 1) -> int:
        """The last of `n` new places at the back of a line."""
        return self._count(0, n)

    @property
    def epoch(self) -> int:
        """That in which delays are counted now."""
        if self._epoch is None:
            self._epoch = self.look_at_clock(lag_us=TOLERATED_US)
        return self._epoch

    def look_at_clock(self, *, lag_us: int = 0) -> int:
        """Remember the time, and give the epoch: a new one where the clock was set back.

        What is remembered may lag behind.  The lease that ends last says only that leases are to follow, and
        not by how much delays are: it may be damaged (L7).
        """
        largest_us, epoch, given_us, is_following = self.run("largest_time").fetchone()
        shown_us = largest_us if is_following or given_us is None else max(largest_us, given_us)
        if shown_us > self.now_us + TOLERATED_US and self._joins:
            return int(epoch) + 1  # which it will be, if that is so
        if shown_us > self.now_us + TOLERATED_US:
            self.run("keep_step_back", epoch=epoch, by_us=max(0, largest_us - self.now_us))
            self.run("begin_epoch", now_us=self.now_us)
            return int(epoch) + 1
        if largest_us < self.now_us - lag_us:
            self.run("remember_time", now_us=self.now_us)
        return int(epoch)

    def front(self) -> int:
        """A new place at the front of a line."""
        return self._count(1, -1)
