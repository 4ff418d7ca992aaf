"""Schedules as records: how they are stored, read and changed, the same on every engine (C1).

The value is the truth; `at` is a reminder for whoever fires: the next instant, or none while it is paused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import msgspec

from propolis.app.operate.rules import every_rule
from propolis.core import wire
from propolis.core.protocols import Core, Limits, Records, Rule, RuleKind, Rules, Scope
from propolis.core.records import MAX_VALUE, Change, Read, Record, Refusal, Swap, bundles
from propolis.core.schedule import (
    Overlap,
    Schedule,
    ScheduleRecord,
    declared_again,
    job_for,
    overlap_key,
)
from propolis.engines import piece_of
from propolis.errors import Busy, RecordTooLarge

log = logging.getLogger("propolis.schedules")

KIND = "schedule"
PAGE = 1000  # records that are read at once
MAX_SCHEDULE = MAX_VALUE - 200  # bytes: it grows by some when it fires

_APART = (RuleKind.LIMIT, Scope.KEY)
_values = msgspec.json.Decoder(ScheduleRecord)


def read_schedule(record: Record) -> ScheduleRecord | None:
    """None for what this version cannot read, or somebody has written by hand and wrongly (L7)."""
    try:
        stored = _values.decode(record.value)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return stored if stored.schedule.name == record.name and stored.next_at.tzinfo is not None else None


def change_to(stored: ScheduleRecord, version: int) -> Change:
    """Store a schedule where the record has this version (0: there is none)."""
    at = None if stored.paused else stored.next_at
    return Change(
        kind=KIND, name=stored.schedule.name, value=msgspec.json.encode(stored), expected=version, at=at
    )


async def schedule_named(engine: Core, name: str) -> ScheduleRecord | None:
    return next(iter(_readable(await piece_of(engine, Records).records(KIND, names=[name]))), None)


async def all_schedules(engine: Core) -> list[ScheduleRecord]:
    """In the order of their names, without those that cannot be read."""
    read = await piece_of(engine, Records).records(KIND, limit=PAGE)
    found = [*_readable(read)]
    while read.after is not None:
        read = await piece_of(engine, Records).records(KIND, after=read.after, limit=PAGE)
        found += _readable(read)
    return found


def _readable(read: Read) -> Iterator[ScheduleRecord]:
    for record in read.records:
        if (stored := read_schedule(record)) is not None:
            yield stored
        else:
            log.warning(
                "schedule %s cannot be read by this version: store it again, or remove it", record.name
            )


async def store(engine: Core, schedules: Sequence[Schedule]) -> None:
    """Bring what is stored to these schedules; what is so already is not written."""
    await _keep_apart(engine, schedules)  # first, so that no job comes before its rule
    for first in range(0, len(schedules), PAGE):
        wanted = schedules[first : first + PAGE]
        while wanted:  # again for those that somebody has changed since they were read
            wanted = await _store_some(engine, wanted)


async def _store_some(engine: Core, wanted: Sequence[Schedule]) -> list[Schedule]:
    """Gives those that were refused."""
    read = await piece_of(engine, Records).records(KIND, names=[schedule.name for schedule in wanted])
    found = {record.name: record for record in read.records}
    changes, freed = [], []
    for schedule in wanted:
        record = found.get(schedule.name)
        old = None if record is None else read_schedule(record)
        new = declared_again(schedule, old, read.now)
        change = change_to(new, 0 if record is None else record.version)
        if record is not None and (old, record.at) == (new, change.at):
            continue
        _check(new)
        changes.append((schedule, change))
        waited = old is not None and old.schedule.overlap is Overlap.QUEUE_ONE
        if waited and schedule.overlap is not Overlap.QUEUE_ONE:
            freed.append(schedule.name)
    made = await _made(engine, [change for _, change in changes])
    for name in freed:
        await _let_overlap(engine, name)
    return [schedule for (schedule, _), is_made in zip(changes, made, strict=True) if not is_made]


async def _keep_apart(engine: Core, schedules: Sequence[Schedule]) -> None:
    """See to the rules of those whose jobs must not overlap, also where another version took one away."""
    keys = {overlap_key(each.name) for each in schedules if each.overlap is Overlap.QUEUE_ONE}
    if not keys:
        return
    limits = piece_of(engine, Limits, use='keeps jobs of a schedule with overlap="queue-one" apart')
    keys -= {rule.name async for rule in every_rule(limits) if (rule.kind, rule.scope) == _APART}
    for key in sorted(keys):
        await limits.add_rule(Rule(*_APART, key, 1, by="propolis", why="the overlap of a schedule"))


def _check(new: ScheduleRecord) -> None:
    """What is wrong with a schedule or its jobs is wrong now, not at its first instant."""
    schedule = new.schedule
    wire.encode(job_for(schedule, new.next_at))
    if (size := len(msgspec.json.encode(new))) > MAX_SCHEDULE:
        what = f"schedule {schedule.name!r}, with the arguments of its job,"
        raise RecordTooLarge(what, size, MAX_SCHEDULE)


async def _let_overlap(engine: Core, name: str) -> None:
    if isinstance(engine, Rules):
        await engine.remove_rule(*_APART, overlap_key(name))


async def pause(engine: Core, name: str, *, paused: bool) -> bool:
    """False if there is no such schedule, or it is so already."""
    while read := (await piece_of(engine, Records).records(KIND, names=[name])).records:
        stored = read_schedule(read[0])
        if stored is None or stored.paused is paused:
            return False
        change = change_to(msgspec.structs.replace(stored, paused=paused), read[0].version)
        if await _made(engine, [change]) == [True]:
            return True
    return False


async def remove(engine: Core, name: str) -> bool:
    """False if there is no such schedule."""
    removed = False
    while not removed and (read := (await piece_of(engine, Records).records(KIND, names=[name])).records):
        change = Change(kind=KIND, name=name, value=None, expected=read[0].version)
        [removed] = await _made(engine, [change])
    await _let_overlap(engine, name)
    return removed


async def _made(engine: Core, changes: Sequence[Change]) -> list[bool]:
    """Of each, whether it was made; False: somebody else has changed it meanwhile.

    `Busy` where a stranger's transaction holds one of them.
    """
    refusals = [
        answer.refusal
        for bundle in bundles([Swap(changes=(change,)) for change in changes])
        for answer in await piece_of(engine, Records).swap(bundle)
    ]
    if Refusal.BUSY in refusals:
        raise Busy("schedules", {})
    return [refusal is None for refusal in refusals]
