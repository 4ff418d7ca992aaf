"""The lease keeper: renews every lease of this worker, from a thread of its own.

A job that blocks the event loop, with `time.sleep` or by computing, therefore loses no lease.  The keeper is
also the first to know that a lease is lost: when the engine answers so, or when a renewal could not be sent
and accepted in time by the monotonic clock, whatever the engine may think.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Protocol

from propolis.core.job import Identity, Lease, Outcome
from propolis.core.protocols import Core, Renewal
from propolis.errors import EngineError
from propolis.worker.settings import Monotonic, monotonic

log = logging.getLogger("propolis.worker")

BEATS = 4  # renewals per lease: two may be lost before the lease is
MARGIN = 0.1  # the share of a lease within which we no longer trust it
BLOCKED_AFTER = 2.0  # seconds without a turn of the event loop until it is logged


class HearsOfLeases(Protocol):
    """Whoever is to know what a renewal has shown: the worker.  All are called in the keeper's thread."""

    def lease_lost(self, lease: Lease) -> None:
        """Somebody else may be running the job by now."""

    def stop_wanted(self, lease: Lease) -> None:
        """An operator has cancelled the job."""

    def keeper_died(self, error: BaseException) -> None:
        """From here on nobody renews any lease."""


class Grant:
    """Until when we may rely on the leases of one bundle: one of these for all of them."""

    __slots__ = ("safe_until",)

    def __init__(self, safe_until: float) -> None:
        self.safe_until = safe_until


Held = tuple[Lease, Grant]


class Keeper:
    """Holds the leases of what runs here and of what waits to be run."""

    def __init__(
        self, engine: Core, span: timedelta, worker: HearsOfLeases, *, clock: Monotonic = monotonic
    ) -> None:
        self._engine = engine
        self._span = span
        self._seconds = span.total_seconds()
        self._worker = worker
        self._clock = clock
        self._held: dict[Identity, Held] = {}
        self.stops_wanted: set[Identity] = set()  # the jobs that an operator has cancelled
        self.settling: Sequence[tuple[Lease, Outcome]] = ()  # what the engine is asked to end just now
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop_thread = 0
        self._loop_beat = 0.0
        self._block_is_logged = False

    def start(self) -> None:
        self._loop_thread = threading.get_ident()
        self._loop_beat = self._clock()
        self._thread = threading.Thread(target=self._run, name="propolis-keeper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def safe_until(self, sent: float) -> float:
        return sent + self._seconds * (1 - MARGIN)

    def add(self, leases: Iterable[Lease], sent: float) -> None:
        """Leases that were asked for at `sent`, from which on their time runs."""
        grant = Grant(self.safe_until(sent))
        held = self._held
        for lease in leases:
            held[lease.id, lease.fence] = (lease, grant)

    def drop(self, leases: Iterable[Lease]) -> None:
        held = self._held
        for lease in leases:
            held.pop((lease.id, lease.fence), None)
        if self.stops_wanted:
            self.stops_wanted &= held.keys()

    def holds(self, lease: Lease) -> bool:
        return (lease.id, lease.fence) in self._held

    def beat(self) -> None:
        """The event loop turns."""
        self._loop_beat = self._clock()

    def _run(self) -> None:
        pause = self._seconds / BEATS
        try:
            with asyncio.Runner() as runner:
                while not self._stopped.wait(pause):
                    self._watch_the_loop()
                    runner.run(self.renew_all())
        except BaseException as error:
            log.critical("the keeper of the leases has died", exc_info=error)
            self._worker.keeper_died(error)

    async def renew_all(self) -> None:
        """Renew everything once, and report what is lost or should stop."""
        self._give_up_unsafe()
        held = [lease for lease, _ in list(self._held.values())]
        if not held:
            return
        sent = self._clock()
        try:
            async with asyncio.timeout(self._seconds / BEATS):
                renewals = await self._engine.renew(held, span=self._span)
        except (EngineError, TimeoutError) as error:
            log.warning("leases could not be renewed: %s", str(error) or "no answer in time")
            self._give_up_unsafe()
            return
        grant = Grant(self.safe_until(sent))
        for lease, renewal in zip(held, renewals, strict=True):
            self._take(lease, renewal, grant)

    def _take(self, lease: Lease, renewal: Renewal, grant: Grant) -> None:
        identity = (lease.id, lease.fence)
        if renewal.later:  # it keeps the time that it has
            return
        if renewal.until is None:
            if not self._is_settling(lease):  # else we may have ended it ourselves: the settle will show it
                self._give_up(lease)
            return
        if identity in self._held:  # and not settled meanwhile
            self._held[identity] = (lease, grant)
        if renewal.cancel_requested and identity not in self.stops_wanted:
            self.stops_wanted.add(identity)
            self._worker.stop_wanted(lease)

    def _is_settling(self, lease: Lease) -> bool:
        return any(each is lease for each, _ in self.settling)

    def _give_up_unsafe(self) -> None:
        """Too late to be sure, for instance after this process was stopped and continued."""
        now = self._clock()
        for lease, grant in list(self._held.values()):
            if grant.safe_until <= now:
                self._give_up(lease)

    def _give_up(self, lease: Lease) -> None:
        if self._held.pop((lease.id, lease.fence), None) is not None:
            self._worker.lease_lost(lease)

    def _watch_the_loop(self) -> None:
        silent = self._clock() - self._loop_beat
        if silent < BLOCKED_AFTER:
            self._block_is_logged = False
        elif not self._block_is_logged:
            self._block_is_logged = True
            frame = sys._current_frames().get(self._loop_thread)
            where = "".join(traceback.format_stack(frame)[-3:]) if frame else ""
            log.warning("the event loop has been blocked for %.1f s, here:", silent)
            for line in where.splitlines():
                log.warning("  %s", line)
