"""What being a member of a batch costs, and whether filling one takes memory, in one run.

    python benchmarks/batch_cost.py [--jobs 20000] [--repeat 3] [--members 1000000] [--engine postgres]

Prints the time per job to put and to drain the same jobs as plain ones and as members of one batch (bundles
of 100 by exchange, as a worker does), and their ratio.  Then fills one batch with `--members` jobs and
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
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from skep import App
from skep.broker import Engine
from skep.job import Done
from skep.testing.servers import postgres

BUNDLE = 100
SPAN = timedelta(seconds=15)
PAGE = resource.getpagesize()


@contextmanager
def engine_url(kind: str) -> Iterator[str]:
    if kind == "sqlite":
        with tempfile.TemporaryDirectory() as folder:
            yield f"sqlite:///{folder}/jobs.db"
    else:
        with postgres(durable=True, settings=("shared_buffers=256MB", "max_wal_size=4GB")) as server:
            yield f"{server.url}?schema=bench"


def an_app(url: str) -> App:
    app = App(url)

    @app.task(name="noop")
    async def noop(text: str) -> None: ...

    return app


async def drain(engine: Engine, jobs: int) -> float:
    """Seconds to lease and settle all of them."""
    began, done = time.perf_counter(), 0
    wants = {"default": BUNDLE}
    leases = await engine.lease(wants, span=SPAN, holder="bench")
    while leases:
        done += len(leases)
        outcomes = [(lease, Done()) for lease in leases]
        leases = (await engine.exchange(outcomes, wants, span=SPAN, holder="bench")).leases
    assert done == jobs, done
    return time.perf_counter() - began


async def plain(app: App, jobs: int) -> tuple[float, float]:
    made = list(app.tasks["noop"].many(["x" * 250] * jobs))
    began = time.perf_counter()
    await app.aput_many(made)
    put = time.perf_counter() - began
    return put, await drain(app.engine, jobs)


async def members(app: App, jobs: int) -> tuple[float, float]:
    made = list(app.tasks["noop"].many(["x" * 250] * jobs))
    began = time.perf_counter()
    async with app.batch() as b:
        await b.add_many(made)
    put = time.perf_counter() - began
    drained = await drain(app.engine, jobs)
    status = await b.handle.astatus()
    assert status is not None
    assert status.done == jobs
    await b.handle.adelete()
    return put, drained


async def compare(url: str, jobs: int, repeat: int) -> None:
    app = an_app(url)
    found: dict[str, list[tuple[float, float]]] = {"plain": [], "member": []}
    await plain(app, 1000)  # the first ones pay for plans and caches
    for turn in range(repeat):
        found["plain"].append(await plain(app, jobs))
        found["member"].append(await members(app, jobs))
        for kind, rounds in found.items():
            put, drained = rounds[-1]
            each = f"put {put / jobs * 1e6:6.1f} µs, drain {drained / jobs * 1e6:6.1f} µs"
            print(f"  run {turn + 1}: {kind:6} {each}", file=sys.stderr, flush=True)
    for part, place in (("put", 0), ("drain", 1)):
        ratios = [m[place] / p[place] for p, m in zip(found["plain"], found["member"], strict=True)]
        print(f"{part:6} a member costs {statistics.median(ratios):5.2f} times a plain job")
    whole = [sum(m) / sum(p) for p, m in zip(found["plain"], found["member"], strict=True)]
    print(f"{'both':6} a member costs {statistics.median(whole):5.2f} times a plain job")
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
    parser.add_argument("--engine", choices=["postgres", "sqlite"], default="postgres")
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--members", type=int, default=1_000_000)
    arguments = parser.parse_args()
    with engine_url(arguments.engine) as url:
        if arguments.repeat:
            asyncio.run(compare(url, arguments.jobs, arguments.repeat))
        if arguments.members:
            asyncio.run(fill(url, arguments.members))
