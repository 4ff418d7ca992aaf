"""Records on PostgreSQL: how they are written, and in which order they are locked."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import asyncpg

from propolis.core.clock import to_us
from propolis.core.records import Change, Swap
from propolis.engines.postgres.engine import PostgresEngine
from propolis.engines.postgres.records import swaps_text
from propolis.engines.postgres.schema import quoted, set_of
from propolis.testing.clock import START


def swap_in(schema: str) -> str:
    return f"SELECT {quoted(set_of(schema))}.swap($1, $2, NULL, 0)"


def stored(name: str) -> Swap:
    return Swap(changes=(Change(kind="k", name=name, value=b"x" * 300, expires_in=timedelta(minutes=3)),))


async def test_heartbeats_write_no_index(
    engine: PostgresEngine, schema: str, connection: asyncpg.Connection
) -> None:
    """Nothing but the time of expiry moves, of which an index holds only the hour."""
    async with connection.transaction():  # at its end the server counts no more
        for n in range(11):
            await connection.execute(swap_in(schema), to_us(START) + n, swaps_text([stored("w")]))
        updates = await connection.fetchrow(
            "SELECT pg_stat_get_xact_tuples_updated($1), pg_stat_get_xact_tuples_hot_updated($1)",
            await connection.fetchval("SELECT $1::text::regclass::oid", f"{quoted(schema)}.records"),
        )

    assert tuple(updates) == (10, 10)


async def test_no_table_is_emptied_by_a_crash_of_the_server(
    engine: PostgresEngine, schema: str, connection: asyncpg.Connection
) -> None:
    kinds = await connection.fetch(
        "SELECT DISTINCT relpersistence::text FROM pg_class WHERE relnamespace = $1::regnamespace",
        quoted(schema),
    )
    assert [kind[0] for kind in kinds] == ["p"]


async def test_records_are_locked_in_the_order_of_their_names(
    engine: PostgresEngine, schema: str, connection: asyncpg.Connection, postgres_url: str
) -> None:
    """So two calls that name the same ones wait for each other, and do not lock each other out."""
    await engine.swap([stored("a"), stored("b")])
    holds = await asyncpg.connect(postgres_url)
    swaps = await asyncpg.connect(postgres_url)
    async with holds.transaction():
        await holds.execute(f"SELECT FROM {quoted(schema)}.records WHERE name = 'a' FOR UPDATE")
        call = swaps.execute(swap_in(schema), None, swaps_text([stored("b"), stored("a")]))
        calling = asyncio.create_task(call)
        waits = "SELECT $1 = ANY (pg_blocking_pids($2))"
        while not await connection.fetchval(waits, holds.get_server_pid(), swaps.get_server_pid()):
            assert not calling.done()

        b = await connection.fetch(
            f"SELECT name FROM {quoted(schema)}.records WHERE name = 'b' FOR UPDATE SKIP LOCKED"
        )

    assert [row["name"] for row in b] == ["b"]
    await calling
    await holds.close()
    await swaps.close()
