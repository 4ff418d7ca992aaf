"""What a task may ask to know about the job that it is running for."""

from __future__ import annotations

import math
from contextvars import ContextVar
from datetime import datetime
from types import SimpleNamespace
from typing import Any, ParamSpec, Protocol

from msgspec.structs import replace

from skep import job as vocabulary
from skep import wire
from skep.job import Lease, Progress, derive_id, storable
from skep.producer import Producer
from skep.signature import Provided
from skep.task import Call, Task

P = ParamSpec("P")

_LINE_MAX = 2000


class Listener(Protocol):
    """Who hears what a running job tells; the worker, as a rule."""

    def told(self, lease: Lease, progress: Progress | None, lines: tuple[str, ...]) -> None: ...

    def stopping(self, lease: Lease) -> bool: ...


class Job(Provided):
    """The running job, for a parameter annotated with it (its position does not matter).

    `fence` grows with every lease of this job: give it to your own storage, and have it refuse smaller
    ones, to make writes of a run that lost its lease harmless.
    """

    __slots__ = ("_emissions", "_listener", "app", "envelope", "lease")

    def __init__(
        self, app: Producer, lease: Lease, envelope: vocabulary.Job, listener: Listener | None = None
    ) -> None:
        self.app = app
        self.lease = lease
        self.envelope = envelope
        self._listener = listener
        self._emissions: list[vocabulary.Job] | None = None

    def __repr__(self) -> str:
        return f"<Job {self.id} of {self.task}, attempt {self.attempt}>"

    @property
    def id(self) -> str:
        return self.lease.id

    @property
    def task(self) -> str:
        return self.lease.task

    @property
    def queue(self) -> str:
        return self.lease.queue

    @property
    def attempt(self) -> int:
        """The number of this run, from 1; runs that were given back do not count."""
        return self.lease.attempt

    @property
    def fence(self) -> int:
        return self.lease.fence

    @property
    def batch(self) -> str | None:
        return self.lease.batch

    @property
    def put_at(self) -> datetime:
        return self.lease.put_at

    @property
    def headers(self) -> dict[str, str]:
        return self.envelope.headers

    @property
    def state(self) -> SimpleNamespace:
        """What the start-up hooks of this worker have left for its jobs."""
        return self.app.state

    @property
    def stopping(self) -> bool:
        """Is the worker shutting down, or did somebody ask for this job to stop?"""
        return self._listener is not None and self._listener.stopping(self.lease)

    @property
    def emits(self) -> bool:
        return self._emissions is not None

    @property
    def emissions(self) -> tuple[vocabulary.Job, ...]:
        return tuple(self._emissions or ())

    def progress(self, done: float, total: float | None = None, note: str = "") -> None:
        """Show how far it is; the newest word counts.  `ValueError` for what is no number."""
        try:
            sound = math.isfinite(done) and (total is None or math.isfinite(total))
        except TypeError:
            sound = False
        if not sound:
            raise ValueError(f"progress({done!r}, {total!r}) takes numbers")
        if self._listener is not None:
            self._listener.told(self.lease, Progress(done, total, storable(str(note)[:_LINE_MAX])), ())

    def log(self, line: object) -> None:
        """Add a line to the job's own log, of which the newest hundred are kept."""
        if self._listener is not None:
            self._listener.told(self.lease, None, (storable(str(line)[:_LINE_MAX]),))

    def emit(self, task: Task[P, Any] | Call[P, Any], *args: P.args, **kwargs: P.kwargs) -> str:
        """Put another job if, and only if, this one ends as done, in the same step.  Returns its id."""
        if self._emissions is None:
            self._emissions = []
        made = task.job(*args, **kwargs)
        if not made.chosen:
            made = replace(made, id=derive_id(self.id, "emit", len(self._emissions)), chosen=True)
        wire.encode(made)  # what is wrong with it is wrong here, and not when the job ends
        self._emissions.append(made)
        return made.id

    def take_over(self, emissions: list[vocabulary.Job]) -> None:
        """What this job has emitted in another process."""
        self._emissions = emissions


current: ContextVar[Job | None] = ContextVar("skep_current_job", default=None)


def current_job() -> Job | None:
    """The job that is running here, for code that is too deep down to be handed it."""
    return current.get()
