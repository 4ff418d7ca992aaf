"""What servers say of how they keep data."""

from __future__ import annotations

import pytest

from skep.address import Address
from skep.broker import Durability
from skep.brokers.redis_link import RedisLink, target_of
from skep.brokers.redis_safety import Safety, check_safety, durability_of, read_safety
from skep.errors import EngineError, UnsafeStorage
from skep.testing.redis_servers import redis


async def safety_at(url: str) -> Safety:
    link = RedisLink(target_of(Address(url)))
    await link.open()
    try:
        [found] = await read_safety(link)
    finally:
        await link.close()
    return found


async def test_settings_are_read_from_the_server() -> None:
    with redis(durable=True, settings={"maxmemory": "64mb"}) as server:
        found = await safety_at(server.url)
        assert found.version >= (6, 2)
        assert (found.appendonly, found.appendfsync) == (True, "always")
        assert (found.maxmemory, found.policy) == (64 << 20, "noeviction")
        assert found.durability is Durability.POWER

        server.ask("CONFIG", "SET", "appendfsync", "everysec")
        assert (await safety_at(server.url)).durability is Durability.PROCESS
        server.ask("CONFIG", "SET", "appendonly", "no")
        assert (await safety_at(server.url)).durability is Durability.MEMORY


async def test_where_config_is_forbidden_info_tells_what_it_can_and_the_rest_is_unknown() -> None:
    with redis(durable=True) as server:
        server.ask("ACL", "SETUSER", "default", "-config")
        found = await safety_at(server.url)
        assert (found.appendonly, found.appendfsync, found.policy) == (True, None, "noeviction")
        assert found.durability is Durability.PROCESS
        assert "appendfsync unknown" in str(found)

        server.ask("ACL", "SETUSER", "default", "-info")
        assert await safety_at(server.url) == Safety()


async def test_a_server_that_throws_jobs_away_is_refused() -> None:
    """F26."""
    with redis(settings={"maxmemory-policy": "allkeys-lru"}) as server:
        found = await safety_at(server.url)
        with pytest.raises(UnsafeStorage, match="noeviction"):
            check_safety(found, server.url)


def test_a_server_that_is_too_old_is_refused_and_an_unknown_one_is_not() -> None:
    with pytest.raises(EngineError, match=r"6\.2"):
        check_safety(Safety(version=(6, 0, 16)), "redis://box")
    check_safety(Safety(), "redis://box")


def test_the_weakest_server_decides_unless_copies_are_waited_for() -> None:
    strong, weak = Safety((7,), True, "always"), Safety((7,), True, "everysec")
    assert durability_of([strong, strong], 0) is Durability.POWER
    assert durability_of([strong, weak], 0) is Durability.PROCESS
    assert durability_of([strong, weak], 1) is Durability.NODE
    assert durability_of([], 0) is Durability.MEMORY
