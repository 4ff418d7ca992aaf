"""Parked jobs whose task no live worker knows: for how long that is so, and what becomes of them then."""

from __future__ import annotations

import logging
from collections.abc import Container
from datetime import datetime, timedelta
from hashlib import sha256

import msgspec
from msgspec import Struct

from propolis.app.operate.workers import live_workers
from propolis.core.job import Broken, Released, describe
from propolis.core.protocols import PARKED_LINES, Engine, Records
from propolis.core.records import Change, Record, Swap
from propolis.errors import UnknownTask
from propolis.worker.settings import Monotonic, Settings

log = logging.getLogger("propolis.worker")

KIND = "unknown-task"
BITE = 100  # jobs that are leased and settled at a time
AT_MOST_EVERY = 30.0  # seconds between two looks at who is alive
KEPT_FOR = timedelta(days=1)  # beyond its time, a record that nobody looks after

Line = tuple[str, str]


class UnknownSince(Struct, frozen=True):
    """The value of a record: since when no live worker has known a task, as far as sweepers saw."""

    queue: str
    task: str
    since: datetime


class UnknownTasks:
    """Keeps in records since when a parked line has been nobody's, and shelves it when that is too long."""

    def __init__(self, engine: Engine, settings: Settings, tasks: Container[str], clock: Monotonic) -> None:
        self._engine = engine
        self._settings = settings
        self._span = settings.unknown_for
        self._tasks = tasks
        self._clock = clock
        self._next_look = 0.0
        self._seen: dict[Line, float] = {}  # since when we ourselves have found each line to be nobody's

    async def watch(self, parked: tuple[Line, ...]) -> None:
        engine = self._engine
        if not isinstance(engine, Records) or self._clock() < self._next_look:
            return
        self._next_look = self._clock() + min(AT_MOST_EVERY, self._span.total_seconds() / 4)
        unknown = await self._unknown(engine, parked)
        self._seen = {line: self._seen.get(line, self._clock()) for line in unknown}
        read = await engine.records(KIND)
        known = {record.name: record for record in read.records}
        since = {record.name: begun for record in read.records if (begun := _since(record)) is not None}
        gone = set(known) - {record_name(line) for line in unknown}
        if len(parked) == PARKED_LINES:  # there may be more: what is not told is not gone
            gone &= {record_name(line) for line in parked}
        new = [line for line in unknown if record_name(line) not in since]
        swaps = [self._begins(line, read.now, known.get(record_name(line))) for line in new]
        swaps += [self._forgets(known[name]) for name in gone]
        if swaps:
            await engine.swap(swaps)
        for line in unknown:
            begun = since.get(record_name(line))
            if begun is not None and read.now - begun >= self._span and self._saw_long(line):
                await self._shelve(line)

    def _saw_long(self, line: Line) -> bool:
        """Nobody may have been there for most of the time, and others who know it may be about to start."""
        return self._clock() - self._seen[line] >= self._span.total_seconds() / 4

    async def _unknown(self, engine: Records, parked: tuple[Line, ...]) -> list[Line]:
        workers = await live_workers(engine)
        return [
            (queue, task)
            for queue, task in parked
            if task not in self._tasks
            and not any(worker.may_serve(queue) and worker.may_know(task) for worker in workers)
        ]

    def _begins(self, line: Line, now: datetime, unreadable: Record | None) -> Swap:
        value = msgspec.json.encode(UnknownSince(*line, since=now))
        version = 0 if unreadable is None else unreadable.version
        expires_in = self._span + KEPT_FOR
        change = Change(
            kind=KIND, name=record_name(line), value=value, expected=version, expires_in=expires_in
        )
        return Swap(changes=(change,))

    def _forgets(self, record: Record) -> Swap:
        return Swap(changes=(Change(kind=KIND, name=record.name, value=None, expected=record.version),))

    async def _shelve(self, line: Line) -> None:
        """One bite of it; the next look takes the next, at once, until nothing more can be leased."""
        queue, task = line
        wants = {queue: BITE}
        lease, holder = self._settings.lease, self._settings.holder
        leases = await self._engine.lease(wants, span=lease, holder=holder, tasks=[task])
        error = describe(UnknownTask(task))
        outcomes = [(lease, Broken(error) if lease.task == task else Released()) for lease in leases]
        if outcomes:
            await self._engine.settle(outcomes)
        shelved = sum(lease.task == task for lease in leases)
        if not shelved:  # it is paused, or just empty
            return
        self._next_look = self._clock()
        log.error("%d jobs of %r are kept as broken: no worker knew it for %s", shelved, task, self._span)


def record_name(line: Line) -> str:
    return sha256("\0".join(line).encode()).hexdigest()


def _since(record: Record) -> datetime | None:
    """None for what this version cannot read, or somebody has written by hand and wrongly (L7)."""
    try:
        since = msgspec.json.decode(record.value, type=UnknownSince).since
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return since if since.tzinfo is not None else None
