"""Jobs in child processes: really stopped at their timeout, and alone to blame for what they break."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any, NoReturn, cast

import msgspec

from skep import verdict, wire
from skep.context import Job, Listener
from skep.errors import BadSetting, ChildNotStarted
from skep.job import Error, Lease
from skep.registry import Registry
from skep.signature import decoder_for
from skep.strategy import Strategy
from skep.task import Options, Task
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
    Retried,
    Returned,
    Run,
    Saying,
    Snoozed,
    Start,
    Stopping,
    Told,
    decode_reply,
    pack,
)
from skep.worker.origin import Origin, Restoring, origin_of
from skep.worker.settings import Settings
from skep.worker.slots import Slot

log = logging.getLogger("skep.worker")

# -P: the working directory is no place to look for modules before the app has been asked for.
COMMAND = (sys.executable, "-P", "-m", "skep.worker.child")
START_WITHIN = 60.0  # seconds to import the app and to run its start-up hooks
END_WITHIN = 5.0  # seconds for its shutdown hooks
LAST_BYTES = 0.5  # seconds after a death in which what it said before may still arrive
MOST_SUSPECTS = max(2, os.cpu_count() or 1)  # suspects at once: each is a process that imports the app

Hear = Callable[[Saying], None]
Crash = Callable[[Lease, str], Awaitable[None]]


class ChildDied(Exception):
    """The process has ended in the middle of a talk."""


class Crashed(Exception):
    """The job has taken its process with it.  It is counted already: there is nothing to record."""


class Remote(Exception):
    """What a job raised in its child process, as data: its class is not rebuilt here."""

    def __init__(self, told: Error, strategy: Strategy | None) -> None:
        super().__init__(f"{told.type}: {told.message}")
        self.told = told
        self.strategy = strategy


class Unsendable:
    """Stands for a result that could not leave its process; asked to be kept, it says why."""

    def __init__(self, why: str) -> None:
        self._why = why

    def model_dump(self, mode: str) -> NoReturn:  # noqa: ARG002
        raise TypeError(self._why)


class Child(asyncio.SubprocessProtocol):
    """One child process and the talk with it: one question at a time."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._frames = FrameBuffer()
        self._answer: asyncio.Future[Answer] | None = None
        self._hear: Hear | None = None
        self._at_end_of_file = False
        self.alive = True
        self.closed: asyncio.Future[None] = loop.create_future()

    @classmethod
    async def born(cls) -> Child:
        loop = asyncio.get_running_loop()
        # A session of its own: what a job starts there can be killed together with it.
        _, child = await loop.subprocess_exec(cls, *COMMAND, stderr=None, start_new_session=True)
        return child

    async def ask(self, order: Order, hear: Hear | None = None) -> Answer:
        """Raises `ChildDied` instead of an answer."""
        if not self.alive:
            raise ChildDied(self._how)
        self._hear = hear
        self._answer = self._loop.create_future()
        self.say(order)
        try:
            return await self._answer
        finally:
            self._answer = self._hear = None

    def say(self, order: Order) -> None:
        pipe = self._transport.get_pipe_transport(0)
        cast("asyncio.WriteTransport", pipe).write(pack(order))

    def kill(self) -> None:
        """With everything that it has started."""
        if self.alive:  # later, its number may be somebody else's
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._transport.get_pid(), signal.SIGKILL)

    async def die(self) -> None:
        """Returns when it is gone, and nothing of it can happen any more."""
        self.kill()
        await asyncio.shield(self.closed)

    async def end(self) -> None:
        """Let it run its shutdown hooks, but not for long."""
        if self.alive:
            self.say(End())
        with suppress(TimeoutError):
            async with asyncio.timeout(END_WITHIN):
                await asyncio.shield(self.closed)
        await self.die()

    # --- what the loop tells -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:  # noqa: ARG002
        for body in self._frames.feed(data):
            try:
                reply = decode_reply(body)
            except msgspec.MsgspecError:
                log.exception("a child process said what nobody understands, and is ended")
                self.kill()
                return
            if not isinstance(reply, Told | GoesOn):
                self._take(reply)
            elif self._hear is not None:
                self._hear(reply)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002
        if fd == 1:
            self._at_end_of_file = True
            self.kill()  # dead already, as a rule; or it cannot answer any more
            self._look_whether_dead()

    def process_exited(self) -> None:
        self.kill()  # what it started may hold its pipe, which then would never end
        self._loop.call_later(0 if self._at_end_of_file else LAST_BYTES, self._look_whether_dead)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._look_whether_dead()
        if not self.closed.done():
            self.closed.set_result(None)

    def _take(self, answer: Answer) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)

    def _look_whether_dead(self) -> None:
        if self._transport.get_returncode() is None or not self.alive:
            return
        self.alive = False
        self._transport.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ChildDied(self._how))

    @property
    def _how(self) -> str:
        return how_it_ended(self._transport.get_returncode())


