"""A fleet that has nothing to do leaves the server alone, and is there when something comes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta

import asyncpg
import pytest

from skep import App
from skep.brokers.postgres import PostgresBroker
from skep.job import Job
from skep.testing.make import a_job
from skep.testing.servers import PostgresServer, postgres
from skep.worker import Settings, Worker

WORKERS = 100
SECONDS = 10
MOST_PER_SECOND = 5  # S2.28
A_SWEEP_LATER = 0.6  # seconds: as long as it takes, in the mean, until somebody looks without a hint

BACKENDS = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend'"
STATEMENT = re.compile(rb"LOG:  (?:execute|statement)")


class Fleet:
    """Workers in this process, each with an app, connections and a listener of its own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.started: asyncio.Queue[float] = asyncio.Queue()
        self.workers: list[Worker] = []
        self.apps: list[App] = []

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        app = App(self._url)

        @app.task(name="tests.ring")
        async def ring() -> None:
            self.started.put_nowait(asyncio.get_running_loop().time())

        worker = Worker(app, Settings(grace=timedelta(0)))
        running = asyncio.create_task(worker.run())
        self.workers.append(worker)
        self.apps.append(app)
        try:
            yield
        finally:
            worker.stop()
            await running
            await app.aclose()

    async def start_of(self, producer: PostgresBroker, job: Job) -> float:
        """How many seconds after its put a job starts."""
        began = asyncio.get_running_loop().time()
        await producer.put([job])
        return await self.started.get() - began

    async def resting(self, server: PostgresServer) -> None:
        """Until everybody has looked, found nothing, and listens; and relies on the others to come."""
        for app in self.apps:
            while not app.engine.hears:
                await asyncio.sleep(0.05)
        before = 0
        while statements(server) - before > 1.5 * MOST_PER_SECOND:
            before = statements(server)
            # Who did not hear yet when it last looked looks once more by itself, a second later.
            await asyncio.sleep(1.5)


def statements(server: PostgresServer) -> int:
    return len(STATEMENT.findall(server.log.read_bytes()))


@pytest.mark.timeout(120)
async def test_an_idle_fleet_asks_little_and_starts_a_job_at_once() -> None:
    """S2.28, L1: a hundred workers, every statement that the server was given counted in its own log."""
    with postgres(settings=("log_statement=all", "max_connections=320")) as server:
        producer = await PostgresBroker(server.url).open()
        admin = await asyncpg.connect(server.url)
        fleet = Fleet(server.url)
        async with AsyncExitStack() as stack:
            for _ in range(WORKERS):
                await stack.enter_async_context(fleet.one())
            await fleet.resting(server)

            before = statements(server)
            await asyncio.sleep(SECONDS)  # the measurement
            asked = statements(server) - before
            connections = len(await admin.fetch(BACKENDS))

            waits = [await fleet.start_of(producer, a_job(task="tests.ring")) for _ in range(5)]
            late = [
                await fleet.start_of(producer, a_job(task="tests.ring", delay_ms=delay)) - delay / 1000
                for delay in (500, 700, 6000)
            ]
        await producer.close()
        await admin.close()

    assert connections <= 3 * WORKERS + 2  # one of each three is closed later; two are of this test
    assert 0 < asked <= MOST_PER_SECOND * SECONDS
    assert sorted(waits)[2] < A_SWEEP_LATER  # on a quiet machine 0.01 to 0.05, with a hundred in one process
    assert sorted(late)[1] < A_SWEEP_LATER
    assert min(late) >= 0
