"""What becomes of a job after success, error or timeout: `repeat(5, exponential("2s")).then(dead)`.

And what bounds the jobs of a task: `limit(3, rate="100/min")`, `breaker(failures="50%", within="1m")`.
"""

from __future__ import annotations

from propolis.app.operate.breakers import Breaker, breaker
from propolis.app.operate.declared_limits import Limit, limit
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
    "Limit",
    "Repeat",
    "Strategy",
    "archive",
    "breaker",
    "dead",
    "delete",
    "exponential",
    "fixed",
    "limit",
    "repeat",
    "repeat_forever",
]
