"""Every error that propolis raises, each named for what happened.

The message says what to do next; the details are attributes.  A driver's own error never
crosses an engine: it is chained with `from`.
"""

from __future__ import annotations

from typing import Any

_SHOWN = 100


class PropolisError(Exception):
    """The root of everything that propolis raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Let an error cross a process pool, which would otherwise call `__init__` with the message alone."""
        return _remade, (type(self), self.args, self.__dict__)


def _remade(
    kind: type[PropolisError], args: tuple[object, ...], attributes: dict[str, object]
) -> PropolisError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


def _shown(value: object) -> str:
    """A stranger's value, as a message quotes it: cut, since its length may be what is wrong with it."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# --- what a caller wrote is wrong --------------------------------------------------------


class BadSetting(PropolisError, ValueError):
    """A value given to propolis cannot be used; nothing was stored."""


class Misuse(PropolisError):
    """Code uses propolis in a way that cannot work, with whatever values; nothing was stored.

    Running a job again would not help, so this ends it at once, as `Discard` does.
    """


class BadCall(Misuse, TypeError):
    """What is called does not take such arguments, or a value has no JSON form."""


class BadDuration(BadSetting):
    def __init__(self, value: object) -> None:
        super().__init__(
            f'{_shown(value)} is not a duration: write "90s", "1h30m", "5 minutes", seconds, or a '
            f"timedelta, from nothing to 100 years"
        )
        self.value = value


class BadName(BadSetting):
    def __init__(self, what: str, name: object, rule: str) -> None:
        super().__init__(f"{_shown(name)} cannot be a {what}: {rule}")
        self.what = what
        self.name = name


class UnknownTask(PropolisError):
    def __init__(self, name: str) -> None:
        super().__init__(f"no task named {name!r}: does the worker import its module?")
        self.name = name


class NoTransactions(BadSetting):
    """A task asks for a transaction that its engine cannot lend."""

    def __init__(self, task: str, url: str) -> None:
        super().__init__(
            f"{task} asks for a Transaction, and {url} lends none: use postgresql://; in a test, call the "
            f"function itself with a Transaction of your own connection"
        )
        self.task = task


class AppNotFound(BadSetting):
    """The path "module:app" leads to no app."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"no app at {_shown(path)}: {why}")
        self.path = path


# --- what travelled is wrong -------------------------------------------------------------


class BrokenPayload(PropolisError):
    """These bytes are no job.  They are kept as they came, with this reason."""


class RecordTooLarge(PropolisError):
    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(
            f"{what} has {size:,} bytes where {limit:,} is the limit: a record is a small value, keep "
            f"the data elsewhere and store a reference"
        )
        self.size = size
        self.limit = limit


class PayloadTooLarge(BrokenPayload):
    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(
            f"{what} is {size:,} where {limit:,} is the limit: store the data elsewhere and pass a "
            f"reference, or raise the limit"
        )
        self.size = size
        self.limit = limit


class NewerVersion(BrokenPayload):
    def __init__(self, version: int, known: int) -> None:
        super().__init__(
            f"the job was written in version {version} of the wire format, and this propolis reads up to "
            f"version {known}: upgrade the worker, then replay the job"
        )
        self.version = version
        self.known = known


# --- what the queue answers --------------------------------------------------------------


class QueueFull(PropolisError):
    """A queue has no room for what was put, and nothing of it was.

    `bound` is what bounds it: its cap on "jobs" that wait, of which `limit` are the most and `would_hold` is
    how many it would hold with these (None: its engine does not say); or the "memory" of a server.
    """

    bound = "jobs"

    def __init__(self, queue: str, limit: int, would_hold: int | None = None) -> None:
        with_these = "" if would_hold is None else f" and would hold {would_hold:,} with this put"
        super().__init__(
            f"queue {queue!r} is full: it has a cap of {limit:,} waiting jobs{with_these}: try again later, "
            f'wait for room with using(wait="30s"), or raise its cap (`propolis queues cap`)'
        )
        self.queue = queue
        self.limit = limit
        self.would_hold = would_hold


