"""Failures that look alike, and come by the thousand: a few are logged, and the others are counted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from msgspec import Struct

IN_FULL = 5  # of one kind, before the others are counted
WITHIN = 10.0  # seconds, after which it is logged how many they were
MAX_SHAPES = 100  # kinds at once, until messages are no longer told apart
MAX_KINDS = 1000  # at once, whatever they are: then the oldest one is summed up early
MAX_TEXT = 200  # characters of a message by which it is known

_VARYING = re.compile(r"""'[^']*'|"[^"]*"|\b[\w-]*\d[\w-]*""")


class FailureKind(NamedTuple):
    """What failures have in common that look alike."""

    task: str
    outcome: str
    error: str
    shape: str  # of the message; "" where messages are not told apart


class Storm(Struct):
    """What came of one kind since it began."""

    began: float
    in_full: int  # how many more are logged
    message: str  # of the first one
    more: int = 0  # that were only counted


class Storms:
    """In bounded memory; every failure is either to be logged or counted in one storm that `over` gives."""

    def __init__(self) -> None:
        self.open: dict[FailureKind, Storm] = {}  # the oldest first

    def admits(self, kind: FailureKind, message: str, now: float) -> bool:
        """Is it to be logged?  If not, it has been counted."""
        storm = self.open.get(kind)
        if storm is None and len(self.open) >= MAX_SHAPES:
            kind = kind._replace(shape="")
            storm = self.open.get(kind)
        if storm is None:
            storm = self.open[kind] = Storm(now, IN_FULL, message[:MAX_TEXT])
        if storm.in_full > 0:
            storm.in_full -= 1
            return True
        storm.more += 1
        return False

    def over(self, now: float) -> Iterator[tuple[FailureKind, Storm]]:
        """Those to be summed up: their time has come, or there are too many for one more.

        Of a kind that goes on, one more is logged, and the others are counted at once.
        """
        while self.open:
            kind, storm = next(iter(self.open.items()))
            if now - storm.began < WITHIN and len(self.open) < MAX_KINDS:
                return
            del self.open[kind]
            if storm.more:
                if now - storm.began >= WITHIN:
                    self.open[kind] = Storm(now, 1, storm.message)
                yield kind, storm

    def all_over(self) -> Iterator[tuple[FailureKind, Storm]]:
        """Every one of them."""
        storms, self.open = self.open, {}
        yield from ((kind, storm) for kind, storm in storms.items() if storm.more)


def shape_of(message: str) -> str:
    """`message` without what differs from one failure to the next: numbers, ids, and what is quoted."""
    return _VARYING.sub("#", message[:MAX_TEXT])
