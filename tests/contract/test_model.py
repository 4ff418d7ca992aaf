"""Every engine is what the model of the contract says, and no broken engine passes for a right one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Self

import pytest

from propolis.core.protocols import Engine
from propolis.engines.address import Address
from propolis.engines.memory import MemoryEngine
from propolis.engines.postgres.engine import PostgresEngine
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.engine import RedisEngine
from propolis.engines.sqlite.engine import SQLiteEngine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.clock_machine import CLOCK_MUTANTS, Timed, check_clock
from propolis.testing.engines.machine import check_engine
from propolis.testing.engines.mutants import MUTANTS, catch
from propolis.testing.engines.mutants.counters import Miscounting
from propolis.testing.engines.mutants.limits import Reruled
from propolis.testing.engines.mutants.records import RECORD_MUTANTS, WithRecords
from propolis.testing.engines.mutants.wrapped import OneWayPut, Wrapped
from propolis.testing.engines.record_machine import check_records

from .emptying import empty

Make = Callable[[FakeClock], Engine]


class EmptyPostgres(PostgresEngine):
    """Opened empty: that takes a tenth of the time of a new schema."""

    def __init__(self, url: str, *, schema: str, clock: FakeClock) -> None:
        super().__init__(url, schema=schema, clock=clock)
        self._emptying = (url, schema)

    async def open(self) -> Self:
        await super().open()
        empty(*self._emptying)
        return self


@pytest.fixture
def memory() -> Make:
    return lambda clock: MemoryEngine(clock=clock)


@pytest.fixture
def sqlite(tmp_path: Path) -> Make:
    numbers = count()
    return lambda clock: SQLiteEngine(tmp_path / f"{next(numbers)}.db", clock=clock, synchronous="normal")


@pytest.fixture
def postgres(postgres_url: str, schema: str) -> Make:
    return lambda clock: EmptyPostgres(postgres_url, schema=schema, clock=clock)


@pytest.fixture
def valkey(valkey_url: str, prefix: str) -> Make:
    return redis_at(valkey_url, prefix)


def redis_at(url: str, prefix: str) -> Make:
    numbers = count()
    target = target_of(
        Address(f"{url}?connect_within=30s&patience=60s")
    )  # a busy machine is not a failing test
    return lambda clock: RedisEngine(target, prefix=f"{prefix}-{next(numbers)}:", clock=clock)


# Lives of fifty steps by default, and with --full.  After each step everything is compared, which takes round
# trips to a server: there a life takes about half a second, on a busy machine five.
LIVES = {"memory": (60, 1000), "sqlite": (24, 500), "postgres": (12, 120), "valkey": (16, 120)}
LIVES_ON_REDIS = (8, 40)


@pytest.fixture(params=LIVES)
def engine_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def make(request: pytest.FixtureRequest, engine_name: str) -> Make:
    found: Make = request.getfixturevalue(engine_name)
    return found


def lives(request: pytest.FixtureRequest, usual: int, full: int) -> int:
    return full if request.config.getoption("--full") else usual


def test_an_engine_is_what_the_model_says_after_every_step(
    make: Make, engine_name: str, seed: int | None, request: pytest.FixtureRequest
) -> None:
    """I1-I16, as far as one client at a time can see them."""
    check_engine(make, examples=lives(request, *LIVES[engine_name]), seed=seed)


def test_records_and_feeds_are_what_their_model_says_after_every_step(
    make: Make, engine_name: str, seed: int | None, request: pytest.FixtureRequest
) -> None:
    """R1, as far as one client at a time can see it."""
    usual, full = LIVES[engine_name]
    check_records(make, examples=lives(request, max(usual // 3, 8), full), seed=seed)


def test_a_clock_that_goes_back_keeps_no_lease_and_changes_no_delay(
    make: Make, engine_name: str, seed: int | None, request: pytest.FixtureRequest
) -> None:
    """L2, as far as one client at a time can see it."""
    usual, full = LIVES[engine_name]
    check_clock(make, examples=lives(request, max(usual // 3, 8), full), seed=seed)


def test_redis_is_what_the_model_says_as_well(
    redis_url: str, prefix: str, seed: int | None, request: pytest.FixtureRequest
) -> None:
    """The mutants are not caught once more: the engine is the same as on Valkey."""
    check_engine(redis_at(redis_url, prefix), examples=lives(request, *LIVES_ON_REDIS), seed=seed)


# A mutant wraps an engine and is wrong in the same way around each of them: what catches it is tried out
# around the quickest, and around the others with --full.
around = pytest.mark.parametrize(
    "engine_name",
    ["memory", *(pytest.param(name, marks=pytest.mark.full) for name in LIVES if name != "memory")],
)


@around
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_of_an_engine_is_caught(make: Make, mutant: str, seed: int | None) -> None:
    assert catch(MUTANTS[mutant], make, seed=seed)


@around
@pytest.mark.parametrize("harmless", [Wrapped, Miscounting, OneWayPut, Reruled])
def test_it_is_not_the_wrapping_that_is_caught(make: Make, harmless: type[Wrapped], seed: int | None) -> None:
    assert not catch(harmless, make, examples=16, seed=seed)


@around
@pytest.mark.parametrize("mutant", RECORD_MUTANTS)
def test_a_mutant_of_records_or_feeds_is_caught(make: Make, mutant: str, seed: int | None) -> None:
    assert catch(RECORD_MUTANTS[mutant], make, check=check_records, seed=seed)


@around
def test_it_is_not_the_wrapping_of_records_that_is_caught(make: Make, seed: int | None) -> None:
    assert not catch(WithRecords, make, examples=16, check=check_records, seed=seed)


@around
@pytest.mark.parametrize("mutant", CLOCK_MUTANTS)
def test_a_mutant_of_the_clock_is_caught(make: Make, mutant: str, seed: int | None) -> None:
    assert catch(CLOCK_MUTANTS[mutant], make, check=check_clock, seed=seed)


@around
def test_it_is_not_the_wrapping_of_the_clock_that_is_caught(make: Make, seed: int | None) -> None:
    assert not catch(Timed, make, examples=16, check=check_clock, seed=seed)
