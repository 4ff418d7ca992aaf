"""Several masters have the keys: which master has which slot, and what to do when that changes."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from propolis.engines.redis.client.connection import Connection, HearsMessages, pack
from propolis.engines.redis.client.dialler import Dialler
from propolis.engines.redis.client.errors import ServerError, explained
from propolis.engines.redis.client.kept_connection import KeptConnection
from propolis.engines.redis.client.slots import slot_of
from propolis.engines.redis.client.target import Place
from propolis.errors import EngineError, EngineUnavailable, OutcomeUnknown

_chance = random.Random()  # not the one of the program, which may be seeded or watched

TURNS = 8  # redirections that one call follows before it waits
FIRST_PAUSE = 0.01  # seconds before a call that a moving slot has refused is tried again; doubled each time
LAST_PAUSE = 0.25
ASKED = 3  # masters that are asked for the map at once, besides those that the URL names
MAP_AGE = 0.2  # seconds in which the map is not asked for again

_ASKING = pack("ASKING")
_ASK_FOR_MAP = pack("CLUSTER", "SLOTS")


def slot_map(reply: Sequence[Any], asked: Place) -> dict[int, Place]:
    """The master of each slot, as CLUSTER SLOTS gives it; a node that names no host is `asked` itself."""
    found: dict[int, Place] = {}
    for first, last, master, *_ in reply:
        place = _place(master[0], master[1], asked)
        found.update(dict.fromkeys(range(first, last + 1), place))
    return found


def redirected(error: ServerError, asked: Place) -> tuple[int, Place]:
    """The slot and the place that `MOVED 3999 127.0.0.1:6381` or `ASK ...` name."""
    slot, _, where = error.detail.partition(" ")
    host, _, port = where.partition(" ")[0].rpartition(":")
    return int(slot), _place(host.encode(), int(port), asked)


def _place(host: bytes | None, port: int, asked: Place) -> Place:
    known = (host or b"").decode()
    if known in ("", "?"):
        known = asked[0]
    return known, port


class ClusterRouter:
    """A connection to each master, and the map that tells which of them to take."""

    def __init__(self, dialler: Dialler) -> None:
        self._dialler = dialler
        self._kept: dict[Place, KeptConnection] = {}
        self._map: dict[int, Place] = {}
        self._map_at = -1.0
        self._mapping: asyncio.Task[None] | None = None
        self._moving: dict[int, deque[asyncio.Future[bool]]] = {}  # slots, and who waits for each
        self._dialled: dict[Place, WeakSet[Connection]] = {}

    async def connect(self) -> None:
        await self._learn()
        await asyncio.gather(*(self._connection(place).connect() for place in self._masters()))

    async def ask(self, packed: bytes, key: bytes, *, reads: bool) -> Any:
        """While its slot moves to another master a call waits until it has arrived: see decision 0058."""
        slot = slot_of(key)
        clock = asyncio.get_running_loop().time
        ends, pause = clock() + self._dialler.target.patience, FIRST_PAUSE
        tries = False
        try:
            if slot in self._moving:
                tries = await self._turn(slot, ends)
            while True:
                reply = await self._follow(slot, packed, key, reads=reads)
                if type(reply) is not ServerError or reply.code != "TRYAGAIN":
                    if tries:
                        tries = False
                        self._has_arrived(slot)
                    return reply
                if not tries:
                    tries = await self._turn(slot, ends)
                    if not tries:
                        continue
                if clock() + pause > ends:
                    return reply
                await asyncio.sleep(pause * _chance.uniform(0.5, 1))
                pause = min(LAST_PAUSE, pause * 2)
        except TimeoutError:
            return ServerError(f"TRYAGAIN slot {slot} has not arrived")
        finally:
            if tries:
                self._call_next(slot)

    async def _follow(self, slot: int, packed: bytes, key: bytes, *, reads: bool) -> Any:
        """The reply of whoever has the slot, or its refusal to answer while the slot moves."""
        place = await self._place_of(slot)
        for _ in range(TURNS):
            try:
                reply = await self._connection(place).ask(packed, key, reads=reads)
            except OutcomeUnknown:
                self._relearn()
                raise
            except EngineUnavailable:
                place = await self._elsewhere(slot, place)
                continue
            if type(reply) is not ServerError:
                return reply
            if reply.code == "MOVED":
                _, place = redirected(reply, place)
                self._map[slot] = place
                self._relearn()
            elif reply.code == "ASK":
                return await self._ask_over_there(redirected(reply, place)[1], packed, key, reads=reads)
            elif reply.code == "READONLY":
                place = await self._elsewhere(slot, place)
            elif reply.code == "CLUSTERDOWN" and (found := await self._known_anew(slot)) != place:
                place = found  # that one has left the cluster
            else:
                return reply
        return ServerError(f"TRYAGAIN slot {slot} was elsewhere {TURNS} times")  # they do not agree yet

    async def _ask_over_there(self, place: Place, packed: bytes, key: bytes, *, reads: bool) -> Any:
        """The slot is moving, and what we name is there for a caller that sends ASKING just before."""
        try:
            reply = await self._connection(place).ask(packed, key, reads=reads, before=_ASKING)
        except EngineUnavailable as error:
            return ServerError(f"TRYAGAIN {error}")
        if type(reply) is ServerError and reply.code in ("MOVED", "ASK", "READONLY"):
            return ServerError(f"TRYAGAIN {reply}")  # it has not begun to take the slot, or has a new master
        return reply

    async def everywhere(self, packed: bytes) -> list[Any]:
        if not self._map:
            await self._learn()
        try:
            return await self._ask_masters(packed)
        except EngineUnavailable:
            await self._learn()
            return await self._ask_masters(packed)

    async def _ask_masters(self, packed: bytes) -> list[Any]:
        masters = self._masters()
        return await asyncio.gather(
            *(self._connection(place).ask(packed, b"", reads=True) for place in masters)
        )

    async def dial(self, key: bytes, *, heard: HearsMessages | None = None) -> Connection:
        place = await self._place_of(slot_of(key))
        try:
            connection = await self._dialler.dial(place, heard=heard)
        except EngineUnavailable:
            place = await self._elsewhere(slot_of(key), place)
            connection = await self._dialler.dial(place, heard=heard)
        self._dialled.setdefault(place, WeakSet()).add(connection)
        return connection

    async def close(self) -> None:
        if (mapping := self._mapping) is not None:
            mapping.cancel()
            await asyncio.wait({mapping})
        while self._kept:
            await self._kept.popitem()[1].close()

    # --- slots that move -----------------------------------------------------------------
    #
    # Those who wait for one stand in line, so that their calls keep their order; one of them tries for all.

    async def _turn(self, slot: int, ends: float) -> bool:
        """True for who has to try, False once somebody got through; `TimeoutError` at the end of patience."""
        line = self._moving.get(slot)
        if line is None:
            self._moving[slot] = deque()
            return True
        mine: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        line.append(mine)
        try:
            async with asyncio.timeout_at(ends):
                return await mine
        except BaseException:
            if mine.done() and not mine.cancelled() and mine.result():
                self._call_next(slot)
            raise

    def _call_next(self, slot: int) -> None:
        line = self._moving[slot]
        while line:
            if not (first := line.popleft()).done():
                first.set_result(True)
                return
        del self._moving[slot]

    def _has_arrived(self, slot: int) -> None:
        """All go on.  Whoever comes before the last of them has left stands behind them."""
        line = self._moving[slot]
        if not line:
            del self._moving[slot]
            return
        while line:
            if not (first := line.popleft()).done():
                first.set_result(False)
        asyncio.get_running_loop().call_soon(self._has_arrived, slot)

    # --- the map -------------------------------------------------------------------------

    def _connection(self, place: Place) -> KeptConnection:
        kept = self._kept.get(place)
        if kept is None:

            async def find() -> Place:
                return place

            kept = self._kept[place] = KeptConnection(self._dialler, find)
        return kept

    def _masters(self) -> list[Place]:
        return sorted(set(self._map.values()), key=str)

    async def _place_of(self, slot: int) -> Place:
        place = self._map.get(slot)
        if place is None:
            await self._learn()
            place = self._map.get(slot)
        if place is None:
            raise EngineUnavailable(
                f"{self._dialler.target.shown}: slot {slot} has no master: nothing was changed"
            )
        return place

    async def _elsewhere(self, slot: int, place: Place) -> Place:
        """Where the slot is now that `place` does not answer or write; raises if it is nowhere else."""
        found = await self._known_anew(slot)
        if found == place:
            raise EngineUnavailable(
                f"{self._dialler.target.shown}: the master of slot {slot} does not answer, and no other has "
                f"taken its place yet: nothing was changed"
            )
        return found

    async def _known_anew(self, slot: int) -> Place:
        await self._learn()
        return await self._place_of(slot)

    async def _learn(self) -> None:
        """Bring the map up to date; all who come meanwhile share it."""
        await asyncio.shield(self._relearn())

    def _relearn(self) -> asyncio.Task[None]:
        if self._mapping is None:
            self._mapping = asyncio.get_running_loop().create_task(
                self._map_anew(), name="propolis-redis-map"
            )
            self._mapping.add_done_callback(_heed)
        return self._mapping

    async def _map_anew(self) -> None:
        try:
            age = asyncio.get_running_loop().time() - self._map_at
            if self._map_at >= 0 and age < MAP_AGE:
                await asyncio.sleep(MAP_AGE - age)
            await self._ask_for_map()
            self._map_at = asyncio.get_running_loop().time()
        finally:
            self._mapping = None

    async def _ask_for_map(self) -> None:
        """From the first that answers: one that hangs must not keep us from hearing of its successor."""
        masters = self._masters()
        asked = {*_chance.sample(masters, min(len(masters), ASKED)), *self._dialler.target.places}
        asking = [asyncio.ensure_future(self._map_of(place)) for place in asked]
        troubles = []
        try:
            for each in asyncio.as_completed(asking):
                try:
                    await self._adopt(await each)
                    return
                except EngineError as error:
                    troubles.append(str(error))
        finally:
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        raise EngineUnavailable(
            f"{self._dialler.target.shown}: nobody knows the cluster: {'; '.join(troubles)}"
        )

    async def _map_of(self, place: Place) -> dict[int, Place]:
        reply = await self._connection(place).ask(_ASK_FOR_MAP, b"", reads=True)
        if type(reply) is ServerError:
            raise explained(reply, self._dialler.target.shown)
        if not reply:
            raise EngineUnavailable(f"{place} knows no slots")
        return slot_map(reply, place)

    async def _adopt(self, found: dict[int, Place]) -> None:
        self._map = found
        masters = set(found.values())
        for place in [place for place, kept in self._kept.items() if place not in masters and kept.idle]:
            await self._kept.pop(place).close()
        for place in self._dialled.keys() - masters:
            for connection in self._dialled.pop(place):
                connection.abort("it is no master any more")  # one that has left would be silent for ever


def _heed(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()  # those who waited for it have heard it
