"""What is special where an app has shards: what crosses them, deaths in between, what is left."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta

import msgspec
import pytest
import pytest_asyncio
from msgspec.structs import replace

from propolis.core.batch import Batch, BatchState
from propolis.core.envelope import Envelope
from propolis.core.job import Dead, Done, Lease, Outcome, Retried, State
from propolis.core.protocols import Engine, Exchange, Filter, Receipt, Rule, RuleKind, Scope, task_key
from propolis.core.records import Change, Swap, Swapped
from propolis.engines import make_engine
from propolis.engines.address import Address
from propolis.engines.redis.client.link import RedisLink
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.engine import RedisEngine
from propolis.engines.redis.shards.engine import ShardedEngine, from_url
from propolis.engines.redis.shards.shard import Owed, Post
from propolis.engines.redis.shards.shard_map import ShardMap
from propolis.errors import BadSetting, EngineError, MemoryFull, QueueFull, StorageNotReady
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.engines.steps import bare
from propolis.testing.servers.redis import redis

COUNT = 5
SHARDS = ShardMap(COUNT)
QUEUES = [next(f"q{n}" for n in range(999) if SHARDS.of(f"q{n}") == shard) for shard in range(COUNT)]
BATCHES = [next(f"b{n}" for n in range(999) if SHARDS.of(f"b{n}") == shard) for shard in range(COUNT)]
KEYS = [next(f"k{n}" for n in range(999) if SHARDS.of(f"k{n}") == shard) for shard in range(COUNT)]

Open = Callable[..., Awaitable[ShardedEngine]]


@pytest_asyncio.fixture
async def another(valkey_url: str, prefix: str) -> AsyncIterator[Open]:
    """Opens handles on one app; a server alone has slots as well."""
    handles: list[ShardedEngine] = []

    async def open_one(clock: FakeClock | None = None, **partitions: int) -> ShardedEngine:
        target = target_of(Address(f"{valkey_url}?connect_within=30s"))
        shard_map = ShardMap(COUNT, partitions)
        handles.append(ShardedEngine(target, shard_map, prefix=f"{{{prefix}}}:", clock=clock))
        return await handles[-1].open()

    yield open_one
    for handle in handles:
        await handle.close()


@pytest_asyncio.fixture
async def engine(another: Open) -> ShardedEngine:
    return await another()


@pytest_asyncio.fixture
async def link(valkey_url: str) -> AsyncIterator[RedisLink]:
    handle = RedisLink(target_of(Address(f"{valkey_url}?connect_within=30s")))
    await handle.open()
    yield handle
    await handle.close()


async def take(engine: Engine, *queues: str, limit: int = 100) -> list[Lease]:
    return await engine.lease(dict.fromkeys(queues, limit), span=SPAN, holder=HOLDER)


async def keys(link: RedisLink, prefix: str) -> set[str]:
    """Without the shards: what is there in any of them."""
    found = [key.decode() for key in await link.command("KEYS", f"{{{prefix}*")]
    return {key.partition("}:")[2] for key in found}


async def outboxes(link: RedisLink, prefix: str) -> int:
    """How many messages wait to be sent on, in all shards."""
    found = await link.command("KEYS", f"{{{prefix}:*}}:outbox:*")
    return sum([await link.command("LLEN", key) for key in found])


# --- settings ----------------------------------------------------------------------------


def test_a_url_says_how_many_shards_and_partitions() -> None:
    url = "redis+cluster://127.0.0.1:7000"
    assert isinstance(make_engine(url), RedisEngine)
    assert isinstance(make_engine(f"{url}?shards=16&partitions=mail:4,a:b:2"), ShardedEngine)
    for options in (
        "shards=x",
        "shards=1",
        "shards=4&partitions=mail",
        "shards=4&partitions=mail:9",
        "shards=4&partitions=mail:2,mail:3",
        "partitions=mail:2",
    ):
        with pytest.raises(BadSetting):
            make_engine(f"{url}?{options}")
    with pytest.raises(BadSetting, match="hash tag"):
        from_url(Address(f"{url}?shards=4&prefix=propolis:"), None)
    with pytest.raises(BadSetting):
        make_engine("redis://127.0.0.1:7000?shards=4")


async def test_all_must_agree_on_the_number_of_shards(
    engine: ShardedEngine, valkey_url: str, prefix: str
) -> None:
    assert await engine.queues() == {}
    with pytest.raises(EngineError, match=f"write shards={COUNT}"):
        await ShardedEngine(target_of(Address(valkey_url)), ShardMap(3), prefix=f"{{{prefix}}}:").open()


async def test_what_lives_in_one_slot_gets_no_shards(valkey_url: str, prefix: str) -> None:
    target = target_of(Address(valkey_url))
    alone = await RedisEngine(target, prefix=f"{{{prefix}}}:").open()
    await alone.put([a_job()])
    await alone.close()

    with pytest.raises(EngineError, match="live in one slot"):
        await ShardedEngine(target, ShardMap(3), prefix=f"{{{prefix}}}:").open()


async def test_looking_records_nothing(another: Open, link: RedisLink, valkey_url: str, prefix: str) -> None:
    target, tagged = target_of(Address(valkey_url)), f"{{{prefix}}}:"
    looker = ShardedEngine(target, ShardMap(COUNT, {"mail": 3}), prefix=tagged)
    with pytest.raises(StorageNotReady, match="propolis init"):
        await looker.open_to_look()
    assert await keys(link, prefix) == set()
    await another()
    before = await link.command("HGETALL", f"{tagged}shards")
    await looker.open_to_look()
    assert await looker.queues() == {}
    await looker.close()
    assert await keys(link, prefix) == {"layout", "shards"}
    assert await link.command("HGETALL", f"{tagged}shards") == before
    with pytest.raises(EngineError, match=f"write shards={COUNT}"):
        await ShardedEngine(target, ShardMap(3), prefix=tagged).open_to_look()


async def test_partitions_are_recorded_and_only_grow(another: Open) -> None:
    before = await another()
    await another(mail=3)
    await before.sweep()  # a handle that was there before learns of it
    assert before._group.shard_map.partitions == {"mail": 3}
    assert (await another())._group.shard_map.partitions == {"mail": 3}
    with pytest.raises(EngineError, match="cannot have fewer"):
        await another(mail=2)


async def test_what_cannot_be_kept_across_shards_is_refused(another: Open) -> None:
    """T1: two caps in two shards; a cap on a queue with partitions; partitions for one that has a cap."""
    engine = await another(mail=3)
    with pytest.raises(EngineError, match="several partitions"):
        await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "mail", 5))
    for queue in QUEUES[:2]:
        await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, queue, 5))
    with pytest.raises(EngineError, match="one queue at a time"):
        await engine.put([a_job(queue=queue) for queue in QUEUES[:2]])
    with pytest.raises(EngineError, match="remove it before"):
        await another(**{QUEUES[0]: 2})
    with pytest.raises(QueueFull):
        await engine.put([a_job(queue=queue) for queue in (QUEUES[2], *[QUEUES[0]] * 6)])
    assert await engine.queues() == {}


# --- a death between a step and what it leads to --------------------------------------------

DYING = """
import asyncio, os, signal, sys
from propolis.engines.address import Address
from propolis.core.batch import Batch
from propolis.engines.redis.shards.shard import Post, Shard
from propolis.engines.redis.shards.shard_map import ShardMap
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.shards.engine import ShardedEngine
from propolis.core.job import Done, Retried
from propolis.core.records import Change, Swap
from propolis.testing.engines.samples import HOLDER, SPAN, a_job

