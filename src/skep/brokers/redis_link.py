"""The link between the engine and its Redis servers: one interface for one server, sentinels and clusters.

A connection belongs to the event loop that made it, and an engine is used from several: the worker's, the
lease keeper's, a producer's.  So each loop has its own, kept open, and closed when the loop ends.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from skep.brokers.redis_cluster import ClusterLanes
from skep.brokers.redis_connection import Part, pack
from skep.brokers.redis_errors import Refused, ServerError, explained
from skep.brokers.redis_lane import Credentials, Dialler, Lanes, OneLane
from skep.brokers.redis_script import Script, load_script
from skep.brokers.redis_sentinel import SentinelLane
from skep.brokers.redis_target import OPTIONS, SCHEMES, Layout, Target, target_of
from skep.brokers.redis_waiting import Watch, name_of
from skep.brokers.waiting import Waiters
from skep.errors import EngineClosed, ForkedEngine

__all__ = [
    "OPTIONS",
    "SCHEMES",
    "Credentials",
    "Layout",
    "Link",
    "RedisLink",
    "Refused",
    "Script",
    "Target",
    "load_script",
    "target_of",
]


class Link(Protocol):
    """Commands for Redis, from any number of event loops.

    Replies are bytes, integers, lists and None.  An error that our own Lua raises is `Refused`; the others
    become errors of skep.  `EngineUnavailable` says that nothing was changed, `OutcomeUnknown` that the
    answer was lost.  What only reads may say so by `reads`: then it is asked again when its answer is lost,
    is never `OutcomeUnknown`, and waits for no replica.
    """

    @property
    def target(self) -> Target: ...

    async def open(self) -> bool:
        """Connect; False if it was open already."""
        ...

    async def close(self) -> None: ...

    def check_usable(self) -> None:
        """`EngineClosed`, or `ForkedEngine` in a child of the process that opened it."""
        ...

    async def call(
        self, script: Script, keys: Sequence[bytes], args: Sequence[Part], *, reads: bool = False
    ) -> Any:
        """Run a script.  In a cluster its keys share one slot; without keys any master runs it."""
        ...

    async def command(self, *parts: Part, reads: bool = False) -> Any:
        """One plain command whose first key, if it has any, is its second part."""
        ...

    async def everywhere(self, *parts: Part) -> list[Any]:
        """The answers of all masters to a command that only reads.  A single server gives one."""
        ...

    async def wait_for(
        self, *, channels: Sequence[bytes] = (), lists: Sequence[bytes] = (), timeout: float
    ) -> bool:
        """True as soon as there is a message on one of the channels, or an element in one of the lists.

        Also for what came to them since they were last `looked` at, and sometimes for nothing: a first wait
        returns at once when listening has begun, and so does one after a connection was made anew.  No
        element is taken.
        """
        ...

    @property
    def hears(self) -> bool:
        """Whether all that the running loop has waited for is known to be listened to."""
        ...

    def looked(self, keys: Iterable[bytes]) -> None:
        """What came until now to these channels and lists is about to be seen."""
        ...

    def wake(self, name: bytes) -> None:
        """Something came to this channel or list, as this very process knows without hearing it."""
        ...


class RedisLink:
    """A `Link` to whatever its target says."""

    def __init__(self, target: Target, credentials: Credentials | None = None) -> None:
        self.target = target
        self._dialler = Dialler(target, credentials)
        self._waiters = Waiters()
        self._lock = threading.Lock()
        self._lines: dict[asyncio.AbstractEventLoop, _Lines] = {}
        self._pid = 0

    async def open(self) -> bool:
        if self._pid:
            self.check_usable()
            return False
        self._pid = os.getpid()
        try:
            await self._lines_here().lanes.connect()
        except BaseException:
            await self.close()
            raise
        return True

    async def close(self) -> None:
        forked, self._pid = self._pid != os.getpid(), 0
        with self._lock:
            lines, self._lines = self._lines, {}
        self._waiters.wake()
        if forked:  # they are the parent's
            return
        for each in lines.values():
            await each.close()

    def check_usable(self) -> None:
        if self._pid != os.getpid():
            if self._pid == 0:
                raise EngineClosed
            raise ForkedEngine(self._pid, os.getpid())

    async def call(
        self, script: Script, keys: Sequence[bytes], args: Sequence[Part], *, reads: bool = False
    ) -> Any:
        lanes = self._lines_here().lanes
        key = keys[0] if keys else b""
        reply = await lanes.ask(pack(b"EVALSHA", script.sha, len(keys), *keys, *args), key, reads=reads)
        if type(reply) is ServerError and reply.code == "NOSCRIPT":
            reply = await lanes.ask(pack(b"EVAL", script.text, len(keys), *keys, *args), key, reads=reads)
        return self._answer(reply)

    async def command(self, *parts: Part, reads: bool = False) -> Any:
        key = _bytes(parts[1]) if len(parts) > 1 else b""
        return self._answer(await self._lines_here().lanes.ask(pack(*parts), key, reads=reads))

    async def everywhere(self, *parts: Part) -> list[Any]:
        return [self._answer(reply) for reply in await self._lines_here().lanes.everywhere(pack(*parts))]

    async def wait_for(
        self, *, channels: Sequence[bytes] = (), lists: Sequence[bytes] = (), timeout: float
    ) -> bool:
        self._lines_here().watch.want(channels, lists)
        return await self._waiters.wait([name_of(name) for name in (*channels, *lists)], timeout)

    @property
    def hears(self) -> bool:
        lines = self._lines.get(asyncio.get_running_loop())
        return lines is not None and lines.watch.hears

    def looked(self, keys: Iterable[bytes]) -> None:
        self._waiters.looked(map(name_of, keys))

    def wake(self, name: bytes) -> None:
        self._waiters.wake(name_of(name))

    def _answer(self, reply: Any) -> Any:
        if type(reply) is ServerError:
            raise explained(reply, self.target.shown) from reply
        return reply

    def _lines_here(self) -> _Lines:
        self.check_usable()
        loop = asyncio.get_running_loop()
        lines = self._lines.get(loop)
        if lines is None:
            lines = _Lines(self, loop, self._dialler, self._waiters)
            with self._lock:
                self._lines[loop] = lines
        return lines

    def forget(self, loop: asyncio.AbstractEventLoop, lines: _Lines) -> None:
        with self._lock:
            if self._lines.get(loop) is lines:
                del self._lines[loop]


_LANES: dict[Layout, Callable[[Dialler], Lanes]] = {
    Layout.SINGLE: OneLane,
    Layout.SENTINEL: SentinelLane,
    Layout.CLUSTER: ClusterLanes,
}


class _Lines:
    """What one event loop has."""

    def __init__(
        self, link: RedisLink, loop: asyncio.AbstractEventLoop, dialler: Dialler, waiters: Waiters
    ) -> None:
        self._link = link
        self._loop = loop
        target = dialler.target
        self.lanes: Lanes = _LANES[target.layout](dialler)
        self.watch = Watch(self.lanes, waiters, target.shown, target.patience)
        # A loop that ends cancels what still runs in it: that is how we hear of it.
        self._guardian = loop.create_task(self._guard(), name="skep-redis")

    async def close(self) -> None:
        """From any loop."""
        if self._loop is asyncio.get_running_loop():
            self._guardian.cancel()
            await asyncio.wait({self._guardian})
        elif self._loop.is_running():
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._guardian.cancel)

    async def _guard(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self._link.forget(self._loop, self)
            await self.watch.close()
            await self.lanes.close()


def _bytes(part: Part) -> bytes:
    return part if isinstance(part, bytes) else str(part).encode()
