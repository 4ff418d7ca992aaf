"""A child process: makes the app again, and runs the jobs that its worker gives it, one at a time.

    python -m skep.worker.child

It speaks over its standard input and output, which it hides from the jobs: what they print goes to the
standard error of the worker.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import faulthandler
import inspect
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn, Self, TypeVar, cast

from msgspec import Raw
from msgspec.structs import replace

from skep import verdict, wire
from skep.address import Address
from skep.broker import Engine
from skep.context import Job
from skep.errors import EngineError
from skep.job import Job as Envelope
from skep.job import Lease, Progress, describe, storable
from skep.registry import Registry
from skep.signature import current, encode_value
from skep.task import Task
from skep.worker.frames import (
    NOTHING,
    Answer,
    End,
    Failed,
    FrameBuffer,
    GoesOn,
    NotReady,
    Order,
    Raised,
    Ready,
    Reply,
    Retried,
    Returned,
    Run,
    Snoozed,
    Start,
    Stopping,
    Told,
    decode_order,
    pack,
)
from skep.worker.origin import restore
from skep.worker.providing import provide
from skep.worker.settings import LOG_FORMAT

T = TypeVar("T")

REASON_MAX = 2000
CHUNK = 2**16
MORE_LIKELY = "500"  # of ±1000: when memory is short, the kernel is to choose us and not the worker
PR_SET_PDEATHSIG = 1


class Voice:
    """The two pipes.  Orders are heard in a thread, so that also a job that computes can be told to stop."""

    def __init__(self) -> None:
        self.orders: SimpleQueue[Order] = SimpleQueue()
        self._stopping = False
        self._in, self._out = os.dup(0), os.dup(1)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        hide_standard_streams()
        threading.Thread(target=self._listen, name="skep-orders", daemon=True).start()

    def say(self, reply: Reply) -> None:
        if os.getpid() != self._pid:  # a fork that a job has made and not ended: it must not answer for us
            os._exit(1)
        rest = memoryview(pack(reply))
        with self._lock:
            while rest:
                rest = rest[os.write(self._out, rest) :]

    # --- as the listener of the running job --------------------------------------------------

    def told(self, lease: Lease, progress: Progress | None, lines: tuple[str, ...]) -> None:  # noqa: ARG002
        self.say(Told(progress, tuple(line.encode("utf-8", "backslashreplace").decode() for line in lines)))

    def goes_on(self, lease: Lease, turn: Envelope, always: bool) -> None:  # noqa: ARG002
        self.say(GoesOn(Raw(wire.encode(turn)), always))

    def stopping(self, lease: Lease) -> bool:  # noqa: ARG002
        return self._stopping

    def _listen(self) -> None:
        frames = FrameBuffer()
        while data := os.read(self._in, CHUNK):
            for body in frames.feed(data):
                self._take(decode_order(body))
        end_with_everything_started()  # the worker is gone: nobody wants what we do

    def _take(self, order: Order) -> None:
        if isinstance(order, Stopping):
            self._stopping = True
        else:
            self.orders.put(order)


class Host:
    """The app in this process, with an event loop that lives as long as it does."""

    def __init__(self, app: Registry, voice: Voice) -> None:
        self._app = app
        self._voice = voice
        self._runner = asyncio.Runner()

    def start(self) -> None:
        if Address(self._app.url).scheme == "memory":
            self._app._engine = cast("Engine", Elsewhere())
        self._call_state_hooks("startup")

    def end(self) -> None:
        self._call_state_hooks("shutdown")
        with suppress(EngineError):
            self._runner.run(self._app.aclose())
        self._runner.close()

    def answer(self, run: Run) -> Answer:
        """Run a job, and make of whatever happens a value."""
        task: Task[..., Any] | None = None
        try:
            with memory_limited_to(run.memory_limit):
                envelope = envelope_of(run)
                task = self._app.task_named(envelope.task)
                job = Job(self._app, run.lease, envelope, self._voice)
                value = self._perform(job, task)
                return judged(value) if isinstance(value, verdict.Verdict) else returned(value, job)
        except verdict.Verdict as said:
            return judged(said)
        except BaseException as error:
            told = describe(error, "".join(traceback.format_exception(error)))
            return Raised(told, None if task is None else rule_for(task, error))

    def _perform(self, job: Job, task: Task[..., Any]) -> Any:
        args, kwargs = task.arguments(job.envelope)
        context = contextvars.copy_context()
        context.run(current.set, job)
        if task.is_async:
            return self._run(call_async(task, job, args, kwargs), context)
        if not task.signature.provided:
            return context.run(task.function, *args, **kwargs)
        return self._call_with_dependencies(task, job, args, kwargs, context)

    def _call_with_dependencies(
        self,
        task: Task[..., Any],
        job: Job,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: contextvars.Context,
    ) -> Any:
        """Outside of the loop, so that a plain function may have one of its own."""
        stack = AsyncExitStack()
        try:
            kwargs |= self._run(provide(task.signature, job, stack), context)
            value = context.run(task.function, *args, **kwargs)
        except BaseException as error:
            if not self._run(stack.__aexit__(type(error), error, error.__traceback__), context):
                raise
            return None  # a dependency has dealt with it
        self._run(stack.aclose(), context)
        return value

    def _run(self, coroutine: Coroutine[Any, Any, T], context: contextvars.Context) -> T:
        return self._runner.run(coroutine, context=context)

    def _call_state_hooks(self, event: str) -> None:
        for hook in self._app.hooks[event]:
            self._runner.run(call_hook(hook, self._app))


class Elsewhere:
    """The memory of the worker, which a child cannot reach: better an error than a job that nobody sees."""

    async def open(self) -> Self:
        raise EngineError(
            "memory:// lives in the worker's process, and this is a child of it: use job.emit, or an "
            "engine that processes can share, such as sqlite:///jobs.db"
        )

    async def close(self) -> None:
        return


def envelope_of(run: Run) -> Envelope:
    envelope = wire.decode(run.lease.body)
    return envelope if run.gathered == NOTHING else replace(envelope, args=run.gathered)


async def call_async(task: Task[..., Any], job: Job, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    async with AsyncExitStack() as stack:
        provided = await provide(task.signature, job, stack)
        return await task.function(*args, **kwargs, **provided)


async def call_hook(hook: Callable[..., Any], app: Registry) -> None:
    answer = hook(app.state)
    if inspect.isawaitable(answer):
        await answer


# --- endings as values -------------------------------------------------------------------


def returned(value: Any, job: Job) -> Returned:
    emissions = tuple(Raw(wire.encode(emission)) for emission in job.emitted)
    try:
        encoded = encode_value(value)
    except (TypeError, ValueError) as error:
        return Returned(unsendable=describe(error).message, emissions=emissions)
    if len(encoded) > wire.HARD_LIMIT:
        return Returned(unsendable=f"{len(encoded):,} bytes are too many", emissions=emissions)
    return Returned(Raw(encoded), emissions=emissions)


def judged(said: verdict.Verdict) -> Answer:
    match said:
        case verdict.Retry(reason=reason, after=after):
            return Retried(storable(reason[:REASON_MAX]), after)
        case verdict.Snooze(after=after):
            return Snoozed(after)
        case _:
            return Failed(storable(str(said)[:REASON_MAX]))


def rule_for(task: Task[..., Any], error: BaseException) -> int | None:
    """The place of the rule for the nearest class: the worker has the same rules, not the same classes."""
    kinds = [kind for kind, _ in task.options.error_rules]
    return next((kinds.index(kind) for kind in type(error).__mro__ if kind in kinds), None)


# --- the process -------------------------------------------------------------------------


@contextmanager
def memory_limited_to(limit: int | None) -> Iterator[None]:
    """`MemoryError` beyond it; lifted before the error is described, which also takes memory."""
    if limit is None:
        yield
        return
    import resource  # not on every platform

    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def hide_standard_streams() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a text file, at start


def leave_signals_to_the_worker() -> None:
    """A terminal or a service manager may send them to everybody; the worker decides what they mean for us.

    A handler that does nothing, because signals that are ignored would also be so in what a job starts.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)


def die_with_the_worker() -> None:
    """Also where the orders cannot be heard, as in a C function that does not let go of the interpreter."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(MORE_LIKELY, encoding="ascii")


def end_with_everything_started() -> NoReturn:
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def make_host(start: Start, voice: Voice) -> Host:
    if start.log_level is not None:
        logging.basicConfig(level=start.log_level, format=LOG_FORMAT)
    app = restore(start.origin)
    host = Host(app, voice)
    host.start()
    voice.say(Ready(tuple(app.tasks)))
    return host


def main() -> int:
    die_with_the_worker()
    leave_signals_to_the_worker()
    faulthandler.enable()
    voice = Voice()
    start = voice.orders.get()
    assert isinstance(start, Start)
    try:
        host = make_host(start, voice)
    except BaseException as error:
        voice.say(NotReady(describe(error, "".join(traceback.format_exception(error)))))
        return 1
    while not isinstance(order := voice.orders.get(), End):
        assert isinstance(order, Run)
        voice.say(host.answer(order))
    host.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
