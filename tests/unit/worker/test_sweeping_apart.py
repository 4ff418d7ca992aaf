"""Sweeping is not in the pump's way."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from tests.unit.worker.working import until, working

from propolis import App
from propolis.core.protocols import Exchange, Swept
from propolis.engines.memory import MemoryEngine
from propolis.errors import EngineUnavailable, StorageBroken
from propolis.worker import Settings, Worker


async def test_a_sweep_without_end_delays_neither_leasing_nor_settling(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L6: and there is one at a time."""
    sweeping = 0

    async def endless(self: MemoryEngine, **_: Any) -> Swept:
        nonlocal sweeping
        sweeping += 1
        await asyncio.Event().wait()
        raise AssertionError

    @app.task(result_ttl="1h")
    async def job() -> str:
        return "done"

    await app.ready()
    monkeypatch.setattr(MemoryEngine, "sweep", endless)
    monkeypatch.setattr("propolis.worker.sweeping.sweeper.SWEEP_EVERY", 0.001)
    async with working(app):
        await until(lambda: sweeping == 1)
        for _ in range(3):
            assert await (await job.aenqueue()).aresult(timeout="20s") == "done"
    assert sweeping == 1


@pytest.mark.parametrize("error", [EngineUnavailable("for now"), ValueError("a mistake of ours")], ids=repr)
async def test_a_sweep_that_fails_is_tried_again(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """L6: jobs go on meanwhile."""
    failed = 0

    async def failing(self: MemoryEngine, **_: Any) -> Swept:
        nonlocal failed
        failed += 1
        raise error

    @app.task(result_ttl="1h")
    async def job() -> str:
        return "done"

    await app.ready()
    monkeypatch.setattr(MemoryEngine, "sweep", failing)
    monkeypatch.setattr("propolis.worker.sweeping.sweeper.SWEEP_EVERY", 0.01)
    async with working(app):
        await until(lambda: failed > 2)
        assert await (await job.aenqueue()).aresult(timeout="20s") == "done"
    assert "sweeping failed" in caplog.text


async def test_broken_storage_that_a_sweep_finds_ends_the_worker(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: MemoryEngine, **_: Any) -> Swept:
        raise StorageBroken("the file is gone")

    await app.ready()
    monkeypatch.setattr(MemoryEngine, "sweep", broken)
    async with asyncio.timeout(20):
        with pytest.raises(StorageBroken):
            await Worker(app, Settings()).run()


@pytest.fixture
def leases(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each lease that was asked for, of an engine that says of itself what comes."""
    asked: list[None] = []
    exchange = MemoryEngine.exchange

    async def counted(self: MemoryEngine, *args: Any, **options: Any) -> Exchange:
        asked.append(None)
        return await exchange(self, *args, **options)

    monkeypatch.setattr(MemoryEngine, "exchange", counted)
    monkeypatch.setattr(MemoryEngine, "hears", True)
    return asked


async def test_who_hears_leases_after_a_sweep_only_where_something_may_be_ready(
    app: App, monkeypatch: pytest.MonkeyPatch, leases: list[None]
) -> None:
    """S2.28: one lease for each sweep that saw something, and none for the others."""
    sweeps, ready = 0, False

    async def sweep(self: MemoryEngine, **_: Any) -> Swept:
        nonlocal sweeps
        sweeps += 1
        return Swept(again_in=timedelta(milliseconds=5), nothing_ready=not ready)

    await app.ready()
    monkeypatch.setattr(MemoryEngine, "sweep", sweep)
    async with working(app):
        await until(lambda: sweeps > 20)
        assert len(leases) == 1  # the first one
        ready, before = True, sweeps
        await until(lambda: sweeps > before + 20)
        assert 15 <= len(leases) <= sweeps - before + 2


async def test_who_hears_leases_also_while_a_sweep_takes_long(
    app: App, monkeypatch: pytest.MonkeyPatch, leases: list[None]
) -> None:
    """L6: a hint may have been lost meanwhile."""

    async def endless(self: MemoryEngine, **_: Any) -> Swept:
        await asyncio.Event().wait()
        raise AssertionError

    await app.ready()
    monkeypatch.setattr(MemoryEngine, "sweep", endless)
    monkeypatch.setattr("propolis.worker.sweeping.sweeper.LONG", 0.01)
    async with working(app):
        await until(lambda: len(leases) > 3)
