"""Notice what other processes write to a file: by the system's events (Linux), or else by checking often."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache

POLL = 0.005  # seconds between checks where the system has no events
FIRST_CHECK = 0.0002  # seconds after a write
GROWTH = 1.2  # of the pause between checks: a commit is seen late by a fifth of the time it took
CHECKS = 38  # the last one is a second after the write, when whoever waits checks by itself
VAIN = 8  # checks in a row that were for others: from then on we are in no hurry
STEP_BACK, MAX_STEPS = 0.001, 32  # seconds, for each further one
_IN_MODIFY, _IN_IGNORED = 0x2, 0x8000


class FineTimer:
    """A timer that the system keeps: those of event loops know no less than a millisecond."""

    def __init__(self) -> None:
        self.fd: int = _libc().timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def start(self, seconds: float) -> None:
        """The descriptor can be read after that; what was started before is forgotten."""
        whole, rest = divmod(round(seconds * 1e9), 1_000_000_000)
        _libc().timerfd_settime(self.fd, 0, (ctypes.c_long * 4)(0, 0, whole, rest), None)

    def stop(self) -> None:
        self.start(0)


class FileWatch:
    """Between `begin` and `rest`, calls `check` after the file was written to.

    A write is not yet a commit: the log is written, then synced, and only then do others see it, of which no
    system gives an event.  So after each write there are several checks, further and further apart.  What was
    written between two waits counts as well, and those checks that one wait did not come to are for the next.

    Of many processes that wait for jobs all notice each write, and one of them gets the job.  Whoever has
    checked in vain many times gets no more events while there is something new at each check, and checks by
    chance: the machine is left to those who have something to do.

    It is kept from one wait to the next, because Linux takes up to 15 ms to close a watch, in which the event
    loop would stand still.
    """

    def __init__(self, path: str, pause: Callable[[], float]) -> None:
        self._path = path
        self._pause = pause
        self._listening = False
        self._fd: int | None = None
        self._file = 0  # the inode that is watched
        self._timer: FineTimer | None = None
        self._poller: asyncio.TimerHandle | None = None
        self._checks = 0

    def begin(self, check: Callable[[], bool]) -> None:
        self._loop = asyncio.get_running_loop()
        self._check = check
        self._renew()
        if self._fd is not None and self._timer is not None:
            self._listen()
            self._loop.add_reader(self._timer.fd, self._time_is_up)
            self._check_again()
        else:
            self._poll()

    def rest(self) -> None:
        """Check no more; `begin` goes on, in this event loop or in another one."""
        if self._poller is not None:
            self._poller.cancel()
            self._poller = None
        elif self._fd is not None and self._timer is not None:
            self._loop.remove_reader(self._fd)
            self._listening = False
            self._loop.remove_reader(self._timer.fd)
            self._timer.stop()

    def close(self) -> None:
        """Once it rests."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if self._timer is not None:
            os.close(self._timer.fd)
            self._timer = None

    def _renew(self) -> None:
        """The file may be another one by now: SQLite removes its log when the last one closes it."""
        if self._fd is not None:
            mask = self._events()
            if mask & _IN_IGNORED:
                self.close()
            elif mask:
                self._checks = 0
        with suppress(OSError, AttributeError):
            file = os.stat(self._path).st_ino
            if self._fd is None or self._timer is None or self._file != file:
                self.close()
                self._fd = _watch(self._path)
                self._timer = FineTimer()
                self._file = file
                self._checks = 0

    def _events(self) -> int:
        """What has happened to the file since we asked last, all in one.

        Only the system knows that it is gone.  The inode does not show it: a new file may have it by now.
        """
        assert self._fd is not None
        events = b""
        with suppress(BlockingIOError):
            events = os.read(self._fd, 65536)
        all_masks = 0
        for _, mask, _, _ in struct.iter_unpack("iIII", events):
            all_masks |= mask
        return all_masks

    def _written(self) -> None:
        if self._events() & _IN_IGNORED:
            self.rest()
            self.close()
            self.begin(self._check)
            return
        self._checks = 0
        if pause := self._pause():
            self._step_back(pause)
        else:
            self._check_again()

    def _time_is_up(self) -> None:
        assert self._timer is not None
        with suppress(BlockingIOError):  # it was started again meanwhile
            os.read(self._timer.fd, 8)
            self._check_again()

    def _check_again(self) -> None:
        assert self._timer is not None
        seen, pause = self._check(), self._pause()
        if seen and pause:
            self._step_back(pause)
        else:  # also after what was seen: the write may have been that of the next commit
            self._listen()
            if self._checks < CHECKS:
                self._timer.start(max(FIRST_CHECK * GROWTH**self._checks, pause))
                self._checks += 1

    def _listen(self) -> None:
        if not self._listening:
            assert self._fd is not None
            self._loop.add_reader(self._fd, self._written)
            self._listening = True

    def _step_back(self, pause: float) -> None:
        """Take no events before the next check."""
        assert self._fd is not None
        assert self._timer is not None
        self._loop.remove_reader(self._fd)
        self._listening = False
        self._timer.start(pause)

    def _poll(self) -> None:
        self._check()
        self._poller = self._loop.call_later(POLL, self._poll)


class FileWatches:
    """Watches of one file: as many as there are waits at the same time, used again and again."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._resting: list[FileWatch] = []
        self._closed = False
        self.vain = 0  # how many checks in a row were in vain; whoever checks sets it

    @contextmanager
    def calling(self, check: Callable[[], bool]) -> Iterator[None]:
        watch = self._resting.pop() if self._resting else FileWatch(self._path, self._pause)
        watch.begin(check)
        try:
            yield
        finally:
            watch.rest()
            if self._closed:
                watch.close()
            else:
                self._resting.append(watch)

    def _pause(self) -> float:
        """Seconds by chance, so that one of many who step back is still early."""
        return STEP_BACK * random.uniform(0, min(max(0, self.vain - VAIN), MAX_STEPS))

    def close(self) -> None:
        """Waits that are under way close theirs themselves."""
        self._closed = True
        while self._resting:
            self._resting.pop().close()

    def open(self) -> None:
        self._closed = False


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _watch(path: str) -> int:
    libc = _libc()
    fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "inotify_init1")
    if libc.inotify_add_watch(fd, os.fsencode(path), _IN_MODIFY) < 0:
        os.close(fd)
        raise OSError(ctypes.get_errno(), "inotify_add_watch")
    return fd
