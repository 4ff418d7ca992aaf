"""Private servers to measure on, and what they cost."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.storage import tree_cpu_seconds
from propolis.testing.servers.redis import redis
from propolis.testing.servers.serving import postgres

KINDS = ("memory", "sqlite", "postgres", "redis")


@dataclass(frozen=True, slots=True)
class Private:
    """An engine by its URL; `cpu_seconds` are those of its server so far, where it has one."""

    url: str
    durability: str
    cpu_seconds: Callable[[], float]


@contextmanager
def private(kind: str) -> Iterator[Private]:
    """A storage of this kind that is gone afterwards."""
    match kind:
        case "memory":
            yield Private("memory://", "none", lambda: 0.0)
        case "sqlite":
            with tempfile.TemporaryDirectory(prefix="propolis-") as folder:
                yield Private(f"sqlite:///{Path(folder)}/bench.db", "synchronous=FULL", lambda: 0.0)
        case "postgres":
            with postgres(durable=True, settings=("shared_buffers=256MB", "max_wal_size=4GB")) as server:
                pid = server.pid
                yield Private(server.url, "fsync and synchronous_commit on", lambda: tree_cpu_seconds(pid))
        case "redis":
            with redis() as valkey:
                yield Private(valkey.url, "no persistence", lambda: tree_cpu_seconds(valkey.pid))
        case _:
            raise ValueError(f"{kind!r} is none of {', '.join(KINDS)}")
