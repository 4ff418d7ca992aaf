"""Rules that only concurrency can break, on PostgreSQL."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from propolis.core.batch import Batch
from propolis.core.ids import new_id
from propolis.core.job import Done, Lease, Retried
from propolis.core.protocols import Engine, Receipt
from propolis.engines.postgres.engine import PostgresEngine
from propolis.errors import BatchSealed, EngineUnavailable, OutcomeUnknown
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN, a_job


async def take(engine: Engine, limit: int = 100) -> list[Lease]:
    return await engine.lease({"default": limit}, span=SPAN, holder=HOLDER)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "delayed": {"delay_ms": 1000},
    "keyed": {"key": "k"},
    "chosen": {"chosen": True},
}


async def test_a_deadlock_is_nobodys_business(engine: PostgresEngine) -> None:
    """Several who end the same jobs in opposite orders."""
    ids = [new_id() for _ in range(200)]
    await engine.put([a_job(id=name) for name in ids])

    ways = (ids, ids[::-1], ids, ids[::-1])
    answers = await asyncio.gather(*(engine.cancel(way) for way in ways))

    assert sum(map(sum, answers)) == len(ids)
    assert (await engine.queues())["default"].cancelled == len(ids)


@pytest.mark.parametrize("options", [{}, {"key": "k"}, {"delay_ms": 1000}], ids=["plain", "keyed", "delayed"])
async def test_one_job_comes_of_an_id_that_nobody_chose_and_many_put(
    engine: PostgresEngine, options: dict[str, Any]
) -> None:
    """As when a put is repeated because its answer was lost."""
    for _ in range(20):
        job = a_job(**options)
        answers = await asyncio.gather(*(engine.put([job]) for _ in range(6)))
        assert sum(receipt.created for [receipt] in answers) == 1


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
async def test_one_job_comes_of_an_id_put_in_two_ways_at_once(
    engine: PostgresEngine, connection: asyncpg.Connection, first: str, second: str
) -> None:
    """I1: to different tables, in each of which the id would be free.  The second waits for the first."""
    name = new_id()
    async with connection.transaction():
        await engine.put_in(connection, [a_job(id=name, **KINDS[first])])
        call = asyncio.create_task(engine.put([a_job(id=name, **KINDS[second])]))
        waited, _ = await asyncio.wait({call}, timeout=0.05)
        assert not waited

    assert await call == [Receipt(name, created=False)]
    assert (await engine.queues())["default"].total == 1


# Holds up whoever looks for a job in the last of the tables where it may wait.
GATE = """
CREATE FUNCTION "{schema}".gate() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_advisory_xact_lock(hashtext('{schema}')); RETURN NULL; END $$;
CREATE TRIGGER gate AFTER DELETE ON "{schema}".held EXECUTE FUNCTION "{schema}".gate()
"""
WAITS_FOR = "SELECT count(*) FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid))"


async def test_what_is_not_there_is_not_cancelled(engine: PostgresEngine) -> None:
    """T9."""
    await engine.put([a_job(), a_job()])
    leases = await take(engine)
    await engine.settle([(leases[0], Done())])
    assert await engine.cancel(["nobody", leases[0].id, leases[1].id]) == [False, False, True]


async def test_a_job_that_moves_while_it_is_looked_for_is_cancelled(
    postgres_url: str, connection: asyncpg.Connection, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T9: it is live, and always where was looked just before; locks hold the search up meanwhile."""
    monkeypatch.setattr("propolis.engines.postgres.engine.LOCK_WITHIN", 25.0)
    engine = await PostgresEngine(postgres_url, schema=schema).open()
    other, observer = await asyncpg.connect(postgres_url), await asyncpg.connect(postgres_url)
    await engine.put([a_job(id="j")])
    [lease] = await take(engine)

    await connection.execute(GATE.format(schema=schema))
    await connection.execute("SELECT pg_advisory_lock(hashtext($1))", schema)
    cancelling = asyncio.create_task(engine.cancel(["j"]))
    await waiting_for_locks(observer, schema, 1)
    assert await engine.settle([(lease, Retried(timedelta(hours=1)))]) == []
    moved = f'DELETE FROM "{schema}".scheduled RETURNING *'
    await other.execute(f'BEGIN; WITH moved AS ({moved}) INSERT INTO "{schema}".ready SELECT * FROM moved')
    await connection.execute("SELECT pg_advisory_unlock(hashtext($1))", schema)
    async with asyncio.timeout(20):
        while not await observer.fetchval(WAITS_FOR, other.get_server_pid()):
            await asyncio.sleep(0.01)
    await other.execute("COMMIT")

    assert await cancelling == [True]
    for each in (other, observer, engine):
        await each.close()


