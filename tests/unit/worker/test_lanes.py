"""Queues, slots and modes: which job is run, when, and by whom."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import pytest
from tests.unit.worker.working import until, work, working

from propolis import App, Job
from propolis.core.protocols import Exchange
from propolis.engines.memory import MemoryEngine
from propolis.errors import BadSetting
from propolis.worker import Lane, Mode, Settings, Worker
from propolis.worker.pump import BEATEN, MAX_STEPS, STEP_BACK, Pump
from propolis.worker.slots import MAX_BYTES


async def test_a_slow_queue_does_not_disturb_a_fast_one(app: App) -> None:
    """S0.20: each queue has its own slots."""
    release = asyncio.Event()
    fast_done = []

    @app.task(queue="slow")
    async def slow() -> None:
        await release.wait()

    @app.task(queue="fast")
    async def fast(n: int) -> None:
        fast_done.append(n)

    await slow.many([()] * 10).aenqueue()
    async with working(app, lanes=[Lane({"slow": 1}, 2), Lane({"fast": 1}, 2)]):
        await fast.many(range(50)).aenqueue()
        await until(lambda: len(fast_done) == 50)
        assert (await app.queues.acounts())["slow"].running == 2
        release.set()


async def test_queues_that_share_slots_are_served_by_weight(app: App) -> None:
    order = []

    @app.task
    async def note(job: Job) -> None:
        order.append(job.queue)

    for queue in ("light", "heavy"):
        await note.using(queue=queue).many([()] * 300).aenqueue()
    lane = Lane({"light": 1, "heavy": 9}, 1)
    worker = await work(app, lanes=[lane])
    firsts = Counter(next(iter(worker._lanes[0].wants(1))) for _ in range(1000))
    assert 800 < firsts["heavy"] < 980
    assert Counter(order) == {"light": 300, "heavy": 300}


async def test_large_jobs_are_leased_ahead_by_the_bytes_and_not_by_the_hundred(app: App) -> None:
    most = 0

    @app.task
    async def large(text: str) -> None:
        nonlocal most
        most = max(most, len(worker._lanes[0].buffer))

    await large.many(["x" * 250_000] * 100).aenqueue()
    worker = Worker(app, Settings(mode=Mode.UNTIL_EMPTY, lanes=[Lane({"default": 1}, 2)]))
    await worker.run()
    assert 2 < most <= MAX_BYTES / 250_000 + 2


async def watch_exchanges(app: App, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the engine, as over a wire: the bytes leave a turn of the loop later."""
    engine, seen = await app.ready(), list[str]()
    real = engine.exchange  # which `lease` calls as well

    async def over_a_wire(*args: Any, **kwargs: Any) -> Any:
        seen.append("asked")
        await asyncio.sleep(0)
        seen.append("sent")
        return await real(*args, **kwargs)

    monkeypatch.setattr(engine, "exchange", over_a_wire)
    return seen


