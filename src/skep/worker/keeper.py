"""The lease keeper: renews every lease of this worker, from a thread of its own.

A job that blocks the event loop, with `time.sleep` or by computing, therefore loses no lease.  The
keeper is also the first to know that a lease is lost: when the engine says so, or when a renewal could not be
sent and accepted in time by the monotonic clock, whatever the engine may think.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta

from skep.broker import Broker, Renewal
from skep.errors import EngineError
from skep.job import Identity, Lease

log = logging.getLogger("skep.worker")

BEATS = 4  # renewals per lease: two may be lost before the lease is
MARGIN = 0.1  # the share of a lease within which we no longer trust it
BLOCKED_AFTER = 2.0  # seconds without a turn of the event loop until we speak of it

monotonic: Callable[[], float] = time.monotonic
if hasattr(time, "CLOCK_BOOTTIME"):  # goes on while the machine sleeps, as the engine's clock does

    def monotonic() -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)


class Held:
    """One lease, and until when we may rely on it."""

    __slots__ = ("asked_to_stop", "lease", "safe_until")

    def __init__(self, lease: Lease, safe_until: float) -> None:
        self.lease = lease
        self.safe_until = safe_until
        self.asked_to_stop = False


class Keeper:
    """`lost` and `stop_wanted` are called in the keeper's thread: hand them over to the loop."""

    def __init__(
        self,
        broker: Broker,
        span: timedelta,
        *,
        lost: Callable[[Lease], None],
        stop_wanted: Callable[[Lease], None],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._broker = broker
        self._span = span
        self._seconds = span.total_seconds()
        self._lost = lost
        self._stop_wanted = stop_wanted
        self._clock = clock
        self._held: dict[Identity, Held] = {}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop_thread = 0
        self._loop_beat = 0.0
        self._told_blocked = False

    def start(self) -> None:
        self._loop_thread = threading.get_ident()
        self._loop_beat = self._clock()
        self._thread = threading.Thread(target=self._run, name="skep-keeper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def safe_until(self, sent: float) -> float:
        return sent + self._seconds * (1 - MARGIN)

    def add(self, leases: Iterable[Lease], sent: float) -> None:
        """Leases that were asked for at `sent`, from which on their time runs."""
        safe_until = self.safe_until(sent)
        held = self._held
        for lease in leases:
            held[lease.id, lease.fence] = Held(lease, safe_until)

    def drop(self, leases: Iterable[Lease]) -> None:
        held = self._held
        for lease in leases:
            held.pop((lease.id, lease.fence), None)

    def holds(self, lease: Lease) -> bool:
        return (lease.id, lease.fence) in self._held

    def beat(self) -> None:
        """The event loop turns."""
        self._loop_beat = self._clock()

    def _run(self) -> None:
        pause = self._seconds / BEATS
        with asyncio.Runner() as runner:
            while not self._stopped.wait(pause):
                self._watch_the_loop()
                runner.run(self.renew_all())

    async def renew_all(self) -> None:
        """Renew everything once, and tell who is lost or should stop."""
        self._give_up_unsafe()
        held = list(self._held.values())
        if not held:
            return
        sent = self._clock()
        try:
            async with asyncio.timeout(self._seconds / BEATS):
                renewals = await self._broker.renew([one.lease for one in held], span=self._span)
        except (EngineError, TimeoutError) as error:
            log.warning("leases could not be renewed: %s", str(error) or "no answer in time")
            self._give_up_unsafe()
            return
        for one, renewal in zip(held, renewals, strict=True):
            self._take(one, renewal, sent)

    def _take(self, one: Held, renewal: Renewal, sent: float) -> None:
        if renewal.until is None:
            self._give_up(one)
            return
        one.safe_until = self.safe_until(sent)
        if renewal.cancel_requested and not one.asked_to_stop:
            one.asked_to_stop = True
            self._stop_wanted(one.lease)

    def _give_up_unsafe(self) -> None:
        """Too late to be sure, for instance after this process was stopped and continued."""
        now = self._clock()
        for one in list(self._held.values()):
            if one.safe_until <= now:
                self._give_up(one)

    def _give_up(self, one: Held) -> None:
        if self._held.pop((one.lease.id, one.lease.fence), None) is not None:
            self._lost(one.lease)

    def _watch_the_loop(self) -> None:
        silent = self._clock() - self._loop_beat
        if silent < BLOCKED_AFTER:
            self._told_blocked = False
        elif not self._told_blocked:
            self._told_blocked = True
            frame = sys._current_frames().get(self._loop_thread)
            where = "".join(traceback.format_stack(frame)[-3:]) if frame else ""
            log.warning("the event loop has been blocked for %.1f s, here:\n%s", silent, where)