class DuplicateJob(PropolisError):
    """The unique key of a call is held, and the call asked to be refused then.  Nothing was put."""

    def __init__(self, task: str, unique: str | None, job_id: str) -> None:
        super().__init__(
            f"{task}: job {job_id} with the unique key {_shown(unique)} has not ended, so no other was put: "
            f"wait for that one, or leave out on_conflict= to get a handle on it"
        )
        self.task = task
        self.unique = unique
        self.job_id = job_id


class UnknownBatch(PropolisError):
    def __init__(self, batch: str) -> None:
        super().__init__(f"no batch {batch!r}: it was never opened, was deleted, or its time is over")
        self.batch = batch


class BatchSealed(PropolisError):
    def __init__(self, batch: str) -> None:
        super().__init__(f"batch {batch!r} is sealed: only its own members may still add to it, by emitting")
        self.batch = batch


class FlowBroken(PropolisError):
    """A flow cannot go on, or what was taken for a flow is none."""


class FlowFailed(PropolisError):
    """The flow has ended without the result that somebody asked for."""

    def __init__(self, flow: str, state: str, why: str) -> None:
        super().__init__(f"flow {flow} ended as {state}: {why}")
        self.flow = flow
        self.state = state


class UnknownFlow(PropolisError):
    def __init__(self, flow: str) -> None:
        super().__init__(f"no flow {flow!r}: it was never started, was deleted, or its time is over")
        self.flow = flow


# --- what the engine answers -------------------------------------------------------------


class EngineError(PropolisError):
    """The engine could not do what was asked, for a reason outside of the job."""


class UnknownEngine(EngineError, ValueError):
    def __init__(self, url: str, known: list[str]) -> None:
        super().__init__(f"no engine for {_shown(url)}: the URL must begin with one of {', '.join(known)}")
        self.url = url


class DriverMissing(EngineError, ImportError):
    def __init__(self, scheme: str, module: str, extra: str) -> None:
        super().__init__(f"{scheme} needs {module}, which is not installed: install propolis[{extra}]")


class EngineUnavailable(EngineError):
    """The engine could not be reached, or did not answer in time, and the call had no effect."""


class Busy(EngineError):
    """Somebody's open transaction holds what this call needs: nothing was changed.

    `pids` are the sessions that hold it, as far as they were seen; `holders` says of each what it is.
    """

    def __init__(self, where: str, holders: dict[int, str]) -> None:
        named = "; ".join(holders.values()) or "`propolis check` names those that stay open for long"
        super().__init__(
            f"{where}: an open transaction holds what this needs ({named}): nothing was changed; try again "
            f"when that has ended"
        )
        self.pids = tuple(holders)
        self.holders = tuple(holders.values())


class OutcomeUnknown(EngineError):
    """The answer was lost: the call may or may not have had its effect.

    A put may be repeated with the same jobs and token without making a second job.
    """


class EngineClosed(EngineError):
    def __init__(self) -> None:
        super().__init__("the engine is not open: use `async with` or call open() first")


class ForkedEngine(EngineError):
    def __init__(self, opened_by: int, used_by: int) -> None:
        super().__init__(
            f"the engine was opened by process {opened_by} and used by its fork {used_by}: "
            f"open a new engine after the fork"
        )
        self.opened_by = opened_by
        self.used_by = used_by


class StorageFull(EngineError):
    def __init__(self, where: str) -> None:
        super().__init__(f"no space left for {where}: nothing was changed; free some space and try again")
        self.where = where


class MemoryFull(QueueFull, StorageFull):
    """The server of the engine has no memory left for more jobs; the jobs that are there go on."""

    bound = "memory"

    def __init__(self, queue: str, where: str) -> None:
        EngineError.__init__(
            self,
            f"no memory left for {where}: nothing was put; try again when workers have made room, "
            f"or give the server more memory",
        )
        self.queue = queue
        self.limit = 0
        self.would_hold = None
        self.where = where


class StorageBroken(EngineError):
    """The storage failed a write or a read; nothing is acknowledged until it is mended."""


