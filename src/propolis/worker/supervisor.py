"""Worker processes: one, or several that are watched over."""

from __future__ import annotations

import asyncio
import errno
import importlib
import logging
import os
import random
import signal
import sys
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from typing import Any

from propolis.app.registry import Registry
from propolis.errors import AppNotFound, BadSetting, PropolisError
from propolis.worker.children.processes import how_it_ended
from propolis.worker.process import signals
from propolis.worker.process.log_lines import log_to_stderr
from propolis.worker.settings import Settings
from propolis.worker.worker import Worker

log = logging.getLogger("propolis.worker")


def _uvloop() -> Any:
    try:
        return importlib.import_module("uvloop")
    except ImportError:  # not on every platform
        return None


# Now, and not when it is needed: by then the app's folder is searched for modules.
UVLOOP = _uvloop()

CLEAN, FAILED, USELESS = 0, 1, 2  # exit codes; after the last one, starting it again would not help
FIRST_BACKOFF, LAST_BACKOFF = 0.2, 30.0
LONG_ENOUGH = 60.0  # seconds after which a crash is a new one, and not the last one again
LAST_WORDS = 6.0  # seconds beyond the grace period for a worker to end
LEAVES_WITHIN = 5.0  # seconds after a worker has ended for its process to end
BY_REQUEST = (-signal.SIGTERM, -signal.SIGINT)  # sent to all of us, and before it could handle them
SUPERVISED = "PROPOLIS_SUPERVISED"  # the variable by which a worker knows that it has a supervisor


class StopOrder(Enum):
    """What a supervisor sends to its workers, over their standard input.

    Not by signals: a terminal or a service manager sends those to everybody, and two of them mean "at once".
    """

    STOP = b"s"
    AT_ONCE = b"!"


# --- one worker process ------------------------------------------------------------------


def run_worker(registry: Registry, settings: Settings) -> int:
    """Work in this process until a signal (or its supervisor) stops it; returns the exit code.

    The first SIGTERM or SIGINT stops it gracefully, the second at once.
    """
    set_up_logging()
    supervised = os.environ.pop(SUPERVISED, None)  # gone, as it is not true of what jobs start
    closed = threading.Event()
    try:
        return _run_until_stopped(registry, settings, supervised, closed)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        log.critical("a descriptor of this process was closed, as a job may do: the worker cannot go on")
        return FAILED
    finally:
        closed.set()


def _run_until_stopped(
    registry: Registry, settings: Settings, supervised: str | None, closed: threading.Event
) -> int:
    code = FAILED
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            run_to_the_end(runner.get_loop(), _work(registry, settings, supervised))
            code = CLEAN
        except (BadSetting, AppNotFound) as error:
            log.critical("%s", error)
            code = USELESS
        except PropolisError as error:
            log.critical("%s", error)
        finally:
            leave_in_time(code, closed)
    return code


def leave_in_time(code: int, closed: threading.Event) -> None:
    """Have this process end soon, whatever its jobs have left behind.

    Tasks that do not let themselves be cancelled keep the loop from being `closed`, and threads that never
    end keep the interpreter from ending: nobody would start another worker in its place.
    """

    def leave() -> None:
        if closed.wait(LEAVES_WITHIN):
            threading.main_thread().join()  # a program of which the worker was only a part goes on until then
            time.sleep(LEAVES_WITHIN)
        log.error("tasks or threads that jobs have left behind do not end: the process ends without them")
        os._exit(code)

    threading.Thread(target=leave, name="propolis-leaving", daemon=True).start()
    with suppress(AttributeError, OSError, ValueError):  # there is none, or nobody reads it
        sys.stdout.flush()


def run_to_the_end(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]) -> None:
    """Run it, and do not stop where a job calls `sys.exit()` in a task or a callback of its own.

    asyncio lets that through, so that it would end everybody's work.  (Where somebody awaits the task, it is
    an error of that job.)
    """
    working = loop.create_task(work, name="propolis-worker")
    while not working.done():
        try:
            loop.run_until_complete(working)
        except (SystemExit, KeyboardInterrupt) as leaving:
            if working.done():
                raise
            log.error("a task of a job wants to end the process (%r): the worker goes on", leaving)
            signals.loop_goes_on()
    working.result()


