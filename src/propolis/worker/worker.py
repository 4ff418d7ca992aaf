"""A worker process: slots that run jobs, a pump that moves them, a keeper that keeps their leases."""

from __future__ import annotations

import asyncio
import inspect
import io
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, TypeVar

from msgspec.structs import replace

from propolis.app.context import extra_of
from propolis.app.operate.declared_limits import sync as sync_limits
from propolis.app.operate.schedules import sync
from propolis.app.operate.workers import (
    QUEUES_BYTES,
    TASKS_BYTES,
    Presence,
    WorkerCard,
    WorkerState,
    fingerprint,
    fitting,
    installed_version,
)
from propolis.app.registry import Registry
from propolis.core.envelope import Envelope
from propolis.core.job import Lease, Outcome, Progress, Released
from propolis.core.protocols import Engine
from propolis.errors import (
    BadSetting,
    Busy,
    EngineError,
    LeaseLost,
    OutcomeUnknown,
    StorageFull,
    WorkerFailed,
)
from propolis.worker.attempt import OVER, Slot, Stop
from propolis.worker.children.processes import ChildPool
from propolis.worker.children.suspects import Suspects
from propolis.worker.keeper import Keeper
from propolis.worker.process import signals
from propolis.worker.process.run_log import RunLog
from propolis.worker.pump import Pump
from propolis.worker.runner import Runner
from propolis.worker.settings import Monotonic, Settings, default_holder, monotonic
from propolis.worker.sweeping.breaker_watch import BreakerWatch
from propolis.worker.sweeping.schedule_firing import Firer
from propolis.worker.sweeping.sweeper import Sweeper
from propolis.worker.sweeping.unknown_tasks import UnknownTasks

log = logging.getLogger("propolis.worker")

T = TypeVar("T")

TICK = 0.05
IDLE_TICK = 0.25
STORED_EVERY = 5.0  # seconds until schedules that could not be stored are tried again
SHOWN_EVERY = 1.0  # seconds between two looks whether its record is to be written
LAST_WORDS = 2.0  # seconds for what is stopped at the end to come to its end