class UnsafeStorage(EngineError):
    """The engine cannot keep its promises in this place (a network file system, for example)."""


class SchemaTooNew(EngineError):
    def __init__(self, found: int, known: int) -> None:
        super().__init__(
            f"the storage has schema {found}, and this propolis knows schemas up to {known}: upgrade propolis"
        )
        self.found = found
        self.known = known


class SchemaTooOld(EngineError):
    """The storage lacks something of this code, which may not, or shall not, add it by itself."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where}: {why}: run `propolis init` with a role that may change the storage")
        self.where = where


class SchemaDrifted(EngineError):
    """The storage was made by a propolis that was never released, or changed by hand."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(
            f"{where} has not the tables that its version promises ({why}): restore it from a backup, use "
            f"the propolis that made it, or give another place for new storage"
        )
        self.where = where


class StorageNotReady(EngineError):
    """Whoever only looks found no storage, or storage of older code, and changes neither."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(
            f"{where}: {why}, and looking creates nothing: check the URL, or run `propolis init` first"
        )
        self.where = where


class DurabilityTooLow(EngineError):
    def __init__(self, found: str, floor: str, advice: str) -> None:
        super().__init__(f"the engine's durability is {found!r}, and the app asks for {floor!r}: {advice}")
        self.found = found
        self.floor = floor


# --- what happens in other processes -----------------------------------------------------


class ChildNotStarted(PropolisError):
    def __init__(self, why: str) -> None:
        super().__init__(f"no child process could be started for an isolated job: {why}")


class NoProcess(ChildNotStarted):
    """The system makes none just now, for want of memory or numbers: no job is to blame."""


class WorkerFailed(PropolisError):
    """A worker cannot go on.  What it had leased is given back; whoever watches over it starts another."""


class CommandFailed(PropolisError):
    """The program of a command has not ended with exit code 0."""

    def __init__(self, how: str, code: int, error_text: str) -> None:
        super().__init__(f"{how}: {error_text}" if error_text else how)
        self.code = code


# --- what a caller learns of a job --------------------------------------------------------


class LeaseLost(PropolisError):
    def __init__(self, job_id: str) -> None:
        super().__init__(
            f"the lease of job {job_id} is lost, and nothing was recorded: another run may have begun, so "
            f"stop here, and leave the rest to it"
        )
        self.job_id = job_id


class CheckpointTooLarge(Misuse):
    def __init__(self, size: int, limit: int) -> None:
        super().__init__(
            f"a checkpoint of {size:,} bytes was not saved, {limit:,} is the limit: save where the job is, "
            f"and keep what it has made elsewhere"
        )
        self.size = size
        self.limit = limit


class OutcomeTooLarge(PropolisError):
    def __init__(self, size: int, limit: int) -> None:
        super().__init__(
            f"the result of a job and what it emits have {size:,} bytes or more where {limit:,} is the "
            f"limit, and nothing of it was put: stream a batch with `app.batch`, emit fewer jobs, or pass "
            f"references instead of data"
        )
        self.size = size
        self.limit = limit


class JobFailed(PropolisError):
    """The job has ended without the result that somebody asked for."""

    def __init__(self, job_id: str, state: str, reason: str | None, error: str | None) -> None:
        error_text = f": {error}" if error else ""
        super().__init__(f"job {job_id} ended as {state} ({reason}){error_text}")
        self.job_id = job_id
        self.state = state
        self.reason = reason
        self.error = error


class WaitsForever(Misuse):
    def __init__(self) -> None:
        super().__init__(
            "a job that waits for another job holds a slot that the other one may need: make a flow or a "
            "batch of them, so that nobody waits, or give a timeout="
        )


class ResultNotKept(PropolisError):
    def __init__(self, job_id: str) -> None:
        super().__init__(
            f"there is no result of job {job_id}: the job is unknown, or its result is past its time, or was "
            f'never kept (to keep it, declare the task, or enqueue, with result_ttl="1h")'
        )
        self.job_id = job_id
