"""skep: background jobs that are never lost."""

from __future__ import annotations

from skep.app import App
from skep.batch import BatchState, BatchStatus
from skep.batches import BatchHandle, BatchReport
from skep.broker import Durability, Filter, Scope
from skep.context import Job, current_job
from skep.errors import SkepError
from skep.flow import Flow, FlowRun, FlowState, FlowStatus, each, fork, start
from skep.handle import Handle
from skep.job import State, UniqueUntil
from skep.schedule import cron, every
from skep.signature import Depends
from skep.strategy import archive, dead, delete, exponential, fixed, repeat, repeat_forever
from skep.task import Task
from skep.transaction import Transaction
from skep.verdict import Failure, Retry, Snooze

__version__ = "0.1.0"

__all__ = [
    "App",
    "BatchHandle",
    "BatchReport",
    "BatchState",
    "BatchStatus",
    "Depends",
    "Durability",
    "Failure",
    "Filter",
    "Flow",
    "FlowRun",
    "FlowState",
    "FlowStatus",
    "Handle",
    "Job",
    "Retry",
    "Scope",
    "SkepError",
    "Snooze",
    "State",
    "Task",
    "Transaction",
    "UniqueUntil",
    "archive",
    "cron",
    "current_job",
    "dead",
    "delete",
    "each",
    "every",
    "exponential",
    "fixed",
    "fork",
    "repeat",
    "repeat_forever",
    "start",
]
