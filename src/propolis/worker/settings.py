"""How a worker works: plain values, and the clock that it goes by."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from functools import partial
from secrets import token_hex
from typing import Protocol

from msgspec import Struct

from propolis.errors import BadSetting


class Monotonic(Protocol):
    """A clock of seconds that never go back; a test moves one of its own."""

    def __call__(self) -> float: ...


monotonic: Monotonic = time.monotonic
if hasattr(time, "CLOCK_BOOTTIME"):  # goes on while the machine sleeps, as the engine's clock does
    monotonic = partial(time.clock_gettime, time.CLOCK_BOOTTIME)


class Mode(StrEnum):
    """When a worker stops by itself: never, when nothing is ready any more, or after one job."""

    FOREVER = "forever"
    UNTIL_EMPTY = "until-empty"
    ONCE = "once"


MAX_SLOTS = 10_000  # each is a coroutine that is there from the start


class Lane(Struct, frozen=True):
    """Queues that share a number of slots, by weight (more weight: more often the first)."""

    queues: Mapping[str, int]
    slots: int


class LoggedRuns(Struct, frozen=True):
    """Which runs have a line in the log: those that failed, and one in so many of the others."""

    failures: bool = True
    one_in: int | None = None

    @classmethod
    def named(cls, text: str) -> LoggedRuns:
        """What `--log-jobs` means by "failures", "all", "sample:100" or "none"."""
        match text.split(":"):
            case ["failures"]:
                return cls()
            case ["all"]:
                return cls(one_in=1)
            case ["none"]:
                return cls(failures=False)
            case ["sample", number] if number.isascii() and number.isdecimal() and int(number) > 0:
                return cls(one_in=int(number))
        raise BadSetting(f"which jobs to log? {text!r} is none of failures, all, none and sample:100")


class Settings(Struct, frozen=True, kw_only=True):
    lanes: Sequence[Lane] = (Lane({"default": 1}, 10),)
    mode: Mode = Mode.FOREVER
    lease: timedelta = timedelta(seconds=15)
    grace: timedelta = timedelta(seconds=28)
    poll: timedelta = timedelta(seconds=1)
    stuck_after: timedelta = timedelta(seconds=5)
    max_stuck: int = 50  # jobs that do not stop, until the worker ends and another begins
    unknown_for: timedelta = timedelta(hours=1)  # and nobody knows its task: then a job is broken
    holder: str = ""
    isolate_suspects: bool = True
    app_path: str | None = None
    log_jobs: str = "failures"  # as LoggedRuns has them

    def check(self) -> None:
        if self.lease < timedelta(milliseconds=100):
            raise BadSetting(f"a lease of {self.lease} is too short to be renewed: give at least 1s")
        names = [queue for lane in self.lanes for queue in lane.queues]
        if not names:
            raise BadSetting("a worker needs at least one queue")
        for name in {name for name in names if names.count(name) > 1}:
            raise BadSetting(f"queue {name!r} is in two lanes: give it to one of them")
        for lane in self.lanes:
            if lane.slots < 1 or any(weight < 1 for weight in lane.queues.values()):
                raise BadSetting("slots and weights are at least 1")
        LoggedRuns.named(self.log_jobs)
        if sum(lane.slots for lane in self.lanes) > MAX_SLOTS:
            raise BadSetting(f"more than {MAX_SLOTS:,} slots are too many for one process: start several")


def default_holder() -> str:
    """The machine and the process, and a random part: in a container both come back with each start."""
    return f"{socket.gethostname()}:{os.getpid()}:{token_hex(3)}"
