"""propolis: background jobs that are never lost."""

from __future__ import annotations

from propolis.app.application import App
from propolis.app.batch.report import BatchReport
from propolis.app.client.handle import Handle
from propolis.app.context import Job, current_job
from propolis.app.signature import Depends
from propolis.app.task import Task
from propolis.app.transaction import Transaction
from propolis.app.verdicts import Discard, Retry, Snooze
from propolis.core.schedule import cron, every
from propolis.errors import PropolisError

__version__ = "0.1.0"

__all__ = [
    "App",
    "BatchReport",
    "Depends",
    "Discard",
    "Handle",
    "Job",
    "PropolisError",
    "Retry",
    "Snooze",
    "Task",
    "Transaction",
    "cron",
    "current_job",
    "every",
]
