"""What a worker meets at the worst moment: it goes on, or ends and says why; and no job pays for it."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.unit.worker.test_suspects import lose
from tests.unit.worker.working import record_of, until, until_state, working

from propolis import App
from propolis.app.loading import load_app
from propolis.core.job import Lease, Unknown
from propolis.core.records import Change, Swap
from propolis.engines.memory import MemoryEngine
from propolis.errors import EngineUnavailable, StorageBroken, WorkerFailed
from propolis.strategies import dead, fixed, repeat
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import a_job
from propolis.values import Filter, Scope, State
from propolis.worker import Settings, Worker
from propolis.worker.children.processes import Child
from propolis.worker.process import signals
from propolis.worker.supervisor import Supervisor, loop_factory, run_to_the_end
from propolis.worker.sweeping.unknown_tasks import KIND, UnknownTasks, record_name

SOON = timedelta(milliseconds=50)


@pytest.mark.parametrize(
    "value",
    [b"{", b"\xff", b'{"queue": "default", "task": "nobody", "since": "2020-01-01T00:00:00"}'],
    ids=["cut off", "no text", "of no time zone"],
)
async def test_an_odd_record_of_an_unknown_task_is_written_anew(
    app: App, monkeypatch: pytest.MonkeyPatch, value: bytes
) -> None:
    """L7, T12b: one that cannot be read ended all sweeping."""
    monkeypatch.setattr("propolis.worker.sweeping.sweeper.SWEEP_EVERY", 0.01)
    engine = await app.client.ready()
    assert isinstance(engine, MemoryEngine)
    odd = Change(kind=KIND, name=record_name(("default", "nobody")), value=value)
    await engine.swap([Swap(changes=(odd,))])
    await engine.put([a_job(task="nobody")])
    async with working(app, unknown_for=SOON), asyncio.timeout(20):
        while not await app.jobs.afind(Filter(reason="broken")):
            await asyncio.sleep(0.001)  # no event shows this state


@pytest.mark.parametrize("scope", [Scope.QUEUE, Scope.TASK])
async def test_a_parked_line_that_is_paused_is_left_alone(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, scope: Scope
) -> None:
    """T12b: each sweep tried it again, and said that 0 jobs are kept as broken."""
    clock, tried = FakeClock(), 0
    app.client._engine = engine = await MemoryEngine(clock=clock).open()
    lease = engine.lease

    async def counted(*args: Any, **options: Any) -> list[Lease]:
        nonlocal tried
        tried += 1
        return await lease(*args, **options)

    await engine.put([a_job(task="nobody")])
    [parked] = await engine.lease({"default": 1}, span=timedelta(minutes=1), holder="other")
    await engine.settle([(parked, Unknown())])
    await engine.put([a_job(task="neighbour")])
    paused = "default" if scope is Scope.QUEUE else "nobody"
    what = {"name": paused} if scope is Scope.QUEUE else {"task": paused}
    await app.queues.apause(**what)
    monkeypatch.setattr(engine, "lease", counted)
    unknown = UnknownTasks(engine, Settings(), (), lambda: clock.now.timestamp())

    for pause in ("0s", "2h", "0s", "0s", "1m", "0s"):
        clock.advance(pause)
        await unknown.watch((("default", "nobody"),))
    assert tried == 2  # after two hours, and after a minute more
    assert "are kept as broken" not in caplog.text
    await app.queues.aresume(**what)
    clock.advance("1m")
    await unknown.watch((("default", "nobody"),))
    [broken] = await app.jobs.afind(Filter(reason="broken"))
    assert broken.task == "nobody"
    assert "1 jobs of 'nobody' are kept as broken" in caplog.text


async def test_an_engine_that_cannot_be_listened_to_is_not_asked_all_the_time(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """L1: it is polled, and that is in the log."""
    asked = 0

    async def wait(*_: Any) -> bool:
        nonlocal asked
        asked += 1
        raise EngineUnavailable("nobody may listen")

    @app.task(result_ttl="1h")
    async def job() -> str:
        return "done"

    await app.ready()
    monkeypatch.setattr(MemoryEngine, "wait", wait)
    monkeypatch.setattr(MemoryEngine, "hears", True)
    async with working(app, poll=timedelta(hours=1)) as worker:
        await until(lambda: "nobody may listen" in caplog.text)
        for _ in range(3):
            handle = await job.aenqueue()
            worker._pump.wake()
            assert await handle.aresult(timeout="20s") == "done"
        assert asked == 1
    async with working(app, poll=timedelta(milliseconds=1)):
        await until(lambda: asked > 3)
        assert await (await job.aenqueue()).aresult(timeout="20s") == "done"
    assert asked == caplog.text.count("nobody may listen")


async def test_a_worker_without_storage_ends_although_a_job_does_not(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """S1.12: else its keeper would hold the leases for ever."""
    running, over = asyncio.Event(), asyncio.Event()

    @app.task
    async def stubborn() -> None:
        running.set()
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue

    async def broken(*_: Any, **__: Any) -> Any:
        raise StorageBroken("the file is gone")

    await app.ready()
    handle = await stubborn.aenqueue()
    monkeypatch.setattr("propolis.worker.slots.DISMISSED_WITHIN", 0.01)
    worker = Worker(app, Settings())
    ended = asyncio.create_task(worker.run())
    await running.wait()
    monkeypatch.setattr(MemoryEngine, "exchange", broken)
    worker._pump.wake()
    async with asyncio.timeout(20):
        with pytest.raises(StorageBroken):
            await ended
    assert f"job {handle.id} does not stop: the worker ends without it" in caplog.text
    over.set()


async def test_a_stop_while_a_failure_is_judged_is_no_failure(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W.6: it was buried, with four repetitions left."""
    reading = asyncio.Event()

    async def slow(*_: Any) -> Any:
        reading.set()
        await asyncio.Event().wait()

    monkeypatch.setattr("propolis.worker.runner.failure_counts", slow)

    @app.task(on_error={ValueError: repeat(5, fixed(0)), KeyError: repeat(1, fixed(0))})
    async def fails() -> None:
        raise ValueError

    handle = await fails.aenqueue()
    async with working(app, grace=timedelta(0)):
        await reading.wait()
    info = await record_of(app, handle.id)
    assert (info.state, info.failures, info.attempts) == (State.READY, 1, 1)
    assert [event.kind for event in info.history] == ["retried", "released"]


