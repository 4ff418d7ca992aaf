"""One server has all the keys, and sentinels know which."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

from propolis.engines.redis.client.connection import Connection, Part, pack
from propolis.engines.redis.client.dialler import LOST, Dialler
from propolis.engines.redis.client.errors import ServerError, explained
from propolis.engines.redis.client.router import SingleRouter
from propolis.engines.redis.client.target import Place
from propolis.errors import EngineError, EngineUnavailable

PING_EVERY = 15.0  # seconds of silence after which we make sure that a sentinel is still there
FOLLOW_AGAIN = 1.0
_SWITCHED = "+switch-master"


class SentinelRouter(SingleRouter):
    """Asks for the master whenever it connects, and leaves it as soon as the sentinels name another.

    A master that was away may come back and take itself for one for another ten seconds: what it
    acknowledges then is lost.  So the sentinels are listened to as well.
    """

    def __init__(self, dialler: Dialler) -> None:
        super().__init__(dialler)
        self._following: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
            self._following = None
        await super().close()

    async def _find(self) -> Place:
        if self._following is None:
            self._following = asyncio.get_running_loop().create_task(
                self._follow(), name="propolis-redis-sentinel"
            )
        return await self._master()

    async def _master(self) -> Place:
        """The first sentinel that answers knows where the master is."""
        places = self._dialler.target.places
        troubles = []
        for place in random.sample(places, len(places)):
            try:
                return await self._ask(place)
            except EngineError as error:
                troubles.append(str(error))
        shown = self._dialler.target.shown
        raise EngineUnavailable(f"{shown}: no sentinel knows the master: {'; '.join(troubles)}")

    async def _ask(self, sentinel: Place) -> Place:
        name = self._dialler.target.master
        connection, answer = await self._reach(sentinel, ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", name))
        await connection.close()
        if answer is None:
            raise EngineUnavailable(f"{connection.shown} knows no master {name!r}")
        host, port = answer
        return host.decode(), int(port)

    async def _reach(
        self, sentinel: Place, command: tuple[Part, ...], switched: asyncio.Event | None = None
    ) -> tuple[Connection, list[bytes] | None]:
        login = self._dialler.target.sentinel_login.command()
        greeting = [command] if login is None else [login, command]
        heard = None if switched is None else lambda _: switched.set()
        connection, replies = await self._dialler.reach(sentinel, greeting, heard)
        for reply in replies:
            if isinstance(reply, ServerError):
                connection.abort(str(reply))
                raise explained(reply, connection.shown)
        return connection, replies[-1]

    async def _follow(self) -> None:
        """For ever; while no sentinel can be listened to, connecting anew is what finds the master."""
        while True:
            with suppress(EngineError, *LOST):
                await self._listen(random.choice(self._dialler.target.places))
            await asyncio.sleep(FOLLOW_AGAIN * random.uniform(0.5, 1.5))

    async def _listen(self, sentinel: Place) -> None:
        switched = asyncio.Event()
        connection, _ = await self._reach(sentinel, ("SUBSCRIBE", _SWITCHED), switched)
        try:
            while connection.alive:
                await self._compare(sentinel)
                switched.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(PING_EVERY):
                        await connection.gone_or(switched)
                if not switched.is_set():
                    await connection.send(pack("PING"))
        finally:
            await connection.close()

    async def _compare(self, sentinel: Place) -> None:
        if self._kept.place is not None and await self._ask(sentinel) != self._kept.place:
            self._kept.leave("the sentinels name another master")