url, prefix, when, what, inner, *queues = sys.argv[1:]

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

async def die_before_it_is_sent(self, owed):
    if owed:
        die()
    return {}

async def main():
    engine = await ShardedEngine(
        target_of(Address(url + "?connect_within=30s")), ShardMap(int(len(queues))), prefix=prefix
    ).open()
    leases = await engine.lease({queues[0]: 1}, span=SPAN, holder=HOLDER)
    if when == "before":
        Post.send_on = die_before_it_is_sent
    else:
        call_here = Shard.call_here
        async def call_until(self, name, *args, reads=True):
            if name == "sent_on":
                die()
            return await call_here(self, name, *args, reads=reads)
        Shard.call_here = call_until
    if what == "put":
        await engine.put([a_job(id=f"put-{queue}", queue=queue) for queue in queues], token="once")
        return
    if what == "swap":
        puts = tuple(a_job(id=f"put-{queue}", queue=queue) for queue in queues)
        await engine.swap([Swap(changes=(Change(kind="k", name="a", value=b"1"),), puts=puts)], token="once")
        return
    [lease] = leases
    outcome = {
        "emit": lambda: Done(emit=tuple(a_job(id=f"put-{queue}", queue=queue) for queue in queues)),
        "open": lambda: Done(
            emit=(a_job(id="inside", queue=queues[2], batch=inner, member=1, chosen=True),),
            opens=(Batch(id=inner, parent=lease.batch, member=1),),
        ),
        "end": lambda: Done(),
        "move": lambda: Retried(queue=queues[1]),
    }[what]()
    await engine.settle([(lease, outcome)])

