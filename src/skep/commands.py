"""Programs as tasks: any language can do the work, and the exit code decides.

Whoever may enqueue such a task may run anything that the worker may run.
"""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE
from collections import deque
from contextlib import suppress
from typing import cast

from skep.broker import LOG_LINES
from skep.context import Job
from skep.errors import CommandFailed

# What programs need to find their way about; nothing that gives access to something.
PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_ALL", "TZ", "TMPDIR")
SHELL = ("/bin/sh", "-c")
OUTPUT_MAX = 2**16  # bytes kept of the output, and of the errors: the last ones
MESSAGE_MAX = 1000  # characters of the errors that become the message
LINE_MAX = 2000  # bytes
TELL_EVERY = 0.2  # seconds in which lines gather
LAST_BYTES = 1.0  # seconds for a pipe to end after its program

STDOUT, STDERR = 1, 2


async def run_program(
    job: Job, command: list[str], env: dict[str, str] | None = None, stdin: str | None = None
) -> str:
    """Run a program with its arguments; returns the end of its output.

    Any exit code but 0 is a `CommandFailed` with the end of what it wrote to its standard error.  Both
    streams go to the job's log.  Stopped, it is killed with everything it has started; at its own end,
    what it has left in the background is.
    """
    return await _run(job, command, env or {}, stdin)


async def run_line(
    job: Job, command: str, env: dict[str, str] | None = None, stdin: str | None = None
) -> str:
    """The same for a line of shell."""
    return await _run(job, [*SHELL, command], env or {}, stdin)


async def _run(job: Job, command: list[str], env: dict[str, str], stdin: str | None) -> str:
    loop = asyncio.get_running_loop()
    transport, program = await loop.subprocess_exec(
        lambda: Program(job),
        *command,
        stdin=DEVNULL if stdin is None else PIPE,
        env=environment(job, env),
        start_new_session=True,  # makes it the head of a group that can be killed together
    )
    try:
        if stdin is not None:
            feed(transport, stdin)
        await asyncio.shield(program.ended)
    finally:
        if not program.exited:
            program.kill()
            await asyncio.shield(program.ended)
    if code := transport.get_returncode():
        raise CommandFailed(how(code), code, program.text(STDERR).strip()[-MESSAGE_MAX:])
    return program.text(STDOUT)


def environment(job: Job, env: dict[str, str]) -> dict[str, str]:
    """Little of ours, all of the job's, and who it is: with the fence, its writes can be guarded."""
    ours = {name: value for name in PASSED_ON if (value := os.environ.get(name)) is not None}
    facts = {"SKEP_JOB_ID": job.id, "SKEP_ATTEMPT": str(job.attempt), "SKEP_FENCE": str(job.fence)}
    return ours | env | facts


def feed(transport: asyncio.SubprocessTransport, stdin: str) -> None:
    pipe = cast("asyncio.WriteTransport", transport.get_pipe_transport(0))
    pipe.write(stdin.encode())
    pipe.write_eof()


def how(code: int) -> str:
    if code > 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"killed by signal {-code}"


class Program(asyncio.SubprocessProtocol):
    """A running program.  It ends when its first process does, not when the last one lets go of its pipes."""

    def __init__(self, job: Job) -> None:
        self._loop = asyncio.get_running_loop()
        self._job = job
        self._tails = {STDOUT: bytearray(), STDERR: bytearray()}
        self._open = {STDOUT, STDERR}
        self._lines = {STDOUT: LineCutter(), STDERR: LineCutter()}
        self._untold: deque[str] = deque(maxlen=LOG_LINES)
        self._telling: asyncio.TimerHandle | None = None
        self.exited = False
        self.ended: asyncio.Future[None] = self._loop.create_future()

    def text(self, fd: int) -> str:
        return self._tails[fd].decode(errors="replace")

    def kill(self) -> None:
        """All of its group.  If nothing is left of that, there is nothing to do."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._transport.get_pid(), signal.SIGKILL)

    # --- what the loop tells -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        tail = self._tails[fd]
        tail += data
        del tail[:-OUTPUT_MAX]
        self._tell_soon(self._lines[fd].feed(data))

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002
        self._open.discard(fd)
        self._look_whether_ended()

    def process_exited(self) -> None:
        self.exited = True
        self.kill()  # what it left in the background would hold its pipes for ever
        self._loop.call_later(LAST_BYTES, self._end)
        self._look_whether_ended()

    def _look_whether_ended(self) -> None:
        if self.exited and not self._open:
            self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self._tell_soon([line for cutter in self._lines.values() for line in cutter.rest()])
            self._tell()
            self._transport.close()  # not earlier: it would take the exit code from who waits for it
            self.ended.set_result(None)

    # --- the job's log -------------------------------------------------------------------------

    def _tell_soon(self, lines: list[str]) -> None:
        """Not line by line: a program can write more of them than anybody can keep."""
        self._untold.extend(lines)
        if self._untold and self._telling is None:
            self._telling = self._loop.call_later(TELL_EVERY, self._tell)

    def _tell(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        for line in self._untold:
            self._job.log(line)
        self._untold.clear()


class LineCutter:
    """Bytes as they come, lines as they end; the part of a line beyond `LINE_MAX` is dropped."""

    def __init__(self) -> None:
        self._begun = b""

    def feed(self, data: bytes) -> list[str]:
        *whole, begun = (self._begun + data).split(b"\n")
        self._begun = begun[:LINE_MAX]
        return [_shown(line) for line in whole[-LOG_LINES:]]

    def rest(self) -> list[str]:
        begun, self._begun = self._begun, b""
        return [_shown(begun)] if begun else []


def _shown(line: bytes) -> str:
    return line[:LINE_MAX].decode(errors="replace").rstrip("\r").replace("\0", "\\x00")
