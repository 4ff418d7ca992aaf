"""One transaction, as the steps inside of it see it."""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from propolis.core.clock import span_us
from propolis.core.protocols import KNOWN_FOR, Scope
from propolis.core.transitions import Retention
from propolis.engines.sqlite.rows import SQL

KNOWN_US = span_us(KNOWN_FOR)
TOLERATED_US = 1_000_000  # a clock that is corrected by less is left alone

TALLIES = ("put", "deleted", "ready", "scheduled", "held", "parked", "running", "done", "dead", "cancelled")
_ARRIVED = {"put", "ready"}  # what most puts change
WAITING = ("ready", "scheduled", "held", "parked")
Named = tuple[Scope, str]  # a task, a key, or a task of one key
Changes = defaultdict[str, int]
_no_changes: partial[Changes] = partial(defaultdict, int)


class Work:
    """One transaction.  Counters and tallies are read once, and written back by `flush`.

    `tallies` are what changes in the numbers of each queue; `started` and `held` those of tasks and keys;
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
        self.held: defaultdict[Named, int] = defaultdict(int)

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
            self.held.copy(),
            {*self.woken},
        )
        tallies = {queue: changes.copy() for queue, changes in self.tallies.items()}
        self.db.execute("SAVEPOINT part")
        try:
            yield
        except BaseException:
            self.db.execute("ROLLBACK TO part")
            self._counters, self._epoch, self.started, self.held, self.woken = before
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
        row = self.run("running_of_name", scope=scope, name=name).fetchone()
        return (0 if row is None else int(row[0])) + self.started[scope, name]

    def count_started(self, task: str, key: str | None, by: int) -> None:
        """So many more of this task and this key run, or fewer."""
        self.started[Scope.TASK, task] += by
        if key is not None:
            self.started[Scope.KEY, key] += by

    def flush_started(self) -> None:
        """Where fewer run than before, those that were set aside may go."""
        for scope, name in {*self.started, *self.held}:
            change, held = self.started[scope, name], self.held[scope, name]
            if not (change or held):
                continue
            left = self.run("keep_busy", scope=scope, name=name, running=change, held=held).fetchone()
            if held < 0 and not left[1]:
                self.run("forget_groups", scope=scope, name=name)
            if change < 0 and left[1]:
                self.run("open_groups", scope=scope, name=name)
            elif left == (0, 0):
                self.run("forget_busy", scope=scope, name=name)
        self.started.clear()
        self.held.clear()

    def flush(self) -> None:
        """Write the counters and the tallies; the last thing before the commit."""
        if self._counters is not None:
            seq, front = self._counters
            self.run("keep_counters", seq=seq, front=front, now_us=self.now_us)
        self.flush_started()
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
