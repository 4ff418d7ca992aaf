"""Slots: long-lived coroutines that run one job at a time each, so that no task is made per job."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from typing import Protocol

from propolis.core.job import Dead, Error, Lease, Outcome
from propolis.worker.attempt import LEFT, Slot
from propolis.worker.calls.own_context import SlotTask, in_own_context, take_in_cancellations
from propolis.worker.runner import Runner
from propolis.worker.settings import Lane, Monotonic

log = logging.getLogger("propolis.worker")

HORIZON = 0.05  # seconds of work that a lane may have waiting, besides what runs
MAX_BUFFERED = 1000
MAX_BYTES = 2_000_000  # of jobs that wait, however short they are
BUFFER_PATIENCE = 1.0  # seconds after which waiting jobs are given back to the queue
TURN = 0.002  # seconds after which a slot lets others have the loop
LEARNING = 0.2
DISMISSED_WITHIN = 2.0  # seconds for what is cancelled at the very end


class Settles(Protocol):
    """Whoever sees to it that the engine records how runs ended: the pump."""

    def settle(self, lease: Lease, outcome: Outcome | None) -> None:
        """A run has ended; None means that there is nothing to record."""


class SlotLane:
    """The slots of some queues, the jobs that wait for them, and how long jobs take there."""

    def __init__(
        self,
        lane: Lane,
        runner: Runner,
        settler: Settles,
        *,
        clock: Monotonic,
    ) -> None:
        self.queues = dict(lane.queues)
        self.size = lane.slots
        self.runner = runner
        self.settler = settler
        self.clock = clock
        self.buffer: deque[Lease] = deque()
        self.last_start = 0.0  # when a job was last given here, or taken to be run
        self.average = 1.0  # seconds a job takes; until we know, as if they were long
        self.bytes = 1000.0  # of one job
        self.surplus = 0  # slots that are to end
        self.slots: set[Slot] = set()
        self._idle: deque[asyncio.Future[None]] = deque()

    def start(self) -> None:
        for _ in range(self.size):
            self._add_slot()

    def _add_slot(self) -> None:
        slot = Slot(self.clock)
        self.slots.add(slot)
        slot.task = SlotTask(self._work(slot), slot.is_running)
        slot.task.add_done_callback(lambda task: self._slot_ended(slot, by_itself=task.cancelled()))

    async def _work(self, slot: Slot) -> None:
        try:
            await self._run_jobs(slot)
        finally:
            if slot.resource is not None:
                slot.resource.end()

    async def _run_jobs(self, slot: Slot) -> None:
        """One after the other, until there are too many slots or this one is left to its job."""
        buffer, clock, run, settle = self.buffer, self.clock, self.runner.run, self.settler.settle
        task, turn = slot.task, clock()
        assert task is not None
        while True:
            while not buffer:
                if self.surplus > 0:
                    self.surplus -= 1
                    return
                await self._next_job()
                turn = clock()
            lease = buffer.popleft()
            now = clock()
            slot.begin(lease, now)
            self.last_start = now
            await in_own_context(run(lease, slot))
            if task.cancelling():
                await take_in_cancellations(task)
            if not slot.finish():
                return
            ended = clock()
            self.average += (ended - now - self.average) * LEARNING
            settle(lease, slot.outcome)
            if ended - turn > TURN:
                await asyncio.sleep(0)
                turn = clock()

    def _slot_ended(self, slot: Slot, *, by_itself: bool) -> None:
        """Expected, when there are too many or all are to end.  Otherwise its job must not go with it."""
        self.slots.discard(slot)
        if slot.state in LEFT:
            return
        if slot.lease is not None:
            log.error("the slot of job %s has ended with it", slot.lease.id)
            ended = Dead(error=Error("SlotEnded", "its slot ended with it"))
            self.settler.settle(slot.lease, slot.unrecorded(ended))
        if slot.lease is not None or by_itself:  # cancelled, but not by us
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
        slot.abandon()
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
        ahead = min(MAX_BUFFERED, short, int(MAX_BYTES / self.bytes))
        room = self.size - self.busy - len(self.buffer) + ahead
        return max(0, min(room, self.size + ahead // 2))

    def starving(self) -> bool:
        return not self.buffer and self.busy < self.size

    def wants(self, room: int) -> dict[str, int]:
        """The queues in the order in which to lease from them this time."""
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

    async def _next_job(self) -> None:
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
        """End every slot; what still runs is cancelled without a word, and left if it does not stop."""
        tasks = [slot.task for slot in self.slots if slot.task is not None]
        for slot in self.slots:
            slot.dismiss()
        await asyncio.wait({asyncio.gather(*tasks, return_exceptions=True)}, timeout=DISMISSED_WITHIN)
        for slot in self.slots:  # that have not ended
            if slot.lease is not None:
                log.error("job %s does not stop: the worker ends without it", slot.lease.id)
