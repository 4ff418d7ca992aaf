"""The run of faults: a server is restarted and its workers are killed while ten thousand jobs go through."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from propolis import App
from propolis.core.envelope import Envelope
from propolis.core.job import JobInfo
from propolis.engines.postgres.engine import PostgresEngine
from propolis.errors import EngineUnavailable, OutcomeUnknown
from propolis.testing.engines.samples import a_job
from propolis.testing.servers.serving import PostgresServer, postgres
from propolis.values import Filter, State

JOBS = 10_000
BUNDLE = 250
WORKERS = 4
KILL_EVERY = 0.5
KILLS = 30  # about as many as there is time for on a machine that does nothing else
RESTARTS = 3
RESTART_EVERY = 3.0
HERE = Path(__file__).parent


class Fleet:
    """Worker processes of which one dies every half a second, if anything ran meanwhile, and is replaced.

    Not for ever: where few jobs are left, each start of one would be a kill, and their pauses become minutes.
    """

    def __init__(self, url: str, ledger: Path) -> None:
        self._ledger = ledger
        self._command = [sys.executable, str(HERE / "postgres_worker.py"), url, str(ledger)]
        self._workers: list[subprocess.Popen[bytes]] = []
        self.killed = 0

    def start(self) -> None:
        for _ in range(WORKERS - len(self._workers)):
            self._workers.append(subprocess.Popen(self._command, stderr=subprocess.DEVNULL))

    async def keep_killing(self) -> None:
        size = 0
        while self.killed < KILLS:
            await asyncio.sleep(KILL_EVERY)
            while size == (size := self._ledger.stat().st_size):  # none has started: it is busy here
                await asyncio.sleep(0.05)
            victim = self._workers.pop(random.randrange(len(self._workers)))
            victim.kill()
            victim.wait()
            self.killed += 1
            self.start()

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()


async def keep_restarting(server: PostgresServer) -> None:
    """Cleanly, and once by kill -9."""
    for number in range(RESTARTS):
        await asyncio.sleep(RESTART_EVERY)
        await asyncio.to_thread(server.kill if number == 1 else server.stop)
        await asyncio.to_thread(server.start)


async def produce(app: App) -> list[str]:
    """As a producer does: what is refused because the server is away is tried again."""
    jobs = [a_job(number, task="tests.work", max_crashes=100) for number in range(JOBS)]
    for start in range(0, JOBS, BUNDLE):
        await put(app, jobs[start : start + BUNDLE])
        await asyncio.sleep(0.05)
    return [job.id for job in jobs]


async def put(app: App, jobs: list[Envelope]) -> None:
    while True:
        try:
            await app.client.aput_many(jobs)
        except (EngineUnavailable, OutcomeUnknown):
            await asyncio.sleep(0.2)
        else:
            return


async def drained(engine: PostgresEngine) -> None:
    while True:
        try:
            counts = (await engine.queues())["default"]
            if counts.done == JOBS:
                return
            assert not counts.dead
        except (EngineUnavailable, OutcomeUnknown, KeyError):
            pass
        await asyncio.sleep(0.1)


async def every_job(engine: PostgresEngine) -> list[JobInfo]:
    records: list[JobInfo] = []
    after: int | None = 0
    while after is not None:
        page = await engine.find(Filter(), limit=2000, after=after)
        records += page.jobs
        after = page.after
    return records


async def test_nothing_is_lost_and_every_second_run_is_explained(tmp_path: Path) -> None:
    """F01, F11, F12, O1-O4: workers killed with -9; a server restarted three times, once by -9 itself."""
    ledger = tmp_path / "ledger"
    ledger.touch()
    with postgres(durable=True) as server:
        app = App(f"{server.url}?patience=5s")
        engine = await PostgresEngine(server.url, patience="5s").open()
        fleet = Fleet(server.url, ledger)
        fleet.start()
        try:
            async with asyncio.timeout(240):
                restarting = asyncio.create_task(keep_restarting(server))
                killing = asyncio.create_task(fleet.keep_killing())
                put = await produce(app)
                await restarting
                await drained(engine)
        finally:
            killing.cancel()
            fleet.close()
        records = {record.id: record for record in await every_job(engine)}
        await engine.close()
        await app.aclose()

    starts = Counter(line.split()[0] for line in ledger.read_text().splitlines())
    assert sorted(records) == sorted(put)
    assert {record.state for record in records.values()} == {State.DONE}
    assert set(starts) == set(put)
    assert unexplained(starts, {name: len(record.history) for name, record in records.items()}) == []
    assert fleet.killed > RESTARTS
    assert max(starts.values()) > 1  # or else nothing was put to the test


def unexplained(starts: Mapping[str, int], events: Mapping[str, int]) -> list[str]:
    """The jobs that ran more often than once and once more for each event of their history (O4)."""
    return [name for name, runs in starts.items() if runs > 1 + events[name]]


def test_a_run_without_an_event_would_be_noticed() -> None:
    assert unexplained({"a": 2, "b": 2, "c": 1}, {"a": 0, "b": 1, "c": 0}) == ["a"]
