"""The signals of a process of ours, and what becomes of them in the processes that its jobs fork."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, ClassVar

log = logging.getLogger("propolis.worker")

Opened = tuple[int, int, int]  # a descriptor, and what it was opened for


class Ours:
    """What a fork of this process must not have: our handlers, and the descriptor that wakes our loop.

    With them a signal for a fork, such as the one by which `multiprocessing.Pool` ends its processes, would
    be a signal for us.
    """

    signals: ClassVar[set[int]] = set()
    forked = False
    loop: asyncio.AbstractEventLoop | None = None  # the one that hears them
    wakes: Opened | None = None  # what tells it of them, once that was looked at


def handle_in_loop(handlers: Mapping[signal.Signals, Callable[[], None]]) -> None:
    """Call these in the running loop.  A signal that our parent wants to be ignored (nohup) stays ignored."""
    loop = asyncio.get_running_loop()
    Ours.forked = False  # whatever we come from: this is a process of ours now
    for number, handler in handlers.items():
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, handler)
            Ours.signals.add(number)
    Ours.loop, Ours.wakes = loop, None


def handle(number: signal.Signals, handler: Callable[[int, Any], object]) -> None:
    signal.signal(number, handler)
    Ours.signals.add(number)


def dump_stacks_on_quit() -> None:
    """SIGQUIT (Ctrl-\\) shows what every thread is doing, and ends nothing.

    Whatever handled it before is called too.
    """
    if sys.platform != "win32":
        with suppress(AttributeError, ValueError, OSError):  # there is no standard error
            faulthandler.register(signal.SIGQUIT, all_threads=True, chain=True)
            Ours.signals.add(signal.SIGQUIT)


def end_if_forked() -> None:
    """A fork that a job has made, and that came back to us, would go on as a second worker."""
    if Ours.forked:
        os._exit(1)


def end_if_deaf() -> None:
    """A job has closed what the loop needs, perhaps with all other connections: whatever it does, we hang.

    Nobody would start another worker in our place.  And where the number of the descriptor has gone to
    another connection, each signal is a byte in that.
    """
    if Ours.loop is not asyncio.get_running_loop():
        return
    if Ours.wakes is None:
        Ours.wakes = _wakes_us()
    elif _opened(Ours.wakes[0]) != Ours.wakes:
        log.critical("a descriptor of this process was closed, as a job may do: the worker ends at once")
        os._exit(1)


def loop_goes_on() -> None:
    """After something has ended it: it may have made anew what wakes it."""
    Ours.wakes = None


def _wakes_us() -> Opened | None:
    try:
        descriptor = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    except ValueError:  # signals are for another thread
        return None
    return _opened(descriptor)


def _opened(descriptor: int) -> Opened | None:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return descriptor, found.st_dev, found.st_ino


def _reset_in_fork() -> None:
    if not Ours.signals:
        return
    Ours.forked, Ours.loop = True, None
    signal.set_wakeup_fd(-1)
    if signal.SIGQUIT in Ours.signals:
        faulthandler.unregister(signal.SIGQUIT)
    for number in Ours.signals:
        signal.signal(number, signal.SIG_DFL)
    Ours.signals.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_fork)
