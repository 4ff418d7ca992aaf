"""Many processes on one SQLite file, killed without warning."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from propolis.core.job import JobInfo, State
from propolis.core.protocols import Filter
from propolis.engines.sqlite.engine import SQLiteEngine
from propolis.testing.engines.samples import a_job

PROCESSES = 8
MAX_KILLS = 15
WORKER = Path(__file__).with_name("sqlite_worker.py")


class Fleet:
    """Worker processes on one file; the dead are replaced."""

    def __init__(self, database: Path, ledger: Path) -> None:
        self._argv = [sys.executable, str(WORKER), str(database), str(ledger)]
        self.processes = [self._spawn() for _ in range(PROCESSES)]
        self.killed = 0

    def _spawn(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self._argv, stderr=subprocess.PIPE, text=True)

    def kill_one(self) -> None:
        victim = random.choice([p for p in self.processes if p.poll() is None])
        victim.kill()
        victim.communicate()
        self.killed += 1
        self.processes[self.processes.index(victim)] = self._spawn()

    def harass(self, ledger: Path) -> None:
        """Kill one every 0.3 s, from the first start on, until the work is done."""
        wait_until_started(ledger)
        while self.killed < MAX_KILLS and any(process.poll() is None for process in self.processes):
            self.kill_one()
            time.sleep(0.3)  # the pace of the faults, not a wait for something

    def complaints(self) -> list[str]:
        return [message for p in self.processes if (message := p.communicate(timeout=120)[1])]


def wait_until_started(ledger: Path) -> None:
    deadline = time.monotonic() + 120
    while not ledger.exists() or not ledger.stat().st_size:
        assert time.monotonic() < deadline, "no worker has started anything"
        time.sleep(0.01)


async def every_record(engine: SQLiteEngine) -> list[JobInfo]:
    records: list[JobInfo] = []
    after: int | None = 0
    while after is not None:
        page = await engine.find(Filter(), limit=5000, after=after)
        records += page.jobs
        after = page.after
    return records


async def test_killing_processes_on_one_file_loses_nothing_and_settles_nothing_twice(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """I5, I8, L2, L3, L4, S0.21, S1.29, S1.34: eight processes, one killed every 0.3 s."""
    n = 20_000 if request.config.getoption("--full") else 8000
    database, ledger = tmp_path / "jobs.db", tmp_path / "ledger"
    engine = await SQLiteEngine(database).open()
    sent = [a_job(number, max_crashes=1000) for number in range(n)]
    for start in range(0, n, 1000):
        await engine.put(sent[start : start + 1000])

    fleet = Fleet(database, ledger)
    fleet.harass(ledger)
    assert fleet.complaints() == []  # no "database is locked", nor anything else

    records = await every_record(engine)
    assert Counter(record.state for record in records) == {State.DONE: n}
    assert {record.id for record in records} == {job.id for job in sent}
    lines = [line.split() for line in ledger.read_text().splitlines()]
    ends = Counter(job_id for what, job_id, *_ in lines if what == "end")
    assert max(ends.values()) == 1
    starts = Counter(job_id for what, job_id, *_ in lines if what == "start")
    unexplained = [r.id for r in records if starts[r.id] - 1 > sum(e.kind == "lost" for e in r.history)]
    assert unexplained == []
    assert fleet.killed >= 3
    await engine.close()
