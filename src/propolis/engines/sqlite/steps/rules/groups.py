"""What is set aside: jobs that a rule keeps back, in groups, each of them in its old order.

Each that may go knows its first job, so that a lease takes from the line and from the groups what is first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from propolis.core.protocols import BITE, Scope, task_and_key, task_key
from propolis.engines.sqlite.rows import SQL, text_of
from propolis.engines.sqlite.steps.rules.openings import groups_due, open_on
from propolis.engines.sqlite.steps.rules.rulebook import Rulebook
from propolis.engines.sqlite.steps.work import Named, Opened, Place, Work

Before = tuple[int, int]  # what places in line are sorted by


def groups_of_keys(work: Work, queue: str, keys: Iterable[str]) -> set[Named]:
    """Of a queue those with jobs of these keys."""
    rows = work.run("groups_of_new", queue=queue, keys=text_of([*keys]))
    return {(Scope(scope), name) for scope, name in rows}


def group_for(groups: set[Named], task: str, key: str) -> Named | None:
    """The one that a job joins: whatever keeps back others of its key, or of its task and key."""
    mine: tuple[Named, Named] = ((Scope.KEY, key), (Scope.TASK_KEY, task_key(task, key)))
    return next((each for each in mine if each in groups), None)


def join_others(work: Work, queue: str, task: str, key: str | None, place: Place) -> bool:
    """Set a job aside where others of its key are."""
    by = None if key is None else group_for(groups_of_keys(work, queue, [key]), task, key)
    if by is not None:
        hold(work, queue, by, place)
        lead(work, queue, by, place)
    return by is not None


def hold(work: Work, queue: str, by: Named, place: Place) -> None:
    work.db.execute(SQL["hold"], (queue, *by, *place))


def lead(work: Work, queue: str, by: Named, place: Place) -> None:
    """It may come before all others there."""
    priority, pos, seq = place
    which = {"queue": queue, "scope": by[0], "name": by[1]}
    if not work.run("lead_group", **which, priority=priority, pos=pos, seq=seq).rowcount:
        work.led.append((queue, by, place))  # of a group that is not written down as open


def leave(work: Work, seq: int) -> bool:
    """Out of its group; False if it is in none."""
    for row in work.run("unhold_any", seq=seq).fetchall():
        group = work.group_at(*row)
        if group.first is None or work.answered("is_open", queue=group.queue, scope=row[1], name=row[2]):
            work.open_groups([group])
        return True
    return False


def open_with_room(work: Work, groups: list[Opened]) -> int:
    """Those that may go; where only a token is missing a group waits for its time."""
    rules = Rulebook(work) if groups else None
    for each in groups:
        opens_us = None if rules is None or each.first is None else rules.opens_us(*each.by)
        if opens_us is None:
            work.open_groups([each])
        else:
            work.db.execute(SQL["close_group"], (opens_us, work.epoch, each.queue, *each.by))
    return len(groups)


def before(place: Sequence[Any]) -> Before:
    """What places in line are sorted by; a row of `line` begins with its place."""
    return -place[0], place[1]


class OpenGroup:
    """One that may go; `left` is how many of its jobs may (None: all), `gone` those that have."""

    def __init__(self, by: Named, first: Place, left: int | None) -> None:
        self.by = by
        self.first = first
        self.left = left
        self.gone: list[Any] = []
        self.ahead: list[Any] = []  # rows that were read, the next one last
        self.touched = False


class OpenGroups:
    """The groups that may go, as one call sees them: some are not written down as open, and need never be."""

    def __init__(self, work: Work, rules: Rulebook) -> None:
        self._work = work
        self._rules = rules
        self._new: dict[str, dict[Named, Opened]] = {}
        if not rules.has_groups:
            work.freed.clear()
            return
        open_on(work, BITE)
        for each in (*work.groups_freed(), *groups_due(work, BITE)):
            if each.first is None:
                work.open_groups([each])
            else:
                self._new.setdefault(each.queue, {})[each.by] = each

    def write(self) -> None:
        """Those that have not been closed again."""
        self._see_who_leads()
        for groups in self._new.values():
            open_with_room(self._work, [*groups.values()])

    def ready(self, queue: str, want: int) -> tuple[list[OpenGroup], Before | None]:
        """The first ones, and up to which place there are no others; some without room are closed."""
        self._see_who_leads()
        upto = None
        for _ in range(0, BITE, want):
            found, upto = self._first(queue, want)
            self._rules.look_up([key for by, _ in found if (key := _key_of(by)) is not None])
            groups = [OpenGroup(by, first, self._rules.room(*by)) for by, first in found]
            for group in groups:
                if group.left == 0:
                    self._close(queue, group.by)
            groups = [group for group in groups if group.left != 0]
            if groups or upto is None:
                return groups, upto
        return [], upto

    def _first(self, queue: str, want: int) -> tuple[list[tuple[Named, Place]], Before | None]:
        """What is written down of those in `new` may be over."""
        new = self._new.get(queue, {})
        most = want + len(new)
        rows = self._work.run("opened_groups", queue=queue, most=most).fetchall()
        found: dict[Named, Place] = {(Scope(scope), name): (*place,) for scope, name, *place in rows}
        found.update({by: each.first for by, each in new.items() if each.first})
        ordered = sorted(found.items(), key=lambda each: before(each[1]))
        if len(rows) == most:
            last = before(rows[-1][2:])
            ordered = [each for each in ordered if before(each[1]) <= last]
        if len(ordered) > want or len(rows) == most:
            return ordered[:want], before(ordered[:want][-1][1])
        return ordered, None

    def join(self, queue: str, jobs: list[tuple[Named, Place]]) -> None:
        """Set more jobs aside, which are given in their order."""
        if jobs:
            self._work.db.executemany(SQL["hold"], [(queue, *by, *place) for by, place in jobs])
        for by, place in dict(reversed(jobs)).items():  # the first of each group
            if not self.keep(queue, by):
                lead(self._work, queue, by, place)

    def _see_who_leads(self) -> None:
        for queue, by, place in self._work.led:
            group = self._new.get(queue, {}).get(by)
            if group is not None and group.first is not None and before(place) < before(group.first):
                self._new[queue][by] = group._replace(first=place)
        self._work.led.clear()

    def keep(self, queue: str, by: Named) -> bool:
        """There is such a group, closed; False if it was there."""
        scope, name = by
        when = self._when_it_opens(by)
        return bool(
            self._work.run(
                "held_group", queue=queue, scope=scope, name=name, key=_key_of(by), **when
            ).rowcount
        )

    def leave(self, queue: str, groups: Iterable[OpenGroup]) -> None:
        """Of some groups jobs have gone, or could not."""
        for group in groups:
            if not group.touched:
                continue
            if self._rules.room(*group.by) == 0:
                self._close(queue, group.by)
                continue
            now = self._work.group_at(queue, *group.by)
            if now.first is None:
                self._work.open_groups([now])
                self._new.get(queue, {}).pop(group.by, None)
            else:
                self._new.setdefault(queue, {})[group.by] = now

    def _close(self, queue: str, by: Named) -> None:
        """One that was closed already, and is to be so until a run has ended, need not be written."""
        new = self._new.get(queue, {}).pop(by, None)
        when = self._when_it_opens(by)
        if new is None or not new.is_closed or when["opens_us"] is not None:
            self._work.db.execute(SQL["close_group"], (*when.values(), queue, *by))

    def _when_it_opens(self, by: Named) -> dict[str, int | None]:
        opens_us = self._rules.opens_us(*by)
        return {"opens_us": opens_us, "epoch": None if opens_us is None else self._work.epoch}


def _key_of(by: Named) -> str | None:
    scope, name = by
    if scope is Scope.TASK_KEY:
        return task_and_key(name)[1]
    return name if scope is Scope.KEY else None