asyncio.run(main())
"""


async def die_in_between(valkey_url: str, prefix: str, when: str, what: str) -> None:
    command = [sys.executable, "-c", DYING, valkey_url, f"{{{prefix}}}:", when, what, BATCHES[3], *QUEUES]
    ended = await asyncio.to_thread(subprocess.run, command, timeout=60, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()


when_it_dies = pytest.mark.parametrize("when", ["before", "after"])


@when_it_dies
async def test_emissions_outlive_who_settled(
    engine: ShardedEngine, link: RedisLink, valkey_url: str, prefix: str, when: str
) -> None:
    """T4, I8, L4: killed before its emissions are sent on, or when they are and nobody has noted it."""
    await engine.put([a_job(queue=QUEUES[0])])

    await die_in_between(valkey_url, prefix, when, "emit")

    assert await outboxes(link, prefix) == COUNT - 1
    await engine.sweep()
    assert await outboxes(link, prefix) == 0
    leases = await take(engine, *QUEUES)
    assert [lease.id for lease in leases] == [f"put-{queue}" for queue in QUEUES]
    await engine.settle([(lease, Done()) for lease in leases])
    await engine.sweep()
    assert await take(engine, *QUEUES) == []
    assert sum(counts.put for counts in (await engine.queues()).values()) == COUNT + 1


@when_it_dies
async def test_a_put_is_whole_when_its_producer_dies(
    engine: ShardedEngine, link: RedisLink, valkey_url: str, prefix: str, when: str
) -> None:
    """T1, I1: and it may be repeated with its token."""
    await die_in_between(valkey_url, prefix, when, "put")
    assert await outboxes(link, prefix) == COUNT - 1

    jobs = [a_job(id=f"put-{queue}", queue=queue) for queue in QUEUES]
    assert await engine.put(jobs, token="once") == [Receipt(job.id, False) for job in jobs]
    await engine.sweep()

    assert [lease.id for lease in await take(engine, *QUEUES)] == [job.id for job in jobs]
    assert await outboxes(link, prefix) == 0


@when_it_dies
async def test_the_jobs_of_a_swap_outlive_who_swapped(
    engine: ShardedEngine, link: RedisLink, valkey_url: str, prefix: str, when: str
) -> None:
    """R1: the record says that it happened, so its jobs come; repeated with its token, none comes twice."""
    await die_in_between(valkey_url, prefix, when, "swap")
    [record] = (await engine.records("k")).records
    assert await outboxes(link, prefix) == COUNT - 1

    await engine.sweep()

    assert await outboxes(link, prefix) == 0
    puts = tuple(a_job(id=f"put-{queue}", queue=queue) for queue in QUEUES)
    again = Swap(changes=(Change(kind="k", name="a", value=b"1"),), puts=puts)
    assert await engine.swap([again], token="once") == [Swapped(record.version)]
    assert [lease.id for lease in await take(engine, *QUEUES)] == [job.id for job in puts]
    assert await take(engine, *QUEUES) == []


@when_it_dies
async def test_a_batch_ends_once_also_if_who_ended_its_last_member_dies(
    engine: ShardedEngine, link: RedisLink, valkey_url: str, prefix: str, when: str
) -> None:
    """B1, I11, I12: the step of the batch, its callback, and the unique key that is freed."""
    batch = Batch(id=BATCHES[2], on_finished=a_job(id="end", queue=QUEUES[3], chosen=True))
    await engine.put_batch(batch, [a_job(queue=QUEUES[0], batch=batch.id, member=1, unique=KEYS[4])])

    await die_in_between(valkey_url, prefix, when, "end")

    assert await outboxes(link, prefix) >= 2
    await engine.sweep()
    await engine.sweep()
    status = await engine.batch(batch.id)
    assert status is not None
    assert (status.state, status.total, status.done) == (BatchState.SUCCESS, 1, 1)
    assert [lease.id for lease in await take(engine, *QUEUES)] == ["end"]
    assert await engine.put([a_job(id="x", unique=KEYS[4])]) == [Receipt("x", True)]
    assert await outboxes(link, prefix) == 0


@when_it_dies
async def test_a_batch_that_a_job_opens_outlives_who_settled(
    engine: ShardedEngine, link: RedisLink, valkey_url: str, prefix: str, when: str
) -> None:
    """T4, B1, I11, L4: the batch around it waits for it, and its member finds it, each in another shard."""
    outer = Batch(id=BATCHES[1], on_finished=a_job(id="end", queue=QUEUES[4], chosen=True))
    await engine.put_batch(outer, [a_job(queue=QUEUES[0], batch=outer.id)])

    await die_in_between(valkey_url, prefix, when, "open")
    for _ in QUEUES:  # each may lead to something in the next shard
        await engine.sweep()

    inner, around = await engine.batch(BATCHES[3]), await engine.batch(outer.id)
    assert inner is not None
    assert around is not None
    assert (inner.parent, inner.sealed, inner.total, inner.enqueued) == (outer.id, False, 1, 1)
    assert (around.state, around.total, around.done, around.running) == (BatchState.IN_PROGRESS, 2, 1, 1)
    assert await engine.seal(inner.id)
    leases = await take(engine, *QUEUES)
    assert [(lease.id, lease.batch) for lease in leases] == [("inside", inner.id)]
    await engine.settle([(lease, Done()) for lease in leases])
    assert [lease.id for lease in await take(engine, *QUEUES)] == ["end"]
    assert await outboxes(link, prefix) == 0


@when_it_dies
async def test_a_job_that_moves_is_never_in_two_shards_nor_in_none(
    engine: ShardedEngine, link: RedisLink, valkey_url: str, prefix: str, when: str
) -> None:
    """T5, I1, I3, I8: while it is on its way its id is taken."""
    job = a_job(queue=QUEUES[0])
    await engine.put([job])

    await die_in_between(valkey_url, prefix, when, "move")

    assert await engine.put([job]) == [Receipt(job.id, False)]
    await engine.sweep()
    [lease] = await take(engine, *QUEUES)
    assert (lease.id, lease.queue, lease.attempt, lease.failures) == (job.id, QUEUES[1], 2, 1)
    assert [info.id for info in (await engine.find(Filter())).jobs] == [job.id]
    assert await engine.settle([(lease, Done())]) == []
    assert await engine.put([job]) == [Receipt(job.id, True)]
    assert await outboxes(link, prefix) == 0


async def test_a_key_that_is_handed_on_is_never_free_in_between(
    engine: ShardedEngine, another: Open, link: RedisLink, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T4, I12: although what takes it goes a longer way, by its batch, than what frees it would."""
    [first, last] = [a_job(queue=QUEUES[0], unique=KEYS[4]), a_job(queue=QUEUES[1], unique=KEYS[4])]
    batch = Batch(id=BATCHES[2])
    following = a_job(id="next", queue=QUEUES[3], unique=KEYS[4], batch=batch.id, chosen=True)
    await engine.put_batch(batch, [], seal=False)
    await engine.put([first])
    leases = await take(engine, QUEUES[0])
    dying = await another()
    with monkeypatch.context() as patch:
        patch.setattr(Post, "send_on", sends_nothing)
        await dying.settle([(leases[0], Done(emit=(following,)))])

    for target in range(COUNT):  # but all that is for other shards than that of the batch arrives
        if target != 2:
            await engine._group.post.send_on([Owed(0, target, None)])
    assert await engine.put([last]) == [Receipt(first.id, False)]
    await engine.sweep()

    assert await engine.put([last]) == [Receipt("next", False)]
    [lease] = await take(engine, *QUEUES)
    assert lease.id == "next"
    assert await engine.settle([(lease, Done())]) == []
    assert await engine.put([last]) == [Receipt(last.id, True)]
    assert await outboxes(link, prefix) == 0


