"""pgqueuer on PostgreSQL."""

from __future__ import annotations

import asyncio

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from adapters.protocol import Bodies, BulkPeer, Bundles, Jobs, main

BATCH = 100


class Pgqueuer(BulkPeer):
    distribution = "pgqueuer"
    settings = f"asyncpg, uvloop, batch_size={BATCH}; bulk is enqueue() with lists; heartbeat_timeout 30 s"

    def setup(self) -> None:
        async def install() -> None:
            await (await self._queries()).install()

        asyncio.run(install())

    def send(self, bodies: Bodies) -> None:
        async def run() -> None:
            queries = await self._queries()
            async for body in bodies:
                await queries.enqueue("job", body.encode())

        uvloop.run(run())

    def bulk(self, bundles: Bundles) -> None:
        async def run() -> None:
            queries = await self._queries()
            for bundle in bundles.lists():
                payloads = [body.encode() for body in bundle]
                await queries.enqueue(["job"] * len(bundle), payloads, [0] * len(bundle))

        uvloop.run(run())

    def work(self, jobs: Jobs) -> None:
        async def run() -> None:
            pgq = PgQueuer.from_asyncpg_connection(await asyncpg.connect(self.url))

            @pgq.entrypoint("job")
            async def job(it: Job) -> None:
                assert it.payload is not None
                await jobs.arun(it.payload.decode())

            await pgq.run(batch_size=BATCH)

        uvloop.run(run())

    async def _queries(self) -> Queries:
        return Queries(AsyncpgDriver(await asyncpg.connect(self.url)))


if __name__ == "__main__":
    main(Pgqueuer)
