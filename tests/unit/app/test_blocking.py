"""Verbs for synchronous code, made of the asynchronous ones."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator

import pytest

from propolis import App
from propolis.app.client.blocking import blocking, blocking_list
from propolis.app.client.client import Client


class Counter:
    def __init__(self, client: Client) -> None:
        self._client = client

    async def aadd(self, one: int, *, other: int = 0) -> int:
        """The sum of both."""
        return one + other

    async def afail(self) -> None:
        raise LookupError("nothing there")

    async def aupto(self, last: int) -> AsyncIterator[int]:
        """Every number."""
        for number in range(last):
            yield number

    add = blocking(aadd)
    fail = blocking(afail)
    upto = blocking_list(aupto)


@pytest.fixture
def counter() -> Counter:
    return Counter(Client("memory://"))


def test_a_twin_waits_for_the_result(counter: Counter) -> None:
    assert counter.add(1, other=2) == 3
    assert counter.upto(3) == [0, 1, 2]


def test_a_twin_raises_what_the_verb_raises(counter: Counter) -> None:
    with pytest.raises(LookupError, match="nothing there"):
        counter.fail()


def test_a_twin_has_a_name_a_signature_and_a_docstring_of_its_own() -> None:
    assert (Counter.add.__name__, Counter.add.__qualname__) == ("add", "Counter.add")
    assert inspect.signature(Counter.add) == inspect.signature(Counter.aadd)
    assert Counter.add.__doc__ == "`aadd`, for synchronous code.\n\nThe sum of both."
    assert Counter.fail.__doc__ == "`afail`, for synchronous code."
    assert not inspect.iscoroutinefunction(Counter.add)


@pytest.mark.parametrize("group", ["jobs", "queues", "batches", "schedules"])
def test_every_verb_of_operators_has_a_twin(group: str) -> None:
    verbs = vars(type(getattr(App("memory://"), group)))
    asynchronous = {name for name, verb in verbs.items() if inspect.iscoroutinefunction(verb)}
    public = {name.removeprefix("a") for name in asynchronous if name.startswith("a")}
    assert public
    assert public <= set(verbs)
