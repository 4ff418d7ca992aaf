"""Connections to PostgreSQL: few, given up in time, and replaced when they die."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import asyncpg
import pytest

from propolis.core.ids import new_id
from propolis.core.job import Done, Lease
from propolis.core.protocols import Engine, Renewal
from propolis.engines.postgres import client
from propolis.engines.postgres.engine import PostgresEngine
from propolis.errors import EngineClosed, EngineUnavailable, OutcomeUnknown, PropolisError
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.servers.serving import PostgresServer, postgres


async def take(engine: Engine, limit: int = 100) -> list[Lease]:
    return await engine.lease({"default": limit}, span=SPAN, holder=HOLDER)


async def test_a_server_that_is_not_there_is_told() -> None:
    with pytest.raises(EngineUnavailable, match="cannot be reached") as raised:
        await PostgresEngine("postgresql://bob:secret@127.0.0.1:1/none").open()
    assert "secret" not in str(raised.value)


async def test_an_engine_is_used_from_several_loops(engine: PostgresEngine) -> None:
    await engine.put([a_job()])
    [lease] = await take(engine)
    answers: list[Renewal] = []

    def renew() -> None:
        answers.extend(asyncio.run(engine.renew([lease], span=SPAN)))

    thread = threading.Thread(target=renew)
    thread.start()
    await asyncio.to_thread(thread.join)

    assert [answer.until is not None for answer in answers] == [True]
    assert await engine.settle([(lease, Done())]) == []


async def test_connections_are_few_and_gone_after_the_close(
    postgres_url: str, schema: str, connection: asyncpg.Connection
) -> None:
    name = f"propolis-{new_id()}"
    engine = await PostgresEngine(f"{postgres_url}?application_name={name}", schema=schema).open()
    await asyncio.gather(*(engine.put([a_job()]) for _ in range(50)))
    count = (
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%' || $1 || '%' AND pid <> pg_backend_pid()"
    )

    assert 1 <= await connection.fetchval(count, schema) <= 6
    await engine.close()

    for _ in range(100):
        if not await connection.fetchval(count, schema):
            break
        await asyncio.sleep(0.02)
    assert await connection.fetchval(count, schema) == 0
    with pytest.raises(EngineClosed):
        await engine.put([a_job()])


async def test_connections_that_are_no_longer_needed_are_closed(
    postgres_url: str, schema: str, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S2.28: all but one."""
    monkeypatch.setattr("propolis.engines.postgres.client.SPARE_FOR", 0.1)
    engine = await PostgresEngine(postgres_url, schema=schema).open()
    await asyncio.gather(*(engine.put([a_job()]) for _ in range(20)))
    count = (
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%' || $1 || '%' AND pid <> pg_backend_pid()"
    )
    assert await connection.fetchval(count, schema) > 1

    async with asyncio.timeout(20):
        while await connection.fetchval(count, schema) > 1:
            await engine.rules()
            await asyncio.sleep(0.05)
    await engine.close()


async def test_a_call_that_takes_too_long_has_an_unknown_outcome(
    postgres_url: str, schema: str, connection: asyncpg.Connection
) -> None:
    engine = await PostgresEngine(postgres_url, schema=schema, patience="300ms").open()
    async with connection.transaction():
        await connection.execute(f'LOCK TABLE "{schema}".ready')
        with pytest.raises(OutcomeUnknown):
            await engine.put([a_job()])

    assert [receipt.created for receipt in await engine.put([a_job()])] == [True]
    await engine.close()


async def test_a_call_that_is_cancelled_leaves_no_answer_for_the_next_one(
    engine: PostgresEngine, schema: str, connection: asyncpg.Connection
) -> None:
    async with connection.transaction():
        await connection.execute(f'LOCK TABLE "{schema}".ready')
        call = asyncio.create_task(engine.put([a_job()]))
        await asyncio.wait({call}, timeout=0.1)
        call.cancel()
        await asyncio.wait({call})

    assert call.cancelled()
    assert await engine.rules() == []


async def test_a_killed_connection_costs_one_call_at_most(
    engine: PostgresEngine, schema: str, connection: asyncpg.Connection
) -> None:
    await engine.put([a_job()])
    await connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE '%' || $1 || '%'"
        " AND pid <> pg_backend_pid()",
        schema,
    )
    await asyncio.sleep(0.05)

    assert len(await take(engine)) == 1


async def attempt(act: Callable[[], object]) -> PropolisError | None:
    try:
        await act()  # type: ignore[misc] # whatever it is, it is awaited here
    except PropolisError as error:
        return error
    return None


async def test_an_engine_outlives_a_restart_of_its_server() -> None:
    """No error of the driver crosses; what was acknowledged is there; fences go on growing."""
    with postgres() as server:
        engine = await PostgresEngine(server.url, patience="5s").open()
        await engine.put([a_job(id="first")])
        [lease] = await take(engine)
        waiter = asyncio.create_task(engine.wait(["default"], 60))
        await restart(server, engine)

        assert await engine.settle([(lease, Done())]) == []
        await engine.put([a_job(id="second")])
        [second] = await take(engine)
        assert second.fence > lease.fence
        waiter.cancel()
        await asyncio.wait({waiter})
        await engine.close()


async def restart(server: PostgresServer, engine: Engine) -> None:
    await asyncio.to_thread(server.stop)
    for act in (lambda: engine.put([a_job()]), lambda: take(engine), engine.queues, engine.sweep):
        assert isinstance(await attempt(act), EngineUnavailable | OutcomeUnknown)
    await asyncio.to_thread(server.start)


async def test_a_transaction_that_the_server_ends_before_its_commit_is_made_anew(
    postgres_url: str, schema: str, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L6: behind a pooler each call is one, and the server ends it where its client is too busy to go on."""
    engine = await PostgresEngine(postgres_url, schema=schema, prepare=False).open()
    fetch_seen = client._fetch_seen
    ended: list[int] = []

    async def fetch_once_ended(line: asyncpg.Connection, *rest: Any) -> Any:
        if not ended:
            ended.append(await line.fetchval("SELECT pg_backend_pid()"))
            await connection.execute("SELECT pg_terminate_backend($1, 60000)", ended[0])
        return await fetch_seen(line, *rest)

    monkeypatch.setattr(client, "_fetch_seen", fetch_once_ended)
    [receipt] = await engine.put([a_job()])
    assert ended
    assert receipt.created
    assert len(await take(engine)) == 1
    await engine.close()
