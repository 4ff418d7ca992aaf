"""Notice what other processes write to a file: told by the system (Linux), or else by looking often."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from contextlib import suppress

POLL = 0.005  # seconds between looks where the system does not tell
FIRST_LOOK = 0.0002  # seconds after a write
GROWTH = 1.4  # of the pause between looks: a commit is seen late by a third of the time it took
LOOKS = 16  # the last one is a tenth of a second after the write
_IN_MODIFY = 0x2


class FileWatch:
    """Calls `look` after the file was written to, until it says that there is something new in it.

    A write is not yet a commit: the log is written, then synced, and only then do others see it, which no
    system tells about.  So after each write there are several looks, further and further apart.
    """

    def __init__(self, path: str, look: Callable[[], bool]) -> None:
        self._look = look
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._fd: int | None = None
        with suppress(OSError, AttributeError):
            self._fd = _watch(path)
        if self._fd is not None:
            self._loop.add_reader(self._fd, self._written)
        else:
            self._poll()

    def close(self) -> None:
        self._cancel()
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    def _written(self) -> None:
        assert self._fd is not None
        with suppress(BlockingIOError):
            os.read(self._fd, 65536)
        self._cancel()
        self._look_again(0)

    def _look_again(self, looks: int) -> None:
        if not self._look() and looks < LOOKS:
            self._timer = self._loop.call_later(FIRST_LOOK * GROWTH**looks, self._look_again, looks + 1)

    def _poll(self) -> None:
        self._look()
        self._timer = self._loop.call_later(POLL, self._poll)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _watch(path: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "inotify_init1")
    if libc.inotify_add_watch(fd, os.fsencode(path), _IN_MODIFY) < 0:
        os.close(fd)
        raise OSError(ctypes.get_errno(), "inotify_add_watch")
    return fd
