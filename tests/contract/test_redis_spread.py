"""The Redis engine keeps the contract where an app is spread over homes, and is what the model says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import count

import pytest

from skep.address import Address
from skep.broker import Exchange
from skep.brokers.redis_homes import Homes
from skep.brokers.redis_link import target_of
from skep.brokers.redis_spread import SpreadBroker
from skep.job import Lease, Outcome, Release
from skep.life import Retention
from skep.testing.clock import FakeClock
from skep.testing.contract import BrokerContract, OpenEngine
from skep.testing.machine import check_engine


class TestSpread(BrokerContract):
    """On one server, which is quicker than a cluster: that is in test_redis_cluster.py."""

    @pytest.fixture
    def open_engine(self, clock: FakeClock, retention: Retention, valkey_url: str, prefix: str) -> OpenEngine:
        target = target_of(Address(f"{valkey_url}?connect_within=30s"))
        return lambda: SpreadBroker(
            target, Homes(7), prefix=f"{{{prefix}}}:", clock=clock, retention=retention
        )


PLACES = {"a": 1, "b": 2, "c": 3, "u1": 4, "u2": 5, "chosen-1": 6, "chosen-2": 7}


class BatchesTogether(Homes):
    """Each name of the model in a home of its own, but for the batches: they are in home 0.

    When one call ends several batches, in which order are their callbacks put?  Where they live in different
    homes, in that of their arrival.
    """

    def of(self, name: str) -> int:
        return PLACES.get(name, 0)


class InOrder(SpreadBroker):
    """Settles one outcome after the other: jobs of one bundle that go different ways may overtake each other.

    But those that are released go together: the order of the whole call decides their places.
    """

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


def test_it_is_what_the_model_says(valkey_url: str, prefix: str) -> None:
    """I1-I15: queues, keys, chosen ids and batches in nine homes, limits shared among them."""
    numbers = count()
    target = target_of(Address(f"{valkey_url}?connect_within=30s&patience=60s"))
    check_engine(
        lambda clock: InOrder(
            target, BatchesTogether(9), prefix=f"{{{prefix}-{next(numbers)}}}:", clock=clock
        ),
        examples=24,
    )
