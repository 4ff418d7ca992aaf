"""The Redis engine against a hand-written loop on the same server, in one run.

    python benchmarks/redis_drain.py [--jobs 100000] [--backlog 0] [--repeat 3] [--kind valkey] [--only ...]

Prints jobs per second, and microseconds of CPU per job of this process and of the server: the raw loop (one
script that ends a bundle of 100 and takes the next, bodies in a hash), the engine's two verbs, its exchange,
one worker with no-op tasks, two worker processes; then puts in bulk and from 64 callers at once, the memory
of a waiting job, and the time from sent to started of an idle worker.  Nothing is kept on disk, as others are
measured.  Read the ratios, and the CPU: the speed of a machine varies from minute to minute.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import NamedTuple, Self

from propolis import App
from propolis.core.ids import new_id
from propolis.core.job import Done
from propolis.engines.address import Address
from propolis.engines.redis.client.link import RedisLink
from propolis.engines.redis.client.script import LuaScript
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.engine import RedisEngine
from propolis.testing.engines.samples import a_job
from propolis.testing.servers.redis import redis
from propolis.worker.settings import Mode, Settings
from propolis.worker.worker import Worker

BUNDLE = 100
SPAN = timedelta(seconds=15)
PAYLOAD = "x" * 250
BODY = b'{"v":1,"task":"noop","args":["' + PAYLOAD.encode() + b'"]}'

# The least that a queue with leases must do: a lease is an entry in a sorted set, by when it ends.
RAW = LuaScript(
    "raw",
    b"""
for n = 1, #ARGV do
    if redis.call('ZREM', 'raw:leases', ARGV[n]) == 1 then
        redis.call('HDEL', 'raw:bodies', ARGV[n])
    end
