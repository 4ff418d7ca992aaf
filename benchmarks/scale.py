"""What a job costs when there is more of everything: waiting jobs, history, queues, workers, bytes.

    python benchmarks/scale.py sqlite:///bench.db [--only backlog] [--jobs 5000] [--most 1000000]
    python benchmarks/scale.py postgres            a private server, with fsync on

Each line is one size of one dimension: what a worker process drains there, its CPU per job, and both against
the smallest size of the same run.  What grows faster than a logarithm wants an explanation.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from skep.bench.figures import machine, percentile
from skep.bench.ground import Place, ground_of
from skep.bench.serving import Drained, served
from skep.bench.tasks import PAYLOAD, Tasks
from skep.engines import open_engine
from skep.job import Done, Job
from skep.testing.servers import postgres

SLOTS = 10
BUNDLE = 1000
SPAN = timedelta(minutes=5)
KEEP = timedelta(days=1)


class Point(Struct, frozen=True):
    """One size of one dimension; `value` is jobs/s, or ms where the dimension is a latency."""

    dimension: str
    size: int
    value: float
    unit: str
    cpu_us: float | None = None


Measure = Callable[[str, int, int], Coroutine[Any, Any, Point]]


async def backlog(url: str, jobs: int, size: int) -> Point:
    """So many jobs wait behind those that are drained."""
    async with ground_of(url).place(url) as place:
        await fill(place, jobs + size)
        return drained("backlog", size, jobs, await drain(place, jobs))


async def history(url: str, jobs: int, size: int) -> Point:
    """So many ended jobs are kept."""
    async with ground_of(url).place(url) as place:
        await fill(place, size)
        await archive(place)
        await fill(place, jobs)
        return drained("history", size, jobs, await drain(place, jobs))


async def queues(url: str, jobs: int, size: int) -> Point:
    """So many other queues hold a few jobs each."""
    async with ground_of(url).place(url) as place:
        async with tasks_at(place) as tasks:
            engine = await tasks.app.ready()
            others = (tasks.noop.using(queue=f"{place.queue}_{n}").job(PAYLOAD) for n in range(size - 1))
            for bundle in bundles(others):
                await engine.put(bundle)
        await fill(place, jobs)
        return drained("queues", size, jobs, await drain(place, jobs))


async def payload(url: str, jobs: int, size: int) -> Point:
    """Jobs of so many bytes."""
    async with ground_of(url).place(url) as place:
        await fill(place, jobs, "x" * size)
        return drained("payload", size, jobs, await drain(place, jobs))


async def busy(url: str, jobs: int, size: int) -> Point:
    """So many worker processes share the work."""
    async with ground_of(url).place(url) as place:
        await fill(place, jobs * size)
        # Each runs its share; who is done early leaves the rest of the machine to the others.
        shares = [asyncio.create_task(drain(place, jobs // 2)) for _ in range(size)]
        found = await asyncio.gather(*shares)
        slowest = max(each.seconds for each in found)
        cpu = sum(each.cpu for each in found)
        return drained("busy", size, jobs // 2 * size, Drained(slowest, cpu, 0.0))


async def idle(url: str, jobs: int, size: int) -> Point:  # noqa: ARG001
    """So many idle worker processes; how soon does a job start on one of them?"""
    async with ground_of(url).place(url) as place, contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(served(place, 1, "serve")) for _ in range(size)]
        tasks = await stack.enter_async_context(tasks_at(place))
        heard: asyncio.Queue[float] = asyncio.Queue()
        listening = [asyncio.create_task(listen(worker.told, heard)) for worker in workers]
        found = []
        for _ in range(100):
            await tasks.stamp.aenqueue(time.monotonic(), PAYLOAD)
            found.append(await asyncio.wait_for(heard.get(), 60))
            await asyncio.sleep(0.01)  # long enough for all of them to fall idle again
        for task in listening:
            task.cancel()
        return Point("idle", size, percentile(found, 0.5) * 1e3, "ms")


DIMENSIONS: dict[str, tuple[Measure, list[int]]] = {
    "backlog": (backlog, [1_000, 10_000, 100_000, 1_000_000, 10_000_000]),
    "history": (history, [0, 10_000, 100_000, 1_000_000]),
    "queues": (queues, [1, 10, 100, 1_000, 10_000]),
    "payload": (payload, [100, 1_000, 10_000, 100_000]),
    "busy": (busy, [1, 2, 4]),
    "idle": (idle, [1, 4, 16, 64]),
}


# --- parts -------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def tasks_at(place: Place) -> AsyncIterator[Tasks]:
    tasks = Tasks(place)
    try:
        yield tasks
    finally:
        await tasks.app.aclose()


def bundles(jobs: Iterator[Job]) -> Iterator[list[Job]]:
    bundle: list[Job] = []
    for job in jobs:
        bundle.append(job)
        if len(bundle) == BUNDLE:
            yield bundle
            bundle = []
    if bundle:
        yield bundle


async def fill(place: Place, jobs: int, text: str = PAYLOAD) -> None:
    async with tasks_at(place) as tasks:
        engine = await tasks.app.ready()
        for bundle in bundles(tasks.noop.job(text) for _ in range(jobs)):
            await engine.put(bundle)


async def archive(place: Place) -> None:
    """Run everything that waits, and keep it."""
    engine = await open_engine(place.url)
    wants = {place.queue: BUNDLE}
    leases = await engine.lease(wants, span=SPAN, holder="bench")
    while leases:
        outcomes = [(lease, Done(keep=KEEP)) for lease in leases]
        leases = (await engine.exchange(outcomes, wants, span=SPAN, holder="bench")).leases
    await engine.close()


async def drain(place: Place, jobs: int) -> Drained:
    async with served(place, SLOTS, "drain", jobs) as worker:
        return Drained(**await worker.told())


async def listen(told: Callable[[], Coroutine[Any, Any, float]], heard: asyncio.Queue[float]) -> None:
    while True:
        heard.put_nowait(await told())


def drained(dimension: str, size: int, jobs: int, done: Drained) -> Point:
    return Point(dimension, size, jobs / done.seconds, "jobs/s", done.cpu / jobs * 1e6)


def shown(point: Point, first: Point) -> str:
    cpu = "" if point.cpu_us is None else f"{point.cpu_us:8.1f} µs CPU/job"
    return (
        f"{point.dimension:8} {point.size:>12,} {point.value:12,.1f} {point.unit:6} "
        f"{point.value / first.value:6.0%} of the first {cpu}"
    )


async def measure(url: str, chosen: list[str], jobs: int, most: int) -> list[Point]:
    found: list[Point] = []
    for name in chosen:
        function, sizes = DIMENSIONS[name]
        points: list[Point] = []
        for size in (size for size in sizes if size <= most):
            points.append(await function(url, jobs, size))
            print(shown(points[-1], points[0]), flush=True)
        found += points
    return found


@contextlib.contextmanager
def target(where: str) -> Iterator[str]:
    """A URL as it is, or a private server of this kind."""
    if where != "postgres":
        yield where
        return
    with postgres(durable=True, settings=("shared_buffers=256MB", "max_wal_size=4GB")) as server:
        yield server.url


def main(arguments: argparse.Namespace) -> None:
    with target(arguments.where) as url:
        chosen = arguments.only or [*DIMENSIONS]
        points = asyncio.run(measure(url, chosen, arguments.jobs, arguments.most))
    if arguments.json:
        document = {"machine": machine(), "points": [asdict(point) for point in points]}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written to {arguments.json}", file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("where", help="the URL of an engine, or: postgres")
    parser.add_argument("--only", action="append", choices=[*DIMENSIONS], help="may be given again")
    parser.add_argument("--jobs", type=int, default=5000, help="drained at each size")
    parser.add_argument("--most", type=int, default=1_000_000, help="the largest size")
    parser.add_argument("--json", type=Path, help="write the points to this file")
    main(parser.parse_args())
