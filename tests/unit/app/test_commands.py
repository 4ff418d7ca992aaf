"""Programs as tasks."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from propolis import App
from propolis.app.client.handle import Handle
from propolis.app.commands.run import OUTPUT_MAX, LineCutter
from propolis.app.task import AsyncTask
from propolis.core.job import JobInfo, State
from propolis.core.protocols import LOG_LINES
from propolis.errors import BadSetting, JobFailed
from propolis.strategies import dead
from propolis.worker import Mode, Settings, Worker

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="process groups")

Command = AsyncTask[..., str]


@pytest.fixture
async def app() -> AsyncIterator[App]:
    app = App("memory://")
    yield app
    await app.aclose()


@pytest.fixture
def program(app: App) -> Command:
    return app.command("program", unsafe_any_program=True, result_ttl="1h", on_error=dead, on_timeout=dead)


@pytest.fixture
def line(app: App) -> Command:
    return app.command(
        "line", unsafe_any_program=True, shell=True, result_ttl="1h", on_error=dead, on_timeout=dead
    )


async def run(app: App, handle: Handle[str], **settings: Any) -> JobInfo:
    await Worker(app, Settings(mode=Mode.UNTIL_EMPTY, **settings)).run()
    record = await handle.astatus()
    assert record is not None
    return record


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


def pids_in(file: Path) -> list[int]:
    return [int(word) for word in file.read_text().split()] if file.exists() else []


# --- how it ends -------------------------------------------------------------------------


async def test_exit_code_0_is_success_and_the_output_is_the_result(app: App, program: Command) -> None:
    """S4.19: any language; arguments are passed on as they are."""
    handle = await program.aenqueue(["printf", "%s\\n", "two words", "$HOME"])
    record = await run(app, handle)
    assert record.state is State.DONE
    assert await handle.aresult() == "two words\n$HOME\n"
    assert record.log == ("two words", "$HOME")


async def test_another_exit_code_is_an_error_with_the_end_of_what_it_complained_of(
    app: App, line: Command
) -> None:
    """S4.19: the exit code decides."""
    handle = await line.aenqueue("echo out; echo first >&2; echo last >&2; exit 3")
    record = await run(app, handle)
    assert (record.state, record.reason) == (State.DEAD, "failed")
    assert record.error is not None
    assert (record.error.type, record.error.message) == ("CommandFailed", "exit code 3: first\nlast")
    assert sorted(record.log) == ["first", "last", "out"]
    with pytest.raises(JobFailed, match="exit code 3"):
        await handle.aresult()


async def test_a_program_that_is_killed_or_missing_is_an_error(
    app: App, line: Command, program: Command
) -> None:
    killed = await run(app, await line.aenqueue("kill -9 $$"))
    assert killed.error is not None
    assert killed.error.message == "killed by SIGKILL"
    missing = await run(app, await program.aenqueue(["no-such-program-anywhere"]))
    assert missing.error is not None
    assert missing.error.type == "CommandFailed"
    assert "'no-such-program-anywhere' cannot be started by this worker" in missing.error.message


async def test_the_standard_input_is_given_or_empty(app: App, program: Command) -> None:
    handle = await program.aenqueue(["cat"], stdin="é" * 100_000 + "end")
    await run(app, handle)
    assert (await handle.aresult()).endswith("éend")
    handle = await program.aenqueue(["cat"])
    await run(app, handle)
    assert await handle.aresult() == ""
    handle = await program.aenqueue(["true"], stdin="nobody reads this" * 10_000)
    assert (await run(app, handle)).state is State.DONE


def test_a_command_line_is_only_taken_where_it_was_declared(
    app: App, program: Command, line: Command
) -> None:
    with pytest.raises(TypeError):
        program.job("rm -rf /")
    with pytest.raises(TypeError):
        line.job(["ls"])


# --- what is declared, and what a job brings ---------------------------------------------


async def words_of(app: App, task: Command, **values: Any) -> list[str]:
    """What a program got, which prints each of its arguments and a mark."""
    handle = await task.aenqueue(**values)
    assert (await run(app, handle)).state is State.DONE
    return (await handle.aresult()).split("|")[:-1]


@pytest.mark.parametrize(
    "value",
    [
        "two words",
        " ",
        "",
        'it\'s "quoted"',
        "two\nlines\ttab",
        "*",
        "~",
        "$(touch canary) `touch canary` $HOME ${HOME}",
        "; touch canary & touch canary",
        "{name} {{}} %s \\",
        "@file",
        "é 🐝",
    ],
)
async def test_a_value_is_one_argument_as_it_is(
    app: App, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    task = app.command("show", ["printf", "%s|", "{name}", "--name={name}", "last"], result_ttl="1h")
    assert await words_of(app, task, name=value) == [value, f"--name={value}", "last"]
    assert not os.listdir(tmp_path)


async def test_numbers_are_written_as_python_writes_them(app: App) -> None:
    task = app.command("show", ["printf", "%s|", "{a}", "{b}x{c}"], result_ttl="1h")
    assert await words_of(app, task, a=10**20, b=0.5, c=0) == ["1" + "0" * 20, "0.5x0"]


async def test_doubled_braces_are_braces(app: App) -> None:
    task = app.command("show", ["printf", "%s|", "{{name}}", "{{{name}}}"], result_ttl="1h")
    assert await words_of(app, task, name="x") == ["{name}", "{x}"]


@pytest.mark.parametrize("value", ["-rf", "-", "--", "--help", -5, -0.5])
async def test_a_value_that_looks_like_an_option_is_refused_unless_it_is_declared(
    app: App, value: str | int | float
) -> None:
    strict = app.command("strict", ["printf", "%s|", "{name}"], result_ttl="1h")
    with pytest.raises(TypeError, match=r"begin with '-'.*\{name:any\}"):
        await strict.aenqueue(name=value)
    free = app.command("free", ["printf", "%s|", "{name:any}"], result_ttl="1h")
    assert await words_of(app, free, name=value) == [str(value)]
    behind = app.command("behind", ["printf", "%s|", "--name={name}"], result_ttl="1h")
    assert await words_of(app, behind, name=value) == [f"--name={value}"]


async def test_the_standard_input_may_have_places(app: App) -> None:
    task = app.command("cat", ["cat", "{file:any}"], stdin="<{text}>", result_ttl="1h")
    handle = await task.aenqueue(file="-", text="-a\0b")
    await run(app, handle)
    assert await handle.aresult() == "<-a\0b>"


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, "missing a required argument: 'source'"),
        ({"source": "a"}, "missing a required argument: 'width'"),
        ({"source": "a", "width": 1, "height": 2}, "unexpected keyword argument 'height'"),
        ({"source": "a", "width": 1, "env": {"PATH": "."}}, "unexpected keyword argument 'env'"),
        ({"source": "a", "width": 1, "_job": 1}, "unexpected keyword argument '_job'"),
        ({"source": "a", "width": True}, "width: Expected `int | float | str`, got `bool`"),
        ({"source": "a", "width": None}, "width: Expected"),
        ({"source": ["a", "b"], "width": 1}, "source: Expected"),
        ({"source": "a\0b", "width": 1}, "NUL: source"),
    ],
)
def test_values_that_do_not_fit_are_refused_when_they_are_enqueued(
    app: App, values: dict[str, Any], why: str
) -> None:
    task = app.command("resize", ["true", "{source}", "{width}"])
    with pytest.raises(TypeError, match=re.escape(why)):
        task.job(**values)


def test_values_come_by_name_only(app: App) -> None:
    """Their order is that of a declaration, which may change while jobs wait."""
    task = app.command("resize", ["true", "{source}", "{width}"])
    with pytest.raises(TypeError, match="too many positional arguments"):
        task.job("a", 1)
    job = task.job(width=1, source="a")
    assert (bytes(job.args), bytes(job.kwargs)) == (b"[]", b'{"source":"a","width":1}')


def test_without_a_program_a_command_must_say_that_it_is_unsafe(app: App) -> None:
    for program, shell in ((None, False), (None, True), (["echo"], True)):
        with pytest.raises(BadSetting, match=r'app.command\("echo", \["program".*unsafe_any_program=True'):
            app.command("echo", program, shell=shell)
    with pytest.raises(BadSetting, match="declare none of them"):
        app.command("echo", ["echo"], unsafe_any_program=True)
    assert not app.tasks


async def test_a_declared_command_is_a_first_step_of_a_flow(app: App) -> None:
    show = app.command("show", ["printf", "%s", "{name}"])

    @app.task(result_ttl="1h")
    async def shout(text: str) -> str:
        return text.upper()

    flow = await (show.step(name="hello") | shout.step()).aenqueue()
    await Worker(app, Settings(mode=Mode.UNTIL_EMPTY)).run()
    assert await flow.aresult(timeout="5s") == "HELLO"


# --- what it sees ------------------------------------------------------------------------


async def test_the_environment_is_the_jobs_and_little_of_the_workers(
    app: App, program: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S18: no address with a password in it."""
    monkeypatch.setenv("DATABASE_URL", "postgres://me:secret@server/jobs")
    monkeypatch.setenv("PROPOLIS_URL", "postgres://me:secret@server/jobs")
    handle = await program.aenqueue(["env"], env={"COLOUR": "blue", "PROPOLIS_FENCE": "999"})
    await run(app, handle)
    variables = dict(text.split("=", 1) for text in (await handle.aresult()).splitlines())
    assert (variables["COLOUR"], variables["PATH"]) == ("blue", os.environ["PATH"])
    assert (variables["PROPOLIS_JOB_ID"], variables["PROPOLIS_ATTEMPT"]) == (handle.id, "1")
    assert variables["PROPOLIS_FENCE"] != "999"
    assert "secret" not in str(variables)


