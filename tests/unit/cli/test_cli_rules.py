"""`propolis queues pause`, `block` and their like, and `propolis rules`, on a SQLite file."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from propolis.app.client import client as client_module
from propolis.app.operate.rules import whoever_runs_this
from propolis.cli import main
from propolis.engines import open_engine
from propolis.engines.memory import MemoryEngine
from propolis.testing.clock import FakeClock


class Shell:
    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self, *arguments: str, code: int = 0) -> Result:
        env = {"PROPOLIS_APP": "", "PROPOLIS_URL": self.url}
        result = CliRunner().invoke(main, arguments, env=env)
        assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
        return result

    def json(self, *arguments: str) -> list[Any]:
        return [json.loads(line) for line in self(*arguments, "--json").stdout.splitlines()]


@pytest.fixture
async def shell(tmp_path: Path) -> Shell:
    url = f"sqlite:///{tmp_path}/jobs.db"
    engine = await open_engine(url)
    await engine.close()
    return Shell(url)


@pytest.mark.parametrize(("do", "undo"), [("pause", "resume"), ("block", "unblock")])
def test_rules_are_set_and_lifted_and_doing_so_twice_does_no_harm(shell: Shell, do: str, undo: str) -> None:
    for verb, changed in ((do, True), (do, False), (undo, True), (undo, False)):
        [answer] = shell.json("queues", verb, "mail")
        assert answer["changed"] is changed


def test_a_rule_may_be_on_a_task_a_key_or_both(shell: Shell) -> None:
    """S2.34."""
    shell("queues", "pause", "--task", "tests.echo")
    shell("queues", "block", "--task", "tests.echo", "--key", "tenant 7")
    shell("queues", "pause", "--key", "tenant 7")
    listed = shell("queues").stdout.splitlines()[-3:]
    assert [" ".join(line.split()) for line in listed] == [
        "blocked task 'tests.echo' of key 'tenant 7'",
        "paused key 'tenant 7'",
        "paused task 'tests.echo'",
    ]
    assert [(rule["task"], rule["key"]) for rule in shell.json("rules")] == [
        ("tests.echo", "tenant 7"),
        (None, "tenant 7"),
        ("tests.echo", None),
    ]
    [answer] = shell.json("queues", "unblock", "--task", "tests.echo", "--key", "tenant 7")
    assert (answer["scope"], answer["changed"]) == ("task_key", True)
    assert "queue, or a task=" in shell("queues", "pause", code=2).stderr
    assert "queue, or a task=" in shell("queues", "pause", "mail", "--key", "k", code=2).stderr


def test_a_rule_tells_who_set_it_and_why_and_until_when(shell: Shell) -> None:
    """S2.34."""
    assert "nothing is paused" in shell("rules").stderr
    shell("queues", "pause", "mail", "--by", "anna", "--why", "deploy \x1b[2J", "--until", "2h")
    shell("queues", "block", "mail", "--actor", "ben", "--until", "2999-01-31T09:00Z")
    shell("queues", "pause", "bulk")
    blocked, bulk, mail = shell.json("rules")
    assert (blocked["by"], blocked["until"]) == ("ben", "2999-01-31T09:00:00Z")
    assert (bulk["by"], bulk["why"], bulk["until"]) == (whoever_runs_this(), "", None)
    assert (mail["kind"], mail["scope"], mail["name"]) == ("pause", "queue", "mail")
    assert (mail["by"], mail["why"]) == ("anna", "deploy \x1b[2J")
    passed = datetime.fromisoformat(mail["until"]) - datetime.fromisoformat(mail["at"])
    assert passed == timedelta(hours=2)
    table = shell("rules").stdout
    assert "\x1b" not in table
    assert "deploy" in table
    [mail] = [each for each in shell.json("queues") if each["queue"] == "mail"]
    assert (mail["state"], mail["rules"]) == ("blocked", ["blocked", "paused"])


def test_a_rule_that_is_set_again_says_something_else(shell: Shell) -> None:
    """S2.13."""
    shell("queues", "pause", "mail", "--by", "anna", "--until", "1h")
    assert shell("queues", "pause", "mail", "--by", "ben").stdout == "mail: it was paused: it says this now\n"
    [rule] = shell.json("rules")
    assert (rule["by"], rule["until"]) == ("ben", None)


@pytest.mark.parametrize("what", [["tenant:7"], ["--task", "mail.send"], ["--queue", "mail"]])
def test_limits_are_put_and_removed_and_doing_so_twice_does_no_harm(shell: Shell, what: list[str]) -> None:
    put = ["limits", "put", *what, "--at-once", "3"]
    for verb, changed in ((put, True), (put, False), (["limits", "remove", *what], True)):
        [answer] = shell.json(*verb)
        assert (answer["name"], answer["changed"]) == (what[-1], changed)
    assert shell("limits", "remove", *what).stdout == f"{what[-1]}: nothing to do, it was not limited\n"


def test_a_limit_is_shown_with_its_use_and_all_are_listed(shell: Shell) -> None:
    assert "nothing is limited" in shell("limits").stderr
    assert "no such limit: `propolis limits` lists" in shell("limits", "get", "tenant:7", code=1).stderr
    shell(
        "limits", "put", "tenant:7", "--at-once", "3", "--by", "anna", "--why", "as agreed", "--until", "1h"
    )
    shell("limits", "put", "--task", "mail.send", "--at-once", "1")
    shell("queues", "pause", "mail")
    [use] = shell.json("limits", "get", "tenant:7")
    assert (use["key"], use["n"], use["by"], use["why"]) == ("tenant:7", 3, "anna", "as agreed")
    assert (use["running"], use["waiting"], use["more"]) == ([], 0, False)
    shown = dict(line.split(maxsplit=1) for line in shell("limits", "get", "tenant:7").stdout.splitlines())
    assert (shown["key"], shown["running"], shown["waiting"]) == ("tenant:7", "0 of 3", "0")
    assert [rule["name"] for rule in shell.json("limits")] == ["tenant:7", "mail.send"]
    assert shell("limits", "list").stdout == shell("limits").stdout
    assert [rule["kind"] for rule in shell.json("rules")] == ["pause", "limit", "limit"]
    assert "What is limited" not in shell("limits", "put", "--at-once", "3", code=2).stdout


@pytest.fixture
def rated_shell(monkeypatch: pytest.MonkeyPatch) -> Shell:
    """On an engine that keeps rates, the same for all commands."""
    engine = MemoryEngine(clock=FakeClock())
    monkeypatch.setattr(client_module, "make_engine", lambda *_, **__: engine)
    return Shell("memory://")


def test_rates_and_limits_for_many_keys_are_put_shown_and_removed(rated_shell: Shell) -> None:
    shell = rated_shell
    shell("limits", "put", "tenant:*", "--at-once", "3", "--rate", "100/min", "--burst", "20")
    shell("limits", "put", "--task", "mail.send", "--rate", "5/s")
    assert shell("limits", "put", "*", "--task", "mail.send", "--rate", "1/h").stdout.endswith(": limited\n")

    rules = [line.split("  ")[0] for line in shell("limits").stdout.splitlines()[1:]]
    assert rules == ["limit 3 100/min, 20 saved up", "limit 5/s", "limit 1/h"]
    of_key, of_task, of_each = shell.json("limits")
    assert (of_key["n"], of_key["rate"], of_key["burst"]) == (3, "100/min", 20)
    assert (of_task["n"], of_task["rate"], of_task["task"]) == (None, "5/s", "mail.send")
    assert (of_each["rate"], of_each["task"], of_each["key"]) == ("1/h", "mail.send", "*")

    shown = shell("limits", "get", "tenant:7").stdout
    assert dict(line.split(maxsplit=1) for line in shown.splitlines() if "since" not in line) == {
        "key": "tenant:*",
        "running": "0 of 3",
        "rate": "100/min, 20 saved up",
        "left": "20",
        "waiting": "0",
        "by": whoever_runs_this(),
    }
    [use] = shell.json("limits", "get", "--task", "mail.send")
    assert (use["tokens"], use["next_in"]) == (1, 0.0)
    assert "how many in which time" in shell("limits", "put", "k", "--rate", "often", code=2).stderr
    assert shell("limits", "remove", "tenant:*").stdout == "tenant:*: unlimited\n"
    assert "no such limit: `propolis limits` lists" in shell("limits", "get", "tenant:7", code=1).stderr


def test_a_queue_is_capped_and_a_producer_may_wait_for_room(shell: Shell) -> None:
    assert (
        shell("queues", "cap", "mail", "1", "--by", "anna", "--why", "small disk").stdout == "mail: capped\n"
    )
    again = shell("queues", "cap", "mail", "0").stdout
    assert again == "mail: it had a cap: it says this now\n"
    [rule] = shell.json("rules")
    assert (rule["kind"], rule["name"], rule["n"]) == ("cap", "mail", 0)
    full = shell("enqueue", "tests.echo", "--queue", "mail", "--wait", "0", "--url", shell.url, code=1).stderr
    assert "queue 'mail' is full: it has a cap of 0 waiting jobs and would hold 1" in full
    assert shell("queues", "uncap", "mail").stdout == "mail: uncapped\n"
    assert shell("queues", "uncap", "mail").stdout == "mail: nothing to do, it had no cap\n"
    shell("enqueue", "tests.echo", "--queue", "mail", "--wait", "1s", "--url", shell.url)
    assert "not in the range" in shell("queues", "cap", "mail", "--", "-1", code=2).stderr
