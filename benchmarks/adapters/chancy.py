"""chancy on PostgreSQL."""

from __future__ import annotations

import asyncio
import importlib

import chancy

from adapters.protocol import Bodies, BulkPeer, Bundles, Jobs, main

PATH = "adapters.chancy.job"  # chancy imports it by name, also when this module runs as a program
CONCURRENCY = 500
JOBS: list[Jobs] = []


async def job(*, body: str) -> None:
    await JOBS[0].arun(body)


class Chancy(BulkPeer):
    distribution = "chancy"
    settings = (
        f"AsyncExecutor, concurrency={CONCURRENCY}, polling_interval=1 s, notifications, default plugins;"
        " bulk is push_many(); heartbeat_timeout 90 s (its default)"
    )

    def setup(self) -> None:
        async def run() -> None:
            async with chancy.Chancy(self.url) as app:
                await app.migrate()
                await app.declare(self._queue())

        asyncio.run(run())

    def send(self, bodies: Bodies) -> None:
        async def run() -> None:
            async with chancy.Chancy(self.url) as app:
                async for body in bodies:
                    await app.push(self._job(body))

        asyncio.run(run())

    def bulk(self, bundles: Bundles) -> None:
        async def run() -> None:
            async with chancy.Chancy(self.url) as app:
                for bundle in bundles.lists():
                    async for _ in app.push_many([self._job(body) for body in bundle]):
                        pass

        asyncio.run(run())

    def work(self, jobs: Jobs) -> None:
        importlib.import_module("adapters.chancy").JOBS.append(jobs)

        async def run() -> None:
            async with chancy.Chancy(self.url) as app, chancy.Worker(app) as worker:
                await worker.wait_for_shutdown()

        asyncio.run(run())

    def _queue(self) -> chancy.Queue:
        executor = chancy.Chancy.Executor.Async
        return chancy.Queue("default", concurrency=CONCURRENCY, executor=executor, polling_interval=1)

    def _job(self, body: str) -> chancy.Job:
        return chancy.Job(func=PATH, kwargs={"body": body})


if __name__ == "__main__":
    main(Chancy)
