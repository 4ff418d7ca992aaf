"""Jobs with a loss or a crash: they begin with a note, apart from others, and alone if need be."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.unit.worker.working import record_of, until, work, working

from propolis import App
from propolis.app.client.handle import Handle
from propolis.app.loading import load_app
from propolis.app.registry import Registry
from propolis.core.job import Lease
from propolis.core.protocols import Note
from propolis.engines.memory import MemoryEngine
from propolis.errors import EngineUnavailable
from propolis.strategies import archive
from propolis.values import State
from propolis.worker import Lane, Mode, Settings, Worker

LONG = timedelta(minutes=5)


async def lose(app: Registry, times: int = 1, tasks: int = 1) -> None:
    """All ready jobs are lost by a worker that died while they ran."""
    engine = await app.client.ready()
    for _ in range(times):
        leases = await engine.lease({"default": 100}, span=LONG, holder="dead")
        assert len(leases) == tasks
        await engine.note([Note(lease, began=True) for lease in leases])
        await engine.renew(leases, span=timedelta(0))
        await engine.sweep()


async def test_a_suspect_is_noted_as_begun_before_it_runs(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """T8, F57: and whoever is not answered does not begin."""
    order: list[str] = []
    note = MemoryEngine.note

    async def noting(self: MemoryEngine, notes: Any) -> list[Lease]:
        if any(each.began for each in notes):
            order.append("noted")
            if order.count("noted") == 1:
                raise EngineUnavailable("no answer")
        return await note(self, notes)

    monkeypatch.setattr(MemoryEngine, "note", noting)
    monkeypatch.setattr("propolis.worker.runner.NO_CONNECTION", timedelta(milliseconds=1))

    @app.task(on_success=archive)
    async def job() -> None:
        order.append("ran")

    handle = await job.aenqueue()
    monkeypatch.undo()
    await lose(app)
    monkeypatch.setattr(MemoryEngine, "note", noting)
    monkeypatch.setattr("propolis.worker.runner.NO_CONNECTION", timedelta(milliseconds=1))
    async with working(app, isolate_suspects=False):
        await until(lambda: "ran" in order)
    assert order == ["noted", "noted", "ran"]
    record = await record_of(app, handle.id)
    assert (record.losses, [event.kind for event in record.history]) == (1, ["lost", "snoozed"])


async def test_a_suspect_whose_lease_is_gone_when_it_is_noted_does_not_run(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T8."""
    ran: list[int] = []
    lost = asyncio.Event()
    app.on_lost(lambda job: lost.set())

    @app.task
    async def job() -> None:
        ran.append(1)

    await job.aenqueue()
    await lose(app)

    async def refuse(self: MemoryEngine, notes: Any) -> list[Lease]:
        return [each.lease for each in notes]

    monkeypatch.setattr(MemoryEngine, "note", refuse)
    async with working(app, isolate_suspects=False, grace=timedelta(0)) as worker:
        await until(lambda: worker._pump.idle.is_set())
    assert ran == []


async def test_where_no_child_can_be_made_a_suspect_runs_alone(app: App) -> None:
    """T8: the others end first, and nothing is leased meanwhile, also no second suspect."""
    beside: list[int] = []
    running = 0
    go, suspects_started = asyncio.Event(), 0

    @app.task(name="job", on_success=archive)
    async def job(suspect: bool) -> None:
        nonlocal running, suspects_started
        running += 1
        if suspect:
            suspects_started += 1
            beside.append(running)
            await asyncio.sleep(0.01)
            beside.append(running)
        else:
            await go.wait()
        running -= 1

    handles = [await job.aenqueue(True), await job.aenqueue(True)]
    await lose(app, tasks=2)
    # A local app: no child could find it.
    async with working(app, lanes=[Lane({"default": 1}, 5)]) as worker:
        await until(lambda: worker.solitary)
        neighbour = await job.aenqueue(False)
        await until(lambda: suspects_started == 1)
        go.set()
        await until_done(app, *handles, neighbour)
    assert beside == [1, 1, 1, 1]
    records = [await record_of(app, handle.id) for handle in handles]
    assert [(record.state, record.losses) for record in records] == [(State.DONE, 1)] * 2
    kinds = sorted([event.kind for event in record.history if event.kind != "lost"] for record in records)
    assert kinds[0] == []  # the first; the other one was put off, and not to blame for that
    assert set(kinds[1]) <= {"snoozed", "released"}


