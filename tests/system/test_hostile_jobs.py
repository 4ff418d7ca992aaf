"""F58: whatever a job does to its process, the worker and the neighbours are unharmed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from propolis.app.loading import load_app
from propolis.app.registry import Registry
from propolis.core.job import JobInfo, State

from .fleet import wait_for

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks and signals")

HERE = Path(__file__).parent


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    monkeypatch.setenv("WORKER_JOBS_URL", f"sqlite:///{tmp_path / 'jobs.db'}")
    monkeypatch.syspath_prepend(str(HERE))
    sys.modules.pop("hostile_jobs", None)  # so that it takes this test's engine
    app = load_app("hostile_jobs:app")
    yield app
    app.close()


def work(*options: str) -> subprocess.CompletedProcess[str]:
    """A whole worker that ends by itself, and that nobody stops."""
    command = [sys.executable, "-m", "propolis", "worker", "hostile_jobs:app", "--lease", "5m", *options]
    return subprocess.run(
        command,
        cwd=HERE,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        timeout=120,
        check=False,
    )


def record_of(app: Registry, handle: Any) -> JobInfo:
    record = handle.status()
    assert record is not None
    return record  # type: ignore[no-any-return]  # of any task


@pytest.mark.parametrize(
    ("task", "result"),
    [
        ("pool", b"[1,4,9]"),
        ("pool_in_loop", b"[1,4,9]"),
        ("pool_in_child", b"[1,4,9]"),
        ("exits_in_callback", b'"went on"'),
        ("fork_comes_back", b"1"),
        ("fork_in_thread", b"1"),
    ],
)
def test_a_job_with_processes_and_exits_of_its_own_ends_alone(
    app: Registry, tmp_path: Path, task: str, result: bytes
) -> None:
    """F58, W.1, W.4: the worker would end here with exit code 0, and leave its neighbour leased."""
    sign = tmp_path / "sign"
    neighbour = app.tasks["neighbour"].enqueue(str(sign))
    hostile = app.tasks[task].enqueue()
    after = app.tasks["neighbour"].using(queue="default").enqueue(str(HERE))
    sign.touch()
    worker = work("--until-empty", "--concurrency", "2")
    assert worker.returncode == 0, worker.stderr
    for handle, expected in ((neighbour, b'"unharmed"'), (hostile, result), (after, b'"unharmed"')):
        record = record_of(app, handle)
        assert (record.state, record.attempts, record.result) == (State.DONE, 1, expected), worker.stderr
    assert "runs settled: 3" in worker.stderr


def test_an_exit_in_a_task_of_a_job_is_an_error_of_that_job(app: Registry) -> None:
    """F58, W.4."""
    hostile, after = app.tasks["exits"].enqueue(), app.tasks["neighbour"].enqueue(str(HERE))
    worker = work("--until-empty", "--concurrency", "1")
    record = record_of(app, hostile)
    assert record.error is not None
    assert (record.state, record.error.type) == (State.DEAD, "SystemExit"), worker.stderr
    assert record_of(app, after).state is State.DONE
    assert "wants to end the process" in worker.stderr


def test_a_job_that_takes_our_signal_handler_does_not_keep_the_worker_from_stopping(
    app: Registry, tmp_path: Path
) -> None:
    """F58."""
    app.tasks["replaces_handlers"].enqueue()
    sign = tmp_path / "sign"
    app.tasks["sleeps"].enqueue(str(sign))
    command = [sys.executable, "-m", "propolis", "worker", "hostile_jobs:app"]
    command += ["--concurrency", "1", "--grace", "0s"]
    worker = subprocess.Popen(command, cwd=HERE, stderr=subprocess.PIPE, text=True)
    try:
        while not sign.exists():
            assert worker.poll() is None
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
    finally:
        worker.kill()
        worker.communicate()


def test_what_a_job_prints_without_end_does_no_harm(app: Registry) -> None:
    """F58."""
    flood = app.tasks["floods"].enqueue()
    assert work("--until-empty").returncode == 0
    assert record_of(app, flood).state is State.DONE


@pytest.mark.parametrize("task", ["leaves_task", "leaves_pooled_thread", "leaves_thread"])
def test_what_a_job_leaves_behind_does_not_keep_the_process_of_its_worker(app: Registry, task: str) -> None:
    """F10, F58: it was there for ever, deaf to every signal, so that nobody started another one."""
    left = app.tasks[task].enqueue()
    worker = work("--until-empty")
    assert worker.returncode == 0
    assert record_of(app, left).state is State.DONE
    assert "the process ends without them" in worker.stderr


@pytest.fixture(params=["uvloop", "asyncio"])
def loop(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of event loop that workers have here."""
    if request.param == "asyncio":
        (tmp_path / "uvloop.py").write_text("raise ImportError")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    else:
        pytest.importorskip("uvloop")
    return str(request.param)


