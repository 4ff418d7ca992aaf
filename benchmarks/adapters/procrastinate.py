"""procrastinate on PostgreSQL."""

from __future__ import annotations

import asyncio
from typing import Any

import procrastinate

from adapters.protocol import Bodies, BulkPeer, Bundles, Jobs, main

CONCURRENCY = 20


class Procrastinate(BulkPeer):
    distribution = "procrastinate"
    settings = (
        f"PsycopgConnector, concurrency={CONCURRENCY}, delete_jobs=always; bulk is batch_defer();"
        " stalled jobs wait for a periodic task of the user's own (none here)"
    )

    def setup(self) -> None:
        async def run() -> None:
            app, _ = self._open(None)
            async with app.open_async():
                await app.schema_manager.apply_schema_async()

        asyncio.run(run())

    def send(self, bodies: Bodies) -> None:
        async def run() -> None:
            app, job = self._open(None)
            async with app.open_async():
                async for body in bodies:
                    await job.defer_async(body=body)

        asyncio.run(run())

    def bulk(self, bundles: Bundles) -> None:
        async def run() -> None:
            app, job = self._open(None)
            async with app.open_async():
                for bundle in bundles.lists():
                    await job.batch_defer_async(*[{"body": body} for body in bundle])

        asyncio.run(run())

    def work(self, jobs: Jobs) -> None:
        async def run() -> None:
            app, _ = self._open(jobs)
            async with app.open_async():
                await app.run_worker_async(concurrency=CONCURRENCY, delete_jobs="always")

        asyncio.run(run())

    def _open(self, jobs: Jobs | None) -> tuple[procrastinate.App, Any]:
        app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=self.url))

        @app.task(name="job")
        async def job(body: str) -> None:
            assert jobs is not None
            await jobs.arun(body)

        return app, job


if __name__ == "__main__":
    main(Procrastinate)
