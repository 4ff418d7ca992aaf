"""T12b: jobs of tasks that a worker does not know wait for one that does."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from tests.unit.worker.working import record_of, until, until_state, work, working

from propolis import App
from propolis.core.job import JobInfo
from propolis.engines.memory import MemoryEngine
from propolis.errors import StorageFull
from propolis.strategies import archive
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import a_job
from propolis.values import Filter, State
from propolis.worker.sweeping.schedule_firing import Firer
from propolis.worker.sweeping.unknown_tasks import KIND


def deployment(engine: MemoryEngine, *tasks: str) -> App:
    """An app with these tasks on an engine that others use too."""
    app = App("memory://")
    app.client._engine = engine
    for name in tasks:

        async def run() -> None: ...

        app.task(name=name, on_success=archive)(run)
    return app


async def test_old_and_new_code_side_by_side(caplog: pytest.LogCaptureFixture) -> None:
    """F61, T12b: what the old worker does not know it parks, and the new one runs it, in the old order."""
    engine = await MemoryEngine().open()
    old, new = deployment(engine, "old"), deployment(engine, "old", "new")
    jobs = [a_job(task="new") for _ in range(50)] + [a_job(task="old")]
    await engine.put(jobs)
    await work(old)
    records = [await record_of(old, job.id) for job in jobs]
    assert [(each.state, each.parked, each.attempts) for each in records] == [(State.READY, True, 0)] * 50 + [
        (State.DONE, False, 1)
    ]
    assert caplog.text.count("jobs of task 'new' in queue 'default' stay parked") == 1

    async with working(old), working(new):
        await until_state(new, jobs[49].id, State.DONE)
        records = [await record_of(new, job.id) for job in jobs]
    assert {(each.state, each.attempts) for each in records} == {(State.DONE, 1)}
    assert not await new.jobs.afind(Filter(reason="broken"))
    await engine.close()


async def test_parked_jobs_run_although_schedules_cannot_be_fired(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """F54, F61: where memory is full nothing is put, and what is parked is run and makes room."""
    monkeypatch.setattr("propolis.worker.sweeping.sweeper.SWEEP_EVERY", 0.01)
    engine = await MemoryEngine().open()
    old, new = deployment(engine, "old"), deployment(engine, "new")
    job = a_job(task="new")
    await engine.put([job])
    await work(old)

    async def full(self: Firer) -> None:
        raise StorageFull("jobs")

    monkeypatch.setattr(Firer, "fire_due", full)
    new.every("1s", name="each")(new.tasks["new"])
    async with working(new):
        await until(lambda: "firing schedules failed" in caplog.text)
        await until_state(new, job.id, State.DONE)
    assert "sweeping failed" not in caplog.text
    await engine.close()


async def test_until_empty_runs_what_others_have_parked(caplog: pytest.LogCaptureFixture) -> None:
    """T12b: the first sweep tells of it, and it is not over before; nobody warns of what has run."""
    engine = await MemoryEngine().open()
    old, new = deployment(engine, "old"), deployment(engine, "new")
    job = a_job(task="new")
    await engine.put([job])
    await work(old)
    caplog.clear()
    await work(new)
    assert "stay parked" not in caplog.text
    assert (await record_of(new, job.id)).state is State.DONE
    await engine.close()


async def test_what_nobody_knows_for_too_long_is_shelved(monkeypatch: pytest.MonkeyPatch) -> None:
    """T12b: since when is kept in a record; in bites; what is not of that task is given back."""
    monkeypatch.setattr("propolis.worker.sweeping.unknown_tasks.BITE", 7)
    monkeypatch.setattr("propolis.worker.sweeping.sweeper.SWEEP_EVERY", 0.01)
    engine = await MemoryEngine().open()
    app = deployment(engine, "other")
    jobs = [a_job(task="nobody") for _ in range(20)]
    await engine.put(jobs)
    async with working(app, unknown_for=timedelta(milliseconds=50)):
        async with asyncio.timeout(20):
            while len(await app.jobs.afind(Filter(reason="broken"), limit=100)) < 20:
                await asyncio.sleep(0.005)  # no event shows this state
        async with asyncio.timeout(20):
            while (await engine.records(KIND)).records:
                await asyncio.sleep(0.005)
    record = await record_of(app, jobs[0].id)
    assert record.error is not None
    assert "does the worker import its module" in record.error.message
    await engine.close()


async def test_what_a_live_worker_knows_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """T12b: a worker that serves the queue and knows the task is busy, but it is there."""
    monkeypatch.setattr("propolis.worker.sweeping.sweeper.SWEEP_EVERY", 0.01)
    engine = await MemoryEngine().open()
    app, other = deployment(engine, "other"), deployment(engine, "new")
    job = a_job(task="new")
    looks = 0
    records = MemoryEngine.records

    async def counted(self: MemoryEngine, kind: str, **more: Any) -> Any:
        nonlocal looks
        looks += kind == KIND
        return await records(self, kind, **more)

    monkeypatch.setattr(MemoryEngine, "records", counted)
    async with working(other) as busy:
        await until(lambda: busy._presence._written is not None)
        busy._pump.pause()
        await engine.put([job])
        async with working(app, unknown_for=timedelta(milliseconds=1)):
            await until(lambda: looks >= 5)
            record: JobInfo = await record_of(app, job.id)
            assert (record.state, record.parked) == (State.READY, True)
        busy._pump.resume()
        await until_state(app, job.id, State.DONE)
    await engine.close()


async def test_a_time_in_which_no_worker_was_there_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """T12b, F61, F38: all were stopped, or the clock went ahead; the old worker starts first."""
    monkeypatch.setattr("propolis.worker.sweeping.sweeper.SWEEP_EVERY", 0.01)
    monkeypatch.setattr("propolis.worker.sweeping.unknown_tasks.AT_MOST_EVERY", 0.01)
    clock = FakeClock()
    engine = await MemoryEngine(clock=clock).open()
    old, new = deployment(engine, "old"), deployment(engine, "new")
    job = a_job(task="new")
    await engine.put([job])
    looks = 0
    records = MemoryEngine.records

    async def counted(self: MemoryEngine, kind: str, **more: Any) -> Any:
        nonlocal looks
        looks += kind == KIND
        return await records(self, kind, **more)

    monkeypatch.setattr(MemoryEngine, "records", counted)
    async with working(old):
        await until(lambda: looks >= 2)
    clock.advance("2h")
    async with working(old):
        before = looks
        await until(lambda: looks >= before + 5)
        async with working(new):
            await until_state(new, job.id, State.DONE)
    await engine.close()


async def test_the_kit_does_not_wait_for_parked_jobs(app: App, caplog: pytest.LogCaptureFixture) -> None:
    """T12b: and says so."""
    async with app.test() as t:
        job = a_job(task="nobody")
        await t.engine.put([job])
        await t.drain()
        assert t.job(job.id).parked
    assert "waits for a worker that knows it" in caplog.text
