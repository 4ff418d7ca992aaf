"""The Redis engine: Redis 6.2 or newer, or Valkey; every verb is one call of one Lua script.

The scripts are in lua/, put together in scripts.py.  A script is atomic, so a verb is too, and it takes
its time from the server.  All data goes through KEYS and ARGV.

The key layout, whose only description this is.  PREFIX is `propolis:`.

    PREFIX{queue}:incoming        list     the open door: any program may LPUSH a job as JSON
    PREFIX{queue}:line:<priority> list     the ids of ready jobs, first in, first out
    PREFIX{queue}:void:<priority> set      entries of that list that were struck out and are skipped
    PREFIX{queue}:tidied:<priority> list   its head, while what is struck out is being dropped from it
    PREFIX{queue}:front           zset     ready jobs that stand before the lists, by priority and place
    PREFIX{queue}:held:<rule>     zset     the same, set aside because of a rule (task:<name>, …)
    PREFIX{queue}:parked:<task>   zset     put number and id of parked jobs, by priority
    PREFIX{queue}:holds           set      the rules for which there is such a set
    PREFIX{queue}:freed           zset     where there are many of them: those that may have room, by the
                                           places of their first jobs
    PREFIX{queue}:ranks           zset     the priorities that have a line, highest first
    PREFIX{queue}:scheduled       zset     put number and id of jobs that are not due yet, by due time
    PREFIX{queue}:running         hash     id -> flag, fence, bundle, start, attempt, holder.  The flag is P,
                                           M or X, as of a record, or L: plain, and limits count it
    PREFIX{queue}:done|dead|cancelled zset put number and id of kept jobs, by the time of their end
    PREFIX{queue}:tally           hash     put, deleted: how many; front, back: the last places given
    PREFIX{queue}:news            channel  a message whenever there may be something to lease

    PREFIX{queue}:going:<number>:<what>  any of these, set aside to be removed

    PREFIXjobs                    hash     id -> record: what was put, once, and never rewritten
    PREFIXstate                   hash     id -> MessagePack of what has changed since; most jobs have none
    PREFIXresults                 hash     id -> the result of a kept job
    PREFIXcheckpoints             hash     id -> what its runs have saved last; its state says `saved`
    PREFIXleases                  zset     bundles of leases, by when they end
    PREFIXbundles                 hash     bundle -> how many leases it has
    PREFIXbundled                 hash     bundle -> MessagePack: its span; of each queue its name and all ids
    PREFIXexpiring, PREFIXkeep    zset     ids, by when they expire, or are forgotten
    PREFIXknown, PREFIXtokens     zset     chosen ids of ended jobs, tokens of puts, by their last moment
    PREFIXunique                  hash     unique key -> the id that holds it
    PREFIXrules, PREFIXcaps       hash     kind:scope:name -> n; queue -> n
    PREFIXlimits                  hash     scope:name of each limit on a task or key -> how far the count of
                                           what ran before has come: a queue and a place in it, or nothing.
                                           `each key` is there while there are limits for many keys, and all
                                           that runs and has a key is counted; `uncounted` where there were
    PREFIXlimited:<scope>:<name>  set      the ids of what runs under it
    PREFIXrates                   hash     kind:scope:name of limits that are rates -> each how many us a
                                           token comes, and how many are saved up
    PREFIXprefixes                set      what the keys begin with that have a limit, each of them
    PREFIXbuckets                 zset     scope:name of queues, tasks and keys whose bucket is not full, by
                                           when it is
    PREFIXrefills                 zset     the same of those that had no token for a job, by when they have
    PREFIXcounting                set      scope:name of those of which that count goes on
    PREFIXrule_names              zset     kind:scope:name of all rules and caps
    PREFIXrule_terms              hash     the same -> when it was set, until when, who and why
    PREFIXrule_ends               zset     the same of those that have an end, by that
    PREFIXparked                  zset     queue and task of all parked lines
    PREFIXholding                 set      the queues in which a rule has set something aside
    PREFIXdeaths                  zset     the queues with dead jobs, by how many
    PREFIXdoor                    string   the queue at whose door a sweep looked last, where these are many
    PREFIXqueues                  zset     the names of all queues
    PREFIXtimed                   zset     those with scheduled jobs, by when the first is due, or earlier
    PREFIXbatches                 zset     the ids of all batches
    PREFIXbatch_ends              zset     ids of batches, by when they are forgotten
    PREFIXbatch:<id>              hash     a batch and its counts
    PREFIXbatch_members:<id>      zset     pieces of the ids of all members ever, by the number of the
                                           first of each; those of its others follow it
    PREFIXbatch_ended:<id>        hash     id -> state and reason, but not of plain members that are done
    PREFIXbatch_results:<id>      hash     id -> result
    PREFIXremovals                hash     queue:<name> or batch:<id> -> MessagePack of a removal that goes on
    PREFIXgoing_members:<born>:<id> zset   as batch_members, of a batch that is being removed
    PREFIXrecords:<kind>          hash     name -> MessagePack of a record: version, value, at, expires
    PREFIXrecord_names:<kind>     zset     the names of a kind, in the order of their bytes
    PREFIXrecord_times:<kind>     zset     those that have an `at`, by that
    PREFIXrecord_kinds            zset     all kinds
    PREFIXrecord_ends             zset     kind and name of those that expire, by when
    PREFIXrecord_version          string   the last version given
    PREFIXswaps, PREFIXswap_ends  hash, zset  token -> what its call was answered; tokens by their last moment
    PREFIXfeed_head:<name>        hash     a feed: last, born, forgotten (numbers), bytes, expires
    PREFIXfeed:<name>             stream   its entries; the first part of an id is the number
    PREFIXbroken                  hash     what was set aside because it could not be read -> why, or itself
    <key>:broken:<time>           any      a key of another type than it should have, set aside
    PREFIXsweepers                zset     names of sweepers, by when each comes back
    PREFIXseq                     string   the last number given to a put
    PREFIXlatest                  string   the largest time seen, but for a second
    PREFIXbehind                  string   by how much the clock has gone back since, in all
    PREFIXshifting                string   while what waits hears of that: the last queue, and where in it
    PREFIXshortening              string   while leases do: when those end that have
    PREFIXlayout                  string   the number of this layout, and the oldest one whose code may share
                                           it: see key_layout.py.  Writing opens set it
    <key>copied                   string   for a second: what replicas confirm, where `copies` are wanted
    PREFIXnothing                          never there: to delete it is a first write that full memory allows,
                                           to declare it lets a slot that moves refuse us

On a cluster PREFIX is `{propolis}:`, so that everything is in one slot.  Where an app has shards, that of
shard 3 is `{propolis:3}:`, and each shard also has

    PREFIXoutbox:<shard>          list     number and MessagePack of what is to happen in another shard
    PREFIXowing                   set      the shards for which there is such a list
    PREFIXsent                    string   the number of the last message
    PREFIXheard                   hash     shard -> the number of its last message that was acted on here
    PREFIXleaving                 hash     ids of jobs that are on their way to another shard
    PREFIXclaims                  zset     chosen ids of puts, wherever their jobs live, by their last moment
    PREFIXshares                  hash     limit -> the name of its sharing; its rule is our share.  Of limits
                                           for many keys `many`
    PREFIXowned                   hash     scope:name of buckets, and of keys under a limit for many, that are
                                           here -> since which number, and how many run elsewhere
    PREFIXowned_since             zset     the same, by when that was last looked at
    PREFIXowners                  hash     (shard 0) the same -> the shard where they are, if that is another
    PREFIXpool                    hash     (shard 0) limit -> MessagePack of its n and what is left
    {propolis}:shards             hash     count: how many shards; partition:<queue>: how many it has

A record is `<flag><task>\\n<put, us>\\n<number>\\n<meta as JSON>\\n<body>`.  The flag is P where nothing
else has to be done when the job starts or ends, K where it has a key besides, M where only a batch has to be
stepped, and X for the others.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Self, Unpack

from msgspec.structs import asdict, replace

from propolis.core.batch import Batch, BatchStatus
from propolis.core.clock import Clock, from_us, moment, span_until, span_us, to_us
from propolis.core.envelope import Envelope, is_plain
from propolis.core.job import JobInfo, Lease, Member, Outcome
from propolis.core.limits import rate_in, too_many_prefixes
from propolis.core.protocols import (
    COUNTED,
    LIMIT_SCOPES,
    LOG_LINES,
    MAX_PREFIXES,
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
from propolis.core.records import Read, ReadOptions, Swap, Swapped, check_read, check_swaps
from propolis.core.transitions import RETENTION, Retention
from propolis.engines.address import Address
from propolis.engines.redis.client.dialler import Credentials
from propolis.engines.redis.client.errors import ScriptRefused
from propolis.engines.redis.client.link import Link, RedisLink
from propolis.engines.redis.client.script import LuaScript
from propolis.engines.redis.client.target import Layout, Target, target_of
from propolis.engines.redis.codec import (
    Kinds,
    Settling,
    are_plain_members,
    batch_draft,
    drafts,
    job_info_from,
    leases_from,
    member_from,
    note_fields,
    packed,
    rate_text,
    readable,
    rule_from,
    status_from,
    taken_in,
    terms_of,
)
from propolis.engines.redis.feeds import RedisFeeds
from propolis.engines.redis.finding import Walk, find_in
from propolis.engines.redis.key_layout import agree_on_layout
from propolis.engines.redis.records import answers_from, packed_swaps, read_from
from propolis.engines.redis.repair import repair
from propolis.engines.redis.safety import check_rights, check_safety, complaint_of, durability_of, read_safety
from propolis.engines.redis.scripts import load_scripts
from propolis.engines.redis.shards.shard_map import ShardMap
from propolis.engines.shared.from_exchange import ClaimTerms, FromExchange, claim_of, written_down
from propolis.engines.shared.giving_back import all_given_back, gives_back
from propolis.engines.shared.receipts import all_created_but
from propolis.errors import (
    BadSetting,
    BatchSealed,
    EngineError,
    MemoryFull,
    PropolisError,
    QueueFull,
    StorageFull,
    UnknownBatch,
)

log = logging.getLogger("propolis.redis")

PREFIX = "propolis:"
CLUSTER_PREFIX = "{propolis}:"
LOOKED_THROUGH = 2000  # jobs that one call of `find` looks at: some milliseconds of the server's time
LOOKED_THROUGH_BYTES = 4 << 20  # and no more of them once they are so large
LOOKED_INTO = 100  # and queues
TAKEN_IN = 500  # jobs that are taken in through the door by one call
TAKEN_IN_BYTES = 1 << 20  # and no more of them once they are so large

_scripts = load_scripts()


class RedisEngine(FromExchange, RedisFeeds):
    """All pieces but `Transactional` in one Redis.

    The time is the server's; a clock is for tests.  All keys begin with `prefix`, so that several apps may
    share a server.
    """

    limits = LIMIT_SCOPES
    number = 0  # of the shard that it is, where an app has some

    def __init__(
        self,
        target: Target,
        *,
        prefix: str | None = None,
        clock: Clock | None = None,
        retention: Retention = RETENTION,
        credentials: Credentials | None = None,
        link: Link | None = None,
        shard_map: ShardMap | None = None,
    ) -> None:
        clustered = target.layout is Layout.CLUSTER
        self._prefix = prefix if prefix is not None else CLUSTER_PREFIX if clustered else PREFIX
        if clustered and not re.search(r"\{[^{}]+\}", self._prefix):
            raise BadSetting(f"prefix={self._prefix!r}: in a cluster it needs a hash tag, such as {{shop}}:")
        # Two that never exist: so a slot that moves to another master refuses every script (decision 0058).
        self._keys = (self._prefix.encode(), f"{self._prefix}nothing".encode())
        self._link = link or RedisLink(target, credentials)
        self._shard_map = shard_map
        self._clock = clock
        self._retention = retention
        self._keeps = (span_us(retention.dead_for), span_us(retention.cancelled_for))
        self._durability = Durability.MEMORY
        self._kinds = Kinds()
        self._waited: set[str] = set()
        self._logged_broken: set[bytes] = set()
        self._alarms = _Alarms()

    @property
    def remote(self) -> bool:
        return True

    @property
    def in_order(self) -> bool:
        return True  # one connection carries them all

    @property
    def durability(self) -> Durability:
        return self._durability

    async def open(self) -> Self:
        return await self._open(looks=False)

    async def open_to_look(self) -> Self:
        return await self._open(looks=True)

    async def _open(self, *, looks: bool) -> Self:
        if await self.open_link(looks=looks) and self._link.target.layout is Layout.CLUSTER:
            try:
                await self._check_alone()
            except BaseException:
                await self.close()
                raise
        return self

    async def open_link(self, *, looks: bool) -> bool:
        """False if it was open already."""
        if not await self._link.open():
            return False
        try:
            servers = await read_safety(self._link)
            for server in servers:
                check_safety(server, self._link.target, looks=looks)
            self._durability = durability_of(servers, self._link.target.copies)
            if not looks:
                await self.check_rights()
            await agree_on_layout(self._link, self._keys, self._prefix, looks=looks)
        except BaseException:
            await self.close()
            raise
        return True

    async def complaints(self) -> list[str]:
        shown = self._link.target.shown
        return [text for each in await read_safety(self._link) if (text := complaint_of(each, shown))]

    async def check_rights(self) -> None:
        await check_rights(self._link, self._keys, self._key("any", "news"))

    async def _check_alone(self) -> None:
        known = await self._link.command("HGET", f"{self._prefix}shards", "count", reads=True)
        if known is not None:
            raise EngineError(
                f"{self._link.target.shown}: the app under {self._prefix} has shards: write "
                f"shards={int(known)}"
            )

    async def close(self) -> None:
        await all_given_back(self)
        await self._link.close()

    async def _call(self, name: str, *args: bytes | str | int, reads: bool = False) -> Any:
        return await self._run(_scripts[name], [*self._terms(), *args], reads=reads)

    async def _run(self, script: LuaScript, args: list[bytes | str | int], *, reads: bool = False) -> Any:
        try:
            return await self._link.call(script, self._keys, args, reads=reads)
        except ScriptRefused as refused:
            raise refusal(refused) from refused

    def _terms(self) -> tuple[bytes | str | int, ...]:
        """The first arguments of every script: see base.lua."""
        return (self._prefix, "" if self._clock is None else self._clock.now_us(), *self._keeps)

    def _key(self, queue: str, what: str) -> bytes:
        return f"{self._prefix}{{{queue}}}:{what}".encode()

    # --- Core: jobs come in --------------------------------------------------------------

    async def put(self, jobs: Sequence[Envelope], *, token: str | None = None) -> list[Receipt]:
        if not jobs and token is None:
            self._link.check_usable()
            return []
        try:
            if all(map(is_plain, jobs)):
                return await self._put_plain(jobs, token)
            if (batch := jobs[0].batch) is not None and are_plain_members(jobs, batch):
                return await self._put_members(jobs, token, batch)
            return await self._put(jobs, token, None, seal=False)
        except StorageFull as full:
            raise MemoryFull(jobs[0].queue, full.where) from full

    async def put_batch(
        self, batch: Batch, jobs: Sequence[Envelope] = (), *, seal: bool = True, token: str | None = None
    ) -> list[Receipt]:
        try:
            if jobs and are_plain_members(jobs, batch.id):
                return await self._put_members(jobs, token, batch.id, opened=batch, seal=seal)
            return await self._put(jobs, token, batch, seal=seal)
        except StorageFull as full:
            raise MemoryFull(jobs[0].queue if jobs else "", full.where) from full

    async def _put_plain(self, jobs: Sequence[Envelope], token: str | None) -> list[Receipt]:
        return _receipts(jobs, await self._run(_scripts["put_plain"], self._plain_call(jobs, token)))

    async def _put_members(
        self,
        jobs: Sequence[Envelope],
        token: str | None,
        batch: str,
        *,
        opened: Batch | None = None,
        seal: bool = False,
    ) -> list[Receipt]:
        opening = b"" if opened is None else packed({"batch": batch_draft(opened)})
        args = [*self._terms(), token or "", batch, jobs[0].member, opening, int(seal)]
        refused = await self._run(_scripts["put_members"], args + self._kinds.arguments(jobs, batch))
        return _receipts(jobs, refused)

    def _plain_call(self, jobs: Sequence[Envelope], token: str | None) -> list[bytes | str | int]:
        return [*self._terms(), token or "", *self._kinds.arguments(jobs)]

    def _put_call(
        self, jobs: Sequence[Envelope], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[bytes | str | int]:
        call: dict[str, object] = {"jobs": drafts(jobs, self._shard_map, claim=True), "seal": seal}
        if batch is not None:
            call["batch"] = batch_draft(batch, self._shard_map)
        return [*self._terms(), token or "", packed(call)]

    async def _put(
        self, jobs: Sequence[Envelope], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        refused = await self._run(_scripts["put"], self._put_call(jobs, token, batch, seal=seal))
        return all_created_but(
            jobs, ((n, there.decode()) for n, there in zip(refused[::2], refused[1::2], strict=True))
        )

    async def forget_tokens(self, tokens: Sequence[str]) -> None:
        if tokens:
            await self._link.command("ZREM", f"{self._prefix}tokens", *tokens)

    async def seal(self, batch: str) -> bool:
        return bool(await self._call("seal", batch))

    # --- Core: jobs go out ---------------------------------------------------------------

    @gives_back
    async def exchange(
        self, outcomes: Sequence[tuple[Lease, Outcome]], wants: Mapping[str, int], **terms: Unpack[LeaseTerms]
    ) -> Exchange:
        settling = await self._settling(outcomes)
        claim = claim_of(wants, terms)
        lost, leases, doors = await self._exchange(settling, claim)
        try:
            if doors and await self._take_in_from(doors):
                rest = {it: wants[it] - sum(lease.queue == it for lease in leases) for it in doors}
                again = ClaimTerms(rest, claim.span, claim.holder, claim.limit - len(leases), ())
                _, more, _ = await self._exchange(Settling(()), again)
                leases += more
        except EngineError as error:
            if not leases and not outcomes:
                raise
            log.warning("what was pushed waits at the door: %s", error)  # what is done is done
        return Exchange([outcomes[n][0] for n in lost], leases)

    async def _settling(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> Settling:
        return await written_down(outcomes, lambda: Settling(outcomes, self._shard_map))

    async def _exchange(
        self, settling: Settling, claim: ClaimTerms
    ) -> tuple[list[int], list[Lease], list[str]]:
        """Gives the numbers of those that were lost, what was leased, and queues with something at doors."""
        wants, span, holder, limit, tasks = claim
        self._looked(wants)
        span_in_us = span_us(span)
        args = [*self._terms(), *settling.arguments, span_in_us, holder, limit, len(tasks), *tasks]
        args.append(len(wants))
        for queue, want in wants.items():
            args += (queue, want)
        answer = await self._run(_scripts["exchange"], args)
        now, lost, per_queue, _, _ = answer
        leases = leases_from(answer, wants, from_us(int(now) + span_in_us), holder)
        doors = [queue for queue, waiting in zip(wants, per_queue[1::3], strict=True) if waiting]
        self._alarms.set(zip(wants, per_queue[2::3], strict=True))
        return settling.lost(lost), leases, doors

    def _looked(self, queues: Iterable[str]) -> None:
        self._link.looked(key for queue in queues for key in self.heard_at(queue))

    def heard_at(self, queue: str) -> tuple[bytes, bytes]:
        """The channel and the list by which one hears of something in a queue."""
        return self._key(queue, "news"), self._key(queue, "incoming")

    async def renew(self, leases: Sequence[Lease], *, span: timedelta) -> list[Renewal]:
        args: list[str | int] = []
        for lease in leases:
            args += (lease.queue, lease.id, lease.fence, lease.holder)
        span_in_us = span_us(span)
        now, *answers = await self._call("renew", span_in_us, *args)
        until = from_us(int(now) + span_in_us)
        return [Renewal(None) if answer < 0 else Renewal(until, answer == 1) for answer in answers]

    async def note(self, notes: Sequence[Note]) -> list[Lease]:
        fields = [note_fields(note, self._shard_map) for note in notes]
        return [notes[n - 1].lease for n in await self._call("note", packed(fields), LOG_LINES)]

    async def sweep(self, *, limit: int = 1000, by: str | None = None) -> Swept:
        return (await self.swept(limit, by))[0]

    async def swept(self, limit: int, by: str | None) -> tuple[Swept, list[int]]:
        """With the numbers by which the ended ones are in order with those of other shards."""
        dead_max = self._retention.dead_max
        answer = await self._call("sweep", limit, "" if dead_max is None else dead_max, by or "")
        promoted, reaped, expired, removed, now, next_us, again_us, doors, kinds, *found = answer
        ended, parked, ranks, broken = found
        self._log_broken(broken)
        await self._take_in_from(readable(doors))
        swept = Swept(
            promoted,
            reaped,
            expired,
            removed,
            next_in=span_until(int(next_us), int(now)) if next_us else None,
            again_in=span_until(int(again_us), int(now)) if again_us else None,
            records_due=tuple(readable(kinds)),
            ended=tuple(readable(ended)),
            parked=tuple(sorted(map(_line_of, readable(parked)))),
        )
        return swept, [int(rank) for rank in ranks]

    async def repair(self, *, mend: bool) -> list[str]:
        return await repair(self._call, mend=mend, alone=self._shard_map is None)

    def _log_broken(self, broken: Sequence[bytes]) -> None:
        """Once each: what somebody else has written where only our scripts write."""
        for name, why in zip(broken[::2], broken[1::2], strict=True):
            if name not in self._logged_broken:
                self._logged_broken.add(name)
                log.error("%r could not be read, and was set aside: %r", name, why[:200])

    # --- the open door -------------------------------------------------------------------

    async def _take_in_from(self, queues: Sequence[str]) -> int:
        """Take in a bite of what others have pushed.  Two that read the same do no harm: see take_in.lua."""
        taken = 0
        for queue in queues:
            found = await self.pushed(queue, 0)
            args: list[bytes] = []
            for pushed, meaning in zip(found, await self._meanings(queue, found), strict=True):
                args += (pushed, meaning)
            if args:
                taken += await self._call("take_in", queue, *args)
        return taken

    async def doors(self, after: str, only: str | None) -> tuple[str, list[str]]:
        last, found = await self._call("doors", LOOKED_INTO, after, only or "", reads=True)
        return last.decode(), [queue.decode() for queue in found[::2]]

    async def pushed(self, queue: str, first: int) -> list[bytes]:
        bite: list[bytes] = await self._call("at_door", queue, TAKEN_IN, TAKEN_IN_BYTES, first, reads=True)
        return bite

    async def _meanings(self, queue: str, found: Sequence[bytes]) -> list[bytes]:
        return [taken_in(queue, pushed)[1] for pushed in found]

    # --- Inspects ----------------------------------------------------------------------

    async def now(self) -> datetime:
        if self._clock is not None:
            return from_us(self._clock.now_us())
        seconds, us = (await self._link.everywhere("TIME"))[0]
        return from_us(int(seconds) * 1_000_000 + int(us))

    async def queues(self, *, limit: int = 1000, after: str | None = None) -> dict[str, Counts]:
        return {
            name.decode(): _counts(counts)
            for name, *counts in await self._call("queues", limit, after or "", reads=True)
        }

    async def get(self, job_id: str) -> JobInfo | None:
        for info in await self.job_infos([job_id]):
            return info
        return None

    async def find(self, where: Filter, *, limit: int = 100, after: int | None = None) -> Page:
        return await find_in([self], 1, where, limit, after)

    async def first_matching(self, where: Filter, limit: int, after: int) -> list[tuple[int, bytes]] | None:
        bounds = (LOOKED_THROUGH, LOOKED_THROUGH_BYTES)
        found = await self._call("find", _asked(where), after, limit, *bounds, reads=True)
        return None if found is None else list(zip(map(int, found[::2]), found[1::2], strict=True))

    async def walk(
        self, where: Filter, limit: int, after: int, place: Walk
    ) -> tuple[list[bytes], Walk | None]:
        bounds = (limit, LOOKED_THROUGH, LOOKED_THROUGH_BYTES, LOOKED_INTO)
        begin = (place.queue, place.what, place.at, place.last)
        more, *at, found = await self._call("find", _asked(where), after, *bounds, *begin, reads=True)
        return found, Walk(place.shard, place.after, *at) if more else None

    async def job_infos(self, job_ids: Sequence[bytes | str]) -> list[JobInfo]:
        rows = await self._call("job_infos", *job_ids, reads=True) if job_ids else []
        return [info for row in rows if (info := job_info_from(row))]

    async def oldest(self, queues: Sequence[str]) -> dict[str, datetime]:
        found: dict[str, datetime] = {}
        for start in range(0, len(queues), LOOKED_INTO):
            asked = queues[start : start + LOOKED_INTO]
            answers = await self._call("oldest", *asked, reads=True)
            times = {queue: moment(int(us)) for queue, us in zip(asked, answers, strict=True) if us}
            found |= {queue: at for queue, at in times.items() if at is not None}
        return found

    async def position(self, job_id: str) -> int | None:
        """At most `COUNTED`."""
        found: int = await self._call("position", job_id, COUNTED, reads=True)
        return None if found < 0 else found

    # --- Operates, Rules ----------------------------------------------------------------

    async def cancel(self, job_ids: Sequence[str]) -> list[bool]:
        return [bool(answer) for answer in await self._call("cancel", *job_ids)]

    async def reschedule(self, job_id: str, due_at: datetime) -> bool:
        return bool(await self._call("reschedule", job_id, to_us(due_at)))

    async def replay(self, job_ids: Sequence[str]) -> list[bool]:
        return [bool(answer) for answer in await self._call("replay", *job_ids)]

    async def delete(self, job_ids: Sequence[str]) -> list[bool]:
        return [bool(answer) for answer in await self._call("delete", *job_ids)]

    async def drop(self, queue: str) -> int:
        """What stands at the door goes first."""
        dropped: int = await self._call("clear_door", queue)
        dropped += await self._call("drop", queue)
        return dropped

    async def add_rule(self, rule: Rule) -> bool:
        what = (rule.kind, rule.scope, rule.name, rule.n)
        return bool(await self._call("add_rule", *what, *terms_of(rule), rate_text(rule), MAX_PREFIXES))

    async def remove_rule(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        return bool(await self._call("remove_rule", kind, scope, name))

    async def rules(self, *, limit: int = 1000, after: Rule | None = None) -> list[Rule]:
        last = "" if after is None else f"{after.kind}:{after.scope}:{after.name}"
        flat = await self._call("rules", limit, last, reads=True)
        return [rule_from(*flat[row : row + 4]) for row in range(0, len(flat), 4)]

    async def tokens(self, rule: Rule, name: str) -> Tokens:
        rate, scope = rate_in(rule), Scope.KEY if rule.scope is Scope.TASK_KEY else rule.scope
        full = await self._link.command("ZSCORE", f"{self._prefix}buckets", f"{scope}:{name}", reads=True)
        return rate.tokens(int(float(full or 0)), to_us(await self.now()))

    # --- Batches -------------------------------------------------------------------------

    async def batch(self, batch: str) -> BatchStatus | None:
        for found, fields in await self._call("batch_statuses", 0, batch, reads=True):
            return status_from(found, fields)
        return None

    async def batches(self, *, limit: int = 100, after: str | None = None) -> list[BatchStatus]:
        rows = await self._call("batch_statuses", limit, after or "", reads=True) if limit else []
        return [status_from(found, fields) for found, fields in rows]

    async def members(self, batch: str, *, limit: int = 1000, after: int | None = None) -> list[Member]:
        rows = await self._call("members", batch, limit, "" if after is None else after, reads=True)
        return [member_from(row) for row in rows]

    async def delete_batch(self, batch: str) -> bool:
        return bool(await self._call("delete_batch", batch))

    # --- Records -------------------------------------------------------------------------

    async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:
        check_swaps(swaps)
        return await self.swap_here(swaps, token)

    async def swap_here(self, swaps: Sequence[Swap | Swapped], token: str | None) -> list[Swapped]:
        """The same with swaps of which some were refused already, by somebody else."""
        return answers_from(await self._call("swap", token or "", packed_swaps(swaps, self._shard_map)))

    async def records(self, kind: str, **which: Unpack[ReadOptions]) -> Read:
        names, after, due, newest, limit = check_read(kind, which)
        args: list[str | int]
        if names is not None:
            args = [len(names), "names", *sorted(set(names))]
        elif due:
            args = [limit, "due"]
        else:
            args = [limit, "before" if newest else "after", *([] if after is None else [after])]
        read = read_from(kind, await self._call("records", kind, *args, reads=True))
        return replace(read, after=None) if due else read

    # --- Core: hints ---------------------------------------------------------------------

    @property
    def hears(self) -> bool:
        return self._link.hears

    async def wait(self, queues: Sequence[str], timeout: float) -> bool:
        """Also until the first of the jobs that were not due at the last look becomes so."""
        left = self.due_in(queues)
        if left < timeout:
            return await self._wait(queues, left) or True
        return await self._wait(queues, timeout)

    def due_in(self, queues: Sequence[str]) -> float:
        """Seconds until the next job that was not due at the last look becomes so."""
        return self._alarms.left(queues)

    async def _wait(self, queues: Sequence[str], timeout: float) -> bool:
        ends = time.monotonic() + timeout
        if not await self._wait_for_news(queues, timeout):
            return False
        if self._waited.issuperset(queues):
            return True
        # The first wait wakes for nothing, in case something came before it began.
        self._waited.update(queues)
        self._looked(queues)
        if await self.has_work(queues):
            return True
        return await self._wait_for_news(queues, ends - time.monotonic())

    async def has_work(self, queues: Sequence[str]) -> bool:
        """Whether there is anything to lease in one of them."""
        return bool(await self._call("has_work", *queues, reads=True))

    async def _wait_for_news(self, queues: Sequence[str], timeout: float) -> bool:
        return await self._link.wait_for(
            channels=[self._key(queue, "news") for queue in queues],
            lists=[self._key(queue, "incoming") for queue in queues],
            timeout=timeout,
        )


class _Alarms:
    """When the next scheduled job of each queue becomes due, by our own clock: no news comes of that."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}

    def set(self, due_in: Iterable[tuple[str, int]]) -> None:
        """In so many microseconds; a negative number means that there is none, or that nothing was asked."""
        now = time.monotonic()
        for queue, us in due_in:
            if us >= 0:
                self._at[queue] = now + us / 1e6
            else:
                self._at.pop(queue, None)

    def left(self, queues: Sequence[str]) -> float:
        """Seconds until the first of them."""
        first = min((self._at[queue] for queue in queues if queue in self._at), default=math.inf)
        return max(0.0, first - time.monotonic())


