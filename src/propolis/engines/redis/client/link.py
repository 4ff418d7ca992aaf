"""The link between the engine and its Redis servers: one interface for one server, sentinels and clusters.

A connection belongs to the event loop that made it, and an engine is used from several: the worker's, the
lease keeper's, a producer's.  So each loop has its own, kept open, and closed when the loop ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from propolis.engines.forks import check_opener
from propolis.engines.redis.client.cluster import ClusterRouter
from propolis.engines.redis.client.connection import Part, pack
from propolis.engines.redis.client.dialler import Credentials, Dialler
from propolis.engines.redis.client.errors import ServerError, explained
from propolis.engines.redis.client.router import Router, SingleRouter
from propolis.engines.redis.client.script import LuaScript
from propolis.engines.redis.client.sentinel import SentinelRouter
from propolis.engines.redis.client.target import Layout, Place, Target, is_loopback
from propolis.engines.redis.client.watch import Watch, name_of
from propolis.engines.shared.guarded_lock import GuardedLock
from propolis.engines.shared.loop_guardian import LoopGuardian
from propolis.engines.shared.waiters import Waiters

log = logging.getLogger("propolis.redis")


class Link(Protocol):
    """Commands for Redis, from any number of event loops.

    Replies are bytes, integers, lists and None.  An error that our own Lua raises is `ScriptRefused`; others
    become errors of propolis.  `EngineUnavailable` says that nothing was changed, `OutcomeUnknown` that the
    answer was lost.  A command that only reads is called with `reads`: then it is asked again when its answer
    is lost, is never `OutcomeUnknown`, and waits for no replica.
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
        self, script: LuaScript, keys: Sequence[bytes], args: Sequence[Part], *, reads: bool = False
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

    async def wait_for_entries(self, place: bytes, streams: Mapping[bytes, int], timeout: float) -> None:
        """Until a stream, all in the slot of `place`, has an entry after its number; or for nothing."""
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
    """A `Link` to its target."""

    def __init__(self, target: Target, credentials: Credentials | None = None) -> None:
        self.target = target
        self._dialler = Dialler(target, credentials)
        self._waiters = Waiters()
        self._lock = GuardedLock()
        self._by_loop: dict[asyncio.AbstractEventLoop, _PerLoop] = {}
        self._pid = 0

    async def open(self) -> bool:
        if self._pid:
            self.check_usable()
            return False
        self._pid = os.getpid()
        try:
            await self._here().router.connect()
        except BaseException:
            await self.close()
            raise
        _warn_of_plain_text(self.target)
        return True

    async def close(self) -> None:
        forked, self._pid = self._pid != os.getpid(), 0
        with self._lock:
            owned, self._by_loop = self._by_loop, {}
        self._waiters.wake()
        if forked:  # they are the parent's
            return
        for each in owned.values():
            await each.close()

    def check_usable(self) -> None:
        check_opener(self._pid)

    async def call(
        self, script: LuaScript, keys: Sequence[bytes], args: Sequence[Part], *, reads: bool = False
    ) -> Any:
        router = self._here().router
        key = keys[0] if keys else b""
        reply = await router.ask(pack(b"EVALSHA", script.sha, len(keys), *keys, *args), key, reads=reads)
        if type(reply) is ServerError and reply.code == "NOSCRIPT":
            reply = await router.ask(pack(b"EVAL", script.text, len(keys), *keys, *args), key, reads=reads)
        return self._answer(reply)

    async def command(self, *parts: Part, reads: bool = False) -> Any:
        key = _bytes(parts[1]) if len(parts) > 1 else b""
        return self._answer(await self._here().router.ask(pack(*parts), key, reads=reads))

    async def everywhere(self, *parts: Part) -> list[Any]:
        return [self._answer(reply) for reply in await self._here().router.everywhere(pack(*parts))]

    async def wait_for(
        self, *, channels: Sequence[bytes] = (), lists: Sequence[bytes] = (), timeout: float
    ) -> bool:
        self._here().watch.want(channels, lists)
        return await self._waiters.wait([name_of(name) for name in (*channels, *lists)], timeout)

    async def wait_for_entries(self, place: bytes, streams: Mapping[bytes, int], timeout: float) -> None:
        await self._here().watch.wait_for_entries(place, streams, timeout)

    @property
    def hears(self) -> bool:
        own = self._by_loop.get(asyncio.get_running_loop())
        return own is not None and own.watch.hears

    def looked(self, keys: Iterable[bytes]) -> None:
        self._waiters.looked(map(name_of, keys))

    def wake(self, name: bytes) -> None:
        self._waiters.wake(name_of(name))

    def _answer(self, reply: Any) -> Any:
        if type(reply) is ServerError:
            raise explained(reply, self.target.shown) from reply
        return reply

    def _here(self) -> _PerLoop:
        self.check_usable()
        loop = asyncio.get_running_loop()
        own = self._by_loop.get(loop)
        if own is None:
            own = _PerLoop(self, loop, self._dialler, self._waiters)
            with self._lock:
                self._by_loop[loop] = own
        return own

    def forget(self, loop: asyncio.AbstractEventLoop, own: _PerLoop) -> None:
        with self._lock:
            if self._by_loop.get(loop) is own:
                del self._by_loop[loop]


_ROUTERS: dict[Layout, Callable[[Dialler], Router]] = {
    Layout.SINGLE: SingleRouter,
    Layout.SENTINEL: SentinelRouter,
    Layout.CLUSTER: ClusterRouter,
}


class _PerLoop:
    """What one event loop has for itself: its way to the servers, and its ears."""

    def __init__(
        self, link: RedisLink, loop: asyncio.AbstractEventLoop, dialler: Dialler, waiters: Waiters
    ) -> None:
        self._link = link
        self._loop = loop
        target = dialler.target
        self.router: Router = _ROUTERS[target.layout](dialler)
        self.watch = Watch(self.router, waiters, target.shown, target.patience)
        self._guardian = LoopGuardian(loop, self._release, name="propolis-redis")

    async def close(self) -> None:
        """From any loop."""
        await self._guardian.close()

    async def _release(self) -> None:
        self._link.forget(self._loop, self)
        await self.watch.close()
        await self.router.close()


def _warn_of_plain_text(target: Target) -> None:
    """Once for each set of hosts."""
    hosts = sorted({place[0] for place in target.places if not isinstance(place, str)})
    others = [host for host in hosts if not is_loopback(host)]
    if target.tls is None and others and target.places not in _warned_of:
        _warned_of.add(target.places)
        log.warning("jobs and passwords travel to %s in plain text: write rediss://", ", ".join(others))


_warned_of: set[tuple[Place, ...]] = set()


def _bytes(part: Part) -> bytes:
    return part if isinstance(part, bytes) else str(part).encode()
