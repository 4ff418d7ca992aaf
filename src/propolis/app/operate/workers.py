"""Workers are records: each process that works writes one of itself; `app.workers` reads them.

Nothing depends on them but people and `explain`: who may run a job is decided by leases alone.
"""

from __future__ import annotations

import inspect
import logging
import random
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime, timedelta
from enum import StrEnum
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from propolis.app.client.blocking import blocking
from propolis.app.client.client import Client
from propolis.core.protocols import Engine, Records
from propolis.core.records import Change, Record, Swap
from propolis.errors import Busy

log = logging.getLogger("propolis.worker")

KIND = "worker"
AT_MOST_EVERY = 5.0  # seconds between two writes, when something changes
EVERY = 60.0  # seconds at most, when nothing does: 100 workers write less than twice a second
EXPIRES_IN = timedelta(seconds=180)  # two writes may fail
TASKS_BYTES, QUEUES_BYTES = 40_000, 16_000  # of names: together with the rest they fit into a record


class WorkerState(StrEnum):
    """`draining`: it leases nothing more, and ends when what runs has ended."""

    STARTING = "starting"
    WORKING = "working"
    DRAINING = "draining"
    UNKNOWN = "unknown"  # a record that this version cannot read


class WorkerCard(Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """What a worker writes of itself.  `more_tasks` are those whose names did not fit."""

    host: str = ""
    pid: int = 0
    version: str = ""
    code: str = ""
    function_set: str | None = None
    queues: tuple[str, ...] = ()
    more_queues: int = 0
    slots: int = 0
    tasks: tuple[str, ...] = ()
    more_tasks: int = 0
    state: WorkerState = WorkerState.UNKNOWN
    up_s: float = 0.0


class WorkerInfo(WorkerCard, frozen=True, kw_only=True):
    """A worker that is alive: one process.  Times are by the clock of the engine."""

    id: str
    seen_at: datetime
    started_at: datetime

    def may_serve(self, queue: str) -> bool:
        if self.state in (WorkerState.DRAINING, WorkerState.UNKNOWN):
            return self.state is WorkerState.UNKNOWN
        return queue in self.queues or self.more_queues > 0

    def may_know(self, task: str) -> bool:
        return task in self.tasks or self.more_tasks > 0 or self.state is WorkerState.UNKNOWN


_CARD = msgspec.json.Decoder(WorkerCard)
Infos = list[WorkerInfo]  # a method is called `list` below


class Workers:
    """`app.workers`: who is alive."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def alist(self) -> Infos:
        """All that have written of themselves in the last three minutes, by id."""
        return await live_workers(await self._client.piece(Records))

    list = blocking(alist)


async def live_workers(engine: Records) -> Infos:
    found: Infos = []
    after: str | None = None
    while True:
        read = await engine.records(KIND, after=after)
        found += [_info(record, read.now) for record in read.records]
        if (after := read.after) is None:
            return found


def _info(record: Record, now: datetime) -> WorkerInfo:
    """Also of what another version has written: one that cannot be read hides no other."""
    seen_at = now if record.expires_at is None else record.expires_at - EXPIRES_IN
    try:
        card = _CARD.decode(record.value)
        started_at = seen_at - timedelta(seconds=card.up_s)
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError):
        card, started_at = WorkerCard(), seen_at
    return WorkerInfo(**asdict(card), id=record.name, seen_at=seen_at, started_at=started_at)


# --- what a worker writes ----------------------------------------------------------------


class Presence:
    """Keeps the record of one worker.  What goes wrong here harms nobody: it is logged, and tried again.

    One that `lasts` does not expire: where a test moves the clock, a record that is written every minute
    would make every minute count.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        card: Callable[[], WorkerCard],
        *,
        clock: Callable[[], float],
        lasts: bool = False,
    ) -> None:
        self._engine = engine if isinstance(engine, Records) else None
        self._name = name
        self._card = card
        self._clock = clock
        self._expires_in = None if lasts else EXPIRES_IN
        self._began = clock()
        self._tried_at: float | None = None
        self._pause = EVERY * random.random()  # after the first write: a fleet does not write together
        self._written: WorkerCard | None = None

    async def beat(self) -> None:
        """Write it, if it is time; called about once a second."""
        now, card = self._clock(), self._card()
        if self._engine is None or not self._is_time(now, card):
            return
        if self._tried_at is not None:
            self._pause = EVERY * random.uniform(0.95, 1)
        self._tried_at = now
        value = msgspec.json.encode(replace(card, up_s=round(now - self._began, 3)))
        try:
            await self._change(self._engine, value)
            self._written = card
        except Exception as error:
            self._written = None
            log.warning("worker %s cannot write that it is alive: %s", self._name, error)

    async def leave(self) -> None:
        if self._engine is not None and self._tried_at is not None:
            try:
                await self._change(self._engine, None)
            except Exception as error:
                log.warning("worker %s stays listed for %s: %s", self._name, EXPIRES_IN, error)

    def _is_time(self, now: float, card: WorkerCard) -> bool:
        if self._tried_at is None:
            return True
        return now - self._tried_at >= (self._pause if card == self._written else AT_MOST_EVERY)

    async def _change(self, engine: Records, value: bytes | None) -> None:
        expires_in = None if value is None else self._expires_in
        change = Change(kind=KIND, name=self._name, value=value, expires_in=expires_in)
        [answer] = await engine.swap([Swap(changes=(change,))])
        if answer.refusal is not None:
            raise Busy("its record", {})


def installed_version() -> str:
    try:
        return version("propolis")
    except PackageNotFoundError:  # it runs from a folder
        return ""


def fitting(names: Iterable[str], most: int) -> tuple[tuple[str, ...], int]:
    """The first names, sorted, that `most` bytes hold; and how many others there are."""
    ordered = sorted(names)
    for n, name in enumerate(ordered):
        most -= len(msgspec.json.encode(name)) + 1
        if most < 0:
            return tuple(ordered[:n]), len(ordered) - n
    return tuple(ordered), 0


def fingerprint(functions: Iterable[Callable[..., Any]]) -> str:
    """A hash of the files that these are in: workers of one deployment have the same."""
    modules = {getattr(inspect.unwrap(function), "__module__", "") for function in functions}
    digest = sha256()
    for name in sorted(modules):
        file = getattr(sys.modules.get(name), "__file__", None)
        with suppress(OSError):
            digest.update(Path(file).read_bytes() if file else b"")
    return digest.hexdigest()[:12]
