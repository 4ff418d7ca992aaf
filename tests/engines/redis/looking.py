"""What tests of the engine take, and see."""

from __future__ import annotations

from propolis.core.job import JobInfo, Lease
from propolis.core.protocols import Engine, Filter
from propolis.engines.redis.client.link import RedisLink
from propolis.testing.engines.samples import HOLDER, SPAN

COUNTERS = {"seq"}  # what is left when all jobs have gone


async def take(engine: Engine, limit: int = 100, queue: str = "default") -> list[Lease]:
    return await engine.lease({queue: limit}, span=SPAN, holder=HOLDER)


async def keys(link: RedisLink, prefix: str) -> set[str]:
    """All but the one that opening leaves, and the largest time."""
    found = await link.command("KEYS", f"{prefix}:*")
    return {key.decode().removeprefix(f"{prefix}:") for key in found} - {"layout", "latest"}


async def listed(engine: Engine, where: Filter, limit: int) -> list[JobInfo]:
    found: list[JobInfo] = []
    after = None
    while True:
        page = await engine.find(where, limit=limit, after=after)
        assert len(page.jobs) <= limit
        found += page.jobs
        if (after := page.after) is None:
            return found
