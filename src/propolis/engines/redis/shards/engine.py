"""An app in many slots of a cluster: its shards, each whole in itself, behave as one engine.

A queue lives in the shard that follows from its name, a batch in that of its id, a unique key in that of the
key, a feed in that of its name.  Records live in shard 0, rules in all of them.  Whatever touches one shard
is one atomic step, as on one server.  What leads to another shard is recorded in that step and sent on: see
shard.py.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any, Self, Unpack

from msgspec.structs import replace

from propolis.core.batch import Batch, BatchStatus
from propolis.core.clock import Clock
from propolis.core.envelope import Envelope
from propolis.core.job import JobInfo, Lease, Member, Outcome, State
from propolis.core.protocols import (
    LIMIT_SCOPES,
    PARKED_LINES,
    Counts,
    Durability,
    Exchange,
    Filter,
    LeaseTerms,
    Note,
    Page,
    Receipt,
    Renewal,
    Rule,
    RuleKind,
    Scope,
    Swept,
    Tokens,
)
from propolis.core.records import Bounds, Read, ReadOptions, Swap, Swapped, check_swaps
from propolis.core.transitions import RETENTION, Retention
from propolis.engines.address import Address
from propolis.engines.redis.client.dialler import Credentials
from propolis.engines.redis.client.link import Link, RedisLink
from propolis.engines.redis.client.target import Target, target_of
from propolis.engines.redis.engine import CLUSTER_PREFIX, RedisEngine
from propolis.engines.redis.feeds import READ_EVERY, first_of
from propolis.engines.redis.finding import find_in
from propolis.engines.redis.shards.group import ShardGroup, grouped
from propolis.engines.redis.shards.leasing import Leasing
from propolis.engines.redis.shards.putting import Putting
from propolis.engines.redis.shards.rules import SharedRules
from propolis.engines.redis.shards.shard import Shard
from propolis.engines.redis.shards.shard_map import ShardMap
from propolis.engines.shared.feed_verbs import After, FeedVerbs, Hears, Pages
from propolis.engines.shared.from_exchange import FromExchange
from propolis.engines.shared.giving_back import all_given_back, gives_back
from propolis.errors import BadSetting, MemoryFull, StorageFull


class ShardedEngine(FromExchange, FeedVerbs):
    """All pieces but `Transactional` in several slots of a cluster."""

    limits = LIMIT_SCOPES

    def __init__(
        self,
        target: Target,
        shard_map: ShardMap,
        *,
        prefix: str | None = None,
        clock: Clock | None = None,
        retention: Retention = RETENTION,
        credentials: Credentials | None = None,
    ) -> None:
        self._link: Link = RedisLink(target, credentials)
        prefix = CLUSTER_PREFIX if prefix is None else prefix
        self._group = ShardGroup(self._link, shard_map, prefix, clock=clock, retention=retention)
        self._shards = self._group.shards
        self._first = self._shards[0]
        self._putting = Putting(self._group)
        self._rules = SharedRules(self._group)
        self._leasing = Leasing(self._group, self._putting, self._rules)
        self._waited: set[bytes] = set()

    @property
    def remote(self) -> bool:
        return True

    @property
    def in_order(self) -> bool:
        return False  # each shard has its own

    @property
    def durability(self) -> Durability:
        return self._first.durability

    async def open(self) -> Self:
        return await self._open(looks=False)

    async def open_to_look(self) -> Self:
        return await self._open(looks=True)

    async def _open(self, *, looks: bool) -> Self:
        if await self._first.open_link(looks=looks):
            try:
                if not looks:
                    await asyncio.gather(*(shard.check_rights() for shard in self._shards[1:]))
                await self._group.agree(looks=looks)
            except BaseException:
                await self.close()
                raise
        return self

    async def close(self) -> None:
        await all_given_back(self)
        await self._link.close()

    async def complaints(self) -> list[str]:
        return await self._first.complaints()

    # --- Core: jobs come in --------------------------------------------------------------

    async def put(self, jobs: Sequence[Envelope], *, token: str | None = None) -> list[Receipt]:
        if not jobs and token is None:
            self._link.check_usable()
            return []
        try:
            return await self._putting.put(jobs, token)
        except StorageFull as full:
            raise MemoryFull(jobs[0].queue if jobs else "", full.where) from full

    async def put_batch(
        self, batch: Batch, jobs: Sequence[Envelope] = (), *, seal: bool = True, token: str | None = None
    ) -> list[Receipt]:
        try:
            return await self._putting.put(jobs, token, batch, seal=seal)
        except StorageFull as full:
            raise MemoryFull(jobs[0].queue if jobs else "", full.where) from full

    async def forget_tokens(self, tokens: Sequence[str]) -> None:
        await asyncio.gather(*(shard.forget_tokens(tokens) for shard in self._shards))

    async def seal(self, batch: str) -> bool:
        return await self._group.of(batch).seal(batch)

    # --- Core: jobs go out ---------------------------------------------------------------

    async def settle(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> list[Lease]:
        if not outcomes:
            self._link.check_usable()
            return []
        return await self._leasing.settle(outcomes)

    @gives_back
    async def exchange(
        self, outcomes: Sequence[tuple[Lease, Outcome]], wants: Mapping[str, int], **terms: Unpack[LeaseTerms]
    ) -> Exchange:
        self._link.check_usable()
        self._looked(wants)
        return await self._leasing.exchange(outcomes, wants, **terms)

    def _looked(self, queues: Iterable[str]) -> None:
        shards = ((queue, shard) for queue in queues for shard in self._group.of_queue(queue))
        self._link.looked(key for queue, shard in shards for key in shard.heard_at(queue))

    async def renew(self, leases: Sequence[Lease], *, span: timedelta) -> list[Renewal]:
        return await self._leasing.renew(leases, span=span)

    async def note(self, notes: Sequence[Note]) -> list[Lease]:
        return await self._leasing.note(notes)

    async def sweep(self, *, limit: int = 1000, by: str | None = None) -> Swept:
        """All shards, each kind of work at most `limit` times in each; and send on what others have not."""
        await self._group.learn_partitions()
        found = await asyncio.gather(*(shard.swept(limit, by) for shard in self._shards))
        ended = [pair for swept, ranks in found for pair in zip(ranks, swept.ended, strict=True)]
        return replace(
            all_swept([swept for swept, _ in found]), ended=tuple(job_id for _, job_id in sorted(ended))
        )

    async def repair(self, *, mend: bool) -> list[str]:
        """Unique keys and batches are not looked at: their jobs may be on their way."""
        await self._group.learn_partitions()
        found = [await shard.repair(mend=mend) for shard in self._shards]
        return [sentence for each in found for sentence in each]

    # --- Inspects ----------------------------------------------------------------------

    async def now(self) -> datetime:
        return await self._first.now()

    async def queues(self, *, limit: int = 1000, after: str | None = None) -> dict[str, Counts]:
        found: dict[str, Counts] = {}
        pages = (shard.queues(limit=limit, after=after) for shard in self._shards)
        for each in await asyncio.gather(*pages):
            for name, counts in each.items():
                found[name] = _sum(found[name], counts) if name in found else counts
        return {name: found[name] for name in sorted(found, key=str.encode)[:limit]}

    async def get(self, job_id: str) -> JobInfo | None:
        found = await asyncio.gather(*(shard.get(job_id) for shard in self._shards))
        return next((info for info in found if info is not None), None)

    async def find(self, where: Filter, *, limit: int = 100, after: int | None = None) -> Page:
        shards = self._shards if where.queue is None else self._group.of_queue(where.queue)
        ordered = sorted(shards, key=lambda shard: shard.number)
        return await find_in(ordered, len(self._shards), where, limit, after)

    async def oldest(self, queues: Sequence[str]) -> dict[str, datetime]:
        found: dict[str, datetime] = {}
        by_shard = grouped((queue, self._group.shard_map.of_queue(queue)) for queue in queues)
        for number, own in by_shard.items():
            for queue, put_at in (await self._shards[number].oldest(own)).items():
                found[queue] = min(found.get(queue, put_at), put_at)
        return found

    async def position(self, job_id: str) -> int | None:
        """Of a queue with several partitions: in its own partition."""
        for shard, _ in await self._group.located([job_id]):
            if (found := await shard.position(job_id)) is not None:
                return found
        return None

    # --- Operates, Rules ----------------------------------------------------------------

    async def cancel(self, job_ids: Sequence[str]) -> list[bool]:
        located = await self._group.located(job_ids)
        return await _answers(job_ids, [(ids, shard.cancel(ids)) for shard, ids in located])

    async def delete(self, job_ids: Sequence[str]) -> list[bool]:
        located = await self._group.located(job_ids)
        return await _answers(job_ids, [(ids, shard.delete(ids)) for shard, ids in located])

    async def reschedule(self, job_id: str, due_at: datetime) -> bool:
        for shard, _ in await self._group.located([job_id]):
            if await shard.reschedule(job_id, due_at):
                return True
        return False

    async def replay(self, job_ids: Sequence[str]) -> list[bool]:
        located = await self._group.located(job_ids)
        found = {info.id: (shard, info) for shard, ids in located for info in await shard.job_infos(ids)}
        keyed = {
            job_id: info.unique
            for job_id, (shard, info) in found.items()
            if info.unique is not None and self._group.of(info.unique) is not shard
        }
        if not keyed:
            return await _answers(job_ids, [(ids, shard.replay(ids)) for shard, ids in located])
        return [
            job_id in found and await self._replay(job_id, found[job_id][0], keyed.get(job_id))
            for job_id in job_ids
        ]

    async def _replay(self, job_id: str, shard: Shard, key: str | None) -> bool:
        """A `key` lives in another shard, and is taken there in one step with the order to replay the job."""
        if key is None:
            return (await shard.replay([job_id]))[0]
        if (info := await shard.get(job_id)) is None or info.state is not State.DEAD:
            return False
        await self._group.post.flush(shard)  # when it ended it freed the key: that must not arrive after this
        taken, reports = await self._group.of(key).call_through("replay_keyed", key, job_id, shard.number)
        return bool(taken) and reports.get(job_id, "1") == "1"

    async def drop(self, queue: str) -> int:
        return sum(await asyncio.gather(*(shard.drop(queue) for shard in self._group.of_queue(queue))))

    async def add_rule(self, rule: Rule) -> bool:
        return await self._rules.add(rule)

    async def remove_rule(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        return await self._rules.remove(kind, scope, name)

    async def rules(self, *, limit: int = 1000, after: Rule | None = None) -> list[Rule]:
        return await self._rules.page(limit, after)

    async def tokens(self, rule: Rule, name: str) -> Tokens:
        """One shard has the bucket, and the others find it full."""
        return min(
            await asyncio.gather(*(shard.tokens(rule, name) for shard in self._shards)),
            key=lambda tokens: (tokens.free, -tokens.next_in),
        )

    # --- Batches -------------------------------------------------------------------------

    async def batch(self, batch: str) -> BatchStatus | None:
        return await self._group.of(batch).batch(batch)

    async def batches(self, *, limit: int = 100, after: str | None = None) -> list[BatchStatus]:
        found = await asyncio.gather(*(shard.batches(limit=limit, after=after) for shard in self._shards))
        return sorted((one for each in found for one in each), key=lambda it: it.id.encode())[:limit]

    async def members(self, batch: str, *, limit: int = 1000, after: int | None = None) -> list[Member]:
        """The shard of the batch does not know which of them run: their own shards do."""
        members = await self._group.of(batch).members(batch, limit=limit, after=after)
        pending = [member.id for member in members if not member.state.terminal]
        if not pending:
            return members
        found = await asyncio.gather(*(shard.call_here("presence", *pending) for shard in self._shards))
        ready = {job_id for job_id, *at in zip(pending, *found, strict=True) if any(at) and 2 not in at}
        return [
            replace(member, state=State.READY if member.id in ready else State.RUNNING)
            if not member.state.terminal
            else member
            for member in members
        ]

    async def delete_batch(self, batch: str) -> bool:
        return await self._group.of(batch).delete_batch(batch)

    # --- Records: all of them are in the first shard -------------------------------------

    async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:
        """Jobs travel by the rule for emissions, so other shards are asked before what stands in the way."""
        check_swaps(swaps)
        puts = any(swap.puts or swap.opens for swap in swaps)
        return await self._first.swap_here(await self._putting.admitted(swaps) if puts else swaps, token)

    async def records(self, kind: str, **which: Unpack[ReadOptions]) -> Read:
        return await self._first.records(kind, **which)

    # --- Feeds ---------------------------------------------------------------------------

    async def append_entries(self, feed: str, entries: Sequence[bytes], bounds: Bounds) -> int | None:
        return await self._group.of(feed).append_entries(feed, entries, bounds)

    async def feed_pages(self, after: After, limit: int) -> Pages:
        asked = self._feeds_by_shard(after).items()
        found = await asyncio.gather(
            *(shard.feed_pages({feed: after[feed] for feed in feeds}, limit) for shard, feeds in asked)
        )
        return {feed: page for pages in found for feed, page in pages.items()}

    @asynccontextmanager
    async def _hearing(self, feeds: Sequence[str]) -> AsyncIterator[Hears]:
        shards = self._feeds_by_shard(feeds)

        async def hears(pages: Pages, timeout: float) -> None:
            lasts = [(shard, {feed: pages[feed].last for feed in each}) for shard, each in shards.items()]
            await first_of([shard.feed_news(each, min(timeout, READ_EVERY)) for shard, each in lasts])

        yield hears

    def _feeds_by_shard(self, feeds: Iterable[str]) -> dict[Shard, list[str]]:
        found: defaultdict[Shard, list[str]] = defaultdict(list)
        for feed in feeds:
            found[self._group.of(feed)].append(feed)
        return found

    # --- Core: hints ---------------------------------------------------------------------

    @property
    def hears(self) -> bool:
        return self._link.hears

    async def wait(self, queues: Sequence[str], timeout: float) -> bool:
        """Also until the first of the jobs that were not due at the last look becomes so."""
        left = min((shard.due_in(queues) for shard in self._shards), default=timeout)
        if left < timeout:
            return await self._wait(queues, left) or True
        return await self._wait(queues, timeout)

    async def _wait(self, queues: Sequence[str], timeout: float) -> bool:
        ends = time.monotonic() + timeout
        shards = {queue: self._group.of_queue(queue) for queue in queues}
        heard_at = [shard.heard_at(queue) for queue, each in shards.items() for shard in each]
        channels, doors = [channel for channel, _ in heard_at], [door for _, door in heard_at]
        if not await self._link.wait_for(channels=channels, lists=doors, timeout=timeout):
            return False
        if self._waited.issuperset(channels):
            return True
        self._waited.update(channels)
        self._looked(queues)
        names_by_shard = grouped((queue, [shard.number for shard in each]) for queue, each in shards.items())
        found = [self._shards[number].has_work(names) for number, names in names_by_shard.items()]
        if any(await asyncio.gather(*found)):
            return True
        left = ends - time.monotonic()
        return await self._link.wait_for(channels=channels, lists=doors, timeout=left)


def all_swept(swept: Sequence[Swept]) -> Swept:
    """What was done in all shards together."""
    return Swept(
        promoted=sum(each.promoted for each in swept),
        reaped=sum(each.reaped for each in swept),
        expired=sum(each.expired for each in swept),
        removed=sum(each.removed for each in swept),
        next_in=min((each.next_in for each in swept if each.next_in is not None), default=None),
        again_in=min((each.again_in for each in swept if each.again_in is not None), default=None),
        records_due=tuple(sorted({kind for each in swept for kind in each.records_due}, key=str.encode)),
        ended=tuple(job_id for each in swept for job_id in each.ended),
        parked=tuple(sorted({line for each in swept for line in each.parked}))[:PARKED_LINES],
    )


async def _answers(
    job_ids: Sequence[str], asked: Sequence[tuple[list[str], Coroutine[Any, Any, list[bool]]]]
) -> list[bool]:
    """Of each job whether a shard that was asked has done it.  A job that is named twice is done once."""
    ids, asking = zip(*asked, strict=True) if asked else ((), ())
    left = {
        job_id
        for each, done in zip(ids, await asyncio.gather(*asking), strict=True)
        for job_id, is_done in zip(each, done, strict=True)
        if is_done
    }
    answers = []
    for job_id in job_ids:
        answers.append(job_id in left)
        left.discard(job_id)
    return answers


def _sum(one: Counts, other: Counts) -> Counts:
    names = [name for name in Counts.__struct_fields__ if name != "more"]
    sums = {name: getattr(one, name) + getattr(other, name) for name in names}
    return Counts(**sums, more=one.more or other.more)


def from_url(address: Address, clock: Clock | None) -> RedisEngine | ShardedEngine:
    """`redis+cluster://host:6379?shards=16&partitions=mail:4`; without shards everything is in one slot."""
    target = target_of(address, own=("shards", "partitions", "prefix"))
    prefix, count = address.options.get("prefix"), address.options.get("shards")
    partitions = _partitions(address.options.get("partitions", ""))
    if count is None:
        if partitions:
            raise BadSetting("partitions of queues need shards to be in: write shards=16 as well")
        return RedisEngine(target, prefix=prefix, clock=clock)
    if not count.isdecimal():
        raise BadSetting(f"shards={count!r}: write a whole number")
    return ShardedEngine(target, ShardMap(int(count), partitions), prefix=prefix, clock=clock)


def _partitions(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in filter(None, text.split(",")):
        queue, _, n = each.rpartition(":")
        if not queue or not n.isdecimal():
            raise BadSetting(f"partitions={text!r}: write queue:number, as in mail:4,sms:2")
        if found.setdefault(queue, int(n)) != int(n):
            raise BadSetting(f"partitions={text!r}: {queue} has two numbers: leave one out")
    return found
