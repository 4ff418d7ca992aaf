"""A schema of PostgreSQL that was emptied holds what a new one holds, whatever happened in it."""

from __future__ import annotations

from typing import Any

import asyncpg

from propolis.core.protocols import Rule, RuleKind, Scope
from propolis.engines.postgres.engine import PostgresEngine
from propolis.testing.engines.steps import a_batch, a_dead_job, members_of, put_one, take_one

from .emptying import LASTING, empty


async def contents(connection: asyncpg.Connection[Any], schema: str) -> dict[str, list[Any]]:
    """All rows, by table; of sequences, where they stand."""
    named = "SELECT {0}name FROM pg_{0}s WHERE schemaname = $1"
    tables = [
        row[0] for row in await connection.fetch(named.format("table"), schema) if row[0] not in LASTING
    ]
    sequences = [row[0] for row in await connection.fetch(named.format("sequence"), schema)]
    found = {name: await connection.fetch(f'SELECT * FROM "{schema}".{name}') for name in tables}
    for name in sequences:
        columns = "last_value, is_called"
        found[name] = await connection.fetch(f'SELECT {columns} FROM "{schema}".{name}')
    return found


async def test_an_emptied_schema_is_as_good_as_new(postgres_url: str, schema: str) -> None:
    empty(postgres_url, schema)  # before it is there
    engine = await PostgresEngine(postgres_url, schema=schema).open()
    connection = await asyncpg.connect(postgres_url)
    try:
        new = await contents(connection, schema)
        await work_with(engine)
        await connection.execute(f"INSERT INTO \"{schema}\".unannounced VALUES ('default')")
        used = await contents(connection, schema)
        empty(postgres_url, schema)
        changed = {name for name in new if used[name] != new[name]}
        assert changed >= {"back", "number", "sweeper", "unannounced", "watch"}
        assert await contents(connection, schema) == new
    finally:
        await connection.close()
        await engine.close()


async def work_with(engine: PostgresEngine) -> None:
    await put_one(engine, unique="once", id="chosen", chosen=True)
    await take_one(engine)
    await a_dead_job(engine)
    batch = a_batch()
    await engine.put_batch(batch, members_of(batch, 3), token="token")
    await engine.add_rule(Rule(RuleKind.PAUSE, Scope.QUEUE, "default"))
    await engine.sweep(by="somebody")
