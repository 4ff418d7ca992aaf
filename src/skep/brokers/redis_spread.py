"""An app that is spread over the slots of a cluster: many homes, each whole in itself, behave as one engine.

A queue lives in the home that follows from its name, a batch in that of its id, a unique key in that of the
key.  Schedules live in home 0, rules in all of them.  Whatever touches one home is one atomic step, as on one
server.  What leads to another home is recorded in that step and sent on: see redis_home.py.

A put is accepted by one home, whole: jobs of other homes are sent on from there.  It first looks around
whether their ids, tokens and keys are taken anywhere.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Self, TypeVar

from msgspec.structs import replace

from skep.address import Address
from skep.batch import Batch, BatchStatus, Member
from skep.broker import (
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
from skep.brokers.redis import RedisBroker
from skep.brokers.redis_home import Home, Post
from skep.brokers.redis_homes import Homes
from skep.brokers.redis_link import Credentials, Link, RedisLink, Target, target_of
from skep.brokers.redis_words import Argument, is_plain
from skep.clock import Clock
from skep.errors import (
    BadSetting,
    BatchSealed,
    EngineError,
    EngineUnavailable,
    MemoryFull,
    OutcomeUnknown,
    QueueFull,
    StorageFull,
    UnknownBatch,
)
from skep.job import Dead, Done, Job, Lease, Outcome, Record, Retry, State, is_own, new_id
from skep.life import RETENTION, Retention
from skep.schedule import Schedule, ScheduleRecord

T = TypeVar("T")

log = logging.getLogger("skep.redis")

SPREAD_PREFIX = "{skep}:"
_TAG = re.compile(r"\{([^{}]+)\}")
MOST_FRESH = 50_000  # ids that are remembered as put by this process
SHARES_AT_ONCE = 100  # jobs for which shares of limits are looked for in one call
_ROOM = 1 << 40  # where nobody gives a limit


@dataclass(slots=True)
class Around:
    """What all homes together know of what is about to be put."""

    repeated: bool = False
    used: dict[str, list[int]] = field(default_factory=dict)  # id -> the homes that know it
    holders: dict[str, str] = field(default_factory=dict)  # unique key -> who holds it
    sealed: dict[str, bool] = field(default_factory=dict)  # of the batches that are there
    caps: dict[str, tuple[int, int]] = field(default_factory=dict)  # queue -> its cap, and how many wait


class Fresh:
    """Knows jobs that no home can know yet: plain ones whose ids this process has made and not yet put."""

    def __init__(self) -> None:
        self._put: set[str] = set()
        self._after = ""  # ids that were made before this are not remembered any more

    def are(self, jobs: Sequence[Job]) -> bool:
        """Asked once of each: from then on it has been put."""
        ids = {job.id for job in jobs}
        fresh = (
            len(ids) == len(jobs)
            and self._put.isdisjoint(ids)
            and all(job.id > self._after and is_plain(job) and is_own(job.id) for job in jobs)
        )
        if len(self._put) + len(ids) > MOST_FRESH:
            self._after = new_id()
            self._put.clear()
        else:
            self._put |= ids
        return fresh


class SpreadBroker:
    """All of `Broker`, `Ledger` and `Hints` in `homes` slots of a cluster."""

    def __init__(
        self,
        target: Target,
        homes: Homes,
        *,
        prefix: str | None = None,
        clock: Clock | None = None,
        retention: Retention = RETENTION,
        credentials: Credentials | None = None,
    ) -> None:
        self._prefix = SPREAD_PREFIX if prefix is None else prefix
        if not _TAG.search(self._prefix):
            raise BadSetting(f"prefix={self._prefix!r}: with homes it needs a hash tag, such as {{shop}}:")
        self._link: Link = RedisLink(target, credentials)
        self._places = homes
        self._post = Post()
        self._homes = self._post.homes = [
            Home(
                number,
                _TAG.sub(rf"{{\1:{number}}}", self._prefix, count=1),
                self._link,
                self._places,
                clock=clock,
                retention=retention,
                post=self._post,
            )
            for number in range(homes.count)
        ]
        self._waited: set[bytes] = set()
        self._turn = 0
        self._fresh = Fresh()

    @property
    def remote(self) -> bool:
        return True

    @property
    def in_order(self) -> bool:
        return False  # each home has its own

    @property
    def durability(self) -> Durability:
        return self._homes[0].durability

    async def open(self) -> Self:
        if await self._homes[0].open_link():
            try:
                await self._agree()
            except BaseException:
                await self.close()
                raise
        return self

    async def close(self) -> None:
        await self._link.close()

    async def _agree(self) -> None:
        """All who use the app must look for a name in the same home: what the first has said is recorded."""
        shown, count = self._link.target.shown, self._places.count
        if await self._link.command("EXISTS", f"{self._prefix}seq", reads=True):
            raise EngineError(
                f"{shown}: the jobs under {self._prefix} live in one slot: open it without homes, or use "
                f"another prefix"
            )
        await self._link.command("HSETNX", f"{self._prefix}homes", "count", count)
        known = await self._recorded()
        if known["count"] != count:
            raise EngineError(
                f"{shown}: the app under {self._prefix} has {known['count']} homes: write "
                f"homes={known['count']}"
            )
        for queue, n in self._places.parts.items():
            before = known.get(f"part:{queue}", 1)
            if n < before:
                raise EngineError(f"{shown}: {queue} has {before} parts already, and cannot have fewer")
            if n > before:
                await self._check_unruled(queue)
                await self._link.command("HSET", f"{self._prefix}homes", f"part:{queue}", n)
        await self._learn_parts()

    async def _recorded(self) -> dict[str, int]:
        flat = await self._link.command("HGETALL", f"{self._prefix}homes", reads=True)
        return {name.decode(): int(n) for name, n in zip(flat[::2], flat[1::2], strict=True)}

    async def _learn_parts(self) -> None:
        """Somebody may have given a queue more parts."""
        found = (await self._recorded()).items()
        self._places.parts.update((name[5:], n) for name, n in found if name.startswith("part:"))

    async def _check_unruled(self, queue: str) -> None:
        for rule in await self._homes[0].rules():
            bounded = rule.kind is RuleKind.CAP or rule.kind is RuleKind.LIMIT
            if bounded and rule.scope is Scope.QUEUE and rule.name == queue:
                raise EngineError(
                    f"{queue} has a {rule.kind.value}: remove it before the queue gets more parts, and then "
                    f"set the limit again (a queue with parts has no cap)"
                )

    # --- where things are ----------------------------------------------------------------

    def _of(self, name: str) -> Home:
        return self._homes[self._places.of(name)]

    def _of_queue(self, queue: str) -> list[Home]:
        return [self._homes[number] for number in self._places.of_queue(queue)]

    async def _look_around(
        self,
        ids: Sequence[str],
        *,
        token: str | None,
        keys: Iterable[str],
        batches: Iterable[str],
        queues: Iterable[str],
    ) -> Around:
        """All homes at once, each for what lives there."""
        places = self._places
        keys_of = _grouped((key, [places.of(key)]) for key in set(keys))
        batches_of = _grouped((batch, [places.of(batch)]) for batch in set(batches))
        queues_of = _grouped((queue, places.of_queue(queue)) for queue in set(queues))
        around = Around()

        async def look(home: Home) -> None:
            asked = [each.get(home.number, []) for each in (keys_of, batches_of, queues_of)]
            args: list[Argument] = [token or ""]
            for names in (ids, *asked):
                args += (len(names), *names)
            repeated, used, *found = await home.tell("around", *args)
            around.repeated |= bool(repeated)
            for n in used:
                around.used.setdefault(ids[n - 1], []).append(home.number)
            holders, states, caps = (
                zip(names, each, strict=True) for names, each in zip(asked, found, strict=True)
            )
            around.holders |= {key: holder.decode() for key, holder in holders if holder is not None}
            around.sealed |= {batch: state == 2 for batch, state in states if state}
            around.caps |= {queue: tuple(cap) for queue, cap in caps if cap is not None}

        await asyncio.gather(*map(look, self._homes))
        return around

    async def _located(self, job_ids: Sequence[str]) -> list[tuple[Home, list[str]]]:
        """The homes that may know these jobs, with the ids of those."""
        known = await self._post.known(list(dict.fromkeys(job_ids)))
        found = _grouped(known.items())
        return [(self._homes[number], ids) for number, ids in sorted(found.items())]

    # --- Broker: jobs come in ------------------------------------------------------------

    async def put(self, jobs: Sequence[Job], *, token: str | None = None) -> list[Receipt]:
        if not jobs and token is None:
            self._link.check_usable()
            return []
        try:
            return await self._put(jobs, token, None, seal=False)
        except StorageFull as full:
            raise MemoryFull(jobs[0].queue if jobs else "", full.where) from full

    async def put_batch(
        self, batch: Batch, jobs: Sequence[Job] = (), *, seal: bool = True, token: str | None = None
    ) -> list[Receipt]:
        try:
            return await self._put(jobs, token, batch, seal=seal)
        except StorageFull as full:
            raise MemoryFull(jobs[0].queue if jobs else "", full.where) from full

    async def _put(
        self, jobs: Sequence[Job], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        if self._fresh.are(jobs) and batch is None:
            numbers = {self._places.of_job(job.queue, job.id) for job in jobs}
            if len(numbers) == 1:
                return await self._homes[numbers.pop()].put_here(jobs, token, None, seal=False)
        named = {job.batch for job in jobs if job.batch is not None}
        around = await self._look_around(
            [job.id for job in jobs],
            token=token,
            keys=[job.unique for job in jobs if job.unique is not None],
            batches=[*named, *([] if batch is None else [batch.id, batch.parent or batch.id])],
            queues=[job.queue for job in jobs],
        )
        if around.repeated:
            return [Receipt(job.id, False) for job in jobs]
        receipts = [_refused(job, around) for job in jobs]
        fresh = [job for job, receipt in zip(jobs, receipts, strict=True) if receipt is None]
        coming = _without_doubles(fresh)
        _check_room(coming, around)
        _check_batches(coming, batch, around)
        told: list[Receipt] = []
        if fresh or batch is not None or token is not None:
            home = self._homes[self._accepting(fresh, batch, around)]
            told = await home.put_here(fresh, token, batch, seal=seal)
        rest = iter(told)
        return [receipt or next(rest) for receipt in receipts]

    def _accepting(self, jobs: Sequence[Job], batch: Batch | None, around: Around) -> int:
        """The home that accepts a put: the one whose word must hold at that very moment.

        A cap must not be overfilled, a batch not be sealed meanwhile, a key or an id not be taken.
        """
        for queue in around.caps:
            if queue in self._places.parts:
                raise EngineError(
                    f"{queue} has several parts and a cap, which cannot be kept: remove the cap"
                )
        capped = {
            self._places.of_job(job.queue, job.id): job.queue for job in jobs if job.queue in around.caps
        }
        if len(capped) > 1:
            raise EngineError(
                f"{' and '.join(sorted(capped.values()))} have caps and live in different homes, where no "
                f"put can keep to both at once: put their jobs one queue at a time"
            )
        batches = [] if batch is None else [batch.id]
        batches += [job.batch for job in jobs if job.batch is not None]
        keys = [job.unique for job in jobs if job.unique is not None]
        queues = [self._places.of_job(job.queue, job.id) for job in jobs]
        chosen = [job.id for job in jobs if job.chosen]
        return [*capped, *map(self._places.of, [*batches, *keys, *chosen]), *queues, 0][0]

    async def forget_tokens(self, tokens: Sequence[str]) -> None:
        await asyncio.gather(*(home.forget_tokens(tokens) for home in self._homes))

    async def seal(self, batch: str) -> bool:
        return await self._of(batch).seal(batch)

    # --- Broker: jobs go out -------------------------------------------------------------

    async def lease(
        self, wants: Mapping[str, int], *, span: timedelta, holder: str, limit: int | None = None
    ) -> list[Lease]:
        return (await self.exchange((), wants, span=span, holder=holder, limit=limit)).leases

    async def settle(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> list[Lease]:
        if not outcomes:
            self._link.check_usable()
            return []
        return [outcomes[n][0] for n in await self._settle(await self._without_taken(outcomes))]

    async def exchange(
        self,
        outcomes: Sequence[tuple[Lease, Outcome]],
        wants: Mapping[str, int],
        *,
        span: timedelta,
        holder: str,
        limit: int | None = None,
    ) -> Exchange:
        self._link.check_usable()
        self._looked(wants)
        if (home := self._only_home(outcomes, wants)) is not None:
            return await home.exchange(outcomes, wants, span=span, holder=holder, limit=limit)
        lost = await self.settle(outcomes)
        leases, trouble = await self._lease(wants, span, holder, _ROOM if limit is None else limit)
        if trouble is not None:
            if not leases and not outcomes:
                raise trouble
            log.warning("not every queue could be looked into: %s", trouble)
        return Exchange(lost, leases)

    def _looked(self, queues: Iterable[str]) -> None:
        homes = ((queue, home) for queue in queues for home in self._of_queue(queue))
        self._link.looked(key for queue, home in homes for key in home.heard_at(queue))

    def _only_home(self, outcomes: Sequence[tuple[Lease, Outcome]], wants: Mapping[str, int]) -> Home | None:
        """The one that all of this is about, if that is so, and nothing leads elsewhere: one call does it."""
        queues = {*wants, *(lease.queue for lease, _ in outcomes)}
        numbers = {self._places.of(queue) for queue in queues}
        if len(numbers) != 1 or not queues.isdisjoint(self._places.parts) or any(map(_leads_on, outcomes)):
            return None
        home = self._homes[numbers.pop()]
        return None if home.limited else home

    async def _lease(
        self, wants: Mapping[str, int], span: timedelta, holder: str, limit: int
    ) -> tuple[list[Lease], EngineError | None]:
        """All homes at once, or queue by queue where their order counts.  What was taken is always given."""
        homes = {queue: self._in_turn(queue) for queue in wants}
        limited = any(home.limited for home in self._homes)
        if limited or limit < sum(wants.values()) or any(len(each) > 1 for each in homes.values()):
            return await self._lease_in_order(wants, homes, span, holder, limit)
        grouped = _grouped((queue, [each[0].number]) for queue, each in homes.items())
        answers = await asyncio.gather(
            *(
                self._homes[number].lease({queue: wants[queue] for queue in queues}, span=span, holder=holder)
                for number, queues in grouped.items()
            ),
            return_exceptions=True,
        )
        leases, trouble = _told_apart(answers)
        order = {queue: n for n, queue in enumerate(wants)}
        return sorted((lease for each in leases for lease in each), key=lambda it: order[it.queue]), trouble

    async def _lease_in_order(
        self,
        wants: Mapping[str, int],
        homes: Mapping[str, Sequence[Home]],
        span: timedelta,
        holder: str,
        limit: int,
    ) -> tuple[list[Lease], EngineError | None]:
        leases: list[Lease] = []
        trouble = None
        for queue, most in wants.items():
            want = min(most, limit - len(leases))
            for home in homes[queue] if want > 0 else ():
                try:
                    if home.limited:
                        await self._get_shares(home, queue, want)
                    taken = await home.lease({queue: want}, span=span, holder=holder)
                except EngineError as error:
                    trouble = error
                    continue
                leases += taken
                want -= len(taken)
                if want <= 0:
                    break
        return leases, trouble

    async def _get_shares(self, home: Home, queue: str, want: int) -> None:
        """Let this home have what others do not use of limits that its next jobs come under."""
        for field_name, name, short in await home.tell("short", queue, min(want, SHARES_AT_ONCE)):
            rows = await asyncio.gather(*(other.tell("shares", field_name) for other in self._homes))
            facts = list(zip(self._homes, rows, strict=True))
            # What runs elsewhere beyond a share can only become less: so much stays in the pool.
            beyond = sum(max(0, running - share) for other, (share, running, _) in facts if other is not home)
            for other, (share, running, left) in facts:
                if short > 0 and (left > beyond or (share > running and other is not home)):
                    args = [*other._terms(), field_name, name, short, home.number, beyond]
                    given, _ = await other.run("lend", args)
                    short -= given

    def _in_turn(self, queue: str) -> list[Home]:
        """The homes of a queue, each time beginning with the next one."""
        homes = self._of_queue(queue)
        if len(homes) == 1:
            return homes
        self._turn += 1
        first = self._turn % len(homes)
        return [*homes[first:], *homes[:first]]

    async def _settle(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> list[int]:
        """The numbers of those that were lost."""
        grouped = _grouped(
            (n, [self._places.of_job(lease.queue, lease.id)]) for n, (lease, _) in enumerate(outcomes)
        )

        async def settle(number: int, numbers: list[int]) -> list[int]:
            lost = [numbers[n] for n in await self._homes[number].settle_here([outcomes[n] for n in numbers])]
            return [n for n in lost if not await self._settle_elsewhere(number, outcomes[n])]

        settled = await asyncio.gather(*(settle(*each) for each in grouped.items()), return_exceptions=True)
        lost, trouble = _told_apart(settled)
        if trouble is not None and lost and isinstance(trouble, EngineUnavailable):
            raise OutcomeUnknown(f"some of the outcomes were recorded, others not: {trouble}") from trouble
        if trouble is not None:
            raise trouble
        return sorted(n for each in lost for n in each)

    async def _settle_elsewhere(self, number: int, settled: tuple[Lease, Outcome]) -> bool:
        """A queue may have got more parts since a job was put: then it is not where its id says."""
        for home in self._of_queue(settled[0].queue):
            if home.number != number and not await home.settle_here([settled]):
                return True
        return False

    async def _without_taken(
        self, outcomes: Sequence[tuple[Lease, Outcome]]
    ) -> Sequence[tuple[Lease, Outcome]]:
        """An emission whose id is taken in another home than its own is left out, as in its own."""
        emitted = [job for _, outcome in outcomes if isinstance(outcome, Done | Dead) for job in outcome.emit]
        if not emitted:
            return outcomes
        taken = await self._taken(emitted)
        if not taken:
            return outcomes
        return [
            (lease, replace(outcome, emit=tuple(job for job in outcome.emit if job.id not in taken)))
            if isinstance(outcome, Done | Dead)
            else (lease, outcome)
            for lease, outcome in outcomes
        ]

    async def _taken(self, jobs: Sequence[Job]) -> set[str]:
        """The ids that another home knows than the one that they are for.  From now on they have been put."""
        self._fresh.are(jobs)
        known = await self._post.known([job.id for job in jobs])
        return {
            job.id for job in jobs if set(known.get(job.id, ())) - {self._places.of_job(job.queue, job.id)}
        }

    async def renew(self, leases: Sequence[Lease], *, span: timedelta) -> list[Renewal]:
        found = [Renewal(None)] * len(leases)

        async def renew(home: Home, numbers: list[int]) -> None:
            for n, renewal in zip(
                numbers, await home.renew([leases[n] for n in numbers], span=span), strict=True
            ):
                if renewal.until is not None:
                    found[n] = renewal

        grouped = _grouped((n, [self._places.of_job(it.queue, it.id)]) for n, it in enumerate(leases))
        await asyncio.gather(*(renew(self._homes[number], numbers) for number, numbers in grouped.items()))
        others = _grouped(
            (n, self._places.of_queue(it.queue))
            for n, it in enumerate(leases)
            if found[n].until is None and it.queue in self._places.parts
        )
        for number, numbers in others.items():
            await renew(self._homes[number], numbers)
        return found

    async def note(self, notes: Sequence[Note]) -> None:
        """Of a lease that is not in a home, that home drops it."""
        grouped = _grouped((n, self._places.of_queue(note.lease.queue)) for n, note in enumerate(notes))
        await asyncio.gather(
            *(self._homes[number].note([notes[n] for n in numbers]) for number, numbers in grouped.items())
        )

    async def sweep(self, *, limit: int = 1000, by: str | None = None) -> Swept:
        """All homes, each kind of work at most `limit` times in each; and send on what others have not."""
        await self._learn_parts()
        swept = await asyncio.gather(*(home.sweep(limit=limit, by=by) for home in self._homes))
        return all_swept(swept)

    # --- Ledger: looking -----------------------------------------------------------------

    async def now(self) -> datetime:
        return await self._homes[0].now()

    async def queues(self) -> dict[str, Counts]:
        found: dict[str, Counts] = {}
        for each in await asyncio.gather(*(home.queues() for home in self._homes)):
            for name, counts in each.items():
                found[name] = _sum(found[name], counts) if name in found else counts
        return {name: found[name] for name in sorted(found, key=str.encode)}

    async def get(self, job_id: str) -> Record | None:
        found = await asyncio.gather(*(home.get(job_id) for home in self._homes))
        return next((record for record in found if record is not None), None)

    async def find(self, where: Filter, *, limit: int = 100, after: int | None = None) -> Page:
        """By the numbers of their puts, which agree among homes as far as one put can have seen another."""
        count = len(self._homes)

        async def find(home: Home) -> list[tuple[int, bytes]]:
            before = max(0, ((after or 0) - home.number) // count)
            found = await home._found(where, limit + 1, before)
            return [(seq * count + home.number, job_id) for seq, job_id in found]

        homes = self._homes if where.queue is None else self._of_queue(where.queue)
        found = sorted(one for each in await asyncio.gather(*map(find, homes)) for one in each)
        page = found[:limit]
        while page and len(found) > len(page) and found[len(page)][0] == page[-1][0]:
            page.append(found[len(page)])  # a job that has moved may have the number of another
        grouped = _grouped((job_id, [cursor % count]) for cursor, job_id in page)
        answers = await asyncio.gather(
            *(self._homes[number]._records(job_ids) for number, job_ids in grouped.items())
        )
        records = {record.id: record for each in answers for record in each}
        shown = [records[job_id.decode()] for _, job_id in page if job_id.decode() in records]
        return Page(shown, page[-1][0] if page and len(found) > len(page) else None)

    async def position(self, job_id: str) -> int | None:
        """Of a queue with several parts: in its own part."""
        for home, _ in await self._located([job_id]):
            if (found := await home.position(job_id)) is not None:
                return found
        return None

    # --- Ledger: operating ---------------------------------------------------------------

    async def cancel(self, job_ids: Sequence[str]) -> list[bool]:
        done = await asyncio.gather(
            *(_done(home.cancel(ids), ids) for home, ids in await self._located(job_ids))
        )
        return _answers(job_ids, done)

    async def delete(self, job_ids: Sequence[str]) -> list[bool]:
        done = await asyncio.gather(
            *(_done(home.delete(ids), ids) for home, ids in await self._located(job_ids))
        )
        return _answers(job_ids, done)

    async def reschedule(self, job_id: str, due_at: datetime) -> bool:
        for home, _ in await self._located([job_id]):
            if await home.reschedule(job_id, due_at):
                return True
        return False

    async def replay(self, job_ids: Sequence[str]) -> list[bool]:
        located = await self._located(job_ids)
        keyed: dict[str, tuple[Home, str]] = {}
        homes: dict[str, Home] = {}
        for home, ids in located:
            for record in await home._records(ids):
                homes[record.id] = home
                if record.unique is not None and self._of(record.unique) is not home:
                    keyed[record.id] = (home, record.unique)
        if not keyed:
            done = [_done(home.replay(ids), ids) for home, ids in located]
            return _answers(job_ids, await asyncio.gather(*done))
        answers = []
        for job_id in job_ids:
            if job_id in keyed:
                answers.append(await self._replay_keyed(job_id, *keyed[job_id]))
            else:
                answers.append(job_id in homes and (await homes[job_id].replay([job_id]))[0])
        return answers

    async def _replay_keyed(self, job_id: str, home: Home, key: str) -> bool:
        """Its key lives elsewhere, and is taken there first: in one step with the order to replay it."""
        if (record := await home.get(job_id)) is None or record.state is not State.DEAD:
            return False
        await self._post.flush(home)  # when it ended it freed the key: that must not arrive after this
        key_home = self._of(key)
        args = [*key_home._terms(), key, job_id, home.number]
        taken, reports = await key_home.run("replay_keyed", args)
        return bool(taken) and reports.get(job_id, "1") == "1"

    async def drop(self, queue: str) -> int:
        return sum(await asyncio.gather(*(home.drop(queue) for home in self._of_queue(queue))))

    async def add_rule(self, rule: Rule) -> bool:
        """In all homes; home 0, which is asked for them, comes last."""
        await self._learn_parts()
        if self._is_shared(rule.kind, rule.scope, rule.name):
            return await self._share(rule)
        if rule.kind is RuleKind.CAP and len(self._places.of_queue(rule.name)) > 1:
            raise EngineError(
                f"{rule.name} has several parts, and no put can see how full the others are: it cannot be "
                f"capped"
            )
        await asyncio.gather(*(home.add_rule(rule) for home in self._homes[1:]))
        return await self._homes[0].add_rule(rule)

    def _is_shared(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        """Whether it limits what runs in several homes together."""
        return kind is RuleKind.LIMIT and (scope is not Scope.QUEUE or len(self._places.of_queue(name)) > 1)

    async def _share(self, rule: Rule) -> bool:
        """First nobody has a share of it; when all homes know that, it is shared out as they need it."""
        first, sharing, limit = self._homes[0], new_id(), _limit(rule.scope, rule.name)
        if not await first.tell("pool", limit, rule.n, sharing, 0, reads=False):
            return False
        for home in self._homes:
            await home.tell("share", limit, sharing, reads=False)
            home.limited = True
        await first.tell("pool", limit, rule.n, sharing, 1, reads=False)
        return True

    async def remove_rule(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        if self._is_shared(kind, scope, name):
            forgotten = [
                await home.tell("unshare", _limit(scope, name), reads=False) for home in self._homes[::-1]
            ]
            return bool(forgotten[-1])
        await asyncio.gather(*(home.remove_rule(kind, scope, name) for home in self._homes[1:]))
        return await self._homes[0].remove_rule(kind, scope, name)

    async def rules(self) -> list[Rule]:
        rules, found = await asyncio.gather(self._homes[0].rules(), self._homes[0].tell("pools"))
        shared = {field_name.decode(): n for field_name, n in zip(found[::2], found[1::2], strict=True)}
        return [
            replace(rule, n=shared.get(_limit(rule.scope, rule.name), rule.n))
            if rule.kind is RuleKind.LIMIT
            else rule
            for rule in rules
        ]

    # --- Ledger: batches -----------------------------------------------------------------

    async def batch(self, batch: str) -> BatchStatus | None:
        return await self._of(batch).batch(batch)

    async def batches(self, *, limit: int = 100, after: str | None = None) -> list[BatchStatus]:
        found = await asyncio.gather(*(home.batches(limit=limit, after=after) for home in self._homes))
        return sorted((one for each in found for one in each), key=lambda it: it.id.encode())[:limit]

    async def members(self, batch: str, *, limit: int = 1000, after: int | None = None) -> list[Member]:
        """Its home does not know which of them run: their own homes do."""
        members = await self._of(batch).members(batch, limit=limit, after=after)
        pending = [member.id for member in members if not member.state.terminal]
        if not pending:
            return members
        found = await asyncio.gather(*(home.tell("standing", *pending) for home in self._homes))
        ready = {job_id for job_id, *at in zip(pending, *found, strict=True) if any(at) and 2 not in at}
        return [
            replace(member, state=State.READY if member.id in ready else State.RUNNING)
            if not member.state.terminal
            else member
            for member in members
        ]

    async def delete_batch(self, batch: str) -> bool:
        home = self._of(batch)
        others = [other.number for other in self._homes if other is not home]
        return bool(await home._call("delete_batch", batch, *others))

    # --- Ledger: schedules ---------------------------------------------------------------

    async def put_schedule(self, schedule: Schedule, next_at: datetime) -> None:
        await self._homes[0].put_schedule(schedule, next_at)

    async def schedules(self, *, due: bool = False) -> list[ScheduleRecord]:
        return await self._homes[0].schedules(due=due)

    async def pause_schedule(self, name: str, paused: bool) -> bool:
        return await self._homes[0].pause_schedule(name, paused)

    async def remove_schedule(self, name: str) -> bool:
        return await self._homes[0].remove_schedule(name)

    async def fire(self, name: str, instant: datetime, job: Job | None, next_at: datetime) -> bool:
        if job is not None and await self._taken([job]):
            job = None
        return await self._homes[0].fire(name, instant, job, next_at)

    # --- Hints ---------------------------------------------------------------------------

    @property
    def hears(self) -> bool:
        return self._link.hears

    async def wait(self, queues: Sequence[str], timeout: float) -> bool:
        """Also until the first of the jobs that were not due at the last look becomes so."""
        left = min((home.due_in(queues) for home in self._homes), default=timeout)
        if left < timeout:
            return await self._wait(queues, left) or True
        return await self._wait(queues, timeout)

    async def _wait(self, queues: Sequence[str], timeout: float) -> bool:
        ends = time.monotonic() + timeout
        homes = {queue: self._of_queue(queue) for queue in queues}
        channels = [home._key(queue, "news") for queue, each in homes.items() for home in each]
        doors = [home._key(queue, "incoming") for queue, each in homes.items() for home in each]
        if not await self._link.wait_for(channels=channels, lists=doors, timeout=timeout):
            return False
        if self._waited.issuperset(channels):
            return True
        self._waited.update(channels)
        self._looked(queues)
        grouped = _grouped((queue, [home.number for home in each]) for queue, each in homes.items())
        found = [
            self._homes[number]._call("anything", *names, reads=True) for number, names in grouped.items()
        ]
        if any(await asyncio.gather(*found)):
            return True
        left = ends - time.monotonic()
        return await self._link.wait_for(channels=channels, lists=doors, timeout=left)


def all_swept(swept: Sequence[Swept]) -> Swept:
    """What was done in all homes together."""
    return Swept(
        promoted=sum(each.promoted for each in swept),
        reaped=sum(each.reaped for each in swept),
        expired=sum(each.expired for each in swept),
        removed=sum(each.removed for each in swept),
        next_in=min((each.next_in for each in swept if each.next_in is not None), default=None),
        again_in=min((each.again_in for each in swept if each.again_in is not None), default=None),
        schedules_due=any(each.schedules_due for each in swept),
    )


def _grouped(places: Iterable[tuple[Any, Sequence[int]]]) -> dict[int, list[Any]]:
    """Things by the homes that each belongs to."""
    found: dict[int, list[Any]] = {}
    for thing, numbers in places:
        for number in numbers:
            found.setdefault(number, []).append(thing)
    return found


def _leads_on(settled: tuple[Lease, Outcome]) -> bool:
    """Whether something may be put because of it, perhaps in another home."""
    lease, outcome = settled
    match outcome:
        case Done(emit=emit) | Dead(emit=emit):
            return bool(emit) or lease.batch is not None
        case Retry(queue=queue):
            return queue is not None
    return lease.batch is not None


def _refused(job: Job, around: Around) -> Receipt | None:
    if job.id in around.used:
        return Receipt(job.id, False)
    holder = None if job.unique is None else around.holders.get(job.unique)
    return None if holder is None else Receipt(holder, False)


def _without_doubles(jobs: Sequence[Job]) -> list[Job]:
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


def _check_room(jobs: Sequence[Job], around: Around) -> None:
    for queue, (cap, waiting) in around.caps.items():
        coming = sum(job.queue == queue for job in jobs)
        if coming and waiting + coming > cap:
            raise QueueFull(queue, cap)


def _check_batches(jobs: Sequence[Job], batch: Batch | None, around: Around) -> None:
    opening = batch is not None and batch.id not in around.sealed
    named = {job.batch for job in jobs if job.batch is not None}
    if batch is not None and opening:
        named = (named - {batch.id}) | ({batch.parent} if batch.parent is not None else set())
    for name in sorted(named):
        if name not in around.sealed:
            raise UnknownBatch(name)
        if around.sealed[name]:
            raise BatchSealed(name)


def _told_apart(answers: Iterable[T | BaseException]) -> tuple[list[T], EngineError | None]:
    """What was answered, and the first trouble; what is no trouble of an engine is raised."""
    fine: list[T] = []
    trouble = None
    for answer in answers:
        if isinstance(answer, EngineError):
            trouble = trouble or answer
        elif isinstance(answer, BaseException):
            raise answer
        else:
            fine.append(answer)
    return fine, trouble


async def _done(answering: Coroutine[Any, Any, list[bool]], ids: list[str]) -> set[str]:
    return {job_id for job_id, done in zip(ids, await answering, strict=True) if done}


def _answers(job_ids: Sequence[str], done: Iterable[set[str]]) -> list[bool]:
    """Who is there twice is done once."""
    left = set().union(*done)
    answers = []
    for job_id in job_ids:
        answers.append(job_id in left)
        left.discard(job_id)
    return answers


def _limit(scope: Scope, name: str) -> str:
    return f"limit:{scope.value}:{name}"


def _sum(one: Counts, other: Counts) -> Counts:
    return Counts(*(getattr(one, name) + getattr(other, name) for name in Counts.__struct_fields__))


def from_url(address: Address, clock: Clock | None) -> RedisBroker | SpreadBroker:
    """`redis+cluster://host:6379?prefix={skep}:&homes=16&parts=mail:4`; without homes it is in one slot."""
    target = target_of(address, own=("homes", "parts", "prefix"))
    prefix, count = address.options.get("prefix"), address.options.get("homes")
    parts = _parts(address.options.get("parts", ""))
    if count is None:
        if parts:
            raise BadSetting("parts of queues need homes to be in: write homes=16 as well")
        return RedisBroker(target, prefix=prefix, clock=clock)
    if not count.isdecimal():
        raise BadSetting(f"homes={count!r}: write a whole number")
    return SpreadBroker(target, Homes(int(count), parts), prefix=prefix, clock=clock)


def _parts(text: str) -> dict[str, int]:
    found = {}
    for each in filter(None, text.split(",")):
        queue, _, n = each.rpartition(":")
        if not queue or not n.isdecimal():
            raise BadSetting(f"parts={text!r}: write queue:number, as in mail:4,sms:2")
        found[queue] = int(n)
    return found
