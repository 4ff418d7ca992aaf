"""What the operators' verbs take and give: states, filters, statuses."""

from __future__ import annotations

from propolis.app.batch.new_batch import BatchHandle
from propolis.app.operate.breakers import BreakerChange, BreakerState
from propolis.app.operate.limits import LimitUse
from propolis.app.operate.rules import RuleState
from propolis.app.operate.workers import WorkerInfo, WorkerState
from propolis.core.batch import BatchState, BatchStatus
from propolis.core.envelope import UniqueUntil
from propolis.core.job import Error, Event, JobInfo, Member, Progress, State
from propolis.core.protocols import Counts, Durability, Filter, Rule, RuleKind, Scope
from propolis.core.schedule import ScheduleRecord

__all__ = [
    "BatchHandle",
    "BatchState",
    "BatchStatus",
    "BreakerChange",
    "BreakerState",
    "Counts",
    "Durability",
    "Error",
    "Event",
    "Filter",
    "JobInfo",
    "LimitUse",
    "Member",
    "Progress",
    "Rule",
    "RuleKind",
    "RuleState",
    "ScheduleRecord",
    "Scope",
    "State",
    "UniqueUntil",
    "WorkerInfo",
    "WorkerState",
]