def test_a_worker_whose_sockets_a_job_has_closed_ends_loudly(app: Registry, loop: str) -> None:
    """F58, F59: deaf to signals, and with bytes of theirs in connections that had got the old numbers."""
    hostile = app.tasks["closes_sockets"].enqueue()
    worker = work("--concurrency", "1")
    assert worker.returncode == 1
    assert "a descriptor of this process was closed" in worker.stderr
    after = app.tasks["neighbour"].enqueue(str(HERE))
    assert work("--until-empty").returncode == 0
    for handle in (hostile, after):
        assert record_of(app, handle).state is State.DONE


def test_a_job_that_closes_what_is_not_its_own_ends_its_worker_loudly_and_its_neighbours_run_elsewhere(
    app: Registry, tmp_path: Path, loop: str
) -> None:
    """F58: its process can do nothing any more; neither does it hang, nor end as if all were well."""
    sign = tmp_path / "sign"
    neighbours = [app.tasks["neighbour"].enqueue(str(sign)) for _ in range(2)]
    hostile = app.tasks["closes_descriptors"].enqueue()
    command = [sys.executable, "-m", "propolis", "worker", "hostile_jobs:app"]
    command += ["--processes", "2", "--lease", "5s"]  # else a busy machine takes leases as well
    with (tmp_path / "log").open("w") as log:
        worker = subprocess.Popen(command, cwd=HERE, stderr=log)
    try:
        wait_for(lambda: record_of(app, hostile).state.terminal)
        sign.touch()
        wait_for(lambda: all(record_of(app, handle).state.terminal for handle in neighbours))
    finally:
        worker.terminate()
        assert worker.wait(120) == 0
    errors = (tmp_path / "log").read_text()

    record = record_of(app, hostile)
    assert (record.state, record.reason) == (State.DEAD, "crashed"), errors
    assert (record.losses, record.crashes) == (1, 3), errors
    for handle in neighbours:
        record = record_of(app, handle)
        assert (record.state, record.crashes, record.losses <= 1) == (State.DONE, 0, True), errors
    assert len(re.findall(r"worker process \d ended", errors)) == 1
    assert (loop == "uvloop") or "a descriptor of this process was closed" in errors
    assert "output cannot be written" not in errors


EMBEDDED = """
from propolis.app.loading import load_app
from propolis.worker import supervisor
from propolis.worker.settings import Mode, Settings
supervisor.LEAVES_WITHIN = 60.0
supervisor.time.sleep = lambda seconds: None  # its time to leave is over at once
print(supervisor.run_worker(load_app("hostile_jobs:app"), Settings(mode=Mode.UNTIL_EMPTY)), flush=True)
input()
print("goes on", flush=True)
"""


def test_a_program_of_which_a_worker_was_a_part_goes_on(app: Registry) -> None:
    """Only when it comes to its own end, its time to leave begins."""
    command = [sys.executable, "-c", EMBEDDED]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=HERE, stdin=pipe, stdout=pipe, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "0\n"
        assert program.communicate("\n", timeout=60)[0] == "goes on\n"
        assert program.returncode == 0
