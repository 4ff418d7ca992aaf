"""A job saves where it is, and its next run goes on from there."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import Any

import pytest
from tests.unit.worker.working import AT_ONCE, record_of, until, work, working

from propolis import App, Job
from propolis.app.transaction import Transaction
from propolis.core.job import Lease, Released
from propolis.core.protocols import MAX_CHECKPOINT
from propolis.errors import BadCall, CheckpointTooLarge, EngineUnavailable, LeaseLost, Misuse
from propolis.strategies import dead
from propolis.values import State


async def test_a_run_goes_on_where_the_last_one_was(app: App) -> None:
    seen: list[object] = []

    @app.task(on_error=AT_ONCE)
    async def count(job: Job) -> None:
        done = (job.checkpoint or {"done": 0})["done"]
        seen.append(done)
        for number in range(done, 5):
            if number == done + 2:
                raise ValueError("not now")
            await job.save({"done": number + 1})
            assert job.checkpoint == {"done": number + 1}

    await count.aenqueue()
    await work(app)
    assert seen == [0, 2, 4]


async def test_a_plain_function_saves_as_well(app: App) -> None:
    seen: list[object] = []

    @app.task(on_error=AT_ONCE)
    def count(job: Job) -> None:
        seen.append(job.checkpoint)
        job.save_now([1, "ä\0"])
        if job.attempt == 1:
            raise ValueError("not now")

    await count.aenqueue()
    await work(app)
    assert seen == [None, [1, "ä\0"]]


async def test_a_dead_job_keeps_its_checkpoint_for_a_replay(app: App) -> None:
    seen: list[object] = []

    @app.task(on_error=dead)
    async def task(job: Job) -> None:
        seen.append(job.checkpoint)
        if job.checkpoint is None:
            await job.save(7)
            raise ValueError("a bug")

    handle = await task.aenqueue()
    await work(app)
    assert (await record_of(app, handle.id)).checkpoint == b"7"
    assert await app.jobs.areplay(handle.id) == [True]
    await work(app)
    assert seen == [None, 7]


async def test_whoever_saves_hears_that_the_lease_is_lost(app: App) -> None:
    engine = await app.ready()
    caught: list[LeaseLost] = []

    async def lose(lease: Lease) -> None:
        await engine.renew([lease], span=timedelta(0))
        await engine.sweep()

    @app.task
    async def task(job: Job) -> None:
        if job.lease.losses:
            return
        await job.save(1)
        await lose(job.lease)
        try:
            await job.save(2)
        except LeaseLost as error:
            caught.append(error)
            assert job.checkpoint == 1

    handle = await task.aenqueue()
    await work(app, isolate_suspects=False)
    assert [error.job_id for error in caught] == [handle.id]


async def test_save_waits_until_the_engine_is_back(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await app.ready()
    real, away = engine.note, True

    async def flaky(notes: Any) -> Any:
        if away:
            raise EngineUnavailable("down for maintenance")
        return await real(notes)

    monkeypatch.setattr(engine, "note", flaky)
    monkeypatch.setattr("propolis.worker.pump.FIRST_BACKOFF", 0.01)
    steps: list[str] = []

    @app.task
    async def task(job: Job) -> None:
        steps.append("begins")
        await asyncio.gather(job.save(1), job.save(2))
        steps.append("saved")

    await task.aenqueue()
    with caplog.at_level(logging.WARNING, "propolis.worker"):
        async with working(app, poll=timedelta(milliseconds=20)):
            await until(lambda: "the engine is away" in caplog.text)
            assert steps == ["begins"]
            away = False
            await until(lambda: "saved" in steps)


async def test_a_run_that_is_released_while_it_saves_ends(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cancellation reaches it, and the answer that comes later finds nobody."""
    engine = await app.ready()
    real, saving, go_on = engine.note, asyncio.Event(), asyncio.Event()

    async def slow(notes: Any) -> Any:
        saving.set()
        await go_on.wait()
        return await real(notes)

    monkeypatch.setattr(engine, "note", slow)

    @app.task
    async def task(job: Job) -> None:
        await job.save(1)

    handle = await task.aenqueue()
    async with working(app, grace=timedelta(0)) as worker:
        await saving.wait()
        worker.stop()
        await until(lambda: not worker._running())
        go_on.set()
    info = await record_of(app, handle.id)
    assert (info.state, info.checkpoint) == (State.READY, b"1")
    assert info.history[-1].kind == Released.__name__.lower()


