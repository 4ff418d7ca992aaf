"""The command line as its users have it: real processes, one after another, on a SQLite file."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

TASKS = """
import json, sys
from pathlib import Path
from propolis import App
from propolis.strategies import archive, dead, repeat

app = App("sqlite:///jobs.db")

@app.task(name="mail.send", queue="mail", on_success=archive)
async def send(to: str) -> None: ...

@app.task(name="fails", on_error=repeat(1).then(dead), on_success=archive)
def fails(number: int) -> None:
    raise ValueError("no such luck")

@app.task(name="modules")
def modules() -> None:
    Path("modules.json").write_text(json.dumps(sorted(sys.modules)))
"""

ADDED = """
@app.task(name="late", on_success=archive)
async def late(number: int) -> None: ...
"""

# `propolis worker` has no use for any of these.
FORBIDDEN = {
    "asyncpg",
    "grpc",
    "hypothesis",
    "nats",
    "pydantic",
    "pytest",
    "redis",
    "rich",
    "sqlalchemy",
    "starlette",
}


class Folder:
    """A user's folder, with tasks.py in it and a shell to type in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write("tasks.py", TASKS)
        self.command = [sys.executable, "-P", "-m", "propolis"]
        hidden = ("PROPOLIS_URL", "PYTHONPATH", "PYTHONSAFEPATH")
        kept = {name: value for name, value in os.environ.items() if name not in hidden}
        self.env = kept | {"PROPOLIS_APP": "tasks:app", "PYTHONDONTWRITEBYTECODE": "1"}

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text, encoding="utf-8")

    def run(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*self.command, *arguments],
            cwd=self.path,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert arguments[0] == "worker" or "Traceback" not in done.stderr  # that of a job is in the log
        return done

    def json(self, *arguments: str, code: int = 0) -> list[Any]:
        return [json.loads(line) for line in self.run(*arguments, "--json", code=code).stdout.splitlines()]

    def enqueue(self, *arguments: str) -> str:
        return self.run("enqueue", *arguments).stdout.strip()

    def work(self, *options: str) -> None:
        self.run("worker", "tasks:app", "--until-empty", "--poll", "50ms", *options)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_jobs_are_enqueued_worked_off_looked_at_and_replayed_from_the_shell(folder: Folder) -> None:
    """S2.17, S3.35."""
    mail = folder.enqueue("mail.send", '"ann@example.org"')
    failed = folder.enqueue("fails", "7")
    folder.work()

    assert {each["id"]: each["state"] for each in folder.json("jobs", "list")} == {
        mail: "done",
        failed: "dead",
    }
    [fields] = folder.json("jobs", "show", failed)
    assert (fields["attempts"], fields["error"]["type"]) == (2, "ValueError")
    assert fields["history"]
    shown = folder.run("dead", "show", failed).stdout
    assert "ValueError: no such luck" in shown
    assert "(int)" in shown

    folder.write("tasks.py", TASKS.replace("raise ValueError", "str"))
    assert folder.json("dead", "replay", "--all") == [{"replayed": 1}]
    folder.work()
    [shown] = folder.json("jobs", "show", failed)
    assert shown["state"] == "done"
    assert "replayed" in [event["kind"] for event in shown["history"]]


def test_a_job_of_an_unknown_task_is_parked_and_runs_after_the_fix(folder: Folder) -> None:
    """S1.19, T12b."""
    job = folder.enqueue("late", "1", "--url", "sqlite:///jobs.db")
    folder.work()
    assert folder.json("jobs", "show", job)[0]["state"] == "ready"
    assert "parked" in folder.run("jobs", "explain", job).stdout

    folder.write("tasks.py", TASKS + ADDED)
    folder.work()
    assert folder.json("jobs", "show", job)[0]["state"] == "done"


def test_check_finds_a_changed_signature_before_it_is_deployed(folder: Folder) -> None:
    folder.enqueue("mail.send", '"ann@example.org"')
    assert "nothing would break" in folder.run("check").stdout
    folder.write("tasks.py", TASKS.replace("send(to: str)", "send(to: str, subject: str)"))
    [shown] = folder.json("check", code=1)
    [problem] = shown["problems"]
    assert (problem["where"], problem["jobs"]) == ("mail.send", 1)


def test_several_processes_work_off_a_queue_and_end_when_it_is_empty(folder: Folder) -> None:
    for number in range(6):
        folder.enqueue("mail.send", f'"{number}"')
    folder.work("--processes", "2", "-q", "mail=2", "--lease", "5s")
    assert len(folder.json("jobs", "list", "--state", "done")) == 6


