"""Workers that are killed or stopped in the middle of a job that writes in the engine's transaction."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg

from propolis import App
from propolis.testing.engines.samples import a_job

from .fleet import wait_for

HERE = Path(__file__).parent


class Bench:
    """Workers on a schema of PostgreSQL with a table of the jobs' own."""

    def __init__(self, url: str, schema: str, stack: ExitStack) -> None:
        self.table = f'"{schema}".effect'
        self._url = url
        self._stack = stack
        self._env = {
            **os.environ,
            "PROPOLIS_TEST_URL": f"{url}?schema={schema}",
            "PROPOLIS_TEST_TABLE": self.table,
            "PYTHONPATH": str(HERE),
        }
        self.app = App(self._env["PROPOLIS_TEST_URL"])
        stack.callback(self.app.close)
        self.app.client.wait(self.app.ready())
        self.ask(f"CREATE TABLE {self.table} (number integer, fence bigint)")

    def ask(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self._url, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def put(self, task: str, numbers: range) -> None:
        self.app.client.wait(self.app.client.aput_many([a_job(number, task=task) for number in numbers]))

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "propolis", "worker", "lending_tasks:app", "--lease", "2s", *options]
        worker = subprocess.Popen(command, env=self._env, stderr=subprocess.DEVNULL)
        self._stack.callback(end, worker)
        return worker

    def left(self) -> int:
        counts = self.app.queues.counts().get("default")
        return 0 if counts is None else counts.total

    def numbers(self) -> list[int]:
        return [number for (number,) in self.ask(f"SELECT number FROM {self.table} ORDER BY number")]


def end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()


@contextmanager
def a_bench(url: str, schema: str) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(url, schema, stack)


def test_jobs_write_exactly_once_although_their_workers_are_killed(postgres_url: str, schema: str) -> None:
    """F01, S0.19, S2.19, S2.20: kill -9 between a job's row and the commit; each stands once."""
    with a_bench(postgres_url, schema) as bench:
        bench.put("write", range(7))
        workers = [bench.start("--concurrency", "1")]

        def drained() -> bool:
            if workers[-1].poll() is not None:
                assert workers[-1].returncode == -signal.SIGKILL
                workers.append(bench.start("--concurrency", "1"))
            return bench.left() == 0

        wait_for(drained, 240)

        assert bench.numbers() == list(range(7))
        assert len(workers) == 4  # each third of them has killed one
        assert bench.app.queues.counts()["after"].ready == 7


def test_a_worker_that_wakes_up_after_its_lease_writes_nothing(postgres_url: str, schema: str) -> None:
    """F04: stopped with its row written, continued when another run has ended: one row, of that other run."""
    with a_bench(postgres_url, schema) as bench:
        bench.put("pause", range(1))
        sleeper = bench.start()
        wait_for(lambda: stopped(sleeper))
        bench.start()
        wait_for(lambda: bench.left() == 0)
        [(_, fence)] = bench.ask(f"SELECT number, fence FROM {bench.table}")
        sleeper.send_signal(signal.SIGCONT)
        sleeper.terminate()
        assert sleeper.wait(120) == 0
        assert bench.ask(f"SELECT number, fence FROM {bench.table}") == [(0, fence)]


def stopped(worker: subprocess.Popen[bytes]) -> bool:
    state = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "T"
