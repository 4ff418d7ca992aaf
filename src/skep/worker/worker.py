"""A worker process: slots that run jobs, a pump that moves them, a keeper that keeps their leases."""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from msgspec.structs import replace

from skep.broker import Engine
from skep.errors import BadSetting, EngineError
from skep.job import Cancelled, Error, Identity, Job, Lease, Outcome, Progress, Release
from skep.registry import Registry
from skep.schedules import sync
from skep.worker.firing import Firer
from skep.worker.keeper import Keeper, monotonic
from skep.worker.processes import ChildPool
from skep.worker.pump import Pump
from skep.worker.runner import Runner
from skep.worker.settings import Settings, default_holder
from skep.worker.slots import Slot, SlotLane, Stop

log = logging.getLogger("skep.worker")

TICK = 0.05
IDLE_TICK = 0.25
LAST_WORDS = 2.0  # seconds for what is stopped at the end to come to its end


class Worker:
    """`await Worker(app, settings).run()` works until it is stopped, or as its mode says."""

    def __init__(
        self,
        registry: Registry,
        settings: Settings | None = None,
        *,
        clock: Callable[[], float] = monotonic,
        driven: bool = False,
    ) -> None:
        """Driven: whoever made it calls `tick` and `renew`; nothing here looks at the machine's clock."""
        settings = settings or Settings()
        settings.check()
        self._registry = registry
        self._settings = settings if settings.holder else replace(settings, holder=default_holder())
        self._clock = clock
        self._driven = driven
        self._stopping = asyncio.Event()
        self._at_once = asyncio.Event()
        self._wanted_stops: set[Identity] = set()
        self._loop_thread = 0
        self.stuck = 0
        self.lost = 0
        self.started = asyncio.Event()

    # --- life ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Work, then shut down gracefully: what runs has the grace period, then it is released."""
        if not await self._start_unless_stopped():
            return
        ticker = asyncio.create_task(self._tick_forever(), name="skep-ticker")
        pumping = asyncio.create_task(self._pump.run(), name="skep-pump")
        stopping = asyncio.create_task(self._stopping.wait())
        drained = asyncio.create_task(self._pump.drained.wait())
        try:
            await asyncio.wait({pumping, stopping, drained}, return_when=asyncio.FIRST_COMPLETED)
            if pumping.done():
                pumping.result()  # it never ends by itself, so it has failed
            await self._shut_down(pumping)
        finally:
            for task in (ticker, pumping, stopping, drained):
                task.cancel()
            await asyncio.gather(ticker, pumping, stopping, drained, return_exceptions=True)
            await self._end()

    def stop(self) -> None:
        """Once: gracefully.  Twice: now, releasing what runs."""
        if self._stopping.is_set():
            self._at_once.set()
        self._stopping.set()

    @property
    def asked_to_stop(self) -> bool:
        return self._stopping.is_set()

    def stop_on_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)

    def resize(self, queue: str, slots: int) -> None:
        """Change the number of slots of the lane of this queue, while it runs."""
        if slots < 1:
            raise BadSetting("a lane has at least one slot: pause the queue to run nothing of it")
        for lane in self._lanes:
            if queue in lane.queues:
                lane.resize(slots)
                self._pump.wake()
                return
        raise BadSetting(f"this worker does not serve queue {queue!r}")

    async def _start_unless_stopped(self) -> bool:
        """False if it was asked to stop before it had started: a start-up hook may take its time."""
        self._registry.check()
        engine = await self._registry.ready()
        if not self._driven:  # a test of other tasks must not fail because of one
            self._registry.check_engine(engine)
        self._assemble(engine)
        starting = asyncio.ensure_future(self._start(engine))
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        try:
            if starting.done():
                starting.result()
                return True
            starting.cancel()
            await asyncio.wait({starting}, timeout=LAST_WORDS)
        except BaseException:
            await self._end()
            raise
        await self._end()
        return False

    def _assemble(self, engine: Engine) -> None:
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._keeper = Keeper(
            engine,
            self._settings.lease,
            lost=lambda lease: _from_thread(self._loop, self._lease_is_lost, lease),
            stop_wanted=lambda lease: _from_thread(self._loop, self._stop_is_wanted, lease),
            clock=self._clock,
        )
        self._children = ChildPool(self._registry, self._settings, listener=self, crashed=self._count_crash)
        self._runner = Runner(self._registry, self, self._children, settled=self._count_settled)
        self._lanes = [
            SlotLane(lane, run=self._run_one, settle=self._ended, clock=self._clock)
            for lane in self._settings.lanes
        ]
        self._firer = Firer(engine, self._registry.declared_schedules, self._settings.holder)
        self._pump = Pump(
            engine,
            self._lanes,
            self._keeper,
            self._settings,
            clock=self._clock,
            lost=self._settled_too_late,
            fire=self._firer.fire_due,
        )

    async def _start(self, engine: Engine) -> None:
        await sync(engine, self._registry.declared_schedules)
        await self._call_state_hooks("startup")
        await self._children.start()
        for lane in self._lanes:
            lane.start()
        if not self._driven:
            self._keeper.start()
        log.info(
            "worker %s serves %s on %s (durability: %s)",
            self._settings.holder,
            ", ".join(f"{'+'.join(lane.queues)}={lane.size}" for lane in self._lanes),
            type(engine).__name__,
            engine.durability.name.lower(),
        )
        self.started.set()

    async def _shut_down(self, pumping: asyncio.Task[None]) -> None:
        deadline = self._clock() + self._settings.grace.total_seconds()
        self._pump.stop_leasing()
        self._children.stopping()
        await self._wait_for_running(deadline)
        for slot in self._running():
            slot.ask_to_stop(Stop.RELEASED, self._clock())
        await self._wait_for_running(self._clock() + LAST_WORDS, even_if_told=True)
        for slot in self._running():
            self._abandon(slot, slot.outcome or Release())
        self._pump.finish()
        # What has ended must reach the engine, also one that is slow: it has the rest of the grace period.
        patience = LAST_WORDS if self._at_once.is_set() else max(LAST_WORDS, deadline - self._clock())
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await pumping

    async def _wait_for_running(self, deadline: float, *, even_if_told: bool = False) -> None:
        while self._running() and self._clock() < deadline:
            if self._at_once.is_set() and not even_if_told:
                return
            await asyncio.sleep(0.01)

    async def _end(self) -> None:
        for lane in self._lanes:
            await lane.stop()
        await self._children.close()
        self._keeper.stop()
        log.info(
            "worker %s ends: %d runs settled, %d leases lost, %d stuck",
            self._settings.holder,
            self._pump.settled,
            self.lost,
            self.stuck,
        )
        await self._call_state_hooks("shutdown")

    async def _call_state_hooks(self, event: str) -> None:
        """A start-up hook that raises stops the worker: its jobs would miss what it makes."""
        for hook in self._registry.hooks[event]:
            answer = hook(self._registry.state)
            if inspect.isawaitable(answer):
                await answer

    # --- one job -------------------------------------------------------------------------

    async def _run_one(self, lease: Lease, slot: Slot) -> Outcome | None:
        if self._wanted_stops and (lease.id, lease.fence) in self._wanted_stops:
            return Cancelled()
        if not self._keeper.holds(lease):
            return None
        return await self._runner.run(lease, slot)

    def _ended(self, lease: Lease, outcome: Outcome | None) -> None:
        if self._wanted_stops:
            self._wanted_stops.discard((lease.id, lease.fence))
        self._pump.settle(lease, outcome)

    def _count_settled(self) -> None:
        self._pump.settled += 1

    def _running(self) -> list[Slot]:
        return [slot for lane in self._lanes for slot in lane.running]

    def _stop_run(self, lease: Lease, reason: Stop) -> None:
        for slot in self._running():
            if slot.lease is not None and (slot.lease.id, slot.lease.fence) == (lease.id, lease.fence):
                slot.ask_to_stop(reason, self._clock())

    async def _count_crash(self, lease: Lease, how: str) -> None:
        """A job's process has died: that counts now, and not when its lease has run out."""
        self._keeper.drop((lease,))
        self._pump.note(lease, None, (how,))
        engine = self._registry.engine
        try:
            await self._pump.send_notes()
            await engine.renew([lease], span=timedelta(0))
            await engine.sweep()
        except EngineError as error:
            log.warning("the crash of job %s counts when its lease has run out: %s", lease.id, error)

    # --- what comes from outside ---------------------------------------------------------

    def told(self, lease: Lease, progress: Progress | None, lines: tuple[str, ...]) -> None:
        """From a slot, or from the thread of a plain function."""
        if threading.get_ident() == self._loop_thread:
            self._pump.note(lease, progress, lines)
        else:
            with suppress(RuntimeError):  # the loop has ended: nobody is left to be told
                self._loop.call_soon_threadsafe(self._pump.note, lease, progress, lines)

    def goes_on(self, lease: Lease, turn: Job, always: bool) -> None:
        """Nothing to do: the job itself remembers it until it is judged."""

    def stopping(self, lease: Lease) -> bool:
        return self._stopping.is_set() or (lease.id, lease.fence) in self._wanted_stops

    def _lease_is_lost(self, lease: Lease) -> None:
        """Somebody else may be running it by now: stop at once, and record nothing."""
        if any(slot.committing for slot in self._running() if slot.lease is lease):
            return  # we may have ended it ourselves: its commit will tell
        self.lost += 1
        log.warning("the lease of job %s is lost: its run is stopped", lease.id)
        self._stop_run(lease, Stop.LOST)

    def _stop_is_wanted(self, lease: Lease) -> None:
        self._wanted_stops.add((lease.id, lease.fence))
        self._stop_run(lease, Stop.CANCELLED)

    def _settled_too_late(self, lease: Lease) -> None:
        self.lost += 1
        log.warning("job %s ended after its lease was lost: the other run decides", lease.id)

    # --- the clock -----------------------------------------------------------------------

    async def _tick_forever(self) -> None:
        while not self._driven:
            busy = self.tick()
            await asyncio.sleep(TICK if busy else IDLE_TICK)

    def tick(self) -> bool:
        """Look at the clock for everything that runs; says whether anything does."""
        self._keeper.beat()
        now = self._clock()
        running = self._running()
        for slot in running:
            if slot.deadline is not None and now >= slot.deadline:
                slot.ask_to_stop(Stop.TIMEOUT, now)
            if slot.asked_at is not None and now - slot.asked_at > self._settings.stuck_after.total_seconds():
                self._give_up(slot)
        return bool(running)

    async def renew(self) -> None:
        """Renew every lease now, as the keeper does by itself unless the worker is driven."""
        await self._keeper.renew_all()

    def _give_up(self, slot: Slot) -> None:
        """It ignores its cancellation: settle for it, and leave the slot to it."""
        self.stuck += 1
        lease, stop = slot.lease, slot.stop
        assert lease is not None
        log.error("job %s is stuck: it does not stop (%s)", lease.id, stop.value if stop else "?")
        self._abandon(slot, self._outcome_of_stuck(lease, slot))

    def _abandon(self, slot: Slot, outcome: Outcome | None) -> None:
        lease = slot.lease
        assert lease is not None
        slot.lane.replace(slot)
        self._ended(lease, outcome)

    def _outcome_of_stuck(self, lease: Lease, slot: Slot) -> Outcome | None:
        match slot.stop:
            case Stop.LOST:
                return None
            case Stop.CANCELLED:
                return Cancelled()
            case Stop.TIMEOUT:
                error = Error("TimeoutError", "it ran out of time and does not stop")
                return self._runner.timed_out(lease, error, slot.job)
            case _:
                return Release()


def _from_thread(loop: asyncio.AbstractEventLoop, act: Callable[[Lease], None], lease: Lease) -> None:
    with suppress(RuntimeError):  # the loop has ended: nobody is left to be told
        loop.call_soon_threadsafe(act, lease)
