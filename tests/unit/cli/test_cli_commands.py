"""The commands, as a shell would call them, on a SQLite file."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import sqlite3
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from propolis.app.operate.rules import whoever_runs_this
from propolis.app.operate.workers import Presence, WorkerCard
from propolis.cli import COMMANDS, main
from propolis.cli.console.output import Output
from propolis.cli.top import View, frame
from propolis.core import wire
from propolis.core.duration import duration
from propolis.core.envelope import Envelope
from propolis.core.job import (
    Broken,
    Dead,
    Done,
    Error,
    JobInfo,
    Lease,
    Outcome,
    Progress,
    Retried,
    State,
    Unknown,
)
from propolis.core.protocols import Counts, Engine, Note
from propolis.engines import open_engine
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.worker.settings import Settings

T = TypeVar("T")

APP = """
from enum import Enum
from propolis import App, Job

class Colour(Enum):
    RED = "red"

app = App({url!r})

@app.task(name="mail.send", queue="mail")
async def send(to: str, subject: str = "hi", *, password: str = "") -> None: ...

@app.task(name="paint")
def paint(job: Job, colour: Colour) -> None: ...
"""


class Shell:
    """`shell("jobs", "list", code=1)`: a command, and the exit code that it must have."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder}/jobs.db"
        self.module = self.write(APP)

    def write(self, text: str) -> str:
        """A module with an app, under a name that no other test has imported."""
        name = f"tasks_{uuid4().hex}"
        (self.folder / f"{name}.py").write_text(text.replace("{url!r}", repr(self.url)), encoding="utf-8")
        return name

    def __call__(self, *arguments: str, code: int = 0, env: dict[str, str] | None = None) -> Result:
        given = {"PROPOLIS_APP": self.module, "PROPOLIS_URL": "", **(env or {})}
        result = CliRunner().invoke(main, arguments, env=given)
        assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result

    def json(self, *arguments: str, code: int = 0) -> list[Any]:
        return [json.loads(line) for line in self(*arguments, "--json", code=code).stdout.splitlines()]

    def on_engine(self, work: Callable[[Engine], Awaitable[T]]) -> T:
        async def run() -> T:
            engine = await open_engine(self.url)
            try:
                return await work(engine)
            finally:
                await engine.close()

        return asyncio.run(run())

    def put(self, *jobs: Envelope) -> None:
        self.on_engine(lambda engine: engine.put(jobs))

    def lease(self, queue: str = "default") -> Lease:
        [lease] = self.on_engine(lambda engine: engine.lease({queue: 1}, span=SPAN, holder=HOLDER))
        return lease

    def settle(self, outcome: Outcome, queue: str = "default") -> str:
        """Run the next job, as a worker with this outcome would; gives its id."""
        lease = self.lease(queue)
        assert self.on_engine(lambda engine: engine.settle([(lease, outcome)])) == []
        return lease.id


@pytest.fixture
def unused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Where there is no storage yet."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return Shell(tmp_path)


@pytest.fixture
def shell(unused: Shell) -> Shell:
    unused("init")
    return unused


# --- the program -------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(shell: Shell, command: str) -> None:
    assert f"Usage: main {command}" in shell(command, "--help").stdout


def test_the_version_is_told(shell: Shell) -> None:
    assert shell("--version").stdout.startswith("propolis ")


def test_an_unknown_command_is_wrong_usage(shell: Shell) -> None:
    assert "No such command" in shell("nonsense", code=2).output