async def sends_nothing(post: Post, owed: list[Owed]) -> dict[str, str]:
    """As one that dies now."""
    return {}


# --- many at once ------------------------------------------------------------------------


async def test_of_many_puts_of_one_chosen_id_into_different_queues_one_is_accepted(another: Open) -> None:
    """T1, I1: at the very same moment."""
    handles = [await another() for _ in range(4)]
    for n in range(20):
        jobs = [a_job(id=f"chosen-{n}", queue=queue, chosen=True) for queue in QUEUES]
        answers = await asyncio.gather(
            *(handles[k % 4].put([job]) for k, job in enumerate(jobs)), return_exceptions=True
        )
        assert sum(receipt.created for [receipt] in answers) == 1  # type: ignore[misc]
    assert sum(counts.ready for counts in (await handles[0].queues()).values()) == 20


async def test_of_many_puts_of_one_key_into_different_queues_one_is_accepted(another: Open) -> None:
    """T1, I12."""
    handles = [await another() for _ in range(4)]
    for key in KEYS:
        jobs = [a_job(unique=key, queue=queue) for queue in QUEUES]
        answers = await asyncio.gather(*(handles[k % 4].put([job]) for k, job in enumerate(jobs)))
        assert sum(receipt.created for [receipt] in answers) == 1
        assert len({receipt.id for [receipt] in answers}) == 1


