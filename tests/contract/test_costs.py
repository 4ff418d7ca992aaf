"""L5: no call's work grows with what waits, is held, scheduled, kept or running, nor with how many there are.

Each dimension is filled twice, with ten times as much the second time, and every verb is measured on both.
`python benchmarks/costs.py` shows all of it as a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from examples.lmdb_engine import LmdbStore

from propolis.contract import StoreEngine
from propolis.core.protocols import Engine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.costs.growth import OpenMetered, growths
from propolis.testing.engines.costs.meters import (
    QUIET,
    Meter,
    metered_postgres,
    metered_redis,
    metered_sqlite,
    metered_store,
)
from propolis.testing.engines.costs.stages import DIMENSIONS
from propolis.testing.engines.costs.verbs import COUNTING, LAST, VERBS
from propolis.testing.servers.redis import redis
from propolis.testing.servers.serving import postgres as postgres_server

USUAL, FULL = (1_000, 10_000), (10_000, 100_000)
TRIES = 3  # what grows does so each time; what a neighbour has cost, once


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
def opened(engine: str, request: pytest.FixtureRequest) -> OpenMetered:
    """What some of them need is set up in an event loop of its own: so before that of the test runs."""
    opening: OpenMetered = request.getfixturevalue(engine)
    return opening


@pytest.mark.parametrize("dimension", DIMENSIONS)
@pytest.mark.parametrize(
    "engine", ["sqlite", "postgres", "valkey", pytest.param("lmdb", marks=pytest.mark.full)]
)
async def test_work_is_bounded(
    engine: str, opened: OpenMetered, dimension: str, pytestconfig: pytest.Config
) -> None:
    """L5."""
    sizes = FULL if pytestconfig.getoption("--full") else USUAL
    growing = {*VERBS, *COUNTING, *LAST}  # each time so far
    for _ in range(TRIES):
        grown = [each for each in await growths(opened, dimension, sizes) if not each.bounded]
        growing &= {each.verb for each in grown}
        if not growing:
            break
    assert [str(each) for each in grown if each.verb in growing] == []
