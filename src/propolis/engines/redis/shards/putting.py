"""How jobs are put where an app has shards: one shard accepts a put whole, and sends jobs of others on.

Before that all shards are asked at once whether anything stands in the way, each for what lives there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from propolis.core.batch import Batch
from propolis.core.envelope import Envelope, is_plain
from propolis.core.ids import is_own, new_id
from propolis.core.protocols import Receipt
from propolis.core.records import Refusal, Swap, Swapped
from propolis.engines.redis.codec import Argument
from propolis.engines.redis.shards.group import ShardGroup, grouped
from propolis.engines.redis.shards.shard import Shard
from propolis.errors import BatchSealed, EngineError, QueueFull, UnknownBatch

MAX_FRESH = 50_000  # ids that are remembered as put by this process


class FreshIds:
    """Knows jobs that no shard can know yet: plain ones whose ids this process has made and not yet put."""

    def __init__(self) -> None:
        self._put: set[str] = set()
        self._after = ""  # ids that were made before this are not remembered any more

    def all_fresh(self, jobs: Sequence[Envelope]) -> bool:
        """Asked once of each: from then on it has been put."""
        ids = {job.id for job in jobs}
        fresh = (
            len(ids) == len(jobs)
            and self._put.isdisjoint(ids)
            and all(job.id > self._after and is_plain(job) and is_own(job.id) for job in jobs)
        )
        if len(self._put) + len(ids) > MAX_FRESH:
            self._after = new_id()
            self._put.clear()
        else:
            self._put |= ids
        return fresh


@dataclass(slots=True)
class PutCheck:
    """What all shards together know of what is about to be put."""

    repeated: bool = False
    used: set[str] = field(default_factory=set)  # ids that are taken
    holders: dict[str, str] = field(default_factory=dict)  # unique key -> the id of the job that holds it
    sealed: dict[str, bool] = field(default_factory=dict)  # of the batches that are there
    caps: dict[str, tuple[int, int]] = field(default_factory=dict)  # queue -> its cap, and how many wait

    def add(self, ids: Sequence[str], names: Sequence[Sequence[str]], answer: Sequence[Any]) -> None:
        """The answer of one shard, which was asked for these ids, and for keys, batches and queues."""
        repeated, used, *found = answer
        self.repeated |= bool(repeated)
        self.used.update(ids[n - 1] for n in used)
        holders, states, caps = (
            zip(asked, each, strict=True) for asked, each in zip(names, found, strict=True)
        )
        self.holders |= {key: holder.decode() for key, holder in holders if holder is not None}
        self.sealed |= {batch: state == 2 for batch, state in states if state}
        self.caps |= {queue: tuple(cap) for queue, cap in caps if cap is not None}

    def refusal(self, job: Envelope) -> Receipt | None:
        if job.id in self.used:
            return Receipt(job.id, False)
        holder = None if job.unique is None else self.holders.get(job.unique)
        return None if holder is None else Receipt(holder, False)

    def check_room(self, jobs: Sequence[Envelope]) -> None:
        for queue, (cap, waiting) in self.caps.items():
            coming = sum(job.queue == queue for job in jobs)
            if coming and waiting + coming > cap:
                raise QueueFull(queue, cap, waiting + coming)

    def check_batches(self, jobs: Sequence[Envelope], opens: Sequence[Batch]) -> None:
        """Those of the jobs, and around the batches that are opened, are there and open, or opened before."""
        opened: set[str | None] = {None}
        joined: set[str | None] = set()
        for batch in opens:
            if batch.id not in self.sealed:
                joined |= {batch.parent} - opened
                opened.add(batch.id)
        joined |= {job.batch for job in jobs} - opened
        for name in sorted(filter(None, joined)):
            if name not in self.sealed:
                raise UnknownBatch(name)
            if self.sealed[name]:
                raise BatchSealed(name)

    def let_in(
        self, jobs: Sequence[Envelope], *, opens: Sequence[Batch] = (), bounded: bool = True
    ) -> list[Envelope]:
        """Those that are not taken; raises as a put does."""
        left = [job for job in jobs if self.refusal(job) is None]
        if bounded:
            self.check_room(_without_doubles(left))
        self.check_batches(left, opens)
        return left


class Putting:
    """Puts into a group of shards."""

    def __init__(self, group: ShardGroup) -> None:
        self._group = group
        self._fresh = FreshIds()

    async def put(
        self, jobs: Sequence[Envelope], token: str | None, batch: Batch | None = None, *, seal: bool = False
    ) -> list[Receipt]:
        fresh = self._fresh.all_fresh(jobs)
        if fresh and batch is None and (shard := self._only_shard(jobs)) is not None:
            return await shard.put_here(jobs, token, None, seal=False)
        opens = () if batch is None else (batch,)
        check = await self._check(jobs, token, opens)
        if check.repeated:
            return [check.refusal(job) or Receipt(job.id, False) for job in jobs]
        refusals = [check.refusal(job) for job in jobs]
        left = [job for job, refusal in zip(jobs, refusals, strict=True) if refusal is None]
        coming = _without_doubles(left)
        check.check_room(coming)
        check.check_batches(coming, opens)
        receipts: list[Receipt] = []
        if left or batch is not None or token is not None:
            shard = self._accepting(left, batch, check)
            receipts = await shard.put_here(left, token, batch, seal=seal)
        rest = iter(receipts)
        return [refusal or next(rest) for refusal in refusals]

    async def admitted(self, swaps: Sequence[Swap]) -> list[Swap | Swapped]:
        """Each swap with those of its jobs that are not taken; or why it is refused."""
        jobs = [job for swap in swaps for job in swap.puts]
        check = await self._check(jobs, None, [batch for swap in swaps for batch in swap.opens])
        return [self._admitted(swap, check) for swap in swaps]

    def _admitted(self, swap: Swap, check: PutCheck) -> Swap | Swapped:
        try:
            left = check.let_in(swap.puts, opens=swap.opens, bounded=swap.bounded)
        except QueueFull as error:
            return Swapped(None, Refusal.QUEUE_FULL, error.queue)
        except (UnknownBatch, BatchSealed) as error:
            return Swapped(None, Refusal.NO_BATCH, error.batch)
        return replace(swap, puts=tuple(left))

    async def let_in(self, jobs: Sequence[Envelope]) -> list[Envelope]:
        """Those that are not taken; raises as a put does."""
        return (await self._check(jobs, None)).let_in(jobs)

    async def taken(self, jobs: Sequence[Envelope]) -> set[str]:
        """The ids that are known in another shard than their own.  From now on they have been put."""
        self._fresh.all_fresh(jobs)
        known = await self._group.post.known([job.id for job in jobs])
        of_job = self._group.shard_map.of_job
        return {job.id for job in jobs if set(known.get(job.id, ())) - {of_job(job.queue, job.id)}}

    def _only_shard(self, jobs: Sequence[Envelope]) -> Shard | None:
        """The one in which all of them live, if that is so."""
        numbers = {self._group.shard_map.of_job(job.queue, job.id) for job in jobs}
        return self._group.shards[numbers.pop()] if len(numbers) == 1 else None

    async def _check(
        self, jobs: Sequence[Envelope], token: str | None, opens: Sequence[Batch] = ()
    ) -> PutCheck:
        """Ask all shards at once, each for what lives there."""
        shard_map = self._group.shard_map
        ids = [job.id for job in jobs]
        keys = {job.unique for job in jobs if job.unique is not None}
        batches = {job.batch for job in jobs if job.batch is not None}
        batches |= {name for batch in opens for name in (batch.id, batch.parent) if name is not None}
        names_by_shard = (
            grouped((key, [shard_map.of(key)]) for key in keys),
            grouped((name, [shard_map.of(name)]) for name in batches),
            grouped((queue, shard_map.of_queue(queue)) for queue in {job.queue for job in jobs}),
        )
        check = PutCheck()

        async def ask(shard: Shard) -> None:
            names = [each.get(shard.number, []) for each in names_by_shard]
            arguments: list[Argument] = [token or ""]
            for each in (ids, *names):
                arguments += (len(each), *each)
            check.add(ids, names, await shard.call_here("check_put", *arguments))

        await asyncio.gather(*map(ask, self._group.shards))
        return check

    def _accepting(self, jobs: Sequence[Envelope], batch: Batch | None, check: PutCheck) -> Shard:
        """The shard that accepts a put: the one whose word must hold at that very moment.

        A cap must not be overfilled, a batch not be sealed meanwhile, a key or an id not be taken.
        """
        shard_map = self._group.shard_map
        capped = self._capped(jobs, check)
        names = [] if batch is None else [batch.id]
        names += [job.batch for job in jobs if job.batch is not None]
        names += [job.unique for job in jobs if job.unique is not None]
        names += [job.id for job in jobs if job.chosen]
        queues = [shard_map.of_job(job.queue, job.id) for job in jobs]
        return self._group.shards[[*capped, *map(shard_map.of, names), *queues, 0][0]]

    def _capped(self, jobs: Sequence[Envelope], check: PutCheck) -> list[int]:
        """The number of the shard whose queue has a cap, if one has: a put cannot keep to two."""
        shard_map = self._group.shard_map
        for queue in check.caps:
            if queue in shard_map.partitions:
                raise EngineError(
                    f"{queue} has several partitions and a cap, which cannot be kept: remove the cap"
                )
        capped = {shard_map.of_job(job.queue, job.id): job.queue for job in jobs if job.queue in check.caps}
        if len(capped) > 1:
            raise EngineError(
                f"{' and '.join(sorted(capped.values()))} have caps and live in different shards, where no "
                f"put can keep to both at once: put their jobs one queue at a time"
            )
        return list(capped)


def _without_doubles(jobs: Sequence[Envelope]) -> list[Envelope]:
    """Those that are not refused because of one before them: as put.lua sees it."""
    ids: set[str] = set()
    keys: set[str] = set()
    found = []
    for job in jobs:
        if job.id not in ids and job.unique not in keys:
            ids.add(job.id)
            if job.unique is not None:
                keys.add(job.unique)
            found.append(job)
    return found
