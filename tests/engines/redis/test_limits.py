"""What limits for many keys, and rates, leave on the server, and that no damage to it stops a queue."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
import pytest_asyncio
from tests.engines.redis.looking import keys

from propolis.core.job import Done, Lease
from propolis.core.protocols import UNBOUNDED, Rule, RuleKind, Scope, task_key
from propolis.engines.address import Address
from propolis.engines.redis.client.link import RedisLink
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.engine import RedisEngine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, a_job

EVERY = timedelta(seconds=20)
LONG = timedelta(hours=9)
PREFIX_RULE = Rule(RuleKind.LIMIT, Scope.KEY, "t*", 1)
KEY_RULE = Rule(RuleKind.LIMIT, Scope.KEY, "t1", 1)
TASK_RULE = Rule(RuleKind.LIMIT, Scope.TASK_KEY, task_key("tests.echo", "*"), 1)
RATE = Rule(RuleKind.LIMIT, Scope.KEY, "t*", UNBOUNDED, every=EVERY)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest_asyncio.fixture
async def engine(valkey_url: str, prefix: str, clock: FakeClock) -> AsyncIterator[RedisEngine]:
    handle = await RedisEngine(target_of(Address(valkey_url)), prefix=f"{prefix}:", clock=clock).open()
    yield handle
    await handle.close()


async def start(engine: RedisEngine) -> list[Lease]:
    return await engine.lease({"default": 100}, span=LONG, holder=HOLDER)


async def put(engine: RedisEngine, *names: str) -> None:
    await engine.put([a_job(key=name) for name in names])


async def forget(engine: RedisEngine, *rules: Rule) -> None:
    for rule in rules:
        await engine.remove_rule(rule.kind, rule.scope, rule.name)


@pytest.mark.parametrize(
    "rules", [[PREFIX_RULE], [TASK_RULE], [TASK_RULE, PREFIX_RULE]], ids=["t*", "task", "both"]
)
async def test_limits_for_many_keys_leave_nothing(
    engine: RedisEngine, link: RedisLink, prefix: str, rules: list[Rule]
) -> None:
    """L5: neither of keys that have run, nor where the limit goes while they run."""
    for rule in rules:
        await engine.add_rule(rule)
    await put(engine, *[f"t{n}" for n in range(20)])
    leases = await start(engine)
    await engine.settle([(lease, Done()) for lease in leases[:10]])
    assert len({key for key in await keys(link, prefix) if key.startswith("limited:")}) == 10

    await forget(engine, *rules)
    await engine.settle([(lease, Done()) for lease in leases[10:]])
    await engine.sweep()

    assert {key for key in await keys(link, prefix) if key.startswith(("lim", "pref", "count"))} == set()


async def test_what_started_after_a_limit_for_many_keys_counts_when_there_is_one_again(
    engine: RedisEngine,
) -> None:
    """T2: also where those that were counted before still run, or have ended meanwhile."""
    await engine.add_rule(PREFIX_RULE)
    await put(engine, "t1", "t2")
    one, two = await start(engine)
    await forget(engine, PREFIX_RULE)
    await put(engine, "t1", "t2", "t3")
    more = await start(engine)
    assert len(more) == 3
    await engine.settle([(lease, Done()) for lease in (one, two, more[1])])

    await engine.add_rule(PREFIX_RULE)
    await put(engine, "t1", "t2", "t3")

    [t2] = await start(engine)
    assert t2.id != two.id
    await engine.settle([(lease, Done()) for lease in (more[0], more[2])])
    assert len(await start(engine)) == 2


async def test_the_limit_of_one_key_can_go_while_many_have_one(engine: RedisEngine) -> None:
    """T2: what runs still counts."""
    own = Rule(RuleKind.LIMIT, Scope.KEY, "t1", 2)
    for rule in (PREFIX_RULE, own):
        await engine.add_rule(rule)
    await put(engine, "t1", "t1", "t1")
    first, second = await start(engine)

    await forget(engine, own)
    await engine.settle([(first, Done())])
    assert await start(engine) == []
    await engine.settle([(second, Done())])
    assert len(await start(engine)) == 1


async def test_full_buckets_are_forgotten_in_bites(
    engine: RedisEngine, link: RedisLink, prefix: str, clock: FakeClock
) -> None:
    """L5: the number of keys ever seen leaves nothing."""
    await engine.add_rule(RATE)
    await put(engine, *[f"t{n}" for n in range(30)])
    leases = await start(engine)
    await put(engine, *[f"t{n}" for n in range(30)])
    assert await start(engine) == []
    await engine.settle([(lease, Done()) for lease in leases])
    for what in ("buckets", "refills"):
        assert await link.command("ZCARD", f"{prefix}:{what}") == 30

    clock.advance(EVERY)
    left = []
    for _ in range(4):
        await engine.sweep(limit=10)
        left.append(await link.command("ZCARD", f"{prefix}:buckets"))
    assert left == [20, 10, 0, 0]
    assert await link.command("ZCARD", f"{prefix}:refills") == 0


@pytest.mark.parametrize("score", ["+inf", "1e300", "-inf", "-1", "nonsense"])
async def test_a_damaged_bucket_stops_nothing(
    engine: RedisEngine, link: RedisLink, prefix: str, clock: FakeClock, score: str
) -> None:
    """L7: at worst it is empty, or full."""
    await engine.add_rule(RATE)
    if score == "nonsense":
        await link.command("SET", f"{prefix}:buckets", score)
    else:
        await link.command("ZADD", f"{prefix}:buckets", score, "key:t1")
    await put(engine, "t1", "t1", "t2")

    started = [await start(engine)]
    for _ in range(2):
        await engine.sweep(by="sweeper")
        clock.advance(EVERY)
        started.append(await start(engine))

    assert sum(map(len, started)) == 3


@pytest.mark.parametrize("rate", ["", "x y", "0 5", "5 0", "-1 3", "nonsense"])
async def test_a_damaged_rate_is_none(engine: RedisEngine, link: RedisLink, prefix: str, rate: str) -> None:
    """L7: the number is kept."""
    await engine.add_rule(RATE)
    if rate == "nonsense":
        await link.command("SET", f"{prefix}:rates", rate)
    else:
        await link.command("HSET", f"{prefix}:rates", "limit:key:t*", rate)
    await put(engine, "t1", "t1")

    assert len(await start(engine)) == 2
    await engine.sweep()
    assert [rule.n for rule in await engine.rules()] == [UNBOUNDED]


async def test_of_many_keys_those_go_on_that_have_room_again(
    engine: RedisEngine, link: RedisLink, prefix: str
) -> None:
    """L1, L5: at once and in their old order, though one call does not look at all that wait."""
    await engine.add_rule(PREFIX_RULE)
    names = [f"t{n}" for n in range(1_200)]
    await engine.put([a_job(id=f"{turn}-{name}", key=name) for turn in (1, 2) for name in names])
    leases: list[Lease] = []
    while len(leases) < 1_200:
        leases += await start(engine)
    for _ in range(20):
        assert await start(engine) == []
    assert (await engine.queues())["default"].held == 1_200

    ended = [*leases[5:600:7], *leases[601::9]]
    await engine.settle([(lease, Done()) for lease in ended])
    found = [*await start(engine), *await start(engine)]
    assert [lease.id[2:] for lease in found] == [lease.id[2:] for lease in ended]
    assert await start(engine) == []

    await forget(engine, PREFIX_RULE)
    found += leases
    for _ in range(60):
        found += await start(engine)
    await engine.settle([(lease, Done()) for lease in found if lease not in ended])
    assert (await engine.queues())["default"].total == 0
    assert not {key for key in await keys(link, prefix) if "freed" in key}


STRAY = "0" * 32


@pytest.mark.parametrize("rule", [PREFIX_RULE, TASK_RULE, KEY_RULE], ids=["t*", "task", "t1"])
async def test_a_count_heals_by_itself(engine: RedisEngine, link: RedisLink, prefix: str, rule: Rule) -> None:
    """L7: code that does not know the limit has ended the run, and left its id in the set."""
    await engine.add_rule(rule)
    await link.command("SADD", f"{prefix}:limited:key:t1", STRAY)
    await put(engine, "t1", "t1")
    assert await start(engine) == []

    await engine.sweep()
    assert len(await start(engine)) == 1

    await engine.sweep()
    assert await start(engine) == []


async def test_each_sweep_looks_at_few_of_those_that_are_counted(
    engine: RedisEngine, link: RedisLink, prefix: str
) -> None:
    await engine.add_rule(PREFIX_RULE)
    await link.command("SADD", f"{prefix}:limited:key:t1", *[f"stray-{n}" for n in range(10)])
    await put(engine, "t1")
    left = []
    for _ in range(4):
        assert await start(engine) == []
        await engine.sweep()
        left.append(await link.command("SCARD", f"{prefix}:limited:key:t1"))
    assert left == [7, 4, 1, 0]
    assert len(await start(engine)) == 1


async def test_what_limits_count_is_repaired_in_bites(
    engine: RedisEngine, link: RedisLink, prefix: str
) -> None:
    """L7: what runs still counts."""
    of_task = Rule(RuleKind.LIMIT, Scope.TASK, "tests.echo", 2)
    for rule in (PREFIX_RULE, of_task):
        await engine.add_rule(rule)
    await put(engine, "t1", "t2", "t2")
    first, _ = await start(engine)
    assert await engine.repair(mend=True) == []
    strays = [f"stray-{n}" for n in range(1200)]
    await link.command("SADD", f"{prefix}:limited:key:t1", *strays)
    await link.command("SADD", f"{prefix}:limited:task:tests.echo", STRAY)
    await link.command("SADD", f"{prefix}:limited:key:t2", first.id)  # it runs, under another key

    found = await engine.repair(mend=False)

    assert set(found) == {
        *(f"job {stray} was counted under key:t1, and does not run" for stray in strays),
        f"job {STRAY} was counted under task:tests.echo, and does not run",
        f"job {first.id} was counted under key:t2, and does not run",
    }
    assert len(await engine.repair(mend=True)) == len(found) == 1202
    assert await engine.repair(mend=False) == []
    for count, n in (("key:t1", 1), ("key:t2", 1), ("task:tests.echo", 2)):
        assert await link.command("SCARD", f"{prefix}:limited:{count}") == n
