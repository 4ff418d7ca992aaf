"""Slots of a cluster move to other masters while an app lives in them: decision 0058."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from itertools import count
from typing import Any

import pytest

from propolis.core.ids import new_id
from propolis.core.job import Done
from propolis.core.protocols import Engine
from propolis.engines import open_engine
from propolis.engines.address import Address
from propolis.engines.redis.client.link import RedisLink
from propolis.engines.redis.client.slots import slot_of
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.engine import RedisEngine
from propolis.engines.redis.scripts import load_scripts, load_sharded_scripts
from propolis.engines.redis.shards.engine import ShardedEngine
from propolis.errors import EngineUnavailable
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.servers.redis import Cluster, RedisServer, redis_cluster

MOVED = 8  # slots at once, among them one in which the app lives
MOST_RETURNS = 10
SHARDS = 4
QUEUES = [f"q{n}" for n in range(SHARDS)]
needs_cli = pytest.mark.skipif(shutil.which("redis-cli") is None, reason="there is no redis-cli here")


@pytest.fixture(scope="module", params=["valkey", "redis"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    request.getfixturevalue(f"{request.param}_url")  # skips, or fails, where there is no such server
    with redis_cluster(request.param, replicas=False) as servers:
        yield servers


def app_in_lowest_slots(cluster: Cluster, shards: int) -> tuple[str, int]:
    """The prefix of an app of which one slot is among the lowest of the first master, and the first of those.

    They never come back: each test has others.  (Nodes may take long to agree about a slot that returns.)
    """
    lowest = lowest_slot(cluster.masters[0])
    for n in count():
        tag = f"app{n}-{new_id()[-4:]}"
        tags = [f"{tag}:{shard}" for shard in range(shards)] if shards else [tag]
        if sum(lowest <= slot_of(each.encode()) < lowest + MOVED for each in tags) == 1:
            return f"{{{tag}}}:", lowest
    raise AssertionError


def url_of(cluster: Cluster, prefix: str, shards: int, **options: object) -> str:
    text = "".join(f"&{name}={value}" for name, value in options.items())
    return f"{cluster.url}?prefix={prefix}{f'&shards={shards}' if shards else ''}{text}"


@asynccontextmanager
async def linked(cluster: Cluster, **options: object) -> AsyncIterator[RedisLink]:
    text = "&".join(f"{name}={value}" for name, value in options.items())
    link = RedisLink(target_of(Address(f"{cluster.url}?{text}")))
    await link.open()
    try:
        yield link
    finally:
        await link.close()


async def until(seen: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not seen():
            await asyncio.sleep(0.01)


def who_has_what(node: RedisServer) -> frozenset[tuple[int, int, str]]:
    """The first and the last of slots that belong together, and their master, as one node sees it."""
    return frozenset((first, last, master[2]) for first, last, master, *_ in node.ask("CLUSTER", "SLOTS"))


def lowest_slot(node: RedisServer) -> int:
    me = node.ask("CLUSTER", "MYID")
    return min((first for first, _, owner in who_has_what(node) if owner == me), default=-1)


async def agreement(nodes: list[RedisServer]) -> None:
    await until(lambda: len({who_has_what(node) for node in nodes}) == 1)


async def cli(*parts: object) -> None:
    process = await asyncio.create_subprocess_exec(
        "redis-cli", "--cluster", *map(str, parts), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()


async def reshard(source: RedisServer, target: RedisServer, first: int) -> None:
    """As an administrator does it, one key at a time: the lowest slots of the source."""
    assert lowest_slot(source) == first
    ends = {"--cluster-from": source.ask("CLUSTER", "MYID"), "--cluster-to": target.ask("CLUSTER", "MYID")}
    options = [part for pair in ends.items() for part in pair]
    place = f"127.0.0.1:{source.port}"
    await cli("reshard", place, *options, "--cluster-slots", MOVED, "--cluster-pipeline", 1, "--cluster-yes")


async def migrate_at_once(source: RedisServer, target: RedisServer, first: int) -> None:
    """As Valkey 9 can do it."""
    to = target.ask("CLUSTER", "MYID")
    source.ask("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", first, first + MOVED - 1, "NODE", to)
    await until(lambda: lowest_slot(target) <= first != lowest_slot(source))


class Work:
    """A producer that puts and pushes, and a worker; all of whose calls have all the time they need."""

    def __init__(self) -> None:
        self.acknowledged: set[str] = set()
        self.done: Counter[str] = Counter()
        self.over = False

    async def produce(self, engine: Engine, push: Callable[[str, str], Any]) -> None:
        for n in count():
            if self.over:
                return
            queue = QUEUES[n % SHARDS]
            jobs = [a_job(id=new_id(), queue=queue) for _ in range(10)]
            jobs.append(a_job(id=new_id(), queue=queue, unique=f"{queue}-{n}", delay_ms=200))
            assert all(receipt.created for receipt in await engine.put(jobs))
            pushed = new_id()
            await push(queue, json.dumps({"id": pushed, "task": "pushed"}))
            self.acknowledged.update([*(job.id for job in jobs), pushed])

    async def consume(self, engine: Engine) -> None:
        while not self.over or len(self.done) < len(self.acknowledged):
            leases = await engine.lease(dict.fromkeys(QUEUES, 5), span=timedelta(minutes=10), holder=HOLDER)
            assert not await engine.settle([(lease, Done()) for lease in leases])
            self.done.update(lease.id for lease in leases)
            if not leases:
                await engine.sweep()


def doors(engine: RedisEngine | ShardedEngine) -> dict[str, bytes]:
    if isinstance(engine, ShardedEngine):
        return {queue: engine._group.of_queue(queue)[0]._key(queue, "incoming") for queue in QUEUES}
    return {queue: engine._key(queue, "incoming") for queue in QUEUES}


def refusals(cluster: Cluster, code: str = "TRYAGAIN") -> int:
    found = [server.info("errorstats").get(f"errorstat_{code}", "count=0") for server in cluster.masters]
    return sum(int(each.removeprefix("count=")) for each in found)


def journey(cluster: Cluster, is_enough: Callable[[], bool]) -> Iterator[tuple[RedisServer, RedisServer]]:
    """From whom to whom the lowest slots of the first master go.

    They end at the third master and leave from the other two only: what earlier tests have left at the third
    is lower, and the command takes the lowest.
    """
    first, second, third = cluster.masters
    yield first, second
    for _ in range(MOST_RETURNS):
        if is_enough():
            break
        yield second, first
        yield first, second
    else:
        raise AssertionError("no call has met a move")
    yield second, third


async def work_while(
    cluster: Cluster, shards: int, move: Callable[[RedisServer, RedisServer, int], Any], *, meets: bool
) -> None:
    """The slots go from the first master to the second, and then to the third.

    Where a call can meet a move, they first go back and forth until one did.

    O1: nothing that was acknowledged is lost, nothing runs twice, no caller sees an error.
    """
    work, (prefix, lowest) = Work(), app_in_lowest_slots(cluster, shards)
    url = url_of(cluster, prefix, shards, patience="120s")
    async with AsyncExitStack() as stack:
        producer, worker = [await open_engine(url) for _ in range(2)]
        for engine in (producer, worker):
            stack.push_async_callback(engine.close)
        link = await stack.enter_async_context(linked(cluster, patience="120s"))
        places = doors(producer)  # type: ignore[arg-type]
        async with asyncio.timeout(100), asyncio.TaskGroup() as group:
            group.create_task(
                work.produce(producer, lambda queue, text: link.command("LPUSH", places[queue], text))
            )
            consuming = group.create_task(work.consume(worker))
            before = refusals(cluster)
            for source, target in journey(cluster, lambda: not meets or refusals(cluster) > before):
                await some_more(work)
                await agreement(cluster.masters)
                await move(source, target, lowest)
            await some_more(work)
            work.over = True
        await consuming
        assert {*work.done} == work.acknowledged
        assert max(work.done.values()) == 1
        counts = await worker.queues()
        assert sum(each.waiting + each.running for each in counts.values()) == 0
    assert_every_key_is_where_its_slot_is(cluster)


def assert_every_key_is_where_its_slot_is(cluster: Cluster) -> None:
    for server in cluster.masters:
        me = server.ask("CLUSTER", "MYID")
        mine = [range(first, last + 1) for first, last, owner in who_has_what(server) if owner == me]
        keys = server.ask("KEYS", "*")
        assert [key for key in keys if not any(slot_of(key.encode()) in slots for slots in mine)] == []


async def some_more(work: Work) -> None:
    """Until there was work between two moves."""
    wanted = len(work.done) + 50
    await until(lambda: len(work.done) >= wanted)


@needs_cli
@pytest.mark.parametrize("shards", [0, SHARDS], ids=["one slot", "shards"])
async def test_resharding_under_load_loses_nothing(cluster: Cluster, shards: int) -> None:
    """F53: some calls came while a slot moved, and were refused; nobody but the link has seen that."""
    await work_while(cluster, shards, reshard, meets=True)


@pytest.mark.parametrize("cluster", ["valkey"], indirect=True, scope="module")
@pytest.mark.parametrize("shards", [0, SHARDS], ids=["one slot", "shards"])
async def test_slots_that_move_at_once_lose_nothing(cluster: Cluster, shards: int) -> None:
    """F53: as Valkey 9 moves them."""
    await work_while(cluster, shards, migrate_at_once, meets=False)


# --- a move that stands still in the middle ----------------------------------------------


class Move:
    """A slot of the first master on its way to the third, with each second key."""

    def __init__(self, cluster: Cluster, slot: int) -> None:
        self._source, self._other, self._target = cluster.masters
        self._slot = slot
        self._to = self._target.ask("CLUSTER", "MYID")

    def begin(self) -> None:
        self._target.ask("CLUSTER", "SETSLOT", self._slot, "IMPORTING", self._source.ask("CLUSTER", "MYID"))
        self._source.ask("CLUSTER", "SETSLOT", self._slot, "MIGRATING", self._to)
        self._migrate(self.keys()[0][::2])

    def end(self) -> None:
        self._migrate(self.keys()[0])
        for server in (self._target, self._source, self._other):
            server.ask("CLUSTER", "SETSLOT", self._slot, "NODE", self._to)

    def keys(self) -> list[list[str]]:
        """Of both masters."""
        return [
            sorted(server.ask("CLUSTER", "GETKEYSINSLOT", self._slot, 1000))
            for server in (self._source, self._target)
        ]

    def _migrate(self, keys: list[str]) -> None:
        self._source.ask("MIGRATE", "127.0.0.1", self._target.port, "", 0, 5000, "KEYS", *keys)


def app_on_first_master(shards: int) -> tuple[str, int]:
    """The prefix of an app, and its slot, or that of its first shard."""
    for n in count():
        tag = f"app{n}-{new_id()[-4:]}"
        slot = slot_of(f"{tag}:0".encode() if shards else tag.encode())
        if 2000 < slot < 16384 // 3:
            return f"{{{tag}}}:", slot
    raise AssertionError


@pytest.mark.parametrize("shards", [0, SHARDS], ids=["one slot", "shards"])
async def test_while_a_slot_moves_every_script_is_refused(cluster: Cluster, shards: int) -> None:
    """F53: nothing is written where only some of the keys are; the mark of copies neither."""
    prefix, slot = app_on_first_master(shards)
    move = Move(cluster, slot)
    engine = await open_engine(url_of(cluster, prefix, shards, patience="30ms", copied_within="20ms"))
    await engine.put([a_job(queue=f"q{n}") for n in range(2 * SHARDS)])

    move.begin()
    before = move.keys()
    assert all(before)
    async with linked(cluster, patience="30ms", copied_within="20ms", copies=1) as copying:
        if isinstance(engine, ShardedEngine):
            asked = [engine._shards[0].ask(name, []) for name in load_sharded_scripts()]
        else:
            assert isinstance(engine, RedisEngine)
            asked = [engine._link.call(script, engine._keys, []) for script in load_scripts().values()]
            asked += [copying.call(script, engine._keys, []) for script in load_scripts().values()]
        answers = await asyncio.gather(*asked, return_exceptions=True)
    assert {type(answer) for answer in answers} == {EngineUnavailable}
    assert move.keys() == before

    move.end()
    await engine.put([a_job(queue="q0")])
    counts = await engine.queues()
    assert sum(each.ready for each in counts.values()) == 2 * SHARDS + 1
    await engine.close()


async def test_calls_that_wait_for_a_slot_keep_their_order_and_one_of_them_tries(cluster: Cluster) -> None:
    """I15, F53: also where one that waits is given up, and the one that tries."""
    prefix, slot = app_on_first_master(0)
    move = Move(cluster, slot)
    engine = await open_engine(url_of(cluster, prefix, 0, patience="120s"))
    await engine.put([a_job(-1)])
    move.begin()
    before = refusals(cluster)

    puts = [asyncio.create_task(engine.put([a_job(n)])) for n in range(200)]
    await until(lambda: refusals(cluster) >= before + 205)  # each once, and then one again and again
    puts[0].cancel()
    puts[7].cancel()
    late = [asyncio.create_task(engine.put([a_job(n)])) for n in range(200, 300)]
    await asyncio.sleep(0)
    seen = refusals(cluster)
    await until(lambda: refusals(cluster) >= seen + 3)
    assert refusals(cluster) < before + 300
    move.end()
    await asyncio.gather(*puts, *late, return_exceptions=True)

    leases = await engine.lease({"default": 1000}, span=SPAN, holder=HOLDER)
    given = [json.loads(lease.body)["args"][0] for lease in leases]
    assert given == [-1, *(n for n in range(300) if n not in (0, 7))]
    await engine.close()


async def test_masters_that_do_not_agree_yet_cost_a_delay(cluster: Cluster) -> None:
    """F53: each says that the other one has the slot."""
    prefix, slot = app_on_first_master(0)
    source, other, target = cluster.masters
    to = target.ask("CLUSTER", "MYID")
    async with linked(cluster, patience="120s") as link:
        before = refusals(cluster, "MOVED")
        source.ask("CLUSTER", "SETSLOT", slot, "NODE", to)
        call = asyncio.create_task(link.command("SET", f"{prefix}key", "x"))
        await until(lambda: refusals(cluster, "MOVED") >= before + 20)
        for server in (target, other):
            server.ask("CLUSTER", "SETSLOT", slot, "NODE", to)
        assert await call == b"OK"


@needs_cli
async def test_a_node_that_came_and_left_is_listened_to_no_more(cluster: Cluster) -> None:
    """F53: it answers, but no message reaches it."""
    prefix, lowest = app_in_lowest_slots(cluster, 0)
    first, _, third = cluster.masters
    url = url_of(cluster, prefix, 0)
    with cluster.stranger() as node:
        await cli("add-node", f"127.0.0.1:{node.port}", f"127.0.0.1:{first.port}")
        await until(lambda: "cluster_state:ok" in node.ask("CLUSTER", "INFO"))
        await agreement([*cluster.masters, node])
        await reshard(first, node, lowest)
        engine = await open_engine(url)
        assert isinstance(engine, RedisEngine)
        await engine._link.wait_for(channels=engine.heard_at("default")[:1], timeout=60)
        assert "sub=1" in node.ask("CLIENT", "LIST")

        await agreement([*cluster.masters, node])
        await reshard(node, third, lowest)
        await agreement([*cluster.masters, node])
        await cli("del-node", f"127.0.0.1:{first.port}", node.ask("CLUSTER", "MYID"))
        await engine.put([a_job()])  # learns of it

        await until(lambda: "sub=1" not in node.ask("CLIENT", "LIST"))
        await engine.close()
