"""The lease keeper, on the memory engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta

import pytest

from propolis import App
from propolis.core.job import Done, Lease, State
from propolis.core.protocols import Renewal
from propolis.engines.memory import MemoryEngine
from propolis.errors import WorkerFailed
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import a_job
from propolis.worker import Settings, Worker
from propolis.worker.keeper import Keeper

SPAN = timedelta(seconds=15)


class Held:
    """A keeper that holds two leases, and what it has reported of them."""

    def __init__(self, engine: MemoryEngine, leases: list[Lease]) -> None:
        self.engine = engine
        self.leases = leases
        self.lost: list[Lease] = []
        self.stopped: list[Lease] = []
        self.time = 0.0
        self.keeper = Keeper(engine, SPAN, self, clock=lambda: self.time)
        self.keeper.add(leases, sent=0.0)

    def lease_lost(self, lease: Lease) -> None:
        self.lost.append(lease)

    def stop_wanted(self, lease: Lease) -> None:
        self.stopped.append(lease)

    def keeper_died(self, error: BaseException) -> None:
        raise error


@pytest.fixture
async def held() -> AsyncIterator[Held]:
    engine = await MemoryEngine(clock=FakeClock()).open()
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


async def test_a_lease_that_somebody_holds_keeps_the_time_that_it_has(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L6: it is not lost, and not taken for renewed either."""
    renew = held.engine.renew

    async def renew_all_but_the_first(leases: Sequence[Lease], *, span: timedelta) -> list[Renewal]:
        return [Renewal(None, later=True), *(await renew(leases[1:], span=span))]

    monkeypatch.setattr(held.engine, "renew", renew_all_but_the_first)
    held.time = 10.0
    await held.keeper.renew_all()
    assert held.lost == []
    held.time = 15.0
    await held.keeper.renew_all()
    assert held.lost == held.leases[:1]


async def test_while_some_are_being_settled_others_can_be_lost(held: Held) -> None:
    held.keeper.settling = [(held.leases[0], Done())]
    await held.engine.settle([(lease, Done()) for lease in held.leases])
    await held.keeper.renew_all()
    assert held.lost == held.leases[1:]


async def test_a_stop_that_is_wanted_is_reported_once_and_forgotten_with_its_lease(held: Held) -> None:
    cancelled, other = held.leases
    await held.engine.cancel([cancelled.id])
    await held.keeper.renew_all()
    await held.keeper.renew_all()
    assert held.stopped == [cancelled]
    assert held.keeper.stops_wanted == {(cancelled.id, cancelled.fence)}

    held.keeper.drop([other])
    assert held.keeper.stops_wanted == {(cancelled.id, cancelled.fence)}
    held.keeper.drop([cancelled])
    assert held.keeper.stops_wanted == set()


async def test_a_keeper_that_dies_ends_its_worker_loudly(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """F59, W.7: what runs is given back while its lease still lasts."""

    async def die(self: Keeper) -> None:
        raise MemoryError("no more")

    @app.task
    async def long() -> None:
        await asyncio.sleep(600)

    handle = await long.aenqueue()
    monkeypatch.setattr(Keeper, "renew_all", die)
    async with asyncio.timeout(20):
        with pytest.raises(WorkerFailed, match="keeper of the leases has died"):
            await Worker(app, Settings(lease=timedelta(seconds=1))).run()
    record = await handle.astatus()
    assert record is not None
    assert (record.state, record.attempts) == (State.READY, 0)
