"""Pausing and blocking by the app: what for, who, why and until when."""

from __future__ import annotations

import os
import re
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from propolis import App
from propolis.app.operate import rules
from propolis.core.protocols import Rule, RuleKind, Scope, task_and_key, task_key
from propolis.errors import BadName, BadSetting
from propolis.testing.clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.mark.parametrize("what", ["name", "task", "key"])
@pytest.mark.parametrize("name", ["", "a\0b", "\ud800", "x" * 600])
async def test_a_name_that_no_job_can_have_is_refused_by_those_who_operate(what: str, name: str) -> None:
    """As at a put, and not somewhere in the engine."""
    app = App("memory://")
    for act in (app.queues.apause, app.queues.aresume, app.queues.ablock, app.queues.aunblock):
        with pytest.raises(BadSetting):
            await act(**{what: name})
    with pytest.raises(BadName, match="at most 128"):
        await app.queues.adrop(name)
    assert await app.queues.arules() == []


@pytest.mark.parametrize("what", [{}, {"name": "mail", "task": "send"}, {"name": "mail", "key": "k"}])
async def test_a_rule_is_for_a_queue_or_for_a_task_a_key_or_both(what: dict[str, str]) -> None:
    app = App("memory://")
    with pytest.raises(BadSetting, match="Give a queue, or a task=, a key= or both"):
        await app.queues.apause(**what)


async def test_a_pause_says_who_why_and_until_when(clock: FakeClock) -> None:
    """S2.34: also in synchronous code, where the actor is that of the app."""
    app = App("memory://", clock=clock, actor="ben")
    until = clock.now + timedelta(days=1)
    await app.queues.apause("mail", by="anna", why="deploy", until="1h")
    await app.queues.ablock(task="send", key="tenant 7", until=until)
    await app.queues.apause(key="tenant 7")

    blocked, of_key, of_queue = await app.queues.arules()

    assert (blocked.scope, task_and_key(blocked.name)) == (Scope.TASK_KEY, ("send", "tenant 7"))
    assert (blocked.by, blocked.why, blocked.at, blocked.until) == ("ben", "", clock.now, until)
    assert (of_key.by, of_key.until) == ("ben", None)
    assert (of_queue.by, of_queue.why, of_queue.until) == ("anna", "deploy", clock.now + timedelta(hours=1))


async def test_one_state_is_shown_of_all_rules(clock: FakeClock) -> None:
    """S2.13: blocked before paused before limited before open; what is over counts no more."""
    app = App("memory://", clock=clock)
    job: dict[str, Any] = {"name": "mail", "task": "send", "key": "k"}
    assert await app.queues.astate(**job) == "open"
    await (await app.ready()).add_rule(Rule(RuleKind.LIMIT, Scope.QUEUE, "mail", 3))
    assert [await app.queues.astate("mail"), await app.queues.astate("bulk")] == ["limited", "open"]
    await app.queues.apause(task="send", key="k")
    states = [await app.queues.astate(task="send"), await app.queues.astate(**job)]
    assert states == ["open", "paused"]
    await app.queues.ablock("mail", until="1h")
    assert await app.queues.astate(**job) == "blocked"
    clock.advance("1h")
    assert await app.queues.astate(**job) == "paused"


async def test_a_user_without_a_name_is_told_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 1234")

    monkeypatch.setattr("getpass.getuser", nameless)
    rules.whoever_runs_this.cache_clear()
    try:
        assert rules.whoever_runs_this() == f"{os.getuid()}@{socket.gethostname()}"
    finally:
        rules.whoever_runs_this.cache_clear()


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": RuleKind.LIMIT, "n": 3},  # a limit on a task of one key
        {"name": "send"},
        {"name": "send "},
        {"name": " k"},
        {"lasts": timedelta(0)},
        {"lasts": timedelta(days=40_000)},
        {"lasts": timedelta(1), "until": datetime(2030, 1, 1, tzinfo=UTC)},
        {"until": datetime(2030, 1, 1)},  # noqa: DTZ001  # that is what is wrong
        {"by": "x" * 201},
        {"why": "x" * 1001},
        {"why": "a\0b"},
    ],
    ids=repr,
)
def test_a_rule_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    fine: dict[str, Any] = {
        "kind": RuleKind.PAUSE,
        "scope": Scope.TASK_KEY,
        "name": task_key("send", "tenant 7"),
        "by": "x" * 200,
        "why": "x" * 1000,
    }
    Rule(**fine)
    with pytest.raises(BadSetting):
        Rule(**fine | wrong)


def test_the_page_about_rules_works_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/rules.md; what was not let go in it waits, and only that."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).resolve().parents[3] / "docs" / "rules.md").read_text(encoding="utf-8")
    [program] = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)

    exec(compile(program, "rules.py", "exec"), {"__name__": "rules"})

    reasons, *told = capsys.readouterr().out.split("\nblocked\n", 1)
    assert reasons.startswith("key 'tenant:7' is blocked by billing since ")
    assert "queue 'mail' is paused by anna since " in reasons
    assert told[0].splitlines()[-2:] == ["True False", "open"]
