"""The worker: everything between a lease and its settling."""

from __future__ import annotations

from propolis.worker.settings import Lane, Mode, Settings
from propolis.worker.worker import Worker

__all__ = ["Lane", "Mode", "Settings", "Worker"]