def test_the_options_of_a_worker_are_its_settings(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """T12b."""
    given: list[Settings] = []

    def run_worker(_: object, settings: Settings) -> int:
        given.append(settings)
        return 0

    monkeypatch.setattr("propolis.worker.supervisor.run_worker", run_worker)
    shell("worker")
    shell("worker", "--unknown-for", "90m", "--poll", "2s", "--lease", "20s", "--grace", "3s")
    spans = [(it.unknown_for, it.poll, it.lease, it.grace) for it in given]
    defaults = Settings()
    assert spans[0] == (defaults.unknown_for, defaults.poll, defaults.lease, defaults.grace)
    assert spans[1] == tuple(map(duration, ("90m", "2s", "20s", "3s")))


@pytest.mark.parametrize(
    ("options", "env", "log_jobs"),
    [
        ((), {}, "failures"),
        ((), {"PROPOLIS_LOG_JOBS": "all"}, "all"),
        ((), {"PROPOLIS_LOG_JOBS": ""}, "failures"),
        (("--log-jobs", "sample:100"), {"PROPOLIS_LOG_JOBS": "all"}, "sample:100"),
    ],
)
def test_which_jobs_a_worker_logs_is_an_option_or_in_the_environment(
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    env: dict[str, str],
    log_jobs: str,
) -> None:
    given: list[Settings] = []

    def run_worker(_: object, settings: Settings) -> int:
        given.append(settings)
        return 0

    monkeypatch.setattr("propolis.worker.supervisor.run_worker", run_worker)
    shell("worker", *options, env=env)
    assert given[0].log_jobs == log_jobs
    assert Settings().log_jobs == "failures"


@pytest.mark.parametrize("text", ["some", "sample:0"])
def test_a_worker_logs_what_it_knows(shell: Shell, text: str) -> None:
    assert "none of failures, all, none and sample:100" in shell("worker", "--log-jobs", text, code=2).output


def test_a_worker_is_given_one_app(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    apps: list[str | None] = []

    def run_worker(_: object, settings: Settings) -> int:
        apps.append(settings.app_path)
        return 0

    monkeypatch.setattr("propolis.worker.supervisor.run_worker", run_worker)
    both = shell("worker", "--app", shell.module, "other:app", code=2)
    assert f"write `propolis worker {shell.module}` or `propolis worker other:app`" in both.stderr
    shell("worker", "--app", shell.module, env={"PROPOLIS_APP": "other:app"})
    shell("worker", "--app", shell.module, shell.module)
    shell("worker", shell.module, env={"PROPOLIS_APP": "other:app"})
    assert apps == [shell.module] * 3


def test_without_an_app_the_error_says_how_to_name_one(shell: Shell) -> None:
    result = shell("queues", code=2, env={"PROPOLIS_APP": ""})
    assert result.stderr.startswith("error: which app?  Give --app MOD:APP (or set PROPOLIS_APP)")
    assert result.stdout == ""


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_group_and_its_commands_take_the_same_options(shell: Shell, where: str) -> None:
    options = ["--url", shell.url, "--json"]
    arguments = (
        ["queues", *options, "pause", "mail"] if where == "before" else ["queues", "pause", "mail", *options]
    )
    assert json.loads(shell(*arguments, env={"PROPOLIS_APP": ""}).stdout)["paused"]


def test_an_option_counts_more_than_the_environment(shell: Shell) -> None:
    shell("queues", "--url", shell.url, env={"PROPOLIS_APP": "no_such_module"})
    shell("queues", "--app", shell.module, env={"PROPOLIS_URL": "nonsense://"})
    assert "nonsense://" in shell("queues", env={"PROPOLIS_URL": "nonsense://"}, code=2).stderr


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("nonsense://u:hunter2@h/", "the URL must begin with one of"),
        ("sqlite:///x.db?synchronus=off", "no option 'synchronus'"),
        ("sqlite:////no/such/folder/jobs.db", ""),
    ],
)
def test_an_engine_that_cannot_be_had_is_an_error_without_a_traceback(
    shell: Shell, url: str, advice: str
) -> None:
    """S12: nor with a password."""
    result = CliRunner().invoke(main, ["queues", "--url", url])
    assert result.exit_code in (1, 2)
    assert result.stderr.startswith("error: ")
    assert advice in result.stderr
    assert "hunter2" not in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "command", [["jobs", "show"], ["queues", "pause"], ["batches", "show"]], ids=" ".join
)
def test_an_argument_that_is_no_text_is_an_error_without_a_traceback(command: list[str]) -> None:
    result = CliRunner().invoke(main, [*command, "hunter2\udcff", "--url", "memory://"])
    assert result.exit_code == 2
    assert "argument 3 is no UTF-8" in result.stderr
    assert "hunter2" not in result.output
    assert isinstance(result.exception, SystemExit)


# --- enqueue -----------------------------------------------------------------------------


