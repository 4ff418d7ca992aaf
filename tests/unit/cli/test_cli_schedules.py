"""`propolis schedules`, as a shell would call it, on a SQLite file."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import pytest
from click.testing import CliRunner, Result

from propolis import App
from propolis.app.operate.schedule_records import change_to
from propolis.cli import main
from propolis.cli.schedules import shown_timing
from propolis.cli.worker import queues_of
from propolis.core.duration import milliseconds
from propolis.core.protocols import Engine, Filter, Records
from propolis.core.records import Swap
from propolis.core.schedule import Cron, Misfire, Plan, ScheduleRecord, cron, every
from propolis.engines import open_engine, piece_of
from propolis.testing.engines.samples import a_job

T = TypeVar("T")

APP = """
from propolis import App, every

app = App({url!r})

@app.cron("0 9 * * mon-fri", tz="Europe/Paris", overlap="skip", args=("ann", "s3cret"), name="digest")
@app.task(name="mail.digest", queue="mail")
async def digest(to: str, password: str) -> None: ...
"""
FAR = datetime(2300, 1, 1, tzinfo=UTC)


class Shell:
    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder}/jobs.db"
        self.module = f"tasks_{uuid4().hex}"
        (folder / f"{self.module}.py").write_text(APP.replace("{url!r}", repr(self.url)), encoding="utf-8")

    def __call__(self, *arguments: str, code: int = 0, typed: str | None = None) -> Result:
        env = {"PROPOLIS_APP": self.module, "PROPOLIS_URL": ""}
        result = CliRunner().invoke(main, ["schedules", *arguments], env=env, input=typed)
        assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
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

    def put(self, name: str, plan: Plan, *, declared: bool = False, next_at: datetime = FAR) -> None:
        job = a_job("ann", "s3cret", task="mail.digest", queue="mail")
        schedule = plan.schedule(name, job, declared=declared)
        change = change_to(ScheduleRecord(schedule=schedule, next_at=next_at), 0)
        self.on_engine(lambda engine: piece_of(engine, Records).swap([Swap(changes=(change,))]))


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    shell = Shell(tmp_path)
    shell.on_engine(lambda engine: engine.now())  # makes the storage
    return shell


def test_nothing_is_scheduled_yet(shell: Shell) -> None:
    assert shell().stderr == "there is no schedule yet\n"
    assert shell.json("list") == []


@pytest.mark.parametrize("command", [[], ["list"]])
def test_schedules_are_listed_with_their_next_and_last_times(shell: Shell, command: list[str]) -> None:
    shell.put("digest", cron("0 9 * * mon-fri", tz="Europe/Paris"), declared=True)
    shell.put("old", every("15m"), declared=True)
    shell.put("by-hand", every("1d"))
    shell("pause", "by-hand")
    header, by_hand, digest, old = shell(*command).stdout.splitlines()
    assert header.split() == ["name", "when", "task", "next", "in", "last", "notes"]
    assert digest.startswith("digest   0 9 * * mon-fri Europe/Paris  mail.digest  2300-01-01 00:00:00Z")
    assert "every 1d " in by_hand
    assert by_hand.rstrip().endswith("paused")
    assert old.rstrip().endswith("not declared any more")
    assert not digest.rstrip().endswith("any more")


def test_programs_get_every_fact(shell: Shell) -> None:
    plan = cron("@daily", tz="Europe/Paris", misfire="all", misfire_limit=7, overlap="skip", jitter="5s")
    shell.put("digest", plan, declared=True)
    shell.put("tick", every("15m"), next_at=FAR)
    digest, tick = shell.json()
    assert digest == {
        "name": "digest",
        "kind": "cron",
        "expression": "@daily",
        "tz": "Europe/Paris",
        "task": "mail.digest",
        "queue": "mail",
        "next_at": "2300-01-01T00:00:00Z",
        "last_at": None,
        "paused": False,
        "declared": True,
        "left_over": False,
        "misfire": "all",
        "misfire_limit": 7,
        "misfire_after_ms": 60_000,
        "overlap": "skip",
        "jitter_ms": 5000,
    }
    assert (tick["kind"], tick["period_ms"], tick["declared"]) == ("every", 900_000, False)


def test_one_is_shown_with_its_times_to_come_and_without_its_secrets(shell: Shell) -> None:
    shell.put(
        "digest",
        cron("0 9 * * *", tz="Europe/Paris", jitter="5s"),
        next_at=datetime(2300, 1, 1, 8, tzinfo=UTC),
    )
    shown = shell("show", "digest").stdout
    assert "call     (str(3), str(6))" in shown
    assert "misfire  once" in shown
    assert "2300-01-01 08:00:00Z  Mon 2300-01-01 09:00:00 CET" in shown
    assert "2300-01-02 08:00:00Z  Tue 2300-01-02 09:00:00 CET" in shown
    assert '("ann", "***")' in shell("show", "digest", "--args").stdout.replace('"ann","', '"ann", "')
    [fields] = shell.json("show", "digest")
    assert fields["args"] == ["str(3)", "str(6)"]
    assert fields["upcoming"][1] == "2300-01-02T08:00:00Z"


def test_an_interval_and_a_limit_are_shown(shell: Shell) -> None:
    shell.put("tick", every("15m", misfire="all", misfire_limit=9))
    shown = shell("show", "tick").stdout
    assert "all, up to 9" in shown
    assert "2300-01-01 00:15:00Z\n" in shown


@pytest.mark.parametrize("period", ["15m", "1h30m", "7d", "1d1h1m1s1ms", "90s"])
def test_a_period_is_shown_as_one_would_write_it(period: str) -> None:
    shown = shown_timing(every(period).timing).removeprefix("every ")
    assert milliseconds(shown) == milliseconds(period)
    assert "0" not in shown.replace("30", "")


def test_one_whose_zone_is_unknown_here_is_shown_all_the_same(shell: Shell) -> None:
    shell.put("lost", Plan(timing=Cron("@daily", "Mars/Olympus"), misfire=Misfire.SKIP))
    assert "Mars/Olympus" in shell("show", "lost").stdout
    assert shell.json("show", "lost")[0]["upcoming"] == []


def test_pausing_and_resuming_twice_does_no_harm(shell: Shell) -> None:
    shell.put("tick", every("15m"))
    assert shell("pause", "tick").stdout == "tick: paused\n"
    assert shell("pause", "tick").stdout == "tick: nothing to do, it was paused already\n"
    assert shell.json("resume", "tick") == [{"name": "tick", "resumed": True, "changed": True}]
    assert shell.json("resume", "tick") == [{"name": "tick", "resumed": True, "changed": False}]


def test_one_is_run_by_hand(shell: Shell) -> None:
    shell.put("tick", every("15m", overlap="skip"))
    job_id = shell("run", "tick").stdout.strip()
    [record] = shell.on_engine(lambda engine: engine.find(Filter())).jobs
    assert (record.id, record.queue, record.task) == (job_id, "mail", "mail.digest")
    again = shell("run", "tick", code=1)
    assert again.stdout.strip() == job_id
    assert "has not ended yet" in again.stderr


def test_one_is_removed_when_that_is_confirmed(shell: Shell) -> None:
    shell.put("tick", every("15m"))
    shell.put("digest", every("15m"), declared=True)
    shell("remove", "tick", code=1, typed="n\n")
    assert len(shell.json()) == 2
    assert shell("remove", "tick", "--yes").stdout == "tick: removed\n"
    assert "comes back" in shell("remove", "digest", typed="y\n").stderr
    assert shell.json() == []


@pytest.mark.parametrize("command", [["show"], ["pause"], ["resume"], ["run"], ["remove", "--yes"]])
def test_what_is_not_there_is_a_problem(shell: Shell, command: list[str]) -> None:
    assert shell(*command, "nobody", code=1).stderr == "no such schedule: nobody\n"


def test_check_finds_a_schedule_that_could_not_work(tmp_path: Path, shell: Shell) -> None:
    name = f"tasks_{uuid4().hex}"
    wrong = APP.replace("{url!r}", repr(shell.url)).replace('args=("ann", "s3cret"), ', "")
    (tmp_path / f"{name}.py").write_text(wrong, encoding="utf-8")
    result = CliRunner().invoke(main, ["check", "--json"], env={"PROPOLIS_APP": name, "PROPOLIS_URL": ""})
    assert result.exit_code == 1
    [problem] = json.loads(result.stdout)["problems"]
    assert (problem["what"], problem["where"]) == ("schedule", "digest")


def test_a_worker_serves_the_queues_of_schedules_as_well(shell: Shell) -> None:
    app = App("memory://")
    task = app.task(name="t")(lambda: None)
    app.every("1h")(task.using(queue="slow"))
    assert queues_of(app) == {"default", "slow"}


def test_the_time_left_is_told(shell: Shell) -> None:
    now = datetime.now(UTC)
    shell.put("past", every("15m"), next_at=now - timedelta(minutes=5))
    shell.put("soon", every("15m"), next_at=now + timedelta(hours=2, minutes=30, seconds=30))
    _, past, soon = shell().stdout.splitlines()
    assert " now " in past
    assert " 2h30m " in soon