@pytest.mark.parametrize("many", [1, 20])
async def test_a_put_that_is_repeated_names_the_job_that_is_there(engine: PostgresEngine, many: int) -> None:
    """T1: by its token, where another job has the unique key; and so it did the first time."""
    [holder] = await engine.put([a_job(unique="k")])
    jobs = [a_job(unique="k"), *(a_job() for _ in range(many))]

    first = await engine.put(jobs, token="t")
    again = await engine.put(jobs, token="t")

    assert first == [Receipt(holder.id, created=False), *(Receipt(job.id, created=True) for job in jobs[1:])]
    assert again == [Receipt(holder.id, created=False), *(Receipt(job.id, created=False) for job in jobs[1:])]


async def test_one_job_comes_of_an_id_that_many_put_in_many_ways(engine: PostgresEngine) -> None:
    """I1: also in bundles, and after the first has gone on."""
    for _ in range(10):
        names = [new_id() for _ in range(3)]
        bundles = [[a_job(id=name, **kind) for name in names] for kind in KINDS.values()]
        taking = asyncio.create_task(take(engine))
        answers = await asyncio.gather(*(engine.put(bundle) for bundle in bundles * 2))
        await taking
        made = [receipt.id for answer in answers for receipt in answer if receipt.created]
        assert sorted(made) == sorted(names)


async def test_a_batch_sealed_while_it_is_filled_counts_what_it_took(
    engine: PostgresEngine,
) -> None:
    for _ in range(20):
        batch = Batch(id=new_id())
        await engine.put_batch(batch, seal=False)
        members = [a_job(batch=batch.id, member=number) for number in range(4)]
        answers = await asyncio.gather(
            *(engine.put([member]) for member in members), engine.seal(batch.id), return_exceptions=True
        )
        refused = sum(isinstance(answer, BatchSealed) for answer in answers)
        status = await engine.batch(batch.id)
        assert status is not None
        assert status.total == len(members) - refused


async def waiting_for_locks(connection: asyncpg.Connection, schema: str, n: int) -> None:
    """Until so many statements of this schema wait for a lock."""
    count = (
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND position($1 IN query) > 0"
    )
    async with asyncio.timeout(20):
        while await connection.fetchval(count, f'"{schema}') != n:
            await asyncio.sleep(0.01)


