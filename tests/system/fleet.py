"""Real worker processes for the fault tests, and the ledger they write."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent


class Line(NamedTuple):
    what: str
    job_id: str
    fence: int
    pid: int
    at: float


class Fleet:
    """Starts `skep worker` processes on one database, and ends them all."""

    def __init__(self, folder: Path, app: str = "fault_tasks:app") -> None:
        self.app = app
        self.url = f"sqlite:///{folder}/jobs.db"
        self.ledger = folder / "ledger"
        self.workers: list[subprocess.Popen[str]] = []
        self._env = {
            **os.environ,
            "SKEP_TEST_URL": self.url,
            "SKEP_TEST_LEDGER": str(self.ledger),
            "PYTHONPATH": str(HERE),
        }

    def start(self, *options: str) -> subprocess.Popen[str]:
        worker = subprocess.Popen(
            [sys.executable, "-m", "skep", "worker", self.app, *options],
            env=self._env,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.workers.append(worker)
        return worker

    def lines(self) -> Iterator[Line]:
        if self.ledger.exists():
            for line in self.ledger.read_text().splitlines():
                what, job_id, fence, pid, at = line.split()
                yield Line(what, job_id, int(fence), int(pid), float(at))

    def told(self, what: str, job_id: str) -> list[Line]:
        return [line for line in self.lines() if (line.what, line.job_id) == (what, job_id)]

    def close(self) -> None:
        for worker in self.workers:
            if worker.poll() is None:
                worker.kill()
            worker.communicate()


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> float:
    """Until it is so; returns how long that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it did not happen in time"
        time.sleep(0.01)
    return time.monotonic() - began