def test_enqueue_checks_the_arguments_and_prints_the_id(shell: Shell) -> None:
    job_id = shell(
        "enqueue", "mail.send", '"ann@example.org"', "--kwargs", '{"subject": "yo"}'
    ).stdout.strip()
    lease = shell.lease("mail")
    assert lease.id == job_id
    assert wire.decode_args(wire.decode(lease.body).args) == ["ann@example.org", "yo"]


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["mail.send", "5"], "do not fit send(to: str"),
        (["mail.send"], "missing a required argument: 'to'"),
        (["mail.send", '"a"', "--kwargs", '{"cc": 1}'], "unexpected keyword argument 'cc'"),
        (["mail.send", "ann"], "is not JSON"),
        (["mail.send", '"a"', "--kwargs", "[1]"], "--kwargs must be a JSON object"),
        (["mail.snd", '"a"'], "did you mean mail.send?"),
        (["send", "a@b"], "no task named 'send': did you mean mail.send?"),
        (["snd", "a@b"], "no task named 'snd': did you mean mail.send?"),
        (["mail.sent"], "did you mean mail.send?"),
        (["archive", "5"], "no task named 'archive': it has mail.send, paint\n"),
        (["mail.send", '"a"', "--queue", "a b"], "cannot be a queue"),
        (["mail.send", '"a"', "--delay", "soon"], "is not a duration"),
        (["mail.send", '"a"', "--delay", "1s", "--at", "2030-01-01T00:00Z"], "not both"),
        (["mail.send", '"a"', "--priority", "1000"], "cannot be a priority"),
    ],
)
def test_what_cannot_be_enqueued_is_refused_with_advice(
    shell: Shell, arguments: list[str], advice: str
) -> None:
    assert advice in shell("enqueue", *arguments, code=2).stderr
    assert shell("queues").stdout == ""


def test_of_many_tasks_those_are_offered_that_were_meant(shell: Shell) -> None:
    declared = (
        f"app.task(name='{name}')(lambda: None)\n" for name in ("a.send", "z.mend", "bulk.send", "z.sent")
    )
    many = shell.write("from propolis import App\napp = App({url!r})\n" + "".join(declared))

    def advice(name: str) -> str:
        return shell("enqueue", name, "--app", many, code=2).stderr.partition(": did you mean ")[2]

    assert advice("mend") == "z.mend or a.send or bulk.send?\n"  # exactly so, and only then what is like it
    assert advice("sent").startswith("z.sent or ")
    assert advice("send") == "a.send or bulk.send or z.sent?\n"


def test_the_circumstances_of_a_call_are_options(shell: Shell) -> None:
    shell(
        *("enqueue", "mail.send", '"a"', "--queue", "slow", "--at", "2030-01-01T00:00Z", "--priority", "5"),
        *("--id", "mine", "--unique", "once", "--key", "k", "--expires", "9d"),
    )
    [fields] = shell.json("jobs", "show", "mine")
    assert (fields["queue"], fields["priority"], fields["unique"], fields["key"]) == ("slow", 5, "once", "k")
    assert fields["due_at"] == "2030-01-01T00:00:00Z"
    assert fields["expires_at"] is not None


def test_a_job_that_is_there_already_is_named_and_not_added(shell: Shell) -> None:
    [first] = shell.json("enqueue", "mail.send", '"a"', "--unique", "k")
    [second] = shell.json("enqueue", "mail.send", '"a"', "--unique", "k")
    assert (first["created"], second["created"]) == (True, False)
    assert first["id"] == second["id"]


def test_with_a_url_alone_nothing_is_checked_and_that_is_said(shell: Shell) -> None:
    result = shell("enqueue", "anything", "5", "--delay", "1h", "--url", shell.url)
    assert "not checked against the task's signature" in result.stderr
    [fields] = shell.json("jobs", "show", result.stdout.strip())
    assert (fields["task"], fields["args"]) == ("anything", ["int"])
    assert (
        "not both"
        in shell(
            "enqueue", "x", "--delay", "1s", "--at", "2030-01-01T00:00Z", "--url", shell.url, code=2
        ).stderr
    )


def test_enqueueing_into_memory_is_said_to_be_in_vain(shell: Shell) -> None:
    assert "the job ends with this command" in shell("enqueue", "x", "--url", "memory://").stderr


# --- queues ------------------------------------------------------------------------------


