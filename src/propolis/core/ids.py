"""The ids of jobs: new ones, sortable by time, and those that follow from others."""

from __future__ import annotations

import os
import time
import uuid
from itertools import count

_DERIVED = uuid.UUID("7c0f5a52-3f86-5d0b-9d5e-5ce9b0a7e1d4")


def new_id() -> str:
    """A fresh UUIDv7: sortable by time, and by order within a millisecond; safe across forks and threads."""
    now = time.time_ns() // 1_000_000
    beginning = _beginning
    if beginning.millisecond != now:
        beginning = _begin(now)
    return f"{beginning.text}{next(beginning.numbers):012x}"


def is_own(job_id: str) -> bool:
    """Whether `new_id` has made it in this very process, not long ago: whoever else has it has it from us."""
    first = _made.get(job_id[:_STAMP], _made_before.get(job_id[:_STAMP]))
    if first is None or len(job_id) != 36:
        return False
    return 0 <= int(job_id[_STAMP:], 16) - first < 1 << 32


class _Beginning:
    """What the ids of one millisecond have in common: randomness is drawn once, and counted up from there."""

    __slots__ = ("first", "millisecond", "numbers", "text")

    def __init__(self, millisecond: int) -> None:
        drawn = int.from_bytes(os.urandom(10), "big")
        self.millisecond = millisecond
        self.first = drawn & (1 << 47) - 1  # of the last 48 bits, with room to grow
        self.numbers = count(self.first)
        stamp, variant = millisecond & 0xFFFF_FFFF_FFFF, 0x8000 | drawn >> 47 & 0x3FFF
        self.text = f"{stamp >> 16:08x}-{stamp & 0xFFFF:04x}-7{drawn >> 68:03x}-{variant:04x}-"


def _begin(millisecond: int) -> _Beginning:
    global _beginning, _made, _made_before
    _beginning = made = _Beginning(millisecond)  # two threads may do so at once: each has its own randomness
    if len(_made) >= _MAX_MADE:  # and if both do this, some are forgotten too early, which does no harm
        _made, _made_before = {}, _made
    _made[made.text] = made.first
    return made


def _begin_again() -> None:
    """In a fork: it must not go on where its parent goes on."""
    global _made, _made_before
    _made, _made_before = {}, {}
    _begin(-1)


_STAMP = 24  # characters that the ids of one millisecond have in common
_MAX_MADE = 5000
_made: dict[str, int] = {}  # how the ids of the last milliseconds begin, and the first number of each
_made_before: dict[str, int] = {}  # those before
_beginning = _Beginning(-1)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)


def derive_id(*parts: object) -> str:
    """An id that follows from its parts: the same every time, so that putting it twice makes one job."""
    return str(uuid.uuid5(_DERIVED, "\0".join(str(part) for part in parts)))