async def test_members_in_all_shards_that_end_at_once_end_their_batch_once(
    another: Open, link: RedisLink, prefix: str
) -> None:
    """B1, I11: many that send on the same messages do no harm."""
    handles = [await another() for _ in range(4)]
    batch = Batch(id=BATCHES[0], on_finished=a_job(id="end", queue="end", chosen=True))
    jobs = [a_job(queue=QUEUES[n % COUNT], batch=batch.id, member=n) for n in range(200)]
    await handles[0].put_batch(batch, jobs)

    async def work(handle: ShardedEngine) -> None:
        while leases := await take(handle, *QUEUES, limit=3):
            next_one = [a_job(id=f"after-{lease.id}", queue="after", chosen=True) for lease in leases]
            outcomes = [(lease, Done(emit=(job,))) for lease, job in zip(leases, next_one, strict=True)]
            assert await handle.settle(outcomes) == []

    await asyncio.gather(*(work(handle) for handle in handles))
    await handles[0].sweep()

    status = await handles[0].batch(batch.id)
    assert status is not None
    assert (status.state, status.total, status.done) == (BatchState.SUCCESS, 200, 200)
    assert (status.enqueued, status.running, status.retrying) == (0, 0, 0)
    assert [lease.id for lease in await take(handles[0], "end")] == ["end"]
    after = [lease.id for lease in await take(handles[0], "after", limit=500)]
    assert sorted(after) == sorted(f"after-{job.id}" for job in jobs)
    assert await outboxes(link, prefix) == 0


THREE = [
    Rule(RuleKind.LIMIT, Scope.TASK, "tests.echo", 3),
    Rule(RuleKind.LIMIT, Scope.KEY, "t*", 3),
    Rule(RuleKind.LIMIT, Scope.TASK_KEY, task_key("tests.echo", "*"), 3),
]


@pytest.mark.parametrize("rule", THREE, ids=lambda rule: rule.name)
async def test_a_limit_holds_for_all_shards_together(another: Open, rule: Rule) -> None:
    """T2, I2: exact, and what one shard does not use another one gets."""
    handles = [await another() for _ in range(4)]
    await handles[0].put([a_job(queue=queue, key="t1") for queue in QUEUES for _ in range(8)])
    await handles[0].add_rule(rule)
    running, most, done = 0, 0, 0

    async def work(handle: ShardedEngine) -> None:
        nonlocal running, most, done
        while done < 8 * COUNT:
            for queue in QUEUES:
                leases = await take(handle, queue, limit=2)
                running += len(leases)
                most = max(most, running)
                await asyncio.sleep(0)
                running -= len(leases)
                done += len(leases)
                assert await handle.settle([(lease, Done()) for lease in leases]) == []

    async with asyncio.timeout(60):
        await asyncio.gather(*(work(handle) for handle in handles))

    assert 0 < most <= 3
    await handles[0].put([a_job(queue=queue, key="t1") for queue in QUEUES])
    assert len(await take(handles[1], *QUEUES)) == 3
    assert await take(handles[2], *QUEUES) == []
    assert bare(await handles[1].rules()) == [rule]
    assert not await handles[1].add_rule(replace(rule, by="anna"))
    assert [rule.by for rule in await handles[0].rules()] == ["anna"]


@pytest.mark.parametrize("rule", THREE, ids=lambda rule: rule.name)
async def test_a_limit_counts_what_ran_in_other_shards_before_it(engine: ShardedEngine, rule: Rule) -> None:
    """T2, I2."""
    await engine.put([a_job(queue=queue, key="t1") for queue in QUEUES[:3] for _ in range(2)])
    one, two = [lease for queue in QUEUES[:2] for lease in await take(engine, queue, limit=1)]
    await engine.add_rule(replace(rule, n=1))

    assert await take(engine, *QUEUES) == []
    await engine.settle([(one, Done())])
    assert await take(engine, *QUEUES) == []
    await engine.settle([(two, Done())])
    assert len(await take(engine, QUEUES[2])) == 1
    assert await take(engine, *QUEUES) == []