def _receipts(jobs: Sequence[Envelope], refused: Sequence[int]) -> list[Receipt]:
    """Those of jobs of which these, counted from 1, were not created because their ids are taken."""
    return all_created_but(jobs, ((n, jobs[n - 1].id) for n in refused))


def _asked(where: Filter) -> bytes:
    return packed({name: value for name, value in asdict(where).items() if value is not None})


def _counts(numbers: Iterable[int | bytes]) -> Counts:
    ready, scheduled, held, parked, running, done, dead, cancelled, put, deleted = map(int, numbers)
    return Counts(ready, scheduled, held, parked, running, done, dead, cancelled, put, deleted)


def _line_of(line: str) -> tuple[str, str]:
    """The queue and the task of jobs that are parked."""
    queue, _, task = line.partition("\n")
    return queue, task


def refusal(refused: ScriptRefused) -> PropolisError:
    match refused.code:
        case "PROPOLISUNKNOWN":
            return UnknownBatch(refused.detail)
        case "PROPOLISSEALED":
            return BatchSealed(refused.detail)
        case "PROPOLISPREFIXES":
            return too_many_prefixes(refused.detail)
        case "PROPOLISFULL":
            cap, would_hold, queue = refused.detail.split(" ", 2)
            return QueueFull(queue, int(cap), int(would_hold))
        case code:
            return EngineError(f"a script refused with {code}: {refused.detail}")


def from_url(address: Address, clock: Clock | None) -> RedisEngine:
    """`redis://user:password@host:6379/0?prefix=propolis:`; the other options are those of `target_of`."""
    return RedisEngine(target_of(address, own=("prefix",)), prefix=address.options.get("prefix"), clock=clock)
