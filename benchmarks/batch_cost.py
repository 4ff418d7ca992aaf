"""What being a member of a batch costs, and whether filling one takes memory, in one run.

    python benchmarks/batch_cost.py [--jobs 20000] [--repeat 3] [--members 1000000] [--engine postgres]

Prints the time per job to put and to drain the same jobs as plain ones and as members of one batch (bundles
of 100 by exchange, as a worker does), and their ratio; and the same for the CPU that this process and the
server spend, which others on the machine disturb less.  Then fills one batch with `--members` jobs and
prints the memory of this process on the way: it should not grow.  Read the ratios: the speed of a machine
varies.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from harness.storage import tree_cpu_seconds
from propolis import App
from propolis.core.job import Done
from propolis.core.protocols import Engine
from propolis.testing.servers.redis import redis
from propolis.testing.servers.serving import postgres

BUNDLE = 100
SPAN = timedelta(seconds=15)
PAGE = resource.getpagesize()


Used = Callable[[], float]


@contextmanager
def an_engine(kind: str) -> Iterator[tuple[str, Used]]:
    """Its URL, and what tells the seconds of CPU that this process and its server have used."""
    if kind == "sqlite":
        with tempfile.TemporaryDirectory() as folder:
            yield f"sqlite:///{folder}/jobs.db", time.process_time
    elif kind == "redis":
        with redis() as server:
            pid = server.pid
            yield server.url, lambda: time.process_time() + tree_cpu_seconds(pid)
    else:
        with postgres(durable=True, settings=("shared_buffers=256MB", "max_wal_size=4GB")) as server:
            pid = int((server.folder / "data/postmaster.pid").read_text().split("\n", 1)[0])
            yield f"{server.url}?schema=bench", lambda: time.process_time() + tree_cpu_seconds(pid)


class Cost(NamedTuple):
    """Seconds to put and to drain, and seconds of CPU for both."""

    put: float
    drain: float
    put_cpu: float
    drain_cpu: float


def an_app(url: str) -> App:
    app = App(url)

    @app.task(name="noop")
    async def noop(text: str) -> None: ...

    return app


async def drain(engine: Engine, jobs: int) -> None:
    """Lease and settle all of them."""
    done = 0
    wants = {"default": BUNDLE}
    leases = await engine.lease(wants, span=SPAN, holder="bench")
    while leases:
        done += len(leases)
        outcomes = [(lease, Done()) for lease in leases]
        leases = (await engine.exchange(outcomes, wants, span=SPAN, holder="bench")).leases
    assert done == jobs, done


class Watch:
    """Tells what has gone by since it was last asked: seconds, and seconds of CPU."""

    def __init__(self, used: Used) -> None:
        self._used = used
        self._seconds, self._cpu = time.perf_counter(), used()

    def lap(self) -> tuple[float, float]:
        seconds, cpu = time.perf_counter(), self._used()
        gone = seconds - self._seconds, cpu - self._cpu
        self._seconds, self._cpu = time.perf_counter(), cpu
        return gone


async def plain(app: App, jobs: int, used: Used) -> Cost:
    made = list(app.tasks["noop"].many(["x" * 250] * jobs))
    watch = Watch(used)
    await app.client.aput_many(made)
    put, put_cpu = watch.lap()
    await drain(app.client.engine, jobs)
    drained, drain_cpu = watch.lap()
    return Cost(put, drained, put_cpu, drain_cpu)


async def members(app: App, jobs: int, used: Used) -> Cost:
    made = list(app.tasks["noop"].many(["x" * 250] * jobs))
    watch = Watch(used)
    async with app.batch() as b:
        await b.add_many(made)
    put, put_cpu = watch.lap()
    await drain(app.client.engine, jobs)
    drained, drain_cpu = watch.lap()
    status = await b.handle.astatus()
    assert status is not None
    assert status.done == jobs
    await b.handle.adelete()
    return Cost(put, drained, put_cpu, drain_cpu)


def sums(cost: Cost) -> tuple[float, float, float, float]:
    """Both parts together, in the places of the first."""
    return cost.put + cost.drain, 0.0, cost.put_cpu + cost.drain_cpu, 0.0


def ratios(pairs: list[tuple[Cost, Cost]], *places: int) -> list[float]:
    """What a member costs, compared with the plain job of the same turn: the median."""
    return [statistics.median(member[at] / alone[at] for alone, member in pairs) for at in places]


async def compare(url: str, used: Used, jobs: int, repeat: int) -> None:
    app = an_app(url)
    found: dict[str, list[Cost]] = {"plain": [], "member": []}
    await plain(app, 1000, used)  # the first ones pay for plans and caches
    await members(app, 1000, used)
    for turn in range(repeat):
        found["plain"].append(await plain(app, jobs, used))
        found["member"].append(await members(app, jobs, used))
        for kind, rounds in found.items():
            each = Cost(*(seconds / jobs * 1e6 for seconds in rounds[-1]))
            line = f"put {each.put:6.1f} µs ({each.put_cpu:5.1f} of CPU)"
            line += f", drain {each.drain:6.1f} µs ({each.drain_cpu:5.1f} of CPU)"
            print(f"  run {turn + 1}: {kind:6} {line}", file=sys.stderr, flush=True)
    pairs = list(zip(found["plain"], found["member"], strict=True))
    put, drained = (ratios(pairs, 0, 2), ratios(pairs, 1, 3))
    whole = ratios([(Cost(*sums(a)), Cost(*sums(m))) for a, m in pairs], 0, 2)
    for part, (times, cpu) in (("put", put), ("drain", drained), ("both", whole)):
        print(f"{part:6} a member costs {times:5.2f} times a plain job, {cpu:5.2f} times in CPU")
    await app.aclose()


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 2**20


async def fill(url: str, count: int) -> None:
    app = an_app(url)
    noop = app.tasks["noop"]
    seen: list[float] = []
    began = time.perf_counter()
    async with app.batch() as b:
        for n in range(count):
            await b.add(noop, str(n))
            if n % (count // 10) == count // 20:  # not at once: the first pieces make caches
                seen.append(resident_mib())
                print(f"  {n:>9,} added: {seen[-1]:7.1f} MiB", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - began
    grown = max(seen) - seen[0]
    print(f"{count:,} members in {seconds:.0f} s ({count / seconds:,.0f}/s), memory grew by {grown:.1f} MiB")
    await app.aclose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=["postgres", "redis", "sqlite"], default="postgres")
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--members", type=int, default=1_000_000)
    arguments = parser.parse_args()
    with an_engine(arguments.engine) as (url, used):
        if arguments.repeat:
            asyncio.run(compare(url, used, arguments.jobs, arguments.repeat))
        if arguments.members:
            asyncio.run(fill(url, arguments.members))
