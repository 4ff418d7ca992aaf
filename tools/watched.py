"""The plugin of pytest that reports to `tools.watchdog` which test its process runs.

It does nothing where no watchdog has started pytest.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import io
import json
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

FOLDER = "PROPOLIS_WATCHED_IN"  # where the processes of pytest report to
LIMIT = "PROPOLIS_TEST_LIMIT"  # seconds that a test may take if it does not ask for more
STACKS_OF_THREADS = signal.SIGUSR1
STACKS_OF_TASKS = signal.SIGUSR2


class Reporter:
    """Keeps one file per process: the test that runs, or none, and its limit in seconds."""

    def __init__(self, folder: Path, limit: float) -> None:
        self._file = folder / f"{os.getpid()}.json"
        self._limit = limit
        self._reports = 0
        # Never closed: the process may hang at its very end.
        stacks = os.open(folder / f"{os.getpid()}.stacks", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        # The first handler is written in C: it also answers while the process is blocked in C.
        faulthandler.register(STACKS_OF_THREADS, file=stacks, all_threads=True)
        signal.signal(STACKS_OF_TASKS, lambda *_: write_tasks(stacks))
        self._report(None)

    def _report(self, test: str | None, limit: float = 0) -> None:
        """In one step, so that no reader sees half of it; numbered, so that no two reports are the same."""
        self._reports += 1
        draft = self._file.with_suffix(".new")
        draft.write_text(json.dumps({"number": self._reports, "test": test, "limit": limit}), "utf-8")
        draft.replace(self._file)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        mark = item.get_closest_marker("more_time")
        size = "full" if item.config.getoption("--full", False) else "usual"
        more = mark.kwargs.get(size, 0) if mark else 0
        self._report(item.nodeid, max(self._limit, more))
        try:
            return (yield)
        finally:
            self._report(None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(report, "node"):  # of another process: pytest-xdist has brought it here
            self._report(None)


def write_tasks(stacks: int) -> None:
    """The stacks of the asyncio tasks in the main thread, where signals are handled."""
    text = io.StringIO()
    with contextlib.suppress(Exception):  # whatever happens here must not change the test
        for task in asyncio.all_tasks(asyncio.get_running_loop()):
            task.print_stack(file=text)
    with contextlib.suppress(OSError):
        os.write(stacks, f"{text.getvalue()}\n".encode())


def pytest_configure(config: pytest.Config) -> None:
    if folder := os.environ.get(FOLDER):
        config.pluginmanager.register(Reporter(Path(folder), float(os.environ[LIMIT])), "watched")
