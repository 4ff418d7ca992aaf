"""L5: no call's work grows with what waits, is held, scheduled, kept or running, nor with how many there are.

Each dimension is filled twice, with ten times as much the second time, and every verb is measured on both.
What looks count up to is lowered, so that both sizes have more than that; with --full it is as it is, and
they have a hundred times as much.  `python benchmarks/costs.py` shows all of it as a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from examples.lmdb_engine import LmdbStore

from propolis.contract import StoreEngine
from propolis.core.protocols import COUNTED, Engine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.costs.bounds import counting_up_to
from propolis.testing.engines.costs.growth import STILL_GROWING, Growth, OpenMetered, least_growths
from propolis.testing.engines.costs.meters import (
    QUIET,
    Meter,
    PostgresMeter,
    metered_book,
    metered_memory,
    metered_postgres,
    metered_redis,
    metered_shards,
    metered_sqlite,
    metered_store,
)
from propolis.testing.engines.costs.stages import CROWD, DIMENSIONS, Stage, furnish
from propolis.testing.engines.costs.verbs import COUNTING, LAST, VERBS
from propolis.testing.servers.redis import redis
from propolis.testing.servers.serving import postgres as postgres_server

USUAL, FULL = (1_000, 10_000), (100_000, 1_000_000)
SMALLER = (10_000, 100_000)  # with --full, where a call of an engine takes long
USUALLY_COUNTED = 100  # what looks count up to without --full
BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks.md"


@pytest.fixture(scope="session")
def private_valkey() -> Iterator[str]:
    """What others do on the server would be counted."""
    with redis(settings=QUIET) as server:
        yield server.url


@pytest.fixture
def sqlite(tmp_path: Path) -> OpenMetered:
    numbers = count()
    return lambda clock: metered_sqlite(tmp_path / f"{next(numbers)}.db", clock)


@pytest.fixture
def lmdb(tmp_path: Path) -> OpenMetered:
    numbers = count()

    def opened(clock: FakeClock) -> AbstractAsyncContextManager[tuple[Engine, Meter]]:
        store = LmdbStore(tmp_path / f"{next(numbers)}.mdb", sync=False)
        return metered_store(store, partial(StoreEngine, clock=clock))

    return opened


@pytest.fixture(scope="session")
def private_postgres() -> Iterator[str]:
    """While others hold a snapshot, nobody removes what is dead, and every call walks over it."""
    with postgres_server(settings=("autovacuum=off",)) as server:
        yield server.url


@pytest.fixture
def postgres(private_postgres: str, schema: str) -> OpenMetered:
    numbers = count()
    return lambda clock: metered_postgres(private_postgres, f"{schema}_{next(numbers)}", clock)


@pytest.fixture
def valkey(private_valkey: str, prefix: str) -> OpenMetered:
    numbers = count()
    return lambda clock: metered_redis(private_valkey, f"{prefix}-{next(numbers)}:", clock)


@pytest.fixture
def shards(private_valkey: str, prefix: str) -> OpenMetered:
    numbers = count()
    return lambda clock: metered_shards(private_valkey, f"{prefix}-{next(numbers)}", clock)


@pytest.fixture
def book() -> OpenMetered:
    return metered_book


@pytest.fixture
def memory() -> OpenMetered:
    return metered_memory


@pytest.fixture
def opened(engine: str, request: pytest.FixtureRequest) -> OpenMetered:
    """What some of them need is set up in an event loop of its own: so before that of the test runs."""
    opening: OpenMetered = request.getfixturevalue(engine)
    return opening


@pytest.mark.parametrize("dimension", DIMENSIONS)
@pytest.mark.parametrize(
    "engine",
    [
        *["sqlite", "postgres", "valkey", "book", "memory"],
        *[pytest.param(name, marks=pytest.mark.full) for name in ("shards", "lmdb")],
    ],
)
async def test_work_is_bounded(
    engine: str, opened: OpenMetered, dimension: str, pytestconfig: pytest.Config
) -> None:
    """L5."""
    sizes, counted = USUAL, USUALLY_COUNTED
    if pytestconfig.getoption("--full"):
        sizes, counted = SMALLER if engine in ("book", "lmdb", "memory") else FULL, COUNTED
    known = STILL_GROWING.get(engine, frozenset())
    with counting_up_to(counted):
        found = await least_growths(opened, dimension, sizes, counted=counted, known=known)
    assert [str(each) for each in found if not each.bounded and each.verb not in known] == []


@pytest.mark.parametrize("verb", ["queues", "put"])
async def test_calls_that_no_sweep_has_added_up_cost_nothing(verb: str, postgres: OpenMetered) -> None:
    """L5: also where nobody sweeps, because nobody works.  The put is one into a queue with a cap."""
    sizes, found = (1024, 10_240), []  # as many as are added up at a time leave the same rest
    for size in sizes:
        clock = FakeClock()
        async with postgres(clock) as (engine, meter):
            assert isinstance(meter, PostgresMeter)
            stage = Stage(engine, clock)
            await furnish(stage)
            await meter.filled()
            await meter.put_one_by_one(CROWD, size)
            async for call in (VERBS | COUNTING)[verb](stage):
                before = await meter.read()
                await call()
                found.append(await meter.read() - before)
    small, large = found
    assert Growth("calls", verb, small, large, sizes[1] / sizes[0], PostgresMeter.floor).bounded


def test_every_verb_has_a_row_in_the_table_of_each_engine() -> None:
    """Written by benchmarks/costs.py: whoever adds a verb measures it."""
    page = BENCHMARKS.read_text("utf-8").partition("<!-- costs: begin")[2].partition("<!-- costs: end")[0]
    tables = re.split(r"^#### (\w+)$", page, flags=re.MULTILINE)[1:]
    rows = {
        name: re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
        for name, text in zip(tables[::2], tables[1::2], strict=True)
    }
    assert list(rows) == ["sqlite", "postgres", "redis"]
    for found in rows.values():
        assert sorted(found) == sorted([*VERBS, *COUNTING, *LAST])