@pytest.mark.parametrize("rule", THREE, ids=lambda rule: rule.name)
async def test_a_rate_holds_for_all_shards_together(another: Open, rule: Rule) -> None:
    """I2: the bucket goes from shard to shard, and so never gives more than it has."""
    handles = [await another() for _ in range(4)]
    await handles[0].put([a_job(queue=queue, key="t1") for queue in QUEUES for _ in range(4)])
    rule = replace(rule, n=100, every=timedelta(hours=1), burst=7)
    await handles[0].add_rule(rule)
    assert len(await take(handles[0], *QUEUES[::-1], limit=2)) == 7
    taken: list[list[Lease]] = []
    for _ in range(3):
        taken += await asyncio.gather(*(take(handle, *QUEUES) for handle in handles))

    assert [leases for leases in taken if leases] == []
    assert (await handles[1].tokens(rule, "t1" if rule.scope is not Scope.TASK else rule.name)).free == 0
    assert bare(await handles[1].rules()) == [rule]


async def test_what_one_shard_owns_is_forgotten_when_nothing_runs_there(
    another: Open, link: RedisLink, prefix: str
) -> None:
    """L5: keys that once were limited leave nothing."""
    clock = FakeClock()
    handle = await another(clock=clock)
    await handle.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, "t*", 1))
    await handle.put([a_job(queue=queue, key=f"t{n}") for n, queue in enumerate(2 * QUEUES)])
    leases = await handle.lease(dict.fromkeys(QUEUES, 9), span=timedelta(hours=1), holder=HOLDER)
    assert len(leases) == 2 * COUNT

    await handle.settle([(lease, Done()) for lease in leases[:-1]])
    clock.advance("5m")
    await handle.sweep()
    assert await owned(link, prefix) == 1
    await handle.settle([(leases[-1], Done())])
    clock.advance("5m")
    await handle.sweep()
    assert await owned(link, prefix) == 0


@pytest.mark.parametrize("shard", range(COUNT))
async def test_what_a_limit_counts_in_any_shard_heals_by_itself(
    engine: ShardedEngine, link: RedisLink, prefix: str, shard: int
) -> None:
    """L7: code that does not know the limit has ended a run there, and left its id in the set."""
    await engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, "t*", 1))
    await link.command("SADD", f"{{{prefix}:{shard}}}:limited:key:t1", "stray")
    await engine.put([a_job(queue=QUEUES[2], key="t1"), a_job(queue=QUEUES[2], key="t1")])
    leases = await take(engine, *QUEUES)

    for _ in range(2):
        await engine.sweep()
        leases += await take(engine, *QUEUES)

    assert len(leases) == 1


async def owned(link: RedisLink, prefix: str) -> int:
    names = ["owned", "owned_since", "owners"]
    counts = [
        [
            await link.command("HLEN" if name != "owned_since" else "ZCARD", f"{{{prefix}:{n}}}:{name}")
            for name in names
        ]
        for n in range(COUNT)
    ]
    owned, since, owners = map(sum, zip(*counts, strict=True))
    assert owned == since >= owners
    return owned


# --- queues with partitions -------------------------------------------------------------------


async def test_a_queue_with_parts_is_drained_by_two_workers(another: Open) -> None:
    """I8, I15: every job once; in each partition in the order of the puts; every partition is served."""
    handles = [await another(mail=3), await another()]
    jobs = [a_job(n, queue="mail") for n in range(300)]
    for start in range(0, 300, 20):
        await handles[0].put(jobs[start : start + 20])
    done: dict[ShardedEngine, list[str]] = {handle: [] for handle in handles}

    async def work(handle: ShardedEngine) -> None:
        while leases := await take(handle, "mail", limit=7):
            assert (await handle.renew(leases, span=SPAN))[0].until is not None
            assert await handle.settle([(lease, Done()) for lease in leases]) == []
            done[handle] += [lease.id for lease in leases]

    await asyncio.gather(*map(work, handles))

    assert sorted(job_id for each in done.values() for job_id in each) == sorted(job.id for job in jobs)
    place = {job.id: n for n, job in enumerate(jobs)}
    shards = ShardMap(COUNT, {"mail": 3})
    for handle in handles:
        for shard in shards.of_queue("mail"):
            own = [place[job_id] for job_id in done[handle] if shards.of_job("mail", job_id) == shard]
            assert own == sorted(own)
            assert own
    counts = (await handles[0].queues())["mail"]
    assert (counts.total, counts.put, counts.deleted) == (0, 300, 300)


async def test_more_parts_lose_no_job_and_no_lease(another: Open) -> None:
    """T3, T4, I8: what is not where its id says is found all the same."""
    engine = await another(mail=2)
    jobs = [a_job(queue="mail") for _ in range(40)]
    await engine.put(jobs)
    leases = await take(engine, "mail", limit=20)

    grown = await another(mail=5)

    assert all(renewal.until for renewal in await grown.renew(leases, span=SPAN))
    assert await grown.settle([(lease, Dead()) for lease in leases]) == []
    assert await grown.settle([(leases[0], Done())]) == [leases[0]]
    rest = await take(grown, "mail", limit=40)
    assert sorted(lease.id for lease in [*leases, *rest]) == sorted(job.id for job in jobs)
    assert await grown.replay([lease.id for lease in leases]) == [True] * 20
    assert await grown.drop("mail") == 20


