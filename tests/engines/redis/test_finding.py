"""I8, L5: jobs are found bite by bite, with one shard or several, and none of them is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
import pytest_asyncio
from tests.engines.redis.looking import listed

from propolis.core.job import Dead, Done, Outcome, Released, State
from propolis.core.protocols import Filter
from propolis.engines.address import Address
from propolis.engines.redis import engine as redis_engine
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.engine import RedisEngine
from propolis.engines.redis.shards.engine import ShardedEngine
from propolis.engines.redis.shards.shard_map import ShardMap
from propolis.testing.engines.samples import HOLDER, SPAN, a_job

Redis = RedisEngine | ShardedEngine
QUEUES = [f"q{n}" for n in range(7)]
HOUR = timedelta(hours=1)
FILTERS = [
    Filter(),
    Filter(queue="q1"),
    Filter(task="rare"),
    Filter(scheduled=True),
    Filter(scheduled=False),
    Filter(reason="failed"),
    Filter(queue="q2", state=State.READY),
    Filter(queue="q2", state=State.DEAD),
    Filter(state=State.DEAD, reason="other"),
    Filter(state=State.RUNNING, task="rare"),
    Filter(state=State.DEAD, scheduled=True),
    *[Filter(state=state) for state in State],
]


@pytest_asyncio.fixture(params=["alone", "shards"])
async def engine(valkey_url: str, prefix: str, request: pytest.FixtureRequest) -> AsyncIterator[Redis]:
    target = target_of(Address(valkey_url))
    handle: Redis = (
        RedisEngine(target, prefix=f"{prefix}:")
        if request.param == "alone"
        else ShardedEngine(target, ShardMap(3), prefix=f"{{{prefix}}}:")
    )
    yield await handle.open()
    await handle.close()


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if these jobs were too many to be put in order."""
    monkeypatch.setattr(redis_engine, "LOOKED_THROUGH", 40)
    monkeypatch.setattr(redis_engine, "LOOKED_INTO", 3)


async def fill(engine: Redis) -> None:
    """Some hundred jobs in every state, in several queues."""
    for queue in QUEUES:
        await engine.put([a_job(queue=queue, task="rare" if n % 9 == 0 else "t") for n in range(120)])
        await engine.put([a_job(queue=queue, delay_ms=10**8) for _ in range(10)])
        leases = await engine.lease({queue: 90}, span=SPAN, holder=HOLDER)
        ends: list[Outcome] = [Done(keep=HOUR), Dead(), Dead("other")]
        await engine.settle([(lease, ends[n % 3]) for n, lease in enumerate(leases[:60])])
    await engine.put(waiting := [a_job(queue="q3") for _ in range(30)])
    await engine.cancel([job.id for job in waiting])


async def walked(engine: Redis, where: Filter, limit: int) -> list[str]:
    return [info.id for info in await listed(engine, where, limit)]


async def test_a_walk_finds_each_job_once(engine: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is looked for, and however short the pages are."""
    await fill(engine)
    ordered = {where: await walked(engine, where, 400) for where in FILTERS}
    assert len(ordered[Filter()]) == 7 * 130 + 30
    monkeypatch.setattr(redis_engine, "LOOKED_THROUGH", 40)
    monkeypatch.setattr(redis_engine, "LOOKED_INTO", 3)

    for where, expected in ordered.items():
        for limit in (1, 7, 500):
            assert Counter(await walked(engine, where, limit)) == Counter(expected), (where, limit)


@pytest.mark.usefixtures("many")
async def test_what_ended_is_listed_in_the_order_of_its_end(engine: Redis) -> None:
    """Queue by queue; in one call, however much waits."""
    await engine.put([a_job(queue="q1", id=f"job-{n}") for n in range(300)])
    leases = await engine.lease({"q1": 20}, span=SPAN, holder=HOLDER)
    for lease in reversed(leases):
        await engine.settle([(lease, Dead())])

    page = await engine.find(Filter(queue="q1", state=State.DEAD), limit=100)

    assert [info.id for info in page.jobs] == [lease.id for lease in reversed(leases)]


@pytest.mark.usefixtures("many")
async def test_a_walk_goes_on_behind_what_was_deleted(engine: Redis) -> None:
    """Each bite is deleted before the next one is looked for."""
    await fill(engine)
    left = Counter(await walked(engine, Filter(), 100))
    ended = Counter(await walked(engine, Filter(state=State.DEAD), 100))
    seen: list[str] = []
    after = None
    while after is not None or not seen:
        page = await engine.find(Filter(state=State.DEAD), limit=7, after=after)
        seen += (ids := [info.id for info in page.jobs])
        assert all(await engine.delete(ids))
        after = page.after

    assert Counter(seen) == ended
    assert Counter(await walked(engine, Filter(), 100)) == left - ended


async def test_a_list_that_grows_is_gone_through(engine: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there were few, and then many, what was shown is not shown again."""
    ids = [f"job-{n:03}" for n in range(80)]
    await engine.put([a_job(queue=QUEUES[n % 7], id=job_id) for n, job_id in enumerate(ids)])
    page = await engine.find(Filter(), limit=30)
    shown = [info.id for info in page.jobs]
    assert shown == ids[:30]
    monkeypatch.setattr(redis_engine, "LOOKED_THROUGH", 40)
    await engine.put([a_job(queue="more") for _ in range(80)])

    while page.after is not None:
        page = await engine.find(Filter(), limit=30, after=page.after)
        shown += [info.id for info in page.jobs]

    assert len(shown) == len(set(shown)) == 160
    assert set(ids) < set(shown)


async def test_large_jobs_are_found_a_few_at_once(engine: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are counted as well."""
    monkeypatch.setattr(redis_engine, "LOOKED_THROUGH_BYTES", 10_000)
    await engine.put([a_job("x" * 5000, queue="q1", id=f"job-{n}") for n in range(100)])

    page = await engine.find(Filter(queue="q1"), limit=1000)

    assert 0 < len(page.jobs) < 100
    assert len(set(await walked(engine, Filter(queue="q1"), 1000))) == 100


async def test_what_stands_first_is_known_without_a_look_at_all(engine: Redis) -> None:
    """For `propolis queues --age`, also where jobs went to the front, became due, or were struck out."""
    await engine.put([a_job(queue="q1", id=f"job-{n}", priority=n) for n in range(3)])
    await engine.put([a_job(queue="q2", id="struck"), a_job(queue="q2", id="stays")])
    await engine.put([a_job(queue="q3", delay_ms=10**8)])
    await engine.cancel(["struck"])
    [lease] = await engine.lease({"q1": 1}, span=SPAN, holder=HOLDER)
    await engine.settle([(lease, Released())])

    oldest = await engine.oldest(QUEUES)

    infos = {queue: await engine.get(job_id) for queue, job_id in (("q1", "job-0"), ("q2", "stays"))}
    assert oldest == {queue: info.put_at for queue, info in infos.items() if info}
