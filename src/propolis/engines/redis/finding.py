"""Jobs are listed bite by bite, in one shard or in several: see decision 0065.

Where there are few they are listed in the order of their puts, and a cursor is the number of a put.  Where
there are more they are walked through where they are, shard by shard.  What stands at doors comes last:
strangers pushed it, and nobody has taken it in yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from propolis.core.job import JobInfo, State
from propolis.core.protocols import Filter, Page
from propolis.engines.redis.codec import seen_at_door

AT_DOORS = 500  # pushes that one call looks at
_PLACES = 1 << 64  # cursors from here on are places: all others are numbers of puts


class Walk(Struct, tag="walk", array_like=True, frozen=True):
    """Where to go on in a shard, as find.lua has it, with the jobs that were put after a cursor."""

    shard: int
    after: int
    queue: bytes = b""
    what: int = 1
    at: bytes = b""
    last: bytes = b""


class Door(Struct, tag="door", array_like=True, frozen=True):
    """Behind so many at the door of a queue; -1: behind all of them."""

    shard: int
    queue: str = ""
    passed: int = -1


Place = Walk | Door


class Lists(Protocol):
    """One shard, or all of an engine that has none."""

    @property
    def number(self) -> int: ...

    async def now(self) -> datetime: ...

    async def first_matching(self, where: Filter, limit: int, after: int) -> list[tuple[int, bytes]] | None:
        """The numbers and the ids of those that match and were put first; None where there are too many."""
        ...

    async def walk(
        self, where: Filter, limit: int, after: int, place: Walk
    ) -> tuple[list[bytes], Walk | None]:
        """The ids of some that match, put after that number, and where to go on (None: that was all)."""
        ...

    async def job_infos(self, job_ids: Sequence[bytes | str]) -> list[JobInfo]: ...

    async def doors(self, after: str, only: str | None) -> tuple[str, list[str]]:
        """Of some queues after this one: the last ('': no more), and those with something at doors."""
        ...

    async def pushed(self, queue: str, first: int) -> list[bytes]:
        """A bite of that, without those that come before the `first`."""
        ...


async def find_in(shards: Sequence[Lists], count: int, where: Filter, limit: int, after: int | None) -> Page:
    """In these of `count` shards, in the order of their numbers.

    The number of a put is a cursor when it was multiplied by `count` and its shard was added: numbers agree
    among shards as far as one put can have seen another.
    """
    if limit < 1:
        return Page([], None)
    place: Place
    if after is None or after < _PLACES:
        page = await _first_page(shards, count, where, limit, after or 0)
        if page is not None:
            return page if page.after is not None else await _with_doors(page, shards, where, limit)
        place = Walk(shards[0].number, after or 0)
    else:
        place = _place_of(after)
    if isinstance(place, Door):
        return await _at_doors(shards, where, limit, place)
    return await _walked(shards, count, where, limit, place)


async def _first_page(
    shards: Sequence[Lists], count: int, where: Filter, limit: int, after: int
) -> Page | None:
    async def matching(shard: Lists) -> list[tuple[int, bytes]] | None:
        return await shard.first_matching(where, limit + 1, _number(after, count, shard))

    found: list[tuple[int, bytes]] = []
    for shard, each in zip(shards, await asyncio.gather(*map(matching, shards)), strict=True):
        if each is None:
            return None
        found += [(seq * count + shard.number, job_id) for seq, job_id in each]
    found.sort()
    page = found[:limit]
    while page and len(found) > len(page) and found[len(page)][0] == page[-1][0]:
        page.append(found[len(page)])  # a job that has moved may have the number of another
    shown: dict[str, JobInfo] = {}
    for shard in shards:
        ids = [job_id for cursor, job_id in page if cursor % count == shard.number]
        shown |= {info.id: info for info in await shard.job_infos(ids)}
    infos = [shown[job_id.decode()] for _, job_id in page if job_id.decode() in shown]
    return Page(infos, page[-1][0] if len(found) > len(page) else None)


async def _walked(shards: Sequence[Lists], count: int, where: Filter, limit: int, place: Walk) -> Page:
    shard = _from(shards, place)[0]
    ids, more = await shard.walk(where, limit, _number(place.after, count, shard), place)
    page = Page(await shard.job_infos(ids), None)
    following = _from(shards, replace(place, shard=shard.number + 1))
    if more is None and following:
        more = Walk(following[0].number, place.after)
    if more is not None:
        return Page(page.jobs, _cursor(more))
    return await _with_doors(page, shards, where, limit)


async def _with_doors(page: Page, shards: Sequence[Lists], where: Filter, limit: int) -> Page:
    """What stands at doors comes after the last page of what was taken in."""
    if where.state not in (None, State.READY) or where.reason is not None or where.scheduled:
        return page
    more = await _at_doors(shards, where, limit - len(page.jobs), Door(shards[0].number))
    return Page([*page.jobs, *more.jobs], more.after)


async def _at_doors(shards: Sequence[Lists], where: Filter, limit: int, place: Door) -> Page:
    """A bite from that place on; what is taken in meanwhile moves the others nearer."""
    [shard, *others] = _from(shards, place)
    now = await shard.now()
    found: list[JobInfo] = []
    left = AT_DOORS

    async def passed(queue: str, behind: int) -> int | None:
        """Look at one door; gives where to go on, None behind all of it."""
        nonlocal left
        while left > 0:
            bite = await shard.pushed(queue, behind)
            if not bite:
                return None
            for text in bite:
                info = seen_at_door(queue, text, now)
                if where.task in (None, info.task) and where.batch in (None, info.batch):
                    if len(found) >= limit:
                        return behind
                    found.append(info)
                behind, left = behind + 1, left - 1
        return behind

    if place.passed >= 0 and (behind := await passed(place.queue, place.passed)) is not None:
        return Page(found, _cursor(Door(shard.number, place.queue, behind)))
    last, queues = await shard.doors(place.queue, where.queue)
    for queue in queues:
        if (behind := await passed(queue, 0)) is not None:
            return Page(found, _cursor(Door(shard.number, queue, behind)))
    if last:
        return Page(found, _cursor(Door(shard.number, last)))
    at_others = await asyncio.gather(*(other.doors("", where.queue) for other in others))
    following = [other for other, at_other in zip(others, at_others, strict=True) if any(at_other)]
    return Page(found, _cursor(Door(following[0].number)) if following else None)


def _from(shards: Sequence[Lists], place: Place) -> list[Lists]:
    return [shard for shard in shards if shard.number >= place.shard]


def _number(cursor: int, count: int, shard: Lists) -> int:
    """The number of a put in this shard, before all whose cursors are greater."""
    return max(0, (cursor - shard.number) // count)


def _cursor(place: Place) -> int:
    """Whole numbers are what pages have, and they may have any length."""
    return _PLACES + int.from_bytes(b"\1" + msgspec.msgpack.encode(place))


def _place_of(cursor: int) -> Place:
    packed = cursor - _PLACES
    return _PLACE.decode(packed.to_bytes((packed.bit_length() + 7) // 8)[1:])


_PLACE: msgspec.msgpack.Decoder[Place] = msgspec.msgpack.Decoder(Place)
