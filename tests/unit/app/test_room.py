"""Whoever meets a full queue may wait for room; the clock of these tests is their own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from propolis import App
from propolis.app.client.room import FIRST_PAUSE, LAST_PAUSE, Room
from propolis.core.envelope import Envelope
from propolis.core.protocols import Receipt
from propolis.errors import BadCall, BadSetting, QueueFull


class Bounded:
    """A queue that holds so many, on a clock that moves only when somebody sleeps."""

    def __init__(self, holds: int) -> None:
        self.holds = holds
        self.there: list[str] = []
        self.calls: list[int] = []
        self.now = 0.0
        self.freed_at: dict[float, int] = {}
        self.room = Room(clock=lambda: self.now, sleep=self.sleep)

    async def put(self, jobs: Sequence[Envelope]) -> list[Receipt]:
        await asyncio.sleep(0)
        self.calls.append(len(jobs))
        if len(self.there) + len(jobs) > self.holds:
            raise QueueFull("q", self.holds)
        self.there += [job.id for job in jobs]
        return [Receipt(job.id, True) for job in jobs]

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at in [at for at in self.freed_at if at <= self.now]:
            self.holds += self.freed_at.pop(at)
        await asyncio.sleep(0)

    async def enter(self, *ids: str, seconds: float = 10.0) -> list[str]:
        jobs = [Envelope(id=each, task="t", queue="q") for each in ids]
        return [receipt.id for receipt in await self.room.put(self.put, jobs, seconds)]


async def test_where_there_is_room_nobody_waits() -> None:
    queue = Bounded(2)
    assert await queue.enter("a", "b") == ["a", "b"]
    assert (queue.now, queue.calls) == (0.0, [2])


async def test_a_job_is_put_when_room_comes_and_is_tried_ever_more_rarely() -> None:
    queue = Bounded(0)
    queue.freed_at[5.0] = 1
    assert await queue.enter("a") == ["a"]
    assert 5.0 <= queue.now <= 5.0 + 1.2 * LAST_PAUSE
    assert len(queue.calls) <= 25
    assert FIRST_PAUSE * 10 < LAST_PAUSE


async def test_room_that_does_not_come_in_time_is_the_same_error_as_without_waiting() -> None:
    queue = Bounded(0)
    with pytest.raises(QueueFull):
        await queue.enter("a", seconds=3.0)
    assert queue.now == pytest.approx(3.0)
    assert queue.there == []


async def test_those_who_wait_stand_in_line_and_one_of_them_asks() -> None:
    queue = Bounded(0)
    queue.freed_at[2.0] = 3
    ids = "abcdefghij"
    async with asyncio.TaskGroup() as group:
        for each in ids[:3]:
            group.create_task(queue.enter(each, seconds=60.0))
    assert queue.there == ["a", "b", "c"]
    asked = len(queue.calls)
    assert asked < 25 + 2 * 3  # each its first time and its last; between them one of all
    queue.freed_at[queue.now + 50.0] = 7
    async with asyncio.TaskGroup() as group:
        for each in ids[3:]:
            group.create_task(queue.enter(each, seconds=600.0))
    assert queue.there == list(ids)


async def test_what_does_not_fit_whole_goes_in_pieces_in_its_order() -> None:
    queue = Bounded(5)
    queue.freed_at[1.0] = 95
    ids = [f"{n:02}" for n in range(100)]
    assert await queue.enter(*ids) == ids
    assert queue.there == ids
    assert len(queue.calls) < 60


async def test_jobs_that_were_put_stay_where_the_next_ones_find_no_room() -> None:
    queue = Bounded(3)
    with pytest.raises(QueueFull):
        await queue.enter("a", "b", "c", "d", "e", seconds=1.0)
    assert queue.there == ["a", "b", "c"]


async def test_another_error_is_not_waited_for() -> None:
    queue = Bounded(0)

    async def fail(_: Sequence[Envelope]) -> list[Receipt]:
        raise BadSetting("no")

    with pytest.raises(BadSetting):
        await queue.room.put(fail, [Envelope(id="a", task="t")], 10.0)
    assert queue.now == 0.0


async def test_whose_turn_does_not_come_tries_once_more_at_the_end() -> None:
    queue = Bounded(0)
    asked = asyncio.Event()

    async def never(_: Sequence[Envelope]) -> list[Receipt]:
        if not asked.is_set():
            asked.set()
            raise QueueFull("q", 0)
        await asyncio.Event().wait()  # it is its turn, and the engine does not answer
        raise AssertionError

    first = asyncio.create_task(queue.room.put(never, [Envelope(id="a", task="t", queue="q")], 60.0))
    await asked.wait()
    await asyncio.sleep(0)
    queue.holds = 1
    assert await queue.enter("b", seconds=0.0) == ["b"]
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    queue.holds = 2
    assert await queue.enter("c") == ["c"]  # and whoever goes leaves nobody in the way


# --- as users say it ---------------------------------------------------------------------


def test_waiting_goes_with_enqueue_only() -> None:
    app = App("memory://")

    @app.task(name="t")
    def t(n: int) -> None: ...

    waiting = t.using(wait="30s")
    other: Any = waiting.step
    for wrong in (lambda: waiting.job(1), lambda: list(waiting.many([1])), lambda: other(1)):
        with pytest.raises(BadSetting, match=r"wait= (goes with enqueue\(\)|is of no use to a step)"):
            wrong()
    with pytest.raises(BadCall, match="who waits for room in a transaction keeps it open"):
        t.using(wait="30s", tx=object())
    with pytest.raises(BadSetting, match="is not a duration"):
        t.using(wait="soon")
