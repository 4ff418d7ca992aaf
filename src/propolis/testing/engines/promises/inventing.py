"""Inventing: an ability that nobody thought of needs records, and no verb of any engine.

Made up: a counter that many add to, and a timer.  When the time is over, whoever sweeps puts one job with
what was counted until then, and the next count begins.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

import msgspec

from propolis.core.envelope import Envelope
from propolis.core.ids import derive_id
from propolis.core.job import Lease
from propolis.core.protocols import Engine, Records
from propolis.core.records import Change, Swap
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import a_job
from propolis.testing.engines.steps import Another, take

KIND = "made-up-counter"
MINUTE = timedelta(minutes=1)


class TimedCounter:
    """Counts under a name; `sweep` reports and forgets what was counted a minute ago."""

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine, Records)
        self._engine, self._records = engine, engine

    async def add(self, name: str, by: int) -> int:
        while True:
            read = await self._records.records(KIND, names=[name])
            old = read.records[0] if read.records else None
            count = by if old is None else by + int(old.value)
            change = Change(
                kind=KIND,
                name=name,
                value=str(count).encode(),
                expected=0 if old is None else old.version,
                at=MINUTE if old is None else old.at,
            )
            [answer] = await self._records.swap([Swap(changes=(change,))])
            if answer.version is not None:
                return count

    async def sweep(self) -> None:
        if KIND not in (await self._engine.sweep()).records_due:
            return
        due = await self._records.records(KIND, due=True)
        swaps = []
        for record in due.records:
            gone = Change(kind=KIND, name=record.name, value=None, expected=record.version)
            job = self._report(record.name, int(record.value), record.version)
            swaps.append(Swap(changes=(gone,), puts=(job,)))
        await self._records.swap(swaps)

    def _report(self, name: str, count: int, version: int) -> Envelope:
        return a_job(name, count, id=derive_id(KIND, name, str(version)), chosen=True)


class InventingPromise:
    async def test_a_counter_with_a_timer_needs_records_alone(
        self, engine: Engine, another: Another, clock: FakeClock
    ) -> None:
        """R1: nothing is lost between those who add, and each count is reported once, when it is due."""
        counters = [TimedCounter(handle) for handle in (engine, await another(), await another())]
        await asyncio.gather(*(counter.add("visits", n) for counter in counters for n in range(1, 6)))
        await counters[0].add("orders", 7)
        await asyncio.gather(*(counter.sweep() for counter in counters))
        assert await take(engine) == []  # not yet

        clock.advance(MINUTE)
        await asyncio.gather(*(counter.sweep() for counter in counters))

        assert sorted(map(_arguments, await take(engine))) == [["orders", 7], ["visits", 45]]
        assert await counters[1].add("visits", 1) == 1
        await counters[0].sweep()
        assert await take(engine) == []


def _arguments(lease: Lease) -> list[object]:
    return list(msgspec.json.decode(msgspec.json.decode(lease.body, type=Envelope).args))