async def test_the_next_bundle_is_asked_for_before_the_last_is_run(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the engine would have nothing to do while jobs run, and nothing would run while it works."""
    seen = await watch_exchanges(app, monkeypatch)
    monkeypatch.setattr("propolis.worker.slots.TURN", 60.0)

    @app.task
    async def ping(n: int) -> None:
        seen.append("run")

    await ping.many(range(400)).aenqueue()
    worker = Worker(app, Settings(mode=Mode.UNTIL_EMPTY))
    await worker.run()

    runs = [n for n, what in enumerate(seen) if what == "run"]
    assert len(runs) == 400
    first_of_a_large_bundle = next(n for n in runs if seen[n + 1 : n + 20] == ["run"] * 19)
    assert seen[first_of_a_large_bundle - 3 : first_of_a_large_bundle] == ["sent", "asked", "sent"]


async def test_a_few_jobs_start_before_anything_else_is_done(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is over by then goes with the next lease."""
    seen = await watch_exchanges(app, monkeypatch)

    @app.task
    async def ping() -> None:
        seen.append("run")

    async with working(app) as worker:
        await worker._pump.resting.wait()
        seen.clear()
        worker._pump.resting.clear()
        await ping.aenqueue()
        await worker._pump.resting.wait()
    assert seen[:5] == ["asked", "sent", "run", "asked", "sent"]


async def test_concurrency_changes_while_running(app: App) -> None:
    """S2.23."""
    release = asyncio.Event()
    running: Counter[str] = Counter()

    @app.task
    async def hold() -> None:
        running["now"] += 1
        await release.wait()
        running["now"] -= 1

    await hold.many([()] * 20).aenqueue()
    async with working(app, lanes=[Lane({"default": 1}, 2)]) as worker:
        await until(lambda: running["now"] == 2)
        worker.resize("default", 5)
        await until(lambda: running["now"] == 5)
        worker.resize("default", 1)
        release.set()
        await until(lambda: running["now"] == 0)
        await until(lambda: len(worker._lanes[0].slots) == 1)
        with pytest.raises(BadSetting, match="serve"):
            worker.resize("nowhere", 3)
        with pytest.raises(BadSetting, match="at least one"):
            worker.resize("default", 0)


async def test_once_runs_one_job(app: App) -> None:
    """S4.19."""

    @app.task
    async def count() -> None: ...

    await count.many([()] * 3).aenqueue()
    await work(app, mode=Mode.ONCE)
    assert (await app.queues.acounts())["default"].ready == 2


async def test_a_worker_that_serves_for_ever_wakes_up_for_new_jobs(app: App) -> None:
    done = asyncio.Event()

    @app.task
    async def ping() -> None:
        done.set()

    async with working(app, poll=timedelta(seconds=60)):
        await asyncio.sleep(0)
        await ping.aenqueue()
        async with asyncio.timeout(10):
            await done.wait()


class Idle:
    """Workers that wait for a hint, and whose pumps wait after a step back until they are let go.

    They sweep only when they start, so that nothing but a hint wakes them.
    """

    def __init__(self, app: App, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting = 0
        self.leases_asked = 0
        self.back: list[Pump] = []  # those who have stepped back
        self.let_go = asyncio.Event()

        @app.task(result_ttl="1h")
        async def one() -> str:
            return "done"

        self._task = one
        wait, exchange, idle = MemoryEngine.wait, MemoryEngine.exchange, self

        async def counted_wait(self: MemoryEngine, *args: Any, **kwargs: Any) -> bool:
            idle.waiting += 1
            try:
                return await wait(self, *args, **kwargs)
            finally:
                idle.waiting -= 1

        async def counted_exchange(
            self: MemoryEngine, outcomes: Any, wants: dict[str, int], **terms: Any
        ) -> Exchange:
            idle.leases_asked += bool(wants) and not outcomes
            return await exchange(self, outcomes, wants, **terms)

        async def step_back(self: Pump) -> None:
            idle.back.append(self)
            await idle.let_go.wait()

        monkeypatch.setattr("propolis.worker.sweeping.sweeper.SWEEP_EVERY", 3600.0)
        monkeypatch.setattr(MemoryEngine, "wait", counted_wait)
        monkeypatch.setattr(MemoryEngine, "exchange", counted_exchange)
        monkeypatch.setattr(Pump, "_step_back", step_back)

    async def run_one(self, workers: int) -> None:
        """A job that is put when all of them wait, or have stepped back."""
        await until(lambda: self.waiting + len(self.back) == workers)
        assert await (await self._task.aenqueue()).aresult(timeout="20s") == "done"
        await until(lambda: self.waiting + len(self.back) == workers)


async def test_of_many_idle_workers_those_who_are_always_too_late_step_back(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All hear of each job, and few try to lease it; the last of them takes what comes all the same.

    Whoever gets one of BEATEN + 1 jobs goes on; each of the others was too late for all of them.
    """
    idle, workers = Idle(app, monkeypatch), 12
    async with working(app), AsyncExitStack() as others:
        for _ in range(workers - 1):
            await others.enter_async_context(working(app))

        for _ in range(BEATEN + 1):
            await idle.run_one(workers)
        assert idle.back == []

        await idle.run_one(workers)
        stepped_back = len(set(idle.back))
        assert workers - (BEATEN + 1) <= stepped_back < workers

        before = idle.leases_asked
        await idle.run_one(workers)
        # At the hint, and after the job.
        assert 0 < idle.leases_asked - before <= 2 * (workers - stepped_back)

        idle.let_go.set()
        await others.aclose()
        idle.back.clear()
        await idle.run_one(1)


async def test_a_step_back_is_short_and_ends_when_a_job_does(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer with each time that it was too late, up to a bound; what a slot has to settle comes first."""
    longest: list[float] = []

    def uniform(least: float, most: float) -> float:
        assert least == 0
        longest.append(most)
        return 3600.0

    pump = (await work(app))._pump
    monkeypatch.setattr("propolis.worker.pump.random.uniform", uniform)
    for pump._beaten in (BEATEN + 1, BEATEN + 2, BEATEN + 1000):
        pump.wake()
        async with asyncio.timeout(20):
            await pump._step_back()
    assert longest == [STEP_BACK, 2 * STEP_BACK, MAX_STEPS * STEP_BACK]


async def test_a_worker_that_gets_each_job_it_hears_of_does_not_step_back(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many turns it takes to settle them, because others end meanwhile."""
    steps: list[Pump] = []

    async def step_back(self: Pump) -> None:
        steps.append(self)

    def slow(verb: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
        async def act(*args: Any, **kwargs: Any) -> object:
            await asyncio.sleep(0.003)
            return await verb(*args, **kwargs)

        return act

    monkeypatch.setattr(Pump, "_step_back", step_back)
    monkeypatch.setattr(MemoryEngine, "settle", slow(MemoryEngine.settle))
    monkeypatch.setattr(MemoryEngine, "exchange", slow(MemoryEngine.exchange))

    @app.task(result_ttl="1h")
    async def some(milliseconds: int) -> None:
        if milliseconds:
            await asyncio.sleep(milliseconds / 1000)

    async with working(app):
        for _ in range(5):
            handles = await some.many(range(0, 20, 2)).aenqueue()
            for handle in handles:
                await handle.aresult(timeout="20s")
    assert steps == []


async def test_what_comes_to_a_lane_that_is_full_wakes_nobody(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not too late for it: there was no room."""
    steps: list[Pump] = []

    async def step_back(self: Pump) -> None:
        steps.append(self)

    monkeypatch.setattr(Pump, "_step_back", step_back)
    go_on = asyncio.Event()

    @app.task(queue="slow")
    async def slow() -> None:
        await go_on.wait()

    @app.task(queue="fast", result_ttl="1h")
    async def fast() -> str:
        return "done"

    async with working(app, lanes=[Lane({"slow": 1}, 1), Lane({"fast": 1}, 1)]):
        for _ in range(20):
            await slow.aenqueue()
        for _ in range(20):
            await slow.aenqueue()
            await asyncio.sleep(0.001)
        assert await (await fast.aenqueue()).aresult(timeout="20s") == "done"
        go_on.set()
    assert steps == []


async def test_a_delayed_job_starts_when_it_is_due_and_not_at_the_next_poll(app: App) -> None:
    """S0.11, S3.28: the worker knows when the next one is due."""
    started: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    @app.task
    async def ping() -> None:
        started.set_result(time.monotonic())

    async with working(app, poll=timedelta(seconds=60)):
        sent = time.monotonic()
        await ping.using(delay="300ms").aenqueue()
        async with asyncio.timeout(10):
            assert await started - sent >= 0.29


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lanes": []}, "at least one queue"),
        ({"lanes": [Lane({"a": 1}, 0)]}, "at least 1"),
        ({"lanes": [Lane({"a": 0}, 1)]}, "at least 1"),
        ({"lanes": [Lane({"a": 1}, 9_000), Lane({"b": 1}, 9_000)]}, "10,000 slots"),
        ({"lanes": [Lane({"a": 1}, 1), Lane({"a": 1}, 1)]}, "two lanes"),
        ({"lease": timedelta(milliseconds=1)}, "too short"),
    ],
)
async def test_settings_that_cannot_work_are_refused(
    app: App, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadSetting, match=message):
        Worker(app, Settings(**settings))
