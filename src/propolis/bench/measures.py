"""What is measured, step by step; each step gives figures, and says what it is about to do."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from msgspec import Struct

from propolis.bench.figures import Figure, percentile
from propolis.bench.serving import Drained, drain, served, settings
from propolis.bench.target import BenchPlace, BenchTarget, Raw
from propolis.bench.tasks import PAYLOAD, Tasks
from propolis.worker.worker import Worker

CALLERS = 64
BULK = 10_000  # jobs that one call puts
HELD = 10  # jobs that run when the worker is killed
PATIENCE = 60.0  # seconds for one latency, or one recovery: what takes longer is broken, not slow

Report = Callable[[str], None]


class Wanted(Struct, frozen=True, kw_only=True):
    """How much of everything."""

    jobs: int = 20_000
    backlog: int = 0
    slots: int = 10
    singles: int = 500
    latencies: int = 200
    load_seconds: float = 5.0
    load_rate: float | None = None


class Bench:
    """All steps on one place.  The later ones use what the earlier ones have found."""

    def __init__(self, target: BenchTarget, place: BenchPlace, wanted: Wanted, report: Report) -> None:
        self._target = target
        self._place = place
        self._wanted = wanted
        self._report = report
        self._raw: Raw | None = None
        self._drained = 0.0

    async def run(self, step: str) -> list[Figure]:
        return await STEPS[step](self)

    # --- putting -------------------------------------------------------------------------

    async def enqueue(self) -> list[Figure]:
        """One by one; from many callers at once; in bulk."""
        wanted = self._wanted
        async with self._tasks() as tasks:
            await tasks.noop.aenqueue(PAYLOAD)
            self._report(f"putting {wanted.singles:,} jobs one by one")
            one = await _rate(wanted.singles, self._one_by_one(tasks, wanted.singles))
            self._report(f"putting {wanted.jobs:,} jobs from {CALLERS} callers at once")
            each = wanted.jobs // CALLERS
            callers = (self._one_by_one(tasks, each) for _ in range(CALLERS))
            together = await _rate(each * CALLERS, _all(callers))
            self._report(f"putting {wanted.jobs:,} jobs in bulk")
            bulk = await _rate(wanted.jobs, self._fill(tasks, wanted.jobs))
            await self._empty(tasks)
        raw = self._raw.bulk if self._raw else None
        return [
            Figure("enqueue, one by one", one, "jobs/s"),
            Figure(f"enqueue, {CALLERS} callers", together, "jobs/s"),
            Figure("enqueue, bulk", bulk, "jobs/s", raw),
        ]

    async def _one_by_one(self, tasks: Tasks, jobs: int) -> None:
        for _ in range(jobs):
            await tasks.noop.aenqueue(PAYLOAD)

    async def _fill(self, tasks: Tasks, jobs: int) -> None:
        for start in range(0, jobs, BULK):
            await tasks.noop.many([PAYLOAD] * min(BULK, jobs - start)).aenqueue()

    async def _empty(self, tasks: Tasks) -> None:
        await (await tasks.app.client.ready()).drop(self._place.queue)

    # --- running -------------------------------------------------------------------------

    async def raw(self) -> list[Figure]:
        """The hand-written loop, whose figures stand beside those of the other steps."""
        self._report(f"the raw loop: {self._wanted.jobs:,} jobs")
        self._raw = await self._target.raw(self._place, self._wanted.jobs, PAYLOAD)
        return []

    async def drain(self) -> list[Figure]:
        """A worker with nothing but no-ops to run."""
        jobs, backlog = self._wanted.jobs, self._wanted.backlog
        async with self._tasks() as tasks:
            self._report(f"filling a queue with {jobs + backlog:,} jobs")
            await self._fill(tasks, jobs + backlog)
            self._report(f"a worker runs {jobs:,} jobs")
            if self._place.shared:
                done = await self._drained_elsewhere(jobs)
            else:
                worker = Worker(tasks.app, settings(self._place, self._wanted.slots))
                done = await drain(tasks, worker, jobs)
            await self._empty(tasks)
        self._drained = jobs / done.seconds
        return [
            Figure("drain", self._drained, "jobs/s", self._raw.drain if self._raw else None),
            Figure("worker CPU per job", done.cpu / jobs * 1e6, "µs"),
            Figure("worker memory", done.rss_mb, "MB"),
        ]

    async def _drained_elsewhere(self, jobs: int) -> Drained:
        async with served(self._place, self._wanted.slots, "drain", jobs) as worker:
            return Drained(**await worker.next_line())

    # --- waiting -------------------------------------------------------------------------

    async def idle(self) -> list[Figure]:
        """From sent to started, when the worker has nothing else to do."""
        self._report(f"sending {self._wanted.latencies:,} jobs to an idle worker")
        async with self._tasks() as tasks, self._listening(tasks) as started:
            found = []
            for turn in range(self._wanted.latencies + 10):
                await asyncio.sleep(random.uniform(0.005, 0.02))  # long enough to fall idle
                await tasks.stamp.aenqueue(time.monotonic(), PAYLOAD)
                async with asyncio.timeout(PATIENCE):
                    latency = await started()
                if turn >= 10:  # the first ones warm everything up
                    found.append(latency)
        return _latencies("idle", found)

    async def load(self) -> list[Figure]:
        """From sent to started, under a steady load."""
        rate = self._wanted.load_rate or max(20.0, min(2000.0, self._drained * 0.1))
        seconds = self._wanted.load_seconds
        self._report(f"a steady load of {rate:,.0f} jobs/s for {seconds:.0f} s")
        async with self._tasks() as tasks, self._listening(tasks) as started:
            count = int(rate * seconds)
            sending = asyncio.create_task(self._send_steadily(tasks, rate, count))
            found = []
            for _ in range(count):
                async with asyncio.timeout(PATIENCE):
                    found.append(await started())
            await sending
        return [Figure("steady load", rate, "jobs/s"), *_latencies("under it", found)]

    async def _send_steadily(self, tasks: Tasks, rate: float, count: int) -> None:
        began = time.monotonic()
        sending: set[asyncio.Task[Any]] = set()
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            # The time at which it should be sent: a sender that falls behind must not hide the wait.
            sent = asyncio.create_task(tasks.stamp.aenqueue(began + number / rate, PAYLOAD))
            sending.add(sent)
            sent.add_done_callback(sending.discard)
        await asyncio.gather(*sending)

    async def recovery(self) -> list[Figure]:
        """A worker is killed in the middle of its jobs: how long until all of them run again?"""
        if not self._place.shared:
            return []
        self._report(f"killing a worker in the middle of {HELD} jobs, and waiting until they run again")
        async with self._tasks() as tasks, served(self._place, HELD, "serve") as first:
            for _ in range(HELD):
                await tasks.hold.aenqueue()
            for _ in range(HELD):
                await first.next_line()
            async with served(self._place, HELD, "serve") as second, asyncio.timeout(PATIENCE):
                first.kill()
                began = time.perf_counter()
                for _ in range(HELD):
                    await second.next_line()
                took = time.perf_counter() - began
        return [Figure("running again after kill -9", took, "s")]

    async def memory(self) -> list[Figure]:
        """What a worker needs that has never run anything."""
        if not self._place.shared:
            return []
        self._report("starting an idle worker")
        async with served(self._place, self._wanted.slots, "serve") as worker:
            return [Figure("memory of an idle worker", worker.rss_mb, "MB")]

    # --- parts ---------------------------------------------------------------------------

    @asynccontextmanager
    async def _tasks(self) -> AsyncIterator[Tasks]:
        tasks = Tasks(self._place)
        try:
            yield tasks
        finally:
            await tasks.app.aclose()

    @asynccontextmanager
    async def _listening(self, tasks: Tasks) -> AsyncIterator[Callable[[], Coroutine[Any, Any, float]]]:
        """A worker, and a way to wait for the next latency that it has seen."""
        if self._place.shared:
            async with served(self._place, self._wanted.slots, "serve") as worker:
                yield worker.next_line
            return
        heard: asyncio.Queue[float] = asyncio.Queue()
        tasks.heard = heard.put_nowait
        own = Worker(tasks.app, settings(self._place, self._wanted.slots))
        running = asyncio.create_task(own.run())
        yield heard.get
        own.stop()
        await running


STEPS: dict[str, Callable[[Bench], Coroutine[Any, Any, list[Figure]]]] = {
    "raw": Bench.raw,
    "enqueue": Bench.enqueue,
    "drain": Bench.drain,
    "idle": Bench.idle,
    "load": Bench.load,
    "memory": Bench.memory,
    "recovery": Bench.recovery,
}


def _latencies(when: str, found: list[float]) -> list[Figure]:
    return [
        Figure(f"sent to started, {when}, p50", percentile(found, 0.50) * 1e3, "ms"),
        Figure(f"sent to started, {when}, p99", percentile(found, 0.99) * 1e3, "ms"),
    ]


async def _rate(jobs: int, work: Coroutine[Any, Any, object]) -> float:
    began = time.perf_counter()
    await work
    return jobs / (time.perf_counter() - began)


async def _all(coroutines: Any) -> None:
    await asyncio.gather(*coroutines)
