"""The Redis engine keeps the contract where an app has shards, and is what the model says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Unpack

import pytest

from propolis.core.clock import Clock
from propolis.core.job import Crashed, Lease, Outcome, Released
from propolis.core.protocols import Exchange, LeaseTerms, Swept
from propolis.core.transitions import Retention
from propolis.engines.address import Address
from propolis.engines.redis.client.target import Target, target_of
from propolis.engines.redis.shards.engine import ShardedEngine, all_swept
from propolis.engines.redis.shards.leasing import Leasing
from propolis.engines.redis.shards.shard_map import ShardMap
from propolis.errors import EngineError
from propolis.testing.clock import FakeClock
from propolis.testing.engines import EngineContract, OpenEngine
from propolis.testing.engines.clock_machine import check_clock
from propolis.testing.engines.machine import check_engine
from propolis.testing.engines.record_machine import check_records


class TestShards(EngineContract):
    """On one server, which is quicker than a cluster: that is in test_redis_cluster.py."""

    def as_called(self, calls: list[str]) -> list[str]:
        """Batches of different shards put their callbacks as messages arrive."""
        return sorted(calls)

    @pytest.fixture
    def open_engine(self, clock: FakeClock, retention: Retention, valkey_url: str, prefix: str) -> OpenEngine:
        target = target_of(Address(f"{valkey_url}?connect_within=30s"))
        return lambda: ShardedEngine(
            target, ShardMap(7), prefix=f"{{{prefix}}}:", clock=clock, retention=retention
        )


TOGETHER = {"a": 1, "b": 1, "c": 3, "u1": 4, "u2": 5, "chosen-1": 6, "chosen-2": 7}
APART = {**TOGETHER, "b": 2}


SEED = 2


class Placed(ShardMap):
    """Each name in a shard of its own, but for the batches: they are in shard 0.

    When one call ends several batches, in which order are their callbacks put?  Where they live in different
    shards, in that of their arrival.
    """

    def __init__(self, places: Mapping[str, int]) -> None:
        super().__init__(9)
        self._of = places

    def of(self, name: str) -> int:
        return self._of.get(name, 0)


class LeasingInOrder(Leasing):
    """Does one thing after the other where the contract is silent about their order, and shards work at once.

    Jobs of one bundle that go different ways may overtake each other: it settles one outcome after the other.
    But those that go to the front go together: the order of the whole call decides their places.  What
    expires in one shard may end a batch that another one forgets in the same call, and put a callback that a
    third one forgets, or leases: it sweeps and leases in order, batches last.
    """

    async def lease(
        self, wants: Mapping[str, int], terms: LeaseTerms, limit: int
    ) -> tuple[list[Lease], EngineError | None]:
        shards = {queue: self._group.of_queue(queue) for queue in wants}
        return await self.lease_in_order(wants, shards, terms, limit)

    async def settle(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> list[Lease]:
        first: dict[tuple[str, int, str], int] = {}
        for n, (lease, _) in enumerate(outcomes):
            first.setdefault((lease.id, lease.fence, lease.holder), n)
        released = [n for n in first.values() if isinstance(outcomes[n][1], Released | Crashed)]
        lost = [released[n] for n in await self.settle_in_shards([outcomes[n] for n in released])]
        for n, outcome in enumerate(outcomes):
            if n not in released and await self.settle_in_shards(await self.without_taken([outcome])):
                lost.append(n)
        return [outcomes[n][0] for n in sorted(lost)]

    async def exchange(
        self, outcomes: Sequence[tuple[Lease, Outcome]], wants: Mapping[str, int], **terms: Unpack[LeaseTerms]
    ) -> Exchange:
        lost = await self.settle(outcomes)
        got = await super().exchange((), wants, **terms)
        return Exchange(lost, got.leases)


class InOrder(ShardedEngine):
    """Leases, settles and sweeps in order, batches last."""

    def __init__(self, target: Target, shard_map: ShardMap, *, prefix: str, clock: Clock) -> None:
        super().__init__(target, shard_map, prefix=prefix, clock=clock)
        self._leasing = LeasingInOrder(self._group, self._putting, self._rules)

    async def sweep(self, *, limit: int = 1000, by: str | None = None) -> Swept:
        shards = [*self._shards[1:], self._shards[0]]
        return all_swept([await shard.sweep(limit=limit, by=by) for shard in shards])


def sharded_at(url: str, prefix: str, places: Mapping[str, int]) -> Callable[[FakeClock], InOrder]:
    numbers = count()
    target = target_of(Address(f"{url}?connect_within=30s&patience=60s"))
    return lambda clock: InOrder(target, Placed(places), prefix=f"{{{prefix}-{next(numbers)}}}:", clock=clock)


@pytest.mark.more_time(usual=1200, full=1200)  # everything is compared after each step, in seven shards
@pytest.mark.parametrize(
    "places", [TOGETHER, APART], ids=["queues in one shard", "queues in different shards"]
)
def test_it_is_what_the_model_says(
    valkey_url: str, prefix: str, places: Mapping[str, int], request: pytest.FixtureRequest
) -> None:
    """I1-I15: queues, callbacks, keys, chosen ids and batches in seven shards, limits shared among them.

    Always in the same lives: in one of some hundred others a single sweep ends batches, promotes and forgets
    in several shards, and the contract is silent about the order of what comes of that.
    """
    lives = 16 if request.config.getoption("--full") else 8
    check_engine(sharded_at(valkey_url, prefix, places), examples=lives, seed=SEED)


def test_records_and_feeds_beside_shards_are_what_their_model_says(
    valkey_url: str, prefix: str, seed: int | None, request: pytest.FixtureRequest
) -> None:
    """R1: they are in one place, and the jobs of a swap go where their queues are."""
    lives = 40 if request.config.getoption("--full") else 8
    check_records(sharded_at(valkey_url, prefix, APART), examples=lives, seed=seed)


def test_shards_keep_no_lease_and_change_no_delay_where_their_clock_goes_back(
    valkey_url: str, prefix: str, seed: int | None, request: pytest.FixtureRequest
) -> None:
    """L2: each of them sees to what it has."""
    lives = 40 if request.config.getoption("--full") else 4
    check_clock(sharded_at(valkey_url, prefix, APART), examples=lives, seed=seed)
