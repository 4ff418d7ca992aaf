"""Feeds on PostgreSQL: what other transactions do to them, and what they cost."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import asyncpg
import pytest

from propolis.engines.postgres.engine import PostgresEngine
from propolis.engines.postgres.schema import set_of
from propolis.engines.shared import feed_verbs
from propolis.testing.clock import FakeClock

PUBLISH = "SELECT {}.publish(NULL, $1, $2, 0, 100, 1000000, 3600000000)"


async def numbers(engine: PostgresEngine, after: int = 0) -> list[int]:
    return [entry.number for entry in (await engine.follow({"f": after}))["f"].entries]


async def test_numbers_of_a_sequence_overtake_one_another(
    engine: PostgresEngine, connection: asyncpg.Connection, postgres_url: str, schema: str
) -> None:
    """Why the head of a feed is a row that is locked."""
    await connection.execute(f'CREATE TABLE "{schema}".drawn (number bigserial)')
    insert = f'INSERT INTO "{schema}".drawn DEFAULT VALUES RETURNING number'
    read = f'SELECT number FROM "{schema}".drawn WHERE number > $1'
    slow = await asyncpg.connect(postgres_url)
    transaction = slow.transaction()
    await transaction.start()
    assert await slow.fetchval(insert) == 1
    assert await connection.fetchval(insert) == 2
    assert [row[0] for row in await connection.fetch(read, 0)] == [2]
    await transaction.commit()
    assert await connection.fetch(read, 2) == []  # 1 is lost for whoever goes on after 2
    await slow.close()


async def test_no_entry_is_visible_before_one_with_a_lower_number(
    engine: PostgresEngine, connection: asyncpg.Connection, schema: str
) -> None:
    await engine.publish("f", [b"0"])
    [before] = await numbers(engine)
    transaction = connection.transaction()
    await transaction.start()
    first = await connection.fetchval(PUBLISH.format(set_of(schema)), "f", [b"1"])
    publishing = asyncio.create_task(engine.publish("f", [b"2"]))
    await engine.publish("g", [b"a feed of its own waits for nobody"])
    assert await numbers(engine, before) == []
    await transaction.commit()
    second = await publishing  # on a machine that is too slow for it, it is dropped
    found = await numbers(engine, before)
    assert found[0] == first
    assert second is None or found == [first, second]
    assert engine.dropped == (second is None)


async def test_a_publish_is_dropped_rather_than_waited_for(
    engine: PostgresEngine, connection: asyncpg.Connection, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_verbs, "WITHIN", 0.3)
    monkeypatch.setattr(feed_verbs, "AT_ONCE", 3)
    await engine.publish("f", [b"0"])
    async with connection.transaction():
        await connection.fetchval(PUBLISH.format(set_of(schema)), "f", [b"1"])
        assert await asyncio.gather(*(engine.publish("f", [b"2", b"3"]) for _ in range(5))) == [None] * 5
    assert engine.dropped == 10


async def test_those_who_publish_notify_only_while_somebody_follows(
    engine: PostgresEngine, connection: asyncpg.Connection, schema: str
) -> None:
    heard: list[str] = []
    over = asyncio.Event()

    def hear(_connection: object, _pid: int, _channel: str, payload: str) -> None:
        if payload == "\n?over":
            over.set()
        elif payload.startswith("\n!"):
            heard.append(payload)

    await connection.add_listener(f"propolis:{schema}", hear)
    await engine.publish("f", [b"1"])
    after = (await engine.follow({"f": None}))["f"].last
    await engine.follow({"f": after}, wait=0.01)
    await engine.publish("f", [b"2"])
    await engine.publish("g", [b"3"])
    await connection.execute("SELECT pg_notify($1, $2)", f"propolis:{schema}", "\n?over")
    await over.wait()
    assert heard == ["\n!f"]


async def test_a_ring_keeps_no_more_rows_than_entries_and_a_sweep_forgets_them(
    postgres_url: str, schema: str, connection: asyncpg.Connection
) -> None:
    clock = FakeClock()
    engine = await PostgresEngine(postgres_url, schema=schema, clock=clock).open()
    hour = timedelta(hours=1)
    for n in range(20):
        await engine.publish("f", [str(n).encode()], keep=5, keep_for=hour)
    await engine.follow({"f": None, "g": 1}, wait=0.01)
    counting = f'SELECT count(*) FROM "{schema}".feed_entry'
    assert await connection.fetchval(counting) == 5
    clock.advance(hour)
    await engine.sweep(limit=3)  # a bite
    assert await connection.fetchval(counting) == 2
    await engine.sweep()
    for table in ("feed", "feed_entry", "feed_follower"):
        assert await connection.fetchval(f'SELECT count(*) FROM "{schema}".{table}') == 0
    await engine.close()


async def test_a_number_is_drawn_by_whoever_holds_the_head(
    engine: PostgresEngine, connection: asyncpg.Connection, schema: str
) -> None:
    """One that was drawn before, and waits, would be overtaken by what is published meanwhile."""
    await engine.publish("f", [b"0"])
    transaction = connection.transaction()
    await transaction.start()
    advance = f'UPDATE "{schema}".feed SET last = last + 1000000000000 RETURNING last'
    published_meanwhile = await connection.fetchval(advance)
    publishing = asyncio.create_task(engine.publish("f", [b"1"]))
    await asyncio.wait([publishing], timeout=0.3)
    await transaction.commit()
    number = await publishing  # on a machine that is too slow for it, it is dropped
    assert number is None or number > published_meanwhile
