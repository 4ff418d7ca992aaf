"""Many schedules take few calls, whatever engine keeps them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from propolis import App
from propolis.app.operate.schedule_records import all_schedules
from propolis.app.operate.schedules import sync
from propolis.core.protocols import Engine
from propolis.core.records import Read, Swap, Swapped
from propolis.testing.clock import FakeClock
from propolis.testing.engines.steps import counts
from propolis.worker.sweeping.schedule_firing import Firer

from .acting import Around

pytestmark = pytest.mark.parametrize(
    "make", ["memory", "sqlite", "postgres", "redis", "shards"], indirect=True
)


class Counted(Around):
    """The engine, how often it was called, and for how long."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.calls: Counter[str] = Counter()
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return super().__getattr__(name)

    async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:
        self.calls["swap"] += 1
        begun = time.perf_counter()
        answers = await super().swap(swaps, token=token)
        self.seconds += time.perf_counter() - begun
        return answers

    async def records(self, kind: str, **asked: Any) -> Read:
        self.calls["records"] += 1
        begun = time.perf_counter()
        read = await super().records(kind, **asked)
        self.seconds += time.perf_counter() - begun
        return read


def an_app(count: int, word: str = "as before") -> App:
    """With so many schedules in its code."""
    app = App("memory://")

    @app.task
    async def report(number: int, word: str) -> None: ...

    for number in range(count):
        app.every("1h", name=f"report-{number:05}", args=(number, word))(report)
    return app


async def calls_of_a_start(engine: Engine, app: App) -> tuple[dict[str, int], float]:
    counted: Any = Counted(engine)
    begun = time.perf_counter()
    await sync(counted, app.declared_schedules)
    return dict(counted.calls), time.perf_counter() - begun


async def test_two_thousand_declared_schedules_take_four_calls_and_two_if_nothing_has_changed(
    engine: Engine, times_count: bool
) -> None:
    app = an_app(2000)
    first, seconds = await calls_of_a_start(engine, app)
    again, seconds_again = await calls_of_a_start(engine, app)
    changed, _ = await calls_of_a_start(engine, an_app(2000, "another"))

    assert first == changed == {"records": 2, "swap": 2}
    assert again == {"records": 2}
    assert len(await all_schedules(engine)) == 2000
    if times_count:
        assert max(seconds, seconds_again) <= 1


async def test_a_thousand_due_schedules_take_one_call_to_read_and_one_to_fire(
    engine: Engine, clock: FakeClock, request: pytest.FixtureRequest, times_count: bool
) -> None:
    """With --full ten thousand of them, within two seconds of the engine's work."""
    pages = 10 if times_count else 3
    app = an_app(1000 * pages)
    await sync(engine, app.declared_schedules)
    clock.advance("1h")
    counted: Any = Counted(engine)
    firer = Firer(counted, app.declared_schedules)

    while await firer.fire_due() == timedelta(0):
        pass

    assert (await counts(engine)).put == 1000 * pages
    assert {stored.last_at for stored in await all_schedules(engine)} == {clock.now}
    assert counted.calls == {"records": pages + 1, "swap": pages}
    if times_count and request.node.callspec.params["make"] != "shards":  # there a job is stored twice
        assert counted.seconds <= 2
