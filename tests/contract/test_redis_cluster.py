"""The Redis engine keeps the contract on three masters, also while their replicas take over from them.

Once in one slot, and once spread over homes of which each master has some.  S1.31, S4.25: whatever a script
touches lives in one slot.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import hiredis
import pytest

from skep.address import Address
from skep.brokers.redis import RedisBroker
from skep.brokers.redis_homes import Homes
from skep.brokers.redis_link import target_of
from skep.brokers.redis_spread import SpreadBroker
from skep.life import Retention
from skep.testing.clock import FakeClock
from skep.testing.contract import BrokerContract, OpenEngine
from skep.testing.redis_servers import Cluster, redis_cluster

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


class TestCluster(BrokerContract):
    @pytest.fixture
    def open_engine(
        self, clock: FakeClock, retention: Retention, cluster: Cluster, prefix: str
    ) -> OpenEngine:
        target = target_of(Address(cluster.url))
        return lambda: RedisBroker(target, prefix=f"{{{prefix}}}:", clock=clock, retention=retention)


class TestSpreadCluster(BrokerContract):
    """The queues, batches and keys of most tests live in different homes, as their names have it."""

    def as_called(self, calls: list[str]) -> list[str]:
        """Batches of different homes put their callbacks as messages arrive."""
        return sorted(calls)

    @pytest.fixture
    def open_engine(
        self, clock: FakeClock, retention: Retention, cluster: Cluster, prefix: str
    ) -> OpenEngine:
        target = target_of(Address(cluster.url))
        return lambda: SpreadBroker(
            target, Homes(7), prefix=f"{{{prefix}}}:", clock=clock, retention=retention
        )
