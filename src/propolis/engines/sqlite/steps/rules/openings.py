"""What was set aside may go: at its time, or because a rule for many keys is new, or gone."""

from __future__ import annotations

import sqlite3

import msgspec

from propolis.core.protocols import BITE, EACH, Scope
from propolis.engines.sqlite.rows import SQL, text_of
from propolis.engines.sqlite.steps.work import Opened, Work, first_of

NEXT_GROUPS = 100  # of those that wait for a token, which are read by whoever waits for one
_ORDERS = {Scope.KEY: "groups_of_keys", Scope.TASK_KEY: "groups_of_tasks"}
_PLACE = msgspec.json.Decoder(tuple[str, str, str, str])


def next_groups(db: sqlite3.Connection) -> list[tuple[str, int]]:
    """The queues of those for which there is a token soonest, and when."""
    return db.execute(SQL["next_groups"], {"most": NEXT_GROUPS}).fetchall()


def groups_due(work: Work, most: int) -> list[Opened]:
    """Those for which there is a token by now."""
    rows = work.run("groups_due", now_us=work.now_us, most=most)
    return [Opened(queue, (Scope(scope), name), first_of(*first)) for queue, scope, name, *first in rows]


def open_before(work: Work, epoch: int, most: int) -> int:
    """Those whose time was counted by a clock that was set back: whoever leases counts it anew."""
    rows = work.run("groups_before", epoch=epoch, most=most).fetchall()
    return work.open_groups([work.group_at(*row) for row in rows])


def open_each(work: Work, scope: Scope, name: str) -> None:
    """Those of all keys that a limit for each key is about: a bite, the others later."""
    _go_on(work, scope, name, (name.removesuffix(EACH), "", "", ""), BITE)


def open_on(work: Work, most: int) -> int:
    """A bite of what was left for later; how many groups that were."""
    row = work.run("openings", most=1).fetchone()
    if row is None:
        return 0
    scope, name, place = row
    return _go_on(work, Scope(scope), name, _PLACE.decode(place), most)


def _go_on(work: Work, scope: Scope, name: str, place: tuple[str, str, str, str], most: int) -> int:
    rows = work.run(_ORDERS[scope], **dict(zip("abcd", place, strict=True)), most=most).fetchall()
    mine = [row for row in rows if row[3].startswith(name.removesuffix(EACH))]
    if len(mine) < most:
        work.run("end_opening", scope=scope, name=name)
    else:
        work.run("keep_opening", scope=scope, name=name, place=text_of(rows[-1][3:]))
    return work.open_groups([work.group_at(*row[:3]) for row in mine])
