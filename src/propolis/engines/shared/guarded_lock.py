"""A lock whose holder is known, so that nobody waits for what only the interrupted thread could finish.

A signal handler, and the `__del__` of whatever the garbage collector finds, run in the middle of any line of
a thread.  If that line holds a lock of ours, and the handler waits for another thread that needs it, both
wait for ever.  Before somebody waits they ask `waits_in_vain()`.
"""

from __future__ import annotations

import os
import threading


class _Here(threading.local):
    depth = 0  # of locks that this thread holds, or is about to take


_here = _Here()


class GuardedLock:
    """As `threading.Lock`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def acquire(self, blocking: bool = True) -> bool:
        _here.depth += 1  # before it is taken: what interrupts us in between must know it
        if self._lock.acquire(blocking):
            return True
        _here.depth -= 1
        return False

    def release(self) -> None:
        self._lock.release()
        _here.depth -= 1

    def __enter__(self) -> None:  # as above, without a call: each put comes by here
        _here.depth += 1
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        _here.depth -= 1


def serves_others() -> None:
    """From now on nobody may wait in this thread: others do so for what it does."""
    _here.depth += 1


def waits_in_vain() -> bool:
    """Whether this thread is the one for which whoever waits here would wait."""
    return _here.depth > 0


def _after_fork() -> None:
    """A child begins with the thread that forked, whatever that did."""
    _here.depth = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
