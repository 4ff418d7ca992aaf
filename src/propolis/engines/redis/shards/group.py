"""The shards of one app: where each is found, and what all who use the app must agree on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from propolis.core.clock import Clock
from propolis.core.protocols import RuleKind, Scope
from propolis.core.transitions import Retention
from propolis.engines.redis.client.link import Link
from propolis.engines.redis.shards.shard import Post, Shard
from propolis.engines.redis.shards.shard_map import ShardMap
from propolis.errors import BadSetting, EngineError

_PARTITION = "partition:"
_TAG = re.compile(r"\{([^{}]+)\}")


class ShardGroup:
    """All shards in the order of their numbers; the slot of each follows from its own hash tag."""

    def __init__(
        self, link: Link, shard_map: ShardMap, prefix: str, *, clock: Clock | None, retention: Retention
    ) -> None:
        if not _TAG.search(prefix):
            raise BadSetting(f"prefix={prefix!r}: with shards it needs a hash tag, such as {{shop}}:")
        self.link = link
        self.shard_map = shard_map
        self.post = Post()
        self._prefix = prefix
        self.shards = self.post.shards = [
            Shard(
                number,
                _TAG.sub(rf"{{\1:{number}}}", prefix, count=1),
                link,
                shard_map,
                clock=clock,
                retention=retention,
                post=self.post,
            )
            for number in range(shard_map.count)
        ]

    # --- where things are ----------------------------------------------------------------

    def of(self, name: str) -> Shard:
        return self.shards[self.shard_map.of(name)]

    def of_queue(self, queue: str) -> list[Shard]:
        return [self.shards[number] for number in self.shard_map.of_queue(queue)]

    async def located(self, job_ids: Sequence[str]) -> list[tuple[Shard, list[str]]]:
        """The shards that may know these jobs, with the ids of those."""
        known = await self.post.known(list(dict.fromkeys(job_ids)))
        found = grouped(known.items())
        return [(self.shards[number], ids) for number, ids in sorted(found.items())]

    # --- what all must agree on ----------------------------------------------------------

    async def agree(self, *, looks: bool) -> None:
        """All who use the app must look for a name in the same shard: so the first one records the map.

        Whoever only looks records nothing.
        """
        shown, count = self.link.target.shown, self.shard_map.count
        if await self.link.command("EXISTS", f"{self._prefix}seq", reads=True):
            raise EngineError(
                f"{shown}: the jobs under {self._prefix} live in one slot: open it without shards, or use "
                f"another prefix"
            )
        if not looks:
            await self.link.command("HSETNX", f"{self._prefix}shards", "count", count)
        recorded = await self._recorded()
        if recorded.get("count", count) != count:
            raise EngineError(
                f"{shown}: the app under {self._prefix} has {recorded['count']} shards: write "
                f"shards={recorded['count']}"
            )
        for queue, n in self.shard_map.partitions.items():
            if not looks:
                await self._record_partitions(queue, n, before=recorded.get(f"{_PARTITION}{queue}", 1))
        await self.learn_partitions()

    async def learn_partitions(self) -> None:
        """Somebody may have given a queue more partitions."""
        for name, n in (await self._recorded()).items():
            if name.startswith(_PARTITION):
                self.shard_map.partitions[name.removeprefix(_PARTITION)] = n

    async def _recorded(self) -> dict[str, int]:
        flat = await self.link.command("HGETALL", f"{self._prefix}shards", reads=True)
        return {name.decode(): int(n) for name, n in zip(flat[::2], flat[1::2], strict=True)}

    async def _record_partitions(self, queue: str, n: int, *, before: int) -> None:
        if n < before:
            raise EngineError(
                f"{self.link.target.shown}: {queue} has {before} partitions already, and cannot have fewer"
            )
        if n > before:
            await self._check_unlimited(queue)
            await self.link.command("HSET", f"{self._prefix}shards", f"{_PARTITION}{queue}", n)

    async def _check_unlimited(self, queue: str) -> None:
        for rule in await self.shards[0].rules():
            bounded = rule.kind is RuleKind.CAP or rule.kind is RuleKind.LIMIT
            if bounded and rule.scope is Scope.QUEUE and rule.name == queue:
                raise EngineError(
                    f"{queue} has a {rule.kind.value}: remove it before the queue gets more partitions, and "
                    f"then set the limit again (a queue with partitions has no cap)"
                )


def grouped(numbered: Iterable[tuple[Any, Sequence[int]]]) -> dict[int, list[Any]]:
    """Things by the numbers of the shards that each belongs to."""
    found: dict[int, list[Any]] = {}
    for thing, numbers in numbered:
        for number in numbers:
            found.setdefault(number, []).append(thing)
    return found
