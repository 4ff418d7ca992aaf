"""The link to Redis against real servers: order, lost answers, waits, logins, broken connections."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from propolis.core.job import Done
from propolis.engines import open_engine
from propolis.engines.address import Address
from propolis.engines.redis.client.connection import Connection, connect, pack
from propolis.engines.redis.client.errors import AnswerLost, NotSent, ScriptRefused, ServerError, explained
from propolis.engines.redis.client.link import RedisLink
from propolis.engines.redis.client.script import LuaScript
from propolis.engines.redis.client.target import target_of
from propolis.errors import (
    EngineClosed,
    EngineError,
    EngineUnavailable,
    ForkedEngine,
    OutcomeUnknown,
    StorageFull,
)
from propolis.testing.engines.samples import a_job
from propolis.testing.servers.binaries import binary, free_port
from propolis.testing.servers.certificates import Certificate
from propolis.testing.servers.proxy import Proxy
from propolis.testing.servers.redis import RedisServer, redis

ECHO = LuaScript("echo", b"return {KEYS[1], ARGV[1]}")
COUNT = LuaScript("count", b"return redis.call('INCR', KEYS[1])")


def link_to(url: str, **options: object) -> RedisLink:
    text = "&".join(f"{name}={value}" for name, value in options.items())
    return RedisLink(target_of(Address(f"{url}{'?' if text else ''}{text}")))


@asynccontextmanager
async def opened(link: RedisLink) -> AsyncIterator[RedisLink]:
    await link.open()
    try:
        yield link
    finally:
        await link.close()


@pytest.fixture(params=["valkey", "redis"])
def url(request: pytest.FixtureRequest) -> str:
    """Of each kind of server that is there."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest_asyncio.fixture
async def link(url: str) -> AsyncIterator[RedisLink]:
    async with opened(link_to(url)) as link:
        yield link


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """One that a test may do anything to."""
    with redis() as server:
        yield server


@pytest_asyncio.fixture
async def proxy(server: RedisServer) -> AsyncIterator[Proxy]:
    async with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def key(prefix: str) -> bytes:
    return f"{prefix}:key".encode()


async def until(seen: Any) -> None:
    async with asyncio.timeout(20):
        while not await seen():
            await asyncio.sleep(0.01)


# --- order and amount --------------------------------------------------------------------


async def test_of_a_thousand_calls_at_once_each_gets_its_own_answer(link: RedisLink, key: bytes) -> None:
    answers = await asyncio.gather(*(link.call(ECHO, [key], [n]) for n in range(1000)))

    assert answers == [[key, b"%d" % n] for n in range(1000)]


async def test_calls_reach_the_server_in_the_order_in_which_they_were_made(
    link: RedisLink, key: bytes
) -> None:
    await asyncio.gather(*(link.command("RPUSH", key, n) for n in range(1000)))

    assert await link.command("LRANGE", key, 0, -1) == [b"%d" % n for n in range(1000)]


