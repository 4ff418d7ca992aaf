"""Real worker processes for the fault tests, and the ledger they write."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


class Line(NamedTuple):
    what: str
    job_id: str
    fence: int
    pid: int
    at: float


class Fleet:
    """Starts `propolis worker` processes on one database, and ends them all."""

    def __init__(
        self, folder: Path, *, url: str | None = None, app: str = "fault_tasks:app", path: Path = HERE
    ) -> None:
        self.url = url or f"sqlite:///{folder}/jobs.db"
        self.ledger = folder / "ledger"
        self.workers: list[subprocess.Popen[str]] = []
        self._lines: list[Line] = []  # of the ledger, as far as it was read
        self._read_bytes = 0
        self._app = app
        self._env = {
            **os.environ,
            "PROPOLIS_URL": self.url,
            "PROPOLIS_TEST_URL": self.url,
            "PROPOLIS_TEST_LEDGER": str(self.ledger),
            "PYTHONPATH": os.pathsep.join(
                [str(path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        }

    def start(self, *options: str, quiet: bool = False) -> subprocess.Popen[str]:
        stderr = subprocess.DEVNULL if quiet else subprocess.PIPE
        return self.run("-m", "propolis", "worker", self._app, *options, stderr=stderr)

    def start_hinted(self) -> subprocess.Popen[str]:
        """A worker that comes only when it is woken."""
        return self.run(str(HERE / "hinted_worker.py"))

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

    def lines(self) -> list[Line]:
        """All that were written; each is read once."""
        if self.ledger.exists():
            with self.ledger.open("rb") as ledger:
                ledger.seek(self._read_bytes)
                whole, end, _ = ledger.read().rpartition(b"\n")  # the last line may be on its way
            self._read_bytes += len(whole) + len(end)
            for line in whole.decode().splitlines():
                what, job_id, fence, pid, at = line.split()
                self._lines.append(Line(what, job_id, int(fence), int(pid), float(at)))
        return self._lines

    def lines_of(self, what: str, job_id: str) -> list[Line]:
        return [line for line in self.lines() if (line.what, line.job_id) == (what, job_id)]

    def close(self) -> None:
        for worker in self.workers:
            if worker.poll() is None:
                worker.kill()
            worker.communicate()


class Killer:
    """Kills a worker again and again while something is waited for; others see to its successor.

    A worker lives for `cpu` seconds on average, at random, of the time that the machine gives to it: so it
    comes as far on a busy machine as on a quiet one.
    """

    def __init__(self, pids: Callable[[], list[int]], *, cpu: float) -> None:
        self._pids = pids
        self._cpu = cpu
        self._random = random.Random(42)
        self._lives_for = 0.0  # the first that comes lives no longer: all of it may be over soon
        self.kills = 0

    def wait_for(self, condition: Callable[[], bool], seconds: float = 240) -> float:
        """Until it is so; returns how long that took."""

        def is_so() -> bool:
            self._kill_one()
            return condition()

        return wait_for(is_so, seconds)

    def _kill_one(self) -> None:
        pids = [pid for pid in self._pids() if cpu_seconds(pid) >= self._lives_for]
        if pids:
            with suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(self._random.choice(pids), signal.SIGKILL)
                self.kills += 1
            self._lives_for = self._random.uniform(0, 2 * self._cpu)


def cpu_seconds(pid: int) -> float:
    """What a process has had so far."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> float:
    """Until it is so, however busy the machine is; returns how long that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it did not happen in time"
        time.sleep(0.01)
    return time.monotonic() - began
