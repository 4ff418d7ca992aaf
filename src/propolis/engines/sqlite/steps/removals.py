"""What a drop or the end of a batch has left to the sweeps: a mark, and how far they are."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from propolis.core.protocols import BITE, REMOVALS
from propolis.engines.sqlite.steps.work import Work


class Leftover(Struct, frozen=True):
    """All jobs of a queue or a batch up to a number; see propolis_removal."""

    name: str
    upto: int
    removed: int
    since_us: int
    cancels: int


def under_way(work: Work) -> list[Leftover]:
    return [Leftover(*row) for row in work.run("removals", most=BITE)]


def was_removed(work: Work, name: str, seq: int) -> bool:
    row = work.run("removal", name=name).fetchone()
    return row is not None and seq <= Leftover(*row).upto


def go_on(work: Work, removal: Leftover, gone: int, *, more: bool) -> None:
    """Keep how far it is, for operators in a record; or forget it, where nothing is left."""
    removed = removal.removed + gone
    kind, name = REMOVALS, removal.name
    if not more:
        if work.run("end_removal", name=name).rowcount:
            work.run("remove_record", kind=kind, name=name)
        return
    work.run(
        "keep_removal",
        name=name,
        upto=removal.upto,
        removed=removed,
        since_us=removal.since_us,
        cancels=removal.cancels,
    )
    if removal.cancels:
        [version] = work.run("next_version", now_us=work.now_us).fetchone()
        value = msgspec.json.encode({"removed": removed, "since_us": removal.since_us})
        work.run(
            "keep_record", kind=kind, name=name, value=value, version=version, at_us=None, expires_us=None
        )


def begin(work: Work, name: str, *, cancels: bool) -> Leftover:
    """One that is under way goes on with what has come since."""
    row = work.run("removal", name=name).fetchone()
    if row is None:
        return Leftover(name, work.back(0), 0, work.now_us, int(cancels))
    before = Leftover(*row)
    return Leftover(name, work.back(0), before.removed, before.since_us, before.cancels or int(cancels))


def forget_members(work: Work, batch: str, upto: int, limit: int) -> tuple[int, bool]:
    """A bite of the members of a batch that is gone: how many, and whether there may be more."""
    ended = forget_ended(work, batch, upto, limit)
    living = work.run("live_members_of", batch=batch, upto=upto, most=limit).fetchall()
    for (seq,) in living:
        work.run("detach", seq=seq)
    return ended, limit in (ended, len(living))


def forget_ended(work: Work, batch: str, upto: int, limit: int) -> int:
    return work.run("forget_members", batch=batch, upto=upto, most=limit).rowcount
