"""The pump: settles what has ended and leases what is next, in one exchange where there is both.

It is the only part of a worker, besides the keeper, that talks to the engine.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

from skep.broker import LOG_LINES, Engine, Exchange, Note
from skep.errors import EngineError, StorageBroken
from skep.job import Dead, Identity, Lease, Outcome, Progress, Release, describe, new_id
from skep.worker.keeper import Keeper
from skep.worker.settings import Mode, Settings
from skep.worker.slots import SlotLane

log = logging.getLogger("skep.worker")

LINGER = 0.001  # seconds in which outcomes gather while there is other work to do
ENOUGH = 100  # outcomes that do not wait for more
SWEEP_EVERY = 1.0
FIRST_BACKOFF, LAST_BACKOFF = 0.1, 3.0
BEATEN = 2  # hints in a row after which others had been faster: from then on we let them
STEP_BACK, MOST_STEPS = 0.001, 32  # seconds, for each further time


class Telling:
    """What one job has told since the last turn."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.progress: Progress | None = None
        self.lines: deque[str] = deque(maxlen=LOG_LINES)


class Pump:
    """Runs until it is stopped and everything it was given is settled."""

    def __init__(
        self,
        engine: Engine,
        lanes: Sequence[SlotLane],
        keeper: Keeper,
        settings: Settings,
        *,
        clock: Callable[[], float],
        lost: Callable[[Lease], None],
        fire: Callable[[], Awaitable[timedelta | None]],
    ) -> None:
        self._engine = engine
        self._lanes = lanes
        self._keeper = keeper
        self._settings = settings
        self._clock = clock
        self._lost = lost
        self._fire = fire
        self._done: list[tuple[Lease, Outcome]] = []
        self._notes: dict[Identity, Telling] = {}
        self._wake = asyncio.Event()
        self._leasing = True
        self._finishing = asyncio.Event()
        self._budget = 1 if settings.mode is Mode.ONCE else None
        self._name = new_id()  # among those who sweep
        self._next_sweep = 0.0
        self._told_when_to_sweep = False
        self._backoff = FIRST_BACKOFF
        self._hinted = False
        self._beaten = 0
        self.settled = 0
        self.drained = asyncio.Event()  # set when a mode that ends has nothing left to do
        self.idle = asyncio.Event()  # set while there is nothing to lease, run or settle
        self.resting = asyncio.Event()  # set whenever it waits, having nothing to lease or settle

    # --- what the slots say --------------------------------------------------------------

    def settle(self, lease: Lease, outcome: Outcome | None) -> None:
        """A run has ended; None means that its lease is lost and somebody else decides."""
        if outcome is None:
            self._keeper.drop((lease,))
        else:
            self._done.append((lease, outcome))
        self._wake.set()

    def note(self, lease: Lease, progress: Progress | None, lines: Iterable[str]) -> None:
        """What a running job tells; between two turns only the newest of it is kept."""
        told = self._notes.setdefault((lease.id, lease.fence), Telling(lease))
        told.progress = progress or told.progress
        told.lines.extend(lines)
        self._wake.set()

    @property
    def unsettled(self) -> bool:
        """Does it hold what the engine does not know yet?"""
        return bool(self._done or self._notes)

    def wake(self) -> None:
        """Look again now."""
        self._wake.set()

    def pause(self) -> None:
        """Lease nothing until `resume`; what is here already goes on."""
        self._leasing = False

    def resume(self) -> None:
        self._leasing = True
        self._wake.set()

    def stop_leasing(self) -> None:
        """Lease nothing more, and give back what has not started."""
        self.pause()
        for lane in self._lanes:
            self._give_back(lane)
        self._wake.set()

    def finish(self) -> None:
        """Return from `run` when everything is settled."""
        self._finishing.set()
        self._wake.set()

    # --- the loop ------------------------------------------------------------------------

    async def run(self) -> None:
        while self.unsettled or not self._finishing.is_set():
            try:
                await self._turn()
                self._backoff = FIRST_BACKOFF
            except StorageBroken:
                raise  # it will not mend itself: end, say why, and be started again
            except EngineError as error:
                await self._wait_for_the_engine(error)
            except Exception:
                log.exception("an outcome cannot be recorded: looking for it, one by one")
                await self._settle_one_by_one()

    async def _turn(self) -> None:
        await self._sweep()
        await self.send_notes()
        for lane in self._lanes:
            if lane.overdue():
                self._give_back(lane)
        leased = await self._exchange()
        self._beaten = 0 if leased else self._beaten + self._hinted
        self._hinted = False
        if await self._settle_rest(leased) and self._settings.mode is not Mode.FOREVER:
            return  # a job may have come back after we looked: not drained before the next look
        self._look_whether_drained(leased)
        if not leased:
            await self._rest()

    async def _exchange(self) -> int:
        """Settle and lease; returns how many new jobs there are."""
        leased = 0
        for lane in self._lanes:
            if (room := self._room(lane)) > 0:
                leased += await self._exchange_for(lane, room)
        return leased

    async def _settle_rest(self, leased: int) -> bool:
        """What has ended while we leased nothing; says whether there was any."""
        if not self._done or leased:
            return False
        outcomes = self._take_done()
        with self._putting_back(outcomes):
            self._settled(outcomes, await self._engine.settle(outcomes))
        return True

    async def _exchange_for(self, lane: SlotLane, room: int) -> int:
        span, holder, wants = self._settings.lease, self._settings.holder, lane.wants(room)
        outcomes = self._take_done()
        sent = self._clock()
        with self._putting_back(outcomes):
            if outcomes:
                got = await self._engine.exchange(outcomes, wants, span=span, holder=holder, limit=room)
            else:
                got = Exchange([], await self._engine.lease(wants, span=span, holder=holder, limit=room))
        self._settled(outcomes, got.lost)
        if self._budget is not None:
            self._budget -= len(got.leases)
        if got.leases:
            self._keeper.add(got.leases, sent)
            lane.give(got.leases)
            self.idle.clear()
            if not self._leasing:  # it was stopped while they were on their way
                self._give_back(lane)
            elif len(got.leases) <= lane.size:
                await asyncio.sleep(0)  # a few begin at once: the shortest have ended when we look again
        return len(got.leases)

    async def _settle_one_by_one(self) -> None:
        """One of them is more than the engine can store: bury its job, and let the others go on."""
        self._notes.clear()
        for lease, outcome in self._take_done():
            try:
                self._settled([(lease, outcome)], await self._engine.settle([(lease, outcome)]))
            except EngineError:
                self._done.append((lease, outcome))
            except Exception as error:
                self._done.append((lease, Dead(error=describe(error))))

    def _room(self, lane: SlotLane) -> int:
        if not self._leasing:
            return 0
        room = lane.room()
        return room if self._budget is None else min(room, self._budget)

    def _take_done(self) -> list[tuple[Lease, Outcome]]:
        outcomes, self._done = self._done, []
        return outcomes

    @contextmanager
    def _putting_back(self, outcomes: list[tuple[Lease, Outcome]]) -> Iterator[None]:
        """An outcome is ours until the engine has it: settling twice is harmless, not at all is not."""
        self._keeper.settling = outcomes
        try:
            yield
        except BaseException:
            self._done = outcomes + self._done
            raise

    def _settled(self, outcomes: list[tuple[Lease, Outcome]], lost: list[Lease]) -> None:
        self.settled += len(outcomes) - len(lost)
        self._keeper.drop(lease for lease, _ in outcomes)
        for lease in lost:
            # The job outlived its lease and may be running elsewhere.  Its effects stand, so there
            # is nothing to undo: the other attempt decides.
            self._lost(lease)

    def _give_back(self, lane: SlotLane) -> None:
        self._done += [(lease, Release()) for lease in lane.take_back()]

    async def send_notes(self) -> None:
        if not self._notes:
            return
        notes, self._notes = self._notes, {}
        try:
            await self._engine.note(
                [Note(told.lease, told.progress, (*told.lines,)) for told in notes.values()]
            )
        except EngineError:
            for told in self._notes.values():  # what has been told meanwhile is newer
                if earlier := notes.pop((told.lease.id, told.lease.fence), None):
                    told.progress = told.progress or earlier.progress
                    told.lines.extendleft(reversed(earlier.lines))
            self._notes = {**notes, **self._notes}
            raise

    async def _sweep(self) -> None:
        """Any worker does what time asks for: when the engine says, or about once a second."""
        now = self._clock()
        if now < self._next_sweep:
            return
        pause = SWEEP_EVERY * random.uniform(0.8, 1.2)
        self._next_sweep = now + pause
        swept = await self._engine.sweep(by=self._name)
        self._told_when_to_sweep = swept.again_in is not None
        if swept.again_in is not None:
            pause = swept.again_in.total_seconds()
        elif swept.next_in is not None:
            pause = min(pause, swept.next_in.total_seconds())
        if swept.schedules_due and (left := await self._fire()) is not None:
            pause = min(pause, left.total_seconds())
        self._next_sweep = self._clock() + pause

    def _look_whether_drained(self, leased: int) -> None:
        busy = leased or self._done or self._notes or any(lane.buffer or lane.busy for lane in self._lanes)
        if busy:
            return
        self.idle.set()
        if self._settings.mode is not Mode.FOREVER:
            self.drained.set()

    # --- waiting -------------------------------------------------------------------------

    async def _rest(self) -> None:
        """Until there is something to do.  Outcomes gather a little while there is other work."""
        if self._finishing.is_set():
            await asyncio.sleep(0)
            return
        if self._done:
            starving = self._leasing and any(lane.starving() for lane in self._lanes)
            await asyncio.sleep(0 if starving or len(self._done) >= ENOUGH else LINGER)
            return
        self.resting.set()
        now = self._clock()
        # Each sweep is followed by a look.  Where hints arrive that is often enough, and no poll is needed.
        timeout = max(0.0, self._next_sweep - now)
        if not self._engine.hears:
            timeout = min(timeout, self._settings.poll.total_seconds())
        if self._leasing and any(self._room(lane) for lane in self._lanes):
            self._hinted = await self._wait_for_work(timeout)
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._wake.wait()
        self._wake.clear()
        if self._beaten > BEATEN and self._hinted:
            await self._step_back()
        if not self._hinted:
            await asyncio.sleep(0)  # where one has ended, others may end in the same turn of the loop

    async def _wait_for_work(self, timeout: float) -> bool:
        """For a hint of the engine or a word from a slot, whichever comes first; was it a hint?

        A job that comes to an idle worker waits for every turn of the loop here, so there are few of them.
        """
        if self._wake.is_set():
            return False
        queues = [queue for lane in self._lanes if self._room(lane) > 0 for queue in lane.queues]
        hint = asyncio.ensure_future(self._engine.wait(queues, timeout))
        hint.add_done_callback(lambda _: self._wake.set())
        try:
            await self._wake.wait()
            hinted = hint.done() and hint.exception() is None and hint.result()
        finally:
            if not hint.done():
                hint.cancel()
                await asyncio.wait({hint})
        if hinted and not self._told_when_to_sweep:
            self._next_sweep = min(self._next_sweep, self._clock())  # it may have been put for later
        return hinted

    async def _step_back(self) -> None:
        """Of many who are idle all hear of a job, and one gets it: the others would only be in its way.

        Who came too late several times in a row waits for a moment by chance; so the one who was the fastest
        the last time is so again, and where that one is busy, one of many is still early.
        """
        pause = random.uniform(0, STEP_BACK * min(self._beaten - BEATEN, MOST_STEPS))
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._wake.wait()
        self._wake.clear()

    async def _wait_for_the_engine(self, error: EngineError) -> None:
        """Ever longer; who is to finish has only its grace period, and tries at once, then quickly."""
        hurried = self._finishing.is_set()
        pause = (FIRST_BACKOFF if hurried else self._backoff) * random.uniform(0.5, 1.5)
        log.warning("the engine is away, trying again in %.1f s: %s", pause, error)
        self._backoff = min(self._backoff * 2, LAST_BACKOFF)
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await (asyncio.sleep(pause) if hurried else self._finishing.wait())
