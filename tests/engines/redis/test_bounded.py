"""L5 on Redis: what one call does is counted in commands, those in scripts included, and does not grow."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta

import pytest
import pytest_asyncio

from propolis.core.batch import Batch
from propolis.core.job import Dead, Done, Lease
from propolis.core.protocols import Engine, Rule, RuleKind, Scope
from propolis.core.transitions import Retention
from propolis.engines.address import Address
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.engine import RedisEngine
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.servers.redis import RedisServer, redis

BITE = 500


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """Of our own: nobody else's commands are counted."""
    with redis() as running:
        yield running


@pytest_asyncio.fixture
async def engine(server: RedisServer, prefix: str) -> AsyncIterator[RedisEngine]:
    target = target_of(Address(server.url))
    handle = await RedisEngine(target, prefix=f"{prefix}:", retention=Retention(dead_max=10)).open()
    yield handle
    await handle.close()


@pytest.fixture
def meter(server: RedisServer) -> Meter:
    return Meter(server)


class Meter:
    """How many commands the server has done since the last look, and of which kind."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self.reset()

    def reset(self) -> None:
        self._server.ask("CONFIG", "RESETSTAT")

    def counts(self) -> dict[str, int]:
        lines = str(self._server.ask("INFO", "commandstats")).splitlines()
        found = (line.removeprefix("cmdstat_").partition(":calls=") for line in lines if ":calls=" in line)
        return {name: int(rest.partition(",")[0]) for name, _, rest in found}

    def total(self) -> int:
        return sum(self.counts().values())


async def take(engine: Engine, limit: int = 100, queue: str = "default") -> list[Lease]:
    return await engine.lease({queue: limit}, span=SPAN, holder=HOLDER)


def on_task(kind: RuleKind, task: str, n: int = 0) -> Rule:
    return Rule(kind, Scope.TASK, task, n)


async def test_a_lease_sets_a_bite_of_a_paused_task_aside_and_comes_back(
    engine: RedisEngine, meter: Meter
) -> None:
    """L5.2: the runnable job behind the backlog is found by whoever comes back at once."""
    await engine.put([a_job(task="paused") for _ in range(2_000)])
    await engine.put([a_job(task="other", id="behind")])
    await engine.add_rule(on_task(RuleKind.PAUSE, "paused"))
    calls, leases = 0, list[Lease]()
    while not leases:
        meter.reset()
        leases = await take(engine, 10)
        assert meter.total() < 12 * BITE
        calls += 1
        assert leases or await engine.wait(["default"], timeout=60)
        assert calls <= 10
    assert ([lease.id for lease in leases], calls) == (["behind"], 5)

    await engine.remove_rule(RuleKind.PAUSE, Scope.TASK, "paused")
    meter.reset()
    assert len(await take(engine, 10)) == 10
    assert meter.total() < 150  # those that wait are not moved


async def test_a_paused_queue_is_skipped(engine: RedisEngine, meter: Meter) -> None:
    """L5.2."""
    await engine.put([a_job() for _ in range(1_000)])
    await engine.add_rule(Rule(RuleKind.PAUSE, Scope.QUEUE, "default"))
    meter.reset()
    assert await take(engine) == []
    assert meter.total() < 30


async def test_many_limited_keys_cost_a_bite(engine: RedisEngine, meter: Meter) -> None:
    """L5.5: 100 keys with limit 1; each call leases what has room, in the order of the puts."""
    for n in range(100):
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, f"key-{n}", 1))
    await engine.put([a_job(n, id=f"job-{n:04}", key=f"key-{n % 100}") for n in range(2_000)])
    first = await take(engine, 1_000)
    while len(first) < 100:
        first += await take(engine, 1_000)
    for _ in range(5):
        await take(engine, 1_000)
    assert [lease.id for lease in first] == [f"job-{n:04}" for n in range(100)]

    await engine.settle([(lease, Done()) for lease in first[::2]])
    meter.reset()
    again = await take(engine, 1_000)
    assert meter.total() < 3_000
    assert [lease.id for lease in again] == [f"job-{n:04}" for n in range(100, 200, 2)]


async def test_a_limit_on_another_task_costs_plain_jobs_nothing(engine: RedisEngine, meter: Meter) -> None:
    """L5.5: neither when they are leased nor when they are settled."""
    costs = []
    for _ in range(2):
        await engine.put([a_job() for _ in range(500)])
        meter.reset()
        leases = await take(engine, 500)
        await engine.settle([(lease, Done()) for lease in leases])
        costs.append(meter.total())
        assert len(leases) == 500
        await engine.add_rule(on_task(RuleKind.LIMIT, "another", 1))
    assert costs[1] <= costs[0] + 5


async def test_what_ran_before_its_limit_was_made_counts_and_is_counted_out(engine: RedisEngine) -> None:
    """L5.5: also where the end of a plain job is not looked at."""
    await engine.put([a_job(task="t") for _ in range(6)])
    first = await take(engine, 3)
    await engine.add_rule(on_task(RuleKind.LIMIT, "t", 3))
    assert await take(engine) == []
    await engine.settle([(lease, Done()) for lease in first[:2]])
    assert len(await take(engine)) == 2
    await engine.settle([(first[2], Done())])
    assert len(await take(engine)) == 1


async def test_what_ran_before_its_limit_was_made_is_counted_in_bites(
    engine: RedisEngine, meter: Meter
) -> None:
    """L5.5: nothing starts under it before that is over; leases are renewed and end meanwhile."""
    await engine.put([a_job(task="t", queue=f"q{n % 3}") for n in range(3_000)])
    wants = {"q0": 40, "q1": 40, "q2": 40}
    running: list[Lease] = []
    while got := await engine.lease(wants, span=SPAN, holder=HOLDER):
        running += got
    await engine.put([a_job(task="t", queue="q0") for _ in range(10)])
    await engine.put([a_job(task="other", queue="q0", id="other")])

    meter.reset()
    await engine.add_rule(on_task(RuleKind.LIMIT, "t", 3_001))
    assert meter.total() < 10 * BITE
    first = await engine.lease({"q0": 1}, span=SPAN, holder=HOLDER)
    assert first == []
    assert all(each.until for each in await engine.renew(running[:500], span=SPAN))
    assert await engine.settle([(lease, Done()) for lease in running[-100:]]) == []
    del running[-100:]
    started: list[Lease] = []
    for _ in range(10):
        meter.reset()
        started += await engine.lease({"q0": 100}, span=SPAN, holder=HOLDER)
        assert meter.total() < 15 * BITE
    assert sorted(lease.task for lease in started) == ["other", *["t"] * 10]  # 2,900 run, and 10 more

    await engine.add_rule(on_task(RuleKind.LIMIT, "t", 2_911))
    await engine.put([a_job(task="t", queue="q1") for _ in range(10)])
    assert len(await engine.lease({"q1": 100}, span=SPAN, holder=HOLDER)) == 1
    assert await engine.settle([(lease, Done()) for lease in running[:5]]) == []
    assert len(await engine.lease({"q1": 100}, span=SPAN, holder=HOLDER)) == 5
    await engine.remove_rule(RuleKind.LIMIT, Scope.TASK, "t")
    assert len(await engine.lease({"q1": 100}, span=SPAN, holder=HOLDER)) == 4


async def test_few_claims_of_many_jobs_are_counted_in_bites(engine: RedisEngine, meter: Meter) -> None:
    """L5: a limit looks into what each claim has, up to a bite in all of them."""
    await engine.put([a_job(task="t") for _ in range(8_000)])
    for _ in range(8):
        assert len(await take(engine, 1_000)) == 1_000
    meter.reset()
    await engine.add_rule(on_task(RuleKind.LIMIT, "t", 8_001))
    assert meter.total() < 10 * BITE
    await engine.put([a_job(task="t") for _ in range(3)])
    started: list[Lease] = []
    for _ in range(20):
        started += await take(engine, 3)
    assert len(started) == 1


async def test_sweeps_count_on_what_ran_before_a_limit_was_made(engine: RedisEngine) -> None:
    """L5.5: also if nobody asks for jobs under it."""
    await engine.put([a_job(task="t") for _ in range(2_500)])
    while await take(engine, 50):
        """Until all of them run."""
    await engine.add_rule(on_task(RuleKind.LIMIT, "t", 1))
    swept = [(await engine.sweep(limit=1_000, by="one")).again_in for _ in range(4)]
    assert [again is not None and again < timedelta(seconds=1) for again in swept] == [
        True,
        False,
        False,
        False,
    ]


async def test_a_large_queue_is_dropped_in_bites(engine: RedisEngine, meter: Meter) -> None:
    """L5.3: nothing of it is leased any more, and what is put afterwards is leased at once."""
    await engine.put([a_job(priority=n % 2) for n in range(2_500)])
    await engine.put([a_job(delay_ms=10_000, id="later"), a_job(id="asked")])
    [held] = await take(engine, 1)
    meter.reset()
    assert await engine.drop("default") == 1_000
    assert meter.total() < 20_000
    await engine.put([a_job(id="new")])
    assert [lease.id for lease in await take(engine)] == ["new"]
    counts = (await engine.queues())["default"]
    assert (counts.waiting, counts.running) == (0, 2)
    [record] = (await engine.records("removal")).records
    assert (record.name, json.loads(record.value)["removed"]) == ("queue:default", 1_000)
    assert await engine.cancel(["asked", "later"]) == [True, True]

    swept = [await engine.sweep() for _ in range(3)]
    assert sum(each.removed for each in swept) == 1_499
    assert (await engine.records("removal")).records == []
    assert await engine.settle([(held, Done())]) == []
    counts = (await engine.queues())["default"]
    assert (counts.running, counts.cancelled, counts.total) == (1, 2, 3)


async def test_a_queue_can_be_dropped_again_while_it_is_removed(engine: RedisEngine) -> None:
    """L5.3: with what was set aside by a rule both times."""
    await engine.add_rule(on_task(RuleKind.PAUSE, "paused"))
    for _ in range(2):
        await engine.put([a_job(task="paused") for _ in range(600)])
        await engine.put([a_job(task="free") for _ in range(1_000)])
        assert await take(engine, 1) == []
        assert await engine.drop("default") == 1_000
    assert await take(engine) == []
    while (await engine.records("removal")).records:
        assert (await engine.sweep()).removed > 0
    assert await engine.queues() == {}
    await engine.put([a_job(task="paused", id="last")])
    await engine.remove_rule(RuleKind.PAUSE, Scope.TASK, "paused")
    assert [lease.id for lease in await take(engine)] == ["last"]


async def test_a_large_batch_is_deleted_in_bites(engine: RedisEngine, meter: Meter) -> None:
    """L5.3: its members are not leased any more; a batch of the same name is another one."""
    special = [a_job(id="special", batch="b", member=2_500, unique="u", chosen=True)]
    await engine.put_batch(Batch(id="b"), [a_job(n, batch="b", member=n) for n in range(2_500)], seal=False)
    await engine.put(special)
    [held] = await take(engine, 1)
    meter.reset()
    assert await engine.delete_batch("b") is True
    assert meter.total() < 20_000
    assert await engine.batch("b") is None
    await engine.put_batch(Batch(id="b"), [a_job(id="mine", batch="b", member=0)])
    while not (leases := await take(engine)):
        assert await engine.wait(["default"], timeout=60)
    assert [lease.id for lease in leases] == ["mine"]
    assert await engine.settle([(held, Done()), (leases[0], Done())]) == []
    while (await engine.records("removal")).records:
        await engine.sweep()
    assert (await engine.queues())["default"].total == 0
    assert await take(engine) == []


async def test_a_cap_counts_nothing_at_a_put(engine: RedisEngine, meter: Meter) -> None:
    """L5.4: however many groups were set aside."""
    await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 10_000))
    costs = []
    for first, last in ((0, 10), (10, 300)):
        for n in range(first, last):
            await engine.add_rule(Rule(RuleKind.BLOCK, Scope.KEY, f"key-{n}"))
        await engine.put([a_job(key=f"key-{n}") for n in range(first, last)])
        await take(engine)
        meter.reset()
        await engine.put([a_job(task="plain")])
        costs.append(meter.total())
        await engine.settle([(lease, Done()) for lease in await take(engine)])
    assert costs[1] <= costs[0]
    assert (await engine.queues())["default"].held == 300


async def test_sweeps_and_rules_do_not_walk_through_all_queues(engine: RedisEngine, meter: Meter) -> None:
    """L5.7: a sweep looks at a bite of the doors; a rule wakes those that it concerns."""
    await engine.put([a_job(queue=f"queue-{n}") for n in range(2_500)])
    await engine.sweep()
    meter.reset()
    await engine.sweep()
    assert meter.total() < 60
    meter.reset()
    await engine.add_rule(on_task(RuleKind.LIMIT, "t", 5))
    await engine.remove_rule(RuleKind.LIMIT, Scope.TASK, "t")
    assert meter.total() < 30
    assert meter.counts().get("publish", 0) == 0

    seen: list[str] = []
    while page := await engine.queues(limit=1_000, after=seen[-1] if seen else None):
        assert len(page) <= 1_000
        seen += page
    assert seen == sorted(f"queue-{n}" for n in range(2_500))


async def test_every_door_is_looked_at_in_turn(engine: RedisEngine, server: RedisServer, prefix: str) -> None:
    """L5.7: five sweeps look at 1,200 of them, and go on with the first ones."""
    await engine.put([a_job(queue=f"queue-{n}") for n in range(1_200)])
    doors = [f"{prefix}:{{queue-{n}}}:incoming" for n in (999, 0, 500)]
    for door in doors:
        server.ask("LPUSH", door, '{"task": "t"}')
        for _ in range(5):
            await engine.sweep()
        assert server.ask("EXISTS", door) == 0
    assert (await engine.queues(limit=1, after="queue-998"))["queue-999"].ready == 2


async def test_a_sweep_looks_only_where_dead_jobs_are_too_many(engine: RedisEngine, meter: Meter) -> None:
    """L5.8: ten are kept of each queue."""
    for queue, n in (("few", 5), ("many", 30)):
        await engine.put([a_job(queue=queue) for _ in range(n)])
        await engine.settle([(lease, Dead()) for lease in await take(engine, 50, queue)])
    assert (await engine.sweep()).removed == 20
    meter.reset()
    assert (await engine.sweep()).removed == 0
    assert meter.total() < 40
    assert {name: counts.dead for name, counts in (await engine.queues()).items()} == {"few": 5, "many": 10}


async def test_retention_goes_on_at_once_where_there_is_more(engine: RedisEngine) -> None:
    """L5.10: a sweeper that has left something undone comes back in 10 ms."""
    await engine.put([a_job() for _ in range(2_100)])
    for _ in range(3):
        ended = [(lease, Done(b"r", keep=timedelta(milliseconds=1))) for lease in await take(engine, 1_000)]
        await engine.settle(ended)
    removed = 0
    while removed < 2_100:
        swept = await engine.sweep(by="me")
        removed += swept.removed
        assert removed == 2_100 or swept.again_in == timedelta(milliseconds=10)


async def test_a_page_of_members_reads_no_more_than_some_pieces(
    engine: RedisEngine, server: RedisServer, prefix: str
) -> None:
    """L5.12: many members that come together are several pieces."""
    await engine.put_batch(Batch(id="b"), [a_job(n, batch="b", member=n) for n in range(2_500)])
    pieces = str(server.ask("ZCARD", f"{prefix}:batch_members:b"))
    assert int(pieces) == 3
    members = await engine.members("b", limit=10, after=1_994)
    assert [member.member for member in members] == list(range(1_995, 2_005))


async def test_a_place_in_line_is_searched_for_up_to_a_bite(
    engine: RedisEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L5: in a list that would be walked to its end."""
    monkeypatch.setattr("propolis.engines.redis.engine.COUNTED", 50)
    await engine.put([a_job(id="first", priority=1), *(a_job(id=f"job-{n:02}") for n in range(80))])
    places = [await engine.position(f"job-{n:02}") for n in (0, 48, 49, 50, 79)]
    await engine.cancel([f"job-{n:02}" for n in range(10, 40)])

    assert places == [1, 49, 50, 50, 50]
    assert [await engine.position(f"job-{n:02}") for n in (9, 40, 44)] == [10, 11, 15]