async def until_done(app: App, *handles: Handle[Any]) -> None:
    async with asyncio.timeout(30):
        for handle in handles:
            while not (await record_of(app, handle.id)).state.terminal:
                await asyncio.sleep(0.01)  # no event shows this state


# --- in children -------------------------------------------------------------------------


@pytest.fixture
async def isolated(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Registry]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    app = load_app("isolated_jobs:app")
    await app.aclose()
    yield app
    await app.aclose()


async def test_suspects_that_wait_hold_no_slot(isolated: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """T8: one place, three suspects that wait, two slots: what is not suspect goes on at once."""
    monkeypatch.setattr("propolis.worker.children.processes.MAX_SUSPECTS", 1)
    monkeypatch.setattr("propolis.worker.children.suspects.COME_BACK", (0.05, 0.1))
    suspects = [await isolated.tasks["here"].aenqueue(n) for n in range(3)]
    await lose(isolated, tasks=3)
    fresh = [await isolated.tasks["here"].aenqueue(n) for n in range(5)]
    settings = Settings(mode=Mode.FOREVER, lease=LONG, lanes=[Lane({"default": 1}, 2)])
    worker = Worker(isolated, settings)
    running = asyncio.create_task(worker.run())
    pids = [await handle.aresult(timeout="60s") for handle in suspects]
    own = [await handle.aresult(timeout="60s") for handle in fresh]
    worker.stop()
    await running
    assert os.getpid() not in pids
    assert set(own) == {os.getpid()}
    for handle in suspects:
        record = await handle.astatus()
        assert record is not None
        assert (record.attempts, record.losses, record.crashes) == (2, 1, 0)


async def test_a_suspect_has_the_environment_that_it_would_have_here(
    isolated: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T8: it did not ask for a child, and must not fail because of one."""
    monkeypatch.setenv("A_SECRET", "x")
    handle = await isolated.tasks["environment_here"].aenqueue()
    await lose(isolated)
    await Worker(isolated, Settings(mode=Mode.UNTIL_EMPTY, lease=LONG)).run()
    assert await handle.aresult() == "x"


async def test_from_the_seventh_loss_on_it_runs_alone_too(
    isolated: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T8."""
    monkeypatch.setattr("propolis.core.transitions._FRONT_LOSSES", 100)  # no pauses
    handle = await isolated.tasks["here"].aenqueue(1)
    await lose(isolated, times=7)
    worker = Worker(isolated, Settings(mode=Mode.UNTIL_EMPTY, lease=LONG))
    alone: list[int] = []

    def entered() -> Any:
        alone.append(1)
        return Worker.alone(worker)

    monkeypatch.setattr(worker, "alone", entered)
    await worker.run()
    assert await handle.aresult() != os.getpid()
    assert alone == [1]


async def test_three_lost_answers_bury_nobody(app: App) -> None:
    """F57: the answers of leases are lost ten times in a row, and no job has ever begun."""
    ran: list[int] = []

    @app.task(on_success=archive)
    async def job(number: int) -> None:
        ran.append(number)

    handles = await job.many(range(20)).aenqueue()
    engine = await app.ready()
    for _ in range(10):
        leases = await engine.lease({"default": 100}, span=LONG, holder="deaf")
        await engine.renew(leases, span=timedelta(0))
        await engine.sweep()
    await work(app, isolate_suspects=False)
    assert sorted(ran) == list(range(20))
    for handle in handles:
        record = await record_of(app, handle.id)
        assert (record.state, record.losses, record.crashes, record.attempts) == (State.DONE, 1, 0, 2)
