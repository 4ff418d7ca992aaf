"""propolis itself, on any of its engines: the URL decides."""

from __future__ import annotations

import functools
import json
import os
import sys

import uvloop

from adapters.protocol import Bodies, BulkPeer, Bundles, Jobs, main
from propolis import App
from propolis.engines import open_engine
from propolis.worker.settings import Settings
from propolis.worker.worker import Worker

if __name__ == "__main__":
    os.environ["BENCH_OPTIONS"] = sys.argv[2]  # for children, in which suspects run alone: they import this

OPTIONS = json.loads(os.environ["BENCH_OPTIONS"])
app = App(OPTIONS["url"])


@functools.cache
def jobs() -> Jobs:
    return Jobs(OPTIONS)


@app.task(name="job")
async def job(body: str) -> None:
    await jobs().arun(body)


class Propolis(BulkPeer):
    distribution = "propolis"
    settings = "uvloop, Settings() as they are: 10 slots, lease 15 s; bulk is task.many(...).aenqueue()"

    def setup(self) -> None:
        async def run() -> None:
            await (await open_engine(self.url)).close()

        uvloop.run(run())

    def send(self, bodies: Bodies) -> None:
        async def run() -> None:
            async for body in bodies:
                await job.aenqueue(body)
            await app.aclose()

        uvloop.run(run())

    def bulk(self, bundles: Bundles) -> None:
        async def run() -> None:
            for bundle in bundles.lists():
                await job.many((body,) for body in bundle).aenqueue()
            await app.aclose()

        uvloop.run(run())

    def work(self, _: Jobs) -> None:
        uvloop.run(Worker(app, Settings()).run())


if __name__ == "__main__":
    main(Propolis)
