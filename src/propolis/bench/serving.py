"""A worker in a process of its own, and what it tells of itself: one JSON value per line.

python -m propolis.bench.serving QUEUE SLOTS drain JOBS    run so many no-ops, report how it went, end
python -m propolis.bench.serving QUEUE SLOTS serve         report of each timed job, until stdin closes

The URL is in PROPOLIS_URL, because every user of a machine can read the arguments of all its processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from msgspec import Struct

from propolis.bench.target import BenchPlace
from propolis.bench.tasks import Tasks
from propolis.errors import PropolisError
from propolis.worker.settings import Lane, Settings
from propolis.worker.supervisor import loop_factory
from propolis.worker.worker import Worker

STARTS_WITHIN = 30.0
URL = "PROPOLIS_URL"


class Drained(Struct, frozen=True):
    """How a worker ran its no-ops; CPU is that of its process alone."""

    seconds: float
    cpu: float
    rss_mb: float


class WorkerEnded(PropolisError):
    def __init__(self) -> None:
        super().__init__("the worker that was measured ended before its time: its own words are above")


class Served:
    """A worker process, seen from outside."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid
        self.rss_mb = 0.0  # when it had just begun to serve

    async def next_line(self) -> Any:
        """The next value that it prints; `WorkerEnded` if there is none."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise WorkerEnded
        return json.loads(line)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)


@asynccontextmanager
async def served(place: BenchPlace, slots: int, *mode: str | int) -> AsyncIterator[Served]:
    """A worker that has begun to serve; it is gone afterwards, whatever happens."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __spec__.name, place.queue, str(slots), *map(str, mode)),
        env={**os.environ, URL: place.url},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    worker = Served(process)
    try:
        async with asyncio.timeout(STARTS_WITHIN):
            worker.rss_mb = await worker.next_line()
        yield worker
    finally:
        worker.kill()
        await process.wait()


# --- in that process ---------------------------------------------------------------------


def report(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def settings(place: BenchPlace, slots: int) -> Settings:
    return Settings(lanes=[Lane({place.queue: 1}, slots)])


async def drain(tasks: Tasks, worker: Worker, jobs: int) -> Drained:
    """Run so many no-ops with a worker of this process, which is stopped then."""
    tasks.expect(jobs)
    await tasks.app.client.ready()
    began, cpu = time.perf_counter(), time.process_time()
    running = asyncio.create_task(worker.run())
    enough = asyncio.create_task(tasks.enough.wait())
    await asyncio.wait({running, enough}, return_when=asyncio.FIRST_COMPLETED)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    worker.stop()
    enough.cancel()
    await running
    return Drained(seconds, cpu, rss_mb())


async def serve(worker: Worker) -> None:
    """Until stdin closes."""
    asyncio.get_running_loop().add_reader(sys.stdin, worker.stop)
    running = asyncio.create_task(worker.run())
    await worker.started.wait()
    report(rss_mb())
    await running


def rss_mb() -> float:
    """The memory that this process has now; where nobody tells that, the most that it has had."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


async def main(queue: str, slots: str, mode: str, *rest: str) -> None:
    place = BenchPlace(os.environ.pop(URL), queue)
    tasks = Tasks(place, heard=report)
    worker = Worker(tasks.app, settings(place, int(slots)))
    if mode == "drain":
        report(rss_mb())
        done = await drain(tasks, worker, int(rest[0]))
        report({"seconds": done.seconds, "cpu": done.cpu, "rss_mb": done.rss_mb})
    else:
        await serve(worker)
    await tasks.app.aclose()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main(*sys.argv[1:]))
