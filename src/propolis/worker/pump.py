"""The pump: settles what has ended and leases what is next, in one exchange where there is both.

It is the only part of a worker, besides the keeper, that talks to the engine.
"""

from __future__ import annotations

import asyncio
import logging
import random
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Container, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import accumulate
from typing import Any, Protocol

from propolis.core.job import Dead, Done, Lease, Outcome, Released, describe
from propolis.core.protocols import Engine, Exchange
from propolis.errors import Busy, EngineError, StorageBroken, StorageFull
from propolis.worker.keeper import Keeper
from propolis.worker.notes import UnsentNotes
from propolis.worker.runner import Runner
from propolis.worker.settings import Mode, Monotonic, Settings
from propolis.worker.slots import BUFFER_PATIENCE, SlotLane
from propolis.worker.sweeping.sweeper import Line, Sweeper

log = logging.getLogger("propolis.worker")

GATHER_FOR = 0.001  # seconds in which outcomes gather while there is other work to do
ENOUGH = 100  # outcomes that do not wait for more
FIRST_BACKOFF, LAST_BACKOFF = 0.1, 3.0
BEATEN = 2  # hints in a row after which others had been faster: from then on we let them
LATER = 1.0  # seconds until an outcome that could not be recorded for now is given again
SWEPT_WITHIN = 300.0  # seconds: any worker of a large fleet has swept by then
STEP_BACK, MAX_STEPS = 0.001, 32  # seconds, for each further time
BUNDLE, LIGHT = 16 * 2**20, 256 * 2**10  # bytes that are settled at once, and of one outcome of many
EMISSION = 16 * 2**10  # bytes that each stands for: an engine has as much to do with them


MakesSweeper = Callable[[Callable[[], None]], Sweeper]  # from what it wakes


class HearsOfLosses(Protocol):
    """Whoever is to know which runs ended too late to be recorded: the worker."""

    def settled_too_late(self, lease: Lease) -> None: ...