end
local ends = redis.call('TIME')[1] + 15
local taken = {}
for n = 1, 100 do
    local id = redis.call('LPOP', 'raw:ready')
    if not id then
        break
    end
    redis.call('ZADD', 'raw:leases', ends, id)
    taken[#taken + 1] = id
    taken[#taken + 1] = redis.call('HGET', 'raw:bodies', id)
end
return taken
""",
)


class Measured(NamedTuple):
    """Jobs per second, and microseconds of CPU per job: this process, the server."""

    rate: float
    own: float
    server: float

    def __str__(self) -> str:
        return f"{self.rate:10,.0f} jobs/s, {self.own:5.1f} + {self.server:4.1f} us of CPU"


class Meter:
    """Measures from its start to `read`."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def start(self) -> Self:
        self._server, self._own, self._began = await self._used(), time.process_time(), time.perf_counter()
        return self

    async def read(self, jobs: int) -> Measured:
        took, own = time.perf_counter() - self._began, time.process_time() - self._own
        return Measured(jobs / took, own / jobs * 1e6, (await self._used() - self._server) / jobs * 1e6)

    async def _used(self) -> float:
        info = (await self._link.command("INFO", "cpu")).decode()
        return sum(
            float(info.split(f"used_cpu_{kind}_main_thread:")[1].split()[0]) for kind in ("user", "sys")
        )


async def linked(url: str) -> RedisLink:
    link = RedisLink(target_of(Address(url)))
    await link.open()
    return link


async def raw_loop(url: str, jobs: int, backlog: int) -> Measured:
    link = await linked(url)
    for _ in range(0, jobs + backlog, 1000):
        ids = [new_id() for _ in range(1000)]
        await link.command("HSET", "raw:bodies", *(part for each in ids for part in (each, BODY)))
        await link.command("RPUSH", "raw:ready", *ids)
    meter, done, ended = await Meter(link).start(), 0, list[bytes]()
    while done < jobs:
        ended = (await link.call(RAW, [b"raw:ready"], ended))[::2]
        done += len(ended)
    measured = await meter.read(done)
    await link.close()
    return measured


async def fill(url: str, count: int, **fields: str) -> RedisEngine:
    engine = await RedisEngine(target_of(Address(url))).open()
    for start in range(0, count, 1000):
        await engine.put([a_job(PAYLOAD, **fields) for _ in range(min(1000, count - start))])
    return engine


async def engine_loop(url: str, jobs: int, backlog: int, *, exchange: bool) -> Measured:
    engine, link = await fill(url, jobs + backlog), await linked(url)
    wants = {"default": BUNDLE}
    meter, done = await Meter(link).start(), 0
    leases = await engine.lease(wants, span=SPAN, holder="bench")
    while leases and done < jobs:
        done += len(leases)
        outcomes = [(lease, Done()) for lease in leases]
        if exchange:
            leases = (await engine.exchange(outcomes, wants, span=SPAN, holder="bench")).leases
        else:
            await engine.settle(outcomes)
            leases = await engine.lease(wants, span=SPAN, holder="bench")
    measured = await meter.read(done)
    await link.close()
    await engine.close()
    return measured


def make_app(url: str) -> App:
    app = App(url)

    @app.task(name="noop")
    async def noop(text: str) -> None:
        pass

    return app


async def worker_run(url: str, jobs: int, backlog: int) -> Measured:
    engine, link = await fill(url, jobs + backlog, task="noop"), await linked(url)
    app = make_app(url)
    worker = Worker(app, Settings(mode=Mode.UNTIL_EMPTY))
    meter = await Meter(link).start()
    running = asyncio.create_task(worker.run())
    while (gone := await settled(engine)) < jobs:
        await asyncio.sleep(0.02)
    measured = await meter.read(gone)
    worker.stop()
    await running
    await link.close()
    await engine.close()
    await app.aclose()
    return measured


async def settled(engine: RedisEngine) -> int:
    return (await engine.queues())["default"].deleted


async def two_workers(url: str, jobs: int, backlog: int) -> Measured:
    engine, link = await fill(url, jobs + backlog, task="noop"), await linked(url)
    with workers(url, 2):
        while (first := await settled(engine)) == 0:
            await asyncio.sleep(0.001)
        meter = await Meter(link).start()
        while (gone := await settled(engine)) < jobs * 0.9:
            await asyncio.sleep(0.02)
        measured = await meter.read(gone - first)
    await link.close()
    await engine.close()
    return measured


@contextmanager
def workers(url: str, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Worker processes, until the end of the block."""
    command = [sys.executable, __file__, "--child", url]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        yield children
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.communicate()


async def bulk_puts(url: str, jobs: int, backlog: int) -> Measured:
    engine, link = await fill(url, backlog), await linked(url)
    bundles = [[a_job(PAYLOAD) for _ in range(1000)] for _ in range(jobs // 1000)]
    meter = await Meter(link).start()
    for bundle in bundles:
        await engine.put(bundle)
    measured = await meter.read(jobs)
    await link.close()
    await engine.close()
    return measured


async def callers(url: str, jobs: int, backlog: int) -> Measured:  # noqa: ARG001
    app, link = make_app(url), await linked(url)
    task = app.task_named("noop")

    async def one() -> None:
        for _ in range(jobs // 64):
            await task.aenqueue(PAYLOAD)

    await task.aenqueue(PAYLOAD)
    meter = await Meter(link).start()
    await asyncio.gather(*(one() for _ in range(64)))
    measured = await meter.read(jobs // 64 * 64)
    await link.close()
    await app.aclose()
    return measured


async def latency(url: str) -> str:
    """From sent to started, with one idle worker in another process; and what that sends meanwhile."""
    engine, link = await fill(url, 0), await linked(url)
    times = []
    with workers(url, 1) as [child]:
        assert child.stdout is not None
        for turn in range(520):
            await asyncio.sleep(0.01)
            await engine.put([a_job(time.monotonic(), task="tell")])
            took = float(await asyncio.to_thread(child.stdout.readline))
            if turn >= 20:
                times.append(took * 1000)
        await asyncio.sleep(3)
        before = await calls(link)
        await asyncio.sleep(10)
        sent = await calls(link) - before
    await engine.close()
    await link.close()
    times.sort()
    half, most = times[len(times) // 2], times[len(times) * 99 // 100]
    return f"p50 {half:.2f} ms, p99 {most:.2f} ms; idle: {sent / 10:.1f} commands/s"


async def calls(link: RedisLink) -> int:
    """Commands that clients have sent: what a script calls itself is left out."""
    stats = (await link.command("INFO", "commandstats")).decode()
    names = ("evalsha", "eval", "blmove", "ping", "subscribe", "lrange")
    return sum(
        int(stats.split(f"cmdstat_{name}:calls=")[1].split(",")[0]) for name in names if f"_{name}:" in stats
    )


async def memory(url: str, jobs: int) -> str:
    link = await linked(url)

    async def used() -> int:
        info = (await link.command("INFO", "memory")).decode()
        return int(info.split("used_memory:")[1].split()[0])

    before = await used()
    engine = await fill(url, jobs)
    each = (await used() - before) / jobs
    [lease] = await engine.lease({"default": 1}, span=SPAN, holder="bench")
    await engine.close()
    await link.close()
    return f"{each:.0f} bytes for a waiting job of {len(lease.body)} bytes"


async def empty(url: str) -> None:
    link = await linked(url)
    await link.command("FLUSHALL", "SYNC")
    await link.close()


async def child(url: str) -> None:
    app = make_app(url)

    @app.task(name="tell")
    async def tell(sent: float) -> None:
        print(time.monotonic() - sent, flush=True)

    worker = Worker(app, Settings())
    worker.stop_on_signals()
    await worker.run()
    await app.aclose()


async def main(arguments: argparse.Namespace) -> None:
    jobs, backlog = arguments.jobs, arguments.backlog
    loops: dict[str, Callable[[str, int, int], Awaitable[Measured]]] = {
        "raw loop": raw_loop,
        "lease + settle": partial(engine_loop, exchange=False),
        "exchange": partial(engine_loop, exchange=True),
        "worker": worker_run,
        "two workers": two_workers,
        "bulk puts": bulk_puts,
        "64 callers": callers,
    }
    logging.getLogger("propolis").setLevel(logging.ERROR)
    chosen = {name: loop for name, loop in loops.items() if not arguments.only or name in arguments.only}
    found: dict[str, list[Measured]] = {name: [] for name in chosen}
    with redis(arguments.kind) as server:
        for turn in range(arguments.repeat):
            for name, loop in chosen.items():
                await empty(server.url)
                found[name].append(await loop(server.url, jobs, backlog))
                print(f"  run {turn + 1}: {name:16} {found[name][-1]}", file=sys.stderr, flush=True)
        middles = {
            name: Measured(*map(statistics.median, zip(*each, strict=True))) for name, each in found.items()
        }
        raw = middles["raw loop"].rate if "raw loop" in middles else 0
        for name, middle in middles.items():
            print(f"{name:16} {middle}" + (f"  {middle.rate / raw:6.0%} of raw" if raw else ""))
        if not arguments.only:
            await empty(server.url)
            print(f"{'memory':16} {await memory(server.url, jobs)}")
            await empty(server.url)
            print(f"{'idle worker':16} {await latency(server.url)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--backlog", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--kind", default="valkey", help="valkey or redis")
    parser.add_argument("--only", action="append", help="only this loop; may be given again")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    asyncio.run(child(given.child) if given.child else main(given))
