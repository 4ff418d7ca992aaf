"""Every engine is what the model of the contract says, and no broken engine passes for a right one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from skep.broker import Engine
from skep.brokers.memory import MemoryBroker
from skep.brokers.sqlite import SQLiteBroker
from skep.testing.clock import FakeClock
from skep.testing.machine import check_engine
from skep.testing.mutants import MUTANTS, Miscounting, Putting, Wrapped, catch

Make = Callable[[FakeClock], Engine]


def memory(folder: Path) -> Make:
    return lambda clock: MemoryBroker(clock=clock)


def sqlite(folder: Path) -> Make:
    numbers = count()
    return lambda clock: SQLiteBroker(folder / f"{next(numbers)}.db", clock=clock, synchronous="normal")


ENGINES: dict[str, Callable[[Path], Make]] = {"memory": memory, "sqlite": sqlite}


@pytest.fixture(params=ENGINES)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    return ENGINES[request.param](tmp_path)


def test_an_engine_is_what_the_model_says_after_every_step(make: Make) -> None:
    """I1-I15, as far as one client at a time can see them."""
    check_engine(make, examples=120)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_of_an_engine_is_caught(make: Make, mutant: str) -> None:
    assert catch(MUTANTS[mutant], make)


@pytest.mark.parametrize("harmless", [Wrapped, Miscounting, Putting])
def test_it_is_not_the_wrapping_that_is_caught(make: Make, harmless: type[Wrapped]) -> None:
    assert not catch(harmless, make, examples=16)
