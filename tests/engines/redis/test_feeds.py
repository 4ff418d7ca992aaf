"""Feeds on Redis: what full memory does to them, and how many connections they wait on."""

from __future__ import annotations

import asyncio

from propolis.engines.address import Address
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.engine import RedisEngine
from propolis.testing.servers.redis import redis


async def test_where_memory_is_full_a_publish_is_dropped_and_counted() -> None:
    with redis() as server:
        engine = await RedisEngine(target_of(Address(server.url))).open()
        last = await engine.publish("f", [b"1"])
        server.ask("CONFIG", "SET", "maxmemory", "1mb")
        assert await engine.publish("f", [b"2", b"3"]) is None
        assert await engine.publish("new", [b"4"]) is None
        assert engine.dropped == 3
        pages = await engine.follow({"f": 0, "new": 0})
        assert ([entry.number for entry in pages["f"].entries], pages["new"].last) == ([last], 0)

        server.ask("CONFIG", "SET", "maxmemory", "0")
        assert await engine.publish("f", [b"5"]) is not None
        pages = await engine.follow({"f": last})
        assert ([entry.value for entry in pages["f"].entries], pages["f"].gap) == ([b"5"], False)
        await engine.close()


async def test_one_connection_serves_all_waits_that_follow_one_another() -> None:
    with redis() as server:
        engine = await RedisEngine(target_of(Address(server.url))).open()
        for n in range(5):
            await engine.follow({f"f{n}": 0}, wait=0.01)
        assert server.info("clients")["connected_clients"] == "3"  # one for calls, one to wait, and ours

        waiting = [asyncio.create_task(engine.follow({"f": 0}, wait=600)) for _ in range(3)]
        while int(server.info("clients")["blocked_clients"]) < 3:
            await asyncio.sleep(0.01)
        waiting.pop().cancel()
        await engine.publish("f", [b"1"])
        found = await asyncio.gather(*waiting)
        assert [[entry.value for entry in pages["f"].entries] for pages in found] == [[b"1"]] * 2
        await engine.close()
