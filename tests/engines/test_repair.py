"""Storage that somebody or something has harmed: what is wrong with it is found, and mended."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio

from propolis.core.job import Dead, Done, Unknown
from propolis.core.protocols import Engine, Repairs
from propolis.engines.address import Address
from propolis.engines.postgres.engine import PostgresEngine
from propolis.engines.redis.client.link import RedisLink
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.engine import RedisEngine
from propolis.engines.redis.repair import repair
from propolis.engines.redis.shards.engine import ShardedEngine
from propolis.engines.redis.shards.shard_map import ShardMap
from propolis.engines.sqlite.engine import SQLiteEngine
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.engines.steps import CALLBACKS, a_batch, counts, put_one, settle_one, take_one

Harm = Callable[[str], Awaitable[None]]


@pytest_asyncio.fixture
async def sqlite(tmp_path: Path) -> AsyncIterator[SQLiteEngine]:
    engine = await SQLiteEngine(tmp_path / "jobs.db").open()
    yield engine
    await engine.close()


@pytest.fixture
def harm_sqlite(tmp_path: Path) -> Harm:
    async def harm(statement: str) -> None:
        with sqlite3.connect(tmp_path / "jobs.db") as connection:
            connection.execute(statement)
        connection.close()

    return harm


async def some_work(engine: Engine) -> None:
    """Jobs in every place: nothing is wrong with them."""
    await engine.put([a_job(n) for n in range(5)])
    await put_one(engine, unique="held", queue="mail")
    await put_one(engine, delay_ms=3_600_000)
    batch = a_batch()
    await engine.put_batch(batch, [a_job(batch=batch.id, member=n, queue="in-batch") for n in range(3)])
    await settle_one(engine, (await engine.lease({"in-batch": 1}, span=SPAN, holder=HOLDER))[0], Done())
    await engine.lease({"default": 2}, span=SPAN, holder=HOLDER)


async def test_nothing_is_wrong_with_what_nobody_harmed(sqlite: SQLiteEngine) -> None:
    """L7."""
    await some_work(sqlite)
    assert isinstance(sqlite, Repairs)
    assert await sqlite.repair(mend=True) == []


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("DELETE FROM propolis_ready WHERE queue = 'mail'", ["stood nowhere"]),
        ("DELETE FROM propolis_scheduled", ["stood nowhere"]),
        ("DELETE FROM propolis_running", ["stood nowhere"] * 2),
        (
            "DELETE FROM propolis_job WHERE queue = 'default' AND due_us > put_us",
            ["that of no job", "queue default"],
        ),
        (
            "DELETE FROM propolis_job WHERE queue = 'mail'",
            ["that of no job", "unique key 'held'", "queue mail"],
        ),
        ("UPDATE propolis_tally SET put = put + 7 WHERE queue = 'mail'", ["queue mail counted 8"]),
        ("DELETE FROM propolis_tally WHERE queue = 'mail'", ["queue mail counted 0"]),
        ("UPDATE propolis_batch SET live = live + 4", ["counted 6 members to come, and 2 are there"]),
    ],
)
async def test_what_is_wrong_is_told_and_then_mended(
    sqlite: SQLiteEngine, harm_sqlite: Harm, harm: str, words: list[str]
) -> None:
    """F56, L7: without `mend` nothing is changed."""
    await some_work(sqlite)
    await harm_sqlite(harm)

    found = await sqlite.repair(mend=False)

    others = [sentence for sentence in found if not any(word in sentence for word in words)]
    assert len(found) - len(others) >= len(words)
    assert [sentence for sentence in others if "counted" not in sentence] == []  # of what was taken away
    assert await sqlite.repair(mend=False) == found
    assert await sqlite.repair(mend=True) != []
    assert await sqlite.repair(mend=False) == []


async def test_what_stood_nowhere_runs(sqlite: SQLiteEngine, harm_sqlite: Harm) -> None:
    """F56, L7."""
    jobs = [await put_one(sqlite) for _ in range(1500)]
    await harm_sqlite("DELETE FROM propolis_ready")
    assert len(await sqlite.repair(mend=True)) == 1500
    leases = await sqlite.lease({"default": 2000}, span=SPAN, holder=HOLDER)
    assert [lease.id for lease in leases] == [job.id for job in jobs]
    assert (await counts(sqlite)).running == 1500


async def test_a_batch_whose_members_are_gone_ends(sqlite: SQLiteEngine, harm_sqlite: Harm) -> None:
    """F56, L7: and calls back."""
    batch = a_batch()
    await sqlite.put_batch(batch, [a_job(batch=batch.id, member=n) for n in range(3)])
    await harm_sqlite("DELETE FROM propolis_job")
    await harm_sqlite("DELETE FROM propolis_ready")
    await sqlite.repair(mend=True)
    assert (await take_one(sqlite, CALLBACKS)).task in ("tests.on_succeeded", "tests.on_finished")


# --- PostgreSQL --------------------------------------------------------------------------


@pytest_asyncio.fixture
async def postgres(postgres_url: str, schema: str) -> AsyncIterator[PostgresEngine]:
    engine = await PostgresEngine(postgres_url, schema=schema).open()
    yield engine
    await engine.close()


@pytest.fixture
def harm_postgres(postgres_url: str, schema: str) -> Harm:
    async def harm(statement: str) -> None:
        connection = await asyncpg.connect(postgres_url)
        try:
            await connection.execute(f'SET search_path TO "{schema}"')
            await connection.execute(statement)
        finally:
            await connection.close()

    return harm


async def test_nothing_is_wrong_on_postgres_with_what_nobody_harmed(postgres: PostgresEngine) -> None:
    """L7."""
    await some_work(postgres)
    assert isinstance(postgres, Repairs)
    assert await postgres.repair(mend=True) == []


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (
            "DELETE FROM ready WHERE queue = 'mail'",
            ["unique key 'held'", "queue mail counted 1 jobs (put), and 0"],
        ),
        (
            "INSERT INTO scheduled SELECT * FROM ready WHERE queue = 'mail'",
            ["two places, scheduled and ready", "queue mail counted 1 jobs (put), and 2"],
        ),
        ("UPDATE tally SET put = put + 7 WHERE queue = 'mail'", ["queue mail counted 8"]),
        ("UPDATE batch SET live = live + 4", ["counted 6 members to come, and 2 are there"]),
    ],
)
async def test_what_is_wrong_on_postgres_is_told_and_then_mended(
    postgres: PostgresEngine, harm_postgres: Harm, harm: str, words: list[str]
) -> None:
    """F56, L7: without `mend` nothing is changed."""
    await some_work(postgres)
    await harm_postgres(harm)

    found = await postgres.repair(mend=False)

    assert len(found) == len(words), found
    assert all(word in sentence for word, sentence in zip(words, found, strict=True)), found
    assert await postgres.repair(mend=False) == found
    assert len(await postgres.repair(mend=True)) > 0
    assert await postgres.repair(mend=False) == []


async def test_a_batch_on_postgres_whose_members_are_gone_ends(
    postgres: PostgresEngine, harm_postgres: Harm
) -> None:
    """F56, L7: and calls back."""
    batch = a_batch()
    await postgres.put_batch(batch, [a_job(batch=batch.id, member=n) for n in range(3)])
    await harm_postgres("DELETE FROM ready")
    await postgres.repair(mend=True)
    assert (await take_one(postgres, CALLBACKS)).task in ("tests.on_succeeded", "tests.on_finished")


# --- Redis -------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def redis(valkey_url: str, prefix: str) -> AsyncIterator[RedisEngine]:
    engine = await RedisEngine(target_of(Address(valkey_url)), prefix=f"{prefix}:").open()
    yield engine
    await engine.close()


@pytest_asyncio.fixture
async def harm_redis(link: RedisLink, prefix: str) -> Harm:
    """`P` stands for what all keys begin with, and a word in angles for the first field of that hash."""

    async def harm(commands: str) -> None:
        for command in commands.split(";"):
            words = [word.replace("P", f"{prefix}:") for word in command.split()[1:]]
            if words[-1] == "<first>":
                words[-1] = (await link.command("HKEYS", words[0]))[0].decode()
            await link.command(command.split()[0], *words)

    return harm


async def more_work(engine: RedisEngine) -> None:
    """And some that only Redis keeps in places of their own."""
    await some_work(engine)
    await put_one(engine, queue="kept", task="tests.unknown")
    await settle_one(engine, await take_one(engine, "kept"), Unknown())
    await put_one(engine, queue="ended", task="tests.boom")
    await settle_one(engine, await take_one(engine, "ended"), Dead("why", keep=timedelta(days=1)))


async def test_nothing_is_wrong_on_redis_with_what_nobody_harmed(redis: RedisEngine) -> None:
    """L7."""
    await more_work(redis)
    assert isinstance(redis, Repairs)
    assert await redis.repair(mend=True) == []


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("DEL P{mail}:line:0", ["stood nowhere", "queue mail counted 1 jobs, and 0"]),
        ("DEL P{mail}:ranks", ["stood nowhere", "queue mail counted 1 jobs, and 0"]),
        ("DEL P{default}:scheduled", ["stood nowhere", "queue default counted 6 jobs, and 5"]),
        ("DEL P{kept}:parked:tests.unknown", ["stood nowhere", "queue kept counted 1 jobs, and 0"]),
        ("DEL P{ended}:dead", ["stood nowhere", "queue ended counted 1 jobs, and 0"]),
        ("DEL P{default}:running", ["stood nowhere"] * 2 + ["queue default counted 6 jobs, and 4"]),
        ("DEL Pleases", ["a lease that never ends"] * 2),
        ("RPUSH P{mail}:line:0 nobody", ["among the ready jobs of queue mail", "counted 1 jobs, and 2"]),
        ("ZADD P{mail}:front 1 nobody", ["among the front jobs of queue mail", "counted 1 jobs, and 2"]),
        ("HSET P{mail}:running nobody x", ["among the running jobs of queue mail", "counted 1 jobs, and 2"]),
        ("HSET Punique other nobody", ["unique key 'other' was held by job nobody"]),
        ("HINCRBY P{mail}:tally put 7", ["queue mail counted 8 jobs, and 1"]),
        ("DEL P{mail}:tally", ["queue mail counted 0 jobs, and 1"]),
    ],
)
async def test_what_is_wrong_on_redis_is_told_and_then_mended(
    redis: RedisEngine, harm_redis: Harm, link: RedisLink, prefix: str, harm: str, words: list[str]
) -> None:
    """F56, L7: without `mend` nothing is changed."""
    await more_work(redis)
    await harm_redis(harm)
    before = await dump(link, prefix)

    found = await redis.repair(mend=False)

    assert len(found) == len(words), found
    assert all(word in sentence for word, sentence in zip(words, found, strict=True)), found
    assert await dump(link, prefix) == before
    assert await redis.repair(mend=True) != []
    assert await redis.repair(mend=False) == []


async def dump(link: RedisLink, prefix: str) -> dict[bytes, bytes]:
    """All that is stored."""
    keys = await link.command("KEYS", f"{prefix}:*")
    return {key: await link.command("DUMP", key) for key in keys}


async def test_what_stood_nowhere_on_redis_runs_once(redis: RedisEngine, harm_redis: Harm) -> None:
    """F56, L7: in the order of puts; some stand in line where they were, and some were struck out."""
    jobs = [await put_one(redis) for _ in range(1500)]
    await redis.cancel([job.id for job in jobs[:100]])
    await harm_redis("LTRIM P{default}:line:0 0 699")

    assert len(await redis.repair(mend=True)) > 700

    assert await redis.repair(mend=False) == []
    assert (await counts(redis)).ready == 1400
    leases = await redis.lease({"default": 2000}, span=SPAN, holder=HOLDER)
    assert [lease.id for lease in leases] == [job.id for job in jobs[100:]]


async def test_repairing_redis_overlooks_nothing_that_moves(redis: RedisEngine, harm_redis: Harm) -> None:
    """L7: while it reads a list from its end, that end goes away; and nothing stands in line twice then."""
    jobs = [await put_one(redis) for _ in range(1600)]
    await harm_redis("LTRIM P{default}:line:0 0 1399")
    kept, going = jobs[:1000] + jobs[1400:], [job.id for job in reversed(jobs[1000:1400])]
    taken: list[str] = []

    async def call(name: str, *args: bytes | str | int, reads: bool = False) -> object:
        answer = await redis._call(name, *args, reads=reads)
        if name == "entries":
            taken.extend(it.id for it in await redis.lease({"default": 7}, span=SPAN, holder=HOLDER))
            kept.append(await put_one(redis))
            await redis.cancel([kept.pop().id, *going])
            going.clear()
        return answer

    found = await repair(call, mend=True, alone=True)

    assert len([sentence for sentence in found if "stood nowhere" in sentence]) == 200
    assert await redis.repair(mend=True) == []
    taken += [it.id for it in await redis.lease({"default": 5000}, span=SPAN, holder=HOLDER)]
    assert sorted(taken) == sorted(job.id for job in kept)


async def test_two_who_repair_redis_at_once_do_it_once(redis: RedisEngine, harm_redis: Harm) -> None:
    """L7: the first has looked and walked when the second does all of it."""
    jobs = [await put_one(redis) for _ in range(20)]
    await harm_redis("LTRIM P{default}:line:0 0 9")

    async def call(name: str, *args: bytes | str | int, reads: bool = False) -> object:
        if name == "stand_again":
            await redis.repair(mend=True)
        return await redis._call(name, *args, reads=reads)

    await repair(call, mend=True, alone=True)

    leases = await redis.lease({"default": 100}, span=SPAN, holder=HOLDER)
    assert [lease.id for lease in leases] == [job.id for job in jobs]


async def test_a_lease_on_redis_that_nobody_would_end_is_lost(redis: RedisEngine, harm_redis: Harm) -> None:
    """F56, L2: after the repair the next sweep gives it back."""
    job = await put_one(redis)
    await take_one(redis)
    await harm_redis("DEL Pleases")
    assert (await redis.sweep()).reaped == 0
    await redis.repair(mend=True)
    assert (await redis.sweep()).reaped == 1
    assert (await take_one(redis)).id == job.id


@pytest.mark.parametrize("harm", ["DEL Pjobs ; DEL P{default}:line:0", "HINCRBY Pbatch:{batch} total 4"])
async def test_a_batch_on_redis_whose_members_are_gone_ends(
    redis: RedisEngine, harm_redis: Harm, harm: str
) -> None:
    """F56, L7: and calls back."""
    batch = a_batch()
    await redis.put_batch(batch, [a_job(batch=batch.id, member=n) for n in range(3)])
    await harm_redis(harm.replace("{batch}", batch.id))
    found = await redis.repair(mend=False)
    assert any("members to come" in sentence for sentence in found)
    await redis.repair(mend=True)
    assert await redis.repair(mend=False) == []
    for lease in await redis.lease({"default": 5}, span=SPAN, holder=HOLDER):
        await settle_one(redis, lease, Done())
    assert (await take_one(redis, CALLBACKS)).task in ("tests.on_succeeded", "tests.on_finished")


async def test_shards_are_repaired_each(valkey_url: str, prefix: str, link: RedisLink) -> None:
    """L7."""
    engine = ShardedEngine(target_of(Address(valkey_url)), ShardMap(4), prefix=f"{{{prefix}}}:")
    await engine.open()
    try:
        jobs = [await put_one(engine, queue=f"queue-{n}") for n in range(8)]
        assert await engine.repair(mend=True) == []
        for key in await link.command("KEYS", f"{{{prefix}:*:line:0"):
            await link.command("DEL", key)
        assert sum("stood nowhere" in sentence for sentence in await engine.repair(mend=False)) == 8
        await engine.repair(mend=True)
        assert await engine.repair(mend=False) == []
        wants = {f"queue-{n}": 9 for n in range(8)}
        leases = await engine.lease(wants, span=SPAN, holder=HOLDER)
        assert {lease.id for lease in leases} == {job.id for job in jobs}
    finally:
        await engine.close()
