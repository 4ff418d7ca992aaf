"""A fleet that has nothing to do leaves the server alone, and is there when something comes."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any

import asyncpg
import pytest

from propolis import App
from propolis.app.operate.workers import EVERY
from propolis.core.envelope import Envelope
from propolis.engines.postgres.engine import PostgresEngine
from propolis.testing.engines.samples import a_job
from propolis.testing.servers.serving import PostgresServer, postgres
from propolis.worker import Settings, Worker

WORKERS = 100
SWEEPS = 20  # for which we watch
MAX_PER_SECOND = 5  # S2.28
PLANNED_PER_SECOND = 4  # 3.2 by measurement, and somebody who is late has others come between
A_SWEEP_LATER = 0.6  # seconds: as long as it takes, in the mean, until somebody looks without a hint

CALLS = ("sweep", "swap", "exchange")
BY_THE_WAY = 10  # statements: somebody asks whether notifications arrive, or searches for old transactions
# Those whose moment is over are late, as on a busy machine.
PLANNED = """
SELECT back_us FROM propolis.sweeper
 WHERE back_us > extract(epoch FROM clock_timestamp()) * 1000000 ORDER BY back_us
"""
BACKENDS = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend'"
STATEMENT = re.compile(rb"LOG:  (?:execute|statement)")


class Fleet:
    """Workers in this process, each with an app, connections and a listener of its own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.heard = 0  # how many waits of workers were ended by a hint
        self.begun: Counter[str] = Counter()  # calls of the engine, by name
        self.flying = 0  # those that have not ended yet
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

    def count_calls(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in CALLS:
            monkeypatch.setattr(PostgresEngine, name, self._counting(name, getattr(PostgresEngine, name)))

    def _counting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        async def counted(*args: Any, **more: Any) -> Any:
            self.begun[name] += 1
            self.flying += 1
            try:
                return await call(*args, **more)
            finally:
                self.flying -= 1

        return counted

    async def sweeps(self, count: int) -> None:
        """Until there were so many more of them."""
        until = self.begun["sweep"] + count
        while self.begun["sweep"] < until:
            await asyncio.sleep(0.01)

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
    """S2.28, L1: a hundred workers, every statement that the server was given counted in its own log.

    On a machine of any speed, nobody looks for work, a sweep and a sign of life cost a statement each, and as
    many of both are planned as the bar allows.
    """
    with postgres(settings=("log_statement=all", "max_connections=450")) as server:
        producer = await PostgresEngine(server.url).open()
        admin = await asyncpg.connect(server.url)
        fleet = Fleet(server.url)
        fleet.count_hints(monkeypatch)
        fleet.count_calls(monkeypatch)
        async with AsyncExitStack() as stack:
            for _ in range(WORKERS):
                await stack.enter_async_context(fleet.one())
            await fleet.resting(server)

            before, began, flying = statements(server), time.monotonic(), fleet.flying
            fleet.begun.clear()
            await fleet.sweeps(SWEEPS)
            asked, took, begun = statements(server) - before, time.monotonic() - began, fleet.begun.copy()
            planned = [row["back_us"] for row in await admin.fetch(PLANNED)]
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
    assert begun["exchange"] == 0  # nobody looks just to see
    assert asked <= begun["sweep"] + begun["swap"] + flying + BY_THE_WAY
    apart = [(after - before) / 1e6 for before, after in pairwise(planned)]
    assert len(planned) > WORKERS // 2
    assert len(apart) / sum(apart) + WORKERS / (0.95 * EVERY) <= PLANNED_PER_SECOND
    if times_count:
        assert asked <= MAX_PER_SECOND * took
        assert sorted(waits)[2] < A_SWEEP_LATER  # 0.01 to 0.05, with a hundred in one process
        assert sorted(late)[1] < A_SWEEP_LATER
    assert min(late) >= 0
