"""A toy engine, as somebody else might write it: simple, slow, and written against the public names only.

The whole storage is one JSON file.  Every call reads it, changes what it read, and writes it back;
a call that raises does not write, so it has changed nothing.  No call gives way to another while it
does so, which makes each of them atomic among the handles of one process, and the file outlives them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from skep import life, wire
from skep.batch import Batch, BatchStatus, Member, batch_state
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
from skep.clock import Clock, SystemClock, from_us, span_us, to_us
from skep.errors import BatchSealed, EngineClosed, QueueFull, UnknownBatch
from skep.job import (
    Dead,
    Done,
    Error,
    Event,
    Job,
    Lease,
    Outcome,
    Progress,
    Record,
    State,
    UniqueUntil,
)
from skep.life import Retention, Running, Step
from skep.schedule import Schedule, ScheduleRecord


class Entry(Struct, kw_only=True):
    """A job as it is stored.  `place` is None while it is scheduled and has none."""

    id: str
    task: str
    queue: str
    body: bytes
    number: int
    priority: int
    put_us: int
    due_us: int
    expires_us: int | None
    max_crashes: int
    chosen: bool
    unique: str | None
    until_started: bool
    holds_key: bool
    key: str | None
    batch: str | None
    member: int
    state: State = State.READY
    place: int | None = None
    attempts: int = 0
    failures: int = 0
    crashes: int = 0
    fence: int = 0
    holder: str | None = None
    started_us: int | None = None
    until_us: int | None = None
    cancel_requested: bool = False
    ended_us: int | None = None
    keep_us: int | None = None
    reason: str | None = None
    error: Error | None = None
    result: bytes | None = None
    progress: Progress | None = None
    log: list[str] = []
    history: list[Event] = []


class Shelf(Struct, kw_only=True):
    """A batch as it is stored: a member that has ended has a terminal state here, for good."""

    batch: Batch
    created_us: int
    sealed: bool = False
    failed: bool = False
    finished_us: int | None = None
    members: list[Member] = []


class Storage(Struct):
    jobs: dict[str, Entry] = {}
    batches: dict[str, Shelf] = {}
    schedules: dict[str, ScheduleRecord] = {}
    rules: list[Rule] = []
    known_ids: dict[str, int] = {}
    tokens: dict[str, int] = {}
    put: dict[str, int] = {}
    deleted: dict[str, int] = {}
    number: int = 0
    fence: int = 0
    back: int = 0
    front: int = 0
    calls: int = 0


class ToyBroker:
    """The engine: a file, a clock, and how long ended jobs are kept."""

    def __init__(self, path: Path, *, clock: Clock | None = None, retention: Retention | None = None) -> None:
        self._path = path
        self._clock = clock or SystemClock()
        self._retention = retention or Retention()
        self._is_open = False

    @property
    def durability(self) -> Durability:
        return Durability.PROCESS

    async def open(self) -> Self:
        if not self._path.exists():
            self._path.write_bytes(msgspec.json.encode(Storage()))
        self._is_open = True
        return self

    async def close(self) -> None:
        self._is_open = False

    @contextmanager
    def _call(self) -> Iterator[Moment]:
        """The storage at one moment; what is changed in it is written unless the call raises."""
        if not self._is_open:
            raise EngineClosed
        storage = msgspec.json.decode(self._path.read_bytes(), type=Storage)
        storage.calls += 1
        yield Moment(storage, self._clock.now_us(), self._retention)
        self._path.write_bytes(msgspec.json.encode(storage))

    # --- Broker ---

    async def put(self, jobs: Sequence[Job], *, token: str | None = None) -> list[Receipt]:
        with self._call() as now:
            return now.put(jobs, token)

    async def put_batch(
        self, batch: Batch, jobs: Sequence[Job] = (), *, seal: bool = True, token: str | None = None
    ) -> list[Receipt]:
        with self._call() as now:
            is_new = batch.id not in now.storage.batches and not now.knows(token)
            if is_new:
                now.open_batch(batch)
            receipts = now.put(jobs, token)
            if is_new and seal:
                now.seal(batch.id)
            return receipts

    async def seal(self, batch: str) -> bool:
        with self._call() as now:
            return now.seal(batch)

    async def lease(
        self, wants: Mapping[str, int], *, span: timedelta, holder: str, limit: int | None = None
    ) -> list[Lease]:
        with self._call() as now:
            return now.lease(wants, span, holder, limit)

    async def renew(self, leases: Sequence[Lease], *, span: timedelta) -> list[Renewal]:
        with self._call() as now:
            return [now.renew(lease, span) for lease in leases]

    async def note(self, notes: Sequence[Note]) -> None:
        with self._call() as now:
            for note in notes:
                if entry := now.held(note.lease):
                    entry.progress = note.progress or entry.progress
                    entry.log = [*entry.log, *note.lines][-LOG_LINES:]

    async def settle(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> list[Lease]:
        with self._call() as now:
            return now.settle(outcomes)

    async def exchange(
        self,
        outcomes: Sequence[tuple[Lease, Outcome]],
        wants: Mapping[str, int],
        *,
        span: timedelta,
        holder: str,
        limit: int | None = None,
    ) -> Exchange:
        with self._call() as now:
            return Exchange(now.settle(outcomes), now.lease(wants, span, holder, limit))

    async def sweep(self, *, limit: int = 1000, by: str | None = None) -> Swept:
        with self._call() as now:
            return now.sweep(limit)

    # --- Ledger ---

    async def now(self) -> datetime:
        return from_us(self._clock.now_us())

    async def queues(self) -> dict[str, Counts]:
        with self._call() as now:
            return {queue: now.counts(queue) for queue in sorted(now.storage.put)}

    async def get(self, job_id: str) -> Record | None:
        with self._call() as now:
            entry = now.storage.jobs.get(job_id)
            return _record(entry) if entry else None

    async def find(self, where: Filter, *, limit: int = 100, after: int | None = None) -> Page:
        with self._call() as now:
            found = [entry for entry in now.by_number() if now.matches(entry, where)]
        rest = [entry for entry in found if entry.number > (after or 0)]
        page = rest[:limit]
        return Page([_record(entry) for entry in page], page[-1].number if page != rest else None)

    async def position(self, job_id: str) -> int | None:
        with self._call() as now:
            entry = now.storage.jobs.get(job_id)
            if entry is None or entry.state is not State.READY or entry.due_us > now.us:
                return None
            return [other.id for other in now.line(entry.queue)].index(job_id)

    async def cancel(self, job_ids: Sequence[str]) -> list[bool]:
        with self._call() as now:
            return [now.cancel(job_id) for job_id in job_ids]

    async def reschedule(self, job_id: str, due_at: datetime) -> bool:
        with self._call() as now:
            entry = now.storage.jobs.get(job_id)
            if entry is None or entry.state is not State.READY:
                return False
            now.wait_until(entry, to_us(due_at))
            now.tell(entry, "rescheduled")
            return True

    async def replay(self, job_ids: Sequence[str]) -> list[bool]:
        with self._call() as now:
            return [now.replay(job_id) for job_id in job_ids]

    async def delete(self, job_ids: Sequence[str]) -> list[bool]:
        with self._call() as now:
            return [now.delete(job_id) for job_id in job_ids]

    async def drop(self, queue: str) -> int:
        with self._call() as now:
            gone = [entry for entry in now.by_number() if entry.queue == queue]
            gone = [entry for entry in gone if entry.state is not State.RUNNING]
            for entry in gone:
                now.cancel(entry.id)
                now.delete(entry.id)
            if not now.counts(queue).running:
                now.storage.put.pop(queue, None)
                now.storage.deleted.pop(queue, None)
            return len(gone)

    async def add_rule(self, rule: Rule) -> bool:
        with self._call() as now:
            if rule in now.storage.rules:
                return False
            now.remove_rule(rule.kind, rule.scope, rule.name)
            now.storage.rules.append(rule)
            return True

    async def remove_rule(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        with self._call() as now:
            return now.remove_rule(kind, scope, name)

    async def rules(self) -> list[Rule]:
        with self._call() as now:
            return now.storage.rules

    async def batch(self, batch: str) -> BatchStatus | None:
        with self._call() as now:
            return now.status(batch) if batch in now.storage.batches else None

    async def batches(self, *, limit: int = 100, after: str | None = None) -> list[BatchStatus]:
        with self._call() as now:
            names = sorted(name for name in now.storage.batches if after is None or name > after)
            return [now.status(name) for name in names[:limit]]

    async def members(self, batch: str, *, limit: int = 1000, after: int | None = None) -> list[Member]:
        with self._call() as now:
            members = sorted(now.members(batch), key=lambda member: member.member)
            return [member for member in members if after is None or member.member > after][:limit]

    async def delete_batch(self, batch: str) -> bool:
        with self._call() as now:
            return now.delete_batch(batch)

    async def put_schedule(self, schedule: Schedule, next_at: datetime) -> None:
        with self._call() as now:
            old = now.storage.schedules.get(schedule.name)
            if old is None:
                old = ScheduleRecord(schedule=schedule, next_at=next_at)
            unchanged = old.schedule.timing == schedule.timing
            now.storage.schedules[schedule.name] = replace(
                old, schedule=schedule, next_at=old.next_at if unchanged else next_at
            )

    async def schedules(self, *, due: bool = False) -> list[ScheduleRecord]:
        with self._call() as now:
            records = [record for _, record in sorted(now.storage.schedules.items())]
            return [record for record in records if not due or now.is_due(record)]

    async def pause_schedule(self, name: str, paused: bool) -> bool:
        with self._call() as now:
            record = now.storage.schedules.get(name)
            if record is None or record.paused == paused:
                return False
            now.storage.schedules[name] = replace(record, paused=paused)
            return True

    async def remove_schedule(self, name: str) -> bool:
        with self._call() as now:
            return now.storage.schedules.pop(name, None) is not None

    async def fire(self, name: str, instant: datetime, job: Job | None, next_at: datetime) -> bool:
        with self._call() as now:
            record = now.storage.schedules.get(name)
            if record is None or record.next_at != instant or not now.is_due(record):
                return False
            if job is not None:
                now.add_unbound(job)
            now.storage.schedules[name] = replace(record, last_at=instant, next_at=next_at)
            return True

    # --- Hints ---

    @property
    def hears(self) -> bool:
        return False

    async def wait(self, queues: Sequence[str], timeout: float) -> bool:
        """Woken by every call, so mostly for nothing, which a hint may be."""
        clock = asyncio.get_running_loop()
        deadline = clock.time() + timeout
        before = self._path.read_bytes()
        while self._path.read_bytes() == before:
            if clock.time() >= deadline:
                return False
            await asyncio.sleep(0.005)
        return bool(queues)


class Moment:
    """The storage, at the time of one call."""

    def __init__(self, storage: Storage, now_us: int, retention: Retention) -> None:
        self.storage = storage
        self.us = now_us
        self.retention = retention

    # --- putting ---

    def knows(self, token: str | None) -> bool:
        return token is not None and self.storage.tokens.get(token, 0) > self.us

    def put(self, jobs: Sequence[Job], token: str | None) -> list[Receipt]:
        if self.knows(token):
            return [Receipt(job.id, created=False) for job in jobs]
        if token is not None:
            self.storage.tokens[token] = self.us + span_us(KNOWN_FOR)
        return [self.put_one(job) for job in jobs]

    def put_one(self, job: Job) -> Receipt:
        there = self.in_place_of(job)
        if there is not None:
            return Receipt(there, created=False)
        if job.batch is not None:
            shelf = self.storage.batches.get(job.batch)
            if shelf is None:
                raise UnknownBatch(job.batch)
            if shelf.sealed:
                raise BatchSealed(job.batch)
        self.add(job)
        cap = self.rule(RuleKind.CAP, Scope.QUEUE, job.queue)
        if cap is not None and self.counts(job.queue).waiting > cap.n:
            raise QueueFull(job.queue, cap.n)
        return Receipt(job.id, created=True)

    def add_unbound(self, job: Job) -> None:
        """Add what comes from inside (emissions, callbacks, firings), if there is nothing in its place."""
        if self.in_place_of(job) is None:
            shelf = self.storage.batches.get(job.batch or "")
            self.add(job, member=shelf is not None and shelf.finished_us is None)

    def in_place_of(self, job: Job) -> str | None:
        if job.id in self.storage.jobs or self.storage.known_ids.get(job.id, 0) > self.us:
            return job.id
        holders = (entry.id for entry in self.storage.jobs.values() if entry.holds_key)
        return next((name for name in holders if self.storage.jobs[name].unique == job.unique), None)

    def add(self, job: Job, *, member: bool = True) -> None:
        self.storage.number += 1
        entry = Entry(
            id=job.id,
            task=job.task,
            queue=job.queue,
            body=wire.encode(job),
            number=self.storage.number,
            priority=job.priority,
            put_us=self.us,
            due_us=0,
            expires_us=life.expires_us(job, self.us),
            max_crashes=job.max_crashes,
            chosen=job.chosen,
            unique=job.unique,
            until_started=job.unique_until is UniqueUntil.STARTED,
            holds_key=job.unique is not None,
            key=job.key,
            batch=job.batch if member else None,
            member=job.member,
        )
        self.storage.jobs[job.id] = entry
        self.count(self.storage.put, job.queue)
        self.wait_until(entry, life.due_us(job, self.us))
        if entry.batch is not None:
            self.storage.batches[entry.batch].members.append(Member(job.member, job.id, State.READY))

    def count(self, counter: dict[str, int], queue: str) -> None:
        self.storage.put.setdefault(queue, 0)
        counter[queue] = counter.get(queue, 0) + 1

    # --- order ---

    def wait_until(self, entry: Entry, due_us: int) -> None:
        entry.due_us, entry.place = due_us, None
        if due_us <= self.us:
            self.to_back(entry)

    def to_back(self, entry: Entry) -> None:
        self.storage.back += 1
        entry.place = self.storage.back

    def to_front(self, entries: Sequence[Entry]) -> None:
        for entry in reversed(entries):
            self.storage.front -= 1
            entry.place = self.storage.front

    def promote(self, queues: Iterable[str] | None, limit: int | None = None) -> int:
        due = [entry for entry in self.waiting() if entry.place is None and entry.due_us <= self.us]
        wanted = [entry for entry in due if queues is None or entry.queue in queues]
        wanted.sort(key=lambda entry: (entry.due_us, entry.number))
        for entry in wanted[:limit]:
            self.to_back(entry)
        return len(wanted[:limit])

    def line(self, queue: str) -> list[Entry]:
        """The due jobs of a queue in the order in which they are leased; those without a place are last."""
        due = [entry for entry in self.waiting() if entry.queue == queue and entry.due_us <= self.us]
        return sorted(due, key=self._rank)

    def _rank(self, entry: Entry) -> tuple[int, bool, int, int]:
        return (-entry.priority, entry.place is None, entry.place or entry.due_us, entry.number)

    # --- leasing ---

    def lease(self, wants: Mapping[str, int], span: timedelta, holder: str, limit: int | None) -> list[Lease]:
        self.promote(wants)
        leases: list[Lease] = []
        for queue, wanted in wants.items():
            room = wanted if limit is None else min(wanted, limit - len(leases))
            for entry in self.line(queue):
                if room > 0 and self.may_start(entry):
                    leases.append(self.start(entry, span, holder))
                    room -= 1
        return leases

    def may_start(self, entry: Entry) -> bool:
        if entry.expires_us is not None and entry.expires_us <= self.us:
            self.expire(entry)
            return False
        return not any(self.holds_back(rule, entry) for rule in self.storage.rules)

    def holds_back(self, rule: Rule, entry: Entry) -> bool:
        if rule.kind is RuleKind.CAP or _subject(entry, rule.scope) != rule.name:
            return False
        running = [other for other in self.storage.jobs.values() if other.state is State.RUNNING]
        same = [other for other in running if _subject(other, rule.scope) == rule.name]
        return rule.kind is not RuleKind.LIMIT or len(same) >= rule.n

    def start(self, entry: Entry, span: timedelta, holder: str) -> Lease:
        self.storage.fence += 1
        entry.state, entry.place, entry.fence = State.RUNNING, None, self.storage.fence
        entry.attempts += 1
        entry.holder, entry.started_us, entry.until_us = holder, self.us, self.us + span_us(span)
        entry.holds_key = entry.holds_key and not entry.until_started
        return Lease(
            id=entry.id,
            fence=entry.fence,
            task=entry.task,
            queue=entry.queue,
            body=entry.body,
            attempt=entry.attempts,
            failures=entry.failures,
            crashes=entry.crashes,
            until=from_us(entry.until_us),
            put_at=from_us(entry.put_us),
            batch=entry.batch,
        )

    def held(self, lease: Lease) -> Entry | None:
        """The running job that this lease is for, if it still is."""
        entry = self.storage.jobs.get(lease.id)
        if entry is None or entry.state is not State.RUNNING or entry.fence != lease.fence:
            return None
        return entry

    def renew(self, lease: Lease, span: timedelta) -> Renewal:
        entry = self.held(lease)
        if entry is None or (entry.until_us or 0) <= self.us:
            return Renewal(None)
        entry.until_us = self.us + span_us(span)
        return Renewal(from_us(entry.until_us), entry.cancel_requested)

    # --- settling ---

    def settle(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> list[Lease]:
        lost: list[Lease] = []
        released: list[Entry] = []
        for lease, outcome in outcomes:
            entry = self.held(lease)
            step = life.settled(_running(entry), outcome, self.us, self.retention) if entry else None
            if entry is None or step is None:
                lost.append(lease)
                continue
            self.record(entry, step, outcome.emit if isinstance(outcome, Done | Dead) else ())
            if step.front:
                released.append(entry)
        self.to_front(released)
        return lost

    def record(self, entry: Entry, step: Step, emit: Sequence[Job] = ()) -> None:
        entry.state, entry.attempts, entry.failures = step.state, step.attempts, step.failures
        entry.crashes, entry.error = step.crashes, step.error
        entry.holder = entry.until_us = None
        if step.event is not None:
            entry.history = [*entry.history, step.event][-HISTORY_EVENTS:]
        if step.state is State.READY:
            self.move(entry, step.queue or entry.queue)
            self.wait_until(entry, step.due_us)
            return
        entry.ended_us, entry.keep_us = self.us, step.keep_us
        entry.reason, entry.result = step.reason, step.result
        entry.holds_key = False
        for job in emit:  # before the step of the batch, which waits for what joins it
            self.add_unbound(job)
        self.after_end(entry)

    def move(self, entry: Entry, queue: str) -> None:
        if queue != entry.queue:
            self.count(self.storage.deleted, entry.queue)
            self.count(self.storage.put, queue)
            entry.queue = queue

    def after_end(self, entry: Entry) -> None:
        if entry.chosen:
            self.storage.known_ids[entry.id] = self.us + span_us(KNOWN_FOR)
        self.step(entry.batch, entry.id, entry.state, entry.result, entry.reason)
        if entry.keep_us is None:
            self.remove(entry)
        self.trim(entry.queue)

    def trim(self, queue: str) -> None:
        """Keep the newest of a full dead shelf."""
        dead = [e for e in self.storage.jobs.values() if e.queue == queue and e.state is State.DEAD]
        dead.sort(key=lambda entry: entry.ended_us or 0)
        surplus = 0 if self.retention.dead_max is None else max(0, len(dead) - self.retention.dead_max)
        for entry in dead[:surplus]:
            self.remove(entry)

    def remove(self, entry: Entry) -> None:
        del self.storage.jobs[entry.id]
        self.count(self.storage.deleted, entry.queue)

    def end(self, entry: Entry, state: State, reason: str, keep: timedelta) -> None:
        """End a job that waits."""
        entry.state, entry.reason, entry.ended_us = state, reason, self.us
        entry.keep_us, entry.holds_key = self.us + span_us(keep), False
        self.after_end(entry)

    def expire(self, entry: Entry) -> None:
        self.end(entry, State.DEAD, "expired", self.retention.dead_for)

    # --- operating ---

    def cancel(self, job_id: str) -> bool:
        entry = self.storage.jobs.get(job_id)
        if entry is None or entry.state.terminal:
            return False
        if entry.state is State.READY:
            self.end(entry, State.CANCELLED, "cancelled", self.retention.cancelled_for)
        elif not entry.cancel_requested:
            entry.cancel_requested = True
            self.tell(entry, "cancel-requested")
        return True

    def replay(self, job_id: str) -> bool:
        entry = self.storage.jobs.get(job_id)
        if entry is None or entry.state is not State.DEAD:
            return False
        keys = {other.unique for other in self.storage.jobs.values() if other.holds_key}
        if entry.unique in keys:
            return False
        self.tell(entry, "replayed")
        entry.state, entry.cancel_requested, entry.holds_key = State.READY, False, entry.unique is not None
        entry.attempts = entry.failures = entry.crashes = 0
        entry.reason = entry.error = entry.expires_us = None
        entry.started_us = entry.ended_us = entry.keep_us = None
        self.wait_until(entry, self.us)
        return True

    def delete(self, job_id: str) -> bool:
        entry = self.storage.jobs.get(job_id)
        if entry is None or not entry.state.terminal:
            return False
        self.remove(entry)
        return True

    def tell(self, entry: Entry, kind: str) -> None:
        event = Event(from_us(self.us), kind, entry.attempts, entry.fence)
        entry.history = [*entry.history, event][-HISTORY_EVENTS:]

    def rule(self, kind: RuleKind, scope: Scope, name: str) -> Rule | None:
        rules = (rule for rule in self.storage.rules if (rule.kind, rule.scope) == (kind, scope))
        return next((rule for rule in rules if rule.name == name), None)

    def remove_rule(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        rule = self.rule(kind, scope, name)
        if rule is not None:
            self.storage.rules.remove(rule)
        return rule is not None

    def is_due(self, record: ScheduleRecord) -> bool:
        return not record.paused and to_us(record.next_at) <= self.us

    # --- time ---

    def sweep(self, limit: int) -> Swept:
        self.forget_batches()
        return Swept(
            promoted=self.promote(None, limit),
            reaped=self.reap(limit),
            expired=self.expire_due(limit),
            removed=self.forget(limit),
            next_in=self.next_in(),
            schedules_due=any(self.is_due(record) for record in self.storage.schedules.values()),
        )

    def reap(self, limit: int) -> int:
        lost = [entry for entry in self.by_number() if entry.state is State.RUNNING]
        lost = [entry for entry in lost if (entry.until_us or 0) <= self.us]
        lost.sort(key=lambda entry: entry.fence)
        for entry in lost[:limit]:
            self.record(entry, life.reaped(_running(entry), self.us, self.retention))
        self.to_front([entry for entry in lost[:limit] if entry.state is State.READY])
        return len(lost[:limit])

    def expire_due(self, limit: int) -> int:
        expired = [entry for entry in self.waiting() if (entry.expires_us or self.us + 1) <= self.us]
        for entry in expired[:limit]:
            self.expire(entry)
        return len(expired[:limit])

    def forget(self, limit: int) -> int:
        self.storage.known_ids = {name: us for name, us in self.storage.known_ids.items() if us > self.us}
        self.storage.tokens = {name: us for name, us in self.storage.tokens.items() if us > self.us}
        old = [entry for entry in self.by_number() if (entry.keep_us or self.us + 1) <= self.us]
        for entry in old[:limit]:
            self.remove(entry)
        return len(old[:limit])

    def next_in(self) -> timedelta | None:
        moments = [entry.due_us for entry in self.waiting()]
        moments += [entry.until_us for entry in self.storage.jobs.values() if entry.until_us is not None]
        moments += [to_us(one.next_at) for one in self.storage.schedules.values() if not one.paused]
        return min((timedelta(microseconds=us - self.us) for us in moments if us > self.us), default=None)

    # --- batches ---

    def open_batch(self, batch: Batch) -> None:
        if batch.parent is not None:
            parent = self.storage.batches.get(batch.parent)
            if parent is None:
                raise UnknownBatch(batch.parent)
            if parent.sealed:
                raise BatchSealed(batch.parent)
            parent.members.append(Member(batch.member, batch.id, State.RUNNING))
        self.storage.batches[batch.id] = Shelf(batch=batch, created_us=self.us)

    def seal(self, batch: str) -> bool:
        shelf = self.storage.batches.get(batch)
        if shelf is None:
            raise UnknownBatch(batch)
        if shelf.sealed:
            return False
        shelf.sealed = True
        self.finish_if_ended(shelf)
        return True

    def step(
        self, batch: str | None, member: str, state: State, result: bytes | None, reason: str | None
    ) -> None:
        """B1: a member that has ended has ended for good."""
        shelf = self.storage.batches.get(batch or "")
        waited_for = [one for one in shelf.members if one.id == member] if shelf else []
        if shelf is None or not waited_for or waited_for[0].state.terminal:
            return
        ended = Member(waited_for[0].member, member, state, result, reason)
        shelf.members[shelf.members.index(waited_for[0])] = ended
        if state is not State.DONE and not shelf.failed:
            shelf.failed = True
            self.call_back(shelf.batch.on_failed)
        self.finish_if_ended(shelf)

    def finish_if_ended(self, shelf: Shelf) -> None:
        if not shelf.sealed or not all(member.state.terminal for member in shelf.members):
            return
        succeeded = all(member.state is State.DONE for member in shelf.members)
        shelf.finished_us = self.us
        if succeeded:
            self.call_back(shelf.batch.on_succeeded)
        self.call_back(shelf.batch.on_finished)
        if not shelf.batch.linger_ms:
            del self.storage.batches[shelf.batch.id]
        self.step(shelf.batch.parent, shelf.batch.id, State.DONE if succeeded else State.DEAD, None, None)

    def call_back(self, job: Job | None) -> None:
        if job is not None:
            self.add_unbound(job)

    def delete_batch(self, batch: str) -> bool:
        shelf = self.storage.batches.pop(batch, None)
        if shelf is None:
            return False
        own = {member.id for member in shelf.members}
        for entry in [entry for entry in self.waiting() if entry.batch == batch and entry.id in own]:
            if entry.chosen:
                self.storage.known_ids[entry.id] = self.us + span_us(KNOWN_FOR)
            self.remove(entry)
        self.step(shelf.batch.parent, batch, State.CANCELLED, None, None)
        return True

    def forget_batches(self) -> None:
        old = [name for name, shelf in self.storage.batches.items() if self.is_over(shelf)]
        for name in old:
            shelf = self.storage.batches.pop(name)
            self.step(shelf.batch.parent, name, State.CANCELLED, None, None)

    def is_over(self, shelf: Shelf) -> bool:
        if shelf.finished_us is not None:
            return shelf.finished_us + shelf.batch.linger_ms * 1000 <= self.us
        return not shelf.sealed and shelf.created_us + shelf.batch.open_for_ms * 1000 <= self.us

    def members(self, batch: str) -> list[Member]:
        shelf = self.storage.batches.get(batch)
        return [self.live(member) for member in shelf.members] if shelf else []

    def live(self, member: Member) -> Member:
        entry = self.storage.jobs.get(member.id)
        if member.state.terminal or entry is None:
            return member
        return Member(member.member, member.id, entry.state)

    def status(self, batch: str) -> BatchStatus:
        shelf = self.storage.batches[batch]
        states = [member.state for member in self.members(batch)]
        waiting = [self.storage.jobs.get(m.id) for m in self.members(batch) if m.state is State.READY]
        retrying = sum(1 for entry in waiting if entry and entry.failures + entry.crashes > 0)
        ends = {state: states.count(state) for state in State if state.terminal}
        done, dead, cancelled = ends[State.DONE], ends[State.DEAD], ends[State.CANCELLED]
        finished_us = shelf.finished_us
        return BatchStatus(
            id=batch,
            state=batch_state(
                sealed=shelf.sealed, total=len(states), done=done, dead=dead, cancelled=cancelled
            ),
            sealed=shelf.sealed,
            total=len(states),
            enqueued=len(waiting) - retrying,
            retrying=retrying,
            running=states.count(State.RUNNING),
            done=done,
            dead=dead,
            cancelled=cancelled,
            created_at=from_us(shelf.created_us),
            finished_at=_moment(finished_us),
            keep_until=_moment(finished_us and finished_us + shelf.batch.linger_ms * 1000),
            parent=shelf.batch.parent,
            note=shelf.batch.note,
        )

    # --- looking ---

    def by_number(self) -> list[Entry]:
        return sorted(self.storage.jobs.values(), key=lambda entry: entry.number)

    def waiting(self) -> list[Entry]:
        return [entry for entry in self.by_number() if entry.state is State.READY]

    def counts(self, queue: str) -> Counts:
        entries = [entry for entry in self.storage.jobs.values() if entry.queue == queue]
        states = [entry.state for entry in entries]
        scheduled = sum(1 for entry in entries if self.is_scheduled(entry))
        return Counts(
            ready=states.count(State.READY) - scheduled,
            scheduled=scheduled,
            running=states.count(State.RUNNING),
            done=states.count(State.DONE),
            dead=states.count(State.DEAD),
            cancelled=states.count(State.CANCELLED),
            put=self.storage.put.get(queue, 0),
            deleted=self.storage.deleted.get(queue, 0),
        )

    def is_scheduled(self, entry: Entry) -> bool:
        return entry.state is State.READY and entry.due_us > self.us

    def matches(self, entry: Entry, where: Filter) -> bool:
        facts = Filter(
            queue=entry.queue,
            task=entry.task,
            state=entry.state,
            reason=entry.reason,
            batch=entry.batch,
            scheduled=self.is_scheduled(entry),
        )
        asked = msgspec.structs.asdict(where)
        return all(wanted is None or getattr(facts, name) == wanted for name, wanted in asked.items())


def _subject(entry: Entry, scope: Scope) -> str | None:
    """What a rule of this scope names."""
    return {Scope.QUEUE: entry.queue, Scope.TASK: entry.task, Scope.KEY: entry.key}[scope]


def _running(entry: Entry) -> Running:
    return Running(
        fence=entry.fence,
        attempt=entry.attempts,
        failures=entry.failures,
        crashes=entry.crashes,
        max_crashes=entry.max_crashes,
        cancel_requested=entry.cancel_requested,
        holder=entry.holder or "",
    )


def _moment(us: int | None) -> datetime | None:
    return None if us is None else from_us(us)


def _record(entry: Entry) -> Record:
    return Record(
        id=entry.id,
        task=entry.task,
        queue=entry.queue,
        state=entry.state,
        body=entry.body,
        priority=entry.priority,
        put_at=from_us(entry.put_us),
        due_at=from_us(entry.due_us),
        expires_at=_moment(entry.expires_us),
        attempts=entry.attempts,
        failures=entry.failures,
        crashes=entry.crashes,
        fence=entry.fence,
        holder=entry.holder,
        started_at=_moment(entry.started_us),
        lease_until=_moment(entry.until_us),
        cancel_requested=entry.cancel_requested,
        ended_at=_moment(entry.ended_us),
        keep_until=_moment(entry.keep_us),
        reason=entry.reason,
        error=entry.error,
        result=entry.result,
        unique=entry.unique,
        key=entry.key,
        batch=entry.batch,
        member=entry.member,
        progress=entry.progress,
        log=tuple(entry.log),
        history=tuple(entry.history),
    )
