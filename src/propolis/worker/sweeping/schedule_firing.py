"""Firing schedules: a part of every worker, and none of them is special.

Nobody is elected, and nothing is remembered here that counts: of the workers that fire an instant, the engine
lets exactly one do so, in the swap that changes the schedule's record and puts the job.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from datetime import datetime, timedelta

from msgspec import Struct

from propolis.app.operate.schedule_records import KIND, PAGE, change_to, read_schedule
from propolis.core import wire
from propolis.core.protocols import Engine, Records
from propolis.core.records import (
    KEEP,
    MAX_BYTES,
    Change,
    Read,
    Record,
    Refusal,
    Swap,
    Swapped,
    bundles,
    check_swaps,
)
from propolis.core.schedule import ScheduleRecord, settled
from propolis.engines import piece_of

log = logging.getLogger("propolis.worker")

MAX_INSTANTS = 1000  # in one go: the pump has other things to do as well
A_SECOND, A_MINUTE = timedelta(seconds=1), timedelta(minutes=1)
LONGEST = 10 * A_MINUTE  # until it is seen to again: whoever knows it may only have been cut off
BUSY_FOR = 10 * A_SECOND  # until a schedule whose job wants what a stranger holds is tried again
LEFT_ALONE = 3 * A_MINUTE  # longer than any worker of a large fleet rests between two sweeps


class PlannedSwap(Struct, frozen=True):
    """What is to be done about a record that is due, and when it is due again then."""

    swap: Swap
    next_at: datetime


class Firer:
    """Fires what is due.  `declared` are the names of the schedules in the code that this worker runs."""

    def __init__(self, engine: Engine, declared: Collection[str]) -> None:
        self._engine = engine
        self._declared = declared
        self._left = 0
        self._noted: set[str] = set()
        self._busy: dict[str, datetime] = {}  # schedules that are not tried before that

    async def fire_due(self) -> timedelta | None:
        """Settle the instants that have come.  Returns when the next one comes, as far as was seen."""
        records = piece_of(self._engine, Records)
        read = await self._due(records)
        self._left = MAX_INSTANTS
        self._busy = {name: until for name, until in self._busy.items() if until > read.now}
        planned = [self._plan(record, read.now) for record in read.records if record.name not in self._busy]
        steps = [step for step in planned if step is not None]
        answers: list[Swapped] = []
        for bundle in bundles([step.swap for step in steps]):
            answers += await records.swap(bundle)
        for step, answer in zip(steps, answers, strict=True):
            if answer.refusal is Refusal.BUSY:
                self._put_off(step.swap.changes[0].name, read.now)
        there_is_more = self._left == 0 or len(read.records) >= PAGE
        if there_is_more and any(answer.refusal is None for answer in answers):
            return timedelta(0)
        moments = [_moment(step, answer, read.now) for step, answer in zip(steps, answers, strict=True)]
        return max(timedelta(0), min(moments) - read.now) if moments else None

    async def _due(self, records: Records) -> Read:
        """A page of what is due; and our own, where the page is full of what others have to see to."""
        read = await records.records(KIND, due=True, limit=PAGE)
        if len(read.records) < PAGE or any(record.name in self._declared for record in read.records):
            return read
        found, names = read.records, list(self._declared)
        for first in range(0, len(names), PAGE):
            ours = await records.records(KIND, names=names[first : first + PAGE])
            found += [record for record in ours.records if record.at is not None and record.at <= read.now]
        return Read(found, None, read.now)

    def _plan(self, record: Record, now: datetime) -> PlannedSwap | None:
        """None: nothing yet."""
        stored = read_schedule(record)
        if stored is None:
            self._log_once(logging.ERROR, record.name, "cannot be read by this version")
            return _moved_on(record, record.at, now)
        if stored.schedule.declared and record.name not in self._declared:
            how = "is stored, but not declared here: this worker does not fire it"
            self._log_once(logging.INFO, record.name, how)
            return _moved_on(record, stored.next_at, now)
        if self._left == 0:
            return None
        try:
            return self._fire(record, stored, now)
        except Exception as error:  # whatever is wrong with it, it must not stop the others
            self._log_once(logging.ERROR, record.name, f"cannot be fired here: {error}")
            return _moved_on(record, stored.next_at, now)

    def _fire(self, record: Record, stored: ScheduleRecord, now: datetime) -> PlannedSwap:
        job = stored.schedule.job
        fitting = MAX_BYTES // 2 // (len(job.args) + len(job.kwargs) + 1)
        after, jobs = settled(stored, now, min(self._left, fitting))
        # An instant is never given up because a queue is full: caps are for producers, who can wait.
        swap = Swap(changes=(change_to(after, record.version),), puts=tuple(jobs), bounded=False)
        check_swaps([swap])  # or the swaps of all others would be refused with this one
        for first in jobs[:1]:
            wire.encode(first)
        self._left -= max(1, len(jobs))
        return PlannedSwap(swap, after.next_at)

    def _put_off(self, name: str, now: datetime) -> None:
        log.warning("schedule %s is fired later: an open transaction holds what its job needs", name)
        self._busy[name] = now + BUSY_FOR

    def _log_once(self, level: int, name: str, how: str) -> None:
        if name not in self._noted:
            self._noted.add(name)
            log.log(level, "schedule %s %s", name, how)


def _moved_on(record: Record, since: datetime | None, now: datetime) -> PlannedSwap | None:
    """Whoever knows this schedule has time to fire it; then it is due again after as long as it has waited.

    Only the reminder moves: its instant stays, and a worker that declares it sets the reminder back when it
    starts.
    """
    if since is None or record.at is None or now - record.at < LEFT_ALONE:
        return None
    pause = min(max(now - since, A_MINUTE), LONGEST)
    change = Change(kind=KIND, name=record.name, value=KEEP, expected=record.version, at=pause)
    return PlannedSwap(Swap(changes=(change,)), now + pause)


def _moment(step: PlannedSwap, answer: Swapped, now: datetime) -> datetime:
    """Where it was refused, somebody else has settled the instant, and goes on with what there is to do."""
    return step.next_at if answer.refusal is None else max(step.next_at, now + A_SECOND)
