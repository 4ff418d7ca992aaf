"""The schema of PostgreSQL: its name, its migrations, its script."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from propolis.core.job import Lease
from propolis.core.protocols import Engine
from propolis.engines import make_engine
from propolis.engines.postgres.engine import PostgresEngine
from propolis.engines.postgres.schema import dropped, script
from propolis.errors import BadSetting, SchemaTooNew
from propolis.testing.engines.samples import HOLDER, SPAN, a_job


async def take(engine: Engine, limit: int = 100) -> list[Lease]:
    return await engine.lease({"default": limit}, span=SPAN, holder=HOLDER)


async def test_a_url_gives_an_engine_with_its_schema(postgres_url: str, schema: str) -> None:
    engine = make_engine(f"{postgres_url}?schema={schema}&patience=5s")

    async with asyncio.timeout(20):
        await engine.open()
        await engine.put([a_job()])

    assert list(await engine.queues()) == ["default"]
    await engine.close()


def test_a_schema_must_leave_room_for_the_name_of_its_channel() -> None:
    with pytest.raises(BadSetting, match="schema"):
        PostgresEngine("postgresql://nobody@localhost/none", schema="s" * 49)


def test_a_schema_is_not_called_as_in_a_search_path() -> None:
    with pytest.raises(BadSetting, match="every user"):
        PostgresEngine("postgresql://nobody@localhost/none", schema="$user")


async def test_a_schema_may_have_any_name(postgres_url: str, connection: asyncpg.Connection) -> None:
    name = "a'b\"c;--$name$ %s {0} propolis.x é"
    engine = await PostgresEngine(postgres_url, schema=name).open()
    try:
        await engine.put([a_job()])
        again = await PostgresEngine(postgres_url, schema=name).open()
        assert len(await take(again)) == 1
        await again.close()
    finally:
        await engine.close()
        await connection.execute(dropped(name))


async def test_of_many_that_open_an_empty_schema_at_once_all_find_it_ready(
    postgres_url: str, schema: str
) -> None:
    engines = [PostgresEngine(postgres_url, schema=schema) for _ in range(6)]

    await asyncio.gather(*(engine.open() for engine in engines))

    await engines[0].put([a_job()])
    assert len(await take(engines[-1])) == 1
    for engine in engines:
        await engine.close()


async def test_the_printed_script_makes_what_the_engine_finds_up_to_date(
    postgres_url: str, schema: str, connection: asyncpg.Connection
) -> None:
    await connection.execute(script(schema))

    engine = await PostgresEngine(postgres_url, schema=schema).open()

    assert [receipt.created for receipt in await engine.put([a_job()])] == [True]
    await engine.close()


async def test_a_schema_of_a_newer_propolis_is_refused(
    postgres_url: str, schema: str, engine: PostgresEngine, connection: asyncpg.Connection
) -> None:
    await connection.execute(f'''INSERT INTO "{schema}".migration VALUES (999, 'its checksum', 999)''')

    with pytest.raises(SchemaTooNew):
        await PostgresEngine(postgres_url, schema=schema).open()
