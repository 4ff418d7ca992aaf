"""LISTEN and NOTIFY, as a wake-up only: nothing is lost where no notification arrives, it only starts later.

Commits with a notification wait for one another.  So there are no more than two hundred in a second, however
much is put: a put that comes alone brings its own; many together are announced by a statement after them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Protocol

import asyncpg

from propolis.core.clock import Clock, to_us
from propolis.core.ids import new_id
from propolis.core.protocols import Rule
from propolis.engines.postgres.client import LOST, Connection, PostgresLink
from propolis.engines.shared.waiters import Waiters
from propolis.errors import PropolisError

log = logging.getLogger("propolis.postgres")

NEWS_EVERY = 0.005  # seconds between two notifications of one engine, on the average
AT_ONCE = 10  # so many may follow one another without a pause
SOON = 5.0  # seconds: of what is due later than that those who sweep know in time
LISTEN_AGAIN = 1.0
LISTEN_IN_VAIN = 60.0  # seconds until it is tried again where no notification arrives
HEARD_WITHIN = 3.0  # seconds in which a notification that was sent arrives, if any does
PATIENT_FOR = 30.0  # seconds until a connection is opened for no more than a question whether we hear
SILENCE = 30.0  # seconds without a notification after which one is sent to see whether it arrives

_PROBE, _FEED = "\n?", "\n!"  # begin notifications that speak of no queue


class GivesTime(Protocol):
    """Gives the time in microseconds; None where the server's own clock is meant."""

    def __call__(self) -> int | None: ...


class Deaf(Exception):
    """A notification was sent and did not arrive."""


