"""The embedded engine: one SQLite file, any number of threads and processes, no server.

Tables and statements are in the folder sql.  Each verb is one transaction: the steps inside of it (in the
folder steps) read what they need, decide with the pure functions of `transitions`, and record.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from typing import Self, TypeVar, Unpack

from propolis.core import wire
from propolis.core.batch import Batch, BatchStatus
from propolis.core.clock import Clock, SystemClock, from_us, span_until, to_us
from propolis.core.duration import Duration, duration
from propolis.core.envelope import Envelope
from propolis.core.job import JobInfo, Lease, Member, Outcome
from propolis.core.protocols import (
    LIMIT_SCOPES,
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
from propolis.core.records import Bounds, Read, ReadOptions, Swap, Swapped, check_read, check_swaps
from propolis.core.transitions import RETENTION, Retention
from propolis.engines.address import Address
from propolis.engines.shared import feeds_on_records
from propolis.engines.shared.feed_verbs import After, FeedVerbs, Hears, Pages, heard_by
from propolis.engines.shared.from_exchange import ClaimTerms, FromExchange, claim_of, emit_many
from propolis.engines.shared.giving_back import all_given_back, gives_back
from propolis.engines.shared.waiters import Waiters
from propolis.engines.sqlite.file import SQLiteFile
from propolis.engines.sqlite.file_watch import FileWatches
from propolis.engines.sqlite.repair import repair
from propolis.engines.sqlite.rows import one, rules_in, text_of
from propolis.engines.sqlite.schema import script
from propolis.engines.sqlite.snapshot import Snapshot
from propolis.engines.sqlite.steps import batches, leasing, operating, puts, records, settling, sweeping
from propolis.engines.sqlite.steps.rules.openings import NEXT_GROUPS, next_groups
from propolis.engines.sqlite.steps.rules.rulebook import remove_rule
from propolis.engines.sqlite.steps.work import Work
from propolis.errors import BadSetting, EngineClosed

T = TypeVar("T")


class SQLiteEngine(FromExchange, FeedVerbs):
    """The whole contract on one file.

    `synchronous="full"` makes an acknowledged put survive power loss; "normal" only the process.
    """

    limits = LIMIT_SCOPES

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Clock | None = None,
        retention: Retention = RETENTION,
        synchronous: str = "full",
        patience: Duration = "30s",
        unsafe: bool = False,
    ) -> None:
        seconds = duration(patience).total_seconds()
        self._file = SQLiteFile(path, synchronous=synchronous, patience=seconds, unsafe=unsafe)
        self._clock = clock or SystemClock()
        self._retention = retention
        self._waiters = Waiters()
        self._feed_waiters = Waiters()
        self._watches = FileWatches(f"{self._file.path}-wal")

    @property
    def durability(self) -> Durability:
        return self._file.durability

    def script(self) -> str:
        return script()

    async def open(self) -> Self:
        self._file.open()
        self._watches.open()
        return self

    async def install(self, *, prune: bool = False) -> list[str]:
        if prune:
            raise BadSetting("sqlite:// has no functions to remove: leave --prune out")
        ran = self._file.open(migrates=True)
        self._file.close()
        return [f"ran {file}" for file in ran]

    async def open_to_look(self) -> Self:
        self._file.open(looks=True)
        return self

    async def close(self) -> None:
        await all_given_back(self)
        self._waiters.wake()
        self._feed_waiters.wake_waiting()
        self._watches.close()
        self._file.close()

    async def _write(self, act: Callable[[Work], T], *, long: bool = False) -> T:
        """One transaction; the hints go out when it is committed, never before."""
        work: Work | None = None

        def run(db: sqlite3.Connection) -> T:
            nonlocal work
            work = Work(db, self._clock.now_us(), self._retention)
            result = act(work)
            work.flush()
            return result

        result = await self._file.write(run, long=long)
        if work is not None:
            for queue in work.woken:
                self._waiters.wake(queue)
        return result

    async def _read(self, read: Callable[[Snapshot], T]) -> T:
        return await self._file.read(lambda db: read(Snapshot(db, self._clock.now_us())))

    # --- jobs come in and go out ---------------------------------------------------------

    async def put(self, jobs: Sequence[Envelope], *, token: str | None = None) -> list[Receipt]:
        bodies = wire.encode_all(jobs)
        return await self._write(lambda work: puts.put(work, jobs, bodies, token))

    async def put_batch(
        self, batch: Batch, jobs: Sequence[Envelope] = (), *, seal: bool = True, token: str | None = None
    ) -> list[Receipt]:
        bodies = wire.encode_all(jobs)
        return await self._write(lambda work: puts.put(work, jobs, bodies, token, batch, seal=seal))

    async def put_in(
        self, tx: sqlite3.Connection, jobs: Sequence[Envelope], *, token: str | None = None
    ) -> list[Receipt]:
        """Put inside the caller's own transaction on this file: the jobs appear if and only if it commits."""
        return self.put_in_now(tx, jobs, token=token)

    def put_in_now(
        self, tx: sqlite3.Connection, jobs: Sequence[Envelope], *, token: str | None = None
    ) -> list[Receipt]:
        """The same for synchronous code: a connection of SQLite stays in its thread in either case."""
        bodies = wire.encode_all(jobs)
        with self._file.joining(tx):
            work = Work(tx, self._clock.now_us(), self._retention, joins=True)
            receipts = puts.put(work, jobs, bodies, token)
            work.flush()
        return receipts

    async def seal(self, batch: str) -> bool:
        return await self._write(lambda work: batches.seal_batch(work, batch))

    async def renew(self, leases: Sequence[Lease], *, span: timedelta) -> list[Renewal]:
        return await self._write(lambda work: leasing.renew(work, leases, span))

    async def note(self, notes: Sequence[Note]) -> list[Lease]:
        return await self._write(lambda work: leasing.note(work, notes))

    @gives_back
    async def exchange(
        self, outcomes: Sequence[tuple[Lease, Outcome]], wants: Mapping[str, int], **terms: Unpack[LeaseTerms]
    ) -> Exchange:
        claim = claim_of(wants, terms)
        if not outcomes and not self._anything(wants, claim.tasks):
            return Exchange([], [])

        def act(work: Work) -> Exchange:
            lost = settling.settle(work, outcomes)
            return Exchange(lost, self._lease(work, claim))

        return await self._write(act, long=emit_many(outcomes))

    async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:
        check_swaps(swaps)
        bodies = records.encoded(swaps)
        return await self._write(lambda work: records.swap(work, swaps, bodies, token))

    async def records(self, kind: str, **which: Unpack[ReadOptions]) -> Read:
        reading = check_read(kind, which)
        now_us = self._clock.now_us()
        return await self._file.read(lambda db: records.read(db, now_us, kind, reading))

    async def append_entries(self, feed: str, entries: Sequence[bytes], bounds: Bounds) -> int | None:
        steps = feeds_on_records.appending(feed, entries, bounds)
        number = await self._write(lambda work: records.follow_steps(work, steps))
        self._feed_waiters.wake_waiting(feed)
        return number

    async def feed_pages(self, after: After, limit: int) -> Pages:
        return await feeds_on_records.pages(self, after, limit)

    @asynccontextmanager
    async def _hearing(self, feeds: Sequence[str]) -> AsyncIterator[Hears]:
        """What this process publishes comes as an event, the rest is noticed by the writes to the file."""
        seen_file, seen_heads = self._file.version(), self._heads(feeds)
        with self._feed_waiters.waiting(feeds) as event:

            def check() -> bool:
                nonlocal seen_file, seen_heads
                with suppress(EngineClosed):  # whoever waits finds out by reading
                    version = self._file.version()
                    if version is None or version == seen_file:
                        return version is None
                    seen_file, before, seen_heads = version, seen_heads, self._heads(feeds)
                    if before != seen_heads:
                        event.set()
                return True

            with self._watches.calling(check):
                yield heard_by(event)

    def _heads(self, feeds: Sequence[str]) -> list[int] | None:
        return self._file.peek(lambda db: records.versions(db, feeds_on_records.HEADS, feeds))

    async def sweep(self, *, limit: int = 1000, by: str | None = None) -> Swept:  # noqa: ARG002  # nobody to share with
        self._file.check_place()
        now_us = self._clock.now_us()
        dead_max = self._retention.dead_max

        def idle(db: sqlite3.Connection) -> Swept | None:
            if one(db, "anything_to_sweep", now_us=now_us, dead_max=dead_max, **sweeping.LEEWAY):
                return None
            next_in = span_until(one(db, "next_moment", now_us=now_us), now_us)
            kinds = records.kinds_due(db, now_us)
            return Swept(next_in=next_in, records_due=kinds, parked=sweeping.parked_lines(db))

        if (swept := self._file.peek(idle)) is not None:
            return swept
        return await self._write(lambda work: sweeping.sweep(work, limit, reaps=not self._file.was_blocked()))

    def _anything(self, wants: Mapping[str, int], tasks: Sequence[str] = ()) -> bool:
        """A read without a lock, so that idle workers do not stand in the way of busy ones."""
        now_us = self._clock.now_us()

        def peek(db: sqlite3.Connection) -> bool:
            self._waiters.looked(wants)
            self._file.saw(db, wants)
            names = text_of(tasks)
            return any(one(db, "anything", queue=queue, now_us=now_us, tasks=names) for queue in wants)

        return self._file.peek(peek) is not False

    def _changed(self, queues: Iterable[str]) -> bool:
        try:
            return self._file.changed(queues)
        except EngineClosed:  # whoever waits runs into the timeout, and then finds out
            return False

    def _lease(self, work: Work, claim: ClaimTerms) -> list[Lease]:
        self._waiters.looked(claim.wants)
        self._file.saw(work.db, claim.wants)
        leases = leasing.lease(work, claim)
        self._watches.vain = 0 if leases else self._watches.vain + 1
        return leases

    # --- what operators see and do -------------------------------------------------------

    async def now(self) -> datetime:
        return from_us(self._clock.now_us())

    async def queues(self, *, limit: int = 1000, after: str | None = None) -> dict[str, Counts]:
        return await self._read(lambda snapshot: snapshot.queues(limit, after))

    async def get(self, job_id: str) -> JobInfo | None:
        return await self._read(lambda snapshot: snapshot.get(job_id))

    async def find(self, where: Filter, *, limit: int = 100, after: int | None = None) -> Page:
        return await self._read(lambda snapshot: snapshot.find(where, limit, after or 0))

    async def position(self, job_id: str) -> int | None:
        return await self._read(lambda snapshot: snapshot.position(job_id))

    async def cancel(self, job_ids: Sequence[str]) -> list[bool]:
        return await self._write(lambda work: [operating.cancel(work, job_id) for job_id in job_ids])

    async def reschedule(self, job_id: str, due_at: datetime) -> bool:
        return await self._write(lambda work: operating.reschedule(work, job_id, to_us(due_at)))

    async def replay(self, job_ids: Sequence[str]) -> list[bool]:
        return await self._write(lambda work: [operating.replay(work, job_id) for job_id in job_ids])

    async def delete(self, job_ids: Sequence[str]) -> list[bool]:
        return await self._write(lambda work: [operating.delete(work, job_id) for job_id in job_ids])

    async def drop(self, queue: str) -> int:
        return await self._write(lambda work: operating.drop(work, queue))

    async def add_rule(self, rule: Rule) -> bool:
        return await self._write(lambda work: operating.add_rule(work, rule))

    async def remove_rule(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        return await self._write(lambda work: remove_rule(work, kind, scope, name))

    async def rules(self, *, limit: int = 1000, after: Rule | None = None) -> list[Rule]:
        return await self._read(lambda snapshot: rules_in(snapshot.db, snapshot.now_us, limit, after))

    async def tokens(self, rule: Rule, name: str) -> Tokens:
        return await self._read(lambda snapshot: snapshot.tokens(rule, name))

    async def batch(self, batch: str) -> BatchStatus | None:
        return await self._read(lambda snapshot: snapshot.batch(batch))

    async def batches(self, *, limit: int = 100, after: str | None = None) -> list[BatchStatus]:
        return await self._read(lambda snapshot: snapshot.batches(limit, after))

    async def members(self, batch: str, *, limit: int = 1000, after: int | None = None) -> list[Member]:
        return await self._read(lambda snapshot: snapshot.members(batch, limit, after))

    async def delete_batch(self, batch: str) -> bool:
        return await self._write(lambda work: operating.delete_batch(work, batch))

    async def repair(self, *, mend: bool) -> list[str]:
        return await repair(self._file.read, self._write, mend=mend)

    # --- hints ---------------------------------------------------------------------------

    @property
    def hears(self) -> bool:
        return False  # a commit may be noticed late, and looking is a read of a few pages

    async def wait(self, queues: Sequence[str], timeout: float) -> bool:
        """Changes by this process come as events, those by others are noticed by the writes to the file."""
        wants = dict.fromkeys(queues, 1)
        with self._waiters.waiting(queues) as event:

            def check() -> bool:
                changed = self._changed(queues)
                if changed and self._anything(wants):
                    event.set()
                elif changed:
                    self._watches.vain += 1
                return changed

            tokens_in = self._tokens_in(queues)
            if min(tokens_in, default=1) <= 0 and self._anything(wants):  # and not while a queue is paused
                return True
            left = min([timeout, *(seconds for seconds in tokens_in if seconds > 0)])
            with self._watches.calling(check), suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await event.wait()
            return event.is_set() or left < timeout

    def _tokens_in(self, queues: Sequence[str]) -> list[float]:
        """In how many seconds there are tokens for what was set aside.

        Of very many the first are read: whoever waits for others of them looks again when these have theirs.
        """
        groups: list[tuple[str, int]] = []
        with suppress(EngineClosed):  # whoever waits finds out by looking
            groups = self._file.peek(next_groups) or []
        now_us = self._clock.now_us()
        return [
            (us - now_us) / 1e6
            for n, (queue, us) in enumerate(groups, 1)
            if queue in queues or n == NEXT_GROUPS
        ]


def from_url(address: Address, clock: Clock | None) -> SQLiteEngine:
    """`sqlite:///jobs.db` is relative to the working directory, `sqlite:////var/jobs.db` is not."""
    address.reject_unknown("synchronous", "patience", "unsafe")
    path = address.path[1:]
    if address.hosts:
        host = address.shown.removeprefix("sqlite://").partition("/")[0]
        raise BadSetting(
            f"{address.shown} names a host, {host}, and a file has none: write "
            f"sqlite:///{host}{address.path} (from the working directory) or sqlite:////{host}{address.path}"
        )
    if not path:
        raise BadSetting(f"{address.shown} names no file: write sqlite:///jobs.db")
    return SQLiteEngine(
        path,
        clock=clock,
        synchronous=address.options.get("synchronous", "full"),
        patience=address.options.get("patience", "30s"),
        unsafe=address.options.get("unsafe", "0") not in ("0", "no", "false"),
    )
