"""Worker processes: one, or several that are watched over."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import random
import signal
import sys
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from typing import Any

from skep.errors import AppNotFound, BadSetting, SkepError
from skep.registry import Registry
from skep.worker.processes import how_it_ended
from skep.worker.settings import LOG_FORMAT, Settings
from skep.worker.worker import Worker

log = logging.getLogger("skep.worker")


def _uvloop() -> Any:
    try:
        return importlib.import_module("uvloop")
    except ImportError:  # not on every platform
        return None


# Now, and not when it is needed: by then the app's folder is a place to look for modules.
UVLOOP = _uvloop()

CLEAN, FAILED, USELESS = 0, 1, 2  # exit codes; after the last one, starting it again would not help
FIRST_BACKOFF, LAST_BACKOFF = 0.2, 30.0
LONG_ENOUGH = 60.0  # seconds after which a crash is a new one, and not the last one again
LAST_WORDS = 6.0  # seconds beyond the grace period for a worker to say goodbye
BY_REQUEST = (-signal.SIGTERM, -signal.SIGINT)  # sent to all of us, and before it could handle them
SUPERVISED = "SKEP_SUPERVISED"  # the variable by which a worker knows whom its standard input is from


class Word(Enum):
    """What a supervisor says to its workers, over their standard input.

    Not by signals: a terminal or a service manager sends those to everybody, and two of them mean "at once".
    """

    STOP = b"s"
    AT_ONCE = b"!"


# --- one worker process ------------------------------------------------------------------


def run_worker(registry: Registry, settings: Settings) -> int:
    """Work in this process until a signal (or its supervisor) says stop; returns the exit code.

    The first SIGTERM or SIGINT stops it gracefully, the second at once.
    """
    set_up_logging()
    supervised = os.environ.pop(SUPERVISED, None) is not None  # gone, as it is not true of what jobs start
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            runner.run(_work(registry, settings, supervised))
        except (BadSetting, AppNotFound) as error:
            log.critical("%s", error)
            return USELESS
        except SkepError as error:
            log.critical("%s", error)
            return FAILED
    return CLEAN


async def _work(registry: Registry, settings: Settings, supervised: bool) -> None:
    worker = Worker(registry, settings)
    if supervised:
        Obedience(worker, settings.grace).begin()
    else:
        worker.stop_on_signals()
    try:
        await worker.run()
    finally:
        await registry.aclose()


class Obedience:
    """How a worker listens to its supervisor, and to signals that both of them were sent.

    The supervisor's word and the first signal mean the same stop, whichever comes first.
    """

    def __init__(self, worker: Worker, grace: timedelta) -> None:
        self._worker = worker
        self._patience = grace.total_seconds() + LAST_WORDS
        self._loop = asyncio.get_running_loop()
        self._signalled = False

    def begin(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._signal)
        # A thread, because also the death of the supervisor must be heard, whatever the loop does.
        threading.Thread(target=self._listen, name="skep-lifeline", daemon=True).start()

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
        while word := os.read(0, 1):
            self._tell(self._stop_at_once if Word(word) is Word.AT_ONCE else self._stop)
        self._tell(self._stop)
        time.sleep(self._patience)
        os._exit(FAILED)

    def _tell(self, act: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended: it has stopped already
            self._loop.call_soon_threadsafe(act)


def set_up_logging() -> None:
    """To the standard error, unless the app has set it up in its own way."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = getattr(UVLOOP, "new_event_loop", None)
    return factory


# --- several -----------------------------------------------------------------------------


def supervise(arguments: Sequence[str], processes: int, grace: timedelta, *, forever: bool = True) -> int:
    """Keep this many processes of `skep` with these arguments running until a signal says stop.

    Returns the exit code: 0 if all of them ended well.  With `forever`, one that ends well without having
    been asked to is replaced too.
    """
    set_up_logging()
    command = [sys.executable, "-P", "-m", "skep", *arguments]
    return asyncio.run(Supervisor(command, processes, grace=grace, forever=forever).run())


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
        self._running: set[Process] = set()
        self._stopping = asyncio.Event()
        self._useless = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        codes = await asyncio.gather(*(self._keep_one(number + 1) for number in range(self._count)))
        if self._useless:
            return USELESS
        return FAILED if any(codes) else CLEAN

    def stop(self) -> None:
        """Once: gracefully.  Twice: now."""
        word = Word.AT_ONCE if self._stopping.is_set() else Word.STOP
        patience = LAST_WORDS if word is Word.AT_ONCE else self._grace + LAST_WORDS
        self._stopping.set()
        for process in self._running:
            _say(process, word)
        asyncio.get_running_loop().call_later(patience, self._kill_all)

    def _kill_all(self) -> None:
        for process in self._running:
            log.error("process %d does not end and is killed", process.pid)
            with suppress(ProcessLookupError):
                process.kill()

    async def _keep_one(self, number: int) -> int:
        """Have one process run, and another one after it, until there is no more need; the last exit code."""
        backoff = FIRST_BACKOFF
        while True:
            began = time.monotonic()
            code = await self._run_one(number)
            if self._stopping.is_set():
                return CLEAN if code in BY_REQUEST else code
            if code == CLEAN and not self._forever:
                return code
            if code == USELESS:
                self._give_up()
                return code
            if time.monotonic() - began > LONG_ENOUGH:
                backoff = FIRST_BACKOFF
            if await self._stopped_during_pause(number, code, backoff):
                return CLEAN
            backoff = min(backoff * 2, LAST_BACKOFF)

    async def _run_one(self, number: int) -> int:
        environment = {**os.environ, SUPERVISED: "1"}
        process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, env=environment)
        log.info("worker process %d is %d", number, process.pid)
        self._running.add(process)
        if self._stopping.is_set():  # while it was being started
            _say(process, Word.STOP)
        try:
            return await process.wait()
        finally:
            self._running.discard(process)

    async def _stopped_during_pause(self, number: int, code: int, backoff: float) -> bool:
        pause = backoff * random.uniform(0.5, 1.5)  # those that died together do not come back together
        log.error("worker process %d ended (%s): another in %.1f s", number, how_it_ended(code), pause)
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._stopping.wait()
        return self._stopping.is_set()

    def _give_up(self) -> None:
        self._useless = True
        if not self._stopping.is_set():
            self.stop()


def _say(process: Process, word: Word) -> None:
    assert process.stdin is not None
    process.stdin.write(word.value)
