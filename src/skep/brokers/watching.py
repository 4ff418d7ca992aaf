"""Notice what other processes write to a file: told by the system (Linux), or else by looking often."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

POLL = 0.005  # seconds between looks where the system does not tell
FIRST_LOOK = 0.0002  # seconds after a write
GROWTH = 1.15  # of the pause between looks: a commit is seen late by a seventh of the time it took
LOOKS = 31  # the last one is a tenth of a second after the write
_IN_MODIFY = 0x2


class FileWatch:
    """Between `begin` and `rest`, calls `look` after the file was written to, until that sees something new.

    A write is not yet a commit: the log is written, then synced, and only then do others see it, which no
    system tells about.  So after each write there are several looks, further and further apart; and also from
    the beginning, for what was written just before and is committed just after that.

    It is kept from one wait to the next, because Linux takes up to 15 ms to close a watch, in which the event
    loop would stand still.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: int | None = None
        self._file = 0  # the inode that is watched
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, look: Callable[[], bool]) -> None:
        self._loop = asyncio.get_running_loop()
        self._look = look
        self._renew()
        if self._fd is not None:
            self._loop.add_reader(self._fd, self._written)
            self._look_again(0)
        else:
            self._poll()

    def rest(self) -> None:
        """Look no more; `begin` goes on, in this event loop or in another one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._fd is not None:
            self._loop.remove_reader(self._fd)

    def close(self) -> None:
        """Once it rests."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _renew(self) -> None:
        """The file may be another one by now: SQLite removes its log when the last one closes it."""
        with suppress(OSError, AttributeError):
            if self._file != (file := os.stat(self._path).st_ino):
                self.close()
                self._fd = _watch(self._path)
                self._file = file

    def _written(self) -> None:
        assert self._fd is not None
        with suppress(BlockingIOError):
            os.read(self._fd, 65536)
        if self._timer is not None:
            self._timer.cancel()
        self._look_again(0)

    def _look_again(self, looks: int) -> None:
        if not self._look() and looks < LOOKS:
            self._timer = self._loop.call_later(FIRST_LOOK * GROWTH**looks, self._look_again, looks + 1)

    def _poll(self) -> None:
        self._look()
        self._timer = self._loop.call_later(POLL, self._poll)


class FileWatches:
    """Watches of one file: as many as there are waits at the same time, used again and again."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._resting: list[FileWatch] = []
        self._closed = False

    @contextmanager
    def calling(self, look: Callable[[], bool]) -> Iterator[None]:
        watch = self._resting.pop() if self._resting else FileWatch(self._path)
        watch.begin(look)
        try:
            yield
        finally:
            watch.rest()
            if self._closed:
                watch.close()
            else:
                self._resting.append(watch)

    def close(self) -> None:
        """Waits that are under way close theirs themselves."""
        self._closed = True
        while self._resting:
            self._resting.pop().close()

    def open(self) -> None:
        self._closed = False


def _watch(path: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "inotify_init1")
    if libc.inotify_add_watch(fd, os.fsencode(path), _IN_MODIFY) < 0:
        os.close(fd)
        raise OSError(ctypes.get_errno(), "inotify_add_watch")
    return fd
