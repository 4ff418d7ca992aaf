"""The least that a queue with leases must do on PostgreSQL: one table, bundles of 100, own connection.

Take a bundle and commit; delete it and commit.  No retries, priorities, delays, results or history.
"""

from __future__ import annotations

import asyncio
import time

import asyncpg
import uvloop

from adapters.protocol import Bodies, BulkPeer, Bundles, Jobs, main

TABLE = """
CREATE TABLE raw (
    id bigserial PRIMARY KEY, queue text, state smallint, until timestamptz, attempt int, body bytea);
CREATE INDEX raw_line ON raw (queue, state, id);
"""
PUT = "INSERT INTO raw (queue, state, attempt, body) SELECT 'q', 0, 0, unnest($1::bytea[])"
CLAIM = """
WITH due AS (
    SELECT id FROM raw WHERE queue = 'q' AND state = 0 ORDER BY id LIMIT 100 FOR UPDATE SKIP LOCKED)
UPDATE raw SET state = 1, until = now() + interval '15 s', attempt = attempt + 1
  FROM due WHERE raw.id = due.id RETURNING raw.id, raw.body
"""
DELETE = "DELETE FROM raw WHERE id = ANY ($1::bigint[]) AND state = 1"
REAP = "UPDATE raw SET state = 0 WHERE queue = 'q' AND state = 1 AND until <= now()"
IDLE = 0.002


class RawPostgres(BulkPeer):
    distribution = "asyncpg"
    settings = f"asyncpg, uvloop, bundles of 100, lease 15 s; looks again after {IDLE} s when empty"

    def setup(self) -> None:
        async def make() -> None:
            connection = await asyncpg.connect(self.url)
            await connection.execute(TABLE)

        asyncio.run(make())

    def send(self, bodies: Bodies) -> None:
        async def run() -> None:
            connection = await asyncpg.connect(self.url)
            async for body in bodies:
                await connection.execute(PUT, [body.encode()])

        uvloop.run(run())

    def bulk(self, bundles: Bundles) -> None:
        async def run() -> None:
            connection = await asyncpg.connect(self.url)
            for bundle in bundles.lists():
                await connection.execute(PUT, [body.encode() for body in bundle])

        uvloop.run(run())

    def work(self, jobs: Jobs) -> None:
        async def run() -> None:
            connection = await asyncpg.connect(self.url)
            reaped = 0.0
            while True:
                if time.monotonic() - reaped > 1:
                    await connection.execute(REAP)
                    reaped = time.monotonic()
                rows = await connection.fetch(CLAIM)
                if not rows:
                    await asyncio.sleep(IDLE)
                    continue
                for row in rows:
                    await jobs.arun(row[1].decode())
                await connection.execute(DELETE, [row[0] for row in rows])

        uvloop.run(run())


if __name__ == "__main__":
    main(RawPostgres)
