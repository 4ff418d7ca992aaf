"""The real worker and the memory engine, made to be driven and watched by a test."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Unpack

from propolis.app.registry import Middleware
from propolis.core.clock import Clock
from propolis.core.job import JobInfo, Lease, Outcome, Released
from propolis.core.protocols import Engine, Exchange, LeaseTerms
from propolis.core.transitions import Retention
from propolis.engines.memory import MemoryEngine
from propolis.engines.memory.book import Book
from propolis.engines.shared.book.stored_entries import StoredEntry
from propolis.engines.shared.waiters import Waiters
from propolis.worker import Worker
from propolis.worker.attempt import Stop

LAST_WORDS = 2.0  # real seconds for the runs of a worker that ends to come to their end


class RememberingBook(Book):
    """The state of the memory engine, with what it has forgotten."""

    def __init__(self, waiters: Waiters, retention: Retention) -> None:
        super().__init__(waiters, retention)
        self.gone: dict[int, JobInfo] = {}  # by the number of their put

    def forget(self, entry: StoredEntry) -> None:
        self.gone[entry.seq] = entry.info()
        super().forget(entry)


class RememberingEngine(MemoryEngine):
    """The memory engine, which besides remembers what it has forgotten, and how runs ended."""

    _book: RememberingBook

    def __init__(self, *, clock: Clock) -> None:
        super().__init__(clock=clock)
        self.outcomes: dict[str, Outcome] = {}  # of the last run of each job, by its id
        self.runs: Counter[str] = Counter()  # the runs that were settled, by task

    def _new_book(self, retention: Retention) -> RememberingBook:
        return RememberingBook(self._waiters, retention)

    async def exchange(
        self, outcomes: Sequence[tuple[Lease, Outcome]], wants: Mapping[str, int], **terms: Unpack[LeaseTerms]
    ) -> Exchange:
        exchange = await super().exchange(outcomes, wants, **terms)
        self._remember_outcomes(outcomes, exchange.lost)
        return exchange

    def _remember_outcomes(self, outcomes: Sequence[tuple[Lease, Outcome]], lost: list[Lease]) -> None:
        refused = {(lease.id, lease.fence) for lease in lost}
        for lease, outcome in outcomes:
            if (lease.id, lease.fence) not in refused and not isinstance(outcome, Released):
                self.outcomes[lease.id] = outcome
                self.runs[lease.task] += 1

    def all_jobs(self) -> list[JobInfo]:
        """Every job that was ever put, in that order, as it is or as it last was."""
        live = {entry.seq: entry.info() for entry in list(self._book.entries.values())}
        return [info for _, info in sorted({**live, **self._book.gone}.items())]

    def queue_names(self) -> list[str]:
        return list(self._book.lines)


class DrivenWorker(Worker):
    """The real worker: but it leases when its driver says so, who also watches its clock."""

    _killed = False
    around: Middleware | None = None  # every run, outside of what the app itself puts there

    async def start(self) -> None:
        """Raises what a start-up hook raises."""
        self._life = asyncio.create_task(self.run(), name="propolis-driven-worker")
        await self._or_its_end(self.started)

    async def _start(self, engine: Engine) -> bool:
        self._runner.around = self.around
        started = await super()._start(engine)
        self._pump.pause()
        return started

    async def end(self) -> None:
        """Stop everything at once; what runs is cancelled and not settled.  Shutdown hooks are called."""
        self._life.cancel()
        # A job that ignores its cancellation would be waited for without end.
        await asyncio.wait({self._life}, timeout=LAST_WORDS)
        if self._life.done() and not self._life.cancelled():
            self._life.result()

    async def kill(self) -> None:
        """The same, but as kill -9 would have it: nobody hears of it."""
        self._killed = True
        await self.end()

    async def _call_state_hooks(self, event: str) -> None:
        if not self._killed:
            await super()._call_state_hooks(event)

    # --- its work ------------------------------------------------------------------------

    async def fire(self) -> bool:
        """Fire the schedules that are due; says whether there are more."""
        return await self._firer.fire_due() == timedelta(0)

    def pause(self) -> None:
        self._pump.pause()

    def resume(self) -> None:
        self._pump.resume()

    def serve(self, queues: Sequence[str]) -> bool:
        """Also take jobs of these queues; says whether any of them is new."""
        served = self._lanes[0].queues
        new = [queue for queue in queues if queue not in served]
        served.update(dict.fromkeys(new, 1))
        return bool(new)

    def wake(self) -> None:
        self._pump.wake()

    async def check(self) -> None:
        """Let the pump lease and settle what it can."""
        self._pump.resting.clear()
        self._pump.wake()
        await self._or_its_end(self._pump.resting)

    async def moved(self, seconds: float) -> None:
        """Until something may have changed, or this much real time has passed."""
        self._pump.resting.clear()
        await self._or_its_end(self._pump.resting, seconds)

    async def _or_its_end(self, event: asyncio.Event, seconds: float | None = None) -> None:
        waiting = asyncio.create_task(event.wait())
        try:
            await asyncio.wait({waiting, self._life}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._life.done():
            self._life.result()  # it never ends by itself, so it has failed

    # --- its state -----------------------------------------------------------------------

    @property
    def unsettled(self) -> bool:
        return self._pump.unsettled

    @property
    def starting(self) -> bool:
        """Are there leased jobs that a free slot is about to run?"""
        return any(lane.buffer and lane.busy < lane.size for lane in self._lanes)

    def runs(self) -> list[tuple[Lease, Stop | None]]:
        """What is running, and why it has been asked to stop, if it has."""
        return [(slot.lease, slot.stop) for slot in self._running() if slot.lease is not None]

    @property
    def busy(self) -> bool:
        return self.unsettled or any(lane.buffer or lane.busy for lane in self._lanes)

    @property
    def next_moment(self) -> float | None:
        """When, by its clock, a running job times out or is given up, or a breaker is to be seen to."""
        patience = self._settings.stuck_after.total_seconds()
        slots = self._running()
        moments = [slot.deadline for slot in slots if slot.deadline is not None and slot.stop is None]
        moments += [slot.asked_at + patience for slot in slots if slot.asked_at is not None]
        if self._breakers is not None and (beat := self._breakers.next_moment) is not None:
            moments.append(beat)
        return min(moments, default=None)
