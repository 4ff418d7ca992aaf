"""F07, F63: a job that eats memory, in a container that has little of it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from propolis import App
from propolis.app.loading import load_app
from propolis.core.clock import span_us
from propolis.core.job import JobInfo, State
from propolis.testing.engines.samples import a_job

from .container import ENTER, Container, made_container
from .fleet import Fleet, wait_for

HERE = Path(__file__).parent
MB = 2**20
LIMIT, LARGE = 200 * MB, 400 * MB  # for a supervisor, two workers and their children
NEIGHBOURS = 6
LONG_JOBS = 10
SLOWLY = 0.005  # seconds for each MB: so its worker sees it grow, and knows who was the largest
LEASE = timedelta(seconds=1)
MAX_LOSSES = 10


@pytest.fixture
def container() -> Iterator[Container]:
    with made_container() as container:
        yield container


class Contained:
    """Workers in a container, and an app with the same engine and clock outside of it."""

    def __init__(self, folder: Path, container: Container, monkeypatch: pytest.MonkeyPatch) -> None:
        self._moved = folder / "moved"
        self._move(timedelta(0))
        monkeypatch.setenv("PROPOLIS_TEST_CLOCK", str(self._moved))
        monkeypatch.setenv("PROPOLIS_TEST_LEDGER", str(folder / "ledger"))
        monkeypatch.setenv("PROPOLIS_TEST_URL", f"sqlite:///{folder}/jobs.db")
        monkeypatch.syspath_prepend(str(HERE))
        sys.modules.pop("fault_tasks", None)  # so that it takes this test's engine
        self._container = container
        self.fleet = Fleet(folder)
        app = load_app("fault_tasks:app")
        assert isinstance(app, App)
        self.app = app

    def put(self, task: str, *args: object) -> str:
        job = a_job(*args, task=task)
        self.app.client.wait(self.app.client.aput(job))
        return job.id

    def record_of(self, job_id: str) -> JobInfo:
        record = self.app.jobs.get(job_id)
        assert record is not None
        return record

    def all_ended(self, ids: list[str]) -> bool:
        return all(self.record_of(job_id).state.terminal for job_id in ids)

    def start(self, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "propolis", "worker", "fault_tasks:app", "--lease", "1s", *options]
        return self.fleet.run("-c", ENTER, str(self._container.folder), *command, stderr=subprocess.DEVNULL)

    def go_on(self, ids: list[str]) -> None:
        """Nobody lives in the container: move the clock over the leases of the dead, and over all pauses."""
        self._move(LEASE)
        engine = self.app.client.engine
        while any(self.record_of(job_id).state is State.RUNNING for job_id in ids):
            self.app.client.wait(engine.sweep())
        now = self.app.client.wait(engine.now())
        self._move(max(timedelta(0), *(self.record_of(job_id).due_at - now for job_id in ids)))

    def _move(self, span: timedelta) -> None:
        moved = int(self._moved.read_text()) if self._moved.exists() else 0
        self._moved.write_text(str(moved + span_us(span)))

    def close(self) -> None:
        self.fleet.close()
        self.app.close()


@pytest.fixture
def contained(tmp_path: Path, container: Container, monkeypatch: pytest.MonkeyPatch) -> Iterator[Contained]:
    contained = Contained(tmp_path, container, monkeypatch)
    yield contained
    contained.close()


@pytest.mark.parametrize("size", [LIMIT, pytest.param(LARGE, marks=pytest.mark.full)])
def test_what_eats_all_memory_is_dead_and_its_neighbours_are_not(
    container: Container, contained: Contained, size: int, times_count: bool
) -> None:
    """F07: dead with `crashed` after one loss and three crashes; other jobs of the same worker finish."""
    container.limit(size)
    neighbours = [contained.put("sleep", 0.5) for _ in range(NEIGHBOURS)]
    poison = contained.put("devour", SLOWLY)
    contained.start("--processes", "2", "-q", "default=20")
    wait_for(lambda: contained.all_ended([poison, *neighbours]), 240)

    record = contained.record_of(poison)
    assert (record.state, record.reason) == (State.DEAD, "crashed"), record.history
    assert record.crashes == 3, record.history
    # Whether the kernel has killed it is told by its size a moment before.  Where the worker looked too late
    # to be sure, beside other work, that death is one more loss, and blames nobody.
    assert record.losses == 1 or (record.losses > 1 and not times_count), record.history
    for job_id in neighbours:
        record = contained.record_of(job_id)
        assert (record.state, record.crashes) == (State.DONE, 0), record.history


def test_of_a_container_that_dies_whole_only_the_poison_does(
    container: Container, contained: Contained
) -> None:
    """F63: nobody sees what it dies of, so that each death is a loss of all that ran; from the 7th on, alone.

    All pauses are over whenever the worker starts again, so that as many as can be run beside the poison.
    """
    container.limit(LIMIT)
    poison = contained.put("devour", 0)
    others = [contained.put("sleep", 2) for _ in range(LONG_JOBS)]
    everyone = [poison, *others]
    with container.dying_whole():
        while not contained.all_ended(everyone):
            worker = contained.start("-q", "default=20")
            wait_for(lambda: contained.all_ended(everyone) or has_died(worker, container), 240)  # noqa: B023
            if has_died(worker, container):
                assert worker.returncode == -signal.SIGKILL
                contained.go_on(everyone)
        container.kill()

    record = contained.record_of(poison)
    assert (record.state, record.reason) == (State.DEAD, "lost"), record.history
    assert (record.losses, record.crashes) == (MAX_LOSSES, 0), record.history
    assert len(contained.fleet.lines_of("start", poison)) == MAX_LOSSES
    for job_id in others:
        record = contained.record_of(job_id)
        assert (record.state, record.crashes) == (State.DONE, 0), record.history
        assert record.losses >= 1  # it was there
    for job_id in everyone:
        fences = sorted(line.fence for line in contained.fleet.lines_of("start", job_id))
        explained = {event.fence for event in contained.record_of(job_id).history}
        assert set(fences[:-1]) <= explained
        assert len(set(fences)) == len(fences)


def has_died(worker: subprocess.Popen[str], container: Container) -> bool:
    return worker.poll() is not None and container.is_dead()
