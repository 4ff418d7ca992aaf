"""What a task may ask to know about the job that it is running for."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine, Generator, MutableMapping
from concurrent.futures import Future
from datetime import datetime
from types import SimpleNamespace
from typing import Any, ParamSpec, Protocol, Self

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from propolis.app.client.blocking import in_event_loop
from propolis.app.client.client import Client
from propolis.app.signature import Provided, current, encode_value
from propolis.app.task import Call, Task
from propolis.app.transaction import Transaction
from propolis.core import wire
from propolis.core.duration import Duration, milliseconds
from propolis.core.envelope import TRACE_HEADERS, Envelope
from propolis.core.ids import derive_id
from propolis.core.job import Lease, Progress, storable
from propolis.core.protocols import MAX_CHECKPOINT, MAX_OUTCOME
from propolis.core.schedule import INSTANT_HEADER, SCHEDULE_HEADER
from propolis.errors import CheckpointTooLarge, Misuse, OutcomeTooLarge

P = ParamSpec("P")

log = logging.getLogger("propolis.worker")

_LINE_MAX = 2000


class Listener(Protocol):
    """What hears the reports of a running job: the worker, as a rule."""

    def report(self, lease: Lease, progress: Progress | None, lines: tuple[str, ...]) -> None: ...

    def save(self, lease: Lease, checkpoint: bytes) -> Future[None]:
        """Gives when it is stored, or `LeaseLost`; called in any thread."""
        ...

    def stopping(self, lease: Lease) -> bool: ...

    def goes_on(self, lease: Lease, turn: Envelope, always: bool) -> None: ...


class JobOwner(Protocol):
    """The app that a job belongs to, as far as a job knows it."""

    @property
    def client(self) -> Client: ...

    @property
    def state(self) -> SimpleNamespace: ...


class Saving(Coroutine[Any, Any, None]):
    """The coroutine that saves; forgotten, it is an error in the log, where Python would only warn.

    So whoever forgets `await` hears of it, and nothing has to be looked after in jobs that do not save.
    """

    __slots__ = ("_begun", "_inner", "_whose")

    def __init__(self, inner: Coroutine[Any, Any, None], whose: str) -> None:
        self._inner = inner
        self._whose = whose
        self._begun = False

    def __await__(self) -> Generator[Any, Any, None]:
        self._begun = True
        return self._inner.__await__()

    def send(self, value: Any, /) -> Any:
        self._begun = True
        return self._inner.send(value)

    def throw(self, *error: Any) -> Any:
        self._begun = True  # its task was stopped first
        return self._inner.throw(*error)

    def close(self) -> None:
        self._begun = True
        self._inner.close()

    def __del__(self) -> None:
        if not self._begun:
            self._inner.close()
            log.error("%s was to save where it is, and did not: write `await job.save(…)`", self._whose)


class Job(Provided):
    """The running job, for a parameter annotated with it (its position does not matter).

    `fence` grows with every lease of this job: give it to your own storage, and have it refuse smaller
    ones, to make writes of a run that lost its lease harmless.
    """

    __slots__ = (
        "_always",
        "_checkpoint",
        "_emissions",
        "_listener",
        "_turn",
        "app",
        "emitted_bytes",
        "envelope",
        "gathered",
        "lease",
        "transaction",
    )

    def __init__(
        self, app: JobOwner, lease: Lease, envelope: Envelope, listener: Listener | None = None
    ) -> None:
        self.app = app
        self.lease = lease
        self.envelope = envelope
        self._listener = listener
        self._checkpoint = lease.checkpoint
        self._emissions: list[Envelope] | None = None
        self.emitted_bytes = 0
        self._turn: Envelope | None = None
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
        instant = self.envelope.headers.get(INSTANT_HEADER)
        return None if instant is None else datetime.fromisoformat(instant)

    @property
    def checkpoint(self) -> Any:
        """What this job has saved last, in this run or an earlier one, as plain values; None if nothing."""
        return None if self._checkpoint is None else msgspec.json.decode(self._checkpoint)

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
    def emissions(self) -> tuple[Envelope, ...]:
        """What is put when it ends as done."""
        return (*self.emitted, *(() if self._turn is None else (self._turn,)))

    @property
    def emitted(self) -> tuple[Envelope, ...]:
        """The same without its next turn."""
        return tuple(self._emissions or ())

    @property
    def last_words(self) -> tuple[Envelope, ...]:
        """What is put when it fails for good."""
        return (self._turn,) if self._turn is not None and self._always else ()

    def progress(self, done: float, total: float | None = None, note: str = "") -> None:
        """Show how far it is; the newest report counts.  `ValueError` for what is no number."""
        try:
            numbers = _number(done), None if total is None else _number(total)
        except (TypeError, OverflowError):
            raise ValueError(f"progress({done!r}, {total!r}) takes numbers") from None
        if self._listener is not None:
            self._listener.report(self.lease, Progress(*numbers, storable(str(note)[:_LINE_MAX])), ())

    def log(self, line: object) -> None:
        """Add a line to the job's own log, of which the newest hundred are kept."""
        if self._listener is not None:
            self._listener.report(self.lease, None, (storable(str(line)[:_LINE_MAX]),))

    def save(self, value: Any) -> Coroutine[Any, Any, None]:
        """Keep where the job is, for its next run if this one does not end it: `await job.save(value)`.

        It returns when that is stored.  `LeaseLost` if another run may have begun: stop then.
        `CheckpointTooLarge` beyond 64 KiB, and `BadCall`, a `TypeError`, for what has no JSON form; then
        nothing was saved.  `Misuse` at once in a plain function, which cannot await it.
        """
        if not in_event_loop():
            raise Misuse(
                "save() is to be awaited, which a plain function cannot: write job.save_now(...) instead"
            )
        return Saving(self._save(value), f"job {self.id} of {self.task}")

    async def _save(self, value: Any) -> None:
        checkpoint = self._encoded(value)
        if self._listener is not None:
            await asyncio.wrap_future(self._listener.save(self.lease, checkpoint))
        self._checkpoint = checkpoint

    def save_now(self, value: Any) -> None:
        """The same for a plain function."""
        if in_event_loop():
            raise Misuse("save_now() would stop the event loop that runs here: await job.save(...) instead")
        checkpoint = self._encoded(value)
        if self._listener is not None:
            self._listener.save(self.lease, checkpoint).result()
        self._checkpoint = checkpoint

    def _encoded(self, value: Any) -> bytes:
        if self.transaction is not None:
            raise Misuse(
                "a checkpoint stands at once, what a job writes in its Transaction only when it has ended: "
                "keep where it is in a row of your own"
            )
        checkpoint = encode_value(value)
        if len(checkpoint) > MAX_CHECKPOINT:
            raise CheckpointTooLarge(len(checkpoint), MAX_CHECKPOINT)
        return checkpoint

    def emit(self, task: Task[P, Any] | Call[P, Any], *args: P.args, **kwargs: P.kwargs) -> str:
        """Put another job if, and only if, this one ends as done, in the same step.  Returns its id.

        `OutcomeTooLarge` where all that it emits has more than 32 MiB.
        """
        if self._emissions is None:
            self._emissions = []
        made = task.job(*args, **kwargs)
        if not made.chosen:
            made = replace(made, id=derive_id(self.id, "emit", len(self._emissions)), chosen=True)
        [made] = self.app.client.stamped([made])
        size = self.emitted_bytes + len(wire.encode(made))  # what is wrong is wrong here
        if size > MAX_OUTCOME:
            raise OutcomeTooLarge(size, MAX_OUTCOME)
        self._emissions.append(made)
        self.emitted_bytes = size
        return made.id

    def again(self, *, after: Duration, always: bool = False) -> str:
        """Put this job once more, to run `after` this turn has ended.  Returns the id of the next turn.

        It is put in the step that ends this turn as done; a retry is still this turn.  With `always` also in
        the step that gives it up, so that a failure does not end the chain.  There is never more than one
        turn at a time: they hand a unique key on, which is the job's own if it has one.  The last of
        several calls counts.
        """
        envelope, delay_ms = self.envelope, milliseconds(after)
        lasts_ms = (
            None if envelope.expires_in_ms is None else max(0, envelope.expires_in_ms - envelope.delay_ms)
        )
        turn = replace(
            envelope,
            id=derive_id(self.id, "again"),
            chosen=True,
            delay_ms=delay_ms,
            due_at=None,
            expires_in_ms=None if lasts_ms is None else lasts_ms + delay_ms,
            unique=envelope.unique or f"again:{self.id}",
            batch=None,  # which would never end
            member=0,
            headers={name: value for name, value in envelope.headers.items() if _is_handed_on(name)},
        )
        wire.encode(turn)
        self.goes_on(turn, always)
        if self._listener is not None:
            self._listener.goes_on(self.lease, turn, always)
        return turn.id

    def goes_on(self, turn: Envelope, always: bool) -> None:
        """It has a next turn, as `again` was called here or in another process."""
        self._turn, self._always = turn, always

    def take_over(self, emissions: list[Envelope], size: int) -> None:
        """What this job has emitted in another process, and its bytes."""
        self._emissions, self.emitted_bytes = emissions, size