class ChildPool:
    """Child processes, made when they are needed, kept for the next job and replaced when they die.

    `listener` hears what the jobs tell; `crashed` is waited for when one has taken its process with it.
    """

    def __init__(self, registry: Registry, settings: Settings, *, listener: Listener, crashed: Crash) -> None:
        if Restoring.now:
            raise BadSetting(
                "importing the app starts a worker, so a child process would start one too: put it below "
                '`if __name__ == "__main__":`'
            )
        self._registry = registry
        self._listener = listener
        self._crashed = crashed
        self._isolated = [name for name, task in registry.tasks.items() if task.options.isolate is not None]
        self._origin = origin_of(registry, settings.app_path)
        self._suspicious = settings.isolate_suspects and self._may_take_suspects(settings)
        self._turns = asyncio.Semaphore(MOST_SUSPECTS)
        self._children: set[Child] = set()
        self._idle: list[Child] = []
        self._ending: set[asyncio.Task[None]] = set()
        self._stopping = False

    def _may_take_suspects(self, settings: Settings) -> bool:
        """Not by running somebody's script a second time, unless he asked for child processes himself."""
        if self._origin is None:
            return False
        return bool(settings.app_path or self._isolated or self._origin.script is None)

    # --- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """If there are tasks for it, make the first child: what cannot work is an error now."""
        if not self._isolated:
            return
        if self._origin is None:
            raise BadSetting(
                f"{self._isolated[0]} runs in a child process, which cannot find its app: keep the app in a "
                f"variable of a module, and not only of a function or an interactive session"
            )
        self._idle.append(await self._new_child())

    def stopping(self) -> None:
        """The worker shuts down: running jobs may want to know."""
        self._stopping = True
        for child in self._children:
            if child.alive:
                child.say(Stopping())

    async def close(self) -> None:
        """When no job runs any more."""
        await asyncio.gather(*self._ending, *(child.end() for child in self._children))

    # --- one job -------------------------------------------------------------------------------

    def wants(self, lease: Lease) -> bool:
        """Should this job run in a child although its task does not ask for it?

        It was there when a worker died.  Should it be the one to blame, the next death is its own only.
        """
        return lease.crashes > 0 and self._suspicious

    async def call(self, job: Job, options: Options, slot: Slot) -> Any:
        """What the job returns.  Raises `Remote`, a verdict or `Crashed`; cancelled, kills the process."""
        async with AsyncExitStack() as stack:
            with clock_stopped(slot):
                if options.isolate is None:
                    await stack.enter_async_context(self._turns)
                child = await stack.enter_async_context(self._lent(options))
            answer = await self._run(child, job, options)
        return value_of(answer, job, self._registry.task_named(options.name))

    async def _run(self, child: Child, job: Job, options: Options) -> Answer:
        def hear(said: Saying) -> None:
            if isinstance(said, GoesOn):
                job.goes_on(wire.decode(bytes(said.turn)), said.always)
            else:
                self._listener.told(job.lease, said.progress, said.lines)

        try:
            return await child.ask(Run(job.lease, options.memory_limit, job.gathered or NOTHING), hear)
        except ChildDied as death:
            log.error("job %s has taken its process with it: %s", job.id, death)
            await self._crashed(job.lease, f"its process died: {death}")
            raise Crashed from death

    @asynccontextmanager
    async def _lent(self, options: Options) -> AsyncIterator[Child]:
        """A child for one job; it dies if the job does not come to its own end."""
        child = self._idle_child() or await self._new_child()
        try:
            yield child
        except BaseException:
            await child.die()
            raise
        self._idle.append(child)
        if options.isolate is None and not self._isolated and not self._turns.locked():
            self._end_idle()  # the last of the suspects is cleared

    def _idle_child(self) -> Child | None:
        while self._idle:
            if (child := self._idle.pop()).alive:
                return child
        return None

    def _end_idle(self) -> None:
        while child := self._idle_child():
            task = asyncio.create_task(child.end(), name="skep-ending-child")
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _new_child(self) -> Child:
        assert self._origin is not None
        child = await Child.born()
        self._children.add(child)
        child.closed.add_done_callback(lambda _: self._children.discard(child))
        try:
            async with asyncio.timeout(START_WITHIN):
                await self._introduce(child, self._origin)
        except BaseException as error:
            await child.die()
            if isinstance(error, TimeoutError):
                raise ChildNotStarted(f"it was not ready within {START_WITHIN:.0f} s") from None
            raise
        return child

    async def _introduce(self, child: Child, origin: Origin) -> None:
        try:
            answer = await child.ask(Start(origin, _log_level()))
        except ChildDied as death:
            raise ChildNotStarted(f"it died: {death}") from death
        if isinstance(answer, NotReady):
            raise ChildNotStarted(f"{answer.error.type}: {answer.error.message}\n{answer.error.traceback}")
        assert isinstance(answer, Ready)
        if missing := set(self._isolated) - set(answer.tasks):
            raise BadSetting(
                f"{', '.join(sorted(missing))}: a child process imports {origin.app} and finds no such task: "
                f"declare it when its module is imported, not later"
            )
        if self._stopping:
            child.say(Stopping())


