"""Old and new code at work side by side, and a way back: nothing is lost, refused or unheard."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import asyncpg
import pytest
from tests.engines.postgres.changed_code import CHANGED, painting

from propolis.core.batch import Batch
from propolis.core.ids import new_id
from propolis.core.job import Done, Lease, Outcome, Retried
from propolis.core.records import Change, Swap
from propolis.engines.postgres.engine import PostgresEngine
from propolis.engines.postgres.schema import set_of
from propolis.testing.engines.samples import SPAN, a_job

QUEUE = "default"
ENOUGH = 100  # jobs that each kind of code must have put and done before the deploy goes on
ON_THE_WAY = 200  # at most, so that the end is not far


class Ledger:
    """What became of the jobs."""

    def __init__(self) -> None:
        self.put: set[str] = set()
        self.alone: Counter[str] = Counter()  # jobs that were put by themselves, by the code that did
        self.put_by: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.done_by: Counter[str] = Counter()
        self._moved = asyncio.Condition()

    async def until(self, enough: Callable[[], bool]) -> None:
        async with asyncio.timeout(240), self._moved:
            await self._moved.wait_for(enough)

    async def moved(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    def note_done(self, code: str, over: list[tuple[Lease, Outcome]]) -> None:
        done = [lease.id for lease, outcome in over if isinstance(outcome, Done)]
        self.done.update(done)
        self.done_by[code] += len(done)


class Fleet:
    """Processes of one version of the code, as far as storage can tell."""

    def __init__(self, code: str, engines: list[PostgresEngine], ledger: Ledger) -> None:
        self._code = code
        self.engines = engines
        self._ledger = ledger
        self._stopping = False
        self._tasks = [
            asyncio.create_task(act(each)) for each in engines for act in (self._produce, self._work)
        ]

    async def enough(self) -> None:
        """Comes and goes by this code; whoever fails meanwhile fails the test."""
        ledger, code = self._ledger, self._code
        put, done = ledger.put_by[code] + ENOUGH, ledger.done_by[code] + ENOUGH
        until = ledger.until(lambda: ledger.put_by[code] >= put and ledger.done_by[code] >= done)
        waiting = asyncio.create_task(until)
        await asyncio.wait({waiting, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in self._tasks:
            if task.done():
                await task
        await waiting

    async def stop(self) -> None:
        self._stopping = True
        await self._ledger.moved()
        await asyncio.gather(*self._tasks)

    async def _produce(self, engine: PostgresEngine) -> None:
        """One at a time, several, and members of a batch."""
        while not self._stopping:
            alone, batch = a_job(), Batch(id=new_id())
            receipts = await engine.put([alone])
            self._ledger.alone[self._code] += 1
            receipts += await engine.put([a_job(), a_job(), a_job(chosen=True), a_job(unique=alone.id)])
            receipts += await engine.put_batch(batch, [a_job(batch=batch.id, member=n) for n in range(3)])
            assert all(receipt.created for receipt in receipts)
            self._ledger.put.update(receipt.id for receipt in receipts)
            self._ledger.put_by[self._code] += len(receipts)
            await self._ledger.moved()
            await self._ledger.until(self._room)

    def _room(self) -> bool:
        return self._stopping or len(self._ledger.put) - self._ledger.done.total() < ON_THE_WAY

    async def _work(self, engine: PostgresEngine) -> None:
        over: list[tuple[Lease, Outcome]] = []
        while not self._stopping:
            exchanged = await engine.exchange(over, {QUEUE: 7}, span=20 * SPAN, holder=self._code)
            assert exchanged.lost == []
            self._ledger.note_done(self._code, over)
            over = [(lease, outcome_of(lease)) for lease in exchanged.leases]
            await self._ledger.moved()
            await engine.sweep()
            if not over:
                await engine.wait([QUEUE], 0.2)
        assert await engine.settle(over) == []
        self._ledger.note_done(self._code, over)


def outcome_of(lease: Lease) -> Outcome:
    """A quarter fails once, so that one set puts in line what the other takes from there."""
    return Retried() if lease.attempt == 1 and lease.id[-1] in "0123" else Done()


async def opened(url: str, schema: str) -> list[PostgresEngine]:
    return [await PostgresEngine(url, schema=schema).open() for _ in range(2)]


async def hears(listener: PostgresEngine, other: PostgresEngine) -> bool:
    """Whether one is woken by what the other puts."""
    queue = f"hints-{new_id()}"
    async with asyncio.timeout(240):
        while not listener.hears:
            await listener.wait([queue], 0.1)
    waiting = asyncio.create_task(listener.wait([queue], 240))
    await asyncio.sleep(0)  # it waits
    await other.put([a_job(queue=queue)])
    return await waiting


async def test_old_then_both_then_new_then_old_again(
    postgres_url: str, schema: str, connection: asyncpg.Connection, tmp_path: Path
) -> None:
    ledger = Ledger()
    old = Fleet("old", await opened(postgres_url, schema), ledger)
    await old.enough()

    with painting(tmp_path).used():
        done = await PostgresEngine(postgres_url, schema=schema).install()  # under load
        assert done == [f"ran {CHANGED}", f"installed the functions {set_of(schema)}"]
        new = Fleet("new", await opened(postgres_url, schema), ledger)
    await asyncio.gather(old.enough(), new.enough())
    assert await hears(old.engines[0], new.engines[0])
    assert await hears(new.engines[0], old.engines[0])

    await old.stop()
    await new.enough()

    again = Fleet("old", await opened(postgres_url, schema), ledger)  # a rollback begins
    await asyncio.gather(new.enough(), again.enough())
    assert await hears(again.engines[0], new.engines[0])
    await new.stop()
    await again.enough()

    await again.stop()
    await drain(again.engines[0], ledger)
    assert ledger.done.keys() == ledger.put
    assert set(ledger.done.values()) == {1}
    counts = (await again.engines[0].queues())[QUEUE]
    assert (counts.ready, counts.scheduled, counts.held, counts.running, counts.dead) == (0, 0, 0, 0, 0)
    painted = await connection.fetchval(f'SELECT count(*) FROM "{schema}".painted')
    assert painted == ledger.alone["new"] + 2  # and those of the hints
    for fleet in (old, new, again):
        for engine in fleet.engines:
            await engine.close()


@pytest.mark.parametrize("follower", ["old", "new"])
async def test_records_and_feeds_are_those_of_both(
    postgres_url: str, schema: str, tmp_path: Path, follower: str
) -> None:
    """R1: no version and no number comes twice, and whoever follows sees what the other publishes."""
    [old, _] = engines = await opened(postgres_url, schema)
    with painting(tmp_path).used():
        await PostgresEngine(postgres_url, schema=schema).install()
        [new, _] = newer = await opened(postgres_url, schema)
    version = 0
    for engine in (old, new, old, new):
        change = Change(kind="k", name="a", value=b"x", expected=version)
        [answer] = await engine.swap([Swap(changes=(change,), puts=(a_job(),))])
        assert answer.version is not None
        assert answer.version > version
        version = answer.version
    assert (await old.records("k")).records == (await new.records("k")).records

    numbers = [await engine.publish("f", [b"x"]) for engine in (old, new, old)]
    assert numbers == sorted({number for number in numbers if number is not None})
    assert await old.follow({"f": 0}) == await new.follow({"f": 0})
    hears, publishes = (old, new) if follower == "old" else (new, old)
    waiting = asyncio.create_task(hears.follow({"f": numbers[-1]}, wait=240))
    while not (await publishes.follow({"f": numbers[-1]}))["f"].entries:
        await publishes.publish("f", [b"later"])
    assert (await waiting)["f"].entries[0].value == b"later"
    for engine in (*engines, *newer):
        await engine.close()


async def drain(engine: PostgresEngine, ledger: Ledger) -> None:
    while leases := (await engine.exchange([], {QUEUE: 100}, span=SPAN, holder="last")).leases:
        over: list[tuple[Lease, Outcome]] = [(lease, outcome_of(lease)) for lease in leases]
        assert await engine.settle(over) == []
        ledger.note_done("last", over)