class Pump:
    """Runs until it is stopped and everything it was given is settled."""

    _failing: tuple[float, type[EngineError]] | None = None  # since when the engine fails, and how at first
    _answered = False  # has it settled or leased since it failed last?

    def __init__(
        self,
        engine: Engine,
        keeper: Keeper,
        runner: Runner,
        settings: Settings,
        *,
        clock: Monotonic,
        losses: HearsOfLosses,
        tasks: Container[str],
        sweeper: MakesSweeper,
        driven: bool = False,
    ) -> None:
        self._engine = engine
        self.lanes = [SlotLane(lane, runner, self, clock=clock) for lane in settings.lanes]
        self._keeper = keeper
        self._settings = settings
        self._clock = clock
        self._losses = losses
        self._tasks = tasks
        # Where a test has the clock, or nothing is to be left when it ends; else that is done beside this.
        self._sweeps_itself = driven or settings.mode is not Mode.FOREVER
        self._done: list[tuple[Lease, Outcome]] = []
        self._heavy = False  # may that be more than an engine takes well at once?
        self._later: list[tuple[Lease, Outcome]] = []  # what somebody's transaction keeps from being recorded
        self._wake = asyncio.Event()
        self.notes = UnsentNotes(engine, self._wake.set)
        self._leasing = True
        self.solitary = False  # does one job run alone here, or wait for it?
        self._one_ended = asyncio.Event()
        self._finishing = asyncio.Event()
        self._budget = 1 if settings.mode is Mode.ONCE else None
        self.sweeper = sweeper(self._wake.set)
        self._parked_lines: tuple[Line, ...] = ()  # those that the last sweep has found
        self._parked: set[Line] = set()  # those of them that we know, until none of them comes any more
        self._parked_here = runner.parked
        self._backoff, self._deaf_until = FIRST_BACKOFF, 0.0  # until then it is polled
        self._hinted, self._beaten, self.settled = False, 0, 0
        self.drained = asyncio.Event()  # set when a mode that ends has nothing left to do
        self.idle = asyncio.Event()  # set while there is nothing to lease, run or settle
        self.resting = asyncio.Event()  # set whenever it waits, having nothing to lease or settle

    # --- what comes from the slots --------------------------------------------------------------

    def settle(self, lease: Lease, outcome: Outcome | None) -> None:
        """A run has ended; None means that its lease is lost and somebody else decides."""
        if outcome is None:
            self._keeper.drop((lease,))
        else:
            self._done.append((lease, outcome))
            if type(outcome) is Done and (outcome.result or outcome.emit) and weight_of(outcome) > LIGHT:
                self._heavy = True
        if self.solitary:
            self._one_ended.set()
        self._wake.set()

    @property
    def unsettled(self) -> bool:
        """Does it hold what the engine does not know yet?"""
        return bool(self._done or self._later or self.notes)

    def wake(self) -> None:
        """Do not rest any longer."""
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
        for lane in self.lanes:
            self._give_back(lane)
        self._wake.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """For one job: lease nothing, give back what has not started, and let the others end first."""
        self.solitary = True
        try:
            for lane in self.lanes:
                self._give_back(lane)
            self._wake.set()
            while sum(lane.busy for lane in self.lanes) > 1:
                self._one_ended.clear()
                await self._one_ended.wait()
            yield
        finally:
            self.solitary = False
            self._wake.set()

    def finish(self) -> None:
        """Return from `run` when everything is settled."""
        self._finishing.set()
        self._wake.set()

    # --- the loop ------------------------------------------------------------------------

    async def run(self) -> None:
        if not self._sweeps_itself:
            self.sweeper.start()
        try:
            await self._run()
        finally:
            await self.sweeper.end()
            self.notes.end()

    async def _run(self) -> None:
        while self.unsettled or not self._finishing.is_set():
            try:
                await self._turn()
                self._backoff = FIRST_BACKOFF
            except StorageBroken:
                raise  # it will not mend itself: end with the reason, and be started again
            except EngineError as error:
                await self._wait_for_the_engine(error)
            except Exception:
                log.exception("an outcome cannot be recorded: each is tried by itself")
                await self._settle_one_by_one()
                await asyncio.sleep(FIRST_BACKOFF)  # it may have been none of them, and would come at once

    async def _turn(self) -> None:
        await self._sweep()
        await self.notes.send()
        for lane in self.lanes:
            if lane.overdue():
                self._give_back(lane)
        leased = await self._exchange()
        self._beaten = 0 if leased else self._beaten + self._hinted
        self._hinted = False
        settled = await self._settle_rest(leased)
        if self._failing is not None and self._answered:
            self._log_return(*self._failing)
        if settled and self._settings.mode is not Mode.FOREVER:
            return  # a job may have come back after the lease: not drained before the next one
        self._notice_drained(leased)
        if not leased:
            await self._rest()

    async def _exchange(self) -> int:
        """Settle and lease; returns how many new jobs there are."""
        leased = 0
        for lane in self.lanes:
            if (room := self._room(lane)) > 0:
                leased += await self._exchange_for(lane, room)
        return leased

    async def _settle_rest(self, leased: int) -> bool:
        """What has ended while we leased nothing; returns whether there was any."""
        if not self._done or leased:
            return False
        outcomes = self._take_done()
        with self._putting_back(outcomes):
            await self.notes.send()
            got = await self._engine.exchange(outcomes, {}, span=self._settings.lease, holder="")
            self._settled(outcomes, got)
        return True

    async def _exchange_for(self, lane: SlotLane, room: int) -> int:
        wants = lane.wants(room)
        parked = {line for line in self._parked if line[0] in wants}
        terms: Any = {"span": self._settings.lease, "holder": self._settings.holder, "limit": room}
        if parked:
            terms["tasks"] = sorted({task for _, task in parked})
        outcomes = self._take_done()
        with self._putting_back(outcomes):
            await self.notes.send()  # what they have reported at last: after their end it would be refused
            sent = self._clock()
            got = await self._engine.exchange(outcomes, wants, **terms)
        self._settled(outcomes, got)
        self._parked -= parked - {(lease.queue, lease.task) for lease in got.leases}
        if self._budget is not None:
            self._budget -= len(got.leases)
        if got.leases:
            self._keeper.add(got.leases, sent)
            lane.give(got.leases)
            self.idle.clear()
            if not self._leasing or self.solitary:  # it was stopped while they were on their way
                self._give_back(lane)
            elif len(got.leases) <= lane.size:
                await asyncio.sleep(0)  # a few begin at once: the shortest have ended before the next lease
        return len(got.leases)

    async def _settle_one_by_one(self) -> None:
        """One of them is more than the engine can store: bury its job, and let the others go on."""
        for lease, outcome in self._take_done():
            try:
                lost = await self._engine.settle([(lease, outcome)])
                self._settled([(lease, outcome)], Exchange(lost, []))
            except EngineError:
                self._done.append((lease, outcome))
            except Exception as error:
                self._done.append((lease, Dead(error=describe(error))))

    def _room(self, lane: SlotLane) -> int:
        if not self._leasing or self.solitary:
            return 0
        room = lane.room()
        return room if self._budget is None else min(room, self._budget)

    def _take_done(self) -> list[tuple[Lease, Outcome]]:
        """All of them; or a bundle, the lightest first, so that none waits for one that cannot be stored."""
        n = len(self._done)
        if self._heavy:
            self._done.sort(key=lambda each: weight_of(each[1]))
            n = max(1, bisect_right([*accumulate(weight_of(outcome) for _, outcome in self._done)], BUNDLE))
        outcomes, self._done = self._done[:n], self._done[n:]
        self._heavy = bool(self._done)
        return outcomes

    @contextmanager
    def _putting_back(self, outcomes: list[tuple[Lease, Outcome]]) -> Iterator[None]:
        """An outcome is ours until the engine has it: settling twice is harmless, not at all is not."""
        self._keeper.settling = outcomes
        try:
            yield
        except BaseException:
            self._done = outcomes + self._done
            self._heavy = True
            raise

    def _settled(self, outcomes: list[tuple[Lease, Outcome]], got: Exchange) -> None:
        self._answered = True
        if got.later:
            later = {(lease.id, lease.fence) for lease in got.later}
            self._put_off([each for each in outcomes if (each[0].id, each[0].fence) in later])
            outcomes = [each for each in outcomes if (each[0].id, each[0].fence) not in later]
        self.settled += len(outcomes) - len(got.lost)
        self._keeper.drop(lease for lease, _ in outcomes)
        for lease in got.lost:
            # The job outlived its lease and may be running elsewhere.  Its effects stand, so there
            # is nothing to undo: the other attempt decides.
            self._losses.settled_too_late(lease)

    def _put_off(self, outcomes: list[tuple[Lease, Outcome]]) -> None:
        """Their leases are kept meanwhile."""
        self._later += outcomes
        asyncio.get_running_loop().call_later(LATER, self._give_again)

    def _give_again(self) -> None:
        self._done += self._later
        self._later = []
        self._wake.set()

    def _give_back(self, lane: SlotLane) -> None:
        self._done += [(lease, Released()) for lease in lane.take_back()]

    async def _sweep(self) -> None:
        if self._sweeps_itself:
            await self.sweeper.sweep_if_due()
        else:
            self.sweeper.check()
        if self.sweeper.parked is not self._parked_lines:
            self._parked_lines = self.sweeper.parked
            self._parked = {line for line in self._parked_lines if self._known(line[1])}

    def _known(self, task: str) -> bool:
        return task in self._tasks

    def _notice_drained(self, leased: int) -> None:
        busy = leased or self.unsettled or any(lane.buffer or lane.busy for lane in self.lanes)
        if busy:
            return
        self.idle.set()
        if self._settings.mode is not Mode.FOREVER and not self._parked and not self.drained.is_set():
            for queue, task in sorted({*self._parked_lines, *self._parked_here}):
                if not self._known(task):  # one that is known has run since the last sweep
                    log.warning("jobs of task %r in queue %r stay parked: it is not known here", task, queue)
            self.drained.set()

    # --- waiting -------------------------------------------------------------------------

    async def _rest(self) -> None:
        """Until there is something to do.  Outcomes gather a little while there is other work."""
        if self._finishing.is_set():
            await asyncio.sleep(FIRST_BACKOFF if self._later else 0)
            return
        if self._done:
            starving = self._leasing and any(lane.starving() for lane in self.lanes)
            await asyncio.sleep(0 if starving or len(self._done) >= ENOUGH else GATHER_FOR)
            return
        self.resting.set()
        # The sweeper wakes us where a lease should follow.  Where hints arrive no other poll is needed.
        timeout = self.sweeper.due_in() if self._sweeps_itself else SWEPT_WITHIN
        deaf = self._clock() < self._deaf_until
        if deaf or not self._engine.hears:
            timeout = min(timeout, self._settings.poll.total_seconds())
        if any(lane.buffer for lane in self.lanes):
            timeout = min(timeout, BUFFER_PATIENCE)  # then somebody else may have them
        if self._leasing and not deaf and any(self._room(lane) for lane in self.lanes):
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
        queues = [queue for lane in self.lanes if self._room(lane) > 0 for queue in lane.queues]
        hint = asyncio.ensure_future(self._engine.wait(queues, timeout))
        hint.add_done_callback(lambda _: self._wake.set())
        try:
            await self._wake.wait()
            hinted = hint.done() and hint.result()
        except Exception as error:
            poll = self._settings.poll.total_seconds()
            log.warning("nobody says what comes, so the engine is asked within %g s: %s", poll, error)
            self._deaf_until = self._clock() + poll
            return False
        finally:
            if not hint.done():
                hint.cancel()
                await asyncio.wait({hint})
        if hinted:
            self.sweeper.hurry()
        return hinted

    async def _step_back(self) -> None:
        """Of many idle workers all hear of a job, and one gets it: the others would only be in its way.

        Whoever came too late several times in a row waits for a random moment: so whoever was the fastest the
        last time is so again, and where that one is busy, one of many is still early.
        """
        pause = random.uniform(0, STEP_BACK * min(self._beaten - BEATEN, MAX_STEPS))
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._wake.wait()
        self._wake.clear()

    async def _wait_for_the_engine(self, error: EngineError) -> None:
        """Ever longer; but a pump that is to finish has only the grace period, and tries again quickly."""
        self._answered = False
        if self._failing is None:
            self._failing = (self._clock(), type(error))
        hurried = self._finishing.is_set()
        pause = (FIRST_BACKOFF if hurried else self._backoff) * random.uniform(0.5, 1.5)
        log.warning("%s, trying again in %.1f s: %s", _why(error), pause, error)
        self._backoff = min(self._backoff * 2, LAST_BACKOFF)
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await (asyncio.sleep(pause) if hurried else self._finishing.wait())

    def _log_return(self, since: float, kind: type[EngineError]) -> None:
        self._failing = None
        log.info("%s after %.0f s", _what_is_over(kind), self._clock() - since)


def weight_of(outcome: Outcome) -> int:
    if not isinstance(outcome, Done):
        return 0
    return len(outcome.result or b"") + len(outcome.emit) * EMISSION


def _why(error: EngineError) -> str:
    match error:
        case Busy():
            return "somebody is in the way"
        case StorageFull():
            return "the engine has no room"
        case _:
            return "the engine is away"


def _what_is_over(kind: type[EngineError]) -> str:
    if issubclass(kind, Busy):
        return "nobody is in the way any more,"
    return "the engine has room again" if issubclass(kind, StorageFull) else "the engine is back"
