"""Several worker processes, watched over by one."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skep.job import State
from skep.loading import load_app
from skep.registry import Registry

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc")

HERE = Path(__file__).parent
LEAVE_ME = ["--processes", "2", "--grace", "20s"]


@pytest.fixture
async def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Registry]:
    monkeypatch.setenv("WORKER_JOBS_URL", f"sqlite:///{tmp_path / 'jobs.db'}")
    monkeypatch.syspath_prepend(str(HERE))
    sys.modules.pop("worker_jobs", None)  # so that it takes this test's engine
    app = load_app("worker_jobs:app")
    await app.ready()
    yield app
    await app.aclose()


class Fleet:
    """A supervisor and what it writes."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def started(self) -> list[int]:
        """Every worker process so far, in their order."""
        return [int(pid) for pid in re.findall(r"worker process \d+ is (\d+)", self.log)]

    def working(self) -> int:
        return len(re.findall(r"serves default", self.log))


@contextmanager
def fleet(folder: Path, *options: str, target: str = "worker_jobs:app") -> Iterator[Fleet]:
    log = folder / "log"
    command = [sys.executable, "-m", "skep", "worker", target, *options]
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=HERE, stderr=file, start_new_session=True)
    one = Fleet(process, log)
    try:
        yield one
    finally:
        process.kill()
        process.wait()
        for pid in one.started():
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


async def exit_code(fleet: Fleet) -> int:
    await until(lambda: fleet.process.poll() is not None)
    return fleet.process.returncode


async def test_a_killed_process_is_replaced_and_a_term_ends_them_all(app: Registry, tmp_path: Path) -> None:
    """S0.45: restarts crashed ones and says so; SIGTERM gives exit code 0."""
    with fleet(tmp_path, *LEAVE_ME) as one:
        await until(lambda: one.working() == 2)
        os.kill(one.started()[0], signal.SIGKILL)
        await until(lambda: one.working() == 3)
        assert re.search(r"worker process \d ended \(SIGKILL\): another in", one.log)

        one.process.send_signal(signal.SIGTERM)
        assert await exit_code(one) == 0
        assert not [pid for pid in one.started() if is_running(pid)]


async def test_the_workers_end_when_their_supervisor_is_killed(app: Registry, tmp_path: Path) -> None:
    """F01."""
    with fleet(tmp_path, *LEAVE_ME) as one:
        await until(lambda: one.working() == 2)
        one.process.kill()
        await until(lambda: not [pid for pid in one.started() if is_running(pid)])


async def test_a_signal_sent_to_everybody_is_still_only_one(app: Registry, tmp_path: Path) -> None:
    """F02, F03: a terminal or a service manager sends it to the whole group; jobs keep their grace."""
    sign = tmp_path / "started"
    handle = await app.tasks["until_stopping"].aenqueue(str(sign))
    with fleet(tmp_path, *LEAVE_ME) as one:
        await until(lambda: sign.exists() and one.working() == 2)
        os.killpg(one.process.pid, signal.SIGTERM)
        assert await exit_code(one) == 0
    assert await handle.aresult(timeout=1) == "finished in peace", one.log
    record = await handle.astatus()
    assert record is not None
    assert record.attempts == 1


async def test_the_second_signal_means_at_once(app: Registry, tmp_path: Path) -> None:
    """F03, S0.34: what runs is given back, and its attempt does not count."""
    sign = tmp_path / "started"
    handle = await app.tasks["forever"].aenqueue(str(sign))
    with fleet(tmp_path, *LEAVE_ME) as one:
        await until(lambda: sign.exists() and one.working() == 2)
        began = time.monotonic()
        one.process.send_signal(signal.SIGINT)
        await until(lambda: sum(is_running(pid) for pid in one.started()) == 1)  # the idle one has ended
        one.process.send_signal(signal.SIGTERM)
        assert await exit_code(one) == 0
        assert time.monotonic() - began < 10  # of a grace period of 20 s
    record = await handle.astatus()
    assert record is not None
    assert (record.state, record.attempts) == (State.READY, 0)
    assert "Traceback" not in one.log


async def test_processes_that_are_done_are_not_replaced(app: Registry, tmp_path: Path) -> None:
    """S4.19: until-empty."""
    handle = await app.tasks["neighbour"].aenqueue(0.0)
    with fleet(tmp_path, *LEAVE_ME, "--until-empty") as one:
        assert await exit_code(one) == 0
        assert len(one.started()) == 2
    record = await handle.astatus()
    assert record is not None
    assert record.state is State.DONE


async def test_a_process_that_ends_for_nobody_is_replaced(app: Registry, tmp_path: Path) -> None:
    """S0.45: also if it ended well, because somebody stopped only this one."""
    with fleet(tmp_path, *LEAVE_ME) as one:
        await until(lambda: one.working() == 2)
        os.kill(one.started()[0], signal.SIGTERM)
        await until(lambda: one.working() == 3)


def test_what_cannot_work_is_said_once(tmp_path: Path) -> None:
    with fleet(tmp_path, *LEAVE_ME, target="no_such_module:app") as one:
        assert one.process.wait(timeout=30) != 0
        assert one.log.count("no_such_module") <= 3
