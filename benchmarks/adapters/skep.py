"""skep itself, on any of its engines: the URL decides."""

from __future__ import annotations

import asyncio

import uvloop

from adapters.protocol import Bodies, BulkPeer, Bundles, Jobs, main
from skep import App
from skep.task import AsyncTask
from skep.worker.settings import Settings
from skep.worker.worker import Worker


class Skep(BulkPeer):
    distribution = "skep"
    settings = "uvloop, Settings() as they are: 10 slots, lease 15 s; bulk is task.many(...).aenqueue()"

    def setup(self) -> None:
        async def touch() -> None:
            app, job = self._app(None)
            await job.many([]).aenqueue()
            await app.aclose()

        asyncio.run(touch())

    def send(self, bodies: Bodies) -> None:
        async def run() -> None:
            app, job = self._app(None)
            await job.many([]).aenqueue()  # connects
            async for body in bodies:
                await job.aenqueue(body)
            await app.aclose()

        uvloop.run(run())

    def bulk(self, bundles: Bundles) -> None:
        async def run() -> None:
            app, job = self._app(None)
            await job.many([]).aenqueue()
            for bundle in bundles.lists():
                await job.many((body,) for body in bundle).aenqueue()
            await app.aclose()

        uvloop.run(run())

    def work(self, jobs: Jobs) -> None:
        app, _ = self._app(jobs)
        uvloop.run(Worker(app, Settings()).run())

    def _app(self, jobs: Jobs | None) -> tuple[App, AsyncTask[[str], None]]:
        app = App(self.url)

        @app.task(name="job")
        async def job(body: str) -> None:
            assert jobs is not None
            await jobs.arun(body)

        return app, job


if __name__ == "__main__":
    main(Skep)
