"""The lease keeper, on the memory engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from skep.brokers.memory import MemoryBroker
from skep.job import Done, Lease
from skep.testing.clock import FakeClock
from skep.testing.make import a_job
from skep.worker.keeper import Keeper

SPAN = timedelta(seconds=15)


class Held:
    """A keeper that holds two leases, and what it has reported as lost."""

    def __init__(self, engine: MemoryBroker, leases: list[Lease]) -> None:
        self.engine = engine
        self.leases = leases
        self.lost: list[Lease] = []
        self.keeper = Keeper(
            engine, SPAN, lost=self.lost.append, stop_wanted=lambda lease: None, clock=lambda: 0.0
        )
        self.keeper.add(leases, sent=0.0)


@pytest.fixture
async def held() -> AsyncIterator[Held]:
    engine = await MemoryBroker(clock=FakeClock()).open()
    await engine.put([a_job(), a_job()])
    yield Held(engine, await engine.lease({"default": 2}, span=SPAN, holder="test"))
    await engine.close()


async def test_a_lease_that_the_engine_does_not_know_is_lost(held: Held) -> None:
    await held.engine.settle([(held.leases[0], Done())])
    await held.keeper.renew_all()
    assert held.lost == held.leases[:1]


async def test_a_lease_that_we_are_ending_ourselves_is_not_lost(held: Held) -> None:
    """The engine has settled it, and its answer is still on the way: renewing it finds nothing."""
    held.keeper.settling = [(held.leases[0], Done())]
    await held.engine.settle(held.keeper.settling)
    await held.keeper.renew_all()
    assert held.lost == []
    assert held.keeper.holds(held.leases[0])


async def test_while_some_are_being_settled_others_can_be_lost(held: Held) -> None:
    held.keeper.settling = [(held.leases[0], Done())]
    await held.engine.settle([(lease, Done()) for lease in held.leases])
    await held.keeper.renew_all()
    assert held.lost == held.leases[1:]
