"""Adapters as processes: started, listened to until a deadline, and never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.environments import Environment, last_words

LOOK = 0.1  # seconds between two looks at whether a silent process still lives

Event = dict[str, Any]


class StepFailed(Exception):
    """A peer did not do what was asked; the message is the reason, for the table."""


class Adapter:
    """One command of an adapter, running.  A context manager: at its end the process is gone."""

    def __init__(self, environment: Environment, command: str, options: dict[str, Any]) -> None:
        self._name = command
        self._buffer = b""
        self._events: deque[Event] = deque()
        self._folder = tempfile.TemporaryDirectory(prefix="propolis-")
        self._log = Path(self._folder.name, "log")
        pipe = Path(self._folder.name, "pipe")
        os.mkfifo(pipe)
        # Open for writing too: the pipe then lives as long as this object, whoever else opens and closes it.
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._pipe, selectors.EVENT_READ)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*environment.command, command, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | environment.variables | {"BENCH_PIPE": str(pipe), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )

    def __enter__(self) -> Adapter:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._selector.close()
        os.close(self._pipe)
        self._folder.cleanup()

    def kill(self) -> None:
        """As `kill -9` does, the processes of its group included."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """It keeps its connections and does nothing, as with Ctrl-Z."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    def events(self, deadline: float) -> Iterator[Event]:
        """What the adapter tells, as it comes; ends when the process has, fails at the deadline."""
        while True:
            self._read()
            while self._events:  # one by one: who stops listening in between finds the rest the next time
                yield self._events.popleft()
            ended = self._process.poll() is not None
            if self._selector.select(0.0 if ended else min(LOOK, max(0.0, deadline - time.monotonic()))):
                continue
            if ended:
                return
            if time.monotonic() >= deadline:
                raise StepFailed(f"{self._name}: not done before the deadline")

    def says_something(self, *, within: float) -> bool:
        """Has it told anything, or does it soon?  Fails where it has ended without a word."""
        deadline = time.monotonic() + within
        while not self._events:
            if self._process.poll() is not None:
                raise self.gone()
            if not self._selector.select(min(LOOK, max(0.0, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    return False
                continue
            self._read()
        return True

    def left_over(self) -> list[Event]:
        """What a process that is killed or stopped had still told; nobody hears it again."""
        self._read()
        found = list(self._events)
        self._events.clear()
        return found

    def gone(self) -> StepFailed:
        """Why it ended although it should not have."""
        error_text = last_words(self._log.read_text(errors="replace"))
        return StepFailed(f"{self._name}: ended with exit code {self._process.poll()}: {error_text}")

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._pipe, 1 << 16):
                self._buffer += data
        found, self._buffer = _lines(self._buffer)
        self._events.extend(found)


def _lines(buffer: bytes) -> tuple[list[Event], bytes]:
    whole, _, rest = buffer.rpartition(b"\n")
    return [json.loads(line) for line in whole.split(b"\n") if line], rest


def ask(environment: Environment, command: str, options: dict[str, Any], *, within: float) -> Event:
    """Run a command that tells one thing and ends."""
    with Adapter(environment, command, options) as adapter:
        for event in adapter.events(time.monotonic() + within):
            return event
        raise adapter.gone()