async def test_bundles_with_members_of_the_same_batches_do_not_lock_each_other_out(
    postgres_url: str, connection: asyncpg.Connection, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F33: a deadlock is found after a second, and one of the two bundles begins anew."""
    monkeypatch.setattr("propolis.engines.postgres.client.RETRIES", 1)
    monkeypatch.setattr("propolis.engines.postgres.engine.LOCK_WITHIN", 25.0)
    engine = await PostgresEngine(postgres_url, schema=schema).open()
    for batch in ("a", "b"):
        await engine.put_batch(Batch(id=batch), [a_job(batch=batch) for _ in range(2)])
    a1, a2, b1, b2 = await take(engine)
    observer = await asyncpg.connect(postgres_url)

    async with connection.transaction(), asyncio.TaskGroup() as group:
        await connection.execute(f'SELECT FROM "{schema}".batch WHERE id = $1 FOR UPDATE', "a")
        one = group.create_task(engine.settle([(a1, Done()), (b1, Done())]))
        await waiting_for_locks(observer, schema, 1)
        other = group.create_task(engine.settle([(b2, Done()), (a2, Done())]))
        await waiting_for_locks(observer, schema, 2)
        await connection.execute("COMMIT")

    assert (one.result(), other.result()) == ([], [])
    await observer.close()
    await engine.close()


async def test_those_who_end_members_and_find_others_expired_do_not_lock_each_other_out(
    postgres_url: str, connection: asyncpg.Connection, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F33, T11: in one call, while the newest member waits in line."""
    monkeypatch.setattr("propolis.engines.postgres.client.RETRIES", 1)
    monkeypatch.setattr("propolis.engines.postgres.engine.LOCK_WITHIN", 25.0)
    clock = FakeClock()
    engine = await PostgresEngine(postgres_url, schema=schema, clock=clock).open()
    await engine.put_batch(Batch(id="a"), [a_job(batch="a") for _ in range(2)], seal=False)
    leases = [*await take(engine, 1), *await take(engine, 1)]
    await engine.put([*(a_job(batch="a", expires_in_ms=10) for _ in range(2)), a_job(batch="a")])
    await engine.seal("a")
    clock.advance("1s")
    observer = await asyncpg.connect(postgres_url)

    async with connection.transaction(), asyncio.TaskGroup() as group:
        await connection.execute(f'SELECT FROM "{schema}".batch WHERE id = $1 FOR SHARE', "a")
        calls = []
        for n, lease in enumerate(leases):
            ended = [(lease, Done())]
            calls.append(group.create_task(engine.exchange(ended, {"default": 1}, span=SPAN, holder=HOLDER)))
            await waiting_for_locks(observer, schema, n + 1)
        await connection.execute("COMMIT")

    assert [call.result().lost for call in calls] == [[], []]
    [last] = [lease for call in calls for lease in call.result().leases]
    assert await engine.settle([(last, Done())]) == []
    [status] = await engine.batches()
    assert (status.done, status.dead, status.finished_at) == (3, 2, clock.now)
    await observer.close()
    await engine.close()


@pytest.mark.parametrize("more", [0, 20], ids=["few", "many"])
async def test_an_id_that_an_old_snapshot_shows_in_line_is_taken(
    engine: PostgresEngine, connection: asyncpg.Connection, schema: str, more: int
) -> None:
    """I1, I8: it was leased meanwhile; put a second time, it could never leave its run again."""
    job = a_job()
    await engine.put([job])
    async with connection.transaction(isolation="repeatable_read"):
        assert await connection.fetchval(f'SELECT count(*) FROM "{schema}".ready') == 1
        [lease] = await take(engine)

        receipts = await engine.put_in(connection, [job, *(a_job() for _ in range(more))])

    assert receipts[0] == Receipt(job.id, created=False)
    assert all(receipt.created for receipt in receipts[1:])
    assert await engine.settle([(lease, Retried(delay=timedelta(0)))]) == []
    assert len(await take(engine)) == 1 + more


async def test_the_server_gives_up_what_nobody_waits_for_any_more(
    postgres_url: str, connection: asyncpg.Connection, engine: PostgresEngine, schema: str
) -> None:
    """L3, I5: it would wait for ever, and end the lease when nobody thinks of it."""
    hasty = await PostgresEngine(postgres_url, schema=schema, patience="300ms").open()
    await engine.put_batch(Batch(id="a"), [a_job(batch="a")])
    [lease] = await take(engine)
    observer = await asyncpg.connect(postgres_url)

    async with connection.transaction():
        await connection.execute(f'SELECT FROM "{schema}".batch WHERE id = $1 FOR UPDATE', "a")
        with pytest.raises((OutcomeUnknown, EngineUnavailable)):
            await hasty.settle([(lease, Done())])
        await waiting_for_locks(observer, schema, 0)

    assert await engine.settle([(lease, Done())]) == []
    await observer.close()
    await hasty.close()
