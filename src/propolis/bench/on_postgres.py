"""PostgreSQL: a schema of its own in the database that is named, dropped afterwards."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from propolis.bench.target import BUNDLE, BenchPlace, BenchTarget, Raw, envelope, fresh_name, with_option
from propolis.engines.address import Address
from propolis.engines.postgres.client import PostgresLink
from propolis.engines.postgres.engine import OPTIONS
from propolis.engines.postgres.schema import dropped, quoted

TABLE = """
CREATE TABLE raw (
    id bigserial PRIMARY KEY, queue text, state smallint, until timestamptz, attempt int, body bytea);
CREATE INDEX raw_line ON raw (queue, state, id);
"""
PUT = "INSERT INTO raw (queue, state, attempt, body) SELECT 'q', 0, 0, unnest($1::bytea[])"
LEASE = """
WITH due AS (
    SELECT id FROM raw WHERE queue = 'q' AND state = 0 ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED)
UPDATE raw SET state = 1, until = now() + interval '15 s', attempt = attempt + 1
  FROM due WHERE raw.id = due.id RETURNING raw.id, raw.body
"""
DELETE = "DELETE FROM raw WHERE id = ANY ($1::bigint[]) AND state = 1"
PATIENCE = 30.0  # seconds
SETTINGS = ("server_version", "fsync", "synchronous_commit", "shared_buffers")


class PostgresTarget:
    @asynccontextmanager
    async def place(self, url: str) -> AsyncIterator[BenchPlace]:
        name = fresh_name()
        try:
            yield BenchPlace(with_option(url, "schema", name), name)
        finally:
            async with _connected(url) as connection:
                await connection.execute(dropped(name))

    async def raw(self, place: BenchPlace, jobs: int, payload: str) -> Raw:
        """One table with a state column: take a bundle, commit; delete it, commit."""
        async with _connected(place.url) as connection:
            await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {quoted(place.queue)}")
            await connection.execute(f"SET search_path TO {quoted(place.queue)}")
            await connection.execute(TABLE)
            bodies = [envelope(payload)] * 1000
            began = time.perf_counter()
            for start in range(0, jobs, 1000):
                await connection.execute(PUT, bodies[: jobs - start])
            put = time.perf_counter()
            await connection.execute("ANALYZE raw")
            analyzed = time.perf_counter()
            while rows := await connection.fetch(LEASE, BUNDLE):
                await connection.execute(DELETE, [row[0] for row in rows])
            ended = time.perf_counter()
            await connection.execute("DROP TABLE raw")
        return Raw(jobs / (put - began), jobs / (ended - analyzed))

    async def about(self, place: BenchPlace) -> dict[str, str]:
        async with _connected(place.url) as connection:
            return {name: await connection.fetchval(f"SHOW {name}") for name in SETTINGS}


def target() -> BenchTarget:
    return PostgresTarget()


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Any]:  # an asyncpg.Connection has no types
    link = PostgresLink(Address(url).without_options(*OPTIONS), patience=PATIENCE, prepare=True)
    connection = await link.connect()
    try:
        yield connection
    finally:
        await connection.close()
