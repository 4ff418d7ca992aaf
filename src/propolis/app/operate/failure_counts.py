"""How often a job has failed with each kind of error: each rule for an exception counts its own.

The history of a job tells it, but keeps a hundred events only.  So of a job that fails more often a record
keeps the counts, written now and then while the history still has what is new.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta

import msgspec

from propolis.core.job import Event, JobInfo, Lease
from propolis.core.policy import OUT_OF_TIME
from propolis.core.protocols import Inspects, Records
from propolis.core.records import Change, Swap

KIND = "failure-counts"
FROM = 60  # failures: fewer are all in the history, but for what else it tells
EVERY = 20  # failures
KEPT_FOR = timedelta(days=30)  # after the last time that it was written


class Counted(msgspec.Struct, frozen=True):
    """The first so many failures, by what the history says of each before the colon."""

    failures: int = 0
    names: dict[str, int] = {}


async def failure_counts(engine: Inspects, lease: Lease) -> Counter[str]:
    """Of all its failures as far as they are known, by the names of what was raised."""
    info = await engine.get(lease.id)
    notes = _notes(info)
    if lease.failures < FROM or not isinstance(engine, Records):
        return _names(notes[-lease.failures :])
    before = await _counted(engine, lease) if len(notes) < lease.failures else Counted()
    counts = Counter(before.names) + _names(notes[before.failures - lease.failures :])
    if lease.failures >= before.failures + EVERY:
        value = msgspec.json.encode(Counted(lease.failures, dict(counts)))
        change = Change(kind=KIND, name=lease.id, value=value, expires_in=KEPT_FOR)
        await engine.swap([Swap(changes=(change,))])
    return counts


async def _counted(records: Records, lease: Lease) -> Counted:
    """What is written down; not what is of a former life, in which it had failed more often."""
    for record in (await records.records(KIND, names=[lease.id])).records:
        with suppress(msgspec.MsgspecError):
            counted = msgspec.json.decode(record.value, type=Counted)
            if counted.failures < lease.failures:
                return counted
    return Counted()


def _notes(info: JobInfo | None) -> list[str]:
    events: Iterable[Event] = () if info is None else info.history
    return [event.note for event in events if event.kind == "retried"]


def _names(notes: Iterable[str]) -> Counter[str]:
    """What ran out of time has no name: it falls under no rule."""
    out_of_time = f"{OUT_OF_TIME.type}: {OUT_OF_TIME.message}"
    return Counter("" if note == out_of_time else note.partition(": ")[0] for note in notes)
