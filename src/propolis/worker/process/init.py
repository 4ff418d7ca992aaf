"""The first process of a container: it gets every orphan, and nobody else ends their entries."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
FROM_A_TERMINAL = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)  # which sends them to everybody itself


def leave_init_to_another() -> None:
    """As process 1, stay as such and do nothing but reap; this returns in a child that does the work.

    The worker itself cannot reap: what it reaps is missing where a job waits for a process of its own.
    """
    if sys.platform != "win32" and os.getpid() == 1 and (worker := os.fork()):
        reap_until_the_end_of(worker)


def reap_until_the_end_of(worker: int) -> NoReturn:
    """Signals are passed on to the worker; its exit code becomes ours."""
    for number in (*PASSED_ON, *(() if sys.stdin.isatty() else FROM_A_TERMINAL)):
        signal.signal(number, lambda number, _: _send(worker, number))
    while True:
        pid, status = os.wait()
        if pid == worker:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _send(worker: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(worker, number)
