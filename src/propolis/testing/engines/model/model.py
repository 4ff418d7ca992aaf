"""The contract as a program: lists, scans and no I/O, so that it can be checked by reading it.

`Model` answers the verbs of an engine and knows what the engine must show afterwards.  It shares no
code with the engines, so that a mistake would have to be made twice to go unseen.  It is slow, and
knows only one thing less than an engine: the numbers of the fences, which it learns from it (`learn`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from propolis.core.batch import Batch, BatchStatus
from propolis.core.clock import to_us
from propolis.core.envelope import Envelope, UniqueUntil
from propolis.core.job import (
    Broken,
    Cancelled,
    Crashed,
    Dead,
    Done,
    Error,
    Event,
    JobInfo,
    Lease,
    Member,
    Outcome,
    Released,
    Retried,
    Snoozed,
    State,
    Unknown,
)
from propolis.core.protocols import (
    KNOWN_FOR,
    Counts,
    Exchange,
    Filter,
    Note,
    Receipt,
    Renewal,
    Rule,
    RuleKind,
    Scope,
    Swept,
)
from propolis.core.wire import encode
from propolis.errors import BatchSealed, PropolisError, QueueFull, UnknownBatch
from propolis.testing.clock import FakeClock
from propolis.testing.engines.model.entries import (
    Group,
    ModelEntry,
    Part,
    Refused,
    by_priority,
    counted,
    expiry,
    keep_until,
    member_state,
    shown_batch,
    shown_job,
)
from propolis.testing.engines.model.limits import ModelLimits

DEAD_FOR = timedelta(days=90)
CANCELLED_FOR = timedelta(days=7)
MAX_LOSSES = 10
PAUSES = [timedelta(seconds=n) for n in (0, 0, 0, 5, 10, 20, 40, 80, 160, 300)]  # after so many losses
NOW = timedelta(0)
ALL = Filter()


class Model:
    """What an engine with the default retention must answer and show.

    `jobs` is everything there is, in the order of the puts.  `line` is every waiting job that has a
    place, in the order of all places: the line of a queue is what belongs to it in `line`, the higher
    priorities first.  Whether a job waits without a place yet can be told by its absence.
    """

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.jobs: list[ModelEntry] = []
        self.line: list[ModelEntry] = []
        self.ids_until: dict[str, datetime] = {}
        self.tokens_until: dict[str, datetime] = {}
        self._rules: list[Rule] = []
        self.groups: dict[str, Group] = {}
        self.limits = ModelLimits(clock, lambda: self.rules, lambda: self.jobs)

    # --- producers ---------------------------------------------------------------------------

    def put(self, jobs: Sequence[Envelope], *, token: str | None = None) -> list[Receipt]:
        if self._is_repeated(token):
            return [Receipt(self._in_place_of(job) or job.id, created=False) for job in jobs]
        new = self._newcomers(jobs)
        self._refuse(self._full(new) | self._shut(job.batch for job in new))
        return self._accept(jobs, token)

    def put_batch(
        self, batch: Batch, jobs: Sequence[Envelope] = (), *, seal: bool = True, token: str | None = None
    ) -> list[Receipt]:
        if self._is_repeated(token):
            return [Receipt(self._in_place_of(job) or job.id, created=False) for job in jobs]
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
        self,
        wants: Mapping[str, int],
        *,
        span: timedelta,
        holder: str,
        limit: int | None = None,
        tasks: Sequence[str] = (),
    ) -> list[Lease]:
        """The leases, with fences of 0: tell the real ones to `learn`."""
        self.limits.forget_if_rules_changed()
        taken: list[Lease] = []
        for queue, want in wants.items():
            room = want if limit is None else min(want, limit - len(taken))
            if room > 0:
                self._promote(queue)
            while room > 0 and (entry := self._next(queue, tasks)) is not None:
                taken.append(self._start(entry, span, holder))
                room -= 1
            if room > 0:
                self.limits.meet(entry for entry in self.line if entry.queue == queue)
        return taken

    def learn(self, leases: Sequence[Lease]) -> bool:
        """Take the fences that the engine gave out; False if one of them has not grown (I3).

        The first one of a job is not behind the clock: an earlier job may have had its id.
        """
        grown = True
        for lease in leases:
            [entry] = [entry for entry in self.jobs if entry.job.id == lease.id]
            grown = grown and lease.fence > (entry.fence or to_us(self.now) - 1)
            entry.fence = lease.fence
        return grown

    def renew(self, leases: Sequence[Lease], *, span: timedelta) -> list[Renewal]:
        return [self._renew(lease, span) for lease in leases]

    def note(self, notes: Sequence[Note]) -> list[Lease]:
        live = [(note, entry) for note in notes if (entry := self._live(note.lease)) is not None]
        jobs = [job for note, _ in live for job in note.puts]
        new = self._newcomers(jobs)
        self._refuse(self._full(new) | self._shut(job.batch for job in new))
        for note, entry in live:
            entry.began = entry.began or note.began
            if note.checkpoint is not None:
                entry.checkpoint = note.checkpoint
        for job in jobs:
            self._add(job)
        return [note.lease for note in notes if self._live(note.lease) is None]

    def settle(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> list[Lease]:
        lost: list[Lease] = []
        fronts: list[ModelEntry] = []
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
        tasks: Sequence[str] = (),
    ) -> Exchange:
        lost = self.settle(outcomes)
        return Exchange(lost, self.lease(wants, span=span, holder=holder, limit=limit, tasks=tasks))

    def sweep(self) -> Swept:
        self.limits.forget_if_rules_changed()
        promoted = sum(self._promote(queue) for queue in self._queues())
        lost = self._reap()
        ended = [entry for entry in lost if entry.state.terminal]
        expired = [entry for entry in self.jobs if entry.state is State.READY and self._is_expired(entry)]
        for entry in expired:
            self._expire(entry)
        named = tuple(entry.job.id for entry in [*ended, *expired])
        self._forget()
        parked = tuple(sorted({(entry.queue, entry.job.task) for entry in self.jobs if entry.parked}))
        return Swept(promoted, len(lost), len(expired), next_in=self._next_in(), ended=named, parked=parked)

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
        was_there = self.remove_rule(rule.kind, rule.scope, rule.name)
        self._rules.append(rule.set_at(self.now))
        return not was_there

    def remove_rule(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        there = self.rules
        self._rules = [rule for rule in there if (rule.kind, rule.scope, rule.name) != (kind, scope, name)]
        return len(self._rules) < len(there)

    def delete_batch(self, batch: str) -> bool:
        group = self.groups.get(batch)
        if group is None:
            return False
        waiting = [e for e in self.jobs if e.member_of is group and e.state is State.READY]
        for entry in waiting:
            self._remove(entry)
        self._abandon(group)
        return True

    # --- what must be seen -------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        return self.clock.now

    def infos(self, where: Filter = ALL) -> list[JobInfo]:
        return [shown_job(entry) for entry in self.jobs if self._matches(entry, where)]

    @property
    def rules(self) -> list[Rule]:
        """Those that are not over."""
        return [rule for rule in self._rules if rule.until is None or rule.until > self.now]

    def holds(self, lease: Lease) -> bool:
        """Whether the lease is that of the present run, live or not yet reaped."""
        return self._held_by(lease) is not None

    def keeps_back(self) -> bool:
        """Whether a rule may keep jobs back."""
        return any(rule.kind is not RuleKind.CAP for rule in self.rules)

    def lets_expire(self, state: State = State.READY) -> bool:
        """Whether a job is in this state that has expired."""
        return any(entry.state is state and self._is_expired(entry) for entry in self.jobs)

    def position(self, job_id: str) -> int | None:
        entry = self.entry(job_id)
        if entry is None or entry.parked or entry.state is not State.READY or entry.due_at > self.now:
            return None
        line = [*self.line, *self._unplaced(entry.queue)]
        return [e for e in by_priority(line) if e.queue == entry.queue].index(entry)

    def counts(self) -> dict[str, Counts]:
        """By recounting; held jobs are counted as ready."""
        return {queue: counted(self._of(queue), self.now) for queue in self._queues()}

    def batches(self) -> list[BatchStatus]:
        return [shown_batch(self.groups[batch]) for batch in sorted(self.groups)]

    def members(self, batch: str) -> list[Member]:
        parts = sorted(self.groups[batch].parts, key=lambda part: part.member)
        return [Member(p.member, p.id, member_state(p), p.result, p.reason) for p in parts]

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

    def _newcomers(self, jobs: Sequence[Envelope]) -> list[Envelope]:
        new: list[Envelope] = []
        for job in jobs:
            twin = any(n.id == job.id or (n.unique is not None and n.unique == job.unique) for n in new)
            if not twin and self._in_place_of(job) is None:
                new.append(job)
        return new

    def _full(self, new: Sequence[Envelope]) -> set[type[PropolisError]]:
        for rule in self.rules:
            joining = sum(job.queue == rule.name for job in new)
            waiting = sum(entry.state is State.READY for entry in self._of(rule.name))
            if rule.kind is RuleKind.CAP and joining and waiting + joining > rule.n:
                return {QueueFull}
        return set()

    def _shut(self, batches: Iterable[str | None]) -> set[type[PropolisError]]:
        named = {batch for batch in batches if batch is not None}
        reasons: set[type[PropolisError]] = {UnknownBatch for batch in named if batch not in self.groups}
        return reasons | {BatchSealed for b in named if b in self.groups and self.groups[b].sealed}

    def _refuse(self, reasons: set[type[PropolisError]]) -> None:
        if reasons:
            raise Refused(reasons)

    def _accept(self, jobs: Sequence[Envelope], token: str | None) -> list[Receipt]:
        if token is not None:
            self.tokens_until[token] = self.now + KNOWN_FOR
        return [self._add(job) for job in jobs]

    def _add(self, job: Envelope) -> Receipt:
        """T1, of whoever puts: producers were refused before, and nobody else is."""
        other = self._in_place_of(job)
        if other is not None:
            return Receipt(other, created=False)
        due_at = job.due_at or self.now + timedelta(milliseconds=job.delay_ms)
        expires_at, has_key = expiry(job, self.now), job.unique is not None
        entry = ModelEntry(job, encode(job), job.queue, self.now, due_at, expires_at, has_key)
        self.jobs.append(entry)
        self._wait(entry, due_at)
        self._join(entry)
        return Receipt(job.id, created=True)

    def _in_place_of(self, job: Envelope) -> str | None:
        if self.uses(job.id):
            return job.id
        return self._holder_of(job.unique)

    def _holder_of(self, unique: str | None) -> str | None:
        for entry in self.jobs:
            if unique is not None and entry.has_key and entry.job.unique == unique:
                return entry.job.id
        return None

    # --- waiting and running -----------------------------------------------------------------

    def _wait(self, entry: ModelEntry, due_at: datetime) -> None:
        """To the back, or out of the line until it is due."""
        self._leave_line(entry)
        entry.state, entry.parked = State.READY, False
        entry.due_at = due_at
        if due_at <= self.now:
            self.line.append(entry)

    def _leave_line(self, entry: ModelEntry) -> None:
        self.limits.met.pop(entry.job.id, None)
        if entry in self.line:
            self.line.remove(entry)

    def _unplaced(self, queue: str) -> list[ModelEntry]:
        due = [e for e in self._of(queue) if e.state is State.READY and e.due_at <= self.now]
        return sorted((e for e in due if not e.parked and e not in self.line), key=lambda e: e.due_at)

    def _promote(self, queue: str) -> int:
        due = self._unplaced(queue)
        self.line += due
        return len(due)

    def _next(self, queue: str, tasks: Sequence[str]) -> ModelEntry | None:
        """The job to lease next; what was started or put on the way there counts."""
        parked = [e for task in tasks for e in by_priority(self.jobs) if e.parked and e.job.task == task]
        for entry in [e for e in [*parked, *by_priority(self.line)] if e.queue == queue]:
            if self._is_expired(entry):
                self._expire(entry)
                return self._next(queue, tasks)
            if not self.limits.keep_back(entry):
                return entry
        return None

    def _is_expired(self, entry: ModelEntry) -> bool:
        return entry.expires_at is not None and entry.expires_at <= self.now

    def _start(self, entry: ModelEntry, span: timedelta, holder: str) -> Lease:
        self._leave_line(entry)
        self.limits.take_tokens(entry)
        entry.state, entry.parked = State.RUNNING, False
        entry.attempts += 1
        entry.holder = holder
        entry.began = False
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
            holder=holder,
            losses=entry.losses,
            batch=entry.job.batch,
            checkpoint=entry.checkpoint,
        )

    def _held_by(self, lease: Lease) -> ModelEntry | None:
        entry = self.entry(lease.id)
        if entry is None or entry.state is not State.RUNNING:
            return None
        return entry if (entry.fence, entry.holder) == (lease.fence, lease.holder) else None

    def _live(self, lease: Lease) -> ModelEntry | None:
        entry = self._held_by(lease)
        return entry if entry is not None and entry.lease_until and entry.lease_until > self.now else None

    def _renew(self, lease: Lease, span: timedelta) -> Renewal:
        entry = self._live(lease)
        if entry is None:
            return Renewal(None)
        entry.lease_until = self.now + span
        return Renewal(entry.lease_until, entry.cancel_requested)

    # --- outcomes ----------------------------------------------------------------------------

    def _record(self, entry: ModelEntry, outcome: Outcome, fronts: list[ModelEntry]) -> None:
        match outcome:
            case Done(result=result, keep=keep, emit=emit, opens=opens):
                self._end(entry, State.DONE, keep or NOW, result=result, emit=emit, opens=opens)
            case Dead(reason=reason, error=error, keep=keep, emit=emit, opens=opens):
                entry.failures += 1
                keep = DEAD_FOR if keep is None else keep
                self._end(entry, State.DEAD, keep, reason=reason, error=error, emit=emit, opens=opens)
            case Broken(error=error):
                self._end(entry, State.DEAD, DEAD_FOR, reason="broken", error=error)
            case Cancelled(error=error):
                self._end(entry, State.CANCELLED, CANCELLED_FOR, reason="cancelled", error=error)
            case Crashed(blameless=True):
                self._lose(entry, fronts)
            case Crashed(error=error):
                self._crash(entry, error, fronts)
            case _ if entry.cancel_requested:
                self._end(entry, State.CANCELLED, CANCELLED_FOR, reason="cancelled")
            case Retried(delay=delay, queue=queue):
                self._again(entry, "retried", delay, queue=queue)
                entry.failures += 1
                entry.losses = 0
            case Snoozed(delay=delay, asked=asked):
                self.limits.give_tokens_back(entry)
                self._again(entry, "snoozed", delay)
                entry.attempts -= 1
                entry.losses = 0 if asked else entry.losses
            case Unknown():
                self.limits.give_tokens_back(entry)
                self._again(entry, "parked", NOW)
                self._leave_line(entry)
                entry.attempts -= 1
                entry.parked = True
            case Released():
                self.limits.give_tokens_back(entry)
                self._again(entry, "released", NOW, fronts=fronts)
                entry.attempts -= 1

    def _again(
        self,
        entry: ModelEntry,
        kind: str,
        delay: timedelta,
        *,
        queue: str | None = None,
        fronts: list[ModelEntry] | None = None,
    ) -> None:
        self._note(entry, kind)
        entry.queue = queue or entry.queue
        self._wait(entry, self.now + delay)
        if fronts is not None:
            self.line.remove(entry)
            fronts.append(entry)

    def _reap(self) -> list[ModelEntry]:
        running = [entry for entry in self.jobs if entry.state is State.RUNNING]
        lost = [entry for entry in running if entry.lease_until and entry.lease_until <= self.now]
        fronts: list[ModelEntry] = []
        for entry in sorted(lost, key=lambda entry: entry.fence):
            suspect = entry.losses > 0 or entry.crashes > 0
            if entry.began or not suspect:
                self._lose(entry, fronts)
            elif entry.cancel_requested:
                self._end(entry, State.CANCELLED, CANCELLED_FOR, reason="cancelled")
            else:
                self._again(entry, "lost", NOW, fronts=fronts)
                entry.attempts -= 1
        self.line[:0] = fronts
        return lost

    def _lose(self, entry: ModelEntry, fronts: list[ModelEntry]) -> None:
        entry.losses += 1
        if entry.cancel_requested:
            self._end(entry, State.CANCELLED, CANCELLED_FOR, reason="cancelled")
        elif entry.losses == MAX_LOSSES:
            self._note(entry, "lost")
            self._end(entry, State.DEAD, DEAD_FOR, reason="lost")
        elif entry.losses < 3:
            self._again(entry, "lost", NOW, fronts=fronts)
        else:
            self._again(entry, "lost", PAUSES[entry.losses])

    def _crash(self, entry: ModelEntry, error: Error | None, fronts: list[ModelEntry]) -> None:
        entry.crashes += 1
        if entry.cancel_requested:
            self._end(entry, State.CANCELLED, CANCELLED_FOR, reason="cancelled")
        elif entry.crashes >= entry.job.max_crashes:
            self._note(entry, "crashed")
            self._end(entry, State.DEAD, DEAD_FOR, reason="crashed", error=error)
        else:
            self._again(entry, "crashed", NOW, fronts=fronts)

    def _expire(self, entry: ModelEntry) -> None:
        self._end(entry, State.DEAD, DEAD_FOR, reason="expired")

    def _cancel(self, entry: ModelEntry | None) -> bool:
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
        entry: ModelEntry,
        state: State,
        keep: timedelta,
        *,
        reason: str | None = None,
        error: Error | None = None,
        result: bytes | None = None,
        emit: Sequence[Envelope] = (),
        opens: Sequence[Batch] = (),
    ) -> None:
        self._leave_line(entry)
        entry.state, entry.reason, entry.error, entry.result = state, reason, error, result
        entry.parked = False
        if state is not State.DEAD:
            entry.checkpoint = None
        entry.ended_at = self.now
        entry.keep_until = self.now + keep
        self._let_go(entry)
        if not keep:
            self.jobs.remove(entry)
        for batch in opens:
            if batch.id not in self.groups:
                self._open(batch)
        for job in emit:
            self._add(job)
        self._step(entry)

    def _let_go(self, entry: ModelEntry) -> None:
        entry.has_key = False
        if entry.job.chosen:
            self.ids_until[entry.job.id] = (entry.ended_at or self.now) + KNOWN_FOR

    def _replay(self, entry: ModelEntry | None) -> bool:
        if entry is None or entry.state is not State.DEAD or self._holder_of(entry.job.unique) is not None:
            return False
        self._note(entry, "replayed")
        entry.attempts = entry.failures = entry.losses = entry.crashes = 0
        entry.reason = entry.error = entry.expires_at = entry.ended_at = entry.keep_until = None
        entry.cancel_requested = False
        entry.has_key = entry.job.unique is not None
        self._wait(entry, self.now)
        return True

    def _delete(self, entry: ModelEntry | None) -> bool:
        if entry is None or not entry.state.terminal:
            return False
        self.jobs.remove(entry)
        return True

    def _remove(self, entry: ModelEntry) -> None:
        """A waiting job goes without a trace."""
        self._leave_line(entry)
        self.jobs.remove(entry)
        self._let_go(entry)

    def _note(self, entry: ModelEntry, kind: str) -> None:
        entry.history.append(Event(self.now, kind, entry.attempts, entry.fence))

    # --- batches -----------------------------------------------------------------------------

    def _open(self, batch: Batch) -> None:
        parent = self.groups.get(batch.parent or "")
        if parent is not None and parent.finished_at is not None:
            parent = None
        self.groups[batch.id] = Group(batch, self.now, parent)
        if parent is not None:
            parent.parts.append(Part(batch.member, batch.id, None))

    def _join(self, entry: ModelEntry) -> None:
        group = self.groups.get(entry.job.batch or "")
        if group is not None and group.finished_at is None:
            entry.member_of = group
            group.parts.append(Part(entry.job.member, entry.job.id, entry))

    def _step(self, entry: ModelEntry) -> None:
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
        if not group.batch.keep_for_ms:
            del self.groups[group.batch.id]
        self._step_parent(group, State.DONE if succeeded else State.DEAD)

    def _call_back(self, job: Envelope | None) -> None:
        if job is not None:
            self._add(job)

    def _step_parent(self, group: Group, state: State) -> None:
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
        self._step_parent(group, State.CANCELLED)

    # --- time --------------------------------------------------------------------------------

    def _forget(self) -> None:
        for entry in [e for e in self.jobs if e.keep_until is not None and e.keep_until <= self.now]:
            self.jobs.remove(entry)
        self.ids_until = {key: until for key, until in self.ids_until.items() if until > self.now}
        self.tokens_until = {key: until for key, until in self.tokens_until.items() if until > self.now}
        for group in list(self.groups.values()):
            until = keep_until(group)
            if until is not None and until <= self.now:
                del self.groups[group.batch.id]
            open_until = group.created_at + timedelta(milliseconds=group.batch.open_for_ms)
            if not group.sealed and open_until <= self.now:
                self._abandon(group)

    def _next_in(self) -> timedelta | None:
        moments = [entry.due_at for entry in self.jobs if entry.state is State.READY]
        moments += [e.lease_until for e in self.jobs if e.state is State.RUNNING and e.lease_until]
        moments += [rule.until for rule in self.rules if rule.until is not None]
        spans = [moment - self.now for moment in moments if moment > self.now]
        return min([*spans, *self.limits.tokens_in()], default=None)

    # --- looking -----------------------------------------------------------------------------

    def _queues(self) -> list[str]:
        return sorted({entry.queue for entry in self.jobs})

    def _of(self, queue: str) -> list[ModelEntry]:
        return [entry for entry in self.jobs if entry.queue == queue]

    def entry(self, job_id: str) -> ModelEntry | None:
        return next((entry for entry in self.jobs if entry.job.id == job_id), None)

    def _is_scheduled(self, entry: ModelEntry) -> bool:
        return entry.state is State.READY and entry.due_at > self.now

    def _matches(self, entry: ModelEntry, where: Filter) -> bool:
        shown = shown_job(entry)
        asked = {name: getattr(where, name) for name in ("queue", "task", "state", "reason", "batch")}
        if where.scheduled is not None and where.scheduled is not self._is_scheduled(entry):
            return False
        return all(want is None or getattr(shown, name) == want for name, want in asked.items())
