"""Several worker processes, watched over by one."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from propolis.app.loading import load_app
from propolis.app.registry import Registry
from propolis.core.job import State

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc")

HERE = Path(__file__).parent
LEAVE_ME = ["--processes", "2", "--grace", "20s"]


@pytest.fixture
async def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Registry]:
    monkeypatch.setenv("WORKER_JOBS_URL", f"sqlite:///{tmp_path / 'jobs.db'}")
    monkeypatch.syspath_prepend(str(HERE))
    sys.modules.pop("worker_jobs", None)  # so that it takes this test's engine
    app = load_app("worker_jobs:app")
    await app.client.ready()
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
    command = [sys.executable, "-m", "propolis", "worker", target, *options]
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
    async with asyncio.timeout(120):
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
    with fleet(tmp_path, *LEAVE_ME, "--grace", "10m") as one:
        await until(lambda: sign.exists() and one.working() == 2)
        one.process.send_signal(signal.SIGINT)
        await until(lambda: sum(is_running(pid) for pid in one.started()) == 1)  # the idle one has ended
        one.process.send_signal(signal.SIGTERM)
        assert await exit_code(one) == 0
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
        assert one.process.wait(timeout=120) != 0
        assert one.log.count("no_such_module") <= 3


async def test_a_hang_up_replaces_the_processes_one_by_one(app: Registry, tmp_path: Path) -> None:
    """F59, W.7: the second is stopped only when the new first one works; jobs have their grace."""
    sign = tmp_path / "started"
    handle = await app.tasks["until_stopping"].aenqueue(str(sign))
    with fleet(tmp_path, *LEAVE_ME) as one:
        await until(lambda: sign.exists() and one.working() == 2)
        first, second = one.started()
        os.killpg(one.process.pid, signal.SIGHUP)  # to everybody, as some do
        await until(lambda: one.working() == 4)
        _, _, third, fourth = one.started()
        told = [
            re.search(pattern, one.log)
            for pattern in (rf"is {first}, is replaced", rf"is {third}\b", rf"is {second}, is replaced")
        ]
        assert all(told), one.log
        starts = [each.start() for each in told if each is not None]
        assert starts == sorted(starts)
        serves = [each.start() for each in re.finditer(r"serves default", one.log)]
        assert serves[2] < starts[2]  # the new one works before the next old one is asked to leave
        await until(lambda: not is_running(first) and not is_running(second))
        assert is_running(third)
        assert is_running(fourth)
        one.process.send_signal(signal.SIGTERM)
        assert await exit_code(one) == 0
    assert await handle.aresult(timeout=1) == "finished in peace", one.log


async def test_a_single_worker_stops_gracefully_when_it_is_hung_up(app: Registry, tmp_path: Path) -> None:
    """F59, W.7: and SIGQUIT shows what it does, and ends nothing."""
    sign = tmp_path / "started"
    handle = await app.tasks["until_stopping"].aenqueue(str(sign))
    with fleet(tmp_path) as one:
        await until(sign.exists)
        one.process.send_signal(signal.SIGQUIT)
        await until(lambda: "running: <Job" in one.log and "until_stopping" in one.log)
        assert "Thread 0x" in one.log
        one.process.send_signal(signal.SIGHUP)
        assert await exit_code(one) == 0
    assert await handle.aresult(timeout=1) == "finished in peace", one.log


SLOW_APP = """
import pathlib, time
pathlib.Path({sign!r}).touch()
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_before_it_has_started_is_no_failure(tmp_path: Path, number: signal.Signals) -> None:
    """F59, W.7: while the app is being imported, and in a container."""
    sign = tmp_path / "sign"
    (tmp_path / "slow_app.py").write_text(SLOW_APP.format(sign=str(sign)), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "propolis", "worker", "slow_app:app"], cwd=tmp_path, start_new_session=True
    )
    try:
        while not sign.exists():
            assert process.poll() is None
        process.send_signal(number)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


INIT = """
import ctypes, os, signal, sys, time
from propolis.worker.process.init import reap_until_the_end_of

ctypes.CDLL(None).prctl(36, 1)  # orphans come to us, as they come to process 1
worker = os.fork()
if worker:
    reap_until_the_end_of(worker)
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
middle = os.fork()
if middle == 0:
    if os.fork() == 0:
        os._exit(0)  # an orphan, when the one between has gone
    os._exit(0)
os.waitpid(middle, 0)
ours = f"/proc/{os.getppid()}/task/{os.getppid()}/children"
while open(ours).read().split() != [str(os.getpid())]:
    time.sleep(0.01)
print("reaped", flush=True)
time.sleep(60)
"""


def test_as_the_first_process_it_reaps_passes_signals_on_and_ends_with_its_worker() -> None:
    """F59, W.7."""
    process = subprocess.Popen([sys.executable, "-c", INIT], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"reaped\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 7
    finally:
        process.kill()
        process.communicate()
