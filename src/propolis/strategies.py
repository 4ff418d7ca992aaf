"""What becomes of a job after success, error or timeout: `repeat(5, exponential("2s")).then(dead)`.

And what becomes of a task whose jobs fail too often: `breaker(failures="50%", of=20, within="1m")`.
"""

from __future__ import annotations

from propolis.app.operate.breakers import Breaker, breaker
from propolis.core.strategy import (
    Archive,
    Backoff,
    Bury,
    Delete,
    Ending,
    Exponential,
    Fixed,
    Repeat,
    Strategy,
    archive,
    dead,
    delete,
    exponential,
    fixed,
    repeat,
    repeat_forever,
)

__all__ = [
    "Archive",
    "Backoff",
    "Breaker",
    "Bury",
    "Delete",
    "Ending",
    "Exponential",
    "Fixed",
    "Repeat",
    "Strategy",
    "archive",
    "breaker",
    "dead",
    "delete",
    "exponential",
    "fixed",
    "repeat",
    "repeat_forever",
]
