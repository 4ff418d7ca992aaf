"""Breakers: a task whose runs fail too often is paused for a while.  What is declared, counted and decided.

All is a pure function of values.  What a worker does about it is in `worker/sweeping/breaker_watch.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from enum import StrEnum
from hashlib import sha256
from typing import Literal, NamedTuple, get_args

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from propolis.core.duration import Duration, duration
from propolis.core.job import Crashed, Dead, Done, Outcome, Retried
from propolis.core.protocols import EACH, Scope, task_key
from propolis.core.records import Record
from propolis.errors import BadSetting

KIND = "breaker"
BY = "breaker"  # who sets its rules
PARTS = 10  # of the time in which runs are counted: each is forgotten as a whole
MAX_RUNS = 1_000_000
SHORTEST, LONGEST = timedelta(seconds=1), timedelta(hours=1)
LOOKS_EVERY = 5.0  # seconds, or a quarter of `within`: all workers bring their runs together in that time


Per = Literal["task", "key"]


class Breaker(Struct, frozen=True):
    """Open when this share of at least `of` runs has failed within a time; then all wait for `pause`."""

    share: float
    of: int
    within: timedelta
    pause: timedelta
    each_key: bool = False

    @property
    def looks_every(self) -> float:
        return min(LOOKS_EVERY, self.within.total_seconds() / 4)


def breaker(
    *,
    failures: str | float = "50%",
    of: int = 20,
    within: Duration = "1m",
    pause: Duration = "30s",
    per: Per = "task",
) -> Breaker:
    """`@app.task(breaker=breaker(failures="50%", of=20, within="1m", pause="30s"))`.

    When `failures` of the runs of a task have failed, of at least `of` within this time, its jobs are paused
    for a while; then one at a time tries until one succeeds.  With per="key" each key is by itself.
    """
    _check_runs(of)
    if per not in get_args(Per):
        raise BadSetting(f'breaker(per={per!r}): write "task" or "key"')
    spans = {"within": duration(within), "pause": duration(pause)}
    for name, span in spans.items():
        if not SHORTEST <= span <= LONGEST:
            raise BadSetting(f"breaker({name}={span}): give a second to an hour")
    return Breaker(_share(failures), of, spans["within"], spans["pause"], per == "key")


def _check_runs(of: object) -> None:
    if isinstance(of, bool) or not isinstance(of, int) or not 1 <= of <= MAX_RUNS:
        raise BadSetting(f"breaker(of={of!r}): give how many runs are enough to judge, from 1")


def _share(failures: str | float) -> float:
    text = failures.removesuffix("%") if isinstance(failures, str) else ""
    try:
        share = float(text) / 100 if isinstance(failures, str) else float(failures)
    except (TypeError, ValueError):
        share = 0.0
    if isinstance(failures, bool) or text == failures or not 0 < share <= 1:
        raise BadSetting(f'breaker(failures={failures!r}): give a share of the runs, such as "50%" or 0.5')
    return share


class BreakerState(StrEnum):
    OPEN = "open"
    CLOSED = "closed"


class BreakerChange(Struct, frozen=True):
    """A breaker has opened, or closed: what `on_breaker` is called with.

    `failed` of `runs` have failed; it is open `until` then, and again if what tries then fails.
    """

    task: str
    key: str | None
    state: BreakerState
    failed: int = 0
    runs: int = 0
    until: datetime | None = None


class BreakerPlace(NamedTuple):
    """What one breaker is for."""

    task: str
    key: str | None = None

    @property
    def record(self) -> str:
        return self.task if self.key is None else f"{self.task} {sha256(self.key.encode()).hexdigest()}"

    @property
    def paused(self) -> tuple[Scope, str]:
        """Of the rule that pauses it."""
        return (
            (Scope.TASK, self.task) if self.key is None else (Scope.TASK_KEY, task_key(self.task, self.key))
        )

    def __str__(self) -> str:
        return self.task if self.key is None else f"{self.task} for key {self.key!r}"


class Runs(NamedTuple):
    """How many runs have ended at about the same time."""

    at: datetime
    done: int
    failed: int


class CountedRuns(Struct, frozen=True):
    """The value of a record: the runs of all workers, in parts of the time that counts.

    `since` is when the first failure was brought here.  Once `open_until` is set they are counted no more:
    until then nothing begins, and what ends after that decides.
    """

    task: str
    key: str | None
    since: datetime
    parts: dict[int, tuple[int, int]] = {}  # done and failed
    open_until: datetime | None = None

    @property
    def failed(self) -> int:
        return sum(failed for _, failed in self.parts.values())

    @property
    def runs(self) -> int:
        return sum(done + failed for done, failed in self.parts.values())


def place_of(breaker: Breaker, task: str, key: str | None) -> BreakerPlace | None:
    """None for a run that no breaker counts: no rule could pause its key alone."""
    if not breaker.each_key:
        return BreakerPlace(task)
    return None if key is None or key.endswith(EACH) else BreakerPlace(task, key)


def has_failed(outcome: Outcome | None) -> bool | None:
    """None for a run that says nothing of what it has to do with: it was stopped, put off or discarded."""
    match outcome:
        case Done():
            return False
        case Dead(error=error) if error is not None and error.type == "Discard":
            return None
        case Retried() | Dead() | Crashed():
            return True
    return None


def read_counted(record: Record) -> CountedRuns | None:
    """None for what this version cannot read, or somebody has written by hand and wrongly (L7)."""
    try:
        counted = msgspec.json.decode(record.value, type=CountedRuns)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    moments = (counted.since, counted.open_until)
    return counted if all(moment is None or moment.tzinfo is not None for moment in moments) else None


def with_runs(
    counted: CountedRuns | None, place: BreakerPlace, breaker: Breaker, runs: Iterable[Runs], now: datetime
) -> CountedRuns:
    """What is counted with these; what is too long ago is forgotten."""
    counted = counted or CountedRuns(place.task, place.key, now)
    width = breaker.within.total_seconds() / PARTS
    last = int(now.timestamp() / width)
    parts = dict(counted.parts)
    for at, done, failed in runs:
        part = int(at.timestamp() / width)
        before = parts.get(part, (0, 0))
        parts[part] = before[0] + done, before[1] + failed
    return replace(counted, parts={part: n for part, n in parts.items() if last - PARTS < part <= last})


def has_enough(counted: CountedRuns, breaker: Breaker) -> bool:
    """Have so many failed that it is to open?"""
    return counted.runs >= breaker.of and counted.failed >= breaker.share * counted.runs


def is_complete(counted: CountedRuns, breaker: Breaker, now: datetime) -> bool:
    """Had all workers the time to bring what they have counted?"""
    return now - counted.since >= timedelta(seconds=breaker.looks_every)


def opened(counted: CountedRuns, breaker: Breaker, now: datetime) -> CountedRuns:
    return replace(counted, parts={}, open_until=now + breaker.pause)


def why_open(counted: CountedRuns, breaker: Breaker) -> str:
    """For the rule that says so."""
    if counted.open_until is not None:
        return "what tried again has failed"
    span = f"{breaker.within.total_seconds():g} s"
    return f"{counted.failed:,} of {counted.runs:,} runs failed within {span}"
