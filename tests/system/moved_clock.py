"""A clock that a test moves for all of its processes."""

from __future__ import annotations

import os
import time
from pathlib import Path


class MovedClock:
    """The machine's, moved on by as many microseconds as a file says."""

    def __init__(self, moved: Path) -> None:
        self._moved = moved

    def now_us(self) -> int:
        return time.time_ns() // 1000 + int(self._moved.read_text(encoding="ascii"))


def clock_of_the_test() -> MovedClock | None:
    moved = os.environ.get("PROPOLIS_TEST_CLOCK")
    return MovedClock(Path(moved)) if moved else None
