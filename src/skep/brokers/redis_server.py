"""How a Redis server is set up: read at the start, and refused where jobs would be lost."""

from __future__ import annotations

import re
from contextlib import suppress

from skep.broker import Durability
from skep.brokers.redis_link import Link
from skep.errors import EngineError, UnsafeStorage

OLDEST = (6, 2)
Settings = dict[str, str]


async def settings_of(link: Link) -> Settings:
    """The least good settings of all masters; those that a hosted server does not show are left out."""
    found: list[Settings] = []
    for section in ("server", "memory", "persistence"):
        for number, reply in enumerate(await link.everywhere("INFO", section)):
            if number == len(found):
                found.append({})
            found[number].update(_facts(reply.decode()))
    with suppress(EngineError):
        for facts, reply in zip(found, await link.everywhere("CONFIG", "GET", "appendfsync"), strict=True):
            if reply:
                facts["appendfsync"] = reply[1].decode()
    return min(found, key=lambda facts: (facts.get("maxmemory_policy") == "noeviction", _persists(facts)))


def check_server(settings: Settings, shown: str) -> None:
    version = tuple(int(part) for part in re.findall(r"\d+", settings.get("redis_version", "")))
    if version and version < OLDEST:
        raise EngineError(f"{shown} is Redis {settings['redis_version']}: skep needs 6.2 or newer, or Valkey")
    policy = settings.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise UnsafeStorage(
            f"{shown} throws keys away when its memory is full (maxmemory-policy {policy}), and jobs with "
            f"them: set maxmemory-policy noeviction"
        )


def durability_of(settings: Settings, copies: int) -> Durability:
    """What an acknowledged put survives, where each waits for this many replicas."""
    return Durability.NODE if copies else _persists(settings)


def _persists(settings: Settings) -> Durability:
    if settings.get("aof_enabled") != "1":
        return Durability.MEMORY
    return Durability.POWER if settings.get("appendfsync") == "always" else Durability.PROCESS


def _facts(info: str) -> Settings:
    return dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