async def test_what_is_called_in_one_turn_of_the_loop_leaves_in_one_write(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(link_to(server.url)) as link:
        writes = int(server.info("stats")["total_reads_processed"])
        await asyncio.gather(*(link.command("SET", "key", n) for n in range(500)))
        # Our INFO above and below are reads of the server as well.
        assert int(server.info("stats")["total_reads_processed"]) - writes <= 4


async def test_a_caller_that_gives_up_does_not_leave_its_answer_to_another(
    link: RedisLink, key: bytes
) -> None:
    calls = [asyncio.ensure_future(link.call(ECHO, [key], [n])) for n in range(10)]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()

    assert [(await call)[1] for call in calls[1::2]] == [b"%d" % n for n in range(1, 10, 2)]
    assert await link.command("ECHO", "x") == b"x"


async def test_answers_and_commands_may_be_large(link: RedisLink, key: bytes) -> None:
    large = os.urandom(8 << 20)

    assert await link.command("SET", key, large) == b"OK"
    got, small = await asyncio.gather(link.command("GET", key), link.command("ECHO", "small"))

    assert got == large
    assert small == b"small"
    await link.command("DEL", key)


async def test_no_more_than_the_allowed_number_of_commands_is_on_its_way(proxy: Proxy) -> None:
    async with opened(link_to(f"redis://127.0.0.1:{proxy.port}", in_flight=10)) as link:
        proxy.black_hole()
        calls = [asyncio.ensure_future(link.command("RPUSH", "list", n)) for n in range(100)]
        await asyncio.sleep(0)  # they have all been made
        connection = connection_of(link)
        assert len(connection._pending) == 10
        proxy.restore()
        await asyncio.gather(*calls)

        order = [int(n) for n in await link.command("LRANGE", "list", 0, -1)]
        assert order == list(range(100))


async def test_a_peer_that_takes_no_bytes_holds_callers_back_and_loses_nothing(server: RedisServer) -> None:
    async with opened(link_to(server.url, patience="30s")) as link:
        server.freeze()
        large = b"x" * (1 << 20)
        calls = [asyncio.ensure_future(link.command("RPUSH", "list", large)) for _ in range(30)]
        await until(lambda: crowded(link))
        server.thaw()
        await asyncio.gather(*calls)

        assert await link.command("LLEN", "list") == 30


async def test_a_command_that_waits_too_long_for_room_fails_and_was_not_sent(proxy: Proxy) -> None:
    address = f"redis://127.0.0.1:{proxy.port}"
    async with opened(link_to(address, in_flight=1, patience="200ms", copied_within="100ms")) as link:
        proxy.black_hole()
        calls = [link.command("INCR", "n") for _ in range(2)]
        ends = await asyncio.gather(*calls, return_exceptions=True)

    assert [type(end) for end in ends] == [OutcomeUnknown, EngineUnavailable]


def connection_of(link: RedisLink) -> Connection:
    [own] = link._by_loop.values()
    connection = own.router._kept._connection  # type: ignore[attr-defined]  # there is one server only
    assert isinstance(connection, Connection)
    return connection


async def crowded(link: RedisLink) -> bool:
    return connection_of(link).crowded


# --- scripts -----------------------------------------------------------------------------


async def test_a_script_that_the_server_has_forgotten_is_sent_again(link: RedisLink, key: bytes) -> None:
    """S1.26, F27."""
    assert await link.call(COUNT, [key], []) == 1
    await link.command("SCRIPT", "FLUSH")

    assert sorted(await asyncio.gather(*(link.call(COUNT, [key], []) for _ in range(20)))) == [*range(2, 22)]
    assert await link.command("SCRIPT", "EXISTS", COUNT.sha) == [1]


async def test_an_error_of_our_own_scripts_carries_its_code_and_detail(link: RedisLink, key: bytes) -> None:
    refuse = LuaScript("refuse", b"return redis.error_reply('PROPOLISFULL mail 10')")

    with pytest.raises(ScriptRefused) as raised:
        await link.call(refuse, [key], [])

    assert raised.value.code == "PROPOLISFULL"
    assert raised.value.detail.split()[:2] == ["mail", "10"]


async def test_a_key_of_another_type_is_told(link: RedisLink, key: bytes) -> None:
    """F27."""
    await link.command("LPUSH", key, "x")

    with pytest.raises(EngineError, match="prefix"):
        await link.command("HGET", key, "x")


async def test_a_script_that_is_wrong_does_not_break_the_connection(link: RedisLink, key: bytes) -> None:
    with pytest.raises(EngineError):
        await link.call(LuaScript("wrong", b"this is no Lua"), [key], [])
    assert await link.command("ECHO", "x") == b"x"


# --- broken connections ------------------------------------------------------------------


async def test_after_a_killed_connection_the_next_call_works(server: RedisServer) -> None:
    async with opened(link_to(server.url)) as link:
        server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await until(lambda: is_broken(link))

        assert await link.command("ECHO", "x") == b"x"


async def is_broken(link: RedisLink) -> bool:
    return not connection_of(link).alive


async def test_after_a_restart_calls_work_and_scripts_are_loaded_again(server: RedisServer) -> None:
    """F12: S1.26."""
    async with opened(link_to(server.url)) as link:
        await link.call(COUNT, [b"n"], [])
        server.stop()
        await until(lambda: is_broken(link))
        with pytest.raises(EngineUnavailable, match="nothing was changed"):
            await link.command("ECHO", "x")
        server.start()

        assert await link.call(COUNT, [b"n"], []) == 1


async def test_while_a_server_is_away_a_thousand_callers_make_few_attempts(
    server: RedisServer, proxy: Proxy
) -> None:
    """F13."""
    async with opened(link_to(f"redis://127.0.0.1:{proxy.port}")) as link:
        server.stop()
        proxy.reset()
        await until(lambda: is_broken(link))
        before = proxy.accepted
        answers = await asyncio.gather(
            *(link.command("ECHO", "x") for _ in range(1000)), return_exceptions=True
        )
        assert proxy.accepted - before == 1
        assert all(isinstance(answer, EngineUnavailable) for answer in answers)


async def test_a_lost_answer_of_a_write_is_an_unknown_outcome_and_never_repeated(
    server: RedisServer, proxy: Proxy
) -> None:
    """F15."""
    async with opened(link_to(f"redis://127.0.0.1:{proxy.port}")) as link:
        await link.call(COUNT, [b"n"], [])
        proxy.swallow_an_answer()
        with pytest.raises(OutcomeUnknown):
            await link.call(COUNT, [b"n"], [])

        assert await link.call(COUNT, [b"n"], []) == 3


async def test_a_lost_answer_of_a_read_is_asked_for_again(server: RedisServer, proxy: Proxy) -> None:
    async with opened(link_to(f"redis://127.0.0.1:{proxy.port}")) as link:
        proxy.swallow_an_answer()

        assert await link.command("ECHO", "x", reads=True) == b"x"


async def test_a_black_hole_hangs_no_call(proxy: Proxy) -> None:
    """F17: the time is our own, not TCP's."""
    address = f"redis://127.0.0.1:{proxy.port}"
    async with opened(
        link_to(address, patience="300ms", connect_within="300ms", copied_within="100ms")
    ) as link:
        proxy.black_hole()
        async with asyncio.timeout(5):
            with pytest.raises(OutcomeUnknown, match="in time"):
                await link.command("INCR", "n")
            with pytest.raises(EngineUnavailable, match="nothing was changed"):
                await link.command("INCR", "n")
            with pytest.raises(EngineUnavailable):
                await link.command("GET", "n", reads=True)
        proxy.restore()

        await until(lambda: works(link))


async def works(link: RedisLink) -> bool:
    try:
        return bool(await link.command("PING") == b"PONG")
    except EngineError:
        return False


async def test_a_loop_that_was_blocked_for_longer_than_patience_loses_no_answer(url: str) -> None:
    """F05: the answer has been there all the time."""
    async with opened(link_to(url, patience="100ms", copied_within="50ms")) as link:
        call = asyncio.ensure_future(link.command("ECHO", "x"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        threading.Event().wait(0.3)
        assert await call == b"x"


async def test_what_was_sent_is_told_from_what_was_not(proxy: Proxy) -> None:
    """F16."""
    line, _ = await connect(
        ("127.0.0.1", proxy.port), greeting=[], tls=None, within=5, patience=5, in_flight=10
    )
    proxy.black_hole()
    sent = line.send(pack("PING"))
    await asyncio.sleep(0)
    unsent = line.send(pack("PING"))
    await line.close()
    after = line.send(pack("PING"))

    for future, error in ((sent, AnswerLost), (unsent, NotSent), (after, NotSent)):
        with pytest.raises(error):
            await future


async def test_a_command_with_nothing_before_it_leaves_at_once(proxy: Proxy) -> None:
    line, _ = await connect(
        ("127.0.0.1", proxy.port), greeting=[], tls=None, within=5, patience=5, in_flight=10
    )
    proxy.black_hole()
    first, second = line.send(pack("PING"), alone=True), line.send(pack("PING"), alone=True)
    await line.close()

    for future, error in ((first, AnswerLost), (second, NotSent)):
        with pytest.raises(error):
            await future


async def test_bytes_that_come_one_by_one_are_understood(proxy: Proxy, key: bytes) -> None:
    """F18."""
    proxy.slice(1)
    async with opened(link_to(f"redis://127.0.0.1:{proxy.port}")) as link:
        answers = await asyncio.gather(*(link.call(ECHO, [key], [n]) for n in range(30)))
    assert answers == [[key, b"%d" % n] for n in range(30)]


async def test_a_corrupted_answer_ends_the_connection_and_not_the_link(proxy: Proxy) -> None:
    """F19."""
    async with opened(link_to(f"redis://127.0.0.1:{proxy.port}")) as link:
        proxy.corrupt_an_answer()
        with pytest.raises(OutcomeUnknown, match="protocol"):
            await link.command("INCR", "n")
        assert await link.command("INCR", "n") == 2


# --- what a server says ------------------------------------------------------------------


async def test_a_server_that_still_reads_its_data_is_unavailable(tmp_path: Path) -> None:
    slow = {"key-load-delay": 500, "loading-process-events-interval-bytes": 1024}
    server = RedisServer(tmp_path / "server", settings=slow)
    try:
        server.start()
        server.ask("EVAL", "for n = 1, 4000 do redis.call('SET', 'key' .. n, ('x'):rep(100)) end", 0)
        server.ask("SAVE")
        server.kill()
        server.start(until="LOADING")
        async with opened(link_to(server.url)) as link:
            with pytest.raises(EngineUnavailable, match="reading its data"):
                await link.command("GET", "key1")
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("inner", "kind", "words"),
    [
        ("@user_script:46: WRONGTYPE Operation against a key", EngineError, "holds something else"),
        ("@user_script:210: @user_script: 210: -OOM command not allowed", StorageFull, "maxmemory"),
        ("@user_script:7: PROPOLISSEALED b", ScriptRefused, "PROPOLISSEALED"),
        ("@user_script:1: attempt to call a nil value", EngineError, "Error running script"),
    ],
)
def test_an_error_inside_of_a_script_is_told_as_what_it_is(
    inner: str, kind: type[Exception], words: str
) -> None:
    """Redis 6.2 says it with more words around it than those that came later."""
    error = ServerError(f"ERR Error running script (call to f_9f2d): {inner}")
    meant = explained(error, "redis://here")
    assert type(meant) is kind
    assert words in str(meant)


async def test_a_server_with_too_many_clients_says_so() -> None:
    with redis(settings={"maxclients": 2}) as server:
        async with opened(link_to(server.url)), opened(link_to(server.url)):
            with pytest.raises(EngineUnavailable, match="maxclients"):
                await link_to(server.url).open()


async def test_memory_that_is_full_is_storage_that_is_full() -> None:
    """F26."""
    with redis(settings={"maxmemory": "3mb", "maxmemory-policy": "noeviction"}) as server:
        async with opened(link_to(server.url)) as link:
            sets = (link.command("SET", f"key{n}", b"x" * 100_000) for n in range(100))
            with pytest.raises(StorageFull):
                await asyncio.gather(*sets)
            assert await link.command("GET", "key0") is not None


async def test_a_password_is_needed_where_one_is_set() -> None:
    with redis(settings={"requirepass": "sesame"}) as server:
        where = f"127.0.0.1:{server.port}"
        async with opened(link_to(f"redis://:sesame@{where}")) as link:
            assert await link.command("PING") == b"PONG"
        for wrong in (f"redis://:wrong@{where}", f"redis://nobody:sesame@{where}", f"redis://{where}/1"):
            with pytest.raises(EngineError, match="does not let us in") as raised:
                await link_to(wrong).open()
            assert "sesame" not in str(raised.value)


async def test_a_user_of_an_acl_may_do_what_the_acl_says() -> None:
    """S14."""
    with redis() as server:
        server.ask(
            "ACL",
            "SETUSER",
            "bee",
            "on",
            ">p@ss:word/",
            "~propolis*",
            "resetchannels",
            "&propolis*",
            "+@all",
            "-config",
        )
        async with opened(link_to(f"redis://bee:p%40ss%3Aword%2F@127.0.0.1:{server.port}/0")) as link:
            assert await link.command("SET", "propolis:1", "x") == b"OK"
            for command in (("SET", "other", "x"), ("CONFIG", "GET", "save")):
                with pytest.raises(EngineError, match="ACL"):
                    await link.command(*command)


def documented_acl() -> list[str]:
    page = Path(__file__).parents[3] / "docs" / "redis-servers.md"
    [line] = [line for line in page.read_text().splitlines() if line.startswith("ACL SETUSER")]
    return line.split()


@pytest.mark.parametrize("kind", ["valkey", "redis"])
async def test_the_documented_acl_is_enough_for_jobs_and_for_nothing_else(kind: str) -> None:
    """S14."""
    if binary(kind) is None:
        pytest.skip(f"there is no {kind}-server here")
    with redis(kind) as server:
        server.ask(*documented_acl())
        url = f"redis://propolis:secret@127.0.0.1:{server.port}"
        engine = await open_engine(url)
        await engine.wait(["default"], 5)  # listening has begun
        waiting = asyncio.ensure_future(engine.wait(["default"], 5))
        await engine.put([a_job()])
        assert await waiting
        [lease] = await engine.lease({"default": 1}, span=timedelta(seconds=5), holder="me")
        assert await engine.settle([(lease, Done())]) == []
        await engine.sweep()
        await engine.close()
        async with opened(link_to(url)) as link:
            for command in ("FLUSHALL", "KEYS *", "CONFIG GET save", "SCRIPT FLUSH", "GET other", "SHUTDOWN"):
                with pytest.raises(EngineError, match="ACL"):
                    await link.command(*command.split())


async def test_credentials_may_change_from_one_connection_to_the_next(server: RedisServer) -> None:
    class Rotating:
        password = "first"

        async def get_credentials(self) -> tuple[str, str]:
            return "bee", self.password

    given = Rotating()
    server.ask("ACL", "SETUSER", "bee", "on", ">first", "~*", "+@all")
    link = RedisLink(target_of(Address(server.url)), given)
    async with opened(link):
        server.ask("ACL", "SETUSER", "bee", "resetpass", ">second")
        server.ask("CLIENT", "KILL", "USER", "bee")
        await until(lambda: is_broken(link))
        given.password = "second"
        assert await link.command("ACL", "WHOAMI") == b"bee"


async def test_each_database_has_its_own_keys(server: RedisServer) -> None:
    async with (
        opened(link_to(f"redis://127.0.0.1:{server.port}/1")) as one,
        opened(link_to(f"redis://127.0.0.1:{server.port}/2")) as two,
    ):
        await one.command("SET", "key", "x")
        assert await two.command("GET", "key") is None


async def test_a_server_can_be_reached_by_its_socket(server: RedisServer) -> None:
    async with opened(link_to(server.socket_url, db=3)) as link:
        assert b"db=3" in await link.command("CLIENT", "INFO")


async def test_a_connection_has_a_name_that_an_administrator_can_see(link: RedisLink) -> None:
    assert await link.command("CLIENT", "GETNAME") == b"propolis"


# --- TLS ---------------------------------------------------------------------------------


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl on PATH to make a certificate with")
    return Certificate(tmp_path)


async def test_tls_works_with_an_authority_that_is_named(
    server: RedisServer, certificate: Certificate, key: bytes
) -> None:
    """S13."""
    async with Proxy(server.port, tls=certificate.for_a_server()) as proxy:
        address = f"rediss://localhost:{proxy.port}"
        async with opened(link_to(address, ssl_ca_certs=certificate.file)) as link:
            answers = await asyncio.gather(*(link.call(ECHO, [key], [n]) for n in range(100)))
            assert [answer[1] for answer in answers] == [b"%d" % n for n in range(100)]
        async with opened(link_to(address, ssl_cert_reqs="none")) as link:
            assert await link.command("PING") == b"PONG"


async def test_a_certificate_of_a_stranger_or_for_another_host_is_refused(
    server: RedisServer, tmp_path: Path, certificate: Certificate
) -> None:
    """S13."""
    (tmp_path / "other").mkdir()
    other = Certificate(tmp_path / "other", "DNS:elsewhere.example")
    async with Proxy(server.port, tls=certificate.for_a_server()) as proxy:
        for options in ({}, {"ssl_ca_certs": other.file}):
            with pytest.raises(EngineError, match="cannot be trusted"):
                await link_to(f"rediss://localhost:{proxy.port}", **options).open()
    async with Proxy(server.port, tls=other.for_a_server()) as proxy:
        address = f"rediss://localhost:{proxy.port}"
        with pytest.raises(EngineError, match="cannot be trusted"):
            await link_to(address, ssl_ca_certs=other.file).open()
        async with opened(link_to(address, ssl_ca_certs=other.file, ssl_check_hostname="false")) as link:
            assert await link.command("PING") == b"PONG"


async def test_tls_never_falls_back_to_plain_text(server: RedisServer) -> None:
    """S13."""
    with pytest.raises(EngineUnavailable):
        await link_to(f"rediss://127.0.0.1:{server.port}", connect_within="300ms").open()


async def test_a_redis_that_speaks_tls_itself_can_ask_for_a_certificate_of_ours(
    redis_url: str, certificate: Certificate
) -> None:
    settings = {
        "port": 0,
        "tls-cert-file": certificate.file,
        "tls-key-file": certificate.key,
        "tls-ca-cert-file": certificate.file,
    }
    port = free_port()
    with redis("redis", settings={**settings, "tls-port": port}):
        trusted = {"ssl_ca_certs": certificate.file, "connect_within": "5s"}
        with pytest.raises(EngineError):
            await link_to(f"rediss://localhost:{port}", **trusted).open()
        ours = {"ssl_certfile": certificate.file, "ssl_keyfile": certificate.key}
        async with opened(link_to(f"rediss://localhost:{port}", **trusted, **ours)) as link:
            assert await link.command("PING") == b"PONG"


# --- waiting -----------------------------------------------------------------------------


async def listening(link: RedisLink, **what: list[bytes]) -> None:
    """A first wait returns when listening has begun."""
    for _ in range(sum(map(len, what.values()))):
        assert await link.wait_for(**what, timeout=10)
        link.looked([name for names in what.values() for name in names])
        if not await link.wait_for(**what, timeout=0.05):
            return


async def test_a_message_on_one_of_several_channels_ends_a_wait(link: RedisLink, prefix: str) -> None:
    channels = [f"{prefix}:{n}".encode() for n in range(3)]
    await listening(link, channels=channels)

    waiting = asyncio.ensure_future(link.wait_for(channels=channels, timeout=10))
    await link.command("PUBLISH", channels[2], "")

    assert await waiting


async def test_a_message_that_came_between_two_waits_is_not_missed(link: RedisLink, prefix: str) -> None:
    channels = [prefix.encode()]
    await listening(link, channels=channels)
    await link.command("PUBLISH", prefix, "")
    assert await link.wait_for(channels=channels, timeout=10)
    link.looked(channels)

    assert not await link.wait_for(channels=channels, timeout=0.01)


async def test_an_element_pushed_by_a_stranger_ends_a_wait_and_stays(link: RedisLink, prefix: str) -> None:
    """S1.1: any program may push; nobody but the engine takes."""
    lists = [f"{prefix}:{n}".encode() for n in range(3)]
    for _ in range(2):  # also for those who come later
        assert not await link.wait_for(lists=lists, timeout=0.05)
        waiting = asyncio.ensure_future(link.wait_for(lists=lists, timeout=10))
        await link.command("LPUSH", lists[1], "job")
        assert await waiting
        assert await link.command("LRANGE", lists[1], 0, -1) == [b"job"]
        await link.command("DEL", lists[1])
        link.looked(lists)


async def test_all_who_wait_for_a_list_are_woken_by_one_element(url: str, prefix: str) -> None:
    async with opened(link_to(url)) as one, opened(link_to(url)) as two:
        lists = [prefix.encode()]
        waits = [asyncio.ensure_future(link.wait_for(lists=lists, timeout=10)) for link in (one, two)]
        await until(lambda: blocked(one, 2))
        await one.command("LPUSH", prefix, "job")

        assert await asyncio.gather(*waits) == [True, True]
        await one.command("DEL", prefix)


async def blocked(link: RedisLink, clients: int) -> bool:
    return f"blocked_clients:{clients}".encode() in await link.command("INFO", "clients")


async def test_a_blocking_wait_delays_no_call(server: RedisServer) -> None:
    async with opened(link_to(server.url)) as link:
        waiting = asyncio.ensure_future(link.wait_for(channels=[b"c"], lists=[b"l"], timeout=60))
        await waiting  # listening has begun
        link.looked([b"c", b"l"])
        waiting = asyncio.ensure_future(link.wait_for(channels=[b"c"], lists=[b"l"], timeout=60))
        await until(lambda: blocked(link, 1))
        assert await asyncio.gather(*(link.command("ECHO", n) for n in range(100))) == [
            b"%d" % n for n in range(100)
        ]
        assert not waiting.done()
        waiting.cancel()


async def test_a_waiting_link_sends_nothing(server: RedisServer) -> None:
    async with opened(link_to(server.url)) as link:
        await listening(link, channels=[b"c"], lists=[b"l"])
        await until(lambda: blocked(link, 1))
        before = int(server.info("stats")["total_commands_processed"])
        assert not await link.wait_for(channels=[b"c"], lists=[b"l"], timeout=0.5)
        assert int(server.info("stats")["total_commands_processed"]) - before == 1  # the question itself


async def test_ears_come_back_after_their_connection_was_killed(server: RedisServer) -> None:
    """F32 for Redis."""
    async with opened(link_to(server.url)) as link:
        await listening(link, channels=[b"c"])
        server.ask("CLIENT", "KILL", "TYPE", "pubsub")

        assert await link.wait_for(channels=[b"c"], timeout=10)  # something may have come meanwhile
        link.looked([b"c"])
        waiting = asyncio.ensure_future(link.wait_for(channels=[b"c"], timeout=10))
        await link.command("PUBLISH", "c", "")
        assert await waiting


async def test_what_this_process_knows_needs_no_server_to_be_heard(link: RedisLink, prefix: str) -> None:
    waiting = asyncio.ensure_future(link.wait_for(channels=[prefix.encode()], timeout=10))
    await asyncio.sleep(0)
    link.wake(prefix.encode())
    assert await waiting


async def test_a_list_that_nobody_empties_wakes_only_now_and_then(link: RedisLink, prefix: str) -> None:
    await link.command("LPUSH", prefix, "job")
    woken = 0
    loop = asyncio.get_running_loop()
    end = loop.time() + 0.5
    while loop.time() < end:
        woken += await link.wait_for(lists=[prefix.encode()], timeout=0.5)
        link.looked([prefix.encode()])
    await link.command("DEL", prefix)

    assert 1 < woken < 20


# --- loops, threads and processes --------------------------------------------------------


async def test_a_link_is_used_from_several_loops_at_once(link: RedisLink, prefix: str) -> None:
    def count() -> None:
        async def counting() -> None:
            await asyncio.gather(*(link.command("INCR", prefix) for _ in range(100)))

        asyncio.run(counting())

    await asyncio.gather(*(asyncio.to_thread(count) for _ in range(4)))

    assert await link.command("GET", prefix) == b"400"
    assert len(link._by_loop) == 1  # those of the other loops went with them


async def test_closing_ends_every_connection(server: RedisServer) -> None:
    link = link_to(server.url)
    await link.open()
    await link.wait_for(channels=[b"c"], lists=[b"l"], timeout=10)
    assert int(server.info("clients")["connected_clients"]) >= 3
    await link.close()
    await link.close()

    assert int(server.info("clients")["connected_clients"]) == 1
    with pytest.raises(EngineClosed):
        await link.command("PING")


async def test_a_link_can_be_opened_again(url: str) -> None:
    link = link_to(url)
    for _ in range(2):
        assert await link.open()
        assert not await link.open()
        assert await link.command("PING") == b"PONG"
        await link.close()


async def test_a_fork_refuses_the_connections_of_its_parent(link: RedisLink) -> None:
    """F48."""
    link._pid = os.getpid() + 1  # as a child sees it
    with pytest.raises(ForkedEngine):
        await link.command("PING")
    link._pid = os.getpid()
    assert await link.command("PING") == b"PONG"


async def test_a_link_that_cannot_be_opened_leaves_nothing_behind() -> None:
    link = link_to("redis://127.0.0.1:1")
    with pytest.raises(EngineUnavailable, match="cannot be reached"):
        await link.open()
    assert link._by_loop == {}
    with pytest.raises(EngineClosed):
        await link.command("PING")


@pytest.mark.usefixtures("uncovered")
def test_the_link_does_not_import_redis_py(valkey_url: str) -> None:
    code = f"""
import asyncio, sys
from propolis.engines.address import Address
from propolis.engines.redis.client.link import RedisLink
from propolis.engines.redis.client.target import target_of
async def main():
    link = RedisLink(target_of(Address({valkey_url!r})))
    await link.open()
    await link.wait_for(channels=[b"c"], lists=[b"l"], timeout=5)
    await link.close()
asyncio.run(main())
assert "hiredis" in sys.modules
assert "redis" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