async def test_what_cannot_be_saved_is_refused_and_nothing_changes(app: App) -> None:
    errors: list[Exception] = []

    @app.task(on_error=dead)
    async def task(job: Job) -> None:
        await job.save("good")
        for value in ("x" * MAX_CHECKPOINT, object()):
            try:
                await job.save(value)
            except (CheckpointTooLarge, TypeError) as error:
                errors.append(error)
        assert job.checkpoint == "good"
        await job.save("x" * (MAX_CHECKPOINT - 2))
        raise ValueError

    handle = await task.aenqueue()
    await work(app)
    assert [type(error) for error in errors] == [CheckpointTooLarge, BadCall]
    assert len((await record_of(app, handle.id)).checkpoint or b"") == MAX_CHECKPOINT


async def test_save_now_is_not_for_an_event_loop(app: App) -> None:
    @app.task(on_error=dead)
    async def task(job: Job) -> None:
        job.save_now(1)

    handle = await task.aenqueue()
    await work(app)
    error = (await record_of(app, handle.id)).error
    assert error is not None
    assert (error.type, "await job.save" in error.message) == (Misuse.__name__, True)


async def test_save_is_not_for_a_plain_function(app: App) -> None:
    """It could not be awaited, and the job would end as done with nothing saved."""

    @app.task(on_error=dead)
    def task(job: Job) -> None:
        job.save(1)  # type: ignore[unused-coroutine]  # this is what it is about

    handle = await task.aenqueue()
    await work(app)
    info = await record_of(app, handle.id)
    assert info.error is not None
    assert (info.error.type, "job.save_now" in info.error.message) == (Misuse.__name__, True)


async def test_a_save_that_is_not_awaited_is_an_error_in_the_log(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(on_error=AT_ONCE, result_ttl="1h")
    async def task(job: Job) -> object:
        if job.attempt == 1:
            job.save(1)  # type: ignore[unused-coroutine]  # this is what it is about
            raise ValueError("not now")
        return job.checkpoint

    handle = await task.aenqueue()
    await work(app)
    assert (await record_of(app, handle.id)).result == b"null"
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert errors == [
        f"job {handle.id} of {task.name} was to save where it is, and did not: write `await job.save(…)`"
    ]


async def test_saves_that_are_awaited_in_other_ways_are_no_errors(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(on_error=dead, result_ttl="1h")
    async def task(job: Job) -> None:
        await asyncio.create_task(job.save(1))
        await asyncio.wait_for(job.save(2), 60)
        await asyncio.gather(job.save(3), job.save(4))
        stopped = asyncio.create_task(job.save(5))  # before it has begun
        stopped.cancel()
        await asyncio.wait([stopped])
        job.save(6).close()
        assert job.checkpoint == 4

    handle = await task.aenqueue()
    await work(app)
    assert (await record_of(app, handle.id)).state is State.DONE
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_job_in_a_transaction_saves_nothing_beside_it(app: App) -> None:
    """What it writes may be rolled back, and a checkpoint would stand."""

    @app.task(on_error=dead)
    async def task(job: Job) -> None:
        job.transaction = Transaction(None)
        await job.save(1)

    handle = await task.aenqueue()
    await work(app)
    info = await record_of(app, handle.id)
    assert (info.error.type if info.error else None, info.checkpoint) == (Misuse.__name__, None)