def test_queues_are_listed_in_the_order_of_a_column(shell: Shell) -> None:
    """S4.14."""
    shell.put(*(a_job(queue=queue) for queue in "baacc"))

    def listed(*order: str) -> list[str]:
        return [each["queue"] for each in shell.json("queues", *order)]

    assert listed() == ["a", "b", "c"]
    assert listed("--sort", "-queue") == ["c", "b", "a"]
    assert listed("--sort", "ready") == ["b", "a", "c"]
    assert listed("--sort", "-ready") == ["a", "c", "b"]
    assert "no column" in shell("queues", "--sort", "age", code=2).stderr


def test_queues_are_listed_with_their_jobs_per_state(shell: Shell) -> None:
    shell.put(a_job(queue="mail"), a_job(queue="mail", delay_ms=60_000), a_job(queue="bulk"))
    shell("queues", "pause", "bulk")
    bulk, mail = shell.json("queues", "--age")
    assert (mail["queue"], mail["ready"], mail["scheduled"]) == ("mail", 1, 1)
    assert (bulk["queue"], bulk["state"], bulk["rules"]) == ("bulk", "paused", ["paused"])
    assert mail["state"] == "open"
    assert mail["oldest_s"] >= 0
    head, *rows = shell("queues").stdout.splitlines()
    assert head.split()[:3] == ["queue", "ready", "scheduled"]
    assert [row.split()[0] for row in rows] == ["bulk", "mail"]
    assert rows[0].split()[-1] == "paused"


def test_a_queue_is_dropped_only_when_it_is_meant(shell: Shell) -> None:
    shell.put(a_job(), a_job())
    shell("queues", "drop", "default", code=1)
    assert shell.json("queues", "drop", "default", "--yes") == [{"name": "default", "dropped": 2}]
    assert shell.json("queues", "drop", "default", "--yes", code=1) == [{"name": "default", "dropped": 0}]


# --- jobs --------------------------------------------------------------------------------


def test_jobs_are_listed_by_the_states_that_queues_counts(shell: Shell) -> None:
    """S3.35."""
    shell.put(a_job(id="run"), a_job(id="later", delay_ms=60_000), a_job(id="now"))
    shell.lease()
    for state, job_id in (("running", "run"), ("scheduled", "later"), ("ready", "now")):
        assert [each["id"] for each in shell.json("jobs", "list", "--state", state)] == [job_id]
    assert "no job matches" in shell("jobs", "list", "--state", "done", code=1).stderr
    assert [row.split()[3] for row in shell("jobs", "list").stdout.splitlines()[1:]] == [
        "running",
        "scheduled",
        "ready",
    ]
    listed = shell.json("jobs", "list")
    assert [each["state"] for each in listed] == ["running", "scheduled", "ready"]
    for each in listed:
        assert shell.json("jobs", "show", each["id"])[0]["state"] == each["state"]


def test_a_list_says_when_it_is_not_all(shell: Shell) -> None:
    shell.put(a_job(), a_job(), a_job())
    assert "the first 2: --limit shows more" in shell("jobs", "list", "--limit", "2").stderr


def test_a_job_is_shown_with_its_history_progress_log_and_error(shell: Shell) -> None:
    shell.put(a_job(1, "two", id="j"))
    shell.settle(Retried(error=Error("ValueError", "no", "Traceback: line 1\n  line 2")))
    lease = shell.lease()
    note = Note(lease, Progress(3, 10, "half"), ("line one", "line two"))
    shell.on_engine(lambda engine: engine.note([note]))
    shown = shell("jobs", "show", "j").stdout
    for words in ("ValueError: no", "  line 2", "3/10 half", "line one", HOLDER, "(int, str(3))", "history"):
        assert words in shown
    [fields] = shell.json("jobs", "show", "j")
    assert fields["history"][0]["kind"]
    assert fields["progress"] == {"done": 3, "total": 10, "note": "half"}
    assert fields["log"] == ["line one", "line two"]
    assert "no such job: nobody" in shell("jobs", "show", "nobody", code=1).stderr


CANARY = "hunter2-canary"


def test_arguments_and_results_are_shown_only_when_asked_for(shell: Shell) -> None:
    """S12."""
    kwargs = {"subject": CANARY}
    shell.put(wire.decode(json.dumps({"id": "j", "task": "t", "args": [CANARY], "kwargs": kwargs}).encode()))
    shell.settle(Done(result=json.dumps(CANARY).encode(), keep=timedelta(days=1)))
    for arguments in (["jobs", "show", "j"], ["jobs", "list"], ["top", "--once"], ["check"]):
        assert CANARY not in shell(*arguments).output
        assert CANARY not in shell(*arguments, "--json").output
    assert shell("jobs", "show", "j", "--args").stdout.count(CANARY) == 3


