"""Runs that are stopped: by their timeout, by an operator, or because their lease is lost."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from tests.unit.worker.working import record_of, until, until_state, work, working

from propolis import App, Job
from propolis.core.protocols import Exchange
from propolis.engines.memory import MemoryEngine
from propolis.strategies import archive, dead, fixed, repeat
from propolis.values import Filter, State
from propolis.worker import Lane, Settings, Worker

# --- timeouts, cancelling, stuck ---------------------------------------------------------


async def test_a_coroutine_is_cancelled_at_its_timeout(app: App) -> None:
    """S0.15, S0.27, S2.25: stopped by the worker's own clock."""
    cancelled = []

    @app.task(timeout="20ms", on_timeout=repeat(1, fixed(0)).then(archive))
    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    handle = await slow.aenqueue()
    await work(app)
    record = await record_of(app, handle.id)
    assert (record.state, record.reason, record.attempts) == (State.DEAD, "timeout", 2)
    assert len(cancelled) == 2


async def test_a_run_is_stopped_at_its_timeout_and_neither_before_nor_long_after(app: App) -> None:
    """S0.15: within a tenth of a second of it."""

    @app.task(timeout="10s", on_timeout=dead)
    async def slow() -> None:
        await asyncio.Event().wait()

    async with app.test() as t:
        handle = await slow.aenqueue()
        await t.advance("9900ms")
        assert (await record_of(app, handle.id)).state is State.RUNNING
        await t.advance("200ms")
        record = await record_of(app, handle.id)
        assert (record.state, record.reason, record.attempts) == (State.DEAD, "timeout", 1)


async def test_swallowing_broad_exceptions_does_not_swallow_the_timeout(app: App) -> None:
    """S0.18."""

    @app.task(timeout="20ms", on_timeout=dead)
    async def greedy() -> str:
        try:
            await asyncio.sleep(60)
        except Exception:
            return "not caught"
        return "slept"

    @app.task(timeout="20ms", on_timeout=dead)
    async def greedier() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "caught, but late"
        return "slept"

    handles = [await greedy.aenqueue(), await greedier.aenqueue()]
    await work(app)
    for handle in handles:
        assert (await record_of(app, handle.id)).reason == "timeout"


async def test_a_coroutine_that_will_not_stop_is_left_behind(app: App) -> None:
    """F10: reported as stuck, its slot replaced, its outcome recorded all the same."""
    release = asyncio.Event()

    @app.task(name="deaf", timeout="10ms", on_timeout=dead)
    async def deaf() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    @app.task(result_ttl="1h")
    async def fine() -> str:
        return "fine"

    handle = await deaf.aenqueue()
    settings: dict[str, Any] = {"lanes": [Lane({"default": 1}, 1)], "stuck_after": timedelta(milliseconds=20)}
    async with working(app, **settings) as worker:
        await until(lambda: worker.stuck == 1)
        assert await (await fine.aenqueue()).aresult(timeout="10s") == "fine"  # the only slot is usable again
        assert (await record_of(app, handle.id)).reason == "timeout"
        release.set()


async def test_a_hook_that_outlasts_a_stopped_job_does_not_make_it_stuck(app: App) -> None:
    """It has stopped, so only its hook is at work, and that has a limit of its own."""
    now, started, release = 0.0, asyncio.Event(), asyncio.Event()
    hook_steps: list[str] = []

    @app.on_timeout
    async def slow_hook(job: Job) -> None:
        hook_steps.append("begun")
        await release.wait()
        hook_steps.append("ended")

    @app.task(timeout="10ms", on_timeout=dead)
    async def slow() -> None:
        started.set()
        await asyncio.Event().wait()

    handle = await slow.aenqueue()
    worker = Worker(app, Settings(stuck_after=timedelta(seconds=5)), clock=lambda: now, driven=True)
    running = asyncio.create_task(worker.run())
    await started.wait()
    now = 1.0
    worker.tick()
    await until(lambda: bool(hook_steps))
    now = 60.0
    worker.tick()
    release.set()
    await until_state(app, handle.id, State.DEAD)
    worker.stop()
    await running
    error = (await record_of(app, handle.id)).error
    assert error is not None
    assert (worker.stuck, hook_steps) == (0, ["begun", "ended"])
    assert error.message == "it ran out of time and was stopped"