async def test_cancelling_many_rebuilds_no_list(engine: RedisEngine, meter: Meter) -> None:
    """L5.13: what is struck out is dropped a few at a time, and those that stand keep their order."""
    await engine.put([a_job(id=f"job-{n:04}") for n in range(2_000)])
    gone = [f"job-{n:04}" for n in range(2_000) if n % 8]
    for first in range(0, len(gone), 50):
        meter.reset()
        await engine.cancel(gone[first : first + 50])
        assert meter.counts().get("lrange", 0) == 0
        assert meter.total() < 50 * 45
    await engine.put([a_job(id="last")])
    assert await engine.position("job-1992") == 249
    assert [lease.id for lease in await take(engine, 1_000)] == [
        *(f"job-{n:04}" for n in range(0, 2_000, 8)),
        "last",
    ]
    assert (await engine.queues())["default"].waiting == 0


async def test_lost_leases_are_found_without_a_look_at_those_that_run(
    server: RedisServer, prefix: str
) -> None:
    """L5.13: a bite of a large bundle, then the rest of it."""
    engine = await RedisEngine(target_of(Address(server.url)), prefix=f"{prefix}:").open()
    await engine.put([a_job(id=f"job-{n:04}") for n in range(2_200)])
    lost = await engine.lease({"default": 1_200}, span=timedelta(0), holder=HOLDER)
    await take(engine, 1_000)
    meter = Meter(server)
    swept = [await engine.sweep(limit=500) for _ in range(3)]
    assert [each.reaped for each in swept] == [500, 500, 200]
    counts = meter.counts()
    assert counts.get("hgetall", 0) + counts.get("hkeys", 0) == 0
    assert meter.total() < 1_200 * 20
    again = await take(engine, 3_000)
    assert {lease.id for lease in again} == {lease.id for lease in lost}
    await engine.close()


async def test_a_claim_is_bounded_by_bytes(engine: RedisEngine) -> None:
    """L5.13: whoever wants more comes back at once."""
    await engine.put([a_job("x" * 200_000, id=f"job-{n:03}") for n in range(200)])
    seen: list[str] = []
    while len(seen) < 200:
        leases = await take(engine, 200)
        assert 0 < sum(len(lease.body) for lease in leases) < 20_000_000
        seen += [lease.id for lease in leases]
        assert len(seen) == 200 or await engine.wait(["default"], timeout=60)
    assert seen == [f"job-{n:03}" for n in range(200)]