def test_a_checkpoint_is_shown_only_when_asked_for(shell: Shell) -> None:
    """S12."""
    shell.put(a_job(id="j"))
    note = Note(shell.lease(), checkpoint=json.dumps({"at": CANARY, "password": CANARY}).encode())
    shell.on_engine(lambda engine: engine.note([note]))
    for arguments in (["jobs", "show", "j"], ["jobs", "show", "j", "--json"], ["jobs", "list", "--json"]):
        assert CANARY not in shell(*arguments).output
    assert "object(2)" in shell("jobs", "show", "j").stdout
    assert shell("jobs", "show", "j", "--args").stdout.count(CANARY) == 1


def test_what_is_named_like_a_secret_stays_hidden_also_when_it_is_positional(shell: Shell) -> None:
    """S12."""
    name = shell.write(APP + "@app.task(name='login')\ndef login(user: str, password: str) -> None: ...\n")
    job_id = shell("enqueue", "login", '"ann"', f'"{CANARY}"', "--app", name).stdout.strip()
    shown = shell("jobs", "show", job_id, "--args", "--app", name).stdout
    assert '("ann", "***")' in shown
    assert CANARY not in shown


def test_nothing_in_a_job_can_steer_the_terminal(shell: Shell) -> None:
    """S10."""
    evil = "\x1b]0;owned\x07\u202e[red]\x9b2J"
    shell.put(a_job(evil, id="j", unique=evil), a_job(id="k"))
    lease = shell.lease()
    shell.on_engine(lambda engine: engine.note([Note(lease, Progress(1, None, evil), (evil,))]))
    commands = (["jobs", "list"], ["jobs", "show", "j", "--args"], ["top", "--once"])
    for command in commands:
        for output in (shell(*command).output, shell(*command, "--json").output):
            assert not set("\x1b\x07\u202e\x9b") & set(output)
    shell.on_engine(lambda engine: engine.settle([(lease, Dead(evil, Error(evil, evil, evil)))]))
    for command in (["dead", "list"], ["dead", "show", "j"]):
        shown = shell(*command).output
        assert not set("\x1b\x07\u202e\x9b") & set(shown)
        assert "[red]" in shown


def test_jobs_are_cancelled_replayed_and_deleted_by_id(shell: Shell) -> None:
    """S3.35."""
    shell.put(a_job(id="a"), a_job(id="b", delay_ms=60_000))
    assert shell.json("jobs", "cancel", "a", "nobody", code=1) == [
        {"id": "a", "cancelled": True},
        {"id": "nobody", "cancelled": False},
    ]
    shell("jobs", "replay", "b")
    assert shell.settle(Dead()) == "b"
    shell("jobs", "replay", "b")
    assert shell.settle(Dead()) == "b"
    assert "cancel it first" in shell("jobs", "delete", "b", "nobody", code=1).stdout
    assert shell("jobs", "show", "b", code=1).stdout == ""
    shell("jobs", "replay", "a", code=1)


def test_explain_says_why_a_job_does_not_run(shell: Shell) -> None:
    shell.put(a_job(id="a"))
    shell("queues", "pause", "default")
    assert f"queue 'default' is paused by {whoever_runs_this()} since" in shell("jobs", "explain", "a").stdout
    assert "there is no job b" in shell("jobs", "explain", "b", code=1).stdout


# --- dead and broken ---------------------------------------------------------------------


@pytest.fixture
def shelves(shell: Shell) -> Shell:
    """Two that failed, one of them in another queue, and one that was broken."""
    shell.put(a_job(id="f1"), a_job(id="f2", queue="mail", task="mail.send"), a_job(CANARY, id="b1"))
    shell.settle(Dead(error=Error("ValueError", "no")))
    shell.settle(Dead(), queue="mail")
    shell.settle(Broken(Error("UnknownTask", "no task named 'tests.echo'")))
    return shell


def ids(answers: list[Any]) -> list[str]:
    return [answer["id"] for answer in answers]


