"""SAQ, on Redis or on PostgreSQL."""

from __future__ import annotations

import asyncio
from typing import Any

import saq

from adapters.protocol import Bodies, Jobs, Peer, main

CONCURRENCY = 20


class SAQ(Peer):
    distribution = "saq"
    settings = f"concurrency={CONCURRENCY}, ttl=-1 (results are not kept); sweep every 60 s (its default)"

    def send(self, bodies: Bodies) -> None:
        async def run() -> None:
            queue = saq.Queue.from_url(self.url)
            await queue.connect()
            async for body in bodies:
                await queue.enqueue("job", body=body, ttl=-1)

        asyncio.run(run())

    def setup(self) -> None:
        async def run() -> None:
            await saq.Queue.from_url(self.url).connect()

        asyncio.run(run())

    def work(self, jobs: Jobs) -> None:
        async def job(_: dict[str, Any], *, body: str) -> None:
            await jobs.arun(body)

        async def run() -> None:
            queue = saq.Queue.from_url(self.url)
            await queue.connect()
            await saq.Worker(queue, [("job", job)], concurrency=CONCURRENCY).start()

        asyncio.run(run())


if __name__ == "__main__":
    main(SAQ)
