"""What is PostgreSQL's own: its clock, transactions of the caller, other languages, large bundles."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import asyncpg
import pytest

from propolis.core import wire
from propolis.core.job import Done, Lease
from propolis.core.protocols import Durability, Engine, Receipt, Rule, RuleKind, Scope, Transactional
from propolis.engines.postgres.engine import PostgresEngine
from propolis.engines.postgres.schema import set_of
from propolis.errors import BadSetting, QueueFull
from propolis.testing.engines.samples import HOLDER, SPAN, a_job


async def take(engine: Engine, limit: int = 100) -> list[Lease]:
    return await engine.lease({"default": limit}, span=SPAN, holder=HOLDER)


async def test_durability_is_read_from_the_server(engine: PostgresEngine) -> None:
    assert engine.durability is Durability.PROCESS  # the server of these tests does not sync


async def test_the_time_is_the_servers(engine: PostgresEngine, connection: asyncpg.Connection) -> None:
    before = await connection.fetchval("SELECT clock_timestamp()")
    await engine.put([a_job()])
    [lease] = await take(engine)
    after = await connection.fetchval("SELECT clock_timestamp()")

    assert before <= lease.put_at <= after
    assert before <= lease.until - SPAN <= after
    assert before <= await engine.now()


async def test_jobs_put_in_a_transaction_appear_with_it(
    engine: PostgresEngine, connection: asyncpg.Connection
) -> None:
    assert isinstance(engine, Transactional)
    kept, lost = a_job(), a_job()

    async with connection.transaction():
        assert await engine.put_in(connection, [kept]) == [Receipt(kept.id, created=True)]
        assert await take(engine) == []
    undone = connection.transaction()
    await undone.start()
    await engine.put_in(connection, [lost])
    await undone.rollback()

    assert [lease.id for lease in await take(engine)] == [kept.id]


async def test_a_refused_put_in_a_transaction_speaks_our_words(
    engine: PostgresEngine, connection: asyncpg.Connection
) -> None:
    await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 1))

    with pytest.raises(QueueFull):
        async with connection.transaction():
            await engine.put_in(connection, [a_job(), a_job()])
    with pytest.raises(BadSetting, match="str"):
        await engine.put_in("not a connection", [a_job()])


async def test_a_job_that_commits_late_is_found_below_the_floor(
    engine: PostgresEngine, connection: asyncpg.Connection
) -> None:
    """The claim looks at everything again whenever it would come back short."""
    late = a_job()
    async with connection.transaction():
        await engine.put_in(connection, [late])
        await engine.put([a_job() for _ in range(4)])
        assert len(await take(engine, 2)) == 2  # and keeps its floor

    assert late.id in [lease.id for lease in await take(engine, 3)]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
async def test_a_server_that_isolates_more_by_default_changes_nothing(
    postgres_url: str, schema: str, connection: asyncpg.Connection, level: str
) -> None:
    """I1, I2: the engine relies on READ COMMITTED, and asks for it where it is not the default."""
    role = f"strict_{schema}"
    await connection.execute(f"CREATE ROLE {role} LOGIN SUPERUSER")
    await connection.execute(f"ALTER ROLE {role} SET default_transaction_isolation TO '{level}'")
    engine = await PostgresEngine(postgres_url.replace("postgres@", f"{role}@"), schema=schema).open()
    try:
        job = a_job()
        answers = await asyncio.gather(*(engine.put([job]) for _ in range(10)))
        assert sum(receipt.created for [receipt] in answers) == 1
        await engine.put([a_job() for _ in range(100)])
        taken = await asyncio.gather(*(take(engine, 10) for _ in range(10)))
        assert len({lease.id for leases in taken for lease in leases}) == 100
        shown = await engine._link.read("SHOW transaction_isolation")
        assert shown[0][0] == "read committed"
    finally:
        await engine.close()
        await connection.execute(f"DROP OWNED BY {role} CASCADE")
        await connection.execute(f"DROP ROLE {role}")


async def test_any_language_can_put_a_job_by_sql(
    engine: PostgresEngine, schema: str, connection: asyncpg.Connection
) -> None:
    job = a_job(1, "two", priority=5, chosen=True, delay_ms=0)
    envelope = wire.encode(job).decode()

    for _ in range(2):
        assert await connection.fetchval(f'SELECT "{schema}".enqueue($1)', envelope) == job.id
    with pytest.raises(asyncpg.PostgresError, match="task"):
        await connection.fetchval(f'SELECT "{schema}".enqueue($1)', '{"v": 1}')

    [lease] = await take(engine)
    assert (lease.body, lease.task) == (wire.encode(job), job.task)
    info = await engine.get(job.id)
    assert info is not None
    assert info.priority == 5


async def test_times_in_an_envelope_put_by_sql_are_kept(
    engine: PostgresEngine, schema: str, connection: asyncpg.Connection
) -> None:
    moment = await engine.now() + timedelta(hours=1)
    job = a_job(due_at=moment, expires_in_ms=10_000)

    await connection.fetchval(f'SELECT "{schema}".enqueue($1)', wire.encode(job).decode())

    info = await engine.get(job.id)
    assert info is not None
    assert info.due_at == moment
    assert info.expires_at == info.put_at + timedelta(seconds=10)


async def test_a_claim_is_bounded_by_bytes_too(
    engine: PostgresEngine, schema: str, connection: asyncpg.Connection
) -> None:
    """L5.13, I14, I15: in a chunk and in rows, and the next claim goes on."""
    await connection.execute(
        f'CREATE OR REPLACE FUNCTION "{set_of(schema)}".max_bytes() RETURNS bigint IMMUTABLE LANGUAGE sql'
        " AS 'SELECT 5000::bigint'"
    )
    jobs = [a_job("x" * 900) for _ in range(12)]
    for chunks in (1, 0):
        await engine.put(jobs)
        leases = await take(engine)
        assert await connection.fetchval(f'SELECT count(*) FROM "{schema}".chunk') == chunks
        assert len(leases) == 6  # the last one is the one with which it is too much
        while more := await take(engine):
            assert len(more) <= 6
            leases += more

        assert [(lease.id, lease.body) for lease in leases] == [(job.id, wire.encode(job)) for job in jobs]
        assert await engine.settle([(lease, Done()) for lease in leases]) == []
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.QUEUE, "default", 100))  # now they are rows


async def test_a_line_of_held_jobs_is_set_aside_in_time(engine: PostgresEngine) -> None:
    """L1, S2.10, S2.12: the walk goes on where it was; a queue that is paused is not walked."""
    jobs = [a_job(task="slow", queue="mixed") for _ in range(3000)]
    await engine.put([*jobs, a_job(task="quick", queue="mixed")])
    await engine.add_rule(Rule(RuleKind.PAUSE, Scope.TASK, "slow"))

    bites = [await engine.lease({"mixed": 1}, span=SPAN, holder=HOLDER) for _ in range(5)]

    assert [lease.task for bite in bites for lease in bite] == ["quick"]
    assert (await engine.queues())["mixed"].held == 3000
    await engine.remove_rule(RuleKind.PAUSE, Scope.TASK, "slow")
    await engine.add_rule(Rule(RuleKind.PAUSE, Scope.QUEUE, "mixed"))
    assert await engine.lease({"mixed": 1}, span=SPAN, holder=HOLDER) == []
    await engine.remove_rule(RuleKind.PAUSE, Scope.QUEUE, "mixed")
    leases: list[Lease] = []
    while more := await engine.lease({"mixed": 1000}, span=SPAN, holder=HOLDER):
        leases += more
    assert [lease.id for lease in leases] == [job.id for job in jobs]  # all of them, in their order


async def test_many_unique_keys_that_are_held_are_refused_one_for_one(engine: PostgresEngine) -> None:
    """I12: the receipts name the holders in the order of the call, whatever is between them."""
    held = [a_job(unique=f"k{n}") for n in range(500)]
    await engine.put(held)
    again = [a_job(unique=f"k{n}" if n % 2 else f"new{n}") for n in range(500)]

    receipts = await engine.put(again)

    assert receipts == [
        Receipt(held[n].id, created=False) if n % 2 else Receipt(again[n].id, created=True)
        for n in range(500)
    ]
    assert (await engine.queues())["default"].total == 750
