"""The Redis engine keeps the contract on three masters, also while their replicas take over from them.

Once in one slot, and once in shards of which each master has some.  S1.31, S4.25: whatever a script
touches lives in one slot.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import hiredis
import pytest

from propolis.core.transitions import Retention
from propolis.engines.address import Address
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.engine import RedisEngine
from propolis.engines.redis.shards.engine import ShardedEngine
from propolis.engines.redis.shards.shard_map import ShardMap
from propolis.errors import EngineUnavailable
from propolis.testing.clock import FakeClock
from propolis.testing.engines import EngineContract, OpenEngine
from propolis.testing.servers.redis import Cluster, redis_cluster

EVERY = 1.0  # seconds between two changes of masters


class Changes:
    """Lets replicas take over from their masters again and again, in the orderly way that loses nothing."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._masters: set[int] = set()
        self._chance = random.Random()  # not the one that Hypothesis watches

    def __enter__(self) -> Changes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        assert len(self._masters) > 3, "no replica ever took over"

    def _run(self) -> None:
        """Also where few tests are run: until one has taken over, for a while."""
        patience = 60
        while not self._over.wait(EVERY) or (len(self._masters) <= 3 and patience > 0):
            if self._over.is_set():
                patience -= 1
                time.sleep(EVERY)
            roles = {each.port: each.info("replication")["role"] for each in self._cluster.servers}
            self._masters |= {port for port, role in roles.items() if role == "master"}
            replicas = [each for each in self._cluster.servers if roles[each.port] == "slave"]
            with suppress(hiredis.ReplyError, ConnectionError):  # it may be in the middle of one
                self._chance.choice(replicas).ask("CLUSTER", "FAILOVER")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with redis_cluster(durable=True) as servers, Changes(servers):
        yield servers


@pytest.mark.differs_in(
    *["putting", "leasing", "bundling", "renewing", "settling", "sharing", "waiting"],
    reason="one slot is one server: what differs is how calls reach it, and are repeated, while it changes",
)
class TestCluster(EngineContract):
    @pytest.fixture
    def open_engine(
        self, clock: FakeClock, retention: Retention, cluster: Cluster, prefix: str
    ) -> OpenEngine:
        target = target_of(Address(cluster.url))
        return lambda: RedisEngine(target, prefix=f"{{{prefix}}}:", clock=clock, retention=retention)


@pytest.mark.differs_in(
    *["leasing", "settling", "emitting", "batching", "nesting", "gathering", "ruling", "waiting"],
    reason="shards on one server keep the whole contract; here their messages travel between servers",
)
class TestShardedCluster(EngineContract):
    """The queues, batches and keys of most tests live in different shards, as their names have it."""

    def as_called(self, calls: list[str]) -> list[str]:
        """Batches of different shards put their callbacks as messages arrive."""
        return sorted(calls)

    @pytest.fixture
    def open_engine(
        self, clock: FakeClock, retention: Retention, cluster: Cluster, prefix: str
    ) -> OpenEngine:
        target = target_of(Address(cluster.url))
        return lambda: ShardedEngine(
            target, ShardMap(7), prefix=f"{{{prefix}}}:", clock=clock, retention=retention
        )


async def test_feeds_of_all_masters_are_followed_at_once(cluster: Cluster, prefix: str) -> None:
    """S4.25: each in the slot of its name; what is dropped while a replica takes over is published again."""
    target = target_of(Address(cluster.url))
    reader, writer = [
        await ShardedEngine(target, ShardMap(7), prefix=f"{{{prefix}}}:").open() for _ in range(2)
    ]
    after: dict[str, int | None] = {f"feed {n}": 0 for n in range(20)}
    seen: set[str] = set()

    async def publish_all() -> None:
        for feed in after:
            while await writer.publish(feed, [feed.encode()]) is None:
                pass

    publishing = asyncio.create_task(publish_all())
    while len(seen) < len(after):
        with suppress(EngineUnavailable):
            for feed, page in (await reader.follow(after, wait=600)).items():
                assert {entry.value for entry in page.entries} <= {feed.encode()}
                seen |= {feed} if page.entries else set()
                after[feed] = page.after
    await publishing
    await reader.close()
    await writer.close()
