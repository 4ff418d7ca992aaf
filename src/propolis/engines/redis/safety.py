"""How the servers keep data, by their own settings, what that is worth, and what they let us do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from propolis.core.protocols import Durability
from propolis.engines.redis.client.link import Link
from propolis.engines.redis.client.target import Layout, Target
from propolis.engines.redis.scripts import load_rights
from propolis.errors import BadSetting, EngineError, EngineUnavailable, UnsafeStorage

OLDEST_SERVER = (6, 2)
NEARLY = 0.9  # of maxmemory
_rights = load_rights()
_ASKED = ("appendonly", "appendfsync", "maxmemory", "maxmemory-policy")


@dataclass(frozen=True, slots=True)
class Safety:
    """The settings of one server.  None: it does not show the setting, as some managed services do not."""

    version: tuple[int, ...] = ()
    appendonly: bool | None = None
    appendfsync: str | None = None
    maxmemory: int | None = None
    used: int | None = None
    policy: str | None = None
    in_cluster: bool = False
    is_replica: bool = False

    @property
    def durability(self) -> Durability:
        """What is not known counts as not there."""
        if not self.appendonly:
            return Durability.MEMORY
        return Durability.POWER if self.appendfsync == "always" else Durability.PROCESS

    def __str__(self) -> str:
        """For the log and `propolis check`."""
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
        for config, reply in zip(configs, replies, strict=False):  # one may be closed meanwhile
            config.update(_pairs(reply))
    fields = [_fields(reply) for reply in infos]
    nothing: dict[str, str] = {}
    pairs = zip_longest(fields, configs, fillvalue=nothing)
    return [safety_of(info, config) for info, config in pairs] or [safety_of({}, {})]


async def _answers(link: Link, *command: str) -> list[Any]:
    try:
        return await link.everywhere(*command)
    except EngineUnavailable:
        raise
    except EngineError:
        return []


def safety_of(info: Mapping[str, str], config: Mapping[str, str]) -> Safety:
    """CONFIG knows best; what it does not show may be in INFO, except for appendfsync."""
    enabled = config.get("appendonly") or {"1": "yes", "0": "no"}.get(info.get("aof_enabled", ""))
    memory, used = config.get("maxmemory") or info.get("maxmemory"), info.get("used_memory")
    return Safety(
        version=_version(info.get("redis_version", "")),
        appendonly=None if enabled is None else enabled == "yes",
        appendfsync=config.get("appendfsync"),
        maxmemory=None if memory is None else int(memory),
        used=None if used is None else int(used),
        policy=config.get("maxmemory-policy") or info.get("maxmemory_policy"),
        in_cluster=info.get("cluster_enabled") == "1",
        is_replica=info.get("role") == "slave",
    )


def check_safety(each: Safety, target: Target, *, looks: bool = False) -> None:
    """Refuse a server that forgets jobs of its own accord, is too old, or not what the URL says.

    Whoever only looks may look at a replica.
    """
    shown = target.shown
    if each.in_cluster and target.layout is not Layout.CLUSTER:
        raise BadSetting(f"{shown} is a node of a cluster: write redis+cluster:// (or rediss+cluster://)")
    if each.is_replica and target.layout is Layout.SINGLE and not looks:
        raise EngineUnavailable(f"{shown} is a replica, to which nothing can be written: name its master")
    if each.version and each.version < OLDEST_SERVER:
        wanted = ".".join(map(str, OLDEST_SERVER))
        raise EngineError(f"{shown} is too old: propolis needs Redis {wanted} or newer, or Valkey")
    if each.policy not in (None, "noeviction"):
        raise UnsafeStorage(
            f"{shown} throws keys away when its memory is full, and jobs with them (maxmemory-policy "
            f"{each.policy}): set maxmemory-policy noeviction"
        )


def complaint_of(each: Safety, shown: str) -> str | None:
    """What an operator should see to, before or when the memory is full."""
    if not each.maxmemory or each.used is None or each.used < NEARLY * each.maxmemory:
        return None
    state = "full" if each.used >= each.maxmemory else "nearly full"
    return (
        f"the memory of {shown} is {state} ({each.used >> 10} of {each.maxmemory >> 10} KiB): where it is "
        f"full puts are refused, until jobs that end have made room; run more workers, or raise maxmemory"
    )


async def check_rights(link: Link, keys: Sequence[bytes], channel: bytes) -> None:
    """Refuse to begin where a script would be stopped in its middle, by an ACL."""
    if missing := await link.call(_rights, keys, [channel]):
        names = ", ".join(name.decode(errors="replace") for name in missing)
        raise EngineError(
            f"{link.target.shown}: the ACL of our user lacks {names}: docs/redis-servers.md has one that is "
            f"enough; nothing was changed"
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
