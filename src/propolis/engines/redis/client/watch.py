"""Wake-ups from the server: news on channels, and lists that somebody pushes to.

A channel costs nothing while it is silent.  A list is watched by a command that blocks until there is an
element in it, and leaves it there; streams by one that blocks until there is an entry after a number.  All
have connections of their own, so that nothing waits behind a wait.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from propolis.engines.redis.client.connection import Connection, pack
from propolis.engines.redis.client.errors import (
    AnswerLost,
    NotSent,
    ScriptRefused,
    ServerError,
    error_text,
    explained,
)
from propolis.engines.redis.client.router import Router
from propolis.engines.shared.waiters import Waiters
from propolis.errors import EngineError

_chance = random.Random()  # not the one of the program, which may be seeded or watched

log = logging.getLogger("propolis.redis")

PING_EVERY = 15.0  # seconds of silence after which we make sure that the other side is still there
BLOCK = 15
MAX_LISTS = 32  # watched by one event loop: each needs a connection
FIRST_PAUSE = 0.05  # seconds before listening begins anew; doubled each time, and jittered
LAST_PAUSE = 5.0
MAX_SPARE = 4  # connections to one place that are kept for the next wait for streams
SPIN = 0.05  # seconds between two wake-ups for one and the same element
_TROUBLE = (EngineError, ScriptRefused, AnswerLost, NotSent, OSError)


def name_of(key: bytes) -> str:
    """As `Waiters` know it."""
    return key.decode("latin-1")


class Watch:
    """The ears of one event loop.  Whatever is heard wakes `waiters`."""

    def __init__(self, router: Router, waiters: Waiters, shown: str, patience: float) -> None:
        self._router = router
        self._waiters = waiters
        self._shown = shown
        self._patience = patience
        self._channels: set[bytes] = set()
        self._more = asyncio.Event()
        self._asked: dict[bytes, asyncio.Event] = {}
        self._heard_from: set[bytes] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._spare: defaultdict[bytes, list[Connection]] = defaultdict(list)

    def want(self, channels: Sequence[bytes], lists: Sequence[bytes]) -> None:
        """Listen to these as well.  Once that has begun they wake, in case something came before."""
        if not self._channels.issuperset(channels):
            if not self._channels:
                self._start(self._listen)
            self._channels.update(channels)
            self._more.set()
        for key in lists:
            if key not in self._asked:
                if len(self._asked) >= MAX_LISTS:
                    continue  # the caller looks now and then in any case
                self._asked[key] = asyncio.Event()
                self._start(partial(self._watch, key))
            self._asked[key].set()

    @property
    def hears(self) -> bool:
        """Whether somebody listens to all that was wanted, as far as we know."""
        wanted = self._channels | self._asked.keys()
        return bool(wanted) and len(self._asked) < MAX_LISTS and self._heard_from >= wanted

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in [each for spare in self._spare.values() for each in spare]:
            await connection.close()
        self._spare.clear()

    def _start(self, act: Callable[[], Awaitable[None]]) -> None:
        self._tasks.append(
            asyncio.get_running_loop().create_task(self._keep(act), name="propolis-redis-wait")
        )

    async def _keep(self, act: Callable[[], Awaitable[None]]) -> None:
        """Go on for ever: without ears a worker still finds its jobs, only later."""
        clock = asyncio.get_running_loop().time
        failures = 0
        while True:
            began = clock()
            try:
                await act()
            except _TROUBLE as error:
                failures = 1 if clock() - began > LAST_PAUSE else failures + 1
                level = logging.WARNING if failures == 1 else logging.DEBUG
                log.log(level, "no wake-ups for a moment, only polling: %s", error_text(error))
            pause = min(LAST_PAUSE, FIRST_PAUSE * 2 ** min(failures, 10))
            await asyncio.sleep(pause * _chance.uniform(0.5, 1))

    # --- channels ------------------------------------------------------------------------

    async def _listen(self) -> None:
        connection = await self._router.dial(min(self._channels), heard=self._heard)
        try:
            await self._follow(connection)
        finally:
            self._heard_from -= self._channels
            await connection.close()

    async def _follow(self, connection: Connection) -> None:
        subscribed: set[bytes] = set()
        while connection.alive:
            new = sorted(self._channels - subscribed)
            self._more.clear()
            await self._ask_all(connection, [pack("SUBSCRIBE", channel) for channel in new] or [_PING])
            for channel in new:
                self._heard(channel)
            subscribed.update(new)
            self._heard_from.update(new)
            with suppress(TimeoutError):
                async with asyncio.timeout(PING_EVERY):
                    await connection.gone_or(self._more)
        raise AnswerLost(connection.why)

    async def _ask_all(self, connection: Connection, commands: list[bytes]) -> None:
        replies = [connection.send(command) for command in commands]
        for reply in await asyncio.gather(*replies):
            if type(reply) is ServerError:
                raise explained(reply, self._shown)

    def _heard(self, channel: bytes) -> None:
        self._waiters.wake(name_of(channel))

    # --- lists ---------------------------------------------------------------------------

    async def _watch(self, key: bytes) -> None:
        connection = await self._router.dial(key)
        peek = pack("BLMOVE", key, key, "LEFT", "LEFT", BLOCK)
        seen = None
        try:
            while True:
                await self._asked[key].wait()
                self._heard_from.add(key)
                reply = await connection.send(peek, patience=BLOCK + self._patience)
                if type(reply) is ServerError:
                    raise explained(reply, self._shown)
                if reply is not None:
                    if reply == seen:  # nobody takes it: its queue may be paused
                        await asyncio.sleep(SPIN)
                    self._asked[key].clear()
                    self._waiters.wake(name_of(key))
                seen = reply
        finally:
            self._heard_from.discard(key)
            await connection.close()

    # --- streams -------------------------------------------------------------------------

    async def wait_for_entries(self, place: bytes, streams: Mapping[bytes, int], timeout: float) -> None:
        milliseconds = max(1, round(timeout * 1000))
        command = pack(
            "XREAD", "COUNT", 1, "BLOCK", milliseconds, "STREAMS", *streams, *map(str, streams.values())
        )
        try:
            await self._ask_alone(place, command, timeout)
        except _TROUBLE as error:
            log.debug("no news of streams for a moment, only polling: %s", error_text(error))
            await asyncio.sleep(min(FIRST_PAUSE * 10, timeout))

    async def _ask_alone(self, place: bytes, command: bytes, timeout: float) -> None:
        """On a connection that nobody else uses meanwhile; one that was given up is not used again."""
        spare = [each for each in self._spare.pop(place, ()) if each.alive]
        connection = spare.pop() if spare else await self._router.dial(place)
        self._spare[place] += spare
        try:
            reply = await connection.send(command, patience=timeout + self._patience)
            if type(reply) is ServerError:
                raise explained(reply, self._shown)
        except BaseException:
            connection.abort("nobody waits any more")
            raise
        if len(self._spare[place]) < MAX_SPARE:
            self._spare[place].append(connection)
        else:
            connection.abort("there are enough others")


_PING = pack("PING")