async def test_a_backoff_that_raises_for_a_stuck_job_stops_no_clock(app: App) -> None:
    """W.8: it is buried, as one that stops is; no job had a timeout any more."""
    over = asyncio.Event()

    def backoff(_: int) -> float:
        raise KeyError("no such attempt")

    @app.task(timeout="10ms", on_timeout=repeat(3, backoff))
    async def stuck() -> None:
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue

    @app.task(timeout="10ms", on_timeout=dead)
    async def slow() -> None:
        await over.wait()

    async with working(app, stuck_after=timedelta(milliseconds=10)):
        handle = await stuck.aenqueue()
        await until_state(app, handle.id, State.DEAD)
        await until_state(app, (await slow.aenqueue()).id, State.DEAD)
        over.set()
    error = (await record_of(app, handle.id)).error
    assert error is not None
    assert error.type == "KeyError"


async def test_a_clock_that_nobody_watches_ends_the_worker(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gracefully, with an error: else nothing that runs would ever be out of time."""

    def tick(_: Worker) -> bool:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(Worker, "tick", tick)
    async with asyncio.timeout(20):
        with pytest.raises(WorkerFailed, match="a mistake of ours"):
            await Worker(app, Settings()).run()


# --- where no process can be made ------------------------------------------------------------


async def test_nobody_is_buried_because_no_process_can_be_made(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T8: just after the kernel has killed one, memory is short."""

    @app.task
    async def innocent() -> None: ...

    ran = asyncio.Event()
    app.on_finished(lambda *_: ran.set())
    tried = 0

    async def born() -> Child:
        nonlocal tried
        tried += 1
        raise BlockingIOError(errno.EAGAIN, "no process is left")

    monkeypatch.setattr(Child, "born", born)
    await innocent.aenqueue()
    await lose(app)
    async with working(app, app_path="tests.unit.worker.isolated_jobs:app"):
        async with asyncio.timeout(20):
            await ran.wait()
    assert tried > 0


async def test_an_isolated_job_waits_until_a_process_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """T7: it was a failure of each run, and after the last one the job was dead."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    app = load_app("isolated_jobs:app")
    await app.aclose()
    monkeypatch.setattr("propolis.worker.children.suspects.COME_BACK", (0.001, 0.002))
    born, tried = Child.born, 0

    async def scarce() -> Child:
        nonlocal tried
        tried += 1
        if tried < 3:
            raise BlockingIOError(errno.EAGAIN, "no process is left")
        return await born()

    async with working(app) as worker:
        worker._children._end_idle()  # the first one was made at the start
        monkeypatch.setattr(Child, "born", scarce)
        handle = await app.tasks["plain"].aenqueue(1)
        assert await handle.aresult(timeout="60s") == 42
    info = await handle.astatus()
    assert info is not None
    assert (info.attempts, info.failures) == (1, 0)
    assert [event.kind for event in info.history] == ["snoozed", "snoozed"]
    await app.aclose()


async def test_a_supervisor_waits_until_processes_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    started = 0
    make = asyncio.create_subprocess_exec

    async def scarce(*command: Any, **options: Any) -> Any:
        nonlocal started
        started += 1
        if started < 3:
            raise BlockingIOError(errno.EAGAIN, "no process is left")
        return await make(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", scarce)
    monkeypatch.setattr("propolis.worker.supervisor.FIRST_BACKOFF", 0.001)
    command = [sys.executable, "-c", "pass"]
    assert await Supervisor(command, 1, grace=timedelta(0), forever=False).run() == 0
    assert started == 3


async def test_a_supervisor_that_waits_for_a_process_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor(["never"], 1, grace=timedelta(0))

    async def none_is_left(*_: Any, **__: Any) -> Any:
        supervisor.stop()
        raise BlockingIOError(errno.EAGAIN, "no process is left")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", none_is_left)
    assert await supervisor.run() == 0


# --- descriptors that jobs have closed: the whole of it is in test_hostile_jobs.py -------------


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, loop_factory()])
def test_a_loop_that_a_job_has_ended_and_that_goes_on_is_not_deaf(
    make_loop: Callable[[], asyncio.AbstractEventLoop] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W.4: uvloop has other descriptors from then on."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)

    async def work() -> None:
        signals.handle_in_loop({signal.SIGUSR1: lambda: None})
        signals.end_if_deaf()
        asyncio.get_running_loop().call_soon(sys.exit)
        for _ in range(3):
            await asyncio.sleep(0)
            signals.end_if_deaf()

    loop = (make_loop or asyncio.new_event_loop)()
    run_to_the_end(loop, work())
    loop.close()
    assert ended == []
