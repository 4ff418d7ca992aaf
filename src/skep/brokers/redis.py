"""The Redis engine: Redis 6.2 or newer, or Valkey; every verb is one call of one Lua script.

The scripts are in lua/, put together by `load_scripts`.  A script is atomic, so a verb is too, and it takes
its time from the server.  All data goes through KEYS and ARGV.

The key layout, whose only description this is.  PREFIX is `skep:`.

    PREFIX{queue}:incoming        list     the open door: any program may LPUSH a job as JSON
    PREFIX{queue}:line:<priority> list     the ids of ready jobs, first in, first out
    PREFIX{queue}:void:<priority> set      entries of that list that were struck out and are skipped
    PREFIX{queue}:front           zset     ready jobs that stand before the lists, by priority and place
    PREFIX{queue}:held:<rule>     zset     the same, set aside because of a rule (task:<name> or key:<name>)
    PREFIX{queue}:holds           set      the rules for which there is such a set
    PREFIX{queue}:ranks           zset     the priorities that have a line, highest first
    PREFIX{queue}:scheduled       zset     put number and id of jobs that are not due yet, by due time
    PREFIX{queue}:running         hash     id -> flag, fence, bundle, start, attempt, holder
    PREFIX{queue}:done|dead|cancelled zset put number and id of kept jobs, by the time of their end
    PREFIX{queue}:tally           hash     put, deleted: how many; front, back: the last places given
    PREFIX{queue}:news            channel  a message whenever there may be something to lease

    PREFIXjobs                    hash     id -> record: what was put, once, and never rewritten
    PREFIXstate                   hash     id -> MessagePack of what has changed since; most jobs have none
    PREFIXresults                 hash     id -> the result of a kept job
    PREFIXleases                  zset     bundles of leases, by when they end
    PREFIXbundles                 hash     bundle -> how many leases it has
    PREFIXexpiring, PREFIXkeep    zset     ids, by when they expire, or are forgotten
    PREFIXknown, PREFIXtokens     zset     chosen ids of ended jobs, tokens of puts, by their last moment
    PREFIXunique                  hash     unique key -> the id that holds it
    PREFIXrules, PREFIXcaps       hash     kind:scope:name -> n; queue -> n
    PREFIXlimits                  hash     scope:name -> how many run, where there is a limit on a task or key
    PREFIXqueues                  zset     the names of all queues
    PREFIXtimed                   zset     those with scheduled jobs, by when the first is due, or earlier
    PREFIXbatches                 zset     the ids of all batches
    PREFIXbatch_ends              zset     ids of batches, by when they are forgotten
    PREFIXbatch:<id>              hash     a batch and its counts
    PREFIXbatch_members:<id>      zset     pieces of the ids of all members ever, by the number of the
                                           first of each; those of its others follow it
    PREFIXbatch_ended:<id>        hash     id -> state and reason, but not of plain members that are done
    PREFIXbatch_results:<id>      hash     id -> result
    PREFIXschedules               hash     name -> MessagePack of a schedule
    PREFIXsweepers                zset     who sweeps, by when each comes back
    PREFIXseq, PREFIXfence        string   the last numbers given to a put and to a lease
    PREFIXlayout                  string   the number of this layout; 1 where there is none

On a cluster PREFIX is `{skep}:`, so that everything is in one slot.  Where an app is spread over homes, that
of home 3 is `{skep:3}:`, and each home also has

    PREFIXoutbox:<home>           list     number and MessagePack of what is to happen in another home
    PREFIXowing                   set      the homes for which there is such a list
    PREFIXsent                    string   the number of the last message
    PREFIXheard                   hash     home -> the number of its last message that was acted on here
    PREFIXleaving                 hash     ids of jobs that are on their way to another home
    PREFIXclaims                  zset     chosen ids of puts, wherever their jobs live, by their last moment
    PREFIXshares                  hash     limit -> the name of its sharing; its rule is our share
    PREFIXpool                    hash     (home 0) limit -> MessagePack of its n and what is left
    {skep}:homes                  hash     count: how many homes; part:<queue>: in how many of them it lives

A record is `<flag><task>\\n<put, us>\\n<number>\\n<meta as JSON>\\n<body>`.  The flag is P where nothing
else has to be done when the job starts or ends, M where only a batch has to be told, and X for the others.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Self

from msgspec.structs import asdict

from skep import wire
from skep.address import Address
from skep.batch import Batch, BatchStatus, Member
from skep.broker import (
    LOG_LINES,
    Counts,
    Durability,
    Exchange,
    Filter,
    Note,
    Page,
    Receipt,
    Renewal,
    Rule,
    RuleKind,
    Scope,
    Swept,
)
from skep.brokers.redis_homes import Homes
from skep.brokers.redis_link import Credentials, Layout, Link, RedisLink, Refused, Target, target_of
from skep.brokers.redis_safety import check_safety, durability_of, read_safety
from skep.brokers.redis_script import Script
from skep.brokers.redis_words import (
    Kinds,
    Settling,
    are_plain_members,
    batch_draft,
    draft,
    drafts,
    is_plain,
    leases_from,
    load_scripts,
    member_from,
    packed,
    record_from,
    schedule_from,
    status_from,
    taken_in,
    text,
)
from skep.clock import Clock, from_us, span_until, span_us, to_us
from skep.errors import (
    BadSetting,
    BatchSealed,
    EngineError,
    MemoryFull,
    QueueFull,
    SkepError,
    StorageFull,
    UnknownBatch,
)
from skep.job import Job, Lease, Outcome, Record, storable
from skep.life import RETENTION, Retention
from skep.schedule import Schedule, ScheduleRecord

log = logging.getLogger("skep.redis")

PREFIX = "skep:"
CLUSTER_PREFIX = "{skep}:"
LOOKED_THROUGH = 2000  # jobs that one call of `find` looks at: about a millisecond of the server's time
DROPPED_AT_ONCE = 10_000
TAKEN_IN = 500  # jobs that are taken in through the door by one call
_LAYOUT = b"1"
_ROOM = 1 << 40  # where nobody gives a limit

_scripts = load_scripts()


class RedisBroker:
    """All of `Broker`, `Ledger` and `Hints` in one Redis.

    The time is the server's; a clock is for tests.  All keys begin with `prefix`, so that several apps may
    share a server.
    """

    def __init__(
        self,
        target: Target,
        *,
        prefix: str | None = None,
        clock: Clock | None = None,
        retention: Retention = RETENTION,
        credentials: Credentials | None = None,
        link: Link | None = None,
        homes: Homes | None = None,
    ) -> None:
        clustered = target.layout is Layout.CLUSTER
        self._prefix = prefix if prefix is not None else CLUSTER_PREFIX if clustered else PREFIX
        if clustered and not re.search(r"\{[^{}]+\}", self._prefix):
            raise BadSetting(f"prefix={self._prefix!r}: in a cluster it needs a hash tag, such as {{shop}}:")
        self._keys = (self._prefix.encode(),)
        self._link = link or RedisLink(target, credentials)
        self._homes = homes
        self._clock = clock
        self._retention = retention
        self._keeps = (span_us(retention.dead_for), span_us(retention.cancelled_for))
        self._durability = Durability.MEMORY
        self._kinds = Kinds()
        self._waited: set[str] = set()
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
        if await self.open_link() and self._link.target.layout is Layout.CLUSTER:
            try:
                await self._check_alone()
            except BaseException:
                await self.close()
                raise
        return self

    async def open_link(self) -> bool:
        """False if it was open already."""
        if not await self._link.open():
            return False
        try:
            servers = await read_safety(self._link)
            for server in servers:
                check_safety(server, self._link.target.shown)
            self._durability = durability_of(servers, self._link.target.copies)
            await self._check_layout()
        except BaseException:
            await self.close()
            raise
        return True

    async def _check_layout(self) -> None:
        found = await self._link.command("GET", f"{self._prefix}layout", reads=True)
        if found is not None and found != _LAYOUT:
            layout = ascii(found.decode(errors="replace"))
            raise EngineError(
                f"{self._link.target.shown}: what is under {self._prefix} has layout {layout}, and this skep "
                f"knows {_LAYOUT.decode()}: a later version wrote it; install that one, or use another prefix"
            )

    async def _check_alone(self) -> None:
        known = await self._link.command("HGET", f"{self._prefix}homes", "count", reads=True)
        if known is not None:
            raise EngineError(
                f"{self._link.target.shown}: the app under {self._prefix} is spread over homes: write "
                f"homes={int(known)}"
            )

    async def close(self) -> None:
        await self._link.close()

    async def _call(self, name: str, *args: bytes | str | int, reads: bool = False) -> Any:
        return await self._run(_scripts[name], [*self._terms(), *args], reads=reads)

    async def _run(self, script: Script, args: list[bytes | str | int], *, reads: bool = False) -> Any:
        try:
            return await self._link.call(script, self._keys, args, reads=reads)
        except Refused as refused:
            raise refusal(refused) from refused

    def _terms(self) -> tuple[bytes | str | int, ...]:
        """What every script is told: see base.lua."""
        return (self._prefix, "" if self._clock is None else self._clock.now_us(), *self._keeps)

    def _key(self, queue: str, what: str) -> bytes:
        return f"{self._prefix}{{{queue}}}:{what}".encode()

    # --- Broker: jobs come in ------------------------------------------------------------

    async def put(self, jobs: Sequence[Job], *, token: str | None = None) -> list[Receipt]:
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
        self, batch: Batch, jobs: Sequence[Job] = (), *, seal: bool = True, token: str | None = None
    ) -> list[Receipt]:
        try:
            if jobs and are_plain_members(jobs, batch.id):
                return await self._put_members(jobs, token, batch.id, opened=batch, seal=seal)
            return await self._put(jobs, token, batch, seal=seal)
        except StorageFull as full:
            raise MemoryFull(jobs[0].queue if jobs else "", full.where) from full

    async def _put_plain(self, jobs: Sequence[Job], token: str | None) -> list[Receipt]:
        return _receipts(jobs, await self._run(_scripts["put_plain"], self._plain_call(jobs, token)))

    async def _put_members(
        self,
        jobs: Sequence[Job],
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

    def _plain_call(self, jobs: Sequence[Job], token: str | None) -> list[bytes | str | int]:
        return [*self._terms(), token or "", *self._kinds.arguments(jobs)]

    def _put_call(
        self, jobs: Sequence[Job], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[bytes | str | int]:
        call: dict[str, object] = {"jobs": drafts(jobs, self._homes, claim=True), "seal": seal}
        if batch is not None:
            call["batch"] = batch_draft(batch, self._homes)
        return [*self._terms(), token or "", packed(call)]

    async def _put(
        self, jobs: Sequence[Job], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        refused = await self._run(_scripts["put"], self._put_call(jobs, token, batch, seal=seal))
        receipts = [Receipt(job.id, True) for job in jobs]
        for n, there in zip(refused[::2], refused[1::2], strict=True):
            receipts[n - 1] = Receipt(there.decode(), False)
        return receipts

    async def forget_tokens(self, tokens: Sequence[str]) -> None:
        if tokens:
            await self._link.command("ZREM", f"{self._prefix}tokens", *tokens)

    async def seal(self, batch: str) -> bool:
        return bool(await self._call("seal", batch))

    # --- Broker: jobs go out -------------------------------------------------------------

    async def lease(
        self, wants: Mapping[str, int], *, span: timedelta, holder: str, limit: int | None = None
    ) -> list[Lease]:
        return (await self.exchange((), wants, span=span, holder=holder, limit=limit)).leases

    async def settle(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> list[Lease]:
        if not outcomes:
            self._link.check_usable()
            return []
        return (await self.exchange(outcomes, {}, span=timedelta(0), holder="")).lost

    async def exchange(
        self,
        outcomes: Sequence[tuple[Lease, Outcome]],
        wants: Mapping[str, int],
        *,
        span: timedelta,
        holder: str,
        limit: int | None = None,
    ) -> Exchange:
        settling = Settling(outcomes, self._homes)
        if limit is None:
            limit = _ROOM
        lost, leases, doors = await self._exchange(settling, wants, span, holder, limit)
        if doors and await self._take_in_from(doors):
            rest = {queue: wants[queue] - sum(lease.queue == queue for lease in leases) for queue in doors}
            _, more, _ = await self._exchange(Settling(()), rest, span, holder, limit - len(leases))
            leases += more
        return Exchange([outcomes[n][0] for n in lost], leases)

    async def _exchange(
        self, settling: Settling, wants: Mapping[str, int], span: timedelta, holder: str, limit: int
    ) -> tuple[list[int], list[Lease], list[str]]:
        """Gives the numbers of those that were lost, what was leased, and queues with something at doors."""
        self._looked(wants)
        span_in_us = span_us(span)
        args = [*self._terms(), *settling.arguments, span_in_us, holder, limit, len(wants)]
        for queue, want in wants.items():
            args += (queue, want)
        answer = await self._run(_scripts["exchange"], args)
        now, lost, _, per_queue, _, _ = answer
        leases = leases_from(answer, wants, from_us(int(now) + span_in_us))
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
            args += (lease.queue, lease.id, lease.fence)
        span_in_us = span_us(span)
        now, *answers = await self._call("renew", span_in_us, *args)
        until = from_us(int(now) + span_in_us)
        return [Renewal(None) if answer < 0 else Renewal(until, answer == 1) for answer in answers]

    async def note(self, notes: Sequence[Note]) -> None:
        said = [
            {
                "id": note.lease.id,
                "fence": str(note.lease.fence),
                "progress": None if note.progress is None else storable(text(note.progress)),
                "lines": [storable(line) for line in note.lines],
            }
            for note in notes
        ]
        await self._call("note", packed(said), LOG_LINES)

    async def sweep(self, *, limit: int = 1000, by: str | None = None) -> Swept:
        dead_max = self._retention.dead_max
        answer = await self._call("sweep", limit, "" if dead_max is None else dead_max, by or "")
        promoted, reaped, expired, removed, now, next_us, schedules_due, again_us, doors = answer
        await self._take_in_from([queue.decode() for queue in doors])
        return Swept(
            promoted,
            reaped,
            expired,
            removed,
            next_in=span_until(int(next_us), int(now)) if next_us else None,
            again_in=span_until(int(again_us), int(now)) if again_us else None,
            schedules_due=bool(schedules_due),
        )

    # --- the open door -------------------------------------------------------------------

    async def _take_in_from(self, queues: Sequence[str]) -> int:
        """Take in what others have pushed.  Those who read the same do no harm: see take_in.lua."""
        taken = 0
        for queue in queues:
            found = await self._link.command(
                "LRANGE", self._key(queue, "incoming"), -TAKEN_IN, -1, reads=True
            )
            args: list[bytes] = []
            meanings = await self._meanings(queue, found)
            for pushed, meaning in zip(reversed(found), reversed(meanings), strict=True):
                args += (pushed, meaning)  # the oldest is the last
            if args:
                taken += await self._call("take_in", queue, *args)
        return taken

    async def _meanings(self, queue: str, found: Sequence[bytes]) -> list[bytes]:
        return [taken_in(queue, pushed)[1] for pushed in found]

    # --- Ledger: looking -----------------------------------------------------------------

    async def now(self) -> datetime:
        if self._clock is not None:
            return from_us(self._clock.now_us())
        seconds, us = (await self._link.everywhere("TIME"))[0]
        return from_us(int(seconds) * 1_000_000 + int(us))

    async def queues(self) -> dict[str, Counts]:
        return {
            name.decode(): Counts(*(int(n) for n in counts))
            for name, *counts in await self._call("queues", reads=True)
        }

    async def get(self, job_id: str) -> Record | None:
        for record in await self._records([job_id]):
            return record
        return None

    async def find(self, where: Filter, *, limit: int = 100, after: int | None = None) -> Page:
        found = await self._found(where, limit + 1, after or 0)
        page = found[:limit]
        records = await self._records([job_id for _, job_id in page])
        return Page(records, page[-1][0] if page and len(found) > limit else None)

    async def _found(self, where: Filter, limit: int, after: int) -> list[tuple[int, bytes]]:
        """The numbers and the ids of those that match and were put first."""
        asked = packed({name: value for name, value in asdict(where).items() if value is not None})
        found: set[tuple[int, bytes]] = set()
        cursor = b"0"
        while True:
            cursor, answer = await self._call("find", cursor, LOOKED_THROUGH, asked, after, limit, reads=True)
            found.update(zip(map(int, answer[::2]), answer[1::2], strict=True))
            found = set(sorted(found)[:limit])
            if cursor == b"0":
                return sorted(found)

    async def _records(self, job_ids: Sequence[bytes | str]) -> list[Record]:
        rows = await self._call("look", *job_ids, reads=True) if job_ids else []
        return [record for row in rows if (record := record_from(row))]

    async def position(self, job_id: str) -> int | None:
        found: int = await self._call("position", job_id, reads=True)
        return None if found < 0 else found

    # --- Ledger: operating ---------------------------------------------------------------

    async def cancel(self, job_ids: Sequence[str]) -> list[bool]:
        return [bool(answer) for answer in await self._call("cancel", *job_ids)]

    async def reschedule(self, job_id: str, due_at: datetime) -> bool:
        return bool(await self._call("reschedule", job_id, to_us(due_at)))

    async def replay(self, job_ids: Sequence[str]) -> list[bool]:
        return [bool(answer) for answer in await self._call("replay", *job_ids)]

    async def delete(self, job_ids: Sequence[str]) -> list[bool]:
        return [bool(answer) for answer in await self._call("delete", *job_ids)]

    async def drop(self, queue: str) -> int:
        """Ten thousand jobs are one step: what is put meanwhile goes too, or stays whole."""
        dropped, more = 0, 1
        while more:
            gone, more = await self._call("drop", queue, DROPPED_AT_ONCE)
            dropped += gone
        return dropped

    async def add_rule(self, rule: Rule) -> bool:
        return bool(await self._call("add_rule", rule.kind, rule.scope, rule.name, rule.n))

    async def remove_rule(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        return bool(await self._call("remove_rule", kind, scope, name))

    async def rules(self) -> list[Rule]:
        rules, caps = await self._call("rules", reads=True)
        found = [Rule(RuleKind.CAP, Scope.QUEUE, name.decode(), int(n)) for name, n in _pairs(caps)]
        for field, n in _pairs(rules):
            kind, scope, name = field.decode().split(":", 2)
            found.append(Rule(RuleKind(kind), Scope(scope), name, int(n)))
        return sorted(found, key=lambda rule: (rule.kind, rule.scope, rule.name))

    # --- Ledger: batches -----------------------------------------------------------------

    async def batch(self, batch: str) -> BatchStatus | None:
        for found, facts in await self._call("batches_look", 0, batch, reads=True):
            return status_from(found, facts)
        return None

    async def batches(self, *, limit: int = 100, after: str | None = None) -> list[BatchStatus]:
        rows = await self._call("batches_look", limit, after or "", reads=True) if limit else []
        return [status_from(found, facts) for found, facts in rows]

    async def members(self, batch: str, *, limit: int = 1000, after: int | None = None) -> list[Member]:
        rows = await self._call("members", batch, limit, "" if after is None else after, reads=True)
        return [member_from(row) for row in rows]

    async def delete_batch(self, batch: str) -> bool:
        return bool(await self._call("delete_batch", batch))

    # --- Ledger: schedules ---------------------------------------------------------------

    async def put_schedule(self, schedule: Schedule, next_at: datetime) -> None:
        await self._call("put_schedule", schedule.name, text(schedule), text(schedule.timing), to_us(next_at))

    async def schedules(self, *, due: bool = False) -> list[ScheduleRecord]:
        now, found = await self._call("schedules", reads=True)
        records = [schedule_from(packed) for _, packed in sorted(_pairs(found))]
        moment = from_us(int(now))
        return [it for it in records if not due or (not it.paused and it.next_at <= moment)]

    async def pause_schedule(self, name: str, paused: bool) -> bool:
        return bool(await self._call("pause_schedule", name, int(paused)))

    async def remove_schedule(self, name: str) -> bool:
        return bool(await self._call("remove_schedule", name))

    async def fire(self, name: str, instant: datetime, job: Job | None, next_at: datetime) -> bool:
        what = b"" if job is None else packed(draft(job, wire.encode(job), self._homes))
        return bool(await self._call("fire", name, to_us(instant), what, to_us(next_at)))

    # --- Hints ---------------------------------------------------------------------------

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
        # The first time somebody listens he is woken for nothing, in case something came before that.
        self._waited.update(queues)
        self._looked(queues)
        if await self._call("anything", *queues, reads=True):
            return True
        return await self._wait_for_news(queues, ends - time.monotonic())

    async def _wait_for_news(self, queues: Sequence[str], timeout: float) -> bool:
        return await self._link.wait_for(
            channels=[self._key(queue, "news") for queue in queues],
            lists=[self._key(queue, "incoming") for queue in queues],
            timeout=timeout,
        )


class _Alarms:
    """When the next scheduled job of each queue becomes due, by our own clock: nobody tells of that."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}

    def set(self, due_in: Iterable[tuple[str, int]]) -> None:
        """In so many microseconds; a negative number means that there is none, or that there was no look."""
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


def _receipts(jobs: Sequence[Job], refused: Sequence[int]) -> list[Receipt]:
    """Those of jobs of which these, counted from 1, were not created because their ids are taken."""
    receipts = [Receipt(job.id, True) for job in jobs]
    for n in refused:
        receipts[n - 1] = Receipt(jobs[n - 1].id, False)
    return receipts


def _pairs(flat: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def refusal(refused: Refused) -> SkepError:
    match refused.code:
        case "SKEPUNKNOWN":
            return UnknownBatch(refused.detail)
        case "SKEPSEALED":
            return BatchSealed(refused.detail)
        case "SKEPFULL":
            cap, _, queue = refused.detail.partition(" ")
            return QueueFull(queue, int(cap))
        case code:
            return EngineError(f"a script refused with {code}: {refused.detail}")


def from_url(address: Address, clock: Clock | None) -> RedisBroker:
    """`redis://user:password@host:6379/0?prefix=skep:`; the other options are those of `target_of`."""
    return RedisBroker(target_of(address, own=("prefix",)), prefix=address.options.get("prefix"), clock=clock)
