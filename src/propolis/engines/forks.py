"""What has to be let go of before this process forks: told here, where it is known before any engine is."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

from propolis.errors import EngineClosed, ForkedEngine


class LetsGo(Protocol):
    def before_fork(self) -> None: ...

    def after_fork(self) -> None: ...


_known: weakref.WeakSet[LetsGo] = weakref.WeakSet()
_forking: list[LetsGo] = []
_lock = threading.RLock()  # held during a fork: what comes meanwhile waits


def check_opener(pid: int) -> None:
    """For what the process `pid` has opened (0: nobody has): `EngineClosed`, or `ForkedEngine` in a child."""
    if pid == 0:
        raise EngineClosed
    if pid != os.getpid():
        raise ForkedEngine(pid, os.getpid())


def closes_before_forks(one: LetsGo) -> None:
    with _lock:
        _known.add(one)


def forgets(one: LetsGo) -> None:
    _known.discard(one)


def _before_fork() -> None:
    _lock.acquire()
    for one in list(_known):
        one.before_fork()
        _forking.append(one)


def _after_fork() -> None:
    while _forking:
        _forking.pop().after_fork()
    _lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
