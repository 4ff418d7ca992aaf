"""Limits of many who lease at the same time, on PostgreSQL."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import asyncpg
import pytest

from propolis.core.job import Done, Lease, Released
from propolis.core.protocols import UNBOUNDED, Filter, Rule, RuleKind, Scope, task_key
from propolis.engines.postgres.engine import PostgresEngine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN, a_job

HANDLES = 4
EVERY = timedelta(seconds=1)
KEYS = ("t:1", "t:2", "t:3")


def a_limit(scope: Scope, name: str, n: int = UNBOUNDED, **rate: object) -> Rule:
    return Rule(RuleKind.LIMIT, scope, name, n, **rate)  # type: ignore[arg-type]  # every and burst


EACH_KEY = [
    [a_limit(Scope.KEY, "t:*", 3)],
    [a_limit(Scope.KEY, key, 3) for key in KEYS],
    [a_limit(Scope.TASK_KEY, task_key("tests.echo", "*"), 3)],
]


async def opened(url: str, schema: str, clock: FakeClock | None) -> list[PostgresEngine]:
    return [await PostgresEngine(url, schema=schema, clock=clock).open() for _ in range(HANDLES)]


async def take(engine: PostgresEngine, limit: int) -> list[Lease]:
    return await engine.lease({"default": limit}, span=9 * SPAN, holder=HOLDER)


async def all_at_once(engines: list[PostgresEngine], limit: int) -> list[Lease]:
    found = await asyncio.gather(*(take(engine, limit) for engine in engines))
    return [lease for leases in found for lease in leases]


async def close(engines: list[PostgresEngine]) -> None:
    for engine in engines:
        await engine.close()


@pytest.mark.parametrize("rules", EACH_KEY, ids=["prefix", "exact", "task"])
async def test_those_who_lease_at_the_same_time_count_one_another(
    postgres_url: str, schema: str, rules: list[Rule]
) -> None:
    """I2: of each key three run, never four, and all jobs get their turn."""
    engines = await opened(postgres_url, schema, None)
    for rule in rules:
        await engines[0].add_rule(rule)
    await engines[0].put([a_job(key=KEYS[n % 3]) for n in range(60)])
    key_of = {info.id: info.key for info in (await engines[0].find(Filter(), limit=100)).jobs}
    running: dict[str, Lease] = {}
    done: list[str] = []

    async def work(engine: PostgresEngine) -> None:
        over: list[Lease] = []
        while len(done) < 60:
            for lease in over:  # from here on others may have its place
                del running[lease.id]
            done.extend(lease.id for lease in over)
            outcomes = [(lease, Done()) for lease in over]
            exchanged = await engine.exchange(outcomes, {"default": 5}, span=9 * SPAN, holder=HOLDER)
            over = exchanged.leases
            running.update({lease.id: lease for lease in over})
            for key in KEYS:
                assert sum(key_of[job] == key for job in running) <= 3

    async with asyncio.timeout(240):
        await asyncio.gather(*map(work, engines))

    assert sorted(done) == sorted(key_of)
    await close(engines)


STEPS = (0, 4, 6, 50, 10, 1, 9, 25, 5, 30)  # tenths of the time that a token takes
RATES = [
    [a_limit(Scope.KEY, "t:*", every=EVERY, burst=2)],
    [a_limit(Scope.KEY, "t:1", every=EVERY, burst=2)],
    [a_limit(Scope.TASK, "tests.echo", every=EVERY, burst=2)],
    [a_limit(Scope.QUEUE, "default", every=EVERY, burst=2)],
    [a_limit(Scope.TASK_KEY, task_key("tests.echo", "*"), every=EVERY, burst=2)],
]


@pytest.mark.parametrize("rules", RATES, ids=["prefix", "key", "task", "queue", "task of each key"])
async def test_those_who_lease_at_the_same_time_share_one_bucket(
    postgres_url: str, schema: str, rules: list[Rule]
) -> None:
    """I2: as if one of them leased; never more than burst and rate in any window of lease times."""
    clock = FakeClock()
    engines = await opened(postgres_url, schema, clock)
    for rule in rules:
        await engines[0].add_rule(rule)
    await engines[0].put([a_job(key="t:1") for _ in range(60)])
    starts: list[int] = []

    for tenths in STEPS:
        clock.advance(tenths * EVERY / 10)
        starts.append(0)
        for _ in range(3):  # who finds the bucket locked looks again
            leases = await all_at_once(engines, 3)
            starts[-1] += len(leases)
            await engines[0].settle([(lease, Done()) for lease in leases])

    assert starts == [2, 0, 1, 2, 1, 0, 1, 2, 0, 2]
    for first in range(len(STEPS)):
        for last in range(first, len(STEPS)):
            assert sum(starts[first : last + 1]) <= 2 + sum(STEPS[first + 1 : last + 1]) // 10
    await close(engines)


async def test_tokens_given_back_by_many_at_once_are_all_there(postgres_url: str, schema: str) -> None:
    """T7."""
    engines = await opened(postgres_url, schema, FakeClock())
    await engines[0].add_rule(a_limit(Scope.KEY, "t:*", every=EVERY, burst=8))
    await engines[0].put([a_job(key="t:1") for _ in range(20)])
    leases = await take(engines[0], 20)
    assert len(leases) == 8

    turns = zip(engines, leases[:4], leases[4:], strict=True)
    await asyncio.gather(*(each.settle([(a, Released()), (b, Released())]) for each, a, b in turns))

    assert len(await take(engines[0], 20)) == 8
    await close(engines)


async def test_a_run_that_ends_in_an_open_transaction_holds_up_nobody(
    postgres_url: str, schema: str, engine: PostgresEngine, connection: asyncpg.Connection
) -> None:
    """L6: nor does a put in one."""
    await engine.add_rule(a_limit(Scope.KEY, "t:*", 2, every=EVERY, burst=3))
    await engine.put([a_job(key="t:1") for _ in range(4)])
    first, _ = await take(engine, 9)
    async with engine.transaction() as lent:
        settled = await engine._settle_lent(lent.connection, first, Released())
        assert settled
        async with connection.transaction():
            await engine.put_in(connection, [a_job(key="t:1"), a_job(key="t:9")])
            assert await take(engine, 9) == []  # it runs as long as nothing is committed
            await engine.put([a_job(key="t:2")])
            assert len(await take(engine, 9)) == 1


async def test_what_is_told_to_open_is_forgotten_where_nothing_is_held(
    engine: PostgresEngine, connection: asyncpg.Connection, schema: str
) -> None:
    """L5: a limit that nobody reaches leaves no row for each run that ends."""
    await engine.add_rule(a_limit(Scope.KEY, "t:*", 1000))
    for _ in range(3):
        await engine.put([a_job(key=KEYS[n % 3]) for n in range(6)])
        await engine.settle([(lease, Done()) for lease in await take(engine, 6)])
    assert await take(engine, 1) == []

    assert await connection.fetchval(f"SELECT count(*) FROM {schema}.opening") == 0


async def test_what_is_told_to_open_is_forgotten_where_nobody_leases_any_more(
    postgres_url: str, connection: asyncpg.Connection, schema: str
) -> None:
    """L5."""
    clock = FakeClock()
    engine = await PostgresEngine(postgres_url, schema=schema, clock=clock).open()
    await engine.add_rule(a_limit(Scope.KEY, "t:*", 1000))
    await engine.put([a_job(key=key) for key in KEYS])
    await engine.settle([(lease, Done()) for lease in await take(engine, 3)])
    clock.advance(timedelta(minutes=2))
    await engine.sweep()
    await engine.close()

    assert await connection.fetchval(f"SELECT count(*) FROM {schema}.opening") == 0
