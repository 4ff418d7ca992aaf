"""A worker that stops: what ends, what is released, and what is given back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from tests.unit.worker.working import record_of, until, working

from propolis import App, Job, Transaction
from propolis.core.job import Lease, Outcome
from propolis.engines.memory import MemoryEngine
from propolis.strategies import archive
from propolis.values import State
from propolis.worker import Lane, Settings, Worker


async def test_stopping_lets_short_jobs_finish_and_releases_long_ones(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    """S0.34, S2.24: no attempt is counted for what was released; and the log says what it waits for."""
    caplog.set_level("INFO", "propolis.worker")
    started: Counter[str] = Counter()

    @app.task(on_success=archive)
    async def run(name: str) -> None:
        started[name] += 1
        await until(lambda: "stopping: " in caplog.text)
        if name == "long":
            await asyncio.Event().wait()

    short, long = await run.aenqueue("short"), await run.aenqueue("long")
    waiting = await run.aenqueue("waiting")
    worker = Worker(app, Settings(lanes=[Lane({"default": 1}, 2)], grace=timedelta(seconds=1)))
    running = asyncio.create_task(worker.run())
    await until(lambda: started["short"] + started["long"] == 2)
    worker.stop()
    await running
    assert "stopping: 2 jobs have 1 s (a second signal gives them back at once)" in caplog.text
    assert (await record_of(app, short.id)).state is State.DONE
    released = await record_of(app, long.id)
    assert (released.state, released.attempts, released.crashes) == (State.READY, 0, 0)
    assert [event.kind for event in released.history] == ["released"]
    assert (await record_of(app, waiting.id)).attempts == 0
    assert await (await app.ready()).position(long.id) == 0  # the front of the queue


async def test_a_stop_while_the_worker_starts_is_heard(app: App) -> None:
    @app.on_startup
    async def hang(state: Any) -> None:
        await asyncio.sleep(60)

    worker = Worker(app, Settings())
    running = asyncio.create_task(worker.run())
    await asyncio.sleep(0)
    worker.stop()
    async with asyncio.timeout(10):
        await running


async def test_jobs_that_arrive_while_the_worker_stops_are_released(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F02: leased a moment before, and given back without having started."""
    engine = await app.ready()
    asked, let_go = asyncio.Event(), asyncio.Event()
    exchange = engine.exchange

    async def slow_exchange(*args: Any, **kwargs: Any) -> Any:
        got = await exchange(*args, **kwargs)
        if got.leases:
            asked.set()
            await let_go.wait()
        return got

    monkeypatch.setattr(engine, "exchange", slow_exchange)
    seen = []

    @app.task
    async def ping() -> None:
        seen.append(1)

    handle = await ping.aenqueue()
    worker = Worker(app, Settings())
    running = asyncio.create_task(worker.run())
    await asked.wait()
    worker.stop()
    asyncio.get_running_loop().call_later(0.05, let_go.set)
    await running
    record = await record_of(app, handle.id)
    assert (record.state, record.attempts, seen) == (State.READY, 0, [])
    assert [event.kind for event in record.history] == ["released"]


async def test_a_second_stop_does_not_wait(app: App) -> None:
    started = asyncio.Event()

    @app.task
    async def long() -> None:
        started.set()
        await asyncio.sleep(60)

    handle = await long.aenqueue()
    worker = Worker(app, Settings(grace=timedelta(hours=1)))
    running = asyncio.create_task(worker.run())
    await started.wait()
    worker.stop()
    worker.stop()
    async with asyncio.timeout(10):
        await running
    assert (await record_of(app, handle.id)).state is State.READY


class LentTransaction:
    """Writes nothing, so that settling in it is settling."""

    connection = None

    def __init__(self, engine: MemoryEngine) -> None:
        self._engine = engine

    async def settle(self, lease: Lease, outcome: Outcome) -> bool:
        return not await self._engine.settle([(lease, outcome)])


class LendingEngine(MemoryEngine):
    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[LentTransaction]:
        yield LentTransaction(self)


async def test_what_its_transaction_has_settled_is_not_settled_again(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that does not wait for the hook of such a job has nothing to record, and has lost nothing."""
    monkeypatch.setattr("propolis.worker.worker.LAST_WORDS", 0.05)
    app.client._engine = LendingEngine()
    hook_begun = asyncio.Event()

    @app.on_finished
    async def slow_hook(job: Job, result: object) -> None:
        hook_begun.set()
        await asyncio.Event().wait()

    @app.task(on_success=archive)
    async def write(tx: Transaction) -> None: ...

    handle = await write.aenqueue()
    async with working(app, grace=timedelta(0)) as worker:
        await hook_begun.wait()
    assert (await record_of(app, handle.id)).state is State.DONE
    assert (worker.lost, worker._pump.settled) == (0, 1)
    assert "lost" not in caplog.text.replace("leases lost: 0", "")


async def test_jobs_that_wait_too_long_in_the_buffer_are_given_back(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that were thought to be short and turn out long do not keep others waiting behind them."""
    monkeypatch.setattr("propolis.worker.slots.BUFFER_PATIENCE", 0.05)
    release = asyncio.Event()
    quick: list[int] = []

    @app.task
    async def work_on(n: int) -> None:
        if n >= 1000:
            await release.wait()
        quick.append(n)

    await work_on.many(range(1000)).aenqueue()
    async with working(app, lanes=[Lane({"default": 1}, 1)]):
        await until(lambda: len(quick) == 1000)
        entries = app.client.engine._book.entries  # type: ignore[attr-defined]  # those of the memory engine
        await work_on.many(range(1000, 1100)).aenqueue()
        await until(lambda: sum(e.state is State.RUNNING for e in entries.values()) == 1)
        release.set()
        await until(lambda: len(quick) == 1100)
