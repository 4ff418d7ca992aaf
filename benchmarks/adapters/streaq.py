"""streaq on Redis."""

from __future__ import annotations

import asyncio
from typing import Any

import streaq

from adapters.protocol import Bodies, BulkPeer, Bundles, Jobs, main

CONCURRENCY = 100


class Streaq(BulkPeer):
    distribution = "streaq"
    settings = (
        f"concurrency={CONCURRENCY}, uvloop, ttl=0 (results are not kept); idle_timeout 60 s (its default);"
        " bulk is enqueue_many()"
    )

    def send(self, bodies: Bodies) -> None:
        async def run() -> None:
            worker, job = self._open(None)
            async with worker:
                async for body in bodies:
                    await job.enqueue(body)

        asyncio.run(run())

    def bulk(self, bundles: Bundles) -> None:
        async def run() -> None:
            worker, job = self._open(None)
            async with worker:
                for bundle in bundles.lists():
                    await worker.enqueue_many([job.enqueue(body) for body in bundle])

        asyncio.run(run())

    def work(self, jobs: Jobs) -> None:
        worker, _ = self._open(jobs)
        worker.run_sync()

    def _open(self, jobs: Jobs | None) -> tuple[Any, Any]:
        worker: Any = streaq.Worker(
            redis_url=self.url, concurrency=CONCURRENCY, anyio_kwargs={"use_uvloop": True}
        )

        @worker.task(name="job", ttl=0)
        async def job(body: str) -> None:
            assert jobs is not None
            await jobs.arun(body)

        return worker, job


if __name__ == "__main__":
    main(Streaq)
