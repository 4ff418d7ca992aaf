"""What servers say of how they keep data, what they are, and what they let us do."""

from __future__ import annotations

import logging
import re

import pytest

from propolis.core.protocols import Durability
from propolis.engines import open_engine
from propolis.engines.address import Address
from propolis.engines.redis.client import link as link_module
from propolis.engines.redis.client.link import RedisLink
from propolis.engines.redis.client.target import is_loopback, target_of
from propolis.engines.redis.safety import Safety, check_safety, durability_of, read_safety
from propolis.engines.redis.scripts import load_rights, load_scripts, load_sharded_scripts
from propolis.errors import BadSetting, EngineError, EngineUnavailable, UnsafeStorage
from propolis.testing.engines.samples import a_job
from propolis.testing.servers.binaries import free_port
from propolis.testing.servers.redis import redis

BOX = target_of(Address("redis://box"))
EVERYTHING = ["on", ">secret", "~propolis:*", "resetchannels", "&propolis:*", "+@all"]


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
            check_safety(found, target_of(Address(server.url)))


def test_a_server_that_is_too_old_is_refused_and_an_unknown_one_is_not() -> None:
    with pytest.raises(EngineError, match=r"6\.2"):
        check_safety(Safety(version=(6, 0, 16)), BOX)
    check_safety(Safety(), BOX)


def test_the_weakest_server_decides_unless_copies_are_waited_for() -> None:
    strong, weak = Safety((7,), True, "always"), Safety((7,), True, "everysec")
    assert durability_of([strong, strong], 0) is Durability.POWER
    assert durability_of([strong, weak], 0) is Durability.PROCESS
    assert durability_of([strong, weak], 1) is Durability.NODE
    assert durability_of([], 0) is Durability.MEMORY


# --- what the URL does not say -----------------------------------------------------------


@pytest.mark.parametrize("kind", ["valkey", "redis"])
async def test_a_node_of_a_cluster_says_what_to_write(kind: str, request: pytest.FixtureRequest) -> None:
    """F55: also where its INFO may not be read."""
    request.getfixturevalue(f"{kind}_url")
    with redis(kind, settings={"cluster-enabled": "yes", "cluster-port": free_port()}) as node:
        with pytest.raises(BadSetting, match=r"redis\+cluster://"):
            await open_engine(node.url)
        node.ask("ACL", "SETUSER", "default", "-info")
        node.ask("CLUSTER", "ADDSLOTS", 1)
        with pytest.raises(EngineError, match="cluster"):
            await open_engine(node.url)


async def test_a_replica_is_refused_by_who_wants_to_write() -> None:
    """F55."""
    with (
        redis() as master,
        redis(settings={"replicaof": f"127.0.0.1 {master.port}"}) as replica,
        pytest.raises(EngineUnavailable, match="name its master"),
    ):
        await open_engine(replica.url)


def test_hosts_to_which_plain_text_is_no_danger_are_known() -> None:
    safe = ["127.0.0.1", "127.3.2.1", "::1", "localhost", "my.localhost"]
    assert [
        host for host in [*safe, "10.0.0.1", "redis", "::2", "localhost.example.org"] if is_loopback(host)
    ] == safe


async def test_plain_text_to_another_host_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S13."""
    monkeypatch.setattr(link_module, "is_loopback", lambda host: False)
    caplog.set_level(logging.WARNING, "propolis.redis")
    with redis() as server:
        for _ in range(2):
            await (await open_engine(server.url)).close()
        await (await open_engine(server.socket_url)).close()
    assert [record.message for record in caplog.records] == [
        "jobs and passwords travel to 127.0.0.1 in plain text: write rediss://"
    ]


# --- rights ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["valkey", "redis"])
@pytest.mark.parametrize(
    ("rights", "missing"),
    [
        (["resetchannels"], "the channel propolis:"),
        (["-publish"], "PUBLISH"),
        (["-hset", "-zadd"], "HSET, ZADD"),
        (["-del"], "lacks DEL"),
        (["-evalsha"], "evalsha"),
        (["resetkeys", "~other:*"], "key"),
        (["off"], "does not let us in"),
        (["resetpass", ">another"], "does not let us in"),
    ],
)
async def test_wrong_rights_are_refused_at_the_start(
    kind: str, rights: list[str], missing: str, request: pytest.FixtureRequest
) -> None:
    """F55: with what is missing, and before anything was written."""
    request.getfixturevalue(f"{kind}_url")
    with redis(kind) as server:
        server.ask("ACL", "SETUSER", "bee", *EVERYTHING, *rights)
        with pytest.raises(EngineError, match=missing):
            await open_engine(f"redis://bee:secret@127.0.0.1:{server.port}")
        assert server.ask("DBSIZE") == 0


async def test_rights_that_are_enough_leave_nothing_behind_and_make_no_errors() -> None:
    with redis() as server:
        server.ask("ACL", "SETUSER", "bee", *EVERYTHING)
        await (await open_engine(f"redis://bee:secret@127.0.0.1:{server.port}")).close()
        assert server.ask("KEYS", "*") == ["propolis:layout"]
        assert [name for name in server.info("errorstats") if name != "errorstat_NOSCRIPT"] == []


async def test_a_right_that_is_taken_away_later_costs_no_job_that_was_written() -> None:
    """F55: the wake-up is lost, and the put is not."""
    with redis() as server:
        server.ask("ACL", "SETUSER", "bee", *EVERYTHING)
        engine = await open_engine(f"redis://bee:secret@127.0.0.1:{server.port}")
        server.ask("ACL", "SETUSER", "bee", "-publish")
        [receipt] = await engine.put([a_job()])
        assert receipt.created
        await engine.close()


def test_every_command_of_the_scripts_is_tried() -> None:
    texts = [script.text.decode() for script in (load_scripts() | load_sharded_scripts()).values()]
    used = {name for text in texts for name in re.findall(r"(?:call|in_chunks)(?:\(|, )'([A-Z]+)'", text)}
    tried = set(re.findall(r"\b[A-Z]{3,}\b", load_rights().text.decode()))
    assert used - tried == set()
