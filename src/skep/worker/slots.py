"""Slots: long-lived coroutines that run one job at a time each, so that no task is made per job."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Protocol

from skep.context import Job
from skep.job import Dead, Error, Lease, Outcome
from skep.worker.settings import Lane

log = logging.getLogger("skep.worker")

HORIZON = 0.05  # seconds of work that a lane may have waiting, besides what runs
MOST_BUFFERED = 1000
MOST_BYTES = 2_000_000  # of jobs that wait, however short they are
BUFFER_PATIENCE = 1.0  # seconds after which waiting jobs are given back to the queue
TURN = 0.002  # seconds after which a slot lets others have the loop
LEARNING = 0.2


class Stop(Enum):
    """Why a run is stopped from outside."""

    TIMEOUT = "timeout"
    LOST = "lost"
    CANCELLED = "cancelled"
    RELEASED = "released"


class Resource(Protocol):
    """What a slot keeps from one job to the next: a thread, a child process."""

    def end(self) -> None: ...


class Slot:
    """One job at a time.  Whoever stops it says why; whoever abandons it settles its job."""

    __slots__ = (
        "abandoned",
        "asked_at",
        "committing",
        "deadline",
        "job",
        "lane",
        "lease",
        "outcome",
        "resource",
        "started",
        "stop",
        "task",
    )

    def __init__(self, lane: SlotLane) -> None:
        self.lane = lane
        self.lease: Lease | None = None
        self.job: Job | None = None  # what runs, as it knows itself
        self.started = 0.0
        self.deadline: float | None = None
        self.stop: Stop | None = None
        self.asked_at: float | None = None
        self.outcome: Outcome | None = None  # once the run is over, and only hooks are still at work
        self.committing = False  # the run is over, and its end is being recorded together with what it wrote
        self.abandoned = False
        self.resource: Resource | None = None
        self.task: asyncio.Task[None] | None = None

    def ask_to_stop(self, reason: Stop, now: float) -> None:
        """Cancel what runs here, unless it has come to its end.  The first reason stands."""
        if self.committing or self.outcome is not None:
            return
        if self.lease is not None and self.stop is None and self.task is not None:
            self.stop = reason
            self.asked_at = now
            self.task.cancel()

    def begin(self, lease: Lease, now: float) -> None:
        self.lease = lease
        self.job = None
        self.started = now
        self.deadline = None
        self.stop = None
        self.asked_at = None
        self.outcome = None
        self.committing = False

    async def work(self) -> None:
        try:
            await self._work()
        finally:
            if self.resource is not None:
                self.resource.end()

    async def _work(self) -> None:
        lane = self.lane
        buffer, clock = lane.buffer, lane.clock
        turn = clock()
        while True:
            while not buffer:
                if lane.surplus > 0:
                    lane.surplus -= 1
                    return
                await lane.next_job()
                turn = clock()
            lease = buffer.popleft()
            now = clock()
            self.begin(lease, now)
            lane.last_start = now
            outcome = await lane.run(lease, self)
            if self.abandoned:
                return
            self.lease = None
            ended = clock()
            lane.average += (ended - now - lane.average) * LEARNING
            lane.settle(lease, outcome)
            if ended - turn > TURN:
                await asyncio.sleep(0)
                turn = clock()


class SlotLane:
    """The slots of some queues, the jobs that wait for them, and how long jobs take there."""

    def __init__(
        self,
        lane: Lane,
        *,
        run: Callable[[Lease, Slot], Awaitable[Outcome | None]],
        settle: Callable[[Lease, Outcome | None], None],
        clock: Callable[[], float],
    ) -> None:
        self.queues = dict(lane.queues)
        self.size = lane.slots
        self.run = run
        self.settle = settle
        self.clock = clock
        self.buffer: deque[Lease] = deque()
        self.last_start = 0.0  # when a job was last given here, or taken to be run
        self.average = 1.0  # seconds a job takes; until we know, as if they were long
        self.bytes = 1000.0  # of one job
        self.surplus = 0  # slots that are to end
        self.ending = False
        self.slots: set[Slot] = set()
        self._idle: deque[asyncio.Future[None]] = deque()

    def start(self) -> None:
        for _ in range(self.size):
            self._add_slot()

    def _add_slot(self) -> None:
        slot = Slot(self)
        self.slots.add(slot)
        slot.task = asyncio.get_running_loop().create_task(slot.work(), name="skep-slot")
        slot.task.add_done_callback(lambda _: self._slot_ended(slot))

    def _slot_ended(self, slot: Slot) -> None:
        """Expected, when there are too many or all are to end.  Otherwise its job must not go with it."""
        self.slots.discard(slot)
        if slot.lease is not None and not self.ending and not slot.abandoned:
            log.error("the slot of job %s has ended with it", slot.lease.id)
            self.settle(slot.lease, slot.outcome or Dead(error=Error("SlotEnded", "its slot ended with it")))
            self._add_slot()

    def resize(self, slots: int) -> None:
        """More slots at once; fewer as they fall idle."""
        change = slots - self.size
        self.size = slots
        if change < 0:
            self.surplus -= change
            self._wake(len(self._idle))
            return
        revived = min(change, self.surplus)
        self.surplus -= revived
        for _ in range(change - revived):
            self._add_slot()

    def replace(self, slot: Slot) -> None:
        """Leave a slot to its stuck job and take a new one."""
        slot.abandoned = True
        self.slots.discard(slot)
        self._add_slot()

    @property
    def running(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.lease is not None]

    @property
    def busy(self) -> int:
        return sum(slot.lease is not None for slot in self.slots)

    def room(self) -> int:
        """How many more jobs to lease: for the free slots, and a little ahead if jobs are short.

        What is ahead comes in halves, so that one is run while the other is on its way.
        """
        short = int(self.size * HORIZON / max(self.average, 1e-6))
        ahead = min(MOST_BUFFERED, short, int(MOST_BYTES / self.bytes))
        room = self.size - self.busy - len(self.buffer) + ahead
        return max(0, min(room, self.size + ahead // 2))

    def starving(self) -> bool:
        return not self.buffer and self.busy < self.size

    def wants(self, room: int) -> dict[str, int]:
        """The queues in the order in which to look into them this time."""
        if len(self.queues) == 1:
            return dict.fromkeys(self.queues, room)
        order = sorted(self.queues, key=lambda queue: -(random.random() ** (1 / self.queues[queue])))
        return dict.fromkeys(order, room)

    def give(self, leases: list[Lease]) -> None:
        if not self.buffer:
            self.last_start = self.clock()
        self.buffer.extend(leases)
        self._learn_size(sum([len(lease.body) for lease in leases]) / len(leases))
        if len(leases) > self.size:
            # The pump has the next exchange ready: it leaves first, and the engine works while these are run.
            # Begun at once they would have the loop to themselves, and the engine nothing to do: a third less
            # on Redis.
            asyncio.get_running_loop().call_soon(self._wake, len(leases))
        else:
            self._wake(len(leases))

    def _learn_size(self, bytes_each: float) -> None:
        """Larger ones count at once: what waits is to fit into memory."""
        share = 1.0 if bytes_each > self.bytes else LEARNING
        self.bytes += (bytes_each - self.bytes) * share

    def take_back(self) -> list[Lease]:
        """What has not started."""
        leases = list(self.buffer)
        self.buffer.clear()
        return leases

    def overdue(self) -> bool:
        """Do jobs wait here that another worker could have run by now?  Then they are longer than thought."""
        waited = self.clock() - self.last_start
        if not self.buffer or waited <= BUFFER_PATIENCE:
            return False
        self.average = max(self.average, waited)
        return True

    async def next_job(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._idle.append(future)
        await future

    def _wake(self, n: int) -> None:
        while n > 0 and self._idle:
            future = self._idle.popleft()
            if not future.done():
                future.set_result(None)
                n -= 1

    async def stop(self) -> None:
        """End every slot; what still runs is cancelled without a word."""
        self.ending = True
        tasks = [slot.task for slot in self.slots if slot.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
