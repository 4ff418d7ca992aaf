"""What one call leases: line by line, a bite of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from itertools import groupby
from operator import itemgetter
from typing import Any

from propolis.core.clock import LATEST_US, from_us, span_us
from propolis.core.job import Lease, State
from propolis.core.protocols import BITE, Scope
from propolis.engines.sqlite.rows import are_sound, text_of
from propolis.engines.sqlite.steps import removals
from propolis.engines.sqlite.steps.rulebook import Rulebook
from propolis.engines.sqlite.steps.settling import end_unplaced, job_by_number, shelve
from propolis.engines.sqlite.steps.work import Named, Work

MAX_BYTES = 16 * 2**20  # of jobs that one call leases: not many more than fit
GROUPS_AT_ONCE = 100  # of jobs that were set aside, in one look whether some of them may go
_HIGHEST = 1 << 40
_PRIORITY = itemgetter(0)
_EXPIRES = itemgetter(13)
_NUMBERS = itemgetter(6, 7, 8, 9, 10, 11, 15)  # attempts, failures, losses, crashes, fence, put_us, plain
_NAMES = itemgetter(4, 14)  # task and key, in a row of `line`


class Claim:
    """The leases of one call.

    `_passed` are the jobs of a queue that it went over and did not take;
    `_bytes` is the size of those that it has read.
    """

    def __init__(self, work: Work, span: timedelta, holder: str) -> None:
        self.leases: list[Lease] = []
        self._work = work
        self._holder = holder
        self._until_us = work.now_us + span_us(span)
        self._rules = Rulebook(work)
        if self._rules.has_groups:
            work.flush_started()  # what was just settled may let some of them go
        under_way = removals.under_way(work) if self._rules.has_removals else []
        self._removed = {each.name: each.upto for each in under_way if each.cancels}
        self._passed = 0
        self._bytes = 0

    def take_from(self, queue: str, room: int, tasks: Sequence[str]) -> None:
        allowed = self._rules.room(Scope.QUEUE, queue)
        self._passed = 0
        room = room if allowed is None else min(room, allowed)
        for task in tasks:
            room -= self._take_parked(queue, task, room)
        while room > 0 and not self._has_enough:
            let_go = self._let_go(queue, room) if self._rules.has_groups else set()
            rows = self._read("line", queue=queue, most=room)
            if not rows:
                return
            room -= self._take(queue, rows, let_go)
        if self._has_enough:
            self._work.woken.add(queue)  # there is more behind

    @property
    def _has_enough(self) -> bool:
        return self._passed >= BITE or self._bytes >= MAX_BYTES

    def _read(self, statement: str, **which: Any) -> list[Any]:
        """The next rows, but no more once they are so large: whoever leases them has to hold them all."""
        rows, size = [], self._bytes
        for row in self._work.run(statement, **which):
            rows.append(row)
            size += len(row[5])
            if size >= MAX_BYTES:
                break
        self._bytes = size
        return rows

    def _take_parked(self, queue: str, task: str, room: int) -> int:
        """From the line of a task; what a rule keeps back stays in it."""
        taken: list[Any] = []
        priority, seq = _HIGHEST, 0
        counts: Counter[Named] = Counter()
        while len(taken) < room and not self._has_enough:
            rows = self._read(
                "parked_line", queue=queue, task=task, priority=priority, seq=seq, most=room - len(taken)
            )
            for row in rows:
                priority, seq = row[0], row[2]
                reason = self._ends(queue, row)
                if reason is None and self._rules.kept_back_by(task, row[14], counts) is not None:
                    self._passed += 1
                    continue
                self._work.run("unpark", queue=queue, task=task, priority=priority, seq=seq)
                if reason is None:
                    taken.append(row)
                else:
                    self._end(row, "parked", reason)
            if not rows:
                break
        self._start(queue, taken, "parked")
        return len(taken)

    def _take(self, queue: str, rows: list[Any], let_go: set[int]) -> int:
        """All that is read leaves the line: it ends, a rule keeps it back, or it is taken.

        Where one that was let go is not taken after all, we read no further: the next of those that its rule
        keeps back may stand before the others.
        """
        if self._takes_all(queue, rows):
            return len(rows)
        taken: list[Any] = []
        ended: list[tuple[Any, str]] = []
        held: list[tuple[Any, Named]] = []
        counts: Counter[Named] = Counter()
        read = 0
        for row in rows:
            read += 1
            if (reason := self._ends(queue, row)) is not None:
                ended.append((row, reason))
            elif (by := self._rules.kept_back_by(row[4], row[14], counts)) is not None:
                held.append((row, by))
            else:
                taken.append(row)
                continue
            if row[2] in let_go:
                break
        self._leave_line(queue, rows[:read])
        for row, reason in ended:
            self._end(row, "ready", reason)
        for row, by in held:
            self._hold(queue, row, by)
        self._passed += read - len(taken)
        self._start(queue, taken, "ready")
        return len(taken)

    def _takes_all(self, queue: str, rows: list[Any]) -> bool:
        """As mostly: there is no reason why any of them should not start."""
        if self._removed or any(map(_EXPIRES, rows)):
            return False
        if self._rules.rules_jobs and self._rules.may_keep_back(set(map(_NAMES, rows))):
            return False
        before = len(self.leases)
        try:
            self._start(queue, rows, "ready")
        except (TypeError, OverflowError):  # one of them is broken, and nothing was written yet
            del self.leases[before:]
            return False
        self._leave_line(queue, rows)
        return True

    def _leave_line(self, queue: str, rows: list[Any]) -> None:
        for priority, stretch in groupby(rows, _PRIORITY):
            places = [row[1] for row in stretch]
            self._work.run("leave_line", queue=queue, priority=priority, first=places[0], last=places[-1])

    # --- those that are not taken --------------------------------------------------------

    def _ends(self, queue: str, row: Any) -> str | None:
        """Why it does not start: it is broken, has expired, or was removed and is only still there."""
        if not are_sound(_NUMBERS(row)) or not (row[13] is None or are_sound(row[13:14])):
            return "broken"
        if row[13] is not None and row[13] <= self._work.now_us:
            return "expired"
        if self._removed:
            if row[2] <= self._removed.get(f"queue:{queue}", 0):
                return "dropped"
            if row[12] is not None and row[2] <= self._removed.get(f"batch:{row[12]}", 0):
                return "deleted"
        return None

    def _end(self, row: Any, source: str, reason: str) -> None:
        work, job = self._work, job_by_number(self._work, row[2])
        if job.expires_us is not None:
            work.run("keep_from_expiring", expires_us=job.expires_us, seq=job.seq)
        if reason == "broken":
            shelve(work, job, source)
        elif reason == "expired":
            end_unplaced(work, job, source, State.DEAD, work.retention.dead_for, reason)
        else:
            job.stepped |= reason == "deleted"
            end_unplaced(work, job, source, State.CANCELLED, None, None)

    def _hold(self, queue: str, row: Any, by: Named) -> None:
        work, (scope, name) = self._work, by
        work.run("hold", queue=queue, scope=scope, name=name, priority=row[0], pos=row[1], seq=row[2])
        work.run("held_group", queue=queue, scope=scope, name=name)
        work.held[by] += 1
        work.move(queue, "ready", "held")

    def _let_go(self, queue: str, want: int) -> set[int]:
        """Let those stand in line again, in their old places, that their rule keeps back no more.

        Another rule may keep them back in turn: so this comes again before the line is read again.
        """
        work, let_go = self._work, set()
        for scope, name in work.run("opened_groups", queue=queue, most=GROUPS_AT_ONCE).fetchall():
            group = {"queue": queue, "scope": scope, "name": name}
            allowed = self._rules.room(Scope(scope), name)
            room = want if allowed is None else min(want, allowed)
            if not room:
                work.run("close_group", **group)
                continue
            first = work.run("held_first", **group, most=room).fetchall()
            for priority, pos, seq in first:
                work.run("unhold", **group, priority=priority, pos=pos)
                work.run("stand", queue=queue, priority=priority, pos=pos, seq=seq)
                let_go.add(seq)
            work.held[Scope(scope), name] -= len(first)
            work.move(queue, "held", "ready", len(first))
            if len(first) < room:
                work.run("forget_group", **group)
        return let_go

    # --- those that are ------------------------------------------------------------------

    def _start(self, queue: str, rows: list[Any], source: str) -> None:
        if not rows:
            return
        work, until_us, holder = self._work, self._until_us, self._holder
        now_us, until, lease = work.now_us, from_us(until_us), self.leases.append
        put_us, put_at = 0, from_us(0)  # those that were put together have it in common
        for row in rows:
            _, _, seq, job_id, task, body, attempts, failures, losses, crashes, last = row[:11]
            if row[11] != put_us:
                put_us, put_at = row[11], from_us(row[11])
            batch, expires_us, _, plain, saved = row[12:]
            fence = _after(last) if last >= now_us else now_us
            whose = (job_id, fence, task, queue, body, attempts + 1, failures, crashes, until, put_at)
            lease(Lease(*whose, holder, losses, batch, saved, seq))
            if expires_us is not None:
                work.run("keep_from_expiring", expires_us=expires_us, seq=seq)
            if not plain:
                work.run("free_started_key", seq=seq)
        seqs = text_of([row[2] for row in rows])
        work.run("start", seqs=seqs, until_us=until_us, now_us=now_us, holder=holder)
        work.move(queue, source, "running", len(rows))
        for (task, key), n in Counter(map(_NAMES, rows)).items():
            work.count_started(task, key, n)


def _after(last: int) -> int:
    if last > LATEST_US:
        raise OverflowError(last)
    return last + 1
