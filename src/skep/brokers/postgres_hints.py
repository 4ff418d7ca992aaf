"""LISTEN and NOTIFY, as a wake-up only: nothing is lost where no notification arrives, it only starts later.

Commits with a notification wait for one another.  So there are no more than two hundred in a second, however
much is put: a put that comes alone brings its own; of many together a statement after them tells.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import asyncpg

from skep.brokers.postgres_link import LOST, Connection, PostgresLink
from skep.brokers.waiting import Waiters
from skep.errors import SkepError
from skep.job import new_id

log = logging.getLogger("skep.postgres")

NEWS_EVERY = 0.005  # seconds between two notifications of one engine, on the average
AT_ONCE = 10  # so many may follow one another without a pause
SOON = 5.0  # seconds: of what is due later than that those who sweep know in time
LISTEN_AGAIN = 1.0
LISTEN_IN_VAIN = 60.0  # seconds until it is tried again where no notification arrives
HEARD_WITHIN = 3.0  # seconds in which a notification that was sent arrives, if any does
SILENCE = 30.0  # seconds without a notification after which one is sent to see whether it arrives

_PROBE = "\n?"  # begins a notification that speaks of no queue


class Deaf(Exception):
    """A notification was sent and did not arrive."""


class Notifications:
    """What one engine tells others, and hears of them."""

    def __init__(
        self,
        link: PostgresLink,
        listen_link: PostgresLink,
        sql: Mapping[str, str],
        channel: str,
        waiters: Waiters,
    ) -> None:
        self._link = link
        self._listen_link = listen_link
        self._sql = sql
        self.channel = channel
        self._waiters = waiters
        self._news: dict[str, float] = {}  # queues, and in how many seconds there will be something in them
        self._alarms: dict[str, asyncio.TimerHandle] = {}
        self._told_at: deque[float] = deque(maxlen=AT_ONCE)
        self._teller: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._wanted: set[str] = set()
        self._heard_at = 0.0
        self._probes: dict[str, asyncio.Event] = {}
        self._told_deaf = False
        self.hears = False

    def along(self, news: Mapping[str, float]) -> list[str]:
        """What to notify in the statement that brings these news; nothing, if that would be too often."""
        if self._news or self._wait_for_turn() > 0:
            return []
        said = [_said(queue, seconds) for queue, seconds in sorted(news.items()) if seconds <= SOON]
        if said:
            self._told_at.append(asyncio.get_running_loop().time())
        return said

    def wake(self, news: Mapping[str, float]) -> None:
        """Those of this process."""
        for queue, seconds in news.items():
            if seconds <= SOON:
                self._wake(queue, seconds)

    def tell(self, news: Mapping[str, float]) -> None:
        """In so many seconds something may have come into these queues."""
        self.wake(news)
        for queue, seconds in news.items():
            if seconds <= SOON:
                self._news[queue] = min(seconds, self._news.get(queue, SOON))
        if self._news and (self._teller is None or self._teller.done()):
            self._teller = asyncio.get_running_loop().create_task(self._tell(), name="skep-postgres-tell")

    def listen(self, queues: Sequence[str], at: Callable[[], int | None]) -> None:
        """Have this process woken from now on."""
        self._wanted.update(queues)
        if self._listener is None or self._listener.done():
            self._listener = asyncio.get_running_loop().create_task(
                self._listen(at), name="skep-postgres-listen"
            )

    async def close(self) -> None:
        tasks = [task for task in (self._teller, self._listener) if task is not None]
        self._teller = self._listener = None
        self.hears = False
        here = asyncio.get_running_loop()
        for task in tasks:
            if task.get_loop() is here:
                task.cancel()
                await asyncio.wait({task})
            else:
                with suppress(RuntimeError):  # that loop is gone, and its tasks with it
                    task.get_loop().call_soon_threadsafe(task.cancel)

    # --- telling -------------------------------------------------------------------------

    async def _tell(self) -> None:
        while self._news:
            await self._not_too_often()
            news, self._news = self._news, {}
            said = [_said(queue, seconds) for queue, seconds in sorted(news.items())]
            try:
                await self._link.read(self._sql["notify"], self.channel, said)
            except SkepError as error:  # they look by themselves, only later
                log.debug("nobody was notified: %s", error)

    async def _not_too_often(self) -> None:
        """Of a stream, what gathers meanwhile is told together."""
        if (pause := self._wait_for_turn()) > 0:
            await asyncio.sleep(pause)
        self._told_at.append(asyncio.get_running_loop().time())

    def _wait_for_turn(self) -> float:
        """Seconds until the next notification."""
        if len(self._told_at) < AT_ONCE:
            return 0.0
        return self._told_at[0] + AT_ONCE * NEWS_EVERY - asyncio.get_running_loop().time()

    # --- listening -----------------------------------------------------------------------

    async def _listen(self, at: Callable[[], int | None]) -> None:
        while True:
            pause = LISTEN_AGAIN
            try:
                await self._listen_once(at)
            except Deaf:
                if not self.hears:
                    pause = LISTEN_IN_VAIN
                    self._tell_deaf()
            except (SkepError, asyncpg.PostgresError, *LOST) as error:
                log.debug("the listener was disconnected: %s", error)
            finally:
                self._stop_hearing()
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))

    async def _listen_once(self, at: Callable[[], int | None]) -> None:
        connection = await self._listen_link.connect()
        gone = asyncio.Event()
        try:
            connection.add_termination_listener(lambda _: gone.set())
            await connection.add_listener(self.channel, self._heard)
            await self._probe()
            self.hears, self._told_deaf = True, False
            # What came between somebody's last look and this moment nobody has told us.
            for row in await self._link.read(self._sql["anything"], at(), sorted(self._wanted)):
                self._waiters.wake(row["queue"])
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
            await self._link.read(self._sql["notify"], self.channel, [name])
            async with asyncio.timeout(HEARD_WITHIN):
                await arrived.wait()
        except TimeoutError as error:
            raise Deaf from error
        finally:
            del self._probes[name]

    def _tell_deaf(self) -> None:
        if not self._told_deaf:
            self._told_deaf = True
            log.warning(
                "no notification arrives through %s, as behind a pooler in transaction mode: idle workers "
                "look for jobs every --poll instead; give listen= a URL that leads to the server itself",
                self._listen_link.shown,
            )

    def _stop_hearing(self) -> None:
        if self.hears:
            self.hears = False
            self._waiters.wake()  # those who relied on it look by themselves from now on

    def _heard(self, _connection: Connection, _pid: int, _channel: str, said: str) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        if said.startswith(_PROBE):
            if said in self._probes:
                self._probes[said].set()
            return
        self._wake(*_understood(said))

    def _wake(self, queue: str | None, seconds: float) -> None:
        """Now, or by the one alarm that each queue has, if there is no earlier one."""
        if seconds <= 0 or queue is None:
            self._waiters.wake(queue)
            return
        loop = asyncio.get_running_loop()
        alarm = self._alarms.get(queue)
        if (
            alarm is None
            or alarm.cancelled()
            or alarm.when() <= loop.time()
            or loop.time() + seconds < alarm.when()
        ):
            if alarm is not None:
                alarm.cancel()
            self._alarms[queue] = loop.call_later(seconds, self._waiters.wake, queue)


def _said(queue: str, seconds: float) -> str:
    return queue if seconds <= 0 else f"{queue}\n{round(seconds * 1000)}"


def _understood(said: str) -> tuple[str | None, float]:
    queue, _, milliseconds = said.partition("\n")
    return queue or None, int(milliseconds) / 1000 if milliseconds.isdecimal() else 0.0


def soonest(news: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The earliest of what is told of each queue."""
    found: dict[str, float] = {}
    for queue, seconds in news:
        found[queue] = min(seconds, found.get(queue, seconds))
    return found