async def test_a_limit_on_a_queue_with_parts_holds_for_all_of_them(another: Open) -> None:
    """T2, I2."""
    engine = await another(mail=3)
    await engine.put([a_job(queue="mail") for _ in range(30)])
    await engine.add_rule(Rule(RuleKind.LIMIT, Scope.QUEUE, "mail", 4))

    leases = await take(engine, "mail")
    assert len(leases) == 4
    assert await take(engine, "mail") == []
    await engine.settle([(lease, Done()) for lease in leases[:3]])
    assert len(await take(engine, "mail")) == 3
    assert await engine.remove_rule(RuleKind.LIMIT, Scope.QUEUE, "mail")
    assert len(await take(engine, "mail")) == 23


# --- the rest ----------------------------------------------------------------------------


async def test_a_door_is_where_the_slot_of_its_queue_says(
    engine: ShardedEngine, link: RedisLink, prefix: str
) -> None:
    """S1.1: as docs/redis.md has it.  An id that is known in another shard is no new job."""
    await engine.put([a_job(id="there", queue=QUEUES[1])])
    for queue in QUEUES:
        shard = SHARDS.of(queue)
        door = f"{{{prefix}:{shard}}}:{{{queue}}}:incoming"
        await link.command(
            "LPUSH", door, f'{{"task": "t", "id": "pushed-{shard}", "unique": "{KEYS[0]}-{shard}"}}'
        )
        await link.command("LPUSH", door, '{"task": "t", "id": "there"}')

    pages = [await engine.find(Filter(), limit=3)]
    while pages[-1].after is not None:
        pages.append(await engine.find(Filter(), limit=3, after=pages[-1].after))
    shown = [info.id for page in pages for info in page.jobs]
    assert [shown.count(f"pushed-{SHARDS.of(queue)}") for queue in QUEUES] == [0, 1, *[0] * (len(QUEUES) - 2)]

    leases = await take(engine, *QUEUES)
    leases += await take(engine, *QUEUES)  # a key may live elsewhere: then the job comes a moment later

    assert sorted(lease.id for lease in leases) == [*(f"pushed-{shard}" for shard in range(COUNT)), "there"]


async def test_jobs_of_all_shards_are_listed_in_the_order_of_their_puts(another: Open) -> None:
    """I8: page by page, in one order for all callers."""
    handles = [await another() for _ in range(3)]
    jobs = [a_job(queue=QUEUES[n * 7 % COUNT]) for n in range(30)]
    for n, job in enumerate(jobs):
        await handles[n % 3].put([job])

    seen, after = [], None
    while True:
        page = await handles[0].find(Filter(state=State.READY), limit=7, after=after)
        seen += [info.id for info in page.jobs]
        after = page.after
        if after is None:
            break
    assert seen == [job.id for job in jobs]


async def test_what_is_dropped_and_deleted_leaves_no_key(another: Open, link: RedisLink, prefix: str) -> None:
    """S4.15: only counters, and ids and tokens for their day."""
    engine = await another(mail=3)
    batch = Batch(id=BATCHES[1], on_failed=a_job(queue="end"))
    jobs = [a_job(queue=queue, batch=batch.id, member=n) for n, queue in enumerate([*QUEUES, "mail", "mail"])]
    await engine.put_batch(batch, jobs, token="once")
    await engine.put([a_job(queue=QUEUES[0], unique=key, chosen=True, id=f"id-{key}") for key in KEYS])
    await engine.add_rule(Rule(RuleKind.LIMIT, Scope.TASK, "tests.echo", 3))
    leases = await take(engine, *QUEUES)
    outcomes: list[Outcome] = [Dead(), Retried(), Done()]
    await engine.settle(list(zip(leases, outcomes, strict=True)))
    await engine.remove_rule(RuleKind.LIMIT, Scope.TASK, "tests.echo")

    assert await engine.delete_batch(batch.id)
    for queue in [*QUEUES, "mail", "end"]:
        await engine.drop(queue)
    await engine.sweep()

    counters = {"shards", "layout", "seq", "sent", "heard", "tokens", "known", "claims"}
    assert await keys(link, prefix) <= counters


