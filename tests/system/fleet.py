"""Real worker processes for the fault tests, and the ledger they write."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

HERE = Path(__file__).parent


class Line(NamedTuple):
    what: str
    job_id: str
    fence: int
    pid: int
    at: float


class Fleet:
    """Starts `skep worker` processes on one database, and ends them all."""

    def __init__(
        self, folder: Path, *, url: str | None = None, app: str = "fault_tasks:app", path: Path = HERE
    ) -> None:
        self.url = url or f"sqlite:///{folder}/jobs.db"
        self.ledger = folder / "ledger"
        self.workers: list[subprocess.Popen[str]] = []
        self._app = app
        self._env = {
            **os.environ,
            "SKEP_URL": self.url,
            "SKEP_TEST_URL": self.url,
            "SKEP_TEST_LEDGER": str(self.ledger),
            "PYTHONPATH": os.pathsep.join([str(path), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }

    def start(self, *options: str, quiet: bool = False) -> subprocess.Popen[str]:
        stderr = subprocess.DEVNULL if quiet else subprocess.PIPE
        return self.run("-m", "skep", "worker", self._app, *options, stderr=stderr)

    def run(self, *program: str, stderr: IO[str] | int = subprocess.PIPE) -> subprocess.Popen[str]:
        """Who says more than a pipe holds waits for a reader: give a file to one that is harmed much."""
        worker = subprocess.Popen([sys.executable, *program], env=self._env, stderr=stderr, text=True)
        self.workers.append(worker)
        return worker

    def start_nursery(self, count: int) -> Callable[[], list[int]]:
        """So many workers that are replaced at once; returns what tells their process ids."""
        nursery = subprocess.Popen(
            [sys.executable, str(HERE / "nursery.py"), self._app, str(count)],
            env=self._env,
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.workers.append(nursery)
        children = Path(f"/proc/{nursery.pid}/task/{nursery.pid}/children")
        return lambda: [int(pid) for pid in children.read_text().split()]

    def lines(self) -> Iterator[Line]:
        if self.ledger.exists():
            whole, _, _ = self.ledger.read_text().rpartition("\n")  # the last line may be on its way
            for line in whole.splitlines():
                what, job_id, fence, pid, at = line.split()
                yield Line(what, job_id, int(fence), int(pid), float(at))

    def told(self, what: str, job_id: str) -> list[Line]:
        return [line for line in self.lines() if (line.what, line.job_id) == (what, job_id)]

    def close(self) -> None:
        for worker in self.workers:
            if worker.poll() is None:
                worker.kill()
            worker.communicate()


class Killer:
    """Kills a worker again and again while something is waited for; who replaces it is not its business."""

    def __init__(self, pids: Callable[[], list[int]], *, every: float) -> None:
        self._pids = pids
        self._every = every
        self._random = random.Random(42)
        self._next = time.monotonic()  # the first that comes: all of it may be over soon
        self.kills = 0

    def wait_for(self, condition: Callable[[], bool], seconds: float = 60) -> float:
        """Until it is so; returns how long that took."""

        def look() -> bool:
            if time.monotonic() >= self._next and self._kill_one():
                self._next = time.monotonic() + self._every
            return condition()

        return wait_for(look, seconds)

    def _kill_one(self) -> bool:
        """False if there is none yet: then the first that comes is killed."""
        if not (pids := self._pids()):
            return False
        os.kill(self._random.choice(pids), signal.SIGKILL)
        self.kills += 1
        return True


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> float:
    """Until it is so; returns how long that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it did not happen in time"
        time.sleep(0.01)
    return time.monotonic() - began
