"""The embedded engine: one SQLite file, any number of threads and processes, no server.

Tables and statements are in sql/sqlite/ and sql/sqlite.sql.  Each verb is one transaction: a `_Work`
that reads what it needs, decides with the pure functions of `life`, and records.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, Self, TypeVar

import msgspec
from msgspec import Struct

from skep import wire
from skep.address import Address
from skep.batch import Batch, BatchState, BatchStatus, Member, batch_state, callbacks
from skep.broker import (
    HISTORY_EVENTS,
    KNOWN_FOR,
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
from skep.brokers.sqlite_file import SQLiteFile
from skep.brokers.statements import load_statements
from skep.brokers.waiting import Waiters
from skep.brokers.watching import FileWatches
from skep.clock import Clock, SystemClock, from_us, span_until, span_us, to_us
from skep.duration import Duration, duration
from skep.errors import BadSetting, BatchSealed, EngineClosed, QueueFull, UnknownBatch
from skep.job import Dead, Done, Error, Event, Job, Lease, Outcome, Progress, Record, State
from skep.life import RETENTION, Retention, Running, Step, due_us, expires_us, reaped, settled
from skep.schedule import Schedule, ScheduleRecord

T = TypeVar("T")

PROMOTED_AT_ONCE = 1000

_SQL = load_statements("sqlite")
_KNOWN_US = span_us(KNOWN_FOR)
_HOLDS = (RuleKind.PAUSE, RuleKind.BLOCK)

_json = msgspec.json.Encoder()
_events = msgspec.json.Decoder(list[Event])
_lines = msgspec.json.Decoder(list[str])
_error = msgspec.json.Decoder(Error)
_progress = msgspec.json.Decoder(Progress)
_batch = msgspec.json.Decoder(Batch)
_schedule = msgspec.json.Decoder(Schedule)


class SQLiteBroker:
    """All of `Broker`, `Ledger` and `Hints` on one file.

    `synchronous="full"` makes an acknowledged put survive power loss; "normal" only the process.
    """

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
        self._watches = FileWatches(f"{self._file.path}-wal")

    @property
    def durability(self) -> Durability:
        return self._file.durability

    async def open(self) -> Self:
        self._file.open()
        self._watches.open()
        return self

    async def close(self) -> None:
        self._waiters.wake()
        self._watches.close()
        self._file.close()

    async def _write(self, act: Callable[[_Work], T], *, long: bool = False) -> T:
        """One transaction; the hints go out when it is committed, never before."""
        work: _Work | None = None

        def run(db: sqlite3.Connection) -> T:
            nonlocal work
            work = _Work(db, self._clock.now_us(), self._retention)
            result = act(work)
            work.flush()
            return result

        result = await self._file.write(run, long=long)
        if work is not None:
            for queue in work.woken:
                self._waiters.wake(queue)
        return result

    async def _read(self, look: Callable[[_Look], T]) -> T:
        return await self._file.read(lambda db: look(_Look(db, self._clock.now_us())))

    # --- Broker --------------------------------------------------------------------------

    async def put(self, jobs: Sequence[Job], *, token: str | None = None) -> list[Receipt]:
        bodies = wire.encode_all(jobs)
        return await self._write(lambda work: work.put(jobs, bodies, token))

    async def put_batch(
        self, batch: Batch, jobs: Sequence[Job] = (), *, seal: bool = True, token: str | None = None
    ) -> list[Receipt]:
        bodies = wire.encode_all(jobs)
        return await self._write(lambda work: work.put(jobs, bodies, token, batch, seal=seal))

    async def put_in(
        self, tx: sqlite3.Connection, jobs: Sequence[Job], *, token: str | None = None
    ) -> list[Receipt]:
        """Put inside the caller's own transaction on this file: the jobs appear if and only if it commits."""
        return self.put_in_now(tx, jobs, token=token)

    def put_in_now(
        self, tx: sqlite3.Connection, jobs: Sequence[Job], *, token: str | None = None
    ) -> list[Receipt]:
        """The same for synchronous code: a connection of SQLite stays in its thread in either case."""
        bodies = wire.encode_all(jobs)
        with self._file.joining(tx):
            work = _Work(tx, self._clock.now_us(), self._retention)
            receipts = work.put(jobs, bodies, token)
            work.flush()
        return receipts

    async def seal(self, batch: str) -> bool:
        return await self._write(lambda work: work.seal(batch))

    async def lease(
        self, wants: Mapping[str, int], *, span: timedelta, holder: str, limit: int | None = None
    ) -> list[Lease]:
        if not self._anything(wants):
            return []
        return await self._write(lambda work: self._look_and_lease(work, wants, span, holder, limit))

    async def renew(self, leases: Sequence[Lease], *, span: timedelta) -> list[Renewal]:
        return await self._write(lambda work: work.renew(leases, span))

    async def note(self, notes: Sequence[Note]) -> None:
        await self._write(lambda work: work.note(notes))

    async def settle(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> list[Lease]:
        return await self._write(lambda work: work.settle(outcomes))

    async def exchange(
        self,
        outcomes: Sequence[tuple[Lease, Outcome]],
        wants: Mapping[str, int],
        *,
        span: timedelta,
        holder: str,
        limit: int | None = None,
    ) -> Exchange:
        def act(work: _Work) -> Exchange:
            lost = work.settle(outcomes)
            return Exchange(lost, self._look_and_lease(work, wants, span, holder, limit))

        return await self._write(act)

    async def sweep(self, *, limit: int = 1000, by: str | None = None) -> Swept:  # noqa: ARG002  # nobody to share with
        now_us = self._clock.now_us()
        idle = self._file.peek(lambda db: _one(db, "anything_to_sweep", now_us=now_us)) == 0
        if idle and self._retention.dead_max is None:
            next_us = self._file.peek(lambda db: _one(db, "next_moment", now_us=now_us))
            due = self._file.peek(lambda db: _one(db, "any_schedule_due", now_us=now_us))
            return Swept(next_in=span_until(next_us, now_us), schedules_due=bool(due))
        return await self._write(lambda work: work.sweep(limit))

    def _anything(self, wants: Mapping[str, int]) -> bool:
        """A look without a lock, so that idle workers do not stand in the way of busy ones."""
        now_us = self._clock.now_us()

        def look(db: sqlite3.Connection) -> bool:
            self._waiters.looked(wants)
            self._file.saw(db, wants)
            return any(_one(db, "anything", queue=queue, now_us=now_us) for queue in wants)

        return self._file.peek(look) is not False

    def _changed(self, queues: Iterable[str]) -> bool:
        try:
            return self._file.changed(queues)
        except EngineClosed:  # who waits runs into its timeout, and then finds out
            return False

    def _look_and_lease(
        self, work: _Work, wants: Mapping[str, int], span: timedelta, holder: str, limit: int | None
    ) -> list[Lease]:
        self._waiters.looked(wants)
        self._file.saw(work.db, wants)
        leases = work.lease(wants, span, holder, limit)
        self._watches.vain = 0 if leases else self._watches.vain + 1
        return leases

    # --- Ledger --------------------------------------------------------------------------

    async def now(self) -> datetime:
        return from_us(self._clock.now_us())

    async def queues(self) -> dict[str, Counts]:
        return await self._read(lambda look: look.queues())

    async def get(self, job_id: str) -> Record | None:
        return await self._read(lambda look: look.get(job_id))

    async def find(self, where: Filter, *, limit: int = 100, after: int | None = None) -> Page:
        return await self._read(lambda look: look.find(where, limit, after or 0))

    async def position(self, job_id: str) -> int | None:
        return await self._read(lambda look: look.position(job_id))

    async def cancel(self, job_ids: Sequence[str]) -> list[bool]:
        return await self._write(lambda work: [work.cancel(job_id) for job_id in job_ids])

    async def reschedule(self, job_id: str, due_at: datetime) -> bool:
        return await self._write(lambda work: work.reschedule(job_id, to_us(due_at)))

    async def replay(self, job_ids: Sequence[str]) -> list[bool]:
        return await self._write(lambda work: [work.replay(job_id) for job_id in job_ids])

    async def delete(self, job_ids: Sequence[str]) -> list[bool]:
        return await self._write(lambda work: [work.delete(job_id) for job_id in job_ids])

    async def drop(self, queue: str) -> int:
        return await self._write(lambda work: work.drop(queue), long=True)

    async def add_rule(self, rule: Rule) -> bool:
        return await self._write(lambda work: work.add_rule(rule))

    async def remove_rule(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        return await self._write(lambda work: work.remove_rule(kind, scope, name))

    async def rules(self) -> list[Rule]:
        return await self._read(lambda look: _rules(look.db))

    async def batch(self, batch: str) -> BatchStatus | None:
        return await self._read(lambda look: look.batch(batch))

    async def batches(self, *, limit: int = 100, after: str | None = None) -> list[BatchStatus]:
        return await self._read(lambda look: look.batches(limit, after))

    async def members(self, batch: str, *, limit: int = 1000, after: int | None = None) -> list[Member]:
        return await self._read(lambda look: look.members(batch, limit, after))

    async def delete_batch(self, batch: str) -> bool:
        return await self._write(lambda work: work.delete_batch(batch), long=True)

    async def put_schedule(self, schedule: Schedule, next_at: datetime) -> None:
        await self._write(lambda work: work.put_schedule(schedule, to_us(next_at)))

    async def schedules(self, *, due: bool = False) -> list[ScheduleRecord]:
        return await self._read(lambda look: look.schedules(due))

    async def pause_schedule(self, name: str, paused: bool) -> bool:
        return await self._write(lambda work: work.answered("pause_schedule", name=name, paused=paused))

    async def remove_schedule(self, name: str) -> bool:
        return await self._write(lambda work: work.answered("remove_schedule", name=name))

    async def fire(self, name: str, instant: datetime, job: Job | None, next_at: datetime) -> bool:
        return await self._write(lambda work: work.fire(name, to_us(instant), job, to_us(next_at)))

    # --- Hints ---------------------------------------------------------------------------

    @property
    def hears(self) -> bool:
        return False  # a commit may be noticed late, and looking is a read of a few pages

    async def wait(self, queues: Sequence[str], timeout: float) -> bool:
        """This process tells by events; other processes are noticed by what they write to the log."""
        wants = dict.fromkeys(queues, 1)
        with self._waiters.waiting(queues) as event:

            def look() -> bool:
                changed = self._changed(queues)
                if changed and self._anything(wants):
                    event.set()
                elif changed:
                    self._watches.vain += 1
                return changed

            with self._watches.calling(look), suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await event.wait()
            return event.is_set()


class _Live(Struct):
    """A live job, as the rarer transitions need it."""

    seq: int
    id: str
    task: str
    queue: str
    priority: int
    pos: int
    due_us: int
    expires_us: int | None
    max_crashes: int
    chosen: int
    unique_key: str | None
    limit_key: str | None
    batch: str | None
    member: int
    stepped: int
    attempts: int
    failures: int
    crashes: int
    fence: int
    started_us: int | None
    history: str | None
    lease_fence: int = 0
    attempt: int = 0
    lease_started_us: int | None = None
    holder: str = ""
    cancel: int = 0

    def running(self) -> Running:
        return Running(
            fence=self.lease_fence,
            attempt=self.attempt,
            failures=self.failures,
            crashes=self.crashes,
            max_crashes=self.max_crashes,
            cancel_requested=bool(self.cancel),
            holder=self.holder,
        )

    def told(self, event: Event | None) -> str | None:
        """The history with one more event, as it is stored."""
        if event is None:
            return self.history
        events = [*(_events.decode(self.history) if self.history else ()), event]
        return _text(events[-HISTORY_EVENTS:])


class _Work:
    """One transaction.  Counters and tallies are read once, and written back by `flush`."""

    def __init__(self, db: sqlite3.Connection, now_us: int, retention: Retention) -> None:
        self.db = db
        self.now_us = now_us
        self.woken: set[str | None] = set()
        self._retention = retention
        self._counters: list[int] | None = None
        self._put: Counter[str] = Counter()
        self._deleted: Counter[str] = Counter()

    def run(self, statement: str, **values: Any) -> sqlite3.Cursor:
        return self.db.execute(_SQL[statement], values)

    def answered(self, statement: str, **values: Any) -> bool:
        return self.run(statement, **values).fetchone() is not None

    def flush(self) -> None:
        if self._counters is not None:
            seq, front, fence = self._counters
            self.run("keep_counters", seq=seq, front=front, fence=fence)
        for queue in {*self._put, *self._deleted}:
            self.run("keep_tally", queue=queue, put=self._put[queue], deleted=self._deleted[queue])

    def _count(self, which: int, by: int) -> int:
        """Move a counter on and give its new value."""
        if self._counters is None:
            self._counters = list(self.run("counters").fetchone())
        self._counters[which] += by
        return self._counters[which]

    def _back(self, n: int = 1) -> int:
        return self._count(0, n)

    def _front(self) -> int:
        return self._count(1, -1)

    def _fences(self, n: int) -> int:
        return self._count(2, n)

    # --- jobs come in --------------------------------------------------------------------

    def put(
        self,
        jobs: Sequence[Job],
        bodies: Sequence[bytes],
        token: str | None,
        batch: Batch | None = None,
        *,
        seal: bool = False,
    ) -> list[Receipt]:
        if token is not None and self.answered("known_token", token=token, now_us=self.now_us):
            return [Receipt(job.id, created=False) for job in jobs]
        opening = batch is not None and self._batch_row(batch.id) is None
        if batch is not None and opening:
            self._open_batch(batch)
        receipts = self._receipts(jobs)
        fresh = [n for n, receipt in enumerate(receipts) if receipt.created]
        self._check_batches({jobs[n].batch for n in fresh})
        self._add([jobs[n] for n in fresh], [bodies[n] for n in fresh])
        self._check_room({jobs[n].queue for n in fresh})
        if batch is not None and seal:
            self.seal(batch.id)
        if token is not None:
            self.run("keep_token", token=token, until_us=self.now_us + _KNOWN_US)
        return receipts

    def _receipts(self, jobs: Sequence[Job]) -> list[Receipt]:
        """Decide for each job whether it is new, also against the others of its bundle."""
        ids = _text([job.id for job in jobs])
        used: set[str] = {row[0] for row in self.run("used_ids", ids=ids, now_us=self.now_us)}
        keys: dict[str, str] = {}
        if any(job.unique is not None for job in jobs):
            wanted = _text([job.unique for job in jobs if job.unique is not None])
            keys = dict(self.run("held_keys", keys=wanted).fetchall())
        receipts = []
        for job in jobs:
            holder = job.id if job.id in used else keys.get(job.unique) if job.unique is not None else None
            if holder is None:
                used.add(job.id)
                if job.unique is not None:
                    keys[job.unique] = job.id
            receipts.append(Receipt(holder or job.id, created=holder is None))
        return receipts

    def _check_batches(self, batches: set[str | None]) -> None:
        for batch in batches - {None}:
            assert batch is not None
            row = self._batch_row(batch)
            if row is None:
                raise UnknownBatch(batch)
            if row["sealed"]:
                raise BatchSealed(batch)

    def _check_room(self, queues: set[str]) -> None:
        """After the fact: what raises is rolled back."""
        for rule in _rules(self.db):
            if rule.kind is RuleKind.CAP and rule.name in queues:
                (waiting,) = self.run("waiting_in", queue=rule.name, most=rule.n + 1).fetchone()
                if waiting > rule.n:
                    raise QueueFull(rule.name, rule.n)

    def _add(self, jobs: Sequence[Job], bodies: Sequence[bytes]) -> None:
        if not jobs:
            return
        last = self._back(len(jobs))
        first = last - len(jobs) + 1
        self.db.executemany(
            _SQL["add_job"],
            [
                self._row(seq, job, body)
                for seq, job, body in zip(range(first, last + 1), jobs, bodies, strict=True)
            ],
        )
        self.run("stand_new", first=first, last=last, now_us=self.now_us)
        if any(job.due_at is not None or job.delay_ms for job in jobs):
            self.run("schedule_new", first=first, last=last, now_us=self.now_us)
        for job in jobs:
            if job.unique is not None:
                self.run("take_key", key=job.unique, id=job.id)
        self._put.update(job.queue for job in jobs)
        for batch, n in Counter(job.batch for job in jobs if job.batch is not None).items():
            if not self.run("grow_batch", id=batch, n=n).rowcount:
                self.run("orphan_members", id=batch)
        self.woken.update(job.queue for job in jobs)

    def _row(self, seq: int, job: Job, body: bytes) -> tuple[Any, ...]:
        return (
            seq,
            job.id,
            job.task,
            job.queue,
            job.priority,
            seq,
            self.now_us,
            due_us(job, self.now_us),
            expires_us(job, self.now_us),
            job.max_crashes,
            not job.chosen and job.unique is None and job.batch is None,
            job.chosen,
            job.unique,
            job.unique_until if job.unique is not None else None,
            job.key,
            job.batch,
            job.member,
            body,
        )

    def _emit(self, jobs: Sequence[Job]) -> None:
        """Put what follows from a step; what is already there is left out."""
        if jobs:
            fresh = [job for job, receipt in zip(jobs, self._receipts(jobs), strict=True) if receipt.created]
            self._add(fresh, [wire.encode(job) for job in fresh])

    # --- jobs go out ---------------------------------------------------------------------

    def lease(self, wants: Mapping[str, int], span: timedelta, holder: str, limit: int | None) -> list[Lease]:
        rules = _rules(self.db)
        until_us = self.now_us + span_us(span)
        leases: list[Lease] = []
        for queue, want in wants.items():
            self._promote(queue)
            while (room := want if limit is None else min(want, limit - len(leases))) > 0:
                let_go = self._unhold(queue, room, rules)
                rows = self.run("line", queue=queue, most=room).fetchall()
                taken = self._take(queue, rows, rules, let_go)
                leases += self._start(queue, taken, until_us, holder)
                want -= len(taken)
                if not rows:
                    break
        return leases

    def _take(self, queue: str, rows: list[Any], rules: list[Rule], let_go: set[int]) -> list[Any]:
        """All that is looked at leaves the line: it has expired, a rule holds it, or it is taken.

        Where one that was let go is not taken after all, we look no further: the next of those that its rule
        holds may stand before the others.
        """
        taken, expired, held = [], [], []
        counts: Counter[tuple[Scope, str]] = Counter()
        looked_at = 0
        for row in rows:
            looked_at += 1
            expires = row[11]
            if expires is not None and expires <= self.now_us:
                expired.append(row)
            elif rules and (rule := self._kept_back(queue, row, rules, counts)):
                held.append((row, rule))
            else:
                taken.append(row)
                continue
            if row[2] in let_go:
                break
        self._leave_line(queue, rows[:looked_at])
        for row in expired:
            self._expire(self._live(row[3]))
        for (priority, pos, seq, *_), rule in held:
            self.run(
                "hold", queue=queue, scope=rule.scope, name=rule.name, priority=priority, pos=pos, seq=seq
            )
        return taken

    def _leave_line(self, queue: str, rows: list[Any]) -> None:
        ranges: dict[int, list[int]] = {}
        for row in rows:
            ranges.setdefault(row[0], [row[1], row[1]])[1] = row[1]
        for priority, (first, last) in ranges.items():
            self.run("leave_line", queue=queue, priority=priority, first=first, last=last)

    def _kept_back(
        self, queue: str, row: Any, rules: list[Rule], counts: Counter[tuple[Scope, str]]
    ) -> Rule | None:
        """The rule that keeps this job back, if any; else it counts as running from here on."""
        facts = {Scope.QUEUE: queue, Scope.TASK: row[4], Scope.KEY: row[12]}
        mine = [rule for rule in rules if rule.kind is not RuleKind.CAP and facts[rule.scope] == rule.name]
        for rule in mine:
            place = (rule.scope, rule.name)
            if rule.kind in _HOLDS or self._running_in(*place) + counts[place] >= rule.n:
                return rule
        counts.update((rule.scope, rule.name) for rule in mine)
        return None

    def _running_in(self, scope: Scope, name: str) -> int:
        return int(self.run("running_in", scope=scope, name=name).fetchone()[0])

    def _start(self, queue: str, rows: list[Any], until_us: int, holder: str) -> list[Lease]:
        if not rows:
            return []
        until = from_us(until_us)
        fence = self._fences(len(rows)) - len(rows)
        leases, starts = [], []
        for _, _, seq, job_id, task, body, attempts, failures, crashes, put_us, batch, _, _, plain in rows:
            fence += 1
            starts.append((fence, seq, attempts + 1, until_us, until_us - self.now_us, self.now_us, holder))
            put_at = from_us(put_us)
            leases.append(
                Lease(job_id, fence, task, queue, body, attempts + 1, failures, crashes, until, put_at, batch)
            )
            if not plain:
                self.run("free_started_key", seq=seq)
        self.db.executemany(_SQL["start"], starts)
        return leases

    def _promote(self, queue: str, most: int = PROMOTED_AT_ONCE) -> int:
        """Those whose time has come join the back of their line, in the order of their times."""
        due = self.run("due", queue=queue, now_us=self.now_us, most=most).fetchall()
        for (seq,) in due:
            pos = self._back()
            queue, priority, when = self.run("stand_due", seq=seq, pos=pos).fetchone()
            self.run("unschedule_due", queue=queue, due_us=when, seq=seq)
            self.run("stand", queue=queue, priority=priority, pos=pos, seq=seq)
        if due:
            self.woken.add(queue)
        return len(due)

    def _unhold(self, queue: str, want: int, rules: list[Rule]) -> set[int]:
        """Let those stand in line again, in their old places, that their rule keeps back no more.

        Another rule may keep them back in turn: so this comes again before each further look at the line.
        """
        let_go = set()
        for scope, name in self.run("held_groups", queue=queue).fetchall():
            mine = [rule for rule in rules if (rule.scope, rule.name) == (scope, name)]
            room = want
            for rule in mine:
                if rule.kind in _HOLDS:
                    room = 0
                elif rule.kind is RuleKind.LIMIT:
                    room = min(room, rule.n - self._running_in(rule.scope, rule.name))
            if room <= 0:
                continue
            first = self.run("held_first", queue=queue, scope=scope, name=name, most=room).fetchall()
            for priority, pos, seq in first:
                self.run("unhold", queue=queue, scope=scope, name=name, priority=priority, pos=pos)
                self.run("stand", queue=queue, priority=priority, pos=pos, seq=seq)
                let_go.add(seq)
        return let_go

    def renew(self, leases: Sequence[Lease], span: timedelta) -> list[Renewal]:
        until_us = self.now_us + span_us(span)
        until = from_us(until_us)
        renewals = []
        for lease in leases:
            row = self.run(
                "renew", until_us=until_us, fence=lease.fence, id=lease.id, now_us=self.now_us
            ).fetchone()
            renewals.append(Renewal(None) if row is None else Renewal(until, bool(row[0])))
        return renewals

    def note(self, notes: Sequence[Note]) -> None:
        for note in notes:
            row = self.run("log_of", fence=note.lease.fence, id=note.lease.id).fetchone()
            if row is None:
                continue
            lines = [*(_lines.decode(row[0]) if row[0] else ()), *note.lines][-LOG_LINES:]
            progress = None if note.progress is None else _text(note.progress)
            self.run(
                "note",
                progress=progress,
                log=_text(lines) if lines else None,
                fence=note.lease.fence,
                id=note.lease.id,
            )

    def settle(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> list[Lease]:
        if not outcomes:
            return []
        fences = _text([lease.fence for lease, _ in outcomes])
        leased = {row[0]: row for row in self.run("leased", fences=fences)}
        lost: list[Lease] = []
        ended: list[tuple[int, int]] = []
        released: list[tuple[_Live, Step]] = []
        for lease, outcome in outcomes:
            row = leased.pop(lease.fence, None)
            if row is None or row[2] != lease.id:
                lost.append(lease)
            elif row[4] and isinstance(outcome, Done) and not outcome.keep:
                self._emit(outcome.emit)
                ended.append((lease.fence, row[1]))
                self._deleted[row[3]] += 1
            elif not self._settle_one(lease.fence, outcome, released):
                lost.append(lease)
        self._end_plain(ended)
        self._to_front(released)
        return lost

    def _end_plain(self, ended: list[tuple[int, int]]) -> None:
        """The common end: done, nothing to keep, nobody to tell."""
        if ended:
            self.run("stop_running", fences=_text([fence for fence, _ in ended]))
            self.run("end_plain", seqs=_text([seq for _, seq in ended]))

    def _settle_one(self, fence: int, outcome: Outcome, released: list[tuple[_Live, Step]]) -> bool:
        job = self._running_job(fence)
        step = settled(job.running(), outcome, self.now_us, self._retention)
        if step is None:
            return False
        if isinstance(outcome, Done | Dead) and outcome.emit:
            self._free_key(job)  # it may hand its own key on
            self._emit(outcome.emit)
        self._apply(job, step, released)
        return True

    def _running_job(self, fence: int) -> _Live:
        return _Live(*self.run("running_job", fence=fence).fetchone())

    def _live(self, job_id: str) -> _Live:
        return _Live(*self.run("live_job", id=job_id).fetchone())

    def _apply(self, job: _Live, step: Step, to_front: list[tuple[_Live, Step]]) -> None:
        """Record a step of a running job, with all that follows from it."""
        self.run("stop_running", fences=_text([job.lease_fence]))
        job.fence, job.started_us = job.lease_fence, job.lease_started_us
        if step.state is not State.READY:
            self._end(job, step)
        elif step.front:
            to_front.append((job, step))
        else:
            self._make_ready(job, step, self._back())

    def _to_front(self, released: list[tuple[_Live, Step]]) -> None:
        for job, step in reversed(released):  # the first of them is to stand first
            self._make_ready(job, step, self._front())

    def _make_ready(self, job: _Live, step: Step, pos: int) -> None:
        queue = step.queue or job.queue
        if queue != job.queue:
            self._deleted[job.queue] += 1
            self._put[queue] += 1
        self.run(
            "update_job",
            seq=job.seq,
            queue=queue,
            pos=pos,
            due_us=step.due_us,
            attempts=step.attempts,
            failures=step.failures,
            crashes=step.crashes,
            fence=job.fence,
            started_us=job.started_us,
            error=None if step.error is None else _text(step.error),
            history=job.told(step.event),
        )
        self._place(queue, job.priority, pos, step.due_us, job.seq)

    def _place(self, queue: str, priority: int, pos: int, due: int, seq: int) -> None:
        if due > self.now_us:
            self.run("schedule", queue=queue, due_us=due, seq=seq)
        else:
            self.run("stand", queue=queue, priority=priority, pos=pos, seq=seq)
        self.woken.add(queue)

    def _unplace(self, job: _Live) -> None:
        """Out of whichever line a waiting job stands in."""
        self.run("unstand", queue=job.queue, priority=job.priority, pos=job.pos)
        self.run("unhold_any", queue=job.queue, priority=job.priority, pos=job.pos)
        self.run("unschedule", queue=job.queue, due_us=job.due_us, seq=job.seq)

    def _end(self, job: _Live, step: Step) -> None:
        self._free_key(job)
        if job.chosen:
            self.run("keep_id", id=job.id, until_us=self.now_us + _KNOWN_US)
        if step.keep_us is None:
            self._deleted[job.queue] += 1
        else:
            self._archive(job, step, step.keep_us)
        self.run("remove_job", seq=job.seq)
        if job.batch is not None and not job.stepped:
            self._step(job.batch, Member(job.member, job.id, step.state, step.result, step.reason))

    def _free_key(self, job: _Live) -> None:
        if job.unique_key is not None:
            self.run("free_key", key=job.unique_key, id=job.id)

    def _archive(self, job: _Live, step: Step, keep_us: int) -> None:
        self.run(
            "archive",
            seq=job.seq,
            attempts=step.attempts,
            failures=step.failures,
            crashes=step.crashes,
            fence=job.fence,
            started_us=job.started_us,
            error=None if step.error is None else _text(step.error),
            history=job.told(step.event),
            state=step.state,
            cancel=job.cancel,
            ended_us=self.now_us,
            keep_us=keep_us,
            reason=step.reason,
            result=step.result,
        )

    def _end_waiting(self, job: _Live, state: State, keep: timedelta | None, reason: str | None) -> None:
        self._unplace(job)
        step = Step(
            state=state,
            attempts=job.attempts,
            failures=job.failures,
            crashes=job.crashes,
            keep_us=None if keep is None else self.now_us + span_us(keep),
            reason=reason,
        )
        self._end(job, step)

    def _expire(self, job: _Live) -> None:
        self._end_waiting(job, State.DEAD, self._retention.dead_for, "expired")

    # --- time ----------------------------------------------------------------------------

    def sweep(self, limit: int) -> Swept:
        promoted = 0
        for (queue,) in self.run("queues_with_due", now_us=self.now_us).fetchall():
            promoted += self._promote(queue, limit - promoted)
        self.run("shorten_leases", now_us=self.now_us)
        lost = [row[0] for row in self.run("lost_leases", now_us=self.now_us, most=limit)]
        self._reap(lost)
        over = [row[0] for row in self.run("expired", now_us=self.now_us, most=limit)]
        for job_id in over:
            self._expire(self._live(job_id))
        removed = self._forget_old(limit)
        next_us = _one(self.db, "next_moment", now_us=self.now_us)
        due = bool(_one(self.db, "any_schedule_due", now_us=self.now_us))
        next_in = span_until(next_us, self.now_us)
        return Swept(promoted, len(lost), len(over), removed, next_in, schedules_due=due)

    def _reap(self, fences: list[int]) -> None:
        to_front: list[tuple[_Live, Step]] = []
        for fence in fences:
            job = self._running_job(fence)
            self._apply(job, reaped(job.running(), self.now_us, self._retention), to_front)
        self._to_front(to_front)

    def _forget_old(self, limit: int) -> int:
        old = self.run("past_keeping", now_us=self.now_us, most=limit).fetchall()
        if (most := self._retention.dead_max) is not None:
            for queue, n in self.run("full_shelves", most=most).fetchall():
                old += self.run("oldest_dead", queue=queue, most=min(limit, n - most)).fetchall()
        gone = dict(old)
        for seq, queue in gone.items():
            self.run("remove_archived", seq=seq)
            self._deleted[queue] += 1
        self.run("forget_ids", now_us=self.now_us, most=limit)
        self.run("forget_tokens", now_us=self.now_us, most=limit)
        for (batch,) in self.run("batches_over", now_us=self.now_us, most=limit).fetchall():
            self._remove_batch(batch)
        return len(gone)

    # --- batches -------------------------------------------------------------------------

    def _batch_row(self, batch: str) -> Any:
        cursor = self.run("batch_row", id=batch)
        cursor.row_factory = sqlite3.Row
        return cursor.fetchone()

    def _open_batch(self, batch: Batch) -> None:
        if batch.parent is not None:
            self._check_batches({batch.parent})
            self.run("grow_batch", id=batch.parent, n=1)
        self.run(
            "add_batch",
            id=batch.id,
            body=_text(batch),
            created_us=self.now_us,
            open_us=self.now_us + batch.open_for_ms * 1000,
            parent=batch.parent,
            member=batch.member,
        )

    def seal(self, batch: str) -> bool:
        row = self._batch_row(batch)
        if row is None:
            raise UnknownBatch(batch)
        if row["sealed"]:
            return False
        self.run("seal_batch", id=batch)
        if not row["live"]:
            self._finish(batch)
        return True

    def _step(self, batch: str, member: Member) -> None:
        """One member has ended (B1)."""
        before = self._batch_row(batch)
        if before is None:
            return
        self.run("step_batch", id=batch, state=member.state)
        self.run(
            "add_member",
            batch=batch,
            member=member.member,
            id=member.id,
            state=member.state,
            result=member.result,
            reason=member.reason,
        )
        if member.state is not State.DONE and not before["dead"] + before["cancelled"]:
            held = _batch.decode(before["body"])
            self._emit(callbacks(held, BatchState.IN_PROGRESS, first_failure=True, finished=False))
        if before["sealed"] and self._batch_row(batch)["live"] == 0:
            self._finish(batch)

    def _finish(self, batch: str) -> None:
        row = self._batch_row(batch)
        held = _batch.decode(row["body"])
        state = _state_of(row)
        keep_us = self.now_us + held.linger_ms * 1000
        self.run("finish_batch", id=batch, finished_us=self.now_us, keep_us=keep_us)
        self._emit(callbacks(held, state, first_failure=False, finished=True))
        if held.parent is not None:
            ended = State.DONE if state is BatchState.SUCCESS else State.DEAD
            self._step(held.parent, Member(held.member, held.id, ended))
        if held.linger_ms == 0:
            self._remove_batch(batch)

    def _remove_batch(self, batch: str) -> None:
        row = self._batch_row(batch)
        self.run("remove_batch", id=batch)
        self.run("remove_members", id=batch)
        self.run("orphan_members", id=batch)
        if row["finished_us"] is None and row["parent"] is not None:
            self._step(row["parent"], Member(row["member"], batch, State.CANCELLED))

    def delete_batch(self, batch: str) -> bool:
        if self._batch_row(batch) is None:
            return False
        for (job_id,) in self.run("waiting_members", batch=batch).fetchall():
            job = self._live(job_id)
            job.stepped = True
            self._end_waiting(job, State.CANCELLED, None, None)
        self._remove_batch(batch)
        return True

    # --- an operator's hand --------------------------------------------------------------

    def cancel(self, job_id: str) -> bool:
        row = self.run("live_job", id=job_id).fetchone()
        if row is None:
            return False
        job = _Live(*row)
        lease = self.run("running_of", seq=job.seq).fetchone()
        if lease is None:
            self._end_waiting(job, State.CANCELLED, self._retention.cancelled_for, "cancelled")
            return True
        fence, attempt, _, _, cancel = lease
        if not cancel:
            self.run("ask_to_stop", fence=fence)
            event = Event(from_us(self.now_us), "cancel-requested", attempt, fence)
            self.run("tell", seq=job.seq, history=job.told(event))
        return True

    def reschedule(self, job_id: str, due: int) -> bool:
        row = self.run("live_job", id=job_id).fetchone()
        if row is None or self.answered("running_of", seq=row[0]):
            return False
        job = _Live(*row)
        self._unplace(job)
        step = Step(
            state=State.READY,
            attempts=job.attempts,
            failures=job.failures,
            crashes=job.crashes,
            due_us=due,
            event=Event(from_us(self.now_us), "rescheduled", job.attempts, job.fence),
        )
        self._make_ready(job, step, self._back())
        return True

    def replay(self, job_id: str) -> bool:
        cursor = self.run("archived_job", id=job_id)
        cursor.row_factory = sqlite3.Row
        row = cursor.fetchone()
        if row is None or row["state"] != State.DEAD:
            return False
        if row["unique_key"] is not None:
            if self.run("held_keys", keys=_text([row["unique_key"]])).fetchone():
                return False
            self.run("take_key", key=row["unique_key"], id=job_id)
        event = Event(
            from_us(self.now_us), "replayed", row["attempts"], row["fence"], "", f"was dead: {row['reason']}"
        )
        events = [*(_events.decode(row["history"]) if row["history"] else ()), event]
        pos = self._back()
        self.run("revive", id=job_id, pos=pos, now_us=self.now_us, history=_text(events[-HISTORY_EVENTS:]))
        self.run("delete_archived", id=job_id)
        self._place(row["queue"], row["priority"], pos, self.now_us, row["seq"])
        return True

    def delete(self, job_id: str) -> bool:
        row = self.run("delete_archived", id=job_id).fetchone()
        if row is None:
            return False
        self._deleted[row[0]] += 1
        return True

    def drop(self, queue: str) -> int:
        waiting = self.run("waiting_of_queue", queue=queue).fetchall()
        for (job_id,) in waiting:
            self._end_waiting(self._live(job_id), State.CANCELLED, None, None)
        archived = self.run("drop_archived", queue=queue).rowcount
        self._deleted[queue] += archived
        self.flush()
        if not _one(self.db, "any_of_queue", queue=queue):
            self.run("drop_tally", queue=queue)
        self._put.clear()
        self._deleted.clear()
        return len(waiting) + archived

    def add_rule(self, rule: Rule) -> bool:
        self.woken.add(None)
        return self.answered("add_rule", kind=rule.kind, scope=rule.scope, name=rule.name, n=rule.n)

    def remove_rule(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        self.woken.add(None)
        return self.answered("remove_rule", kind=kind, scope=scope, name=name)

    # --- schedules -----------------------------------------------------------------------

    def put_schedule(self, schedule: Schedule, next_us: int) -> None:
        row = self.run("schedule_row", name=schedule.name).fetchone()
        if row is not None and _schedule.decode(row[1]).timing == schedule.timing:
            next_us = row[2]
        self.run("keep_schedule", name=schedule.name, body=_text(schedule), next_us=next_us)

    def fire(self, name: str, instant_us: int, job: Job | None, next_us: int) -> bool:
        fired = self.answered("fire", name=name, instant_us=instant_us, next_us=next_us, now_us=self.now_us)
        if fired and job is not None:
            self._emit([job])
        return fired


class _Look:
    """One consistent look at the file, for the ledger."""

    def __init__(self, db: sqlite3.Connection, now_us: int) -> None:
        self.db = db
        self.now_us = now_us

    def rows(self, statement: str, **values: Any) -> list[Any]:
        cursor = self.db.execute(_SQL[statement], values)
        cursor.row_factory = sqlite3.Row
        return cursor.fetchall()

    def queues(self) -> dict[str, Counts]:
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for queue, n in self.rows("count_ready"):
            found[queue]["ready"] += n
        for queue, due, later in self.rows("count_scheduled", now_us=self.now_us):
            found[queue]["ready"] += due
            found[queue]["scheduled"] += later
        for queue, n in self.rows("count_held"):
            found[queue]["held"] += n
        for queue, n in self.rows("count_running"):
            found[queue]["running"] += n
        for queue, state, n in self.rows("count_archived"):
            found[queue][state] += n
        return {
            queue: Counts(**found[queue], put=put, deleted=deleted)
            for queue, put, deleted in self.rows("tallies")
        }

    def get(self, job_id: str) -> Record | None:
        for row in self.rows("get_live", id=job_id):
            return _live_record(row)
        for row in self.rows("archived_job", id=job_id):
            return _archived_record(row)
        return None

    def find(self, where: Filter, limit: int, after: int) -> Page:
        facts = {
            "queue": where.queue,
            "task": where.task,
            "batch": where.batch,
            "after": after,
            "most": limit + 1,
        }
        found: list[tuple[int, Record]] = []
        if where.reason is None:
            found += [(row["seq"], _live_record(row)) for row in self._find_live(where, facts)]
        if where.scheduled is not True and (where.state is None or where.state.terminal):
            ended = self.rows("find_archived", **facts, state=where.state, reason=where.reason)
            found += [(row["seq"], _archived_record(row)) for row in ended]
        found.sort(key=lambda pair: pair[0])
        page = found[:limit]
        return Page([record for _, record in page], page[-1][0] if page and len(found) > limit else None)

    def position(self, job_id: str) -> int | None:
        for row in self.rows("place_of", id=job_id):
            if row["running"] or row["due_us"] > self.now_us:
                return None
            return int(_one(self.db, "before_in_line", **dict(row), now_us=self.now_us))
        return None

    def _find_live(self, where: Filter, facts: dict[str, Any]) -> list[Any]:
        if where.state is State.RUNNING:
            return [] if where.scheduled else self.rows("find_running", **facts)
        if where.state in (None, State.READY):
            waiting = where.state  # anything but None means yes
            return self.rows(
                "find_live", **facts, waiting=waiting, scheduled=where.scheduled, now_us=self.now_us
            )
        return []

    def batch(self, batch: str) -> BatchStatus | None:
        for row in self.rows("batch_row", id=batch):
            return self._status(row)
        return None

    def batches(self, limit: int, after: str | None) -> list[BatchStatus]:
        return [self._status(row) for row in self.rows("batch_page", after=after, most=limit)]

    def _status(self, row: Any) -> BatchStatus:
        ((enqueued, retrying, running),) = self.rows("live_members_by_kind", batch=row["id"])
        children = _one(self.db, "live_children", batch=row["id"])
        return BatchStatus(
            id=row["id"],
            state=_state_of(row),
            sealed=bool(row["sealed"]),
            total=row["live"] + row["done"] + row["dead"] + row["cancelled"],
            enqueued=enqueued or 0,
            retrying=retrying or 0,
            running=(running or 0) + children,
            done=row["done"],
            dead=row["dead"],
            cancelled=row["cancelled"],
            created_at=from_us(row["created_us"]),
            finished_at=_moment(row["finished_us"]),
            keep_until=_moment(row["keep_us"]),
            parent=row["parent"],
            note=_batch.decode(row["body"]).note,
        )

    def members(self, batch: str, limit: int, after: int | None) -> list[Member]:
        if not self.rows("batch_row", id=batch):
            return []
        rows = self.rows("members", batch=batch, after=after, most=limit)
        return [
            Member(number, job_id, State(state), result, reason)
            for number, job_id, state, result, reason in rows
        ]

    def schedules(self, due: bool) -> list[ScheduleRecord]:
        return [
            ScheduleRecord(
                schedule=_schedule.decode(row["body"]),
                next_at=from_us(row["next_us"]),
                last_at=_moment(row["last_us"]),
                paused=bool(row["paused"]),
            )
            for row in self.rows("schedule_rows", due=due, now_us=self.now_us)
        ]


def _one(db: sqlite3.Connection, statement: str, **values: Any) -> Any:
    return db.execute(_SQL[statement], values).fetchone()[0]


def _rules(db: sqlite3.Connection) -> list[Rule]:
    return [Rule(RuleKind(kind), Scope(scope), name, n) for kind, scope, name, n in db.execute(_SQL["rules"])]


def _state_of(row: Any) -> BatchState:
    total = row["live"] + row["done"] + row["dead"] + row["cancelled"]
    return batch_state(
        sealed=bool(row["sealed"]),
        total=total,
        done=row["done"],
        dead=row["dead"],
        cancelled=row["cancelled"],
    )


def _text(value: Any) -> str:
    return _json.encode(value).decode()


def _moment(us: int | None) -> datetime | None:
    return None if us is None else from_us(us)


def _read(decoder: msgspec.json.Decoder[T], text: str | None) -> T | None:
    """What is stored; None where a foreign hand has stored something else: no look may fail over it."""
    try:
        return decoder.decode(text) if text else None
    except msgspec.MsgspecError:
        return None


def _facts(row: Any) -> dict[str, Any]:
    """What live and archived jobs have in common."""
    lines, events = _read(_lines, row["log"]), _read(_events, row["history"])
    return {
        "id": row["id"],
        "task": row["task"],
        "queue": row["queue"],
        "body": row["body"],
        "priority": row["priority"],
        "put_at": from_us(row["put_us"]),
        "due_at": from_us(row["due_us"]),
        "expires_at": _moment(row["expires_us"]),
        "failures": row["failures"],
        "crashes": row["crashes"],
        "cancel_requested": bool(row["cancel"]),
        "error": _read(_error, row["error"]),
        "unique": row["unique_key"],
        "key": row["limit_key"],
        "batch": row["batch"],
        "member": row["member"],
        "progress": _read(_progress, row["progress"]),
        "log": tuple(lines or ()),
        "history": tuple(events or ()),
    }


def _live_record(row: Any) -> Record:
    running = row["lease_fence"] is not None
    return Record(
        **_facts(row),
        state=State.RUNNING if running else State.READY,
        attempts=row["attempt"] if running else row["attempts"],
        fence=row["lease_fence"] if running else row["fence"],
        holder=row["holder"],
        started_at=_moment(row["lease_started_us"] if running else row["started_us"]),
        lease_until=_moment(row["until_us"]),
    )


def _archived_record(row: Any) -> Record:
    return Record(
        **_facts(row),
        state=State(row["state"]),
        attempts=row["attempts"],
        fence=row["fence"],
        started_at=_moment(row["started_us"]),
        ended_at=from_us(row["ended_us"]),
        keep_until=from_us(row["keep_us"]),
        reason=row["reason"],
        result=row["result"],
    )


def from_url(address: Address, clock: Clock | None) -> SQLiteBroker:
    """`sqlite:///jobs.db` is relative to the working directory, `sqlite:////var/jobs.db` is not."""
    address.reject_unknown("synchronous", "patience", "unsafe")
    path = address.path[1:]
    if not path:
        raise BadSetting(f"{address.url!r} names no file: write sqlite:///jobs.db")
    return SQLiteBroker(
        path,
        clock=clock,
        synchronous=address.options.get("synchronous", "full"),
        patience=address.options.get("patience", "30s"),
        unsafe=address.options.get("unsafe", "0") not in ("0", "no", "false"),
    )
