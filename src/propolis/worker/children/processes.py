"""Jobs in child processes: really stopped at their timeout, and alone to blame for what they break."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from propolis.app import verdicts
from propolis.app.context import Job, Listener
from propolis.app.registry import Registry
from propolis.app.signature import decoder_for
from propolis.app.task import Options, Task
from propolis.core import wire
from propolis.core.job import Done, Lease, Outcome
from propolis.errors import BadCall, BadSetting, ChildNotStarted, LeaseLost, NoProcess, OutcomeUnknown
from propolis.worker.attempt import ChildCrashed, RaisedInChild, Slot
from propolis.worker.children import child_protocol as protocol
from propolis.worker.children.app_location import AppLocation, Restoring, location_of
from propolis.worker.children.environment import base_of, sendable
from propolis.worker.process.log_lines import log_setup
from propolis.worker.settings import Settings

log = logging.getLogger("propolis.worker")

# -P: the working directory is not searched for modules before the app has been asked for.
COMMAND = (sys.executable, "-P", "-m", "propolis.worker.children.child")
START_WITHIN = 60.0  # seconds to import the app and to run its start-up hooks
END_WITHIN = 5.0  # seconds for its shutdown hooks
SETTLE_WITHIN = 60.0  # seconds for a commit: more than the patience of its engine, as a rule
LAST_BYTES = 0.5  # seconds after a death in which what it sent before may still arrive
MAX_SUSPECTS = max(4, os.cpu_count() or 1)  # at once: each is a process that imports the app
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096

TakesNews = Callable[[protocol.News], None]


class ChildDied(Exception):
    """The process has ended before it has answered; `foreign`: somebody else has killed it."""

    def __init__(self, how: str, *, foreign: bool = False) -> None:
        super().__init__(how)
        self.foreign = foreign


class Unsendable:
    """Stands for a result that could not leave its process; asked to be kept, it raises the reason."""

    def __init__(self, why: str) -> None:
        self._why = why

    def model_dump(self, mode: str) -> NoReturn:  # noqa: ARG002
        raise BadCall(self._why)


class Child(asyncio.SubprocessProtocol):
    """One child process and what is sent to it: one order at a time."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._frames = protocol.FrameBuffer()
        self._answer: asyncio.Future[protocol.Answer] | None = None
        self._take_news: TakesNews | None = None
        self._at_end_of_file = False
        self._killed = False
        self.alive = True
        self.largest = 0  # bytes in memory that were seen
        self.closed: asyncio.Future[None] = loop.create_future()

    @classmethod
    async def born(cls) -> Child:
        loop = asyncio.get_running_loop()
        # A session of its own: what a job starts there can be killed together with it.
        _, child = await loop.subprocess_exec(
            cls, *COMMAND, stderr=None, start_new_session=True, env=base_of(os.environ)
        )
        return child

    async def ask(self, order: protocol.Order, take_news: TakesNews | None = None) -> protocol.Answer:
        """Raises `ChildDied` instead of an answer."""
        if not self.alive:
            raise self._death()
        self._take_news = take_news
        self._answer = self._loop.create_future()
        self.send(order)
        try:
            return await self._answer
        finally:
            self._answer = self._take_news = None

    def send(self, order: protocol.Order) -> None:
        pipe = self._transport.get_pipe_transport(0)
        cast("asyncio.WriteTransport", pipe).write(protocol.pack(order))

    def answer_save(self, number: int, saved: Future[None]) -> None:
        if self.alive:
            error = saved.exception()
            self.send(
                protocol.SaveAnswered(
                    number, isinstance(error, LeaseLost), None if error is None else str(error)
                )
            )

    def kill(self) -> None:
        """With everything that it has started."""
        if self.alive:  # later, its number may be somebody else's
            self._killed = self._killed or self._transport.get_returncode() is None
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._transport.get_pid(), signal.SIGKILL)

    async def die(self) -> None:
        """Returns when it is gone, and nothing of it can happen any more."""
        self.kill()
        await asyncio.shield(self.closed)

    async def end(self) -> None:
        """Let it run its shutdown hooks, but not for long."""
        if self.alive:
            self.send(protocol.End())
        with suppress(TimeoutError):
            async with asyncio.timeout(END_WITHIN):
                await asyncio.shield(self.closed)
        await self.die()

    # --- what the event loop calls -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:  # noqa: ARG002
        for body in self._frames.feed(data):
            try:
                reply = protocol.decode_reply(body)
            except msgspec.MsgspecError:
                log.exception("a child process sent what cannot be read, and is killed")
                self.kill()
                return
            if not isinstance(reply, protocol.Reported | protocol.GoesOn | protocol.Save):
                self._take(reply)
            elif self._take_news is not None:
                self._take_news(reply)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002
        if fd == 1:
            self._at_end_of_file = True
            self._notice_death()
            self._loop.call_later(
                LAST_BYTES, self.kill
            )  # it is dying, as a rule; or it cannot answer any more

    def process_exited(self) -> None:
        self.kill()  # what it started may hold its pipe, which then would never end
        self._loop.call_later(0 if self._at_end_of_file else LAST_BYTES, self._notice_death)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._notice_death()
        if not self.closed.done():
            self.closed.set_result(None)

    def _take(self, answer: protocol.Answer) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)

    def _notice_death(self) -> None:
        if self._transport.get_returncode() is None or not self.alive:
            return
        self.alive = False
        self._transport.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(self._death())

    def _death(self) -> ChildDied:
        code = self._transport.get_returncode()
        return ChildDied(how_it_ended(code), foreign=code == -signal.SIGKILL and not self._killed)

    def weigh(self) -> int:
        """How much memory it has; the most that was ever seen is kept, for when it is gone."""
        weight = memory_of(self._transport.get_pid()) if self.alive else 0
        self.largest = max(self.largest, weight)
        return weight


