"""An app with shards in a cluster, while the master of some of its shards is killed."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from datetime import timedelta

from propolis.core.batch import Batch, BatchState, BatchStatus
from propolis.core.envelope import Envelope
from propolis.core.ids import derive_id, new_id
from propolis.core.job import Done, Lease, Outcome
from propolis.core.protocols import Engine
from propolis.engines import open_engine
from propolis.engines.redis.shards.shard_map import ShardMap
from propolis.errors import EngineError
from propolis.testing.engines.samples import HOLDER, a_job
from propolis.testing.servers.redis import Cluster, redis_cluster

SOON = 60.0
SPAN = timedelta(seconds=2)
COUNT = 9
MEMBERS = 600
SHARDS = ShardMap(COUNT)
QUEUES = [next(f"q{n}" for n in range(999) if SHARDS.of(f"q{n}") == shard) for shard in range(COUNT)]
AFTER, END = "after", "end"


class Work:
    """What workers in this process have settled: for sure, or perhaps, as the answer was lost."""

    def __init__(self) -> None:
        self.sure: Counter[str] = Counter()
        self.perhaps: Counter[str] = Counter()
        self.over = asyncio.Event()

    async def run(self, engine: Engine) -> None:
        while not self.over.is_set():
            try:
                await self._turn(engine)
            except EngineError:
                await asyncio.sleep(0.05)

    async def _turn(self, engine: Engine) -> None:
        leases = await engine.lease(dict.fromkeys([*QUEUES, AFTER, END], 2), span=SPAN, holder=HOLDER)
        if not leases:
            await engine.sweep()
            return
        try:
            lost = await engine.settle([(lease, outcome_of(lease)) for lease in leases])
        except EngineError:
            self.perhaps.update(lease.id for lease in leases)
            raise
        self.sure.update(lease.id for lease in leases if lease not in lost)


def outcome_of(lease: Lease) -> Outcome:
    """A member emits the next job, into a queue of another shard."""
    if lease.batch is None:
        return Done()
    return Done(emit=(a_job(id=derive_id(lease.id, "next"), queue=AFTER, chosen=True, max_crashes=1000),))


async def put_all(engine: Engine, pieces: list[list[Envelope]]) -> None:
    """As a careful producer does it: the same call again until it is answered."""
    for jobs in pieces:
        token = new_id()
        while True:
            try:
                await engine.put(jobs, token=token)
            except EngineError:
                await asyncio.sleep(0.05)
            else:
                break


async def finished(engine: Engine, batch: str, work: Work) -> BatchStatus:
    async with asyncio.timeout(SOON):
        while True:
            try:
                status = await engine.batch(batch)
                counts = await engine.queues()
            except EngineError:
                continue
            left = sum(each.waiting + each.running for each in counts.values())
            if status is not None and status.finished_at is not None and not left and work.sure["called"]:
                return status
            await asyncio.sleep(0.05)


def busiest(servers: Cluster) -> int:
    return max(range(3), key=lambda n: servers.masters[n].ask("DBSIZE"))


async def test_a_killed_master_loses_nothing_that_crosses_shards_and_doubles_nothing() -> None:
    """F24, B1, I1, I8, I11, I12, L3: members in nine shards, each with a unique key, each emitting a job."""
    with redis_cluster(durable=True) as servers:
        url = f"{servers.url}?shards={COUNT}&copies=1&copied_within=500ms&patience=2s&connect_within=1s"
        async with AsyncExitStack() as stack:
            handles = [await open_engine(url) for _ in range(3)]
            for handle in handles:
                stack.push_async_callback(handle.close)
            producer = handles[0]
            batch = Batch(
                id=new_id(), on_finished=a_job(id="called", queue=END, chosen=True, max_crashes=1000)
            )
            members = [
                a_job(queue=QUEUES[n % COUNT], batch=batch.id, member=n, unique=f"key-{n}", max_crashes=1000)
                for n in range(MEMBERS)
            ]
            await producer.put_batch(batch, members[:200], seal=False)
            work = Work()
            workers = [asyncio.create_task(work.run(handle)) for handle in handles]
            async with asyncio.timeout(SOON):
                while sum(work.sure.values()) < 100:
                    await asyncio.sleep(0.02)
            number = busiest(servers)
            await asyncio.to_thread(servers.masters[number].kill)
            pieces = [members[start : start + 50] for start in range(200, MEMBERS, 50)]
            putting = asyncio.create_task(put_all(producer, pieces))
            async with asyncio.timeout(SOON):
                while servers.replicas[number].info("replication")["role"] != "master":
                    await asyncio.sleep(0.05)
            await asyncio.to_thread(servers.masters[number].start)
            await putting
            async with asyncio.timeout(SOON):
                while not await sealed(producer, batch.id):
                    await asyncio.sleep(0.05)
            status = await finished(producer, batch.id, work)
            work.over.set()
            await asyncio.gather(*workers)

            nexts = {derive_id(job.id, "next") for job in members}
            assert (status.state, status.total, status.done) == (BatchState.SUCCESS, MEMBERS, MEMBERS)
            assert (status.enqueued, status.running, status.retrying) == (0, 0, 0)
            assert {*work.sure, *work.perhaps} == {job.id for job in members} | nexts | {"called"}
            assert max(work.sure.values()) == 1
            await producer.sweep()
            assert left_over(servers) == 0
            receipts = await producer.put([a_job(unique=f"key-{n}") for n in range(MEMBERS)])
            assert all(receipt.created for receipt in receipts)


async def sealed(engine: Engine, batch: str) -> bool:
    try:
        await engine.seal(batch)
    except EngineError:
        return False
    return True


def left_over(servers: Cluster) -> int:
    """Messages that nobody has sent on."""
    masters = [server for server in servers.servers if server.info("replication")["role"] == "master"]
    return sum(len(server.ask("KEYS", "*:outbox:*")) for server in masters)
