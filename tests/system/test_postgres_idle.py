"""A fleet that has nothing to do leaves the server alone, and is there when something comes."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta

import asyncpg
import pytest

from propolis import App
from propolis.core.envelope import Envelope
from propolis.engines.postgres.engine import PostgresEngine
from propolis.testing.engines.samples import a_job
from propolis.testing.servers.serving import PostgresServer, postgres
from propolis.worker import Settings, Worker

WORKERS = 100
SECONDS = 10
MAX_PER_SECOND = 5  # S2.28
A_SWEEP_LATER = 0.6  # seconds: as long as it takes, in the mean, until somebody looks without a hint

BACKENDS = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend'"
STATEMENT = re.compile(rb"LOG:  (?:execute|statement)")


class Fleet:
    """Workers in this process, each with an app, connections and a listener of its own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.heard = 0  # how many waits of workers were ended by a hint
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

    async def start_of(self, producer: PostgresEngine, job: Envelope) -> float:
        """How many seconds after its put a job starts."""
        began = asyncio.get_running_loop().time()
        await producer.put([job])
        return await self.started.get() - began

    def count_hints(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wait = PostgresEngine.wait

        async def counted(engine: PostgresEngine, queues: Sequence[str], timeout: float) -> bool:
            heard = await wait(engine, queues, timeout)
            self.heard += heard
            return heard

        monkeypatch.setattr(PostgresEngine, "wait", counted)

    async def most_hear(self) -> None:
        """Until most of the fleet has been woken by a hint, however long a busy machine takes.

        It is for the first put: after that, whoever came too late steps back, and does not wait meanwhile.
        Nothing but a notification wakes so many.
        """
        async with asyncio.timeout(120):
            while self.heard < WORKERS * 3 // 4:
                await asyncio.sleep(0.01)

    async def resting(self, server: PostgresServer) -> None:
        """Until everybody has looked, found nothing, and listens; and relies on the others to come."""
        for app in self.apps:
            while not app.client.engine.hears:
                await asyncio.sleep(0.05)
        before = 0
        while statements(server) - before > 1.5 * MAX_PER_SECOND:
            before = statements(server)
            # Who did not hear yet when it last looked looks once more by itself, a second later.
            await asyncio.sleep(1.5)


def statements(server: PostgresServer) -> int:
    return len(STATEMENT.findall(server.log.read_bytes()))


async def test_an_idle_fleet_asks_little_and_starts_a_job_at_once(
    times_count: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S2.28, L1: a hundred workers, every statement that the server was given counted in its own log."""
    with postgres(settings=("log_statement=all", "max_connections=450")) as server:
        producer = await PostgresEngine(server.url).open()
        admin = await asyncpg.connect(server.url)
        fleet = Fleet(server.url)
        fleet.count_hints(monkeypatch)
        async with AsyncExitStack() as stack:
            for _ in range(WORKERS):
                await stack.enter_async_context(fleet.one())
            await fleet.resting(server)

            before, began = statements(server), time.monotonic()
            await asyncio.sleep(SECONDS)  # the measurement
            asked, took = statements(server) - before, time.monotonic() - began
            connections = len(await admin.fetch(BACKENDS))

            fleet.heard, notified = 0, asyncio.Semaphore(0)
            await admin.add_listener(
                producer._hints.channel, lambda *said: notified.release() if said[-1] == "default" else None
            )
            waits = [await fleet.start_of(producer, a_job(task="tests.ring"))]
            await fleet.most_hear()
            waits += [await fleet.start_of(producer, a_job(task="tests.ring")) for _ in range(4)]
            for _ in waits:  # each put has told everybody who listens, also where few had to be woken
                await notified.acquire()
            late = [
                await fleet.start_of(producer, a_job(task="tests.ring", delay_ms=delay)) - delay / 1000
                for delay in (500, 700, 6000)
            ]
        await producer.close()
        await admin.close()

    assert connections <= 3 * WORKERS + 2  # one of each three is closed later; two are of this test
    assert 0 < asked < WORKERS  # nobody looks just to see, however slow the machine is
    if times_count:
        assert asked <= MAX_PER_SECOND * took
        assert sorted(waits)[2] < A_SWEEP_LATER  # 0.01 to 0.05, with a hundred in one process
        assert sorted(late)[1] < A_SWEEP_LATER
    assert min(late) >= 0
