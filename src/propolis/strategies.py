"""What becomes of a job after success, error or timeout: `repeat(5, exponential("2s")).then(dead)`."""

from __future__ import annotations

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
    "Bury",
    "Delete",
    "Ending",
    "Exponential",
    "Fixed",
    "Repeat",
    "Strategy",
    "archive",
    "dead",
    "delete",
    "exponential",
    "fixed",
    "repeat",
    "repeat_forever",
]