class Notifications:
    """What one engine announces to others, and hears of them."""

    def __init__(
        self,
        link: PostgresLink,
        listen_link: PostgresLink,
        sql: Mapping[str, str],
        waiters: Waiters,
    ) -> None:
        self._link = link
        self._listen_link = listen_link
        self._sql = sql
        self.channel = ""  # known once the engine is open
        self._waiters = waiters
        self.feed_waiters = Waiters()
        self._news: dict[str, float] = {}  # queues ("": any), and in how many seconds something will be there
        self._alarms: dict[str, asyncio.TimerHandle] = {}
        self._notified_at: deque[float] = deque(maxlen=AT_ONCE)
        self._announcer: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._wanted: set[str] = set()
        self._heard_at = 0.0
        self._probes: dict[str, asyncio.Event] = {}
        self._warned_deaf = False
        self.hears = False

    def along(self, news: Mapping[str, float]) -> list[str]:
        """What to notify in the statement that brings these news; nothing, if that would be too often."""
        if self._news or self._wait_for_turn() > 0:
            return []
        payloads = [_payload(queue, seconds) for queue, seconds in sorted(news.items()) if seconds <= SOON]
        if payloads:
            self._notified_at.append(asyncio.get_running_loop().time())
        return payloads

    def wake(self, news: Mapping[str, float]) -> None:
        """Those of this process."""
        for queue, seconds in news.items():
            if seconds <= SOON:
                self._wake(queue or None, seconds)

    def announce(self, news: Mapping[str, float]) -> None:
        """In so many seconds something may have come into these queues."""
        self.wake(news)
        for queue, seconds in news.items():
            if seconds <= SOON:
                self._news[queue] = min(seconds, self._news.get(queue, SOON))
        if self._news and (self._announcer is None or self._announcer.done()):
            self._announcer = asyncio.get_running_loop().create_task(
                self._announce(), name="propolis-postgres-notify"
            )

    def listen(self, queues: Sequence[str], clock: GivesTime) -> None:
        """Have this process woken from now on."""
        self._wanted.update(queues)
        if self._listener is None or self._listener.done():
            self._listener = asyncio.get_running_loop().create_task(
                self._listen(clock), name="propolis-postgres-listen"
            )

    async def close(self) -> None:
        tasks = [task for task in (self._announcer, self._listener) if task is not None]
        self._announcer = self._listener = None
        self.hears = False
        here = asyncio.get_running_loop()
        for task in tasks:
            if task.get_loop() is here:
                task.cancel()
                await asyncio.wait({task})
            else:
                with suppress(RuntimeError):  # that loop is gone, and its tasks with it
                    task.get_loop().call_soon_threadsafe(task.cancel)

    # --- announcing ----------------------------------------------------------------------

    async def _announce(self) -> None:
        while self._news:
            await self._not_too_often()
            news, self._news = self._news, {}
            payloads = [_payload(queue, seconds) for queue, seconds in sorted(news.items())]
            try:
                await self._link.read(self._sql["notify"], self.channel, payloads)
            except PropolisError as error:  # they look by themselves, only later
                log.debug("nobody was notified: %s", error)

    async def _not_too_often(self) -> None:
        """Of a stream, what gathers meanwhile is announced together."""
        if (pause := self._wait_for_turn()) > 0:
            await asyncio.sleep(pause)
        self._notified_at.append(asyncio.get_running_loop().time())

    def _wait_for_turn(self) -> float:
        """Seconds until the next notification."""
        if len(self._notified_at) < AT_ONCE:
            return 0.0
        return self._notified_at[0] + AT_ONCE * NEWS_EVERY - asyncio.get_running_loop().time()

    # --- listening -----------------------------------------------------------------------

    async def _listen(self, clock: GivesTime) -> None:
        while True:
            pause = LISTEN_AGAIN
            try:
                await self._listen_once(clock)
            except Deaf:
                if not self.hears:
                    pause = LISTEN_IN_VAIN
                    self._warn_deaf()
            except (PropolisError, asyncpg.PostgresError, *LOST) as error:
                log.debug("the listener was disconnected: %s", error)
            finally:
                self._stop_hearing()
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))

    async def _listen_once(self, clock: GivesTime) -> None:
        connection = await self._listen_link.connect()
        gone = asyncio.Event()
        try:
            connection.add_termination_listener(lambda _: gone.set())
            await connection.add_listener(self.channel, self._heard)
            await self._probe()
            self.hears, self._warned_deaf = True, False
            # Nobody has announced to us what came between the last lease and this moment.
            for row in await self._link.read(
                self._sql["anything"], clock(), sorted(self._wanted), patient=PATIENT_FOR
            ):
                self._waiters.wake(row["queue"])
            self.feed_waiters.wake_waiting()
            while not gone.is_set():
                await self._rest(gone)
        finally:
            connection.terminate()

    async def _rest(self, gone: asyncio.Event) -> None:
        """Until the connection is gone, or has been silent for so long that it may be without our knowing."""
        now = asyncio.get_running_loop().time()
        quiet_for = SILENCE * random.uniform(0.7, 1.3)  # one who asks answers for all who listen
        if (remaining := self._heard_at + quiet_for - now) <= 0:
            await self._probe()
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(remaining):
                await gone.wait()

    async def _probe(self) -> None:
        """Send ourselves a notification by another connection.

        It is lost where the listening one is dead, or leads to another server, or through a pooler that gives
        it a session only for the length of a transaction.  So there is no need to know about poolers.
        """
        name = f"{_PROBE}{new_id()}"
        self._probes[name] = arrived = asyncio.Event()
        try:
            await self._link.read(self._sql["notify"], self.channel, [name], patient=PATIENT_FOR)
            async with asyncio.timeout(HEARD_WITHIN):
                await arrived.wait()
        except TimeoutError as error:
            raise Deaf from error
        finally:
            del self._probes[name]

    def _warn_deaf(self) -> None:
        if not self._warned_deaf:
            self._warned_deaf = True
            log.warning(
                "no notification arrives through %s, as behind a pooler in transaction mode: idle workers "
                "look for jobs every --poll instead; give listen= a URL that leads to the server itself",
                self._listen_link.shown,
            )

    def _stop_hearing(self) -> None:
        if self.hears:
            self.hears = False
            self._waiters.wake()  # those who relied on it look by themselves from now on
            self.feed_waiters.wake_waiting()

    def _heard(self, _connection: Connection, _pid: int, _channel: str, payload: str) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        if payload.startswith(_PROBE):
            if payload in self._probes:
                self._probes[payload].set()
        elif payload.startswith(_FEED):
            self.feed_waiters.wake_waiting(payload.removeprefix(_FEED))
        else:
            self._wake(*_parsed(payload))

    def _wake(self, queue: str | None, seconds: float) -> None:
        """Now, or by the one alarm that each queue has, and all together, if there is no earlier one."""
        if seconds <= 0:
            self._waiters.wake(queue)
            return
        loop = asyncio.get_running_loop()
        alarm = self._alarms.get(queue or "")
        if (
            alarm is None
            or alarm.cancelled()
            or alarm.when() <= loop.time()
            or loop.time() + seconds < alarm.when()
        ):
            if alarm is not None:
                alarm.cancel()
            self._alarms[queue or ""] = loop.call_later(seconds, self._waiters.wake, queue)


def _payload(queue: str, seconds: float) -> str:
    return queue if seconds <= 0 else f"{queue}\n{round(seconds * 1000)}"


def _parsed(payload: str) -> tuple[str | None, float]:
    queue, _, milliseconds = payload.partition("\n")
    return queue or None, int(milliseconds) / 1000 if milliseconds.isdecimal() else 0.0


def soonest(news: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The earliest of the news of each queue."""
    found: dict[str, float] = {}
    for queue, seconds in news:
        found[queue] = min(seconds, found.get(queue, seconds))
    return found


def seconds_until(time_given: datetime, clock: Clock | None) -> float:
    """By our own clock, where none is given."""
    now_us = time.time_ns() // 1000 if clock is None else clock.now_us()
    return max(0.0, (to_us(time_given) - now_us) / 1_000_000)


def seconds_until_over(rule: Rule, clock: Clock | None) -> float | None:
    if rule.until is not None:
        return seconds_until(rule.until, clock)
    return None if rule.lasts is None else rule.lasts.total_seconds()