def test_once_runs_one_job_of_the_queues_that_are_named(folder: Folder) -> None:
    for number in range(2):
        folder.enqueue("mail.send", f'"{number}"')
    folder.run("worker", "tasks", "--once", "-q", "mail@3,default=2")
    assert len(folder.json("jobs", "list", "--state", "done")) == 1


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["tasks:ap"], "write tasks:app"),
        (["task:app"], "there is no module 'task'"),
        (["tasks:app", "-q", "mail=x"], "is not understood"),
        (["tasks:app", "-q", "mail", "-q", "mail"], "is in two lanes"),
        (["tasks:app", "--lease", "1ms"], "too short to be renewed"),
        (["tasks:app", "--once", "--until-empty"], "one mode"),
    ],
)
def test_a_worker_that_is_told_nonsense_says_what_to_write(
    folder: Folder, arguments: list[str], advice: str
) -> None:
    assert advice in folder.run("worker", *arguments, code=2).stderr


# --- what is imported --------------------------------------------------------------------


def test_a_worker_imports_nothing_that_it_does_not_need(folder: Folder) -> None:
    folder.enqueue("modules")
    folder.work()
    modules = json.loads((folder.path / "modules.json").read_text())
    assert "propolis.worker.worker" in modules
    assert FORBIDDEN & {name.split(".")[0] for name in modules} == set()


HOSTILE = "open('owned', 'a').write(__name__)\n"
STANDARD = ("json", "asyncio", "logging", "sqlite3", "typing", "socket", "sitecustomize", "usercustomize")
INSTALLED = ("click", "msgspec", "rich", "propolis")


def test_a_file_in_the_working_directory_takes_the_place_of_no_module(folder: Folder, tmp_path: Path) -> None:
    """S20: run as the installed script runs, and as a supervisor starts its workers."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    script = bin_folder / "propolis"
    script.write_text("import sys\nfrom propolis.cli import main\nsys.exit(main())\n", encoding="utf-8")
    for name in (*STANDARD, *INSTALLED):
        folder.write(f"{name}.py", HOSTILE)
    for command in ([sys.executable, str(script)], [sys.executable, "-P", "-m", "propolis"]):
        folder.command = command
        folder.enqueue("mail.send", '"a"')
        folder.work()
        folder.run("jobs", "list")
        folder.run("queues", "--url", "sqlite:///jobs.db")
        folder.run("top", "--once")
    assert not (folder.path / "owned").exists()


@pytest.mark.usefixtures("uncovered")
def test_a_hostile_file_would_have_been_noticed(folder: Folder) -> None:
    folder.write("json.py", HOSTILE)
    subprocess.run([sys.executable, "-c", "import json"], cwd=folder.path, check=True)
    assert (folder.path / "owned").read_text() == "json"


def test_with_a_url_alone_nothing_of_the_working_directory_is_imported(folder: Folder) -> None:
    """S20."""
    folder.write("tasks.py", HOSTILE)
    folder.run("init", "--url", "sqlite:///jobs.db")
    folder.run("queues", "--url", "sqlite:///jobs.db")
    assert not (folder.path / "owned").exists()


# --- the live screen ---------------------------------------------------------------------


class Screen:
    """A command on a terminal of its own."""

    def __init__(self, folder: Folder, *arguments: str) -> None:
        self.terminal, other = pty.openpty()
        self.process = subprocess.Popen(
            [*folder.command, *arguments],
            cwd=folder.path,
            env=folder.env | {"TERM": "xterm"},
            stdin=other,
            stdout=other,
            stderr=other,
        )
        os.close(other)
        self.seen = b""

    def wait_for(self, words: bytes) -> None:
        deadline = time.monotonic() + 120
        while words not in self.seen:
            assert time.monotonic() < deadline, self.seen
            self._read(1)

    def exit_code(self) -> int:
        """Read until it ends, as a terminal does: what is not read may not be written."""
        deadline = time.monotonic() + 120
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.seen
            self._read(0.05)
        return self.process.returncode

    def _read(self, seconds: float) -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            if select.select([self.terminal], [], [], seconds)[0]:
                self.seen += os.read(self.terminal, 65536)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)


@pytest.mark.parametrize("end", ["q", "SIGINT"])
@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo terminals")
def test_top_is_live_until_q_or_an_interrupt_ends_it(folder: Folder, end: str) -> None:
    """S1.33."""
    folder.enqueue("mail.send", '"a"')
    with contextlib.closing(Screen(folder, "top", "--interval", "100ms")) as screen:
        screen.wait_for(b"mail")
        if end == "q":
            os.write(screen.terminal, b"xq")
        else:
            screen.process.send_signal(signal.SIGINT)
        assert screen.exit_code() == 0


@pytest.mark.parametrize(
    ("redirected", "why"),
    [(">&-", "the standard output is closed"), (">/dev/full", "the output cannot be written")],
)
@pytest.mark.parametrize("command", [("queues",), ("queues", "--json"), ("--help",)])
def test_an_output_that_cannot_be_written_is_one_line_and_no_traceback(
    folder: Folder, command: tuple[str, ...], redirected: str, why: str
) -> None:
    folder.enqueue("fails", "1")
    words = shlex.join([*folder.command, *command])
    done = subprocess.run(
        ["sh", "-c", f"exec {words} {redirected}"],
        cwd=folder.path,
        env=folder.env,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith(f"error: {why}")
