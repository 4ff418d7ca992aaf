"""How a worker works, as plain values."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import StrEnum

from msgspec import Struct

from skep.errors import BadSetting

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class Mode(StrEnum):
    """When a worker stops by itself: never, when nothing is ready any more, or after one job."""

    FOREVER = "forever"
    UNTIL_EMPTY = "until-empty"
    ONCE = "once"


class Lane(Struct, frozen=True):
    """Queues that share a number of slots, by weight (more weight: more often looked at first)."""

    queues: Mapping[str, int]
    slots: int


class Settings(Struct, frozen=True, kw_only=True):
    lanes: Sequence[Lane] = (Lane({"default": 1}, 10),)
    mode: Mode = Mode.FOREVER
    lease: timedelta = timedelta(seconds=15)
    grace: timedelta = timedelta(seconds=28)
    poll: timedelta = timedelta(seconds=1)
    stuck_after: timedelta = timedelta(seconds=5)
    holder: str = ""
    isolate_suspects: bool = True
    app_path: str | None = None

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


def default_holder() -> str:
    """Who holds a lease, for people: which machine and which process."""
    return f"{socket.gethostname()}:{os.getpid()}"
