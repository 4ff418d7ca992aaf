"""Keys spread over several masters: who has which slot, and what to do when that changes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from skep.brokers.redis_connection import Connection, pack
from skep.brokers.redis_errors import ServerError, explained
from skep.brokers.redis_lane import Dialler, Lane
from skep.brokers.redis_slots import slot_of
from skep.brokers.redis_target import Place
from skep.errors import EngineError, EngineUnavailable, OutcomeUnknown

_chance = random.Random()  # not the one of the program, which may be seeded or watched

TURNS = 8  # redirections that one call follows
TRY_AGAIN = 0.02  # seconds, while the keys of one call are partly here and partly there
ASKED = 3  # masters that are asked for the map at once, besides those that the URL names
MAP_AGE = 0.2  # seconds in which the map is not asked for again

_ASKING = pack("ASKING")
_ASK_FOR_MAP = pack("CLUSTER", "SLOTS")


def slot_map(reply: Sequence[Any], asked: Place) -> dict[int, Place]:
    """The master of each slot, as CLUSTER SLOTS tells it; a node that names no host is `asked` itself."""
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


class ClusterLanes:
    """A lane to each master, and the map that tells which of them to take."""

    def __init__(self, dialler: Dialler) -> None:
        self._dialler = dialler
        self._lanes: dict[Place, Lane] = {}
        self._map: dict[int, Place] = {}
        self._map_at = -1.0
        self._mapping: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        await self._learn()
        await asyncio.gather(*(self._lane(place).connect() for place in self._masters()))

    async def ask(self, packed: bytes, key: bytes, *, reads: bool) -> Any:
        slot = slot_of(key)
        place = await self._place_of(slot)
        for _ in range(TURNS):
            try:
                reply = await self._lane(place).ask(packed, key, reads=reads)
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
                _, place = redirected(reply, place)
                # A key on its way to another master is there for whoever says so, in the same breath.
                return await self._lane(place).ask(packed, key, reads=reads, before=_ASKING)
            elif reply.code == "TRYAGAIN":
                await asyncio.sleep(TRY_AGAIN * _chance.uniform(0.5, 1.5))
            elif reply.code == "READONLY":
                place = await self._elsewhere(slot, place)
            else:
                return reply
        raise EngineUnavailable(
            f"{self._dialler.target.shown}: slot {slot} was elsewhere {TURNS} times: nothing was changed"
        )

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
        return await asyncio.gather(*(self._lane(place).ask(packed, b"", reads=True) for place in masters))

    async def dial(self, key: bytes, *, heard: Callable[[bytes], None] | None = None) -> Connection:
        place = await self._place_of(slot_of(key))
        try:
            return await self._dialler.dial(place, heard=heard)
        except EngineUnavailable:
            return await self._dialler.dial(await self._elsewhere(slot_of(key), place), heard=heard)

    async def close(self) -> None:
        if (mapping := self._mapping) is not None:
            mapping.cancel()
            await asyncio.wait({mapping})
        while self._lanes:
            await self._lanes.popitem()[1].close()

    # --- the map -------------------------------------------------------------------------

    def _lane(self, place: Place) -> Lane:
        lane = self._lanes.get(place)
        if lane is None:

            async def find() -> Place:
                return place

            lane = self._lanes[place] = Lane(self._dialler, find)
        return lane

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
        """Who has the slot now that `place` does not answer, or does not write; raises if nobody else has."""
        await self._learn()
        found = await self._place_of(slot)
        if found == place:
            raise EngineUnavailable(
                f"{self._dialler.target.shown}: the master of slot {slot} does not answer, and no other has "
                f"taken its place yet: nothing was changed"
            )
        return found

    async def _learn(self) -> None:
        """Bring the map up to date; whoever comes meanwhile shares it."""
        await asyncio.shield(self._relearn())

    def _relearn(self) -> asyncio.Task[None]:
        if self._mapping is None:
            self._mapping = asyncio.get_running_loop().create_task(self._map_anew(), name="skep-redis-map")
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
        """From whoever is first to tell: one that hangs must not keep us from hearing of its successor."""
        masters = self._masters()
        asked = {*_chance.sample(masters, min(len(masters), ASKED)), *self._dialler.target.places}
        asking = [asyncio.ensure_future(self._map_of(place)) for place in asked]
        told = []
        try:
            for each in asyncio.as_completed(asking):
                try:
                    await self._adopt(await each)
                    return
                except EngineError as error:
                    told.append(str(error))
        finally:
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        raise EngineUnavailable(f"{self._dialler.target.shown}: nobody knows the cluster: {'; '.join(told)}")

    async def _map_of(self, place: Place) -> dict[int, Place]:
        reply = await self._lane(place).ask(_ASK_FOR_MAP, b"", reads=True)
        if type(reply) is ServerError:
            raise explained(reply, self._dialler.target.shown)
        if not reply:
            raise EngineUnavailable(f"{place} knows no slots")
        return slot_map(reply, place)

    async def _adopt(self, found: dict[int, Place]) -> None:
        self._map = found
        masters = set(found.values())
        for place in [place for place, lane in self._lanes.items() if place not in masters and lane.idle]:
            await self._lanes.pop(place).close()


def _heed(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()  # whoever waited for it has heard it
