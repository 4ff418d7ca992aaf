"""The Redis engine keeps the contract where an app is spread over homes, and is what the model says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import count

import pytest

from skep.address import Address
from skep.broker import Exchange, Swept
from skep.brokers.redis_homes import Homes
from skep.brokers.redis_link import target_of
from skep.brokers.redis_spread import SpreadBroker, all_swept
from skep.errors import EngineError
from skep.job import Lease, Outcome, Release
from skep.life import Retention
from skep.testing.clock import FakeClock
from skep.testing.contract import BrokerContract, OpenEngine
from skep.testing.machine import check_engine


class TestSpread(BrokerContract):
    """On one server, which is quicker than a cluster: that is in test_redis_cluster.py."""

    def as_called(self, calls: list[str]) -> list[str]:
        """Batches of different homes put their callbacks as messages arrive."""
        return sorted(calls)

    @pytest.fixture
    def open_engine(self, clock: FakeClock, retention: Retention, valkey_url: str, prefix: str) -> OpenEngine:
        target = target_of(Address(f"{valkey_url}?connect_within=30s"))
        return lambda: SpreadBroker(
            target, Homes(7), prefix=f"{{{prefix}}}:", clock=clock, retention=retention
        )


TOGETHER = {"a": 1, "b": 1, "c": 3, "u1": 4, "u2": 5, "chosen-1": 6, "chosen-2": 7}
APART = {**TOGETHER, "b": 2}


SEED = 1


class Placed(Homes):
    """Each name in a home of its own, but for the batches: they are in home 0.

    When one call ends several batches, in which order are their callbacks put?  Where they live in different
    homes, in that of their arrival.
    """

    def __init__(self, places: Mapping[str, int]) -> None:
        super().__init__(9)
        self._of = places

    def of(self, name: str) -> int:
        return self._of.get(name, 0)


class InOrder(SpreadBroker):
    """Does one thing after the other where the contract is silent about their order, and homes work at once.

    Jobs of one bundle that go different ways may overtake each other: it settles one outcome after the other.
    But those that are released go together: the order of the whole call decides their places.  What expires
    in one home may end a batch that another one forgets in the same call, and put a callback that a third one
    forgets, or leases: it sweeps and leases in order, batches last.
    """

    async def _lease(
        self, wants: Mapping[str, int], span: timedelta, holder: str, limit: int
    ) -> tuple[list[Lease], EngineError | None]:
        homes = {queue: self._of_queue(queue) for queue in wants}
        return await self._lease_in_order(wants, homes, span, holder, limit)

    async def sweep(self, *, limit: int = 1000, by: str | None = None) -> Swept:
        homes = [*self._homes[1:], self._homes[0]]
        return all_swept([await home.sweep(limit=limit, by=by) for home in homes])

    async def settle(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> list[Lease]:
        first: dict[tuple[str, int], int] = {}
        for n, (lease, _) in enumerate(outcomes):
            first.setdefault((lease.id, lease.fence), n)
        released = [n for n in first.values() if isinstance(outcomes[n][1], Release)]
        lost = [released[n] for n in await self._settle([outcomes[n] for n in released])]
        for n, outcome in enumerate(outcomes):
            if n not in released and await self._settle(await self._without_taken([outcome])):
                lost.append(n)
        return [outcomes[n][0] for n in sorted(lost)]

    async def exchange(
        self,
        outcomes: Sequence[tuple[Lease, Outcome]],
        wants: Mapping[str, int],
        *,
        span: timedelta,
        holder: str,
        limit: int | None = None,
    ) -> Exchange:
        lost = await self.settle(outcomes)
        return Exchange(
            lost, (await super().exchange((), wants, span=span, holder=holder, limit=limit)).leases
        )


def spread_at(url: str, prefix: str, places: Mapping[str, int]) -> Callable[[FakeClock], InOrder]:
    numbers = count()
    target = target_of(Address(f"{url}?connect_within=30s&patience=60s"))
    return lambda clock: InOrder(target, Placed(places), prefix=f"{{{prefix}-{next(numbers)}}}:", clock=clock)


@pytest.mark.timeout(300)  # each look asks nine homes
@pytest.mark.parametrize("places", [TOGETHER, APART], ids=["queues in one home", "queues in different homes"])
def test_it_is_what_the_model_says(valkey_url: str, prefix: str, places: Mapping[str, int]) -> None:
    """I1-I15: queues, callbacks, keys, chosen ids and batches in seven homes, limits shared among them.

    Always in the same lives: in one of some hundred others a single sweep ends batches, promotes and forgets
    in several homes, and the contract is silent about the order of what comes of that.
    """
    check_engine(spread_at(valkey_url, prefix, places), examples=16, seed=SEED)
