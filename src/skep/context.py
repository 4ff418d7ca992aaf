"""What a task may ask to know about the job that it is running for."""

from __future__ import annotations

import math
from datetime import datetime
from types import SimpleNamespace
from typing import Any, ParamSpec, Protocol, Self

from msgspec import Raw
from msgspec.structs import replace

from skep import job as vocabulary
from skep import wire
from skep.duration import Duration, milliseconds
from skep.job import Lease, Progress, derive_id, storable
from skep.producer import Producer
from skep.schedule import INSTANT_HEADER, SCHEDULE_HEADER
from skep.signature import Provided, current
from skep.task import Call, Task
from skep.transaction import Transaction

P = ParamSpec("P")

_LINE_MAX = 2000


class Listener(Protocol):
    """Who hears what a running job tells; the worker, as a rule."""

    def told(self, lease: Lease, progress: Progress | None, lines: tuple[str, ...]) -> None: ...

    def stopping(self, lease: Lease) -> bool: ...

    def goes_on(self, lease: Lease, turn: vocabulary.Job, always: bool) -> None: ...


class Job(Provided):
    """The running job, for a parameter annotated with it (its position does not matter).

    `fence` grows with every lease of this job: give it to your own storage, and have it refuse smaller
    ones, to make writes of a run that lost its lease harmless.
    """

    __slots__ = (
        "_always",
        "_emissions",
        "_listener",
        "_turn",
        "app",
        "envelope",
        "gathered",
        "lease",
        "transaction",
    )

    def __init__(
        self, app: Producer, lease: Lease, envelope: vocabulary.Job, listener: Listener | None = None
    ) -> None:
        self.app = app
        self.lease = lease
        self.envelope = envelope
        self._listener = listener
        self._emissions: list[vocabulary.Job] | None = None
        self._turn: vocabulary.Job | None = None
        self._always = False
        self.gathered: Raw | None = None  # arguments that are not in the envelope: results of a fan-out
        self.transaction: Transaction | None = None  # in which it runs and ends, if its task asks for one

    @classmethod
    async def given(cls, job: Self) -> Self:
        return job

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
    def instant(self) -> datetime | None:
        """The instant that a schedule has put it for, which may be long ago; None: no schedule has."""
        told = self.envelope.headers.get(INSTANT_HEADER)
        return None if told is None else datetime.fromisoformat(told)

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
        return self._emissions is not None or self._turn is not None

    @property
    def emissions(self) -> tuple[vocabulary.Job, ...]:
        """What is put when it ends as done."""
        return (*self.emitted, *(() if self._turn is None else (self._turn,)))

    @property
    def emitted(self) -> tuple[vocabulary.Job, ...]:
        """The same without its next turn."""
        return tuple(self._emissions or ())

    @property
    def last_words(self) -> tuple[vocabulary.Job, ...]:
        """What is put when it fails for good."""
        return (self._turn,) if self._turn is not None and self._always else ()

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

    def again(self, *, after: Duration, always: bool = False) -> str:
        """Put this job once more, to run `after` this turn has ended.  Returns the id of the next turn.

        It is put in the step that ends this turn as done; a retry is still this turn.  With `always` also in
        the step that gives it up, so that a failure does not end the chain.  There is never more than one
        turn at a time: they hand a unique key on, which is the job's own if it has one.  Called twice, the
        last word counts.
        """
        told, delay_ms = self.envelope, milliseconds(after)
        lasts_ms = None if told.expires_in_ms is None else max(0, told.expires_in_ms - told.delay_ms)
        turn = replace(
            told,
            id=derive_id(self.id, "again"),
            chosen=True,
            delay_ms=delay_ms,
            due_at=None,
            expires_in_ms=None if lasts_ms is None else lasts_ms + delay_ms,
            unique=told.unique or f"again:{self.id}",
            batch=None,  # which would never end
            member=0,
            headers={name: value for name, value in told.headers.items() if _is_handed_on(name)},
        )
        wire.encode(turn)
        self.goes_on(turn, always)
        if self._listener is not None:
            self._listener.goes_on(self.lease, turn, always)
        return turn.id

    def goes_on(self, turn: vocabulary.Job, always: bool) -> None:
        """It has a next turn, as was said here or in another process."""
        self._turn, self._always = turn, always

    def take_over(self, emissions: list[vocabulary.Job]) -> None:
        """What this job has emitted in another process."""
        self._emissions = emissions


def _is_handed_on(header: str) -> bool:
    """What is skep's own, such as a place in a flow, was for one turn; but not for which instant it is."""
    return not header.startswith("skep-") or header in (SCHEDULE_HEADER, INSTANT_HEADER)


def current_job() -> Job | None:
    """The job that is running here, for code that is too deep down to be handed it."""
    job = current.get()
    assert job is None or isinstance(job, Job)
    return job