# --- from an answer to a value -----------------------------------------------------------------


def value_of(answer: Answer, job: Job, task: Task[..., Any]) -> Any:
    """What the task returned; or raises what it raised."""
    match answer:
        case Returned(unsendable=unsendable, emissions=emissions):
            job.take_over([wire.decode(bytes(emission)) for emission in emissions])
            return _decoded(answer, task) if unsendable is None else Unsendable(unsendable)
        case Raised(error=error, rule=rule):
            raise Remote(error, None if rule is None else task.options.error_rules[rule][1])
        case Retried(reason=reason, after=after):
            raise verdict.Retry(reason, after=after)
        case Failed(reason=reason):
            raise verdict.Failure(reason)
        case Snoozed(after=after):
            raise verdict.Snooze(after)
        case Ready() | NotReady():
            raise AssertionError(f"not an answer to a job: {answer}")


def _decoded(answer: Returned, task: Task[..., Any]) -> Any:
    try:
        return decoder_for(task.signature.result_kind).decode(answer.value)
    except (msgspec.MsgspecError, TypeError, ValueError):  # it returned something else than it promised
        return msgspec.json.decode(answer.value)


@contextmanager
def clock_stopped(slot: Slot) -> Iterator[None]:
    """Waiting for a process is not the job's time."""
    clock = slot.lane.clock
    since, deadline, slot.deadline = clock(), slot.deadline, None
    try:
        yield
    finally:
        if deadline is not None:
            slot.deadline = deadline + clock() - since


def how_it_ended(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"


def _log_level() -> int | None:
    root = logging.getLogger()
    return root.level if root.handlers else None
