"""Rates in the memory engine and in the book over a store: what they keep, and who wakes for a token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from propolis.contract import UNBOUNDED, Durability, Rule, RuleKind, Scope, StoreEngine
from propolis.core.clock import SystemClock
from propolis.core.job import DONE
from propolis.core.protocols import BITE, MAX_PREFIXES
from propolis.engines.memory import MemoryEngine
from propolis.engines.shared.book.engine import BookEngine
from propolis.engines.shared.book.store import HeldTable
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, a_job

EVERY = timedelta(milliseconds=300)
A_LONG_TIME = 20.0  # seconds, of which a test never waits more than a moment


class HeldStore(HeldTable):
    """A store in this process."""

    durability = Durability.MEMORY

    def open(self) -> None: ...

    def close(self) -> None: ...

    def changes(self) -> object:
        return 0

    @contextmanager
    def transaction(self) -> Iterator[HeldTable]:
        yield self


def kinds(table: HeldTable) -> set[str]:
    return {name.split("\0")[0] for name, _ in table.range("", "\U0010ffff", 10**6)}


def table_of(engine: BookEngine, store: HeldStore) -> HeldTable:
    table = engine._book.pages.table if isinstance(engine, MemoryEngine) else store
    assert isinstance(table, HeldTable)
    return table


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store() -> HeldStore:
    return HeldStore()


@pytest.fixture(params=["memory", "store"])
async def engine(
    request: pytest.FixtureRequest, store: HeldStore, clock: FakeClock
) -> AsyncIterator[BookEngine]:
    made = MemoryEngine(clock=clock) if request.param == "memory" else StoreEngine(store, clock=clock)
    engine = await made.open()
    yield engine
    await engine.close()


async def test_buckets_that_are_full_are_forgotten(
    engine: BookEngine, store: HeldStore, clock: FakeClock
) -> None:
    """L5: the keys ever seen do not make the storage grow."""
    await engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, "*", UNBOUNDED, every=EVERY, burst=3))
    await engine.put([a_job(key=f"k:{number % 50}") for number in range(250)])
    for _ in range(3):
        leases = await engine.lease({"default": 1000}, span=timedelta(days=1), holder=HOLDER)
        await engine.settle([(lease, DONE) for lease in leases])
        clock.advance(4 * EVERY)
        await engine.sweep()

    counts = (await engine.queues())["default"]
    assert (counts.total, counts.deleted) == (0, 250)
    assert (
        kinds(table_of(engine, store))
        & {"bucket", "bucket-end", "turn", "held-by", "held-of", "walk", "thaw"}
        == set()
    )


async def test_whoever_waits_is_woken_when_a_token_comes(engine: BookEngine, clock: FakeClock) -> None:
    """L1: without a sweep; and before that there is nothing to wake for."""
    await engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, "k", UNBOUNDED, every=EVERY))
    await engine.put([a_job(key="k") for _ in range(2)])
    for count in (1, 0):
        assert len(await engine.lease({"default": 9}, span=timedelta(days=1), holder=HOLDER)) == count
    assert await engine.wait(["default"], 0.01) is False

    clock.advance(EVERY)
    assert await engine.wait(["default"], A_LONG_TIME) is True
    assert await engine.lease({"other": 9}, span=timedelta(days=1), holder=HOLDER) == []
    assert await engine.wait(["other"], 0.01) is False
    assert len(await engine.lease({"default": 9}, span=timedelta(days=1), holder=HOLDER)) == 1


async def test_on_a_real_clock_it_is_woken_as_the_token_comes() -> None:
    engine = await MemoryEngine(clock=SystemClock()).open()
    await engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, "k", UNBOUNDED, every=EVERY))
    await engine.put([a_job(key="k") for _ in range(2)])
    for count in (1, 0):
        assert len(await engine.lease({"default": 9}, span=timedelta(days=1), holder=HOLDER)) == count

    assert await engine.wait(["default"], A_LONG_TIME) is True
    assert len(await engine.lease({"default": 9}, span=timedelta(days=1), holder=HOLDER)) == 1
    await engine.close()


async def test_a_prefix_that_is_over_leaves_its_place_to_another(
    engine: BookEngine, clock: FakeClock
) -> None:
    until = clock.now + EVERY
    for number in range(MAX_PREFIXES):
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, f"{number}:*", 1, until=until))
    await engine.put([a_job(key="0:1"), a_job(key="0:1")])
    assert len(await engine.lease({"default": 9}, span=timedelta(days=1), holder=HOLDER)) == 1

    clock.advance(EVERY)
    assert await engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, "another:*", 1)) is True
    assert len(await engine.lease({"default": 9}, span=timedelta(days=1), holder=HOLDER)) == 1


async def test_a_sweep_wakes_whoever_waits_in_memory_for_a_token_that_came(clock: FakeClock) -> None:
    """The clock may have been set forward since the wait began."""
    hour = timedelta(hours=1)
    engine = await MemoryEngine(clock=clock).open()
    await engine.add_rule(Rule(RuleKind.LIMIT, Scope.QUEUE, "default", UNBOUNDED, every=hour))
    await engine.put([a_job() for _ in range(2)])
    for count in (1, 0):
        assert len(await engine.lease({"default": 9}, span=timedelta(days=1), holder=HOLDER)) == count

    waiting = asyncio.create_task(engine.wait(["default"], A_LONG_TIME))
    await asyncio.sleep(0)
    clock.advance(hour)
    await engine.sweep()
    assert await waiting is True
    await engine.close()


async def test_a_token_that_came_wakes_nobody_again_while_its_queue_is_paused(
    engine: BookEngine, clock: FakeClock
) -> None:
    await engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, "k", UNBOUNDED, every=EVERY))
    await engine.put([a_job(key="k") for _ in range(2)])
    for count in (1, 0):
        assert len(await engine.lease({"default": 9}, span=timedelta(days=1), holder=HOLDER)) == count
    await engine.add_rule(Rule(RuleKind.PAUSE, Scope.QUEUE, "default"))

    clock.advance(EVERY)
    for _ in range(2):  # what comes back to its line may wake once
        assert await engine.lease({"default": 9}, span=timedelta(days=1), holder=HOLDER) == []
        woken = await engine.wait(["default"], 0.01)
    assert not woken


@pytest.mark.parametrize("rate", [{"n": 1}, {"n": UNBOUNDED, "every": EVERY}], ids=["number", "rate"])
async def test_room_for_one_lets_few_of_thousands_go(
    engine: BookEngine, store: HeldStore, clock: FakeClock, rate: dict[str, Any]
) -> None:
    """L5: one for the job that ended, and one for the token that came."""
    await engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, "k", **rate))
    await engine.put([a_job(key="k") for _ in range(2 * BITE)])
    [running] = await engine.lease({"default": 1}, span=timedelta(days=1), holder=HOLDER)
    assert await engine.lease({"default": BITE}, span=timedelta(days=1), holder=HOLDER) == []
    table = table_of(engine, store)
    assert len(table.range("held-by\0", "held-by\1", 3 * BITE)) == 2 * BITE - 1

    clock.advance(EVERY)
    await engine.settle([(running, DONE)])
    assert len(await engine.lease({"default": 1}, span=timedelta(days=1), holder=HOLDER)) == 1
    assert len(table.range("held-by\0", "held-by\1", 3 * BITE)) >= 2 * BITE - 3
