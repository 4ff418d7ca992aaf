"""Redis: keys under a prefix of their own on the server that is named, removed afterwards."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from propolis.bench.target import BUNDLE, BenchPlace, BenchTarget, Raw, envelope, fresh_name, with_option
from propolis.engines.address import Address
from propolis.engines.redis.client.link import Link, RedisLink
from propolis.engines.redis.client.script import LuaScript
from propolis.engines.redis.client.target import target_of
from propolis.errors import PropolisError

PUT = """
-- KEYS: the list, the hash of bodies, the last id.  ARGV: bodies.
local first = redis.call('INCRBY', KEYS[3], #ARGV) - #ARGV
for place, body in ipairs(ARGV) do
    redis.call('HSET', KEYS[2], first + place, body)
    redis.call('LPUSH', KEYS[1], first + place)
end
return #ARGV
"""
EXCHANGE = """
-- KEYS: the list, the hash of bodies, the leases.  ARGV: how many to lease, then the ids that are done.
if #ARGV > 1 then
    redis.call('ZREM', KEYS[3], unpack(ARGV, 2))
    redis.call('HDEL', KEYS[2], unpack(ARGV, 2))
end
local ids = redis.call('RPOP', KEYS[1], ARGV[1])
if not ids then return {} end
local ends = redis.call('TIME')[1] + 15
local scores = {}
for place, id in ipairs(ids) do
    scores[2 * place - 1] = ends
    scores[2 * place] = id
end
redis.call('ZADD', KEYS[3], unpack(scores))
return {ids, redis.call('HMGET', KEYS[2], unpack(ids))}
"""
OWN = ("prefix",)
INFO_FIELDS = ("redis_version", "valkey_version", "maxmemory_policy", "aof_enabled")


class RedisTarget:
    @asynccontextmanager
    async def place(self, url: str) -> AsyncIterator[BenchPlace]:
        name = fresh_name()
        try:
            yield BenchPlace(with_option(url, "prefix", _prefix(name)), name)
        finally:
            async with _linked(url) as link:
                await _remove_keys(link, _prefix(name))

    async def raw(self, place: BenchPlace, jobs: int, payload: str) -> Raw:
        """Settle a bundle and lease the next in one script, with bodies in a hash."""
        put, exchange = LuaScript("raw_put", PUT.encode()), LuaScript("raw_exchange", EXCHANGE.encode())
        line, bodies, ids, leases = (
            f"{_prefix(place.queue)}raw:{part}".encode() for part in ("line", "bodies", "id", "leases")
        )
        async with _linked(place.url) as link:
            bundle = [envelope(payload)] * 1000
            began = time.perf_counter()
            for start in range(0, jobs, 1000):
                await link.call(put, [line, bodies, ids], bundle[: jobs - start])
            filled = time.perf_counter()
            done: list[bytes] = []
            while answer := await link.call(exchange, [line, bodies, leases], [BUNDLE, *done]):
                done = answer[0]
            ended = time.perf_counter()
        return Raw(jobs / (filled - began), jobs / (ended - filled))

    async def about(self, place: BenchPlace) -> dict[str, str]:
        async with _linked(place.url) as link:
            info = bytes(await link.command("INFO")).decode()
        return dict(re.findall(rf"^({'|'.join(INFO_FIELDS)}):(.*?)\r?$", info, re.MULTILINE))


def target() -> BenchTarget:
    return RedisTarget()


def _prefix(name: str) -> str:
    return f"{{{name}}}:"  # one slot, also on a cluster


@asynccontextmanager
async def _linked(url: str) -> AsyncIterator[Link]:
    link = RedisLink(target_of(Address(url), own=OWN))
    await link.open()
    try:
        yield link
    finally:
        await link.close()


async def _remove_keys(link: Link, prefix: str) -> None:
    cursor: Any = b"0"
    pattern = re.sub(r"([\[\]?*\\])", r"\\\1", prefix) + "*"
    while True:
        try:
            cursor, keys = await link.command("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
        except PropolisError:  # a cluster has no SCAN over all of it
            return
        if keys:
            await link.command("UNLINK", *keys)
        if cursor == b"0":
            return