class Worker:
    """`await Worker(app, settings).run()` works until it is stopped, or as its mode has it."""

    def __init__(
        self,
        registry: Registry,
        settings: Settings | None = None,
        *,
        clock: Monotonic = monotonic,
        driven: bool = False,
    ) -> None:
        """Driven: whoever made it calls `tick` and `renew`; nothing here reads the machine's clock."""
        settings = settings or Settings()
        settings.check()
        self._registry = registry
        self._settings = settings if settings.holder else replace(settings, holder=default_holder())
        self._clock = clock
        self._driven = driven
        self._stopping = asyncio.Event()
        self._at_once = asyncio.Event()
        self._loop_thread = 0
        self._state = WorkerState.STARTING
        self._failure: WorkerFailed | None = None
        self._storing: asyncio.Task[None] | None = None
        self._given_up: set[Slot] = set()  # to jobs that do not stop
        self.stuck = 0
        self.lost = 0
        self.started = asyncio.Event()

    # --- life ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Work, then shut down gracefully: what runs has the grace period, then it is released.

        Raises `WorkerFailed` after it has stopped because it cannot go on.
        """
        if not await self._start_unless_stopped():
            return
        ticker = asyncio.create_task(self._tick_forever(), name="propolis-ticker")
        pumping = asyncio.create_task(self._pump.run(), name="propolis-pump")
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
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Once: gracefully.  Twice: now, releasing what runs."""
        if self._stopping.is_set():
            self._at_once.set()
        self._stopping.set()

    @property
    def asked_to_stop(self) -> bool:
        return self._stopping.is_set()

    def stop_on_signals(self) -> None:
        """SIGTERM, SIGINT and SIGHUP stop it; SIGQUIT shows what it does, and it goes on."""
        signals.handle_in_loop(
            {
                signal.SIGTERM: self.stop,
                signal.SIGINT: self.stop,
                signal.SIGHUP: self.stop,
                signal.SIGQUIT: self.show_runs,
            }
        )
        signals.dump_stacks_on_quit()

    def show_runs(self) -> None:
        """Log what runs, and where each coroutine is."""
        for slot in self._running():
            stack = io.StringIO()
            if slot.task is not None:
                slot.task.print_stack(file=stack)
            log.warning("running: %r for %.1f s", slot.job, self._clock() - slot.started)
            for line in stack.getvalue().splitlines():
                log.warning("  %s", line)

    def _fail(self, why: str) -> None:
        """End: gracefully, but with an error."""
        if self._failure is None:
            self._failure = WorkerFailed(why)
            log.critical("%s", why)
            self._stopping.set()

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
        engine = await self._unless_stopped(self._registry.client.ready())
        if engine is None:
            return False
        if not self._driven:  # a test of other tasks must not fail because of one
            self._registry.check_engine(engine)
        self._assemble(engine)
        try:
            started = await self._unless_stopped(self._start(engine))
        except BaseException:
            await self._end()
            raise
        if not started:
            await self._end()
        return bool(started)

    async def _unless_stopped(self, start: Coroutine[Any, Any, T]) -> T | None:
        """What it gives; None if the worker was asked to stop first."""
        starting = asyncio.ensure_future(start)
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                return starting.result()
            starting.cancel()
            await asyncio.wait({starting}, timeout=LAST_WORDS)
            return None
        except BaseException:
            starting.cancel()
            raise
        finally:
            stopping.cancel()

    def _assemble(self, engine: Engine) -> None:
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._keeper = Keeper(engine, self._settings.lease, self, clock=self._clock)
        self._children = ChildPool(self._registry, self._settings, listener=self)
        apart = self._settings.isolate_suspects
        suspects = Suspects(self._registry.client, self._children, self, apart=apart)
        self._run_log = RunLog(self._settings, self._clock)
        self._breakers = self._breaker_watch(engine)
        self._runner = Runner(
            self._registry,
            self._keeper,
            self._children,
            suspects,
            listener=self,
            counter=self,
            run_log=self._run_log,
            breakers=self._breakers,
        )
        self._firer = Firer(engine, self._registry.declared_schedules)
        self._pump = Pump(
            engine,
            self._keeper,
            self._runner,
            self._settings,
            clock=self._clock,
            losses=self,
            tasks=self._registry.tasks,
            sweeper=lambda wake: self._sweeper(engine, wake),
            driven=self._driven,
        )
        self._lanes = self._pump.lanes
        self._card = self._card_at_start(engine)
        self._presence = Presence(
            engine, self._settings.holder, self._current_card, clock=self._clock, lasts=self._driven
        )
        self._showing = asyncio.create_task(self._show_forever(), name="propolis-presence")

    def _breaker_watch(self, engine: Engine) -> BreakerWatch | None:
        """None where no task has a breaker."""
        if all(task.options.breaker is None for task in self._registry.tasks.values()):
            return None
        return BreakerWatch(engine, self._registry.hooks["breaker"], clock=self._clock)

    def _sweeper(self, engine: Engine, wake: Callable[[], None]) -> Sweeper:
        unknown = UnknownTasks(engine, self._settings, self._registry.tasks, self._clock)
        return Sweeper(engine, self._firer, unknown, clock=self._clock, wake=wake)

    def _card_at_start(self, engine: Engine) -> WorkerCard:
        queues, more_queues = fitting((q for lane in self._lanes for q in lane.queues), QUEUES_BYTES)
        tasks, more_tasks = fitting(self._registry.tasks, TASKS_BYTES)
        return WorkerCard(
            host=socket.gethostname(),
            pid=os.getpid(),
            version=installed_version(),
            code=fingerprint(task.function for task in self._registry.tasks.values()),
            function_set=getattr(engine, "function_set", None),
            queues=queues,
            more_queues=more_queues,
            tasks=tasks,
            more_tasks=more_tasks,
        )

    def _current_card(self) -> WorkerCard:
        return replace(self._card, state=self._state, slots=sum(lane.size for lane in self._lanes))

    async def _start(self, engine: Engine) -> bool:
        if not await self._declared_stored(engine):
            self._storing = asyncio.create_task(self._store_declared(engine), name="propolis-schedules")
        await self._call_state_hooks("startup")
        await self._children.start()
        for lane in self._lanes:
            lane.start()
        self._state = WorkerState.WORKING
        if self._driven:
            await self._presence.beat()
        else:
            self._keeper.start()
        log.info(
            "worker %s serves %s on %s (durability: %s)",
            self._settings.holder,
            ", ".join(f"{'+'.join(lane.queues)}={lane.size}" for lane in self._lanes),
            type(engine).__name__,
            engine.durability.name.lower(),
            extra={"worker": self._settings.holder},
        )
        self.started.set()
        return True

    async def _declared_stored(self, engine: Engine) -> bool:
        """False where that cannot be now: jobs do not wait for it, and make room where there is none."""
        try:
            await sync(engine, self._registry.declared_schedules)
            await sync_limits(engine, self._registry.tasks.values())
        except (Busy, OutcomeUnknown, StorageFull) as error:
            if self._storing is None:
                log.warning("the schedules and limits of this code are stored later: %s", error)
            return False
        return True

    async def _store_declared(self, engine: Engine) -> None:
        stored = False
        while not stored:
            await asyncio.sleep(STORED_EVERY)
            try:
                stored = await self._declared_stored(engine)
            except EngineError as error:
                log.warning("the schedules and limits of this code cannot be stored yet: %s", error)
        log.info("the schedules and limits of this code are stored")

    async def _shut_down(self, pumping: asyncio.Task[None]) -> None:
        deadline = self._clock() + self._settings.grace.total_seconds()
        self._state = WorkerState.DRAINING
        self._pump.stop_leasing()
        self._children.stopping()
        if running := len(self._running()):
            log.info(
                "stopping: %d %s %g s (a second signal gives %s back at once)",
                running,
                "job has" if running == 1 else "jobs have",
                self._settings.grace.total_seconds(),
                "it" if running == 1 else "them",
                extra={"worker": self._settings.holder},
            )
        elif self._stopping.is_set():
            log.info("stopping: no job runs", extra={"worker": self._settings.holder})
        await self._wait_for_running(deadline)
        for slot in self._running():
            slot.ask_to_stop(Stop.RELEASED, self._clock())
        await self._wait_for_running(self._clock() + LAST_WORDS, even_at_once=True)
        for slot in self._running():
            self._abandon(slot, slot.unrecorded(Released()))
        self._pump.finish()
        # What has ended must reach the engine, also one that is slow: it has the rest of the grace period.
        patience = LAST_WORDS if self._at_once.is_set() else max(LAST_WORDS, deadline - self._clock())
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await pumping

    async def _wait_for_running(self, deadline: float, *, even_at_once: bool = False) -> None:
        while self._running() and self._clock() < deadline:
            if self._at_once.is_set() and not even_at_once:
                return
            await asyncio.sleep(0.01)

    async def _end(self) -> None:
        beside = {self._showing} if self._storing is None else {self._showing, self._storing}
        for task in beside:
            task.cancel()
        await asyncio.wait(beside)
        for lane in self._lanes:
            await lane.stop()
        await self._children.close()
        self._keeper.stop()
        self._run_log.end()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS):
                await self._presence.leave()
        log.info(
            "worker %s ends; runs settled: %d, leases lost: %d, stuck: %d",
            self._settings.holder,
            self._pump.settled,
            self.lost,
            self.stuck,
            extra={"worker": self._settings.holder},
        )
        await self._call_state_hooks("shutdown")

    async def _call_state_hooks(self, event: str) -> None:
        """A start-up hook that raises stops the worker: its jobs would miss what it makes."""
        for hook in self._registry.hooks[event]:
            answer = hook(self._registry.state)
            if inspect.isawaitable(answer):
                await answer

    # --- one job -------------------------------------------------------------------------

    async def send_notes(self) -> None:
        try:
            await self._pump.notes.send()
        except Exception as error:  # whosever it is: the end of a job does not depend on what was reported
            log.warning("what running jobs have reported cannot be stored: %s", error)

    def count_settled(self) -> None:
        self._pump.settled += 1

    @property
    def solitary(self) -> bool:
        return self._pump.solitary

    def alone(self) -> AbstractAsyncContextManager[None]:
        return self._pump.alone()

    def _running(self) -> list[Slot]:
        return [slot for lane in self._lanes for slot in lane.running]

    def _stop_run(self, lease: Lease, reason: Stop) -> None:
        for slot in self._running():
            if slot.lease is not None and (slot.lease.id, slot.lease.fence) == (lease.id, lease.fence):
                slot.ask_to_stop(reason, self._clock())

    # --- what comes from outside ---------------------------------------------------------

    def report(self, lease: Lease, progress: Progress | None, lines: tuple[str, ...]) -> None:
        """From a slot, or from the thread of a plain function."""
        if threading.get_ident() == self._loop_thread:
            self._pump.notes.report(lease, progress, lines)
        else:
            with suppress(RuntimeError):  # the loop has ended, and with it every run
                self._loop.call_soon_threadsafe(self._pump.notes.report, lease, progress, lines)

    def save(self, lease: Lease, checkpoint: bytes) -> Future[None]:
        saved: Future[None] = Future()
        try:
            self._loop.call_soon_threadsafe(self._pump.notes.save, lease, checkpoint, saved)
        except RuntimeError:  # the loop has ended, and with it every run
            saved.set_exception(LeaseLost(lease.id))
        return saved

    def goes_on(self, lease: Lease, turn: Envelope, always: bool) -> None:
        """Nothing to do: the job itself remembers it until it is judged."""

    def stopping(self, lease: Lease) -> bool:
        return self._stopping.is_set() or (lease.id, lease.fence) in self._keeper.stops_wanted

    def lease_lost(self, lease: Lease) -> None:
        self._from_thread(self._lease_is_lost, lease)

    def stop_wanted(self, lease: Lease) -> None:
        self._from_thread(self._stop_is_wanted, lease)

    def keeper_died(self, error: BaseException) -> None:
        self._at_once.set()  # read only: nobody waits for it
        with suppress(RuntimeError):  # the loop has ended, and with it every run
            self._loop.call_soon_threadsafe(self._fail, f"the keeper of the leases has died: {error!r}")

    def _from_thread(self, act: Callable[[Lease], None], lease: Lease) -> None:
        with suppress(RuntimeError):  # the loop has ended, and with it every run
            self._loop.call_soon_threadsafe(act, lease)

    def _lease_is_lost(self, lease: Lease) -> None:
        """Somebody else may be running it by now: stop at once, and record nothing."""
        if any(slot.state in OVER for slot in self._running() if slot.lease is lease):
            return  # we may have ended it ourselves, or are about to: settling it will show
        self.lost += 1
        log.warning("the lease of job %s is lost: its run is stopped", lease.id, extra=extra_of(lease))
        self._stop_run(lease, Stop.LOST)

    def _stop_is_wanted(self, lease: Lease) -> None:
        self._stop_run(lease, Stop.CANCELLED)

    def settled_too_late(self, lease: Lease) -> None:
        self.lost += 1
        log.warning(
            "job %s ended after its lease was lost: the other run decides",
            lease.id,
            extra=extra_of(lease),
        )

    # --- the clock -----------------------------------------------------------------------

    async def _show_forever(self) -> None:
        """A start that takes no time is not shown."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SHOWN_EVERY):
                await self.started.wait()
        while not self._driven:
            async with self._pump.sweeper.beside:
                await self._presence.beat()
                await self.beat()
            await asyncio.sleep(SHOWN_EVERY)

    async def _tick_forever(self) -> None:
        try:
            while not self._driven:
                signals.end_if_deaf()
                busy = self.tick()
                await asyncio.sleep(TICK if busy else IDLE_TICK)
        except Exception as error:
            log.critical("nobody watches the clock any more", exc_info=error)
            self._fail(f"nobody watches the clock of the jobs any more: {error!r}")

    def tick(self) -> bool:
        """Watch the clock for everything that runs; returns whether anything does."""
        self._keeper.beat()
        self._children.weigh()
        now = self._clock()
        running = self._running()
        for slot in running:
            if slot.deadline is not None and now >= slot.deadline:
                slot.ask_to_stop(Stop.TIMEOUT, now)
            if slot.stopping_for(now) > self._settings.stuck_after.total_seconds():
                self._give_up(slot)
        if self._run_log.storms.open:
            self._run_log.sum_up()
        stuck = self._runner.threads_left + len(self._given_up)
        if stuck >= self._settings.max_stuck:
            self._fail(f"{stuck} jobs do not stop, and each keeps a thread or a slot: this worker ends")
        return bool(running)

    async def renew(self) -> None:
        """Renew every lease now, as the keeper does by itself unless the worker is driven."""
        await self._keeper.renew_all()

    async def beat(self) -> None:
        """See to the breakers, as happens by itself unless the worker is driven."""
        if self._breakers is not None:
            await self._breakers.beat()

    def _give_up(self, slot: Slot) -> None:
        """It ignores its cancellation: settle for it, and leave the slot to it."""
        self.stuck += 1
        lease, stop = slot.lease, slot.stop
        assert lease is not None
        reason = stop.value if stop else "?"
        log.error("job %s is stuck: it does not stop (%s)", lease.id, reason, extra=extra_of(lease))
        if slot.task is not None:
            self._given_up.add(slot)
            slot.task.add_done_callback(lambda _: self._given_up.discard(slot))
        self._abandon(slot, self._runner.outcome_of_stuck(lease, slot))

    def _abandon(self, slot: Slot, outcome: Outcome | None) -> None:
        lease = slot.lease
        assert lease is not None
        next(lane for lane in self._lanes if slot in lane.slots).replace(slot)
        self._pump.settle(lease, outcome)
