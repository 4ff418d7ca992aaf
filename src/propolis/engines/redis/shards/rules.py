"""Rules where an app has shards: all shards have them, and a limit on what runs in several is shared out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from propolis.core.ids import new_id
from propolis.core.protocols import EACH, Rule, RuleKind, Scope
from propolis.engines.redis.codec import rate_text, terms_of
from propolis.engines.redis.shards.group import ShardGroup, grouped
from propolis.engines.redis.shards.shard import Shard
from propolis.errors import EngineError

SHARES_AT_ONCE = 100  # jobs for which shares of limits are looked for in one call


class SharedRules:
    """The rules of a group of shards; sharing.lua describes how shares of a limit move between them."""

    def __init__(self, group: ShardGroup) -> None:
        self._group = group

    async def add(self, rule: Rule) -> bool:
        """In all shards; shard 0, which is asked for them, comes last."""
        await self._group.learn_partitions()
        if self._is_shared(rule.kind, rule.scope, rule.name):
            return await self._share(rule)
        if rule.kind is RuleKind.CAP and len(self._group.of_queue(rule.name)) > 1:
            raise EngineError(
                f"{rule.name} has several partitions, and no put can see how full the others are: it cannot "
                f"be capped"
            )
        first, *others = self._group.shards
        await asyncio.gather(*(shard.add_rule(rule) for shard in others))
        return await first.add_rule(rule)

    async def remove(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        first, *others = self._group.shards
        if self._is_shared(kind, scope, name):
            limit = _limit(scope, name)
            for shard in reversed(others):
                await shard.call_here("stop_sharing", limit, reads=False)
            return bool(await first.call_here("stop_sharing", limit, reads=False))
        await asyncio.gather(*(shard.remove_rule(kind, scope, name) for shard in others))
        return await first.remove_rule(kind, scope, name)

    async def page(self, limit: int, after: Rule | None) -> list[Rule]:
        first = self._group.shards[0]
        reading = first.rules(limit=limit, after=after)
        rules, found = await asyncio.gather(reading, first.call_here("shared_limits"))
        shared = {limit.decode(): n for limit, n in zip(found[::2], found[1::2], strict=True)}
        return [
            replace(rule, n=shared.get(_limit(rule.scope, rule.name), rule.n))
            if rule.kind is RuleKind.LIMIT
            else rule
            for rule in rules
        ]

    async def gather_shares(self, shard: Shard, queue: str, want: int, tasks: Sequence[str]) -> None:
        """Let this shard have what others do not use of limits that its next jobs come under."""
        shares, names = await shard.call_here("missing_shares", queue, min(want, SHARES_AT_ONCE), *tasks)
        for limit, sharing, short in shares:
            await self._borrow(shard, limit, sharing, short)
        if names:
            await self._own(shard, names)

    async def _own(self, shard: Shard, names: list[bytes]) -> None:
        """Let this shard own what one at a time does, and know what runs elsewhere: see sharded.lua."""
        since = await self._owned(shard, names)
        if foreign := [name for name in names if not since[name]]:
            owners = await self._group.shards[0].call_here("owners", *foreign)
            by_owner = grouped((name, [owner]) for name, owner in zip(foreign, owners, strict=True))
            for owner, theirs in by_owner.items():
                await self._group.shards[owner].call_through("hand_over", shard.number, *theirs)
            since |= await self._owned(shard, foreign)
        owned = [name for name in names if since[name]]
        if not owned:
            return
        others = [other for other in self._group.shards if other is not shard]
        counts = await asyncio.gather(
            *(other.call_here("running_under", *owned, reads=False) for other in others)
        )
        known = [(name, since[name], sum(each)) for name, *each in zip(owned, *counts, strict=True)]
        await shard.call_here("know_elsewhere", *(part for row in known for part in row), reads=False)

    async def _owned(self, shard: Shard, names: list[bytes]) -> dict[bytes, bytes]:
        return dict(zip(names, await shard.call_here("own", *names, reads=False), strict=True))

    async def _borrow(self, shard: Shard, limit: bytes, sharing: bytes, short: int) -> None:
        shards = self._group.shards
        rows = await asyncio.gather(*(other.call_here("share_in_use", limit) for other in shards))
        uses = list(zip(shards, rows, strict=True))
        # What runs elsewhere beyond a share can only become less: so much stays in the pool.
        beyond = sum(max(0, running - share) for other, (share, running, _) in uses if other is not shard)
        for other, (share, running, left) in uses:
            if short > 0 and (left > beyond or (share > running and other is not shard)):
                lent, _ = await other.call_through("lend", limit, sharing, short, shard.number, beyond)
                short -= lent

    def _is_shared(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        """Whether each shard has a share of it; a limit for many keys is whole in each of them."""
        if kind is not RuleKind.LIMIT or scope is Scope.TASK_KEY:
            return False
        if scope is Scope.QUEUE:
            return len(self._group.of_queue(name)) > 1
        return scope is Scope.TASK or not name.endswith(EACH)

    async def _share(self, rule: Rule) -> bool:
        """First nobody has a share of it; when all shards know that, it is shared out as they need it."""
        first, sharing, limit = self._group.shards[0], new_id(), _limit(rule.scope, rule.name)
        was_there, is_same = await first.call_here("fill_pool", limit, rule.n, sharing, 0, reads=False)
        if not is_same:
            for shard in self._group.shards:
                await shard.call_here("start_sharing", limit, sharing, reads=False)
                shard.limited = True
            await first.call_here("fill_pool", limit, rule.n, sharing, 1, reads=False)
        for shard in reversed(self._group.shards):
            await shard.call_here("terms_of_limit", limit, *terms_of(rule), rate_text(rule), reads=False)
        return not was_there


def _limit(scope: Scope, name: str) -> str:
    return f"limit:{scope.value}:{name}"
