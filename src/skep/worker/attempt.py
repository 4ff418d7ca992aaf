"""One run of a job, as values: what it is called with, and how it ended."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from skep.context import Job
from skep.flow.course import Course
from skep.task import Task
from skep.worker.slots import Stop


class Attempt(Struct):
    """One run of one job, ready to be performed; only what a fan-out has left is gathered when it starts."""

    job: Job
    task: Task[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    course: Course | None = None


class Ended(Struct):
    """How a run ended: it returned, raised, or was stopped."""

    value: Any = None
    error: BaseException | None = None
    stop: Stop | None = None