class ChildPool:
    """Child processes, made when they are needed, kept for the next job and replaced when they die.

    `listener` hears what the jobs report.
    """

    def __init__(self, registry: Registry, settings: Settings, *, listener: Listener) -> None:
        if Restoring.now:
            raise BadSetting(
                "importing the app starts a worker, so a child process would start one too: put it below "
                '`if __name__ == "__main__":`'
            )
        self._registry = registry
        self._listener = listener
        self._isolated = [name for name, task in registry.tasks.items() if task.options.isolate is not None]
        self._location = location_of(registry, settings.app_path)
        self.suspicious = settings.isolate_suspects and self._may_take_suspects(settings)
        self._trying = asyncio.Lock()
        self._suspects = 0  # that have a place
        self._children: set[Child] = set()
        self._idle: list[Child] = []
        self._ending: set[asyncio.Task[None]] = set()
        self._stopping = False

    def _may_take_suspects(self, settings: Settings) -> bool:
        """Not by running somebody's script a second time, unless its author asked for child processes."""
        if self._location is None:
            return False
        return bool(settings.app_path or self._isolated or self._location.script is None)

    # --- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """If there are tasks for it, make the first child: what cannot work is an error now."""
        if not self._isolated:
            return
        if self._location is None:
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
                child.send(protocol.Stopping())

    async def close(self) -> None:
        """When no job runs any more."""
        await asyncio.gather(*self._ending, *(child.end() for child in self._children))

    # --- one job -------------------------------------------------------------------------------

    async def can_be_made(self) -> bool:
        """Does a child come up?"""
        async with self._trying:
            if any(child.alive for child in self._children):
                return True
            try:
                self._idle.append(await self._new_child())
            except (ChildNotStarted, BadSetting) as error:
                log.warning("no child process can be made, so suspects run alone in this one: %s", error)
                return False
            return True

    @contextmanager
    def place(self) -> Iterator[bool]:
        """One of the few places for suspects, or False."""
        if self._suspects >= MAX_SUSPECTS:
            yield False
            return
        self._suspects += 1
        try:
            yield True
        finally:
            self._suspects -= 1
            if not self._suspects and not self._isolated:
                self._end_idle()  # the last of the suspects is cleared

    def weigh(self) -> None:
        """Look at how large the children are, since nobody knows that of a dead one."""
        for child in self._children:
            child.weigh()

    async def call(self, job: Job, options: Options, slot: Slot) -> Any:
        """What the job returns.  Raises `RaisedInChild`, a verdict or `ChildCrashed`.

        Cancelled, it kills the process.
        """
        async with AsyncExitStack() as stack:
            with clock_stopped(slot):
                child = await stack.enter_async_context(self._lent())
            answer = await self.run(child, job, options)
        return value_of(answer, job, self._registry.task_named(options.name))

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[TransactionInChild]:
        """One that has begun in a child; on leaving, it has ended.  Raises `ChildNotStarted`."""
        async with self._lent() as child:
            transaction = TransactionInChild(self, child)
            try:
                await transaction.begin(self._registry.url)
                yield transaction
            finally:
                if transaction.open:
                    await child.die()  # and the server rolls it back

    async def run(self, child: Child, job: Job, options: Options) -> protocol.Answer:
        def take_news(news: protocol.News) -> None:
            if isinstance(news, protocol.GoesOn):
                job.goes_on(wire.decode(bytes(news.turn)), news.always)
            elif isinstance(news, protocol.Save):
                saved = self._listener.save(job.lease, news.checkpoint)
                saved.add_done_callback(partial(child.answer_save, news.number))
            else:
                self._listener.report(job.lease, news.progress, news.lines)

        with self.blaming(child, job.id):
            return await child.ask(
                protocol.Run(job.lease, options.memory_limit, job.gathered or protocol.NOTHING), take_news
            )

    @contextmanager
    def blaming(self, child: Child, job_id: str) -> Iterator[None]:
        """If its process dies meanwhile: was that the job?"""
        try:
            yield
        except ChildDied as death:
            blameless = death.foreign and child.largest < self._largest_other(child)
            log.error("the process of job %s has died%s: %s", job_id, ", killed by others" * blameless, death)
            raise ChildCrashed(str(death), blameless) from death

    def _largest_other(self, child: Child) -> int:
        """Of the worker and its children: where memory is short, the kernel kills children first."""
        return max(memory_of(os.getpid()), *(each.weigh() for each in self._children - {child}), 0)

    @asynccontextmanager
    async def _lent(self) -> AsyncIterator[Child]:
        """A child for one job; it dies if the job does not come to its own end."""
        child = self._idle_child() or await self._new_child()
        try:
            yield child
        except BaseException:
            await child.die()
            raise
        self._idle.append(child)

    def _idle_child(self) -> Child | None:
        while self._idle:
            if (child := self._idle.pop()).alive:
                return child
        return None

    def _end_idle(self) -> None:
        while child := self._idle_child():
            task = asyncio.create_task(child.end(), name="propolis-ending-child")
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _new_child(self) -> Child:
        assert self._location is not None
        try:
            child = await Child.born()
        except OSError as error:
            raise NoProcess(str(error)) from error
        self._children.add(child)
        child.closed.add_done_callback(lambda _: self._children.discard(child))
        try:
            async with asyncio.timeout(START_WITHIN):
                await self._introduce(child, self._location)
        except BaseException as error:
            await child.die()
            if isinstance(error, TimeoutError):
                raise ChildNotStarted(f"it was not ready within {START_WITHIN:.0f} s") from None
            raise
        return child

    async def _introduce(self, child: Child, location: AppLocation) -> None:
        try:
            answer = await child.ask(protocol.Start(location, log_setup(), sendable(os.environ)))
        except ChildDied as death:
            raise ChildNotStarted(f"it died: {death}") from death
        if isinstance(answer, protocol.NotReady):
            raise ChildNotStarted(f"{answer.error.type}: {answer.error.message}\n{answer.error.traceback}")
        assert isinstance(answer, protocol.Ready)
        if missing := set(self._isolated) - set(answer.tasks):
            raise BadSetting(
                f"{', '.join(sorted(missing))}: a child process imports {location.app} and finds no such "
                f"task: declare it when its module is imported, not later"
            )
        if self._stopping:
            child.send(protocol.Stopping())


