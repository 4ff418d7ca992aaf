"""PostgreSQL: a schema of its own in the database that is named, dropped afterwards."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import asyncpg

from skep.bench.ground import BUNDLE, Place, Raw, envelope, fresh_name, with_option
from skep.brokers.postgres import OPTIONS
from skep.brokers.postgres_schema import quoted

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
SETTINGS = ("server_version", "fsync", "synchronous_commit", "shared_buffers")


class Ground:
    @asynccontextmanager
    async def place(self, url: str) -> AsyncIterator[Place]:
        name = fresh_name()
        try:
            yield Place(with_option(url, "schema", name), name)
        finally:
            async with _connected(url) as connection:
                await connection.execute(f"DROP SCHEMA IF EXISTS {quoted(name)} CASCADE")

    async def raw(self, place: Place, jobs: int, payload: str) -> Raw:
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

    async def about(self, place: Place) -> dict[str, str]:
        async with _connected(place.url) as connection:
            return {name: await connection.fetchval(f"SHOW {name}") for name in SETTINGS}


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Any]:  # an asyncpg.Connection has no types
    parts = urlsplit(url)
    options = [(name, value) for name, value in parse_qsl(parts.query) if name not in OPTIONS]
    connection = await asyncpg.connect(urlunsplit(parts._replace(query=urlencode(options))))
    try:
        yield connection
    finally:
        await connection.close()
