"""A child process: makes the app again, and runs the jobs that its worker gives it, one at a time.

    python -m propolis.worker.children.child

It speaks over its standard input and output, which it hides from the jobs: what they print goes to the
standard error of the worker.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import faulthandler
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import AsyncExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn, Self, TypeVar, cast

from msgspec import Raw
from msgspec.structs import replace

from propolis.app import verdicts
from propolis.app.context import Job
from propolis.app.registry import Registry
from propolis.app.signature import current, encode_result
from propolis.app.task import Task
from propolis.app.transaction import Transaction
from propolis.core import wire
from propolis.core.envelope import Envelope
from propolis.core.job import Lease, Progress, describe, storable, traceback_text
from propolis.core.protocols import Engine, LendsTransactions, Lent
from propolis.engines.address import Address, masked
from propolis.errors import BadSetting, EngineError, LeaseLost, Misuse
from propolis.worker.attempt import traceback_of
from propolis.worker.calls.own_context import in_own_context
from propolis.worker.calls.performing import call_around, call_task
from propolis.worker.calls.threads import set_again
from propolis.worker.children import child_protocol as protocol
from propolis.worker.children.app_location import restore
from propolis.worker.children.environment import base_of, set_environment
from propolis.worker.process import signals
from propolis.worker.process.log_lines import log_as

T = TypeVar("T")

REASON_MAX = 2000
CHUNK = 2**16
MORE_LIKELY = "500"  # of ±1000: when memory is short, the kernel is to choose us and not the worker
PR_SET_PDEATHSIG = 1


class WorkerLink:
    """The two pipes.  Orders are read in a thread, so that they also reach a job that computes."""

    def __init__(self) -> None:
        self.orders: SimpleQueue[protocol.Order] = SimpleQueue()
        self._stopping = False
        self._numbers = count()
        self._saves: dict[int, tuple[str, Future[None]]] = {}  # the ids of their jobs, and whoever waits
        self._in, self._out = os.dup(0), os.dup(1)
        self._lock = threading.Lock()
        hide_standard_streams()
        threading.Thread(target=self._listen, name="propolis-orders", daemon=True).start()

    def send(self, reply: protocol.Reply) -> None:
        signals.end_if_forked()  # a fork that a job has made and not ended: it must not answer for us
        rest = memoryview(protocol.pack(reply))
        with self._lock:
            while rest:
                rest = rest[os.write(self._out, rest) :]

    # --- as the listener of the running job --------------------------------------------------

    def report(self, lease: Lease, progress: Progress | None, lines: tuple[str, ...]) -> None:  # noqa: ARG002
        self.send(
            protocol.Reported(
                progress, tuple(line.encode("utf-8", "backslashreplace").decode() for line in lines)
            )
        )

    def save(self, lease: Lease, checkpoint: bytes) -> Future[None]:
        number, saved = next(self._numbers), Future[None]()
        self._saves[number] = (lease.id, saved)
        self.send(protocol.Save(number, checkpoint))
        return saved

    def goes_on(self, lease: Lease, turn: Envelope, always: bool) -> None:  # noqa: ARG002
        self.send(protocol.GoesOn(Raw(wire.encode(turn)), always))

    def stopping(self, lease: Lease) -> bool:  # noqa: ARG002
        return self._stopping

    def _listen(self) -> None:
        frames = protocol.FrameBuffer()
        while data := os.read(self._in, CHUNK):
            for body in frames.feed(data):
                self._take(protocol.decode_order(body))
        end_with_everything_started()  # the worker is gone: nobody wants what we do

    def _take(self, order: protocol.Order) -> None:
        if isinstance(order, protocol.Stopping):
            self._stopping = True
        elif isinstance(order, protocol.SaveAnswered):
            self._answer_save(order)
        else:
            self.orders.put(order)

    def _answer_save(self, answer: protocol.SaveAnswered) -> None:
        job_id, saved = self._saves.pop(answer.number)
        with suppress(InvalidStateError):  # its job waits no more
            if answer.lost:
                saved.set_exception(LeaseLost(job_id))
            elif answer.error is not None:
                saved.set_exception(EngineError(answer.error))
            else:
                saved.set_result(None)


class MainThread:
    """The event loop of this process, and its main thread for plain functions: one of them at a time.

    Outside of the loop, so that a plain function may have one of its own, and handlers of signals.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._wanted: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []

    def run(self, coroutine: Coroutine[Any, Any, T], context: contextvars.Context | None = None) -> T:
        task = self._loop.create_task(coroutine, context=context)
        task.add_done_callback(lambda _: self._loop.stop())
        while not task.done():
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                if task.done():  # else it was in a task of the job, and is nothing to us
                    raise
            while self._wanted:
                self._do(*self._wanted.pop(0))
        return task.result()

    def _do(self, call: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        try:
            value = call()
        except BaseException as error:
            if isinstance(error, StopIteration):
                error = RuntimeError("it raised StopIteration")
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(value)

    # --- for the functions of a job ------------------------------------------------------------

    async def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        context, future = contextvars.copy_context(), self._loop.create_future()
        self._wanted.append((lambda: context.run(function, *args, **kwargs), future))
        self._loop.stop()
        try:
            return await future
        finally:
            set_again(context)

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        context = contextvars.copy_context()
        try:
            return self.run(coroutine, context)
        finally:
            set_again(context)


class Host:
    """The app in this process, with an event loop that lives as long as it does."""

    def __init__(self, app: Registry, link: WorkerLink) -> None:
        self._app = app
        self._link = link
        self._runner = asyncio.Runner()
        self._main = MainThread(self._runner.get_loop())
        self._environment = dict(os.environ)
        self._transaction = AsyncExitStack()  # of the job that runs, if it has one
        self._lent: Lent | None = None
        self._lease: Lease | None = None

    def start(self) -> None:
        if Address(self._app.url).scheme == "memory":
            self._app.client._engine = cast("Engine", Elsewhere())
        self._call_state_hooks("startup")

    def end(self) -> None:
        self._call_state_hooks("shutdown")
        with suppress(EngineError):
            self._main.run(self._app.aclose())
        self._runner.close()

    def obey(self, order: protocol.Order) -> protocol.Answer:
        match order:
            case protocol.BeginLent(url=url):
                return self._begin(url)
            case protocol.Settle():
                return self._settle(order)
            case protocol.Run():
                answer = self._answer(order)
                if not isinstance(answer, protocol.Returned):
                    self._roll_back()
                return answer
        raise AssertionError(f"not an order for now: {order}")

    def _answer(self, run: protocol.Run) -> protocol.Ending:
        """Run a job, and make of whatever happens a value."""
        task: Task[..., Any] | None = None
        try:
            with memory_limited_to(run.memory_limit):
                envelope = envelope_of(run)
                task = self._app.task_named(envelope.task)
                set_environment(self._environment_of(task))
                job = Job(self._app, run.lease, envelope, self._link)
                if self._lent is not None:
                    self._lease, job.transaction = run.lease, Transaction(self._lent.connection)
                value = self._main.run(self._perform(job, task))
                return judged(value) if isinstance(value, verdicts.Verdict) else returned(value, job)
        except verdicts.Verdict as verdict:
            return judged(verdict)
        except BaseException as error:
            return raised(error, task)

    def _environment_of(self, task: Task[..., Any]) -> dict[str, str]:
        """A suspect has what it has in the worker, where it would be; others what is good for any job."""
        suspect = task.options.isolate is None
        return (self._environment if suspect else base_of(self._environment)) | dict(task.options.env)

    async def _perform(self, job: Job, task: Task[..., Any]) -> Any:
        current.set(job)
        args, kwargs = task.arguments(job.envelope)
        value: Any = None

        async def call() -> None:
            nonlocal value
            value = await call_around(
                self._app.middlewares,
                job,
                lambda: call_task(task, job, args, kwargs, self._main),
                self._main,
            )

        await in_own_context(call())
        return value

    # --- the transaction of a job ----------------------------------------------------------------

    def _begin(self, url: str) -> protocol.Answer:
        set_environment(self._environment)
        try:
            self._lent = self._main.run(self._begun(url))
        except Exception as error:
            return protocol.NotReady(describe(error, traceback_text(error, error.__traceback__)))
        return protocol.Begun()

    async def _begun(self, url: str) -> Lent:
        if self._app.url != url:
            raise BadSetting(
                f"the worker has another engine than {masked(self._app.url)}, which the app has here"
            )
        engine = await self._app.client.ready()
        if not isinstance(engine, LendsTransactions):
            raise BadSetting(f"{masked(url)} lends no transactions")
        return await self._transaction.enter_async_context(engine.transaction())

    def _settle(self, order: protocol.Settle) -> protocol.Answer:
        """Should the answer get lost: whoever asks has nothing to record but what the fence refuses."""
        assert self._lent is not None
        assert self._lease is not None
        done = replace(order.done, emit=tuple(wire.decode(bytes(each)) for each in order.emissions))
        try:
            return protocol.Settled(self._main.run(self._lent.settle(self._lease, done)))
        except BaseException as error:
            return raised(error, self._app.task_named(self._lease.task))
        finally:
            self._roll_back()

    def _roll_back(self) -> None:
        """What has not been committed."""
        if self._lent is None:
            return
        signals.end_if_forked()  # the connection is that of the job, not of a fork that it has made
        self._lent = self._lease = None
        self._main.run(self._transaction.aclose())

    def _call_state_hooks(self, event: str) -> None:
        for hook in self._app.hooks[event]:
            self._main.run(call_hook(hook, self._app))


class Elsewhere:
    """The memory of the worker, which a child cannot reach: better an error than a job that nobody sees."""

    async def open(self) -> Self:
        raise EngineError(
            "memory:// lives in the worker's process, and this is a child of it: use job.emit, or an "
            "engine that processes can share, such as sqlite:///jobs.db"
        )

    async def close(self) -> None:
        return


def envelope_of(run: protocol.Run) -> Envelope:
    envelope = wire.decode(run.lease.body)
    return envelope if run.gathered == protocol.NOTHING else replace(envelope, args=run.gathered)


async def call_hook(hook: Callable[..., Any], app: Registry) -> None:
    answer = hook(app.state)
    if inspect.isawaitable(answer):
        await answer


# --- endings as values -------------------------------------------------------------------


def raised(error: BaseException, task: Task[..., Any] | None) -> protocol.Raised:
    described = describe(error, traceback_of(error))
    rule = None if task is None else rule_for(task, error)
    return protocol.Raised(described, rule, misuse=isinstance(error, Misuse))


def returned(value: Any, job: Job) -> protocol.Returned:
    emissions = tuple(Raw(wire.encode(emission)) for emission in job.emitted)
    try:
        return protocol.Returned(Raw(encode_result(value)), emissions=emissions)
    except (TypeError, ValueError) as error:
        return protocol.Returned(unsendable=describe(error).message, emissions=emissions)


def judged(verdict: verdicts.Verdict) -> protocol.Ending:
    match verdict:
        case verdicts.Retry(reason=reason, after=after):
            return protocol.RetryWanted(storable(reason[:REASON_MAX]), after)
        case verdicts.Snooze(after=after):
            return protocol.SnoozeWanted(after)
        case _:
            return protocol.DiscardWanted(storable(str(verdict)[:REASON_MAX]))


def rule_for(task: Task[..., Any], error: BaseException) -> int | None:
    """The place of the rule for the nearest class: the worker has the same rules, not the same classes."""
    kinds = [kind for kind, _ in task.options.error_rules]
    ruled = task.rule_for(type(error))
    return None if ruled is None else kinds.index(ruled)


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
        signals.handle(number, lambda *_: None)


def die_with_the_worker() -> None:
    """Also where no order is read, as in a C function that does not let go of the interpreter."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(MORE_LIKELY, encoding="ascii")


def end_with_everything_started() -> NoReturn:
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def make_host(start: protocol.Start, link: WorkerLink) -> Host:
    set_environment(start.environment)
    app = restore(start.location)
    if start.log is not None:  # after that, as in the worker: an app may set it up in its own way
        log_as(start.log)
    host = Host(app, link)
    host.start()
    link.send(protocol.Ready(tuple(app.tasks)))
    return host


def main() -> int:
    die_with_the_worker()
    leave_signals_to_the_worker()
    faulthandler.enable()
    link = WorkerLink()
    start = link.orders.get()
    assert isinstance(start, protocol.Start)
    try:
        host = make_host(start, link)
    except BaseException as error:
        link.send(protocol.NotReady(describe(error, traceback_text(error, error.__traceback__))))
        return 1
    while not isinstance(order := link.orders.get(), protocol.End):
        link.send(host.obey(order))
    host.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
