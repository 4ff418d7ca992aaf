"""The README says what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from propolis import App

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, page: str = README) -> list[str]:
    """The fenced blocks of this language: every second piece between fences is inside of one."""
    inside = re.split(r"^```", page, flags=re.MULTILINE)[1::2]
    return [text.partition("\n")[2] for text in inside if text.partition("\n")[0] == language]


def test_the_tutorial_works_as_written(tmp_path: Path) -> None:
    for block in blocks("python"):
        [name] = re.findall(r"^# (\w+\.py)$", block, re.MULTILINE)
        (tmp_path / name).write_text(block)
    commands = next(block for block in blocks("") if "propolis worker" in block).strip().splitlines()
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "python3").symlink_to(sys.executable)
    (bin_folder / "propolis").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m propolis "$@"\n')
    (bin_folder / "propolis").chmod(0o755)
    env = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": _site_packages()}
    outputs = [
        subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
        )
        for command in commands
    ]
    produced, worked, queues, jobs = (output.stdout for output in outputs)
    assert re.fullmatch(r"[0-9a-f-]{36}\n", produced)
    assert "to a@example.org: hello" in worked
    assert "mail" in queues
    assert "count_words" in jobs


def test_the_first_program_of_the_readme_works_as_written(tmp_path: Path) -> None:
    [program] = [block for block in blocks("python") if block.startswith("# hello.py\n")]
    (tmp_path / "hello.py").write_text(program)
    env = {**os.environ, "PYTHONPATH": _site_packages()}
    worker = ["-m", "propolis", "worker", "hello:app", "--until-empty"]
    for command in (["hello.py"], worker):
        printed = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
        ).stdout
    assert printed == "hello Ann\n"


def test_the_batch_and_the_flow_of_the_readme_work_as_written(tmp_path: Path) -> None:
    for block in blocks("python"):
        [name] = re.findall(r"^# (\w+\.py)$", block, re.MULTILINE)
        (tmp_path / name).write_text(block)
    env = {**os.environ, "PYTHONPATH": _site_packages()}
    worker = ["-m", "propolis", "worker", "together:app", "--until-empty"]
    for command in (["together.py"], worker):
        printed = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
        ).stdout
    assert sorted(printed.splitlines()) == ["2 of 2 are done", "to a@example.org: hi", "to b@example.org: hi"]
    app = App(f"sqlite:///{tmp_path}/jobs.db")
    counts = app.queues.counts()
    app.close()
    assert [(count.waiting, count.running, count.dead) for count in counts.values()] == [(0, 0, 0)] * 2


def test_the_guide_to_tasks_works_as_written(tmp_path: Path) -> None:
    program, long_job, logging_job = blocks(
        "python", (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    )
    guide = tmp_path / "guide.py"
    guide.write_text(long_job)
    subprocess.run([sys.executable, str(guide)], check=True)
    guide.write_text(logging_job)
    done = subprocess.run([sys.executable, str(guide)], capture_output=True, text=True, check=True)
    assert "shop [pay order-7, attempt 1] charged 5" in done.stderr.splitlines()
    guide.write_text(program)
    done = subprocess.run([sys.executable, str(guide)], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert {"select 1 in a session of pool", "closed", "guide.charge is dead: failed"} <= set(lines)
    assert lines.count("guide.charge begins") == 2  # the stolen card, and the one that was emitted


def test_the_page_on_records_and_feeds_works_as_written(tmp_path: Path) -> None:
    [program] = blocks("python", (ROOT / "docs" / "records.md").read_text(encoding="utf-8"))
    (tmp_path / "visits.py").write_text(program)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "visits.py")], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["/bees has 3 visits", "/bees /bees /bees False", "/honey"]


def _site_packages() -> str:
    """A link to the interpreter loses its environment: hand its paths on."""
    return os.pathsep.join(path for path in sys.path if path)


def test_the_two_commands_are_those_of_dev_py() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "dev.py"), "--help"], capture_output=True, text=True, check=True
    )
    for command in re.findall(r"^python3 dev\.py (\w+)", README, re.MULTILINE):
        assert command in done.stdout


def test_every_file_that_the_readme_links_to_is_there() -> None:
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / link).exists(), link