async def test_a_declared_environment_is_fixed_text(app: App) -> None:
    task = app.command("show", ["env"], env={"COLOUR": "{blue}"}, result_ttl="1h")
    handle = await task.aenqueue()
    await run(app, handle)
    assert "COLOUR={blue}" in (await handle.aresult()).splitlines()
    for wrong in ({"": "x"}, {"A=B": "x"}, {"A": "\0"}):
        with pytest.raises(BadSetting, match="the environment cannot hold"):
            app.command("wrong", ["env"], env=wrong)


# --- how much it says --------------------------------------------------------------------


async def test_a_flood_of_output_is_bounded(app: App, program: Command) -> None:
    handle = await program.aenqueue(["sh", "-c", "yes abcdefgh | head -n 2000000; echo the end"])
    record = await run(app, handle)
    assert len(record.log) <= LOG_LINES
    assert record.log[-1] == "the end"
    result = await handle.aresult()
    assert len(result) == OUTPUT_MAX
    assert result.endswith("the end\n")


async def test_lines_are_told_while_it_runs(app: App, line: Command, tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    handle = await line.aenqueue(f"echo begun; read answer < {go}; echo $answer")
    worker = asyncio.create_task(run(app, handle))
    async with asyncio.timeout(20):
        while True:
            record = await handle.astatus()
            if record is not None and record.log:
                break
            await asyncio.sleep(0.01)
    assert record.log == ("begun",)
    go.write_text("well done\n")
    assert (await worker).log == ("begun", "well done")


def test_lines_are_cut_wherever_the_bytes_are() -> None:
    cutter = LineCutter()
    assert cutter.feed(b"a") == []
    assert cutter.feed(b"b\r\nc\0d\n\xff") == ["ab", "c\\x00d"]
    assert cutter.feed(b"x" * 10_000) == []
    [rest] = cutter.rest()
    assert len(rest) == 2000
    assert cutter.rest() == []


# --- how it is stopped -------------------------------------------------------------------

FAMILY = "sleep 600 & sleep 601 & echo $$ $! > {}; wait"


async def test_at_its_timeout_the_whole_family_is_killed(app: App, tmp_path: Path) -> None:
    """F09, S0.15."""
    pids = tmp_path / "pids"
    task = app.command("slow", ["sh", "-c", FAMILY.format(pids)], timeout="300ms", on_timeout=dead)
    record = await run(app, await task.aenqueue())
    assert (record.state, record.reason) == (State.DEAD, "timeout")
    assert len(pids_in(pids)) == 2
    await until(lambda: not [pid for pid in pids_in(pids) if is_running(pid)])  # a kill takes a moment


async def test_a_cancelled_command_is_killed_with_its_family(app: App, line: Command, tmp_path: Path) -> None:
    """T9."""
    pids = tmp_path / "pids"
    handle = await line.aenqueue(FAMILY.format(pids))
    worker = asyncio.create_task(run(app, handle, lease=timedelta(milliseconds=400)))
    await until(lambda: len(pids_in(pids)) == 2)
    await handle.acancel()
    assert (await worker).state is State.CANCELLED
    await until(lambda: not [pid for pid in pids_in(pids) if is_running(pid)])  # a kill takes a moment


async def test_a_stopped_worker_gives_its_command_back(app: App, line: Command, tmp_path: Path) -> None:
    """S0.34."""
    pids = tmp_path / "pids"
    handle = await line.aenqueue(FAMILY.format(pids))
    worker = Worker(app, Settings(grace=timedelta(0)))
    running = asyncio.create_task(worker.run())
    await until(lambda: len(pids_in(pids)) == 2)
    worker.stop()
    await running
    record = await handle.astatus()
    assert record is not None
    assert (record.state, record.attempts) == (State.READY, 0)
    await until(lambda: not [pid for pid in pids_in(pids) if is_running(pid)])  # a kill takes a moment


async def test_what_a_program_leaves_in_the_background_does_not_outlive_it(
    app: App, line: Command, tmp_path: Path
) -> None:
    """Nor does it keep the job waiting for its pipes."""
    pids = tmp_path / "pids"
    record = await run(app, await line.aenqueue(f"sleep 600 & echo $! > {pids}"))
    assert record.state is State.DONE
    await until(lambda: not is_running(*pids_in(pids)))
