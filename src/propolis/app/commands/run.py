"""Programs as tasks: any language can do the work, and the exit code decides.

A command declares its program, and a job brings values for the places in its arguments.  `run_program` and
`run_line` are the free form: whoever may enqueue such a task may run anything that the worker may run.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from propolis.app.commands.template import Template, Value
from propolis.app.context import Job
from propolis.app.signature import accepting
from propolis.core.protocols import LOG_LINES
from propolis.errors import BadSetting, CommandFailed

# What programs need to find their way about; nothing that gives access to something.
PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_ALL", "TZ", "TMPDIR")
SHELL = ("/bin/sh", "-c")
OUTPUT_MAX = 2**16  # bytes kept of the output, and of the errors: the last ones
NOT_STARTED = 127  # as a shell says it
MESSAGE_MAX = 1000  # characters of the errors that become the message
LINE_MAX = 2000  # bytes
LOG_EVERY = 0.2  # seconds in which lines gather
LAST_BYTES = 1.0  # seconds for a pipe to end after its program

STDOUT, STDERR = 1, 2

Run = Callable[..., Coroutine[Any, Any, str]]


def declared(name: str, program: Sequence[str], env: Mapping[str, str], stdin: str | None) -> Run:
    """The function of a command: its parameters are the places of its template, by keyword only.

    By keyword, since the order of places is no promise: after a change of the declaration, jobs that wait
    would have their values exchanged.  `env` has no places: with PATH a job would choose the program, and
    with LD_PRELOAD or BASH_ENV what runs inside of it.
    """
    for variable, value in env.items():
        if not variable or "=" in variable or "\0" in variable + value:
            raise BadSetting(f"{name}: the environment cannot hold {variable!r}")
    template, fixed_env = Template(name, program, stdin), dict(env)

    async def run(_job: Job, **values: Value) -> str:
        return await _run(_job, template.argv(values), fixed_env, template.stdin(values))

    return accepting(template.check, _with_parameters(run, name, template.names))


def no_program(name: str) -> BadSetting:
    return BadSetting(
        f'{name}: declare the program, as in app.command("{name}", ["program", "{{place}}"]): its jobs bring '
        f"values only.  If whoever can write to the storage may run anything that the worker may run, say "
        f"unsafe_any_program=True instead"
    )


def check_free_form(name: str, *given: object) -> None:
    """`BadSetting` if something is declared for a command whose jobs bring all of it."""
    if any(each is not None for each in given):
        raise BadSetting(
            f"{name}: unsafe_any_program=True leaves program, env and stdin to its jobs: declare none of them"
        )


def _with_parameters(run: Run, name: str, places: list[str]) -> Run:
    """Give it the signature that it would have if it had been written with these parameters."""
    by_name = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(place, by_name, annotation=Value) for place in places]
    job = inspect.Parameter("_job", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Job)
    shape = inspect.Signature([job, *parameters], return_annotation=str)
    run.__name__ = run.__qualname__ = name
    run.__annotations__ = {"_job": Job, **dict.fromkeys(places, Value), "return": str}
    run.__signature__ = shape  # type: ignore[attr-defined]  # functions may have one
    return run


async def run_program(
    job: Job, command: list[str], env: dict[str, str] | None = None, stdin: str | None = None
) -> str:
    """Run whatever program the job names, with its arguments; returns the end of its output."""
    return await _run(job, command, env or {}, stdin)


async def run_line(
    job: Job, command: str, env: dict[str, str] | None = None, stdin: str | None = None
) -> str:
    """The same for a line of shell."""
    return await _run(job, [*SHELL, command], env or {}, stdin)


async def _run(job: Job, command: list[str], env: dict[str, str], stdin: str | None) -> str:
    """Run a program; returns the end of its output.

    Any exit code but 0 is a `CommandFailed` with the end of what it wrote to its standard error.  Both
    streams go to the job's log.  Stopped, it is killed with everything it has started; at its own end,
    what it has left in the background is.
    """
    loop = asyncio.get_running_loop()
    try:
        transport, program = await loop.subprocess_exec(
            lambda: RunningProgram(job),
            *command,
            stdin=DEVNULL if stdin is None else PIPE,
            env=environment(job, env),
            start_new_session=True,  # makes it the head of a group that can be killed together
        )
    except OSError as error:
        what = f"{command[0]!r} cannot be started by this worker"
        raise CommandFailed(what, NOT_STARTED, str(error.strerror)) from None
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
    """Little of ours, all of the command's, and which job it is: a fence guards its writes."""
    ours = {name: value for name in PASSED_ON if (value := os.environ.get(name)) is not None}
    about_the_job = {
        "PROPOLIS_JOB_ID": job.id,
        "PROPOLIS_ATTEMPT": str(job.attempt),
        "PROPOLIS_FENCE": str(job.fence),
    }
    return ours | env | about_the_job


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


class RunningProgram(asyncio.SubprocessProtocol):
    """A running program.  It ends when its first process does, not when the last one lets go of its pipes."""

    def __init__(self, job: Job) -> None:
        self._loop = asyncio.get_running_loop()
        self._job = job
        self._tails = {STDOUT: bytearray(), STDERR: bytearray()}
        self._open = {STDOUT, STDERR}
        self._lines = {STDOUT: LineCutter(), STDERR: LineCutter()}
        self._unlogged: deque[str] = deque(maxlen=LOG_LINES)
        self._timer: asyncio.TimerHandle | None = None
        self.exited = False
        self.ended: asyncio.Future[None] = self._loop.create_future()

    def text(self, fd: int) -> str:
        return self._tails[fd].decode(errors="replace")

    def kill(self) -> None:
        """All of its group.  If nothing is left of that, there is nothing to do."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._transport.get_pid(), signal.SIGKILL)

    # --- called by the loop ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        tail = self._tails[fd]
        tail += data
        del tail[:-OUTPUT_MAX]
        self._log_soon(self._lines[fd].feed(data))

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002
        self._open.discard(fd)
        self._end_if_over()

    def process_exited(self) -> None:
        self.exited = True
        self.kill()  # what it left in the background would hold its pipes for ever
        self._loop.call_later(LAST_BYTES, self._end)
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self.exited and not self._open:
            self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self._log_soon([line for cutter in self._lines.values() for line in cutter.rest()])
            self._log()
            self._transport.close()  # not earlier: it would take the exit code from whoever waits for it
            self.ended.set_result(None)

    # --- the job's log -------------------------------------------------------------------------

    def _log_soon(self, lines: list[str]) -> None:
        """Not line by line: a program can write more of them than anybody can keep."""
        self._unlogged.extend(lines)
        if self._unlogged and self._timer is None:
            self._timer = self._loop.call_later(LOG_EVERY, self._log)

    def _log(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for line in self._unlogged:
            self._job.log(line)
        self._unlogged.clear()


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