async def test_a_hundred_stuck_threads_leak_no_slot(app: App) -> None:
    """F10, S1.11: each is fenced and replaced; when they end at last, so do their threads."""
    release = threading.Event()
    before = threading.active_count()

    @app.task(timeout="5ms", abandon=True, on_timeout=dead)
    def deaf() -> None:
        release.wait(60)

    await deaf.many([()] * 100).aenqueue()
    worker = await work(app, lanes=[Lane({"default": 1}, 10)], max_stuck=1000)
    assert worker.lost == 0
    assert len(await app.jobs.afind(Filter(reason="timeout"), limit=200)) == 100
    release.set()
    await until(lambda: threading.active_count() <= before + 1)


async def test_a_running_job_is_cancelled_by_an_operator(app: App) -> None:
    started = asyncio.Event()

    @app.task
    async def slow() -> None:
        started.set()
        await asyncio.sleep(60)

    handle = await slow.aenqueue()
    async with working(app, lease=timedelta(milliseconds=200)):
        await started.wait()
        assert await handle.acancel() is True
        await until_state(app, handle.id, State.CANCELLED)


async def test_a_thread_may_ask_whether_it_should_stop(app: App) -> None:
    started = threading.Event()

    @app.task
    def slow(job: Job) -> None:
        started.set()
        while not job.stopping:
            time.sleep(0.002)

    handle = await slow.aenqueue()
    async with working(app, lease=timedelta(milliseconds=200)):
        await until(started.is_set)
        await handle.acancel()
        await until_state(app, handle.id, State.CANCELLED)


# --- leases ------------------------------------------------------------------------------


class CountingLeases(MemoryEngine):
    """Counts how often jobs are leased, and remembers which call found some."""

    def __init__(self) -> None:
        super().__init__()
        self.leases_asked = 0
        self.found = 0

    async def exchange(self, *args: Any, **terms: Any) -> Exchange:
        self.leases_asked += 1
        number = self.leases_asked
        exchange = await super().exchange(*args, **terms)
        self.found = number if exchange.leases else self.found
        return exchange


async def test_a_job_starts_before_its_worker_looks_for_more(app: App) -> None:
    """It was alone, so the next lease is in no hurry, and would delay its start."""
    app.client._engine = engine = CountingLeases()
    started = asyncio.Event()
    leases_asked = 0

    @app.task
    async def note() -> None:
        nonlocal leases_asked
        leases_asked = engine.leases_asked
        started.set()

    async with working(app):
        await note.aenqueue()
        async with asyncio.timeout(20):
            await started.wait()
    assert leases_asked == engine.found > 0


async def test_a_job_of_many_leases_runs_once(app: App) -> None:
    """S0.14, S0.16, S1.13, S4.8, S4.26: renewed while it runs, and no longer."""
    runs = []

    @app.task(on_success=archive)
    async def long() -> None:
        runs.append(1)
        await asyncio.sleep(0.6)

    handle = await long.aenqueue()
    worker = await work(app, lease=timedelta(milliseconds=150))
    assert (len(runs), worker.lost) == (1, 0)
    assert (await record_of(app, handle.id)).history == ()
    assert not worker._keeper._held


async def test_a_blocked_event_loop_loses_no_lease(app: App, caplog: pytest.LogCaptureFixture) -> None:
    """F05: the keeper has a thread of its own."""

    @app.task(on_success=archive)
    async def rude() -> None:
        time.sleep(0.8)  # noqa: ASYNC251  # rude on purpose

    handle = await rude.aenqueue()
    worker = await work(app, lease=timedelta(milliseconds=200))
    record = await record_of(app, handle.id)
    assert (record.state, record.attempts, record.crashes, worker.lost) == (State.DONE, 1, 0, 0)


async def test_a_lost_lease_stops_the_run_and_nothing_of_it_is_recorded(app: App) -> None:
    """S1.6, S4.10: the other run decides."""
    runs: list[str] = []
    lost = []
    app.on_lost(lambda job: lost.append(job.attempt))

    @app.task(on_success=archive)
    async def slow(job: Job) -> None:
        if job.attempt == 1:
            try:
                await asyncio.sleep(60)
            finally:
                runs.append("stopped")
        runs.append("done")

    handle = await slow.aenqueue()
    async with working(app, lease=timedelta(milliseconds=200)) as worker:
        await until(lambda: bool(worker._running()))
        [slot] = worker._running()
        assert slot.lease is not None
        await (await app.ready()).renew([slot.lease], span=timedelta(0))  # as if it had stalled
        await until_state(app, handle.id, State.DONE)
    record = await record_of(app, handle.id)
    assert runs == ["stopped", "done"]
    assert (record.attempts, record.losses, record.crashes, lost) == (2, 1, 0, [1])
    assert [event.kind for event in record.history] == ["lost"]
