"""Every engine is what the model of the contract says, and no broken engine passes for a right one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Self

import asyncpg
import pytest

from skep.address import Address
from skep.broker import Engine
from skep.brokers.memory import MemoryBroker
from skep.brokers.postgres import PostgresBroker
from skep.brokers.redis import RedisBroker
from skep.brokers.redis_link import target_of
from skep.brokers.sqlite import SQLiteBroker
from skep.testing.clock import FakeClock
from skep.testing.machine import check_engine
from skep.testing.mutants import MUTANTS, Miscounting, Putting, Wrapped, catch

Make = Callable[[FakeClock], Engine]

EMPTY = """
    DELETE FROM ready; DELETE FROM scheduled; DELETE FROM held; DELETE FROM running; DELETE FROM chunk;
    DELETE FROM archive;
    DELETE FROM known; DELETE FROM token; DELETE FROM unique_key; DELETE FROM rule; DELETE FROM batch;
    DELETE FROM ended; DELETE FROM batch_tally; DELETE FROM schedule; DELETE FROM tally;
    ALTER SEQUENCE back RESTART;
    ALTER SEQUENCE front RESTART;
    ALTER SEQUENCE fence RESTART;
"""


class EmptyPostgres(PostgresBroker):
    """Opened empty: that takes a tenth of the time of a new schema."""

    def __init__(self, url: str, *, schema: str, clock: FakeClock) -> None:
        super().__init__(url, schema=schema, clock=clock)
        self._emptying = (url, schema)

    async def open(self) -> Self:
        await super().open()
        url, schema = self._emptying
        connection = await asyncpg.connect(url, server_settings={"search_path": schema})
        await connection.execute(EMPTY)
        await connection.close()
        return self


@pytest.fixture
def memory() -> Make:
    return lambda clock: MemoryBroker(clock=clock)


@pytest.fixture
def sqlite(tmp_path: Path) -> Make:
    numbers = count()
    return lambda clock: SQLiteBroker(tmp_path / f"{next(numbers)}.db", clock=clock, synchronous="normal")


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
    return lambda clock: RedisBroker(target, prefix=f"{prefix}-{next(numbers)}:", clock=clock)


@pytest.fixture(params=["memory", "sqlite", "postgres", "valkey"])
def make(request: pytest.FixtureRequest) -> Make:
    found: Make = request.getfixturevalue(request.param)
    return found


def test_an_engine_is_what_the_model_says_after_every_step(
    make: Make, request: pytest.FixtureRequest
) -> None:
    """I1-I15, as far as one client at a time can see them."""
    remote = {"postgres", "valkey"} & {request.node.callspec.params["make"]}  # a look takes round trips
    check_engine(make, examples=40 if remote else 120)


def test_redis_is_what_the_model_says_as_well(redis_url: str, prefix: str) -> None:
    """The mutants are not caught once more: the engine is the same as on Valkey."""
    check_engine(redis_at(redis_url, prefix), examples=15)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_of_an_engine_is_caught(make: Make, mutant: str) -> None:
    assert catch(MUTANTS[mutant], make)


@pytest.mark.parametrize("harmless", [Wrapped, Miscounting, Putting])
def test_it_is_not_the_wrapping_that_is_caught(make: Make, harmless: type[Wrapped]) -> None:
    assert not catch(harmless, make, examples=16)
