"""How the book sees to a clock that goes back: what it writes, and how much at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest

from propolis.contract import Durability, StoreEngine
from propolis.engines.shared.book.store import HeldTable
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN, a_job


class CountedStore(HeldTable):
    """A store in this process that counts what is written."""

    durability = Durability.MEMORY
    writes = 0

    def open(self) -> None: ...

    def close(self) -> None: ...

    def changes(self) -> object:
        return self.writes

    def set(self, key: str, value: object) -> None:
        self.writes += 1
        super().set(key, value)

    @contextmanager
    def transaction(self) -> Iterator[HeldTable]:
        yield self


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store() -> CountedStore:
    return CountedStore()


@pytest.fixture
async def engine(store: CountedStore, clock: FakeClock) -> AsyncIterator[StoreEngine]:
    engine = await StoreEngine(store, clock=clock).open()
    yield engine
    await engine.close()


async def test_sweeps_write_the_time_down_now_and_then_while_something_runs(
    engine: StoreEngine, store: CountedStore, clock: FakeClock
) -> None:
    """L5: and nothing where nothing runs or is scheduled."""
    await engine.put([a_job(), a_job(delay_ms=3600_000)])
    await engine.lease({"default": 1}, span=100 * SPAN, holder=HOLDER)
    before = store.writes
    for _ in range(60):
        clock.advance("1s")
        await engine.sweep()
    assert store.writes - before == 5

    await engine.drop("default")
    clock.advance(100 * SPAN)
    await engine.sweep()
    await engine.drop("default")
    before = store.writes
    for _ in range(60):
        clock.advance("1s")
        await engine.sweep()
    assert store.writes == before


async def test_a_clock_that_is_slewed_is_no_reason_to_write(
    engine: StoreEngine, store: CountedStore, clock: FakeClock
) -> None:
    """L2."""
    await engine.put([a_job(), a_job(delay_ms=3600_000)])
    await engine.lease({"default": 1}, span=SPAN, holder=HOLDER)
    clock.advance("11s")
    await engine.sweep()
    before = store.writes
    for _ in range(3):
        clock.set_back("300ms")
        assert (await engine.sweep()).again_in is None
    assert store.writes == before


async def test_each_lease_and_each_delay_follows_once(
    engine: StoreEngine, store: CountedStore, clock: FakeClock
) -> None:
    """L2, L5: in bites, and what has followed is not written again."""
    await engine.put([a_job(n) for n in range(5)])
    await engine.lease({"default": 5}, span=SPAN, holder=HOLDER)
    await engine.put([a_job(n, delay_ms=3600_000) for n in range(5)])
    clock.set_back("1h")
    sweeps = 1
    while (await engine.sweep(limit=2)).again_in is not None:
        sweeps += 1
    assert sweeps == 3
    before = store.writes
    await engine.sweep(limit=2)
    assert store.writes == before
