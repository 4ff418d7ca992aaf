"""pgmq on PostgreSQL: its SQL installed as a plain script, and the plain loop of its documentation."""

from __future__ import annotations

import asyncio

import asyncpg
import uvloop
from pgmq.async_queue import PGMQueue
from pgmq.install import get_embedded_install_sql, get_embedded_sql_version

from adapters.protocol import Bodies, BulkPeer, Bundles, Jobs, main

BATCH = 100
VISIBILITY = 30
IDLE = 0.01


class Pgmq(BulkPeer):
    distribution = "pgmq"
    settings = (
        f"asyncpg, uvloop; read({BATCH}, vt={VISIBILITY} s), run, delete_batch; bulk is send_batch();"
        f" looks again after {IDLE} s when empty"
    )

    def version(self) -> str:
        return f"{get_embedded_sql_version()} (client {super().version()})"

    def setup(self) -> None:
        async def run() -> None:
            connection = await asyncpg.connect(self.url)
            await connection.execute(get_embedded_install_sql())
            await connection.execute("SELECT pgmq.create('bench')")

        asyncio.run(run())

    def send(self, bodies: Bodies) -> None:
        async def run() -> None:
            queue = await self._open()
            async for body in bodies:
                await queue.send("bench", {"body": body})

        uvloop.run(run())

    def bulk(self, bundles: Bundles) -> None:
        async def run() -> None:
            queue = await self._open()
            for bundle in bundles.lists():
                await queue.send_batch("bench", [{"body": body} for body in bundle])

        uvloop.run(run())

    def work(self, jobs: Jobs) -> None:
        async def run() -> None:
            queue = await self._open()
            while True:
                messages = await queue.read_batch("bench", vt=VISIBILITY, batch_size=BATCH)
                if not messages:
                    await asyncio.sleep(IDLE)
                    continue
                for message in messages:
                    await jobs.arun(message.message["body"])
                await queue.delete_batch("bench", [message.msg_id for message in messages])

        uvloop.run(run())

    async def _open(self) -> PGMQueue:
        queue = PGMQueue(pool=await asyncpg.create_pool(self.url, min_size=1), init_extension=False)
        await queue.init()
        return queue


if __name__ == "__main__":
    main(Pgmq)
