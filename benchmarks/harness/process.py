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
from collections.abc import Iterator
from typing import Any

from harness.environments import Environment, last_words

Event = dict[str, Any]


class StepFailed(Exception):
    """A peer did not do what was asked; the message is the reason, for the table."""


class Adapter:
    """One command of an adapter, running.  A context manager: at its end the process is gone."""

    def __init__(self, environment: Environment, command: str, options: dict[str, Any]) -> None:
        self._name = command
        self._buffer = b""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        reader, writer = os.pipe()
        self._reader = reader
        try:
            self._process = subprocess.Popen(
                [*environment.command, command, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(writer,),
                env=os.environ | environment.variables | {"BENCH_FD": str(writer), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        finally:
            os.close(writer)
        self._selector = selectors.DefaultSelector()
        self._selector.register(reader, selectors.EVENT_READ)

    def __enter__(self) -> Adapter:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._selector.close()
        os.close(self._reader)
        self._log.close()

    def kill(self) -> None:
        """As `kill -9` does, children included."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def events(self, deadline: float) -> Iterator[Event]:
        """What the adapter tells, as it comes; ends when it closes its end, fails at the deadline."""
        while True:
            found, self._buffer = _lines(self._buffer)
            yield from found
            if found:
                continue
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise StepFailed(f"{self._name}: nothing more heard before the deadline")
            data = os.read(self._reader, 1 << 16)
            if not data:
                return
            self._buffer += data

    def left_over(self) -> Iterator[Event]:
        """What a killed process had still told."""
        while data := os.read(self._reader, 1 << 16):
            self._buffer += data
        found, self._buffer = _lines(self._buffer)
        yield from found

    def gone(self) -> StepFailed:
        """Why it ended although it should not have."""
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return StepFailed(f"{self._name}: it closed its pipe and goes on")
        return StepFailed(f"{self._name}: ended with exit code {code}: {last_words(self._said())}")

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")


def _lines(buffer: bytes) -> tuple[list[Event], bytes]:
    whole, _, rest = buffer.rpartition(b"\n")
    return [json.loads(line) for line in whole.split(b"\n") if line], rest


def ask(environment: Environment, command: str, options: dict[str, Any], *, within: float) -> Event:
    """Run a command that tells one thing and ends."""
    with Adapter(environment, command, options) as adapter:
        for event in adapter.events(time.monotonic() + within):
            return event
        raise adapter.gone()