async def _work(registry: Registry, settings: Settings, supervised: str | None) -> None:
    worker = Worker(registry, settings)
    if supervised is not None:
        Obedience(worker, settings.grace, int(supervised)).begin()
    else:
        worker.stop_on_signals()
    try:
        await worker.run()
    finally:
        await registry.aclose()


class Obedience:
    """How a worker listens to its supervisor, and to signals that both of them were sent.

    The supervisor's order and the first signal mean the same stop, whichever comes first.
    """

    def __init__(self, worker: Worker, grace: timedelta, ready: int) -> None:
        self._worker = worker
        self._ready = ready  # where it says that it has started
        self._patience = grace.total_seconds() + LAST_WORDS
        self._loop = asyncio.get_running_loop()
        self._signalled = False

    def begin(self) -> None:
        signals.handle_in_loop(
            {
                signal.SIGTERM: self._signal,
                signal.SIGINT: self._signal,
                signal.SIGHUP: lambda: None,  # the supervisor decides what it means
                signal.SIGQUIT: self._worker.show_runs,
            }
        )
        signals.dump_stacks_on_quit()
        os.set_inheritable(self._ready, False)
        self._saying = asyncio.ensure_future(self._say_ready())
        # A thread, because also the death of the supervisor must be noticed, whatever the loop does.
        threading.Thread(target=self._listen, name="propolis-lifeline", daemon=True).start()

    async def _say_ready(self) -> None:
        await self._worker.started.wait()
        with suppress(OSError):  # the supervisor is gone, which the other pipe tells too
            os.write(self._ready, b"r")
        os.close(self._ready)

    def _signal(self) -> None:
        if self._signalled:
            self._stop_at_once()
        self._signalled = True
        self._stop()

    def _stop(self) -> None:
        if not self._worker.asked_to_stop:
            self._worker.stop()

    def _stop_at_once(self) -> None:
        self._stop()
        self._worker.stop()

    def _listen(self) -> None:
        while order := os.read(0, 1):
            self._call_in_loop(self._stop_at_once if StopOrder(order) is StopOrder.AT_ONCE else self._stop)
        self._call_in_loop(self._stop)
        time.sleep(self._patience)
        os._exit(FAILED)

    def _call_in_loop(self, act: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended: it has stopped already
            self._loop.call_soon_threadsafe(act)


def set_up_logging() -> None:
    """To the standard error, unless the app has set it up in its own way."""
    log_to_stderr(logging.INFO)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = getattr(UVLOOP, "new_event_loop", None)
    return factory


# --- several -----------------------------------------------------------------------------


def supervise(arguments: Sequence[str], processes: int, grace: timedelta, *, forever: bool = True) -> int:
    """Keep this many processes of `propolis` with these arguments running until a signal stops them.

    Returns the exit code: 0 if all of them ended well.  With `forever`, one that ends well without having
    been asked to is replaced too.
    """
    set_up_logging()
    command = [sys.executable, "-P", "-m", "propolis", *arguments]
    return asyncio.run(Supervisor(command, processes, grace=grace, forever=forever).run())


class Kept:
    """One worker process, with the two pipes between it and us."""

    def __init__(self, process: Process, ready: int) -> None:
        self.process = process
        self.leaving = False  # another one is to take its place
        self.ready = asyncio.Event()
        self.gone = asyncio.Event()
        self._fd = ready
        asyncio.get_running_loop().add_reader(ready, self._hear)

    def send(self, order: StopOrder) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(order.value)

    def _hear(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        if os.read(self._fd, 1):
            self.ready.set()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        self.gone.set()


class Supervisor:
    """Starts processes, starts crashed ones again, and stops them all.

    They end when it dies, however it dies: each holds a pipe that then ends.
    """

    def __init__(
        self, command: Sequence[str], processes: int, *, grace: timedelta, forever: bool = True
    ) -> None:
        if processes < 1:
            raise BadSetting("at least one process is needed to work")
        self._command = command
        self._count = processes
        self._grace = grace.total_seconds()
        self._forever = forever
        self._running: dict[int, Kept] = {}
        self._stopping = asyncio.Event()
        self._replacing: asyncio.Task[None] | None = None
        self._at_terminal = sys.stdin is not None and sys.stdin.isatty()
        self._useless = False

    async def run(self) -> int:
        signals.handle_in_loop(
            {signal.SIGTERM: self.stop, signal.SIGINT: self.stop, signal.SIGHUP: self.hang_up}
        )
        signals.dump_stacks_on_quit()
        codes = await asyncio.gather(*(self._keep_one(number + 1) for number in range(self._count)))
        if self._useless:
            return USELESS
        return FAILED if any(codes) else CLEAN

    def stop(self) -> None:
        """Once: gracefully.  Twice: now."""
        order = StopOrder.AT_ONCE if self._stopping.is_set() else StopOrder.STOP
        patience = LAST_WORDS if order is StopOrder.AT_ONCE else self._grace + LAST_WORDS
        self._stopping.set()
        for kept in self._running.values():
            kept.send(order)
        asyncio.get_running_loop().call_later(patience, self._kill, list(self._running.values()))

    def hang_up(self) -> None:
        """Replace them all, one after the other; but stop where the terminal has gone."""
        if self._at_terminal:
            self.stop()
        elif self._replacing is None or self._replacing.done():
            self._replacing = asyncio.create_task(self._replace_all(), name="propolis-replacing")

    async def _replace_all(self) -> None:
        for number, old in list(self._running.items()):
            if self._stopping.is_set() or self._running.get(number) is not old:
                continue
            log.info("worker process %d, which is %d, is replaced", number, old.process.pid)
            old.leaving = True
            old.send(StopOrder.STOP)
            asyncio.get_running_loop().call_later(self._grace + LAST_WORDS, self._kill, [old])
            await old.gone.wait()
            while not self._stopping.is_set() and not await self._is_ready(number):
                pass  # it has crashed, and another one follows

    async def _is_ready(self, number: int) -> bool:
        if (new := self._running.get(number)) is None:
            await asyncio.sleep(0.05)
            return False
        waits = [asyncio.ensure_future(event.wait()) for event in (new.ready, new.gone)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
        return new.ready.is_set()

    def _kill(self, those: list[Kept]) -> None:
        for kept in those:
            if kept.process.returncode is None:
                log.error("process %d does not end and is killed", kept.process.pid)
                with suppress(ProcessLookupError):
                    kept.process.kill()

    async def _keep_one(self, number: int) -> int:
        """Have one process run, and another one after it, until there is no more need; the last exit code."""
        backoff = FIRST_BACKOFF
        while True:
            began = time.monotonic()
            code, replaced = await self._run_one(number)
            if self._stopping.is_set():
                return CLEAN if code is None or code in BY_REQUEST else code
            if replaced:
                continue
            if code == CLEAN and not self._forever:
                return code
            if code == USELESS and (self._replacing is None or self._replacing.done()):
                self._give_up()
                return code
            if time.monotonic() - began > LONG_ENOUGH:
                backoff = FIRST_BACKOFF
            how = "could not be made" if code is None else f"ended ({how_it_ended(code)})"
            if await self._stopped_during_pause(number, how, backoff):
                return CLEAN
            backoff = min(backoff * 2, LAST_BACKOFF)

    async def _run_one(self, number: int) -> tuple[int | None, bool]:
        """Its exit code (None: it could not be made), and whether it left its place to another."""
        try:
            kept = self._running[number] = await self._make_one()
        except OSError as error:
            log.error("no process can be made: %s", error)
            return None, False
        log.info("worker process %d is %d", number, kept.process.pid)
        if self._stopping.is_set():  # while it was being started
            kept.send(StopOrder.STOP)
        try:
            return await kept.process.wait(), kept.leaving
        finally:
            del self._running[number]
            kept.close()

    async def _make_one(self) -> Kept:
        ready, says_ready = os.pipe()
        environment = {**os.environ, SUPERVISED: str(says_ready)}
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, env=environment, pass_fds=(says_ready,)
            )
        except BaseException:
            os.close(ready)
            raise
        finally:
            os.close(says_ready)
        return Kept(process, ready)

    async def _stopped_during_pause(self, number: int, how: str, backoff: float) -> bool:
        pause = backoff * random.uniform(0.5, 1.5)  # those that died together do not come back together
        log.error("worker process %d %s: another in %.1f s", number, how, pause)
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._stopping.wait()
        return self._stopping.is_set()

    def _give_up(self) -> None:
        self._useless = True
        if not self._stopping.is_set():
            self.stop()
