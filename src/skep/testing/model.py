"""The contract as a program: lists, scans and no I/O, so that it can be checked by reading it.

`Model` answers the verbs of an engine and knows what the engine must show afterwards.  It shares no
code with the engines, so that a mistake would have to be made twice to go unseen.  It is slow, and
knows only one thing less than an engine: the numbers of the fences, which it is told (`learn`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from skep.batch import Batch, BatchState, BatchStatus, Member
from skep.broker import KNOWN_FOR, Counts, Exchange, Filter, Receipt, Renewal, Rule, RuleKind, Scope, Swept
from skep.errors import BatchSealed, QueueFull, SkepError, UnknownBatch
from skep.job import (
    Broken,
    Cancelled,
    Dead,
    Done,
    Error,
    Event,
    Job,
    Lease,
    Outcome,
    Record,
    Release,
    Retry,
    Snooze,
    State,
    UniqueUntil,
)
from skep.schedule import Schedule, ScheduleRecord
from skep.testing.clock import FakeClock
from skep.wire import encode

DEAD_FOR = timedelta(days=90)
CANCELLED_FOR = timedelta(days=7)
NOW = timedelta(0)
ALL = Filter()


class Refused(Exception):
    """A put that must be refused, and every error that would be a right answer to it."""

    def __init__(self, reasons: Iterable[type[SkepError]]) -> None:
        super().__init__("refused")
        self.reasons = frozenset(reasons)


@dataclass(slots=True, eq=False)
class Entry:
    """A job and everything that is known of it."""

    job: Job
    body: bytes
    queue: str
    put_at: datetime
    due_at: datetime
    expires_at: datetime | None
    has_key: bool
    member_of: Group | None = None
    state: State = State.READY
    attempts: int = 0
    failures: int = 0
    crashes: int = 0
    fence: int = 0
    holder: str | None = None
    lease_until: datetime | None = None
    cancel_requested: bool = False
    ended_at: datetime | None = None
    keep_until: datetime | None = None
    reason: str | None = None
    error: Error | None = None
    result: bytes | None = None
    history: list[Event] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Part:
    """One member of a batch: pending while its state is not terminal.  A nested batch has no entry."""

    member: int
    id: str
    entry: Entry | None
    state: State = State.RUNNING
    result: bytes | None = None
    reason: str | None = None


@dataclass(slots=True, eq=False)
class Group:
    """A batch and its members."""

    batch: Batch
    created_at: datetime
    parent: Group | None
    sealed: bool = False
    failed: bool = False
    finished_at: datetime | None = None
    parts: list[Part] = field(default_factory=list)

    @property
    def pending(self) -> list[Part]:
        return [part for part in self.parts if not part.state.terminal]

    def ended_as(self, state: State) -> int:
        return sum(part.state is state for part in self.parts)


class Model:
    """What an engine with the default retention must answer and show.

    `jobs` is everything there is, in the order of the puts.  `line` is every waiting job that has a
    place, in the order of all places: the line of a queue is what belongs to it in `line`, the higher
    priorities first.  Whether a job waits without a place yet can be told by its absence.
    """

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.jobs: list[Entry] = []
        self.line: list[Entry] = []
        self.ids_until: dict[str, datetime] = {}
        self.tokens_until: dict[str, datetime] = {}
        self.fences: dict[str, int] = {}
        self.rules: list[Rule] = []
        self.groups: dict[str, Group] = {}
        self.schedules: dict[str, ScheduleRecord] = {}

    # --- producers ---------------------------------------------------------------------------

    def put(self, jobs: Sequence[Job], *, token: str | None = None) -> list[Receipt]:
        if self._is_repeated(token):
            return [Receipt(job.id, created=False) for job in jobs]
        new = self._newcomers(jobs)
        self._refuse(self._full(new) | self._shut(job.batch for job in new))
        return self._accept(jobs, token)

    def put_batch(
        self, batch: Batch, jobs: Sequence[Job] = (), *, seal: bool = True, token: str | None = None
    ) -> list[Receipt]:
        if self._is_repeated(token):
            return [Receipt(job.id, created=False) for job in jobs]
        new = self._newcomers(jobs)
        joined = {job.batch for job in new}
        if batch.id not in self.groups:
            joined = joined - {batch.id} | {batch.parent}
        self._refuse(self._full(new) | self._shut(joined))
        if batch.id not in self.groups:
            self._open(batch)
        receipts = self._accept(jobs, token)
        if seal:
            self.seal(batch.id)
        return receipts

    def seal(self, batch: str) -> bool:
        if batch not in self.groups:
            raise Refused([UnknownBatch])
        group = self.groups[batch]
        if group.sealed:
            return False
        group.sealed = True
        self._finish_if_over(group)
        return True

    # --- workers -----------------------------------------------------------------------------

    def lease(
        self, wants: Mapping[str, int], *, span: timedelta, holder: str, limit: int | None = None
    ) -> list[Lease]:
        """The leases, with fences of 0: tell the real ones to `learn`."""
        taken: list[Lease] = []
        for queue, want in wants.items():
            room = want if limit is None else min(want, limit - len(taken))
            if room > 0:
                self._promote(queue)
            while room > 0 and (entry := self._next(queue)) is not None:
                taken.append(self._start(entry, span, holder))
                room -= 1
        return taken

    def learn(self, leases: Sequence[Lease]) -> bool:
        """Take the fences that the engine gave out; False if one of them has not grown (I3)."""
        grown = all(lease.fence > self.fences.get(lease.id, 0) for lease in leases)
        for lease in leases:
            self.fences[lease.id] = lease.fence
            [entry] = [entry for entry in self.jobs if entry.job.id == lease.id]
            entry.fence = lease.fence
        return grown

    def renew(self, leases: Sequence[Lease], *, span: timedelta) -> list[Renewal]:
        return [self._renew(lease, span) for lease in leases]

    def settle(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> list[Lease]:
        lost: list[Lease] = []
        fronts: list[Entry] = []
        for lease, outcome in outcomes:
            entry = self._held_by(lease)
            if entry is None or (isinstance(outcome, Cancelled) and not entry.cancel_requested):
                lost.append(lease)
            else:
                self._record(entry, outcome, fronts)
        self.line[:0] = fronts
        return lost

    def exchange(
        self,
        outcomes: Sequence[tuple[Lease, Outcome]],
        wants: Mapping[str, int],
        *,
        span: timedelta,
        holder: str,
        limit: int | None = None,
    ) -> Exchange:
        lost = self.settle(outcomes)
        return Exchange(lost, self.lease(wants, span=span, holder=holder, limit=limit))

    def sweep(self) -> Swept:
        promoted = sum(self._promote(queue) for queue in self._queues())
        reaped = self._reap()
        expired = [entry for entry in self.jobs if entry.state is State.READY and self._is_expired(entry)]
        for entry in expired:
            self._expire(entry)
        self._forget()
        due = any(not held.paused and held.next_at <= self.now for held in self.schedules.values())
        return Swept(promoted, reaped, len(expired), next_in=self._next_in(), schedules_due=due)

    # --- operators ---------------------------------------------------------------------------

    def cancel(self, job_ids: Sequence[str]) -> list[bool]:
        return [self._cancel(self.entry(job_id)) for job_id in job_ids]

    def reschedule(self, job_id: str, due_at: datetime) -> bool:
        entry = self.entry(job_id)
        if entry is None or entry.state is not State.READY:
            return False
        self._note(entry, "rescheduled")
        self._wait(entry, due_at)
        return True

    def replay(self, job_ids: Sequence[str]) -> list[bool]:
        return [self._replay(self.entry(job_id)) for job_id in job_ids]

    def delete(self, job_ids: Sequence[str]) -> list[bool]:
        return [self._delete(self.entry(job_id)) for job_id in job_ids]

    def drop(self, queue: str) -> int:
        gone = [entry for entry in self._of(queue) if entry.state is not State.RUNNING]
        for entry in gone:
            if entry.state is State.READY:
                self._end(entry, State.CANCELLED, NOW)
            else:
                self._delete(entry)
        return len(gone)

    def add_rule(self, rule: Rule) -> bool:
        if rule in self.rules:
            return False
        self.remove_rule(rule.kind, rule.scope, rule.name)
        self.rules.append(rule)
        return True

    def remove_rule(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        kept = [rule for rule in self.rules if (rule.kind, rule.scope, rule.name) != (kind, scope, name)]
        removed = len(kept) < len(self.rules)
        self.rules = kept
        return removed

    def delete_batch(self, batch: str) -> bool:
        group = self.groups.get(batch)
        if group is None:
            return False
        waiting = [e for e in self.jobs if e.member_of is group and e.state is State.READY]
        for entry in waiting:
            self._remove(entry)
        self._abandon(group)
        return True

    def put_schedule(self, schedule: Schedule, next_at: datetime) -> None:
        old = self.schedules.get(schedule.name)
        if old is not None and old.schedule.timing == schedule.timing:
            next_at = old.next_at
        self.schedules[schedule.name] = ScheduleRecord(
            schedule=schedule,
            next_at=next_at,
            last_at=old.last_at if old else None,
            paused=old.paused if old else False,
        )

    def pause_schedule(self, name: str, paused: bool) -> bool:
        old = self.schedules.get(name)
        if old is None or old.paused is paused:
            return False
        self.schedules[name] = ScheduleRecord(
            schedule=old.schedule, next_at=old.next_at, last_at=old.last_at, paused=paused
        )
        return True

    def remove_schedule(self, name: str) -> bool:
        return self.schedules.pop(name, None) is not None

    def fire(self, name: str, instant: datetime, job: Job | None, next_at: datetime) -> bool:
        old = self.schedules.get(name)
        if old is None or old.paused or old.next_at != instant or instant > self.now:
            return False
        if job is not None:
            self._add(job)
        self.schedules[name] = ScheduleRecord(schedule=old.schedule, next_at=next_at, last_at=instant)
        return True

    # --- what must be seen -------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        return self.clock.now

    def records(self, where: Filter = ALL) -> list[Record]:
        return [self._show(entry) for entry in self.jobs if self._matches(entry, where)]

    def holds(self, lease: Lease) -> bool:
        """Whether the lease is that of the present run, live or not yet reaped."""
        return self._held_by(lease) is not None

    def keeps_back(self) -> bool:
        """Whether a rule may keep jobs back."""
        return any(rule.kind is not RuleKind.CAP for rule in self.rules)

    def lets_expire(self) -> bool:
        """Whether a job waits that has expired."""
        return any(entry.state is State.READY and self._is_expired(entry) for entry in self.jobs)

    def position(self, job_id: str) -> int | None:
        entry = self.entry(job_id)
        if entry is None or entry.state is not State.READY or entry.due_at > self.now:
            return None
        line = [*self.line, *self._unplaced(entry.queue)]
        return [e for e in _by_priority(line) if e.queue == entry.queue].index(entry)

    def counts(self) -> dict[str, Counts]:
        """By recounting; held jobs are counted as ready."""
        return {queue: self._count(self._of(queue)) for queue in self._queues()}

    def batches(self) -> list[BatchStatus]:
        return [self._status(self.groups[batch]) for batch in sorted(self.groups)]

    def members(self, batch: str) -> list[Member]:
        parts = sorted(self.groups[batch].parts, key=lambda part: part.member)
        return [Member(p.member, p.id, _state(p), p.result, p.reason) for p in parts]

    def uses(self, job_id: str) -> bool:
        """Whether a put of this id would make no job."""
        known = job_id in self.ids_until and self.ids_until[job_id] > self.now
        return known or self.entry(job_id) is not None

    def counts_already(self, batch: str | None, member_id: str) -> bool:
        """Whether a member of that id has been counted, so that a second one would be ambiguous."""
        group = self.groups.get(batch or "")
        return group is not None and any(part.id == member_id for part in group.parts)

    def forgetting(self) -> bool:
        """Whether an id or a token is past its day, so that engines may differ until the next sweep."""
        return any(until <= self.now for until in [*self.ids_until.values(), *self.tokens_until.values()])

    # --- putting -----------------------------------------------------------------------------

    def _is_repeated(self, token: str | None) -> bool:
        return token is not None and token in self.tokens_until and self.tokens_until[token] > self.now

    def _newcomers(self, jobs: Sequence[Job]) -> list[Job]:
        new: list[Job] = []
        for job in jobs:
            twin = any(n.id == job.id or (n.unique is not None and n.unique == job.unique) for n in new)
            if not twin and self._in_place_of(job) is None:
                new.append(job)
        return new

    def _full(self, new: Sequence[Job]) -> set[type[SkepError]]:
        for rule in self.rules:
            joining = sum(job.queue == rule.name for job in new)
            waiting = sum(entry.state is State.READY for entry in self._of(rule.name))
            if rule.kind is RuleKind.CAP and joining and waiting + joining > rule.n:
                return {QueueFull}
        return set()

    def _shut(self, batches: Iterable[str | None]) -> set[type[SkepError]]:
        named = {batch for batch in batches if batch is not None}
        reasons: set[type[SkepError]] = {UnknownBatch for batch in named if batch not in self.groups}
        return reasons | {BatchSealed for b in named if b in self.groups and self.groups[b].sealed}

    def _refuse(self, reasons: set[type[SkepError]]) -> None:
        if reasons:
            raise Refused(reasons)

    def _accept(self, jobs: Sequence[Job], token: str | None) -> list[Receipt]:
        if token is not None:
            self.tokens_until[token] = self.now + KNOWN_FOR
        return [self._add(job) for job in jobs]

    def _add(self, job: Job) -> Receipt:
        """T1, of whoever puts: producers were refused before, and nobody else is."""
        other = self._in_place_of(job)
        if other is not None:
            return Receipt(other, created=False)
        due_at = job.due_at or self.now + timedelta(milliseconds=job.delay_ms)
        expires_at, has_key = _expiry(job, self.now), job.unique is not None
        entry = Entry(job, encode(job), job.queue, self.now, due_at, expires_at, has_key)
        self.jobs.append(entry)
        self._wait(entry, due_at)
        self._join(entry)
        return Receipt(job.id, created=True)

    def _in_place_of(self, job: Job) -> str | None:
        if self.uses(job.id):
            return job.id
        return self._holder_of(job.unique)

    def _holder_of(self, unique: str | None) -> str | None:
        for entry in self.jobs:
            if unique is not None and entry.has_key and entry.job.unique == unique:
                return entry.job.id
        return None

    # --- waiting and running -----------------------------------------------------------------

    def _wait(self, entry: Entry, due_at: datetime) -> None:
        """To the back, or out of the line until it is due."""
        self._leave_line(entry)
        entry.state = State.READY
        entry.due_at = due_at
        if due_at <= self.now:
            self.line.append(entry)

    def _leave_line(self, entry: Entry) -> None:
        if entry in self.line:
            self.line.remove(entry)

    def _unplaced(self, queue: str) -> list[Entry]:
        due = [e for e in self._of(queue) if e.state is State.READY and e.due_at <= self.now]
        return sorted((e for e in due if e not in self.line), key=lambda entry: entry.due_at)

    def _promote(self, queue: str) -> int:
        due = self._unplaced(queue)
        self.line += due
        return len(due)

    def _next(self, queue: str) -> Entry | None:
        """The job to lease next; what was started or put on the way there counts."""
        for entry in [e for e in _by_priority(self.line) if e.queue == queue]:
            if self._is_expired(entry):
                self._expire(entry)
                return self._next(queue)
            if not self._is_kept_back(entry):
                return entry
        return None

    def _is_expired(self, entry: Entry) -> bool:
        return entry.expires_at is not None and entry.expires_at <= self.now

    def _is_kept_back(self, entry: Entry) -> bool:
        running = [other for other in self.jobs if other.state is State.RUNNING]
        for rule in self.rules:
            if rule.name != _name(entry, rule.scope):
                continue
            if rule.kind in (RuleKind.PAUSE, RuleKind.BLOCK):
                return True
            alike = sum(_name(other, rule.scope) == rule.name for other in running)
            if rule.kind is RuleKind.LIMIT and alike >= rule.n:
                return True
        return False

    def _start(self, entry: Entry, span: timedelta, holder: str) -> Lease:
        self.line.remove(entry)
        entry.state = State.RUNNING
        entry.attempts += 1
        entry.holder = holder
        entry.lease_until = self.now + span
        if entry.job.unique_until is UniqueUntil.STARTED:
            entry.has_key = False
        return Lease(
            id=entry.job.id,
            fence=0,
            task=entry.job.task,
            queue=entry.queue,
            body=entry.body,
            attempt=entry.attempts,
            failures=entry.failures,
            crashes=entry.crashes,
            until=entry.lease_until,
            put_at=entry.put_at,
            batch=entry.job.batch,
        )

    def _held_by(self, lease: Lease) -> Entry | None:
        entry = self.entry(lease.id)
        if entry is None or entry.state is not State.RUNNING or entry.fence != lease.fence:
            return None
        return entry

    def _renew(self, lease: Lease, span: timedelta) -> Renewal:
        entry = self._held_by(lease)
        if entry is None or entry.lease_until is None or entry.lease_until <= self.now:
            return Renewal(None)
        entry.lease_until = self.now + span
        return Renewal(entry.lease_until, entry.cancel_requested)

    # --- outcomes ----------------------------------------------------------------------------

    def _record(self, entry: Entry, outcome: Outcome, fronts: list[Entry]) -> None:
        match outcome:
            case Done(result=result, keep=keep, emit=emit):
                self._end(entry, State.DONE, keep or NOW, result=result, emit=emit)
            case Dead(reason=reason, error=error, keep=keep, emit=emit):
                entry.failures += 1
                keep = DEAD_FOR if keep is None else keep
                self._end(entry, State.DEAD, keep, reason=reason, error=error, emit=emit)
            case Broken(error=error):
                self._end(entry, State.DEAD, DEAD_FOR, reason="broken", error=error)
            case Cancelled(error=error):
                self._end(entry, State.CANCELLED, CANCELLED_FOR, reason="cancelled", error=error)
            case _ if entry.cancel_requested:
                self._end(entry, State.CANCELLED, CANCELLED_FOR, reason="cancelled")
            case Retry(delay=delay, queue=queue):
                self._again(entry, "retried", delay, queue=queue)
                entry.failures += 1
            case Snooze(delay=delay):
                self._again(entry, "snoozed", delay)
                entry.attempts -= 1
            case Release():
                self._again(entry, "released", NOW, fronts=fronts)
                entry.attempts -= 1

    def _again(
        self,
        entry: Entry,
        kind: str,
        delay: timedelta,
        *,
        queue: str | None = None,
        fronts: list[Entry] | None = None,
    ) -> None:
        self._note(entry, kind)
        entry.queue = queue or entry.queue
        self._wait(entry, self.now + delay)
        if fronts is not None:
            self.line.remove(entry)
            fronts.append(entry)

    def _reap(self) -> int:
        running = [entry for entry in self.jobs if entry.state is State.RUNNING]
        lost = [entry for entry in running if entry.lease_until and entry.lease_until <= self.now]
        fronts: list[Entry] = []
        for entry in sorted(lost, key=lambda entry: entry.fence):
            entry.crashes += 1
            if entry.cancel_requested:
                self._end(entry, State.CANCELLED, CANCELLED_FOR, reason="cancelled")
            elif entry.crashes >= entry.job.max_crashes:
                self._note(entry, "crashed")
                self._end(entry, State.DEAD, DEAD_FOR, reason="crashed")
            else:
                self._again(entry, "crashed", NOW, fronts=fronts)
        self.line[:0] = fronts
        return len(lost)

    def _expire(self, entry: Entry) -> None:
        self._end(entry, State.DEAD, DEAD_FOR, reason="expired")

    def _cancel(self, entry: Entry | None) -> bool:
        if entry is None or entry.state.terminal:
            return False
        if entry.state is State.READY:
            self._end(entry, State.CANCELLED, CANCELLED_FOR, reason="cancelled")
        elif not entry.cancel_requested:
            entry.cancel_requested = True
            self._note(entry, "cancel-requested")
        return True

    def _end(
        self,
        entry: Entry,
        state: State,
        keep: timedelta,
        *,
        reason: str | None = None,
        error: Error | None = None,
        result: bytes | None = None,
        emit: Sequence[Job] = (),
    ) -> None:
        self._leave_line(entry)
        entry.state, entry.reason, entry.error, entry.result = state, reason, error, result
        entry.ended_at = self.now
        entry.keep_until = self.now + keep
        self._let_go(entry)
        if not keep:
            self.jobs.remove(entry)
        for job in emit:
            self._add(job)
        self._step(entry)

    def _let_go(self, entry: Entry) -> None:
        entry.has_key = False
        if entry.job.chosen:
            self.ids_until[entry.job.id] = (entry.ended_at or self.now) + KNOWN_FOR

    def _replay(self, entry: Entry | None) -> bool:
        if entry is None or entry.state is not State.DEAD or self._holder_of(entry.job.unique) is not None:
            return False
        self._note(entry, "replayed")
        entry.attempts = entry.failures = entry.crashes = 0
        entry.reason = entry.error = entry.expires_at = entry.ended_at = entry.keep_until = None
        entry.cancel_requested = False
        entry.has_key = entry.job.unique is not None
        self._wait(entry, self.now)
        return True

    def _delete(self, entry: Entry | None) -> bool:
        if entry is None or not entry.state.terminal:
            return False
        self.jobs.remove(entry)
        return True

    def _remove(self, entry: Entry) -> None:
        """A waiting job goes without a trace."""
        self._leave_line(entry)
        self.jobs.remove(entry)
        self._let_go(entry)

    def _note(self, entry: Entry, kind: str) -> None:
        entry.history.append(Event(self.now, kind, entry.attempts, entry.fence))

    # --- batches -----------------------------------------------------------------------------

    def _open(self, batch: Batch) -> None:
        parent = self.groups[batch.parent] if batch.parent is not None else None
        self.groups[batch.id] = Group(batch, self.now, parent)
        if parent is not None:
            parent.parts.append(Part(batch.member, batch.id, None))

    def _join(self, entry: Entry) -> None:
        group = self.groups.get(entry.job.batch or "")
        if group is not None and group.finished_at is None:
            entry.member_of = group
            group.parts.append(Part(entry.job.member, entry.job.id, entry))

    def _step(self, entry: Entry) -> None:
        """B1: a member ends once, and only in a batch that is still there."""
        group, entry.member_of = entry.member_of, None
        if group is not None:
            [part] = [part for part in group.parts if part.entry is entry]
            part.result, part.reason = entry.result, entry.reason
            self._count_end(group, part, entry.state)

    def _count_end(self, group: Group, part: Part, state: State) -> None:
        part.state = state
        if state is not State.DONE and not group.failed:
            group.failed = True
            self._call_back(group.batch.on_failed)
        self._finish_if_over(group)

    def _finish_if_over(self, group: Group) -> None:
        if not group.sealed or group.pending:
            return
        succeeded = group.ended_as(State.DONE) == len(group.parts)
        if succeeded:
            self._call_back(group.batch.on_succeeded)
        self._call_back(group.batch.on_finished)
        group.finished_at = self.now
        if not group.batch.linger_ms:
            del self.groups[group.batch.id]
        self._tell_parent(group, State.DONE if succeeded else State.DEAD)

    def _call_back(self, job: Job | None) -> None:
        if job is not None:
            self._add(job)

    def _tell_parent(self, group: Group, state: State) -> None:
        parent, group.parent = group.parent, None
        if parent is not None:
            [part] = [part for part in parent.parts if part.entry is None and part.id == group.batch.id]
            self._count_end(parent, part, state)

    def _abandon(self, group: Group) -> None:
        """The batch goes; what is left of it runs on by itself."""
        del self.groups[group.batch.id]
        for entry in self.jobs:
            entry.member_of = None if entry.member_of is group else entry.member_of
        for other in self.groups.values():
            other.parent = None if other.parent is group else other.parent
        self._tell_parent(group, State.CANCELLED)

    # --- time --------------------------------------------------------------------------------

    def _forget(self) -> None:
        for entry in [e for e in self.jobs if e.keep_until is not None and e.keep_until <= self.now]:
            self.jobs.remove(entry)
        self.ids_until = {key: until for key, until in self.ids_until.items() if until > self.now}
        self.tokens_until = {key: until for key, until in self.tokens_until.items() if until > self.now}
        for group in list(self.groups.values()):
            keep_until = _keep_until(group)
            if keep_until is not None and keep_until <= self.now:
                del self.groups[group.batch.id]
            open_until = group.created_at + timedelta(milliseconds=group.batch.open_for_ms)
            if not group.sealed and open_until <= self.now:
                self._abandon(group)

    def _next_in(self) -> timedelta | None:
        moments = [entry.due_at for entry in self.jobs if entry.state is State.READY]
        moments += [e.lease_until for e in self.jobs if e.state is State.RUNNING and e.lease_until]
        moments += [schedule.next_at for schedule in self.schedules.values() if not schedule.paused]
        return min((moment - self.now for moment in moments if moment > self.now), default=None)

    # --- looking -----------------------------------------------------------------------------

    def _queues(self) -> list[str]:
        return sorted({entry.queue for entry in self.jobs})

    def _of(self, queue: str) -> list[Entry]:
        return [entry for entry in self.jobs if entry.queue == queue]

    def entry(self, job_id: str) -> Entry | None:
        return next((entry for entry in self.jobs if entry.job.id == job_id), None)

    def _is_scheduled(self, entry: Entry) -> bool:
        return entry.state is State.READY and entry.due_at > self.now

    def _matches(self, entry: Entry, where: Filter) -> bool:
        shown = self._show(entry)
        asked = {name: getattr(where, name) for name in ("queue", "task", "state", "reason", "batch")}
        if where.scheduled is not None and where.scheduled is not self._is_scheduled(entry):
            return False
        return all(want is None or getattr(shown, name) == want for name, want in asked.items())

    def _show(self, entry: Entry) -> Record:
        return Record(
            id=entry.job.id,
            task=entry.job.task,
            queue=entry.queue,
            state=entry.state,
            body=entry.body,
            priority=entry.job.priority,
            put_at=entry.put_at,
            due_at=entry.due_at,
            expires_at=entry.expires_at,
            attempts=entry.attempts,
            failures=entry.failures,
            crashes=entry.crashes,
            fence=entry.fence,
            holder=entry.holder,
            lease_until=entry.lease_until,
            cancel_requested=entry.cancel_requested,
            ended_at=entry.ended_at,
            keep_until=entry.keep_until,
            reason=entry.reason,
            error=entry.error,
            result=entry.result,
            unique=entry.job.unique,
            key=entry.job.key,
            batch=entry.job.batch,
            member=entry.job.member,
            history=tuple(entry.history),
        )

    def _count(self, entries: Sequence[Entry]) -> Counts:
        scheduled = sum(self._is_scheduled(entry) for entry in entries)
        by_state = {state: sum(entry.state is state for entry in entries) for state in State}
        return Counts(
            ready=by_state[State.READY] - scheduled,
            scheduled=scheduled,
            running=by_state[State.RUNNING],
            done=by_state[State.DONE],
            dead=by_state[State.DEAD],
            cancelled=by_state[State.CANCELLED],
        )

    def _status(self, group: Group) -> BatchStatus:
        waiting = [p.entry for p in group.pending if p.entry is not None and p.entry.state is State.READY]
        retrying = sum(entry.failures + entry.crashes > 0 for entry in waiting)
        return BatchStatus(
            id=group.batch.id,
            state=_batch_state(group),
            sealed=group.sealed,
            total=len(group.parts),
            enqueued=len(waiting) - retrying,
            retrying=retrying,
            running=len(group.pending) - len(waiting),
            done=group.ended_as(State.DONE),
            dead=group.ended_as(State.DEAD),
            cancelled=group.ended_as(State.CANCELLED),
            created_at=group.created_at,
            finished_at=group.finished_at,
            keep_until=_keep_until(group),
            parent=group.batch.parent,
            note=group.batch.note,
        )


def _by_priority(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: -entry.job.priority)


def _name(entry: Entry, scope: Scope) -> str | None:
    return {Scope.QUEUE: entry.queue, Scope.TASK: entry.job.task, Scope.KEY: entry.job.key}[scope]


def _expiry(job: Job, now: datetime) -> datetime | None:
    ends = [] if job.expires_at is None else [job.expires_at]
    if job.expires_in_ms is not None:
        ends.append(now + timedelta(milliseconds=job.expires_in_ms))
    return min(ends, default=None)


def _state(part: Part) -> State:
    if part.state.terminal or part.entry is None:
        return part.state
    return part.entry.state


def _keep_until(group: Group) -> datetime | None:
    if group.finished_at is None:
        return None
    return group.finished_at + timedelta(milliseconds=group.batch.linger_ms)


def _batch_state(group: Group) -> BatchState:
    if not group.sealed:
        return BatchState.OPEN
    if group.pending:
        return BatchState.IN_PROGRESS
    done = group.ended_as(State.DONE)
    if done == len(group.parts):
        return BatchState.SUCCESS
    return BatchState.PARTIAL_SUCCESS if done else BatchState.DEAD
