"""Engines that are wrong about records, and the schedules that tell them from a right one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from propolis.app.operate.schedule_records import KIND, all_schedules, pause, store
from propolis.core.protocols import Records, Swept
from propolis.core.records import Swap, Swapped
from propolis.core.schedule import firing_id
from propolis.engines import piece_of
from propolis.engines.memory import MemoryEngine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.steps import found
from propolis.worker.sweeping.schedule_firing import Firer

from .acting import Around, look
from .test_firing import FIRST, MINUTE, SECOND, Stale, every_minute


class FiredTwice(Around):
    """Versions are not looked at: everybody who tries settles an instant."""

    async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:
        return await super().swap([replace(swap, changes=tuple(map(anyhow, swap.changes))) for swap in swaps])


def anyhow(change: Any) -> Any:
    return replace(change, expected=None)


class NotMovedOn(Around):
    """The jobs of a swap are put, and its changes forgotten."""

    async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:
        return await super().swap([replace(swap, changes=()) if swap.puts else swap for swap in swaps])


class JobLost(Around):
    """The changes of a swap are made, and its jobs forgotten."""

    async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:
        return await super().swap([replace(swap, puts=()) for swap in swaps])


class RestHindered(Around):
    """A refused swap takes those after it along."""

    async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:
        answers: list[Swapped] = []
        for swap in swaps:
            refused = next((answer for answer in answers if answer.refusal), None)
            answers += [refused] if refused else await super().swap([swap])
        return answers


class DueUntold(Around):
    """A sweep never tells that a schedule is due, so nobody ever fires one."""

    async def sweep(self, **asked: Any) -> Swept:
        swept: Swept = await self.engine.sweep(**asked)
        return replace(swept, records_due=())


class ReminderKept(Around):
    """A change that sets no reminder leaves the old one."""

    async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:
        return await super().swap(
            [replace(swap, changes=tuple(map(self.kept, swap.changes))) for swap in swaps]
        )

    def kept(self, change: Any) -> Any:
        return change if change.at is not None else replace(change, at=FIRST)


async def keeps_its_promises(engine: Any, clock: FakeClock) -> None:
    """Two fire at once; meanwhile an operator pauses a schedule that one of them has seen."""
    await store(engine, [every_minute("a"), every_minute("b"), every_minute("c")])
    clock.advance(MINUTE)
    late: Any = Stale(engine, await piece_of(engine, Records).records(KIND, due=True))
    assert await pause(engine, "b", paused=True)
    a: Any = Stale(engine, await piece_of(engine, Records).records(KIND, names=["a"]))
    await Firer(a, ()).fire_due()
    await Firer(late, ()).fire_due()
    assert await found(engine) == [firing_id("a", FIRST), firing_id("c", FIRST)]
    assert [stored.paused for stored in await all_schedules(engine)] == [False, True, False]
    assert KIND not in (await engine.sweep()).records_due

    clock.advance(MINUTE)
    await look(engine)
    assert (await found(engine))[2:] == [firing_id("a", SECOND), firing_id("c", SECOND)]
    assert KIND not in (await engine.sweep()).records_due


MUTANTS = [FiredTwice, NotMovedOn, JobLost, RestHindered, DueUntold, ReminderKept]


@pytest.mark.parametrize("mutant", MUTANTS)
async def test_an_engine_that_is_wrong_about_records_is_caught(mutant: type[Around]) -> None:
    clock = FakeClock()
    with pytest.raises(AssertionError):
        await keeps_its_promises(mutant(MemoryEngine(clock=clock)), clock)


async def test_an_engine_that_is_right_is_not() -> None:
    clock = FakeClock()
    await keeps_its_promises(Around(MemoryEngine(clock=clock)), clock)