def test_broken_jobs_are_dead_with_a_reason_of_their_own(shelves: Shell) -> None:
    """S1.21, S2.17."""
    assert ids(shelves.json("dead", "list")) == ["f1", "f2", "b1"]
    assert ids(shelves.json("broken", "list")) == ["b1"]
    assert ids(shelves.json("dead", "list", "--queue", "mail")) == ["f2"]
    assert ids(shelves.json("dead", "list", "--reason", "failed", "--task", "tests.echo")) == ["f1"]
    assert "UnknownTask: no task named 'tests.echo'" in shelves("broken", "show", "b1").stdout
    shelves("broken", "show", "f1", code=1)
    assert "`propolis dead`" in shelves("broken", "list", "--reason", "failed", code=2).stderr


def test_a_broken_job_that_can_be_decoded_shows_its_arguments_only_when_asked(shelves: Shell) -> None:
    """S12."""
    assert CANARY not in shelves("broken", "show", "b1").output
    assert CANARY in shelves("broken", "show", "b1", "--args").output


def test_what_cannot_be_decoded_is_listed_as_such_and_shown_raw_but_harmless(shell: Shell) -> None:
    """S1.21, S10."""
    shell.put(a_job(id="b"))
    with contextlib.closing(sqlite3.connect(shell.folder / "jobs.db")) as file:  # as a stranger would
        file.execute("UPDATE propolis_job SET body = ?", [b'{"id": "b", \x1b[2J\xff\\'])
        file.commit()
    shell.settle(Broken(Error("BrokenPayload", "not UTF-8")))
    assert ids(shell.json("broken", "list")) == ["b"]
    shown = shell("broken", "show", "b").stdout
    assert "undecodable: not UTF-8" in shown
    assert r'{"id": "b", \x1b[2J\xff\x5c' in shown
    [fields] = shell.json("broken", "show", "b")
    assert fields["raw"] == r'{"id": "b", \x1b[2J\xff\x5c'


def test_replay_takes_ids_or_a_filter_or_all(shelves: Shell) -> None:
    """S1.19, S2.17, S3.35."""
    assert shelves.json("dead", "replay", "f1", "nobody", code=1) == [
        {"id": "f1", "replayed": True},
        {"id": "nobody", "replayed": False},
    ]
    assert shelves.json("broken", "replay", "--task", "tests.echo") == [{"replayed": 1}]
    assert ids(shelves.json("dead", "list")) == ["f2"]
    assert shelves("dead", "replay", "--all").stdout == "1 job replayed\n"
    assert shelves("dead", "replay", "--all", code=1).stdout == "0 jobs replayed\n"


def test_replay_may_be_limited_to_the_oldest(shelves: Shell) -> None:
    """S3.35: replay-n."""
    assert shelves.json("dead", "replay", "--limit", "2") == [{"replayed": 2}]
    assert ids(shelves.json("dead", "list")) == ["b1"]


def test_purge_forgets_what_is_chosen_and_asks_first(shelves: Shell) -> None:
    """S2.17, S3.35: delete-older-than."""
    shelves("dead", "purge", "--all", code=1)
    assert shelves.json("dead", "purge", "--older-than", "1h", "--yes", code=1) == [{"purged": 0}]
    assert shelves.json("broken", "purge", "--all", "--yes") == [{"purged": 1}]
    assert shelves.json("dead", "purge", "f1", "--yes") == [{"id": "f1", "purged": True}]
    assert shelves.json("dead", "purge", "--older-than", "0s", "--yes") == [{"purged": 1}]
    assert "no job matches" in shelves("dead", "list", code=1).stderr


@pytest.mark.parametrize("arguments", [[], ["f1", "--all"], ["f1", "--queue", "mail"]])
def test_nothing_chosen_is_a_mistake_and_never_means_all(shelves: Shell, arguments: list[str]) -> None:
    assert "say which" in shelves("dead", "replay", *arguments, code=2).stderr
    assert "say which" in shelves("dead", "purge", "--yes", *arguments, code=2).stderr


# --- top, check, init --------------------------------------------------------------------


def test_top_shows_queues_and_who_runs_what(shell: Shell) -> None:
    """S1.33."""
    shell.put(a_job(id="a"), a_job(id="b"))
    shell.lease()
    shown = shell("top", "--once").stdout
    assert "tests.echo" in shown
    assert HOLDER in shown
    [fields] = shell.json("top")
    assert ids(fields["running"]) == ["a"]
    assert fields["queues"]["default"]["ready"] == 1


