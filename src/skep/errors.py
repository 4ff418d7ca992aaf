"""Every error that skep raises, each named for what happened.

The message says what to do next; the facts are attributes.  A driver's own error never
crosses a broker: it is chained with `from`.
"""

from __future__ import annotations

from typing import Any

_SHOWN = 100


class SkepError(Exception):
    """The root of everything raised on purpose by skep."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Let an error cross a process pool, which would otherwise call `__init__` with the message alone."""
        return _remade, (type(self), self.args, self.__dict__)


def _remade(kind: type[SkepError], args: tuple[object, ...], facts: dict[str, object]) -> SkepError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(facts)
    return error


def _shown(value: object) -> str:
    """A stranger's value in a message: what is wrong with it may be its length."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# --- what a caller wrote is wrong --------------------------------------------------------


class BadSetting(SkepError, ValueError):
    """A value given to skep cannot be used; nothing was stored."""


class BadDuration(BadSetting):
    def __init__(self, value: object) -> None:
        super().__init__(
            f'{_shown(value)} is not a duration: write "90s", "1h30m", seconds, or a timedelta, '
            f"from nothing to 100 years"
        )
        self.value = value


class BadName(BadSetting):
    def __init__(self, what: str, name: object, rule: str) -> None:
        super().__init__(f"{_shown(name)} cannot be a {what}: {rule}")
        self.what = what
        self.name = name


class UnknownTask(SkepError):
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
    """What was given as "module:app" leads to no app."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"no app at {_shown(path)}: {why}")
        self.path = path


# --- what travelled is wrong -------------------------------------------------------------


class BrokenPayload(SkepError):
    """Bytes that are not a job.  They are kept as they came, with this reason."""


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
            f"the job was written in version {version} of the wire format and this skep reads up to "
            f"{known}: upgrade the worker, then replay the job"
        )
        self.version = version
        self.known = known


# --- what the queue answers --------------------------------------------------------------


class LeaseLost(SkepError):
    def __init__(self, job_id: str, fence: int) -> None:
        super().__init__(
            f"lease {fence} of job {job_id} is no longer live: the job may be running elsewhere, "
            f"and that run decides"
        )
        self.job_id = job_id
        self.fence = fence


class QueueFull(SkepError):
    def __init__(self, queue: str, limit: int) -> None:
        super().__init__(
            f"queue {queue!r} already holds {limit:,} waiting jobs: try again later, or raise its cap"
        )
        self.queue = queue
        self.limit = limit


class UnknownBatch(SkepError):
    def __init__(self, batch: str) -> None:
        super().__init__(f"no batch {batch!r}: it was never opened, was deleted, or its linger time is over")
        self.batch = batch


class BatchSealed(SkepError):
    def __init__(self, batch: str) -> None:
        super().__init__(f"batch {batch!r} is sealed: only its own members may still add to it, by emitting")
        self.batch = batch


class FlowBroken(SkepError):
    """A flow cannot go on, or what was taken for one is none."""


class FlowFailed(SkepError):
    """The flow whose result was asked for has ended without one."""

    def __init__(self, flow: str, state: str, why: str) -> None:
        super().__init__(f"flow {flow} ended as {state}: {why}")
        self.flow = flow
        self.state = state


class UnknownFlow(SkepError):
    def __init__(self, flow: str) -> None:
        super().__init__(f"no flow {flow!r}: it was never started, was deleted, or its linger time is over")
        self.flow = flow


# --- what the engine answers -------------------------------------------------------------


class EngineError(SkepError):
    """The engine could not do it, for a reason outside the job."""


class UnknownEngine(EngineError, ValueError):
    def __init__(self, url: str, known: list[str]) -> None:
        super().__init__(f"no engine for {_shown(url)}: the URL must begin with one of {', '.join(known)}")
        self.url = url


class DriverMissing(EngineError, ImportError):
    def __init__(self, scheme: str, module: str, extra: str) -> None:
        super().__init__(f"{scheme} needs {module}, which is not installed: install skep[{extra}]")


class EngineUnavailable(EngineError):
    """The engine could not be reached, or did not answer in time, and the call had no effect."""


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
    """The server of the engine has no memory left for more jobs; those that it has go on."""

    def __init__(self, queue: str, where: str) -> None:
        EngineError.__init__(
            self,
            f"no memory left for {where}: nothing was put; try again when workers have made room, "
            f"or give it more",
        )
        self.queue = queue
        self.limit = 0
        self.where = where


class StorageBroken(EngineError):
    """The storage failed a write or a read; nothing is acknowledged until it is mended."""


class UnsafeStorage(EngineError):
    """The place given cannot keep the engine's promises (a network file system, for example)."""


class SchemaTooNew(EngineError):
    def __init__(self, found: int, known: int) -> None:
        super().__init__(f"the storage has schema {found} and this skep knows up to {known}: upgrade skep")
        self.found = found
        self.known = known


class DurabilityTooLow(EngineError):
    def __init__(self, found: str, floor: str, advice: str) -> None:
        super().__init__(f"the engine's durability is {found!r} and the floor is {floor!r}: {advice}")
        self.found = found
        self.floor = floor


# --- what happens in other processes -----------------------------------------------------


class ChildNotStarted(SkepError):
    def __init__(self, why: str) -> None:
        super().__init__(f"no child process could be started for an isolated job: {why}")


class CommandFailed(SkepError):
    """A command ended otherwise than with exit code 0."""

    def __init__(self, how: str, code: int, said: str) -> None:
        super().__init__(f"{how}: {said}" if said else how)
        self.code = code


# --- what a caller hears of a job --------------------------------------------------------


class JobFailed(SkepError):
    """The job whose result was asked for has ended without one."""

    def __init__(self, job_id: str, state: str, reason: str | None, error: str | None) -> None:
        told = f": {error}" if error else ""
        super().__init__(f"job {job_id} ended as {state} ({reason}){told}")
        self.job_id = job_id
        self.state = state
        self.reason = reason
        self.error = error


class WaitsForever(SkepError):
    def __init__(self) -> None:
        super().__init__(
            "a job that waits for another one holds a slot that the other one may need: make a flow or a "
            "batch of them, so that nobody waits, or give a timeout="
        )


class ResultNotKept(SkepError):
    def __init__(self, job_id: str) -> None:
        super().__init__(
            f"there is no result of job {job_id}: it is unknown, or its result is past its time, or never "
            f'kept (declare the task, or enqueue, with result_ttl="1h")'
        )
        self.job_id = job_id