def _number(number: float) -> float:
    """A plain one, which can be stored, of whatever counts as one, such as a scalar of numpy."""
    if not math.isfinite(number):
        raise OverflowError(number)
    return float(number)


def _is_handed_on(header: str) -> bool:
    """A header of our own, such as a place in a flow, was for one turn; that of the instant goes on.

    Each turn is a trace of its own: one that never ends could not be shown.
    """
    ours = header.startswith("propolis-") and header not in (SCHEDULE_HEADER, INSTANT_HEADER)
    return not ours and header not in TRACE_HEADERS


def current_job() -> Job | None:
    """The job that is running here, for code that is too deep down to be handed it."""
    job = current.get()
    assert job is None or isinstance(job, Job)
    return job


# --- in the lines of logs -----------------------------------------------------------------


def fields_of(lease: Lease) -> dict[str, Any]:
    """Which run it is, as the fields of a line in a log."""
    return {
        "job": lease.id,
        "task": lease.task,
        "attempt": lease.attempt,
        "queue": lease.queue,
        "worker": lease.holder,
    }


def as_extra(fields: dict[str, Any]) -> dict[str, Any]:
    """For a record, without what the app's own records have already: `logging` would refuse that."""
    taken = vars(logging.makeLogRecord({}))
    return {name: value for name, value in fields.items() if name not in taken}


def extra_of(lease: Lease) -> dict[str, Any]:
    return as_extra(fields_of(lease))


class JobFilter(logging.Filter):
    """Gives each record `job` (its id), `task`, `attempt`, `queue` and `worker`: those of the job that runs.

    Add it to a handler, where it sees the records of all loggers.  It lets every record pass, and leaves what
    the record has already.  Where no job runs, all of them are `outside`.
    """

    def __init__(self, outside: str | None = "-") -> None:
        super().__init__()
        self._outside = dict.fromkeys(_FIELDS, outside)

    def filter(self, record: logging.LogRecord) -> bool:
        given = record.__dict__
        if "job" in given and "attempt" in given and "worker" in given:  # as our own lines have them
            return True
        job = current_job()
        for name, value in (self._outside if job is None else fields_of(job.lease)).items():
            given.setdefault(name, value)
        return True


_FIELDS = ("job", "task", "attempt", "queue", "worker")


def add_job(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """The same as a processor of structlog, which puts the fields into its event; none where no job runs."""
    job = current_job()
    if job is not None:
        for name, value in fields_of(job.lease).items():
            event.setdefault(name, value)
    return event
