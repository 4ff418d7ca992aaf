"""What a job costs when there is more of everything: waiting jobs, history, queues, workers, bytes.

    python benchmarks/scale.py sqlite postgres redis [--only backlog] [--jobs 20000] [--most 1000000]
                                                     [--write docs/benchmarks.md]

Each on a private storage of its own.  Each line is one size of one dimension: what a worker process drains
there, the median of three drains, its CPU and that of the server per job, and the rate against that of the
smallest size of the same run.  What grows faster than a logarithm wants an explanation.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from harness.charts import Curve, curves
from harness.document import between_markers
from harness.private import KINDS, Private, private
from harness.results import machine
from propolis.bench.figures import percentile
from propolis.bench.serving import Drained, served
from propolis.bench.target import BenchPlace, bench_target
from propolis.bench.tasks import PAYLOAD, Tasks
from propolis.core.envelope import Envelope
from propolis.core.job import Done
from propolis.engines import open_engine

SLOTS = 10
BUNDLE = 1000
TURNS = 3
MAX_BYTES = 300_000_000  # of all jobs of one size together
WORK_US = 100
SPAN = timedelta(minutes=5)
KEEP = timedelta(days=1)


class Point(Struct, frozen=True):
    """One size of one dimension; `value` is jobs/s, or ms where the dimension is a latency."""

    dimension: str
    size: int
    value: float
    unit: str
    cpu_us: float | None = None
    server_us: float | None = None


Measure = Callable[[Private, int, int], Coroutine[Any, Any, Point]]


async def backlog(storage: Private, jobs: int, size: int) -> Point:
    """So many jobs wait behind those that are drained."""
    async with place_on(storage) as place:
        return await drained("backlog", storage, place, jobs, size, behind=size)


async def history(storage: Private, jobs: int, size: int) -> Point:
    """So many ended jobs are kept."""
    async with place_on(storage) as place:
        await fill(place, size)
        await archive(place)
        return await drained("history", storage, place, jobs, size)


async def queues(storage: Private, jobs: int, size: int) -> Point:
    """So many other queues hold a few jobs each."""
    async with place_on(storage) as place:
        async with tasks_at(place) as tasks:
            engine = await tasks.app.client.ready()
            others = (tasks.noop.using(queue=f"{place.queue}_{n}").job(PAYLOAD) for n in range(size - 1))
            for bundle in bundles(others):
                await engine.put(bundle)
        return await drained("queues", storage, place, jobs, size)


async def payload(storage: Private, jobs: int, size: int) -> Point:
    """Jobs of so many bytes."""
    jobs = min(jobs, MAX_BYTES // TURNS // size)
    async with place_on(storage) as place:
        return await drained("payload", storage, place, jobs, size, text="x" * size)


async def busy(storage: Private, jobs: int, size: int) -> Point:
    """So many worker processes share no-ops."""
    return await shared("busy", storage, jobs, size, work_us=0)


async def working(storage: Private, jobs: int, size: int) -> Point:
    """So many worker processes share jobs that compute for a moment."""
    return await shared("working", storage, jobs, size, work_us=WORK_US)


async def shared(dimension: str, storage: Private, jobs: int, size: int, *, work_us: int) -> Point:
    """Each runs its share; there are more jobs, so that none of them comes too late."""
    async with place_on(storage) as place:
        found = []
        for _ in range(TURNS):
            await top_up(place, jobs * (size + 1), work_us=work_us)
            began = storage.cpu_seconds()
            shares = await asyncio.gather(*(drain(place, jobs) for _ in range(size)))
            server = storage.cpu_seconds() - began
            together = Drained(max(each.seconds for each in shares), sum(each.cpu for each in shares), 0.0)
            found.append(point(dimension, size, jobs * size, together, server))
        return middle(found)


async def idle(storage: Private, jobs: int, size: int) -> Point:  # noqa: ARG001
    """So many idle worker processes; how soon does a job start on one of them?"""
    async with place_on(storage) as place, contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(served(place, 1, "serve")) for _ in range(size)]
        tasks = await stack.enter_async_context(tasks_at(place))
        heard: asyncio.Queue[float] = asyncio.Queue()
        listening = [asyncio.create_task(listen(worker.next_line, heard)) for worker in workers]
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
    "working": (working, [1, 2, 4]),
    "idle": (idle, [1, 4, 16, 64]),
}


TITLES = {
    "backlog": "Jobs waiting",
    "history": "Ended jobs kept",
    "queues": "Queues",
    "payload": "Bytes of a job",
    "busy": "Worker processes that share no-ops",
    "working": f"Worker processes that share jobs of {WORK_US} µs",
    "idle": "Idle worker processes",
}


# --- parts -------------------------------------------------------------------------------


def place_on(storage: Private) -> contextlib.AbstractAsyncContextManager[BenchPlace]:
    return bench_target(storage.url).place(storage.url)


@contextlib.asynccontextmanager
async def tasks_at(place: BenchPlace) -> AsyncIterator[Tasks]:
    tasks = Tasks(place)
    try:
        yield tasks
    finally:
        await tasks.app.aclose()


def bundles(jobs: Iterator[Envelope]) -> Iterator[list[Envelope]]:
    bundle: list[Envelope] = []
    for job in jobs:
        bundle.append(job)
        if len(bundle) == BUNDLE:
            yield bundle
            bundle = []
    if bundle:
        yield bundle


async def fill(place: BenchPlace, jobs: int, text: str = PAYLOAD, work_us: int = 0) -> None:
    async with tasks_at(place) as tasks:
        engine = await tasks.app.client.ready()
        one = partial(tasks.work.job, work_us) if work_us else partial(tasks.noop.job, text)
        for bundle in bundles(one() for _ in range(jobs)):
            await engine.put(bundle)


async def top_up(place: BenchPlace, jobs: int, text: str = PAYLOAD, work_us: int = 0) -> None:
    """So many wait then: a worker that is stopped has run a few more than it was asked for."""
    engine = await open_engine(place.url)
    counts = (await engine.queues()).get(place.queue)
    await engine.close()
    await fill(place, jobs - (counts.ready if counts else 0), text, work_us)


async def archive(place: BenchPlace) -> None:
    """Run everything that waits, and keep it."""
    engine = await open_engine(place.url)
    wants = {place.queue: BUNDLE}
    leases = await engine.lease(wants, span=SPAN, holder="bench")
    while leases:
        outcomes = [(lease, Done(keep=KEEP)) for lease in leases]
        leases = (await engine.exchange(outcomes, wants, span=SPAN, holder="bench")).leases
    await engine.close()


async def drain(place: BenchPlace, jobs: int) -> Drained:
    async with served(place, SLOTS, "drain", jobs) as worker:
        return Drained(**await worker.next_line())


async def listen(next_line: Callable[[], Coroutine[Any, Any, float]], heard: asyncio.Queue[float]) -> None:
    while True:
        heard.put_nowait(await next_line())


async def drained(
    dimension: str,
    storage: Private,
    place: BenchPlace,
    jobs: int,
    size: int,
    *,
    behind: int = 0,
    text: str = PAYLOAD,
) -> Point:
    found = []
    for _ in range(TURNS):
        await top_up(place, jobs + behind, text)
        began = storage.cpu_seconds()
        done = await drain(place, jobs)
        found.append(point(dimension, size, jobs, done, storage.cpu_seconds() - began))
    return middle(found)


def middle(found: list[Point]) -> Point:
    return sorted(found, key=cost)[len(found) // 2]


def point(dimension: str, size: int, jobs: int, done: Drained, server: float) -> Point:
    each = 1e6 / jobs
    return Point(dimension, size, jobs / done.seconds, "jobs/s", done.cpu * each, server * each)


def shown(point: Point, first: Point) -> str:
    cpu = "" if point.cpu_us is None else f"{point.cpu_us:8.1f} + {point.server_us or 0:.1f} µs CPU/job"
    return (
        f"{point.dimension:8} {point.size:>12,} {point.value:12,.1f} {point.unit:6} "
        f"{point.value / first.value:6.0%} of the first {cpu}"
    )


async def measure(storage: Private, name: str, jobs: int, most: int) -> list[Point]:
    function, sizes = DIMENSIONS[name]
    points: list[Point] = []
    for size in (size for size in sizes if size <= most):
        points.append(await function(storage, jobs, size))
        print(shown(points[-1], points[0]), flush=True)
    return points


# --- what is written ---------------------------------------------------------------------


def cost(point: Point) -> float:
    """What a reader should look at: a rate also tells what else went on."""
    return point.value if point.cpu_us is None else point.cpu_us + (point.server_us or 0.0)


def section(found: dict[str, list[Point]], chosen: list[str], jobs: int, folder: str) -> str:
    def part(name: str) -> str:
        title = TITLES[name]
        return f"**{title}**\n\n![{title}]({folder}/scale-{name}.svg)\n\n{table(found, name)}"

    about = f"{jobs:,} no-op jobs drained at each size; CPU of the worker + CPU of the server. {machine()}."
    return "\n\n".join([about, *map(part, chosen)])


def table(found: dict[str, list[Point]], name: str) -> str:
    """A row for each size: the cost, and the rate beside it."""
    columns = [{each.size: each for each in points if each.dimension == name} for points in found.values()]
    lines = [f"| {name} | {' | '.join(found)} |", f"| --: |{' --: |' * len(found)}"]
    lines += [
        f"| {size:,} | {' | '.join(cell(points.get(size)) for points in columns)} |"
        for size in sorted({size for points in columns for size in points})
    ]
    return "\n".join(lines)


def cell(point: Point | None) -> str:
    if point is None:
        return "–"
    if point.cpu_us is None:
        return f"{point.value:.1f} {point.unit}"
    return f"{point.cpu_us:.1f} + {point.server_us or 0:.1f} µs, {point.value:,.0f}/s"


def chart(found: dict[str, list[Point]], name: str) -> str:
    drawn = [
        Curve(kind, [(each.size, cost(each)) for each in points if each.dimension == name])
        for kind, points in found.items()
    ]
    unit = "ms from sent to started, median" if name == "idle" else "µs of CPU per job, worker and server"
    return curves(TITLES[name], unit, drawn)


def write(measured: dict[str, list[Point]], jobs: int, document: Path) -> None:
    """What was not measured this time stays as it was."""
    folder = document.with_suffix("")
    found = merged(earlier(folder / "scale.json"), measured)
    chosen = [name for name in DIMENSIONS if any(each.dimension == name for each in chain(*found.values()))]
    for name in chosen:
        (folder / f"scale-{name}.svg").write_text(chart(found, name))
    points = {kind: [asdict(each) for each in points] for kind, points in found.items()}
    (folder / "scale.json").write_text(json.dumps(points, indent=1) + "\n")
    text = section(found, chosen, jobs, folder.name)
    document.write_text(between_markers(document.read_text(), "scale", text, "scale.py"))


def earlier(file: Path) -> dict[str, list[Point]]:
    return msgspec.json.decode(file.read_bytes(), type=dict[str, list[Point]]) if file.exists() else {}


def merged(old: dict[str, list[Point]], new: dict[str, list[Point]]) -> dict[str, list[Point]]:
    both = {kind: [*new.get(kind, ())] for kind in [*old, *(kind for kind in new if kind not in old)]}
    for kind, points in old.items():
        measured = {each.dimension for each in both[kind]}
        both[kind] += [each for each in points if each.dimension not in measured]
    return both


def main(arguments: argparse.Namespace) -> None:
    found: dict[str, list[Point]] = {}
    for kind in arguments.where:
        print(kind, flush=True)
        for name in arguments.only or DIMENSIONS:
            with private(kind) as storage:  # a new one, which does not tidy up after the last dimension
                points = asyncio.run(measure(storage, name, arguments.jobs, arguments.most))
            found[kind] = [*found.get(kind, ()), *points]
    if arguments.write:
        write(found, arguments.jobs, arguments.write)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("where", nargs="+", choices=[kind for kind in KINDS if kind != "memory"])
    parser.add_argument("--only", action="append", choices=[*DIMENSIONS], help="may be given again")
    parser.add_argument("--jobs", type=int, default=20000, help="drained at each size")
    parser.add_argument("--most", type=int, default=1_000_000, help="the largest size")
    parser.add_argument("--write", type=Path, help="put tables and charts into this document")
    main(parser.parse_args())
