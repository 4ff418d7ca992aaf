"""Workers with a steady load, and what it takes to watch and to disturb them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import asyncpg

from propolis import App
from propolis.core.batch import Batch
from propolis.core.envelope import Envelope
from propolis.testing.engines.samples import a_job
from propolis.values import State

from .fleet import Fleet, wait_for

OTHER_TASK = "sleep"  # of what waits: a pause of it does not concern the steady load
LANES = ("-q", "default=10", "-q", "other=10", "--lease", "5s")
LONG = 3.0  # seconds: several sweeps, and a renewal of every lease
LOOK_EVERY = 0.2  # seconds
LONG_WAITS = f"""
SELECT w.pid, a.query FROM pg_locks AS w JOIN pg_stat_activity AS a USING (pid)
 WHERE NOT w.granted AND a.datname = current_database()
   AND clock_timestamp() - w.waitstart > interval '{1 + LOOK_EVERY} seconds'
"""


class Bench:
    """Three workers, their steady load, and what it takes to disturb them."""

    def __init__(self, fleet: Fleet, *, waiting: int, server: str = "", pooled: str = "") -> None:
        self.app = App(fleet.url)
        self.server = server
        self.pooled = pooled
        self.schema = "propolis"
        self._fleet = fleet
        self._waiting = waiting
        self._loading = threading.Thread(target=self._load)
        self._over = threading.Event()
        self.steady: dict[str, float] = {}  # when each of its jobs was put
        self.others: set[str] = set()
        self._at_work_since = 0.0
        self._ended: set[str] = set()
        self._counted = 0  # lines of the fleet's ledger

    def _load(self) -> None:
        while not self._over.wait(0.02):
            jobs, now = [a_job(0, task="count") for _ in range(5)], time.monotonic()
            self.app.client.wait(self.app.client.aput_many(jobs))
            self.steady |= {job.id: now for job in jobs}

    @contextmanager
    def loaded(self) -> Iterator[None]:
        for _ in range(3):
            self._fleet.start(*LANES, quiet=True)
        self._loading.start()
        try:
            self.go_on()
            self._at_work_since = time.monotonic()
            yield
        finally:
            self._over.set()
            self._loading.join()

    def go_on(self, jobs: int = 50) -> None:
        """Until so many more of the steady load have ended."""
        had = len(self.steady.keys() & self.ended())
        wait_for(lambda: len(self.steady.keys() & self.ended()) >= had + jobs)

    def goes_on_for_long(self) -> None:
        """And sweeps do: somebody's lease that ends is reaped."""
        until = time.monotonic() + LONG
        lost = a_job(0, task="count", queue="unserved")
        self.app.client.wait(self._lose(lost))
        while time.monotonic() < until:
            self.go_on(20)
        wait_for(lambda: (info := self.app.jobs.get(lost.id)) is not None and info.state is State.READY, 30)

    async def _lose(self, job: Envelope) -> None:
        engine = await self.app.ready()
        await engine.put([job])
        assert len(await engine.lease({"unserved": 1}, span=timedelta(milliseconds=1), holder="gone")) == 1

    def with_connection(self, act: Callable[[asyncpg.Connection], Awaitable[None]]) -> None:
        async def run() -> None:
            connection = await asyncpg.connect(self.server)
            try:
                await act(connection)
            finally:
                await connection.close()

        asyncio.run(run())

    def waiting_elsewhere(self) -> int:
        counts = self.app.queues.counts().get("other")
        return 0 if counts is None else counts.waiting

    def ended(self) -> set[str]:
        lines = self._fleet.lines()
        self._ended.update(line.job_id for line in lines[self._counted :] if line.what == "end")
        self._counted = len(lines)
        return self._ended

    def runs(self) -> Counter[str]:
        return Counter(line.job_id for line in self._fleet.lines() if line.what == "start")

    def p99_wait(self) -> float:
        """Seconds within which all but a hundredth of the steady load began, once the workers were up."""
        starts = {line.job_id: line.at for line in self._fleet.lines() if line.what == "start"}
        waits = sorted(starts[job_id] - at for job_id, at in self.steady.items() if at > self._at_work_since)
        return waits[len(waits) * 99 // 100]

    def put_waiting(self) -> set[str]:
        jobs = [a_job(0, task=OTHER_TASK, queue="other", key="tenant") for _ in range(self._waiting)]
        self.app.client.wait(self.app.client.aput_many(jobs))
        self.others |= {job.id for job in jobs}
        return {job.id for job in jobs}

    def put_batch(self, batch: Batch) -> None:
        async def put() -> None:
            engine = await self.app.ready()
            for first in range(0, self._waiting, 1000):
                numbers = range(first, min(first + 1000, self._waiting))
                jobs = [a_job(0, task="count", queue="other", batch=batch.id, member=n) for n in numbers]
                if first == 0:
                    await engine.put_batch(batch, jobs, seal=False)
                else:
                    await engine.put(jobs)
                await asyncio.sleep(0)  # for the steady load: a put on SQLite never leaves the loop
            await engine.seal(batch.id)

        self.app.client.wait(put())


class LockWatch:
    """Samples a PostgreSQL for whoever waits for a lock for more than L6's second, and one interval."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._watch()))
        self.found: list[str] = []

    def __enter__(self) -> LockWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    async def _watch(self) -> None:
        connection = await asyncpg.connect(self._url)
        while not self._over.is_set():
            self.found += [row["query"] for row in await connection.fetch(LONG_WAITS)]
            await asyncio.to_thread(self._over.wait, LOOK_EVERY)
        await connection.close()
