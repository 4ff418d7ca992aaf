"""The link to Redis while masters go: sentinels, clusters, and copies that are waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import hiredis
import pytest
import pytest_asyncio

from propolis.engines.address import Address
from propolis.engines.redis.client.link import RedisLink
from propolis.engines.redis.client.script import LuaScript
from propolis.engines.redis.client.slots import slot_of
from propolis.engines.redis.client.target import target_of
from propolis.errors import EngineError, EngineUnavailable, OutcomeUnknown
from propolis.testing.servers.redis import Cluster, RedisServer, Sentinels, redis_cluster, redis_sentinels

ADD = LuaScript("add", b"return redis.call('RPUSH', KEYS[1], ARGV[1])")
ONCE = LuaScript("once", b"return redis.call('SETNX', KEYS[1], ARGV[1])")
SOON = 30.0


@asynccontextmanager
async def link_to(url: str, **options: object) -> AsyncIterator[RedisLink]:
    options = {"patience": "2s", "connect_within": "1s"} | options
    text = "&".join(f"{name}={value}" for name, value in options.items())
    link = RedisLink(target_of(Address(f"{url}?{text}")))
    await link.open()
    try:
        yield link
    finally:
        await link.close()


async def until(seen: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(SOON):
        while not await seen():
            await asyncio.sleep(0.02)


async def add_all(link: RedisLink, keys: list[bytes], numbers: range) -> tuple[set[int], set[int]]:
    """Those that were acknowledged and those whose outcome is unknown; the others were tried again."""
    sure, unknown = set(), set()

    async def add(n: int) -> None:
        while True:
            try:
                await link.call(ADD, [keys[n % len(keys)]], [n])
            except OutcomeUnknown:
                unknown.add(n)
                return
            except EngineUnavailable:
                await asyncio.sleep(0.05)
            else:
                sure.add(n)
                return

    async with asyncio.timeout(SOON):
        for start in range(numbers.start, numbers.stop, 10):
            await asyncio.gather(*(add(n) for n in range(start, min(start + 10, numbers.stop))))
            await asyncio.sleep(0.002)
    return sure, unknown


async def kept(link: RedisLink, keys: list[bytes]) -> list[int]:
    return [int(n) for key in keys for n in await link.command("LRANGE", key, 0, -1, reads=True)]


# --- sentinels ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def started_sentinels() -> Iterator[Sentinels]:
    with redis_sentinels() as servers:
        yield servers


@pytest_asyncio.fixture
async def sentinels(started_sentinels: Sentinels) -> Sentinels:
    await until(lambda: are_settled(started_sentinels))
    return started_sentinels


def master_and_replica(sentinels: Sentinels) -> tuple[RedisServer, RedisServer]:
    one, two = sentinels.master, sentinels.replica
    return (one, two) if one.info("replication")["role"] == "master" else (two, one)


async def test_the_sentinels_name_the_master(sentinels: Sentinels) -> None:
    master, _ = master_and_replica(sentinels)
    async with link_to(sentinels.url) as link:
        assert b"role:master" in await link.command("INFO", "replication")
        assert f"tcp_port:{master.port}".encode() in await link.command("INFO", "server")


async def test_what_no_sentinel_knows_is_told(sentinels: Sentinels) -> None:
    url = sentinels.url.replace("/propolis/", "/other/")
    with pytest.raises(EngineUnavailable, match="knows no master 'other'"):
        async with link_to(url):
            pass
    with pytest.raises(EngineUnavailable, match="no sentinel"):
        async with link_to("redis+sentinel://127.0.0.1:1/propolis"):
            pass


async def test_copies_that_are_waited_for_are_confirmed_or_the_outcome_is_unknown(
    sentinels: Sentinels, prefix: str
) -> None:
    """F24: level `node`."""
    _, replica = master_and_replica(sentinels)
    key = prefix.encode()
    async with link_to(sentinels.url, copies=1, copied_within="300ms") as link:
        await asyncio.gather(*(link.call(ADD, [key], [n]) for n in range(100)))
        assert replica.ask("LLEN", prefix) == 100

        replica.freeze()
        try:
            with pytest.raises(OutcomeUnknown, match="0 of 1 replicas"):
                await link.call(ADD, [key], [100])
            assert await link.command("LLEN", prefix, reads=True) == 101
        finally:
            replica.thaw()
        await until(lambda: is_confirmed(link, key))


async def test_a_repeated_call_that_finds_its_work_done_waits_for_the_copies_of_that_work(
    sentinels: Sentinels, prefix: str
) -> None:
    """F24: it writes nothing itself, and on a new connection WAIT would be content with any replica."""
    _, replica = master_and_replica(sentinels)
    async with link_to(sentinels.url, copies=1, copied_within="300ms") as link:
        await until(lambda: is_confirmed(link, f"{prefix}:list".encode()))
        replica.freeze()
        try:
            for _ in range(2):
                with pytest.raises(OutcomeUnknown, match="0 of 1 replicas"):
                    await link.call(ONCE, [prefix.encode()], ["job"])
        finally:
            replica.thaw()
        await until(lambda: is_confirmed(link, f"{prefix}:list".encode()))
        assert await link.call(ONCE, [prefix.encode()], ["job"]) == 0
        assert replica.ask("GET", prefix) == "job"


async def is_confirmed(link: RedisLink, key: bytes) -> bool:
    try:
        await link.call(ADD, [key], [0])
    except EngineError:
        return False
    return True


async def test_one_question_for_copies_serves_all_that_leaves_in_one_write(
    sentinels: Sentinels, prefix: str
) -> None:
    master, _ = master_and_replica(sentinels)
    async with link_to(sentinels.url, copies=1) as link:
        master.ask("CONFIG", "RESETSTAT")
        await asyncio.gather(*(link.call(ADD, [prefix.encode()], [n]) for n in range(200)))
        asked = master.info("commandstats")["cmdstat_wait"]
    # In how many writes they leave depends on how busy the machine is, but never each by itself.
    assert int(asked.partition("calls=")[2].partition(",")[0]) <= 20


async def test_a_replica_that_was_the_master_is_left_for_the_new_one(
    sentinels: Sentinels, prefix: str
) -> None:
    """READONLY: a planned failover demotes the master under our connection."""
    async with link_to(sentinels.url) as link:
        master, heir = master_and_replica(sentinels)
        await link.command("SET", prefix, 1)
        sentinels.sentinels[0].ask("SENTINEL", "FAILOVER", "propolis")
        await until(lambda: is_replica(master))
        await until(lambda: is_confirmed(link, f"{prefix}:list".encode()))

        assert f"tcp_port:{master.port}".encode() not in await link.command("INFO", "server")
        assert await link.command("GET", prefix) == b"1"
    await settle(sentinels, heir)


async def is_replica(server: RedisServer) -> bool:
    return server.info("replication")["role"] == "slave"


async def settle(sentinels: Sentinels, master: RedisServer) -> None:
    """Make the other one a replica now.  The sentinels would do so as well, ten seconds later."""
    [other] = {sentinels.master, sentinels.replica} - {master}
    other.ask("REPLICAOF", "127.0.0.1", master.port)
    await until(lambda: are_settled(sentinels))


async def are_settled(sentinels: Sentinels) -> bool:
    """The old master has come back as a replica that follows, and the sentinels know it."""
    try:
        _, replica = master_and_replica(sentinels)
        up = replica.info("replication").get("master_link_status") == "up"
        seen = [sentinel.ask("INFO", "sentinel") for sentinel in sentinels.sentinels]
    except (OSError, hiredis.HiredisError):
        return False
    return up and all("status=ok" in text for text in seen)


async def test_a_master_that_comes_back_is_left_as_soon_as_the_sentinels_name_another(
    sentinels: Sentinels, prefix: str
) -> None:
    """F24: it takes itself for the master for another ten seconds, and what it acknowledges is lost."""
    master, heir = master_and_replica(sentinels)
    async with link_to(sentinels.url) as link:
        assert await until_works(link, prefix) == master.port
        master.freeze()
        await until(lambda: is_master(heir))
        master.thaw()
        async with asyncio.timeout(6):
            while await until_works(link, prefix) != heir.port:
                await asyncio.sleep(0.05)
    await settle(sentinels, heir)


async def until_works(link: RedisLink, key: str) -> int:
    """The port of the server that answers."""
    await until(lambda: works(link, key))
    text = await link.command("INFO", "server", reads=True)
    return int(text.partition(b"tcp_port:")[2].split()[0])


async def is_master(server: RedisServer) -> bool:
    return server.info("replication")["role"] == "master"


async def test_with_copies_nothing_acknowledged_is_lost_when_the_master_is_killed(
    sentinels: Sentinels, prefix: str
) -> None:
    """F24 by SIGKILL, level `node`."""
    keys = [prefix.encode()]
    master, heir = master_and_replica(sentinels)
    async with link_to(sentinels.url, copies=1, copied_within="500ms") as link:
        adding = asyncio.ensure_future(add_all(link, keys, range(3000)))
        await until(lambda: has_at_least(link, keys, 500))
        master.kill()
        await until(lambda: works(link, prefix))
        master.start()
        await settle(sentinels, heir)
        sure, unknown = await adding
        found = await kept(link, keys)

    assert sure <= set(found)
    assert len(found) == len(set(found))  # nothing was repeated of itself
    assert set(found) <= sure | unknown
    assert len(sure) > 2000


async def has_at_least(link: RedisLink, keys: list[bytes], number: int) -> bool:
    return len(await kept(link, keys)) >= number


async def works(link: RedisLink, key: str) -> bool:
    try:
        await link.command("LLEN", key, reads=True)
    except EngineError:
        return False
    return True


# --- clusters ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with redis_cluster() as servers:
        yield servers


@pytest.mark.parametrize("key", ["123456789", "{mail}:ready", "{}x", "a{b", "a{b}{c}", "{{x}}", ""])
def test_slots_are_those_of_the_servers(cluster: Cluster, key: str) -> None:
    assert slot_of(key.encode()) == cluster.masters[0].ask("CLUSTER", "KEYSLOT", key)


def keys_everywhere(prefix: str) -> list[bytes]:
    return [f"{prefix}{{{n}}}".encode() for n in range(12)]


async def test_keys_go_to_the_masters_that_have_their_slots(cluster: Cluster, prefix: str) -> None:
    keys = keys_everywhere(prefix)
    async with link_to(cluster.url) as link:
        await asyncio.gather(*(link.call(ADD, [keys[n % 12]], [n]) for n in range(600)))
        for n, key in enumerate(keys):
            assert [int(each) for each in await link.command("LRANGE", key, 0, -1)] == [*range(n, 600, 12)]
        assert await link.everywhere("PING") == [b"PONG"] * 3
    assert len({slot_of(key) * 3 // 16384 for key in keys}) == 3


async def test_one_node_is_enough_to_find_the_others(cluster: Cluster, prefix: str) -> None:
    async with link_to(f"redis+cluster://127.0.0.1:{cluster.replicas[1].port},127.0.0.1:1") as link:
        for key in keys_everywhere(prefix):
            assert await link.call(ADD, [key], [1]) == 1


async def test_a_message_on_any_node_is_heard_and_lists_are_watched_where_they_are(
    cluster: Cluster, prefix: str
) -> None:
    lists = keys_everywhere(prefix)[:4]
    channel = prefix.encode()
    async with link_to(cluster.url) as link:
        await link.wait_for(channels=[channel], timeout=10)
        link.looked([channel])
        for server in cluster.masters:
            waiting = asyncio.ensure_future(link.wait_for(channels=[channel], timeout=10))
            server.ask("PUBLISH", prefix, "")
            assert await waiting
            link.looked([channel])
        for key in lists:
            waiting = asyncio.ensure_future(link.wait_for(lists=lists, timeout=10))
            await link.command("LPUSH", key, "x")
            assert await waiting
            await link.command("DEL", key)
            link.looked(lists)


async def test_slots_that_move_are_followed_also_in_the_middle_of_the_move(
    cluster: Cluster, prefix: str
) -> None:
    """MOVED and ASK."""
    slot = slot_of(prefix.encode())
    masters = [server for server in cluster.servers if server.info("replication")["role"] == "master"]
    async with link_to(cluster.url) as link:
        await link.command("RPUSH", f"{{{prefix}}}old", "x")
        [source] = [server for server in masters if has_slot(server, slot)]
        target = next(server for server in masters if server is not source)
        to, by = target.ask("CLUSTER", "MYID"), source.ask("CLUSTER", "MYID")
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", by)
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", to)

        assert await link.call(ADD, [f"{{{prefix}}}new".encode()], [1]) == 1  # ASK: it is made over there
        assert await link.call(ADD, [f"{{{prefix}}}old".encode()], [1]) == 2  # it is still here

        source.ask("MIGRATE", "127.0.0.1", target.port, f"{{{prefix}}}old", 0, 5000)
        for server in (target, source, *masters):
            server.ask("CLUSTER", "SETSLOT", slot, "NODE", to)
        assert await link.call(ADD, [f"{{{prefix}}}old".encode()], [1]) == 3  # MOVED
        assert await link.call(ADD, [f"{{{prefix}}}new".encode()], [1]) == 2


def has_slot(server: RedisServer, slot: int) -> bool:
    me = server.ask("CLUSTER", "MYID")
    return any(
        first <= slot <= last and master[2] == me
        for first, last, master, *_ in server.ask("CLUSTER", "SLOTS")
    )


async def test_while_a_master_is_killed_the_others_go_on_and_its_replica_takes_over(
    cluster: Cluster, prefix: str
) -> None:
    keys = keys_everywhere(prefix)
    victim = next(server for server in cluster.servers if has_slot(server, slot_of(keys[0])))
    async with link_to(cluster.url, copies=1, copied_within="500ms") as link:
        adding = asyncio.ensure_future(add_all(link, keys, range(3000)))
        await until(lambda: has_at_least(link, keys, 600))
        victim.kill()
        await until(lambda: works(link, keys[0].decode()))
        victim.start()
        sure, unknown = await adding
        found = await kept(link, keys)
        await until(lambda: is_whole(cluster))

    assert sure <= set(found)
    assert len(found) == len(set(found))
    assert set(found) <= sure | unknown
    assert len(sure) > 2000


async def is_whole(cluster: Cluster) -> bool:
    return cluster.whole()