class TransactionInChild:
    """What its job writes, in the child, and its end, which the worker sends to it, are one commit."""

    connection = None  # it is there

    def __init__(self, pool: ChildPool, child: Child) -> None:
        self._pool = pool
        self._child = child
        self.open = True

    async def begin(self, url: str) -> None:
        try:
            async with asyncio.timeout(START_WITHIN):
                answer = await self._child.ask(protocol.BeginLent(url))
        except ChildDied as death:
            raise ChildNotStarted(f"it died: {death}") from death
        except TimeoutError:
            raise ChildNotStarted(f"it began no transaction within {START_WITHIN:.0f} s") from None
        self.open = isinstance(answer, protocol.Begun)
        if isinstance(answer, protocol.NotReady):
            raise ChildNotStarted(f"it began no transaction: {answer.error.type}: {answer.error.message}")

    async def call(self, job: Job, task: Task[..., Any]) -> Any:
        """As `ChildPool.call`; but it stays open when the job has returned."""
        answer = await self._pool.run(self._child, job, task.options)
        self.open = isinstance(answer, protocol.Returned)
        return value_of(answer, job, task)

    async def settle(self, lease: Lease, outcome: Outcome) -> bool:
        """As `Lent.settle`; raises also `ChildCrashed`, after which it may stand as well."""
        assert isinstance(outcome, Done)
        emissions = tuple(Raw(wire.encode(emission)) for emission in outcome.emit)
        try:
            with self._pool.blaming(self._child, lease.id):
                async with asyncio.timeout(SETTLE_WITHIN):
                    answer = await self._child.ask(protocol.Settle(replace(outcome, emit=()), emissions))
        except TimeoutError as error:
            raise OutcomeUnknown(f"its child did not answer within {SETTLE_WITHIN:.0f} s") from error
        self.open = False
        if isinstance(answer, protocol.Raised):
            raise RaisedInChild(answer.error, answer.rule, misuse=answer.misuse)
        assert isinstance(answer, protocol.Settled)
        return answer.stands