def jobs_for(queue: str, count: int) -> list[Envelope]:
    return [a_job(queue=queue) for _ in range(count)]


async def test_a_shard_that_cannot_be_reached_does_not_cost_the_leases_of_others(
    engine: ShardedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T2: what was leased is given, also when a later shard answers with an error."""
    await engine.put(jobs_for(QUEUES[0], 3))

    async def fail(*_: object, **__: object) -> Exchange:
        raise EngineError("away")

    monkeypatch.setattr(engine._shards[1], "exchange", fail)

    for limit in (1, None):
        leases = await engine.lease(dict.fromkeys(QUEUES[:2], 1), span=SPAN, holder=HOLDER, limit=limit)
        assert len(leases) == 1
    with pytest.raises(EngineError):
        await take(engine, QUEUES[1])


async def test_full_memory_refuses_puts_while_what_crosses_shards_goes_on() -> None:
    """T1, T4, F54: also a put that is checked first; emissions, steps and freed keys make room in the end."""
    with redis() as server:
        engine = await ShardedEngine(target_of(Address(server.url)), SHARDS).open()
        batch = Batch(id=BATCHES[2], on_finished=a_job(id="end", queue=QUEUES[3], chosen=True))
        await engine.put_batch(batch, [a_job(queue=QUEUES[0], batch=batch.id, unique=KEYS[4])])
        [lease] = await take(engine, QUEUES[0])
        await engine.put(jobs_for(QUEUES[1], 100))
        server.ask("CONFIG", "SET", "maxmemory", "1mb")
        for jobs in ([a_job()], [a_job(queue=queue, unique=queue) for queue in QUEUES]):
            with pytest.raises(MemoryFull):
                await engine.put(jobs)

        assert await engine.settle([(lease, Done(emit=(a_job(id="next", queue=QUEUES[2]),)))]) == []
        await engine.sweep()

        ids = [lease.id for lease in await take(engine, QUEUES[2], QUEUES[3])]
        assert ids == ["next", "end"]
        for rule in (
            Rule(RuleKind.PAUSE, Scope.QUEUE, QUEUES[1], 0),
            Rule(RuleKind.LIMIT, Scope.TASK, "tests.echo", 50),
        ):
            assert await engine.add_rule(rule)
            assert await engine.remove_rule(rule.kind, rule.scope, rule.name)
        assert len(await engine.complaints()) == 1
        while leases := await take(engine, QUEUES[1]):
            await engine.settle([(lease, Done()) for lease in leases])
        server.ask("CONFIG", "SET", "maxmemory", "0")
        assert await engine.put([a_job(id="x", unique=KEYS[4])]) == [Receipt("x", True)]
        await engine.close()


@pytest.mark.parametrize("way", ["put", "batch", "emission"])
async def test_an_id_that_this_process_has_made_and_put_is_known_in_all_shards(
    engine: ShardedEngine, way: str
) -> None:
    """T1, I1: although an id that it has just made is looked for nowhere."""
    job = a_job(queue=QUEUES[0])
    if way == "put":
        await engine.put([job])
    elif way == "batch":
        await engine.put_batch(Batch(id=BATCHES[1]), [replace(job, batch=BATCHES[1])])
    else:
        await engine.put([a_job(queue=QUEUES[3])])
        [lease] = await take(engine, QUEUES[3])
        await engine.settle([(lease, Done(emit=(job,)))])

    assert await engine.put([replace(job, queue=QUEUES[1])]) == [Receipt(job.id, False)]


async def test_a_message_that_cannot_be_understood_stops_no_others(
    engine: ShardedEngine, link: RedisLink, prefix: str
) -> None:
    """L7, F56: it is set aside, and those before and after it arrive."""
    outbox = f"{{{prefix}:0}}:outbox:1"
    junk = [b"junk", b"9\n\xc1", b"10\n" + msgspec.msgpack.encode({"seq": 1, "kind": "unheard of"})]
    await link.command("RPUSH", outbox, *junk)
    await link.command("SADD", f"{{{prefix}:0}}:owing", 1)
    await engine.put([a_job(queue=QUEUES[0], unique=KEYS[1], id="one")])
    for _ in range(2):
        await engine.sweep()

    assert await link.command("LLEN", outbox) == 0
    broken = await link.command("HVALS", f"{{{prefix}:1}}:broken")
    assert sorted(broken) == sorted(junk)
    [lease] = await take(engine, QUEUES[0])
    assert await engine.settle([(lease, Done())]) == []
    assert [receipt.created for receipt in await engine.put([a_job(queue=QUEUES[0], unique=KEYS[1])])] == [
        True
    ]
