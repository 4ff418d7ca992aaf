"""What hangs in pytest is ended from outside, and its stacks are shown."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tools.watched import FOLDER, LIMIT

ROOT = Path(__file__).resolve().parents[2]

SWALLOWS = """
import asyncio

async def wait_without_end():
    while True:
        try:
            await asyncio.sleep(3600)
        except BaseException:
            pass

def test_that_swallows_everything():
    while True:
        try:
            asyncio.run(wait_without_end())
        except BaseException:
            pass

def test_beside_it():
    pass
"""

BLOCKED_IN_C = """
import ctypes, subprocess, sys
from pathlib import Path

def test_that_is_blocked_in_c():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path("child").write_text(str(child.pid))
    ctypes.PyDLL(None).sleep(600)  # it keeps the lock of the interpreter
"""

HANGS_AT_THE_END = """
import threading

def test_that_leaves_a_thread_behind():
    threading.Thread(target=threading.Event().wait).start()
"""

LONG = """
import time
import pytest

@pytest.mark.more_time(usual=1, full=60)
def test_that_asks_for_more_time():
    time.sleep(3)
"""


def watch(
    folder: Path, source: str, *options: str, limit: float = 5, stall: float = 60
) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = more_time\n")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {name: value for name, value in os.environ.items() if name not in (FOLDER, LIMIT)}
    limits = [f"--limit={limit}", f"--stall={stall}"]
    return subprocess.run(
        [sys.executable, "-m", "tools.watchdog", *limits, "-p", "no:randomly", "-p", "no:propolis", *options],
        cwd=folder,
        env={**kept, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )


pytestmark = pytest.mark.usefixtures("uncovered")


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_test_that_swallows_everything_is_ended_with_its_stacks(tmp_path: Path, processes: str) -> None:
    done = watch(tmp_path, SWALLOWS, "-n", processes)

    assert done.returncode != 0
    assert "HUNG: test_it.py::test_that_swallows_everything" in done.stdout
    assert "in test_that_swallows_everything" in done.stdout  # the stack of the thread
    assert "in wait_without_end" in done.stdout  # the stack of the task
    if processes != "0":  # the process is replaced, and the run goes on
        assert "1 failed, 1 passed" in done.stdout


def test_a_test_that_is_blocked_in_c_is_ended_with_what_it_has_started(tmp_path: Path) -> None:
    done = watch(tmp_path, BLOCKED_IN_C, "-n", "1", "--max-worker-restart=0")

    assert done.returncode != 0
    assert "HUNG: test_it.py::test_that_is_blocked_in_c" in done.stdout
    assert "in test_that_is_blocked_in_c" in done.stdout
    assert is_over(int((tmp_path / "child").read_text()))


def test_a_run_that_hangs_between_tests_is_ended(tmp_path: Path) -> None:
    done = watch(tmp_path, HANGS_AT_THE_END, stall=4)

    assert done.returncode != 0
    assert "1 passed" in done.stdout
    assert "HUNG: pytest itself" in done.stdout
    assert "_shutdown" in done.stdout


def test_a_test_may_ask_for_more_time_at_its_full_size(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        'def pytest_addoption(parser): parser.addoption("--full", action="store_true")'
    )
    done = watch(tmp_path, LONG, "--full", limit=1)

    assert done.returncode == 0, done.stdout
    assert "HUNG" not in done.stdout


def test_the_exit_code_is_that_of_pytest(tmp_path: Path) -> None:
    assert watch(tmp_path, "def test(): assert False", limit=60).returncode == 1
    assert watch(tmp_path, "", limit=60).returncode == 5


def is_over(pid: int) -> bool:
    """Also a process whose new parent has not yet noticed its end."""
    for _ in range(1000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False