def test_lists_and_top_show_what_is_parked(shell: Shell) -> None:
    """T12b: it waits, and an operator sees where."""
    shell.put(a_job(id="a"))
    assert "parked" not in shell("top", "--once").stdout
    shell.settle(Unknown())
    head, row = (line.split() for line in shell("top", "--once").stdout.splitlines()[2:4])
    assert row[head.index("parked")] == "1"
    assert shell("jobs", "list").stdout.split()[-1] == "parked"


def test_a_list_on_a_narrow_terminal_keeps_ids_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody copies them into the next command."""
    monkeypatch.setenv("COLUMNS", "40")
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdout", screen)
    job_id = "0197f3a2-6f1e-7c3a-9d0b-2f8f5a1c4e77"
    Output(as_json=False).table(["id", "task"], [[job_id, "mail.send"]])
    assert job_id in screen.getvalue()


def test_top_has_one_line_for_each_job_however_narrow_it_is() -> None:
    """It counts the lines of the screen to know how many of them it can show."""
    now = datetime(2030, 1, 31, tzinfo=UTC)
    info = JobInfo(
        id="0197f3a2-6f1e-7c3a-9d0b-2f8f5a1c4e77",
        task="mail.send_to_everybody",
        queue="default",
        state=State.RUNNING,
        body=b"",
        priority=0,
        put_at=now,
        due_at=now,
    )
    view = View(now, {"default": Counts(running=3)}, [info] * 3)
    screen = io.StringIO()
    Console(file=screen, width=50).print(frame("sqlite:///jobs.db", view, {}, 3))
    assert len(screen.getvalue().splitlines()) == 1 + 1 + 2 + 1 + 1 + 3


def test_check_is_content_with_jobs_that_fit(shell: Shell) -> None:
    shell("enqueue", "mail.send", '"a"')
    shell("enqueue", "paint", '"red"')
    result = shell("check")
    assert "nothing would break" in result.stdout
    assert "durability  power" in result.stdout or "durability  process" in result.stdout
    [fields] = shell.json("check")
    assert (fields["ok"], fields["tasks"], fields["jobs"]) == (True, 2, 2)


def test_check_finds_queued_jobs_that_the_code_of_today_could_not_run(shell: Shell) -> None:
    shell.put(
        *(a_job(n, id=f"m{n}", task="mail.send", queue="mail") for n in range(3)),
        a_job(CANARY, id="p", task="paint"),
        a_job(id="x", task="gone", delay_ms=60_000),
    )
    [fields] = shell.json("check", code=1)
    found = {each["where"]: each for each in fields["problems"]}
    assert (found["mail.send"]["jobs"], found["mail.send"]["example"]) == (3, "m0")
    assert "Expected `str`, got `int`" in found["mail.send"]["why"]
    assert found["gone"]["why"] == "no such task is declared"
    shown = shell("check", code=1).output
    assert "parked until one does, and broken after an hour" in shown
    assert "still needs its old name: @app.task(name='gone')" in shown
    assert "Invalid enum value" in shown
    assert CANARY not in shown
    assert shell.json("check", "--queue", "mail", code=1)[0]["jobs"] == 3


def test_check_names_a_task_that_cannot_work_and_an_engine_that_cannot_be_had(shell: Shell) -> None:
    bad = shell.write(APP + "@app.task(name='bad')\ndef bad(x: 'Missing') -> None: ...\n")
    assert "'Missing' is not defined" in shell("check", "--app", bad, code=1).stdout
    weak = shell.write(
        "from propolis import App\n"
        "from propolis.values import Durability\n"
        "app = App('memory://', durability=Durability.POWER)\n"
    )
    assert "the app asks for 'power'" in shell("check", "--app", weak, code=1).stdout


def test_check_without_an_app_looks_at_the_engine_and_says_so(shell: Shell) -> None:
    assert "needs the app" in shell("check", "--url", shell.url).stderr


def test_init_creates_the_storage_and_does_no_harm_twice(unused: Shell) -> None:
    for _ in range(2):
        assert "is ready (durability: " in unused("init").stdout
    assert (unused.folder / "jobs.db").exists()


@pytest.mark.parametrize(
    "command",
    [
        "queues",
        "jobs list",
        "jobs show x",
        "jobs explain x",
        "dead list",
        "dead show x",
        "broken list",
        "batches list",
        "batches show x",
        "flow show x",
        "schedules",
        "schedules list",
        "schedules show x",
        "top --once",
        "workers",
        "check",
    ],
)
def test_a_command_that_only_looks_creates_nothing_and_says_what_to_do(unused: Shell, command: str) -> None:
    result = unused(*command.split(), "--url", f"sqlite:///{unused.folder}/typo.db", code=1)
    assert "run `propolis init` first" in " ".join(result.output.split())
    assert not [*unused.folder.glob("*.db*")]


def test_workers_are_listed(shell: Shell) -> None:
    assert shell("workers").stderr == "no worker is alive\n"
    assert shell.json("workers") == []
    card = WorkerCard(
        host="web1",
        pid=7,
        version="1.2",
        code="c0ffee",
        queues=("mail",),
        more_queues=2,
        slots=4,
        tasks=("a",),
    )
    shell.on_engine(lambda engine: Presence(engine, "web1:7:abc", lambda: card, clock=lambda: 0.0).beat())
    row = shell("workers").stdout.splitlines()[1]
    assert row.split()[:8] == ["web1:7:abc", "unknown", "mail,", "2", "more", "4", "1", "1.2"]
    [found] = shell.json("workers")
    assert (found["id"], found["queues"], found["tasks"]) == ("web1:7:abc", ["mail"], ["a"])


def test_init_prints_the_sql_and_touches_nothing(unused: Shell) -> None:
    script = unused("init", "--sql").stdout
    assert script.startswith("BEGIN;\n-- 0001_tables.sql")
    assert "CREATE TABLE propolis_job" in script
    assert script.rstrip().endswith("COMMIT;")
    assert not (unused.folder / "jobs.db").exists()
    assert "needs no SQL" in unused("init", "--sql", "--url", "memory://", code=2).stderr


def test_check_tells_what_is_wrong_in_the_storage_and_mends_it_only_when_asked(shell: Shell) -> None:
    """F56, L7."""
    shell.put(a_job("a", task="mail.send", id="lost"))
    with sqlite3.connect(shell.url.removeprefix("sqlite:///")) as connection:
        connection.execute("DELETE FROM propolis_ready")
    connection.close()
    for _ in range(2):
        problems = shell.json("check", "--url", shell.url, code=1)[0]["problems"]
        assert [problem["why"] for problem in problems] == [
            "job lost of queue default stood nowhere",
            "queue default counted 1 jobs (ready), and 0 are there",  # and is right once that job is back
        ]
    result = shell("check", "--repair", "--url", shell.url)
    assert "repaired    1" in result.stdout
    assert "repaired: job lost of queue default stood nowhere" in result.stderr
    assert shell.json("check", "--url", shell.url)[0]["problems"] == []
    assert shell.lease().id == "lost"


def test_all_jobs_of_a_key_are_counted_and_cancelled(shell: Shell) -> None:
    for key in ("tenant:7", "tenant:7", "tenant:8"):
        shell("enqueue", "mail.send", '"a"', "--key", key)
    assert shell("jobs", "count", "--key", "tenant:7").stdout == "2 ready\n"
    assert shell("jobs", "count", "--state", "done").stdout == "no job matches\n"
    assert len(shell.json("jobs", "list", "--key", "tenant:7")) == 2
    assert shell("jobs", "cancel", "--key", "tenant:7", "--dry-run").stdout == "2 ready\n"
    assert shell.json("jobs", "count", "--key", "tenant:7")[0]["ready"] == 2
    assert shell("jobs", "cancel", "--key", "tenant:7", "--yes").stdout == "2 jobs cancelled\n"
    shell("jobs", "cancel", "--key", "tenant:7", "--yes", code=1)
    assert shell("jobs", "count", "--task", "mail.send").stdout == "1 ready, 2 cancelled\n"
    assert "say which: ids, or --queue" in shell("jobs", "cancel", code=2).stderr
    assert "say which" in shell("jobs", "cancel", "an-id", "--key", "k", code=2).stderr


def test_before_many_jobs_are_cancelled_it_is_asked(shell: Shell) -> None:
    shell("enqueue", "mail.send", '"a"', "--key", "tenant:7")
    refused = shell("jobs", "cancel", "--task", "mail.send", code=1)
    assert "1 ready" in refused.stdout
    assert "Cancel them?" in refused.stderr
    assert shell("jobs", "count").stdout == "1 ready\n"
