"""Jobs made to run another program than was declared: each ends as broken, and nothing is run."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from propolis import App
from propolis.core.envelope import Envelope
from propolis.core.job import State
from propolis.errors import BadSetting, BrokenPayload
from propolis.worker import Mode, Settings, Worker

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="process groups")

# What a job brings, as arguments and named ones.  Where it is run, it makes the file canary.
ATTACKS: dict[str, tuple[Any, Any]] = {
    "the free form": ([["sh", "-c", "touch canary"]], {}),
    "a line of shell": (["touch canary"], {}),
    "the free form by name": ([], {"command": ["sh", "-c", "touch canary"]}),
    "a program besides": ([["touch", "canary"]], {"file": "canary"}),
    "another program": ([], {"file": "canary", "program": ["touch", "canary"]}),
    "a list for a place": ([], {"file": ["canary", "canary"]}),
    "an object for a place": ([], {"file": {"text": "canary"}}),
    "a truth for a place": ([], {"file": True}),
    "nothing for a place": ([], {"file": None}),
    "no place": ([], {}),
    "by position": (["canary"], {}),
    "an option": ([], {"file": "--reference=canary"}),
    "a number as an option": ([], {"file": -1}),
    "an end within": ([], {"file": "canary\0"}),
    "an environment": ([], {"file": "canary", "env": {"PATH": "."}}),
    "a standard input": ([], {"file": "canary", "stdin": "x"}),
    "the job itself": ([], {"file": "canary", "_job": {}}),
}


@pytest.fixture
async def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[App]:
    monkeypatch.chdir(tmp_path)
    app = App("memory://")
    app.command("touch", ["touch", "{file}"])
    yield app
    await app.aclose()


async def put_and_run(app: App, args: Any, kwargs: Any) -> Envelope:
    job = Envelope(
        id="x", task="touch", args=Raw(json.dumps(args).encode()), kwargs=Raw(json.dumps(kwargs).encode())
    )
    await app.client.aput(job)  # as whoever can write to the storage does: no signature is asked
    await Worker(app, Settings(mode=Mode.UNTIL_EMPTY)).run()
    return job


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_hostile_job_ends_as_broken_and_runs_nothing(app: App, attack: str, tmp_path: Path) -> None:
    job = await put_and_run(app, *ATTACKS[attack])
    record = await app.jobs.aget(job.id)
    assert record is not None
    assert (record.state, record.reason) == (State.DEAD, "broken")
    assert record.error is not None
    assert record.error.type == BrokenPayload.__name__
    assert names_in(tmp_path) == []


async def test_an_honest_job_does_run(app: App, tmp_path: Path) -> None:
    """Otherwise the canary would tell nothing."""
    await put_and_run(app, [], {"file": "canary"})
    assert names_in(tmp_path) == ["canary"]


async def test_the_message_tells_no_value(app: App) -> None:
    """What a job brings may be a secret, and errors are shown in lists."""
    job = await put_and_run(app, [], {"file": "-secret"})
    record = await app.jobs.aget(job.id)
    assert record is not None
    assert record.error is not None
    assert "secret" not in record.error.message


@pytest.mark.parametrize(
    ("program", "stdin"),
    [
        (["env", "sh", "-x", "-c", "echo {x}"], None),
        (["timeout", "5", "bash", "-e", "-c", "echo {x}"], None),
        (["nice", "bash", "-o", "pipefail", "-c", "gzip {x}"], None),
        (["env", "bash", "--norc", "-c", "echo {x}"], None),
        (["env", "bash", "-c{x}"], None),
        (["env", "fish", "--command={x}"], None),
        (["env", "bash", "{x}"], None),
        (["env", "sh"], "{x}"),
        (["env", "bash", "-s"], "{x}"),
        (["env", "-S", "sh -c {x}"], None),
        (["env", "-iS{x}"], None),
        (["su", "-c", "echo {x}"], None),
        (["/bin/rbash", "-c", "echo {x}"], None),
        (["bash5.2", "-c", "echo {x}"], None),
    ],
)
def test_no_value_is_declared_to_be_a_script_of_a_shell(program: list[str], stdin: str | None) -> None:
    with pytest.raises(BadSetting):
        App("memory://").command("c", program, stdin=stdin)


@pytest.mark.parametrize(
    "program",
    [
        ["bash", "-c", 'wc -l "$1"', "bash", "{x}"],
        ["timeout", "5", "sh", "-ec", 'cat "$1"', "sh", "{x}"],
        ["deploy", "--shell=bash", "{x}"],
        ["ssh-keygen", "-f", "{x}"],
        ["env", "COLOUR={x}", "paint"],
    ],
)
def test_what_is_no_script_may_be_a_value(program: list[str]) -> None:
    App("memory://").command("c", program)


def test_behind_nothing_but_a_dash_a_value_chooses_no_long_option() -> None:
    command = App("memory://").command("c", ["head", "-{n}", "file"])
    with pytest.raises(TypeError, match="begin with '-'"):
        command.job(n="-version")
    command.job(n=5)
