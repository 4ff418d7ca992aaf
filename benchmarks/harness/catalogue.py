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


def _python(name: str, engine: Engine, *packages: str) -> Peer:
    return Peer(name, engine, name, name, packages)


def _node(name: str, engine: Engine, *packages: str) -> Peer:
    return Peer(name, engine, name.replace("-", "_"), name, packages, Language.NODE)


_ASYNCPG = "asyncpg==0.32.0"
_HIREDIS = "hiredis==3.5.0"
_UVLOOP = "uvloop==0.23.0"
_RAW = (_ASYNCPG, _HIREDIS, _UVLOOP)
_HUEY = ("huey==3.5.4", "redis", _HIREDIS)
_SAQ = ("saq[hiredis,postgres,redis]==0.26.4",)
_TASKIQ = ("taskiq==0.13.0", "taskiq-redis==1.2.4", _HIREDIS, _UVLOOP)
_TASKIQ_PG = ("taskiq==0.13.0", "taskiq-postgres[asyncpg]==0.9.1", _ASYNCPG, _UVLOOP)
_PSYCOPG = "psycopg[binary,pool]"

PEERS: tuple[Peer, ...] = (
    Peer("propolis", Engine.POSTGRES, "propolis", ""),
    Peer("raw loop", Engine.POSTGRES, "raw_postgres", "raw", _RAW),
    _python("pgqueuer", Engine.POSTGRES, "pgqueuer==1.6.0", _ASYNCPG, _UVLOOP),
    _node("graphile-worker", Engine.POSTGRES, "graphile-worker@0.17.3"),
    _python("pgmq", Engine.POSTGRES, "pgmq[async]==1.1.4", _ASYNCPG, _UVLOOP),
    _python("chancy", Engine.POSTGRES, "chancy==0.26.0"),
    _node("pg-boss", Engine.POSTGRES, "pg-boss@10.4.2"),
    Peer("taskiq-postgres", Engine.POSTGRES, "taskiq", "taskiq_pg", _TASKIQ_PG, variant="postgres"),
    _python("dbos", Engine.POSTGRES, "dbos==3.3.0"),
    _python("saq", Engine.POSTGRES, *_SAQ),
    _python("procrastinate", Engine.POSTGRES, "procrastinate==3.10.0", _PSYCOPG),
    Peer("propolis", Engine.REDIS, "propolis", ""),
    Peer("raw loop", Engine.REDIS, "raw_redis", "raw", _RAW),
    _node("bee-queue", Engine.REDIS, "bee-queue@2.0.0"),
    _node("bullmq", Engine.REDIS, "bullmq@6.7.0", "ioredis@6.0.0"),
    _python("dramatiq", Engine.REDIS, "dramatiq[redis]==2.2.1", _HIREDIS),
    Peer("taskiq (stream)", Engine.REDIS, "taskiq", "taskiq", _TASKIQ, variant="stream"),
    Peer("taskiq (list)", Engine.REDIS, "taskiq", "taskiq", _TASKIQ, variant="list"),
    _python("huey", Engine.REDIS, *_HUEY),
    _python("saq", Engine.REDIS, *_SAQ),
    _python("arq", Engine.REDIS, "arq==0.28.0", _HIREDIS),
    _python("streaq", Engine.REDIS, "streaq==7.2.0", _UVLOOP),
    _python("celery", Engine.REDIS, "celery[redis]==5.7.0", _HIREDIS),
    _python("rq", Engine.REDIS, "rq==2.12.0", _HIREDIS),
    Peer("propolis", Engine.SQLITE, "propolis", ""),
    Peer("raw loop", Engine.SQLITE, "raw_sqlite", "raw", _RAW),
    _python("huey", Engine.SQLITE, *_HUEY),
    _python("litequeue", Engine.SQLITE, "litequeue==0.9"),
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
