"""One half of a pair of `against.py`: puts and runs jobs, and prints the CPU that it took."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from importlib import import_module
from typing import Any

PAYLOAD = "x" * 250
SHARE_OF_SINGLES = 10


class Half:
    """The same work for any version of the package; it uses only names that all of them have."""

    def __init__(self, package: str, url: str, jobs: int) -> None:
        self.jobs = jobs
        self.ran = 0
        self.over = asyncio.Event()
        self.app: Any = import_module(package).App(url)
        self.worker: Any = import_module(f"{package}.worker.worker")
        self.settings: Any = import_module(f"{package}.worker.settings")

        async def noop(text: str) -> None:  # noqa: ARG001  # it is there to be carried
            self.ran += 1
            if self.ran == self.jobs + self.jobs // SHARE_OF_SINGLES + 1:
                self.over.set()

        self.noop: Any = self.app.task(name="noop")(noop)
        self.running: asyncio.Task[Any]
        self.stop: Any

    async def single(self) -> int:
        for _ in range(self.jobs // SHARE_OF_SINGLES):
            await self.noop.aenqueue(PAYLOAD)
        return self.jobs // SHARE_OF_SINGLES

    async def bulk(self) -> int:
        await self.noop.many([PAYLOAD] * self.jobs).aenqueue()
        return self.jobs

    async def drain(self) -> int:
        worker = self.worker.Worker(
            self.app, self.settings.Settings(lanes=[self.settings.Lane({"default": 1}, 10)])
        )
        self.running = asyncio.create_task(worker.run())
        self.stop = worker.stop
        await self.over.wait()
        return self.ran

    async def close(self) -> None:
        """After the last figure was told: whoever closes connections takes their CPU out of sight."""
        self.stop()
        await self.running
        await self.app.aclose()


async def main(package: str, jobs: str) -> None:
    half = Half(package, os.environ["AGAINST_URL"], int(jobs))
    await half.noop.aenqueue(PAYLOAD)  # opens the engine
    for phase in ("single", "bulk", "drain"):
        print(phase, flush=True)
        sys.stdin.readline()
        # Into which phase a collection of all objects falls, 15 ms of it, is luck otherwise: with 10,000 jobs
        # in bulk one tree had it and the other had not, which looked like 20 % of CPU.
        gc.collect()
        began = time.process_time()
        count = await getattr(half, phase)()
        print(json.dumps({"cpu": time.process_time() - began, "jobs": count}), flush=True)
    await half.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