# --- from an answer to a value -----------------------------------------------------------------


def value_of(answer: protocol.Answer, job: Job, task: Task[..., Any]) -> Any:
    """What the task returned; or raises what it raised."""
    match answer:
        case protocol.Returned(unsendable=unsendable, emissions=emissions):
            bodies = [bytes(emission) for emission in emissions]
            job.take_over([wire.decode(body) for body in bodies], sum(map(len, bodies)))
            return _decoded(answer, task) if unsendable is None else Unsendable(unsendable)
        case protocol.Raised(error=error, rule=rule, misuse=misuse):
            raise RaisedInChild(error, rule, misuse=misuse)
        case protocol.RetryWanted(reason=reason, after=after):
            raise verdicts.Retry(reason, after=after)
        case protocol.DiscardWanted(reason=reason):
            raise verdicts.Discard(reason)
        case protocol.SnoozeWanted(after=after):
            raise verdicts.Snooze(after)
        case protocol.Ready() | protocol.NotReady() | protocol.Begun() | protocol.Settled():
            raise AssertionError(f"not an answer to a job: {answer}")


def _decoded(answer: protocol.Returned, task: Task[..., Any]) -> Any:
    try:
        return decoder_for(task.signature.result_kind).decode(answer.value)
    except (msgspec.MsgspecError, TypeError, ValueError):  # it returned something else than it promised
        return msgspec.json.decode(answer.value)


@contextmanager
def clock_stopped(slot: Slot) -> Iterator[None]:
    """Waiting for a process is not the job's time."""
    clock = slot.clock
    since, deadline, slot.deadline = clock(), slot.deadline, None
    try:
        yield
    finally:
        if deadline is not None:
            slot.deadline = deadline + clock() - since


def memory_of(pid: int) -> int:
    """Bytes of a process that are in memory; 0 where nobody says."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * PAGE


def how_it_ended(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"
