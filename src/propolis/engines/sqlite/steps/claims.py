"""What one call leases: line by line, a bite of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from heapq import heapify, heappop, heappush
from itertools import groupby
from operator import itemgetter
from typing import Any

from propolis.core.clock import LATEST_US, from_us, span_us
from propolis.core.job import Lease, State
from propolis.core.protocols import BITE, Scope
from propolis.engines.sqlite.rows import SQL, are_sound, text_of
from propolis.engines.sqlite.steps import removals
from propolis.engines.sqlite.steps.rules.groups import Before, OpenGroup, OpenGroups, before
from propolis.engines.sqlite.steps.rules.rulebook import Rulebook
from propolis.engines.sqlite.steps.settling import end_unplaced, job_by_number, shelve
from propolis.engines.sqlite.steps.work import Named, Work

MAX_BYTES = 16 * 2**20  # of jobs that one call leases: not many more than fit
WIDELY = 100  # rows of a line in one read, where a rule keeps many back
AHEAD = 16  # jobs of a group that are read at once behind its first one
# A row with its number and its group, sorted by its place.
Candidate = tuple[Before, int, Any, OpenGroup | None]
_LAST = (1 << 70, 0)
_HIGHEST = 1 << 40
_PRIORITY = itemgetter(0)
_EXPIRES = itemgetter(13)
_NUMBERS = itemgetter(6, 7, 8, 9, 10, 11, 15)  # attempts, failures, losses, crashes, fence, put_us, plain
_NAMES = itemgetter(4, 14)  # task and key, in a row of `line`


class Choice:
    """What becomes of jobs that are looked at: they start, end, or are set aside (and whether they were)."""

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.from_groups = 0  # so many of these
        self.ended: list[tuple[Any, str, bool]] = []
        self.held: list[tuple[Any, Named, bool]] = []


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
        self._rules.see_to_those_over()
        self._all_groups = OpenGroups(work, self._rules)
        self._groups = self._all_groups if self._rules.has_groups else None
        under_way = removals.under_way(work) if self._rules.has_removals else []
        self._removed = {each.name: each.upto for each in under_way if each.cancels}
        self._passed = 0
        self._bytes = 0

    def finish(self) -> None:
        """The last thing: what could go and was not taken may go later."""
        self._all_groups.write()

    def take_from(self, queue: str, room: int, tasks: Sequence[str]) -> None:
        allowed = self._rules.room(Scope.QUEUE, queue)
        self._passed = 0
        room = room if allowed is None else min(room, allowed)
        for task in tasks:
            room -= self._take_parked(queue, task, room)
        while room > 0 and not self._has_enough:
            groups, upto = self._groups.ready(queue, room) if self._groups is not None else ([], None)
            most = max(room, min(WIDELY, BITE - self._passed)) if self._passed else room
            rows = self._read("line", queue=queue, most=most)
            if not rows and not groups and upto is None:
                break
            if not groups and upto is None and len(rows) <= room and self._takes_all(queue, rows):
                room -= len(rows)
                continue
            if rows and (len(rows) == most or self._has_enough):
                upto = min(before(rows[-1]), upto or _LAST)
            room -= self._take_first(queue, rows, groups, upto, room)
        if self._has_enough:
            self._work.woken.add(queue)  # there is more behind
        self._wait_for_token(queue)

    def _wait_for_token(self, queue: str) -> None:
        """Where the queue has none for those that stand in it: its own group has no jobs, only a time."""
        if self._rules.opens_us(Scope.QUEUE, queue) is not None and self._work.answered(
            "any_ready", queue=queue
        ):
            self._all_groups.keep(queue, (Scope.QUEUE, queue))

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
        while len(taken) < room and not self._has_enough:
            rows = self._read(
                "parked_line", queue=queue, task=task, priority=priority, seq=seq, most=room - len(taken)
            )
            for row in rows:
                priority, seq = row[0], row[2]
                reason = self._ends(queue, row)
                if reason is None and self._rules.kept_back_by(task, row[14]) is not None:
                    self._passed += 1
                    continue
                self._work.run("unpark", queue=queue, task=task, priority=priority, seq=seq)
                if reason is None:
                    taken.append(row)
                    self._count(queue, task, row[14], 1)
                else:
                    self._end(row, "parked", reason)
            if not rows:
                break
        self._start(queue, taken, "parked")
        return len(taken)

    def _take_first(
        self, queue: str, rows: list[Any], groups: list[OpenGroup], upto: Before | None, room: int
    ) -> int:
        """From the line and the groups that may go what is first, up to where all is known that there is.

        All that is looked at leaves its place: it ends, a rule keeps it back, or it is taken.
        """
        heap: list[Candidate] = [(before(row), row[2], row, None) for row in rows]
        upto = self._add_heads(heap, queue, groups, upto)
        heapify(heap)
        self._look_up([row for _, _, row, _ in heap])
        choice, left_line = Choice(), []
        while heap and len(choice.taken) < room and heap[0][0] <= (upto or _LAST):
            _, _, row, group = heappop(heap)
            if group is None:
                left_line.append(row)
                self._choose(queue, row, None, choice)
                continue
            group.touched = True
            if self._choose(queue, row, group, choice):
                group.gone.append(row)
                if (following := self._next_of(queue, group, room - len(choice.taken))) is not None:
                    heappush(heap, (before(following), following[2], following, group))
                elif self._has_enough:
                    break
        if not left_line and not any(group.touched for group in groups):
            self._passed = BITE  # nothing of it could be looked at
        self._leave_line(queue, left_line)
        gone = [(queue, *group.by, row[0], row[1]) for group in groups for row in group.gone]
        if gone:
            self._work.db.executemany(SQL["unhold"], gone)
        taken = self._carry_out(queue, choice)
        self._all_groups.leave(queue, groups)
        return taken

    def _add_heads(
        self, heap: list[Candidate], queue: str, groups: list[OpenGroup], upto: Before | None
    ) -> Before | None:
        """The first job of each group; and up to where these are all."""
        rows = {
            row[2]: row for row in self._read("heads", seqs=text_of([group.first[2] for group in groups]))
        }
        for group in groups:
            priority, pos, seq = group.first
            row = rows.get(seq)
            if row is None and self._bytes >= MAX_BYTES:
                return min(before(group.first), upto or _LAST)
            if row is None:  # there is no such job, whoever has taken it away
                self._work.db.execute(SQL["unhold"], (queue, *group.by, priority, pos))
                self._passed += 1
                group.touched = True
            else:
                heap.append((before(group.first), seq, (priority, pos, *row[2:]), group))
        return upto

    def _next_of(self, queue: str, group: OpenGroup, want: int) -> Any:
        if group.left == 0:
            return None
        if not group.ahead and not self._has_enough:
            most = min(want, AHEAD, AHEAD if group.left is None else group.left)
            scope, name = group.by
            which = {"queue": queue, "scope": scope, "name": name, "behind": len(group.gone)}
            group.ahead = self._read("held_line", **which, most=most)[::-1] if most > 0 else []
        return group.ahead.pop() if group.ahead else None

    def _choose(self, queue: str, row: Any, group: OpenGroup | None, choice: Choice) -> bool:
        """Whether it leaves where it stands."""
        if (reason := self._ends(queue, row)) is not None:
            self._passed += 1
            choice.ended.append((row, reason, group is not None))
        elif (by := self._rules.kept_back_by(row[4], row[14])) is not None:
            self._passed += 1
            if group is not None and by == group.by:
                return False
            choice.held.append((row, by, group is not None))
        else:
            choice.taken.append(row)
            self._count(queue, row[4], row[14], 1)
            if group is not None:
                choice.from_groups += 1
                group.left = None if group.left is None else group.left - 1
        return True

    def _carry_out(self, queue: str, choice: Choice) -> int:
        for row, reason, was_held in choice.ended:
            self._end(row, "held" if was_held else "ready", reason)
        self._start(queue, choice.taken, "ready")
        self._work.move(queue, "held", "ready", choice.from_groups)
        self._all_groups.join(queue, [(by, (row[0], row[1], row[2])) for row, by, _ in choice.held])
        self._work.move(queue, "ready", "held", sum(not was_held for *_, was_held in choice.held))
        return len(choice.taken)

    def _takes_all(self, queue: str, rows: list[Any]) -> bool:
        """As mostly: there is no reason why any of them should not start, and all fit under their limits."""
        if self._removed or any(map(_EXPIRES, rows)):
            return False
        self._look_up(rows)
        names = Counter(map(_NAMES, rows))
        if self._rules.rules_jobs and not self._rules.has_room_for(names):
            return False
        n_before = len(self.leases)
        try:
            self._start(queue, rows, "ready")
        except (TypeError, OverflowError):  # one of them is broken, and nothing was written yet
            del self.leases[n_before:]
            return False
        self._leave_line(queue, rows)
        for (task, key), n in names.items():
            self._count(queue, task, key, n)
        return True

    def _look_up(self, rows: list[Any]) -> None:
        if self._rules.rules_jobs:
            self._rules.look_up([row[14] for row in rows if row[14] is not None])

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

    def _count(self, queue: str, task: str, key: str | None, n: int) -> None:
        """At once, since it may be the last one that may start."""
        self._work.count_started(task, key, n)
        self._rules.take_tokens(queue, task, key, n)


def _after(last: int) -> int:
    if last > LATEST_US:
        raise OverflowError(last)
    return last + 1
