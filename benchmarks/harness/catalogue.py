"""Which peers there are, on which engine, and what their environments hold.

Versions are pinned, so that a run can be repeated; `--latest` takes the newest of the named packages instead.
How each peer is set up and tuned stands in its adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Engine(StrEnum):
    POSTGRES = "postgres"
    REDIS = "redis"
    SQLITE = "sqlite"


class Language(StrEnum):
    PYTHON = "python"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class Peer:
    """One row of a table.  Peers with the same `environment` share one; an empty one is our own."""

    name: str
    engine: Engine
    adapter: str
    environment: str
    packages: tuple[str, ...] = ()
    language: Language = Language.PYTHON
    variant: str = ""


def _python(name: str, engine: Engine, *packages: str, adapter: str = "", variant: str = "") -> Peer:
    module = adapter or name.replace("-", "_")
    return Peer(name, engine, module, module, packages, variant=variant)


def _node(name: str, engine: Engine, *packages: str) -> Peer:
    return Peer(name, engine, name.replace("-", "_"), name, packages, Language.NODE)


_RAW = ("asyncpg==0.32.0", "hiredis==3.5.0", "uvloop==0.23.0")
_TASKIQ_REDIS = ("taskiq==0.13.0", "taskiq-redis==1.2.4", "hiredis==3.5.0", "uvloop==0.23.0")
_HUEY = ("huey==3.5.4", "redis", "hiredis==3.5.0")
_SAQ = ("saq[hiredis,postgres,redis]==0.26.4",)

PEERS: tuple[Peer, ...] = (
    Peer("skep", Engine.POSTGRES, "skep", ""),
    Peer("skep", Engine.REDIS, "skep", ""),
    Peer("skep", Engine.SQLITE, "skep", ""),
    Peer("raw loop", Engine.POSTGRES, "raw_postgres", "raw", _RAW),
    Peer("raw loop", Engine.REDIS, "raw_redis", "raw", _RAW),
    Peer("raw loop", Engine.SQLITE, "raw_sqlite", "raw", _RAW),
    _python("pgqueuer", Engine.POSTGRES, "pgqueuer==1.6.0", "asyncpg==0.32.0", "uvloop==0.23.0"),
    _node("graphile-worker", Engine.POSTGRES, "graphile-worker@0.17.3"),
    _python("dramatiq", Engine.REDIS, "dramatiq[redis]==2.2.1", "hiredis==3.5.0"),
    _node("bee-queue", Engine.REDIS, "bee-queue@2.0.0"),
    _python("huey", Engine.REDIS, *_HUEY),
    _python("huey", Engine.SQLITE, *_HUEY),
)


def chosen(engines: Sequence[Engine], only: Sequence[str], without: Sequence[str] = ()) -> list[Peer]:
    """The peers on these engines; `only` and `without` are names, and an unknown one is an error."""
    names = {peer.name for peer in PEERS}
    if unknown := [name for name in (*only, *without) if name not in names]:
        raise LookupError(f"no peer named {', '.join(unknown)}: there are {', '.join(sorted(names))}")
    return [
        peer
        for peer in PEERS
        if peer.engine in engines and (not only or peer.name in only) and peer.name not in without
    ]
