"""What the servers say of how they keep data, and what that is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from skep.broker import Durability
from skep.brokers.redis_link import Link
from skep.errors import EngineError, EngineUnavailable, UnsafeStorage

OLDEST_SERVER = (6, 2)
_ASKED = ("appendonly", "appendfsync", "maxmemory", "maxmemory-policy")


@dataclass(frozen=True, slots=True)
class Safety:
    """The settings of one server.  None: it does not tell, as some managed services do not."""

    version: tuple[int, ...] = ()
    appendonly: bool | None = None
    appendfsync: str | None = None
    maxmemory: int | None = None
    policy: str | None = None

    @property
    def durability(self) -> Durability:
        """What is not known counts as not there."""
        if not self.appendonly:
            return Durability.MEMORY
        return Durability.POWER if self.appendfsync == "always" else Durability.PROCESS

    def __str__(self) -> str:
        """For the log and `skep check`."""
        log = {None: "unknown", True: "yes", False: "no"}[self.appendonly]
        return (
            f"appendonly {log}, appendfsync {self.appendfsync or 'unknown'}, "
            f"maxmemory-policy {self.policy or 'unknown'}"
        )


async def read_safety(link: Link) -> list[Safety]:
    """Of each master.  CONFIG and INFO may be forbidden, or have other names there: then less is known."""
    infos = await _answers(link, "INFO")
    configs: list[dict[str, str]] = []
    for name in _ASKED:  # one by one: servers before 7.0 take no more
        replies = await _answers(link, "CONFIG", "GET", name)
        configs += [{} for _ in replies[len(configs) :]]
        for config, reply in zip(configs, replies, strict=False):  # one that is closed meanwhile says less
            config.update(_pairs(reply))
    fields = [_fields(reply) for reply in infos]
    nothing: dict[str, str] = {}
    told = zip_longest(fields, configs, fillvalue=nothing)
    return [safety_of(info, config) for info, config in told] or [safety_of({}, {})]


async def _answers(link: Link, *command: str) -> list[Any]:
    try:
        return await link.everywhere(*command)
    except EngineUnavailable:
        raise
    except EngineError:
        return []


def safety_of(info: Mapping[str, str], config: Mapping[str, str]) -> Safety:
    """CONFIG knows best; what it does not tell may be in INFO, except for appendfsync."""
    enabled = config.get("appendonly") or {"1": "yes", "0": "no"}.get(info.get("aof_enabled", ""))
    memory = config.get("maxmemory") or info.get("maxmemory")
    return Safety(
        version=_version(info.get("redis_version", "")),
        appendonly=None if enabled is None else enabled == "yes",
        appendfsync=config.get("appendfsync"),
        maxmemory=None if memory is None else int(memory),
        policy=config.get("maxmemory-policy") or info.get("maxmemory_policy"),
    )


def check_safety(each: Safety, shown: str) -> None:
    """Refuse a server that forgets jobs of its own accord, or is too old."""
    if each.version and each.version < OLDEST_SERVER:
        wanted = ".".join(map(str, OLDEST_SERVER))
        raise EngineError(f"{shown} is too old: skep needs Redis {wanted} or newer, or Valkey")
    if each.policy not in (None, "noeviction"):
        raise UnsafeStorage(
            f"{shown} throws keys away when its memory is full, and jobs with them (maxmemory-policy "
            f"{each.policy}): set maxmemory-policy noeviction"
        )


def durability_of(servers: list[Safety], copies: int) -> Durability:
    """Of the weakest; a copy that is waited for survives the loss of a machine."""
    if copies:
        return Durability.NODE
    return min((each.durability for each in servers), default=Durability.MEMORY)


def _fields(reply: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def _pairs(reply: list[Any]) -> dict[str, str]:
    texts = [part.decode() for part in reply]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def _version(text: str) -> tuple[int, ...]:
    parts = text.split(".")
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else ()
