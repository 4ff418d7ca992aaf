"""What `propolis worker` writes to the standard error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

TASKS = """
import logging

from propolis import App
from propolis.strategies import dead

app = App("sqlite:///jobs.db")
log = logging.getLogger("shop")


@app.task(name="greet")
def greet(name: str) -> None:
    log.warning("hello %s", name)


@app.task(name="greet-apart", isolate="process")
def greet_apart(name: str) -> None:
    log.warning("hello %s", name)


@app.task(name="fail", on_error=dead)
async def fail() -> None:
    raise ValueError("no\\nway")
"""
JOBS = "greet.enqueue('Ann')\ngreet_apart.enqueue('Bob')\nfail.enqueue()\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tasks.py").write_text(TASKS)
    subprocess.run([sys.executable, "-c", f"from tasks import *\n{JOBS}"], cwd=tmp_path, check=True)
    return tmp_path


def worker(folder: Path, *options: str, **env: str) -> list[str]:
    command = [sys.executable, "-m", "propolis", "worker", "tasks:app", "--until-empty", *options]
    ended = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return ended.stderr.splitlines()


@pytest.mark.parametrize("by_option", [True, False])
def test_with_json_every_line_is_an_object_and_names_its_job(folder: Path, by_option: bool) -> None:
    if by_option:
        lines = worker(folder, "--log-format", "json", "--log-jobs", "all", "--processes", "2")
    else:
        lines = worker(folder, PROPOLIS_LOG_FORMAT="json", PROPOLIS_LOG_JOBS="all")
    found = [json.loads(line) for line in lines]
    runs = [line for line in found if "run_ms" in line]
    assert Counter((line["task"], line["outcome"]) for line in runs) == Counter(
        {("greet", "done"): 1, ("greet-apart", "done"): 1, ("fail", "dead"): 1}
    )
    hello = {line["message"]: line for line in found if line["logger"] == "shop"}
    assert (hello["hello Ann"]["task"], hello["hello Bob"]["task"]) == ("greet", "greet-apart")
    by_id = {line["job"]: line for line in runs}
    assert all(by_id[line["job"]]["worker"] == line["worker"] for line in hello.values())
    [failed] = [line for line in runs if line["task"] == "fail"]
    assert failed["traceback"].endswith("ValueError: no\nway")


def test_as_text_the_lines_of_an_app_name_the_job(folder: Path) -> None:
    lines = worker(folder, "--log-jobs", "none")
    assert len([line for line in lines if "hello Ann [greet " in line and line.endswith(", attempt 1]")]) == 1
    assert len([line for line in lines if "hello Bob [greet-apart " in line]) == 1
    assert not [line for line in lines if "is dead" in line or "ended as" in line]


def test_an_app_that_logs_in_its_own_way_does_so_in_child_processes_too(folder: Path) -> None:
    tasks = folder / "tasks.py"
    tasks.write_text(f"{TASKS}\nlogging.basicConfig(format='%(name)s says %(message)s')\n")
    lines = worker(folder, "--log-format", "json")
    assert {"shop says hello Ann", "shop says hello Bob"} <= set(lines)
    assert [line for line in lines if "--log-format json changes nothing" in line]


def test_what_is_no_setting_is_wrong_usage(folder: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        worker(folder, "--log-jobs", "some")
    assert failed.value.returncode == 2
    assert "none of failures, all, none and sample:100" in failed.value.stderr
