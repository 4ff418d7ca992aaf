"""The engine that keeps jobs in this process: for tests, scripts and trying things out.

It keeps every promise of the contract but the first: nothing survives the process.  It is also the
plainest implementation, the one to read before the others.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Self

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
from skep.brokers.waiting import Waiters
from skep.clock import Clock, SystemClock, from_us, span_until, span_us, to_us
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
from skep.life import RETENTION, Retention, Running, Step, due_us, expires_us, reaped, settled
from skep.schedule import Schedule, ScheduleRecord

PROMOTED_AT_ONCE = 1000
_HOLDS = (RuleKind.PAUSE, RuleKind.BLOCK)


class _Entry:
    """One job and all that is known of it.  `ticket` is its place in line: an old ticket is void."""

    started_us: int | None = None
    holder: str | None = None
    until_us: int = 0
    attempts = failures = crashes = fence = ticket = 0
    cancel_requested = stepped = False
    ended_us: int | None = None
    keep_us: int | None = None
    reason: str | None = None
    error: Error | None = None
    result: bytes | None = None
    progress: Progress | None = None
    log: tuple[str, ...] = ()
    history: tuple[Event, ...] = ()
    state = State.READY

    def __init__(self, job: Job, body: bytes, seq: int, now_us: int) -> None:
        self.job = job
        self.body = body
        self.seq = seq
        self.queue = job.queue
        self.put_us = now_us
        self.due_us = due_us(job, now_us)
        self.expires_us = expires_us(job, now_us)

    def running(self) -> Running:
        return Running(
            fence=self.fence,
            attempt=self.attempts,
            failures=self.failures,
            crashes=self.crashes,
            max_crashes=self.job.max_crashes,
            cancel_requested=self.cancel_requested,
            holder=self.holder or "",
        )

    def tell(self, event: Event) -> None:
        self.history = (*self.history, event)[-HISTORY_EVENTS:]

    def record(self) -> Record:
        running = self.state is State.RUNNING
        return Record(
            id=self.job.id,
            task=self.job.task,
            queue=self.queue,
            state=self.state,
            body=self.body,
            priority=self.job.priority,
            put_at=from_us(self.put_us),
            due_at=from_us(self.due_us),
            expires_at=_moment(self.expires_us),
            attempts=self.attempts,
            failures=self.failures,
            crashes=self.crashes,
            fence=self.fence,
            holder=self.holder if running else None,
            started_at=_moment(self.started_us),
            lease_until=from_us(self.until_us) if running else None,
            cancel_requested=self.cancel_requested,
            ended_at=_moment(self.ended_us),
            keep_until=_moment(self.keep_us),
            reason=self.reason,
            error=self.error,
            result=self.result,
            unique=self.job.unique,
            key=self.job.key,
            batch=self.job.batch,
            member=self.job.member,
            progress=self.progress,
            log=self.log,
            history=self.history,
        )


class _Queue:
    """The waiting jobs of one queue: a line per priority, and those that are not yet due."""

    def __init__(self) -> None:
        self.lines: dict[int, deque[tuple[int, _Entry]]] = {}
        self.priorities: list[int] = []
        self.scheduled: list[tuple[int, int, int, _Entry]] = []
        self.put = 0
        self.deleted = 0

    def line(self, priority: int) -> deque[tuple[int, _Entry]]:
        line = self.lines.get(priority)
        if line is None:
            line = self.lines[priority] = deque()
            self.priorities = sorted(self.lines, reverse=True)
        return line

    def stand(self, entry: _Entry, *, front: bool = False) -> None:
        entry.ticket += 1
        line = self.line(entry.job.priority)
        if front:
            line.appendleft((entry.ticket, entry))
        else:
            line.append((entry.ticket, entry))

    def schedule(self, entry: _Entry) -> None:
        entry.ticket += 1
        heapq.heappush(self.scheduled, (entry.due_us, entry.seq, entry.ticket, entry))

    def promote(self, now_us: int, most: int = PROMOTED_AT_ONCE) -> int:
        """Move what has become due to the back of its line."""
        promoted = 0
        while promoted < most and self.scheduled and self.scheduled[0][0] <= now_us:
            _, _, ticket, entry = heapq.heappop(self.scheduled)
            if entry.ticket == ticket:
                self.stand(entry)
                promoted += 1
        return promoted

    def line_at(self, now_us: int) -> list[_Entry]:
        """The jobs that are due, in the order in which they would be leased; nothing moves."""
        standing = [
            entry for p in self.priorities for ticket, entry in self.lines[p] if entry.ticket == ticket
        ]
        due = sorted(item for item in self.scheduled if item[0] <= now_us and item[3].ticket == item[2])
        return sorted([*standing, *(item[3] for item in due)], key=lambda entry: -entry.job.priority)

    def next_due(self) -> int | None:
        while self.scheduled and self.scheduled[0][3].ticket != self.scheduled[0][2]:
            heapq.heappop(self.scheduled)
        return self.scheduled[0][0] if self.scheduled else None


class _Batch:
    """A batch, the ids of its live members, and how the others ended."""

    def __init__(self, batch: Batch, now_us: int) -> None:
        self.batch = batch
        self.created_us = now_us
        self.sealed = False
        self.failed = False
        self.finished_us: int | None = None
        self.keep_us: int | None = None
        self.live: dict[str, int] = {}
        self.ended: dict[str, Member] = {}

    def counts(self) -> Counter[State]:
        return Counter(member.state for member in self.ended.values())

    def state(self) -> BatchState:
        ended = self.counts()
        return batch_state(
            sealed=self.sealed,
            total=len(self.live) + len(self.ended),
            done=ended[State.DONE],
            dead=ended[State.DEAD],
            cancelled=ended[State.CANCELLED],
        )


class _Timer:
    """A schedule as it is held."""

    def __init__(self, schedule: Schedule, next_us: int) -> None:
        self.schedule = schedule
        self.next_us = next_us
        self.last_us: int | None = None
        self.paused = False

    def is_due(self, now_us: int) -> bool:
        return not self.paused and self.next_us <= now_us

    def record(self) -> ScheduleRecord:
        return ScheduleRecord(
            schedule=self.schedule,
            next_at=from_us(self.next_us),
            last_at=_moment(self.last_us),
            paused=self.paused,
        )


class _Gate:
    """A lock that lets nobody in once it is closed."""

    def __init__(self) -> None:
        self.closed = False
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        if self.closed:
            self._lock.release()
            raise EngineClosed

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class MemoryBroker:
    """All of `Broker`, `Ledger` and `Hints` in dicts, behind one lock.

    One instance may be shared by any number of threads and event loops.
    """

    def __init__(self, *, clock: Clock | None = None, retention: Retention = RETENTION) -> None:
        self._clock = clock or SystemClock()
        self._retention = retention
        self._gate = _Gate()
        self._waiters = Waiters()
        self._entries: dict[str, _Entry] = {}
        self._queues: defaultdict[str, _Queue] = defaultdict(_Queue)
        self._running: dict[int, _Entry] = {}
        self._unique: dict[str, str] = {}
        self._known: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._kept: list[tuple[int, int, _Entry]] = []
        self._rules: dict[tuple[RuleKind, Scope, str], Rule] = {}
        self._batches: dict[str, _Batch] = {}
        self._timers: dict[str, _Timer] = {}
        self._seq = 0
        self._fence = 0

    @property
    def durability(self) -> Durability:
        return Durability.MEMORY

    async def open(self) -> Self:
        self._gate.closed = False
        return self

    async def close(self) -> None:
        """What it holds stays, in case it is opened again."""
        self._gate.closed = True
        self._waiters.wake()

    # --- Broker: jobs come in ------------------------------------------------------------

    async def put(self, jobs: Sequence[Job], *, token: str | None = None) -> list[Receipt]:
        return self._put(jobs, token)

    async def put_batch(
        self, batch: Batch, jobs: Sequence[Job] = (), *, seal: bool = True, token: str | None = None
    ) -> list[Receipt]:
        return self._put(jobs, token, batch, seal=seal)

    def _put(
        self, jobs: Sequence[Job], token: str | None, batch: Batch | None = None, *, seal: bool = False
    ) -> list[Receipt]:
        """Check everything first, so that what raises has changed nothing."""
        bodies = wire.encode_all(jobs)
        with self._gate:
            now_us = self._clock.now_us()
            if self._repeated(token, now_us):
                return [Receipt(job.id, created=False) for job in jobs]
            opening = batch is not None and batch.id not in self._batches
            receipts = self._receipts(jobs, now_us)
            fresh = [n for n, receipt in enumerate(receipts) if receipt.created]
            self._check_room([jobs[n] for n in fresh])
            joined = {jobs[n].batch for n in fresh} - {batch.id if batch and opening else None, None}
            self._check_batches(joined | ({batch.parent} if batch and opening else set()))
            if batch and opening:
                self._open_batch(batch, now_us)
            for n in fresh:
                self._add(jobs[n], bodies[n], now_us)
            if batch and seal:
                self._seal(batch.id, now_us)
            self._remember(token, now_us)
        return receipts

    async def seal(self, batch: str) -> bool:
        with self._gate:
            if batch not in self._batches:
                raise UnknownBatch(batch)
            return self._seal(batch, self._clock.now_us())

    def _repeated(self, token: str | None, now_us: int) -> bool:
        return token is not None and self._tokens.get(token, 0) > now_us

    def _remember(self, token: str | None, now_us: int) -> None:
        if token is not None:
            self._tokens[token] = now_us + span_us(KNOWN_FOR)

    def _receipts(self, jobs: Sequence[Job], now_us: int) -> list[Receipt]:
        """Decide for each job whether it is new, also against the others of its bundle."""
        receipts = []
        ids: set[str] = set()
        keys: dict[str, str] = {}
        for job in jobs:
            holder = job.id if job.id in ids or self._used(job.id, now_us) else None
            if holder is None and job.unique is not None:
                holder = keys.get(job.unique) or self._unique.get(job.unique)
            if holder is None:
                ids.add(job.id)
                if job.unique is not None:
                    keys[job.unique] = job.id
            receipts.append(Receipt(holder or job.id, created=holder is None))
        return receipts

    def _used(self, job_id: str, now_us: int) -> bool:
        return job_id in self._entries or self._known.get(job_id, 0) > now_us

    def _check_room(self, jobs: list[Job]) -> None:
        for (kind, _, queue), rule in self._rules.items():
            if kind is RuleKind.CAP and (coming := sum(job.queue == queue for job in jobs)):
                waiting = sum(e.queue == queue and e.state is State.READY for e in self._entries.values())
                if waiting + coming > rule.n:
                    raise QueueFull(queue, rule.n)

    def _check_batches(self, batches: Iterable[str | None]) -> None:
        for batch in batches:
            if batch is None:
                continue
            if batch not in self._batches:
                raise UnknownBatch(batch)
            if self._batches[batch].sealed:
                raise BatchSealed(batch)

    def _add(self, job: Job, body: bytes, now_us: int) -> None:
        self._seq += 1
        entry = self._entries[job.id] = _Entry(job, body, self._seq, now_us)
        self._queues[job.queue].put += 1
        if job.unique is not None:
            self._unique[job.unique] = job.id
        if job.batch is not None and (batch := self._batches.get(job.batch)) and batch.finished_us is None:
            batch.live[job.id] = job.member
        self._make_ready(entry, now_us)

    def _emit(self, jobs: Iterable[Job], now_us: int) -> None:
        """Put what follows from a step; what is already there is left out."""
        for job in jobs:
            taken = job.unique is not None and job.unique in self._unique
            if not taken and not self._used(job.id, now_us):
                self._add(job, wire.encode(job), now_us)

    def _make_ready(self, entry: _Entry, now_us: int, *, front: bool = False) -> None:
        entry.state = State.READY
        queue = self._queues[entry.queue]
        if entry.due_us > now_us:
            queue.schedule(entry)
        else:
            queue.stand(entry, front=front)
        self._waiters.wake(entry.queue)

    # --- Broker: jobs go out -------------------------------------------------------------

    async def lease(
        self, wants: Mapping[str, int], *, span: timedelta, holder: str, limit: int | None = None
    ) -> list[Lease]:
        with self._gate:
            return self._lease(wants, span, holder, limit)

    async def exchange(
        self,
        outcomes: Sequence[tuple[Lease, Outcome]],
        wants: Mapping[str, int],
        *,
        span: timedelta,
        holder: str,
        limit: int | None = None,
    ) -> Exchange:
        with self._gate:
            lost = self._settle(outcomes)
            return Exchange(lost, self._lease(wants, span, holder, limit))

    def _lease(
        self, wants: Mapping[str, int], span: timedelta, holder: str, limit: int | None
    ) -> list[Lease]:
        self._waiters.looked(wants)
        now_us = self._clock.now_us()
        until_us = now_us + span_us(span)
        until = from_us(until_us)
        leases: list[Lease] = []
        for name, want in wants.items():
            room = want if limit is None else min(want, limit - len(leases))
            for entry in self._take(name, room, now_us):
                self._start(entry, now_us, until_us, holder)
                leases.append(
                    Lease(
                        entry.job.id,
                        entry.fence,
                        entry.job.task,
                        name,
                        entry.body,
                        entry.attempts,
                        entry.failures,
                        entry.crashes,
                        until,
                        from_us(entry.put_us),
                        entry.job.batch,
                    )
                )
        return leases

    def _take(self, name: str, want: int, now_us: int) -> Iterator[_Entry]:
        """The next jobs to run; those that a rule keeps back are stepped over and keep their places."""
        queue = self._queues.get(name)
        if queue is None:
            return
        queue.promote(now_us)
        for priority in queue.priorities:
            line = queue.lines[priority]
            over: list[tuple[int, _Entry]] = []
            while want > 0 and line:
                ticket, entry = line.popleft()
                if entry.ticket != ticket:
                    continue
                if entry.expires_us is not None and entry.expires_us <= now_us:
                    self._expire(entry, now_us)
                elif self._rules and self._kept_back(entry):
                    over.append((ticket, entry))
                else:
                    want -= 1
                    yield entry
            line.extendleft(reversed(over))

    def _kept_back(self, entry: _Entry) -> bool:
        for (kind, scope, name), rule in self._rules.items():
            if _in_scope(entry, scope, name) and (
                kind in _HOLDS or (kind is RuleKind.LIMIT and self._running_in(scope, name) >= rule.n)
            ):
                return True
        return False

    def _running_in(self, scope: Scope, name: str) -> int:
        return sum(_in_scope(entry, scope, name) for entry in self._running.values())

    def _start(self, entry: _Entry, now_us: int, until_us: int, holder: str) -> None:
        self._fence += 1
        entry.fence = self._fence
        entry.ticket += 1
        entry.state = State.RUNNING
        entry.attempts += 1
        entry.started_us = now_us
        entry.until_us = until_us
        entry.holder = holder
        self._running[self._fence] = entry
        if entry.job.unique_until is UniqueUntil.STARTED:
            self._free_key(entry)

    async def renew(self, leases: Sequence[Lease], *, span: timedelta) -> list[Renewal]:
        with self._gate:
            now_us = self._clock.now_us()
            until_us = now_us + span_us(span)
            until = from_us(until_us)
            renewals = []
            for lease in leases:
                entry = self._held(lease)
                if entry is None or entry.until_us <= now_us:
                    renewals.append(Renewal(None))
                else:
                    entry.until_us = until_us
                    renewals.append(Renewal(until, entry.cancel_requested))
            return renewals

    async def note(self, notes: Sequence[Note]) -> None:
        with self._gate:
            for note in notes:
                if entry := self._held(note.lease):
                    entry.progress = note.progress or entry.progress
                    entry.log = (*entry.log, *note.lines)[-LOG_LINES:]

    async def settle(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> list[Lease]:
        with self._gate:
            return self._settle(outcomes)

    def _settle(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> list[Lease]:
        now_us = self._clock.now_us()
        lost: list[Lease] = []
        released: list[_Entry] = []
        for lease, outcome in outcomes:
            entry = self._held(lease)
            step = settled(entry.running(), outcome, now_us, self._retention) if entry else None
            if entry is None or step is None:
                lost.append(lease)
                continue
            if isinstance(outcome, Done | Dead) and outcome.emit:
                self._free_key(entry)  # it may hand its own key on
                self._emit(outcome.emit, now_us)
            self._apply(entry, step, now_us, released)
        self._to_front(released, now_us)
        return lost

    def _held(self, lease: Lease) -> _Entry | None:
        entry = self._running.get(lease.fence)
        return entry if entry is not None and entry.job.id == lease.id else None

    def _apply(self, entry: _Entry, step: Step, now_us: int, to_front: list[_Entry]) -> None:
        """Record a step of a running job, with all that follows from it."""
        del self._running[entry.fence]
        entry.attempts, entry.failures, entry.crashes = step.attempts, step.failures, step.crashes
        entry.error = step.error
        if step.event is not None:
            entry.tell(step.event)
        if step.state is not State.READY:
            self._end(entry, step.state, now_us, step.keep_us, step.reason, step.result)
            return
        entry.due_us = step.due_us
        if step.queue is not None and step.queue != entry.queue:
            self._move(entry, step.queue)
        if step.front:
            to_front.append(entry)
        else:
            self._make_ready(entry, now_us)

    def _to_front(self, entries: list[_Entry], now_us: int) -> None:
        for entry in reversed(entries):  # the first of them is to stand first
            self._make_ready(entry, now_us, front=True)

    def _move(self, entry: _Entry, queue: str) -> None:
        self._queues[entry.queue].deleted += 1
        self._queues[queue].put += 1
        entry.queue = queue

    def _end(
        self,
        entry: _Entry,
        state: State,
        now_us: int,
        keep_us: int | None,
        reason: str | None = None,
        result: bytes | None = None,
    ) -> None:
        entry.state = state
        entry.ticket += 1
        entry.ended_us, entry.keep_us = now_us, keep_us
        entry.reason, entry.result = reason, result
        self._free_key(entry)
        if entry.job.chosen:
            self._known[entry.job.id] = now_us + span_us(KNOWN_FOR)
        if entry.job.batch is not None and not entry.stepped:
            self._step(entry.job.batch, Member(entry.job.member, entry.job.id, state, result, reason), now_us)
        entry.stepped = True
        if keep_us is None:
            self._forget(entry)
        else:
            heapq.heappush(self._kept, (keep_us, entry.seq, entry))

    def _free_key(self, entry: _Entry) -> None:
        key = entry.job.unique
        if key is not None and self._unique.get(key) == entry.job.id:
            del self._unique[key]

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.job.id]
        self._queues[entry.queue].deleted += 1

    # --- Broker: time --------------------------------------------------------------------

    async def sweep(self, *, limit: int = 1000, by: str | None = None) -> Swept:  # noqa: ARG002  # nobody to share with
        with self._gate:
            now_us = self._clock.now_us()
            promoted = 0
            for name, queue in self._queues.items():
                if found := queue.promote(now_us, limit - promoted):
                    promoted += found
                    self._waiters.wake(name)
            reaped_count = self._reap(now_us, limit)
            expired = self._expire_due(now_us, limit)
            removed = self._forget_old(now_us, limit)
            due = any(timer.is_due(now_us) for timer in self._timers.values())
            next_in = span_until(self._next_us(now_us), now_us)
            return Swept(promoted, reaped_count, expired, removed, next_in, schedules_due=due)

    def _reap(self, now_us: int, limit: int) -> int:
        lost = [entry for entry in self._running.values() if entry.until_us <= now_us][:limit]
        to_front: list[_Entry] = []
        for entry in lost:
            self._apply(entry, reaped(entry.running(), now_us, self._retention), now_us, to_front)
        self._to_front(to_front, now_us)
        return len(lost)

    def _expire_due(self, now_us: int, limit: int) -> int:
        over = [
            entry
            for entry in self._entries.values()
            if entry.state is State.READY and entry.expires_us is not None and entry.expires_us <= now_us
        ][:limit]
        for entry in over:
            self._expire(entry, now_us)
        return len(over)

    def _expire(self, entry: _Entry, now_us: int) -> None:
        self._end(entry, State.DEAD, now_us, now_us + span_us(self._retention.dead_for), "expired")

    def _forget_old(self, now_us: int, limit: int) -> int:
        removed = 0
        while self._kept and self._kept[0][0] <= now_us and removed < limit:
            _, _, entry = heapq.heappop(self._kept)
            if (
                self._entries.get(entry.job.id) is entry
                and entry.keep_us is not None
                and entry.keep_us <= now_us
            ):
                self._forget(entry)
                removed += 1
        removed += self._trim_dead(limit)
        self._known = {job_id: until for job_id, until in self._known.items() if until > now_us}
        self._tokens = {token: until for token, until in self._tokens.items() if until > now_us}
        for held in list(self._batches.values()):
            if _batch_is_over(held, now_us):
                self._remove_batch(held, now_us)
        return removed

    def _trim_dead(self, limit: int) -> int:
        if self._retention.dead_max is None:
            return 0
        shelves: defaultdict[str, list[_Entry]] = defaultdict(list)
        for entry in self._entries.values():
            if entry.state is State.DEAD:
                shelves[entry.queue].append(entry)
        removed = 0
        for shelf in shelves.values():
            shelf.sort(key=lambda entry: (entry.ended_us or 0, entry.seq))
            for entry in shelf[: max(0, min(limit, len(shelf) - self._retention.dead_max))]:
                self._forget(entry)
                removed += 1
        return removed

    def _next_us(self, now_us: int) -> int | None:
        moments = [entry.until_us for entry in self._running.values()]
        moments += [due for queue in self._queues.values() if (due := queue.next_due()) is not None]
        moments += [timer.next_us for timer in self._timers.values() if not timer.paused]
        return min((moment for moment in moments if moment > now_us), default=None)

    # --- batches -------------------------------------------------------------------------

    def _open_batch(self, batch: Batch, now_us: int) -> None:
        if batch.parent is not None:
            self._batches[batch.parent].live[batch.id] = batch.member
        self._batches[batch.id] = _Batch(batch, now_us)

    def _seal(self, batch_id: str, now_us: int) -> bool:
        held = self._batches[batch_id]
        if held.sealed:
            return False
        held.sealed = True
        if not held.live:
            self._finish(held, now_us)
        return True

    def _step(self, batch_id: str, member: Member, now_us: int) -> None:
        """One member has ended (B1)."""
        held = self._batches.get(batch_id)
        if held is None or held.live.pop(member.id, None) is None:
            return
        held.ended[member.id] = member
        if member.state is not State.DONE and not held.failed:
            held.failed = True
            self._emit(callbacks(held.batch, held.state(), first_failure=True, finished=False), now_us)
        if held.sealed and not held.live:
            self._finish(held, now_us)

    def _finish(self, held: _Batch, now_us: int) -> None:
        state = held.state()
        held.finished_us = now_us
        held.keep_us = now_us + held.batch.linger_ms * 1000
        self._emit(callbacks(held.batch, state, first_failure=False, finished=True), now_us)
        self._step_parent(held, State.DONE if state is BatchState.SUCCESS else State.DEAD, now_us)
        if held.batch.linger_ms == 0:
            del self._batches[held.batch.id]

    def _step_parent(self, held: _Batch, state: State, now_us: int) -> None:
        if held.batch.parent is not None:
            self._step(held.batch.parent, Member(held.batch.member, held.batch.id, state), now_us)

    def _remove_batch(self, held: _Batch, now_us: int) -> None:
        del self._batches[held.batch.id]
        if held.finished_us is None:
            self._step_parent(held, State.CANCELLED, now_us)

    def _status(self, held: _Batch) -> BatchStatus:
        ended = held.counts()
        live: Counter[str] = Counter()
        for member in held.live:
            entry = self._entries.get(member)
            if entry is None or entry.state is State.RUNNING:  # None: a nested batch
                live["running"] += 1
            else:
                live["retrying" if entry.failures or entry.crashes else "enqueued"] += 1
        return BatchStatus(
            id=held.batch.id,
            state=held.state(),
            sealed=held.sealed,
            total=len(held.live) + len(held.ended),
            enqueued=live["enqueued"],
            retrying=live["retrying"],
            running=live["running"],
            done=ended[State.DONE],
            dead=ended[State.DEAD],
            cancelled=ended[State.CANCELLED],
            created_at=from_us(held.created_us),
            finished_at=_moment(held.finished_us),
            keep_until=_moment(held.keep_us),
            parent=held.batch.parent,
            note=held.batch.note,
        )

    async def batch(self, batch: str) -> BatchStatus | None:
        with self._gate:
            held = self._batches.get(batch)
            return self._status(held) if held else None

    async def batches(self, *, limit: int = 100, after: str | None = None) -> list[BatchStatus]:
        with self._gate:
            names = sorted(name for name in self._batches if after is None or name > after)
            return [self._status(self._batches[name]) for name in names[:limit]]

    async def members(self, batch: str, *, limit: int = 1000, after: int | None = None) -> list[Member]:
        with self._gate:
            held = self._batches.get(batch)
            if held is None:
                return []
            found = [*held.ended.values(), *(self._live_member(*pair) for pair in held.live.items())]
            found.sort(key=lambda member: (member.member, member.id))
            return [member for member in found if after is None or member.member > after][:limit]

    def _live_member(self, member_id: str, number: int) -> Member:
        entry = self._entries.get(member_id)
        return Member(number, member_id, entry.state if entry else State.RUNNING)

    async def delete_batch(self, batch: str) -> bool:
        with self._gate:
            held = self._batches.get(batch)
            if held is None:
                return False
            now_us = self._clock.now_us()
            for member in list(held.live):
                entry = self._entries.get(member)
                if entry is not None and entry.state is State.READY:
                    entry.stepped = True
                    self._end(entry, State.CANCELLED, now_us, None)
            self._remove_batch(held, now_us)
            return True

    # --- Ledger: looking -----------------------------------------------------------------

    async def now(self) -> datetime:
        return from_us(self._clock.now_us())

    async def queues(self) -> dict[str, Counts]:
        with self._gate:
            now_us = self._clock.now_us()
            found: defaultdict[str, Counter[str]] = defaultdict(Counter)
            for entry in self._entries.values():
                scheduled = entry.state is State.READY and entry.due_us > now_us
                found[entry.queue]["scheduled" if scheduled else entry.state.value] += 1
            return {
                name: Counts(**found[name], put=queue.put, deleted=queue.deleted)
                for name, queue in sorted(self._queues.items())
            }

    async def get(self, job_id: str) -> Record | None:
        with self._gate:
            entry = self._entries.get(job_id)
            return entry.record() if entry else None

    async def find(self, where: Filter, *, limit: int = 100, after: int | None = None) -> Page:
        with self._gate:
            now_us = self._clock.now_us()
            matches = sorted(
                (
                    e
                    for e in self._entries.values()
                    if (after is None or e.seq > after) and _matches(e, where, now_us)
                ),
                key=lambda entry: entry.seq,
            )
            page = matches[:limit]
            return Page(
                [entry.record() for entry in page], page[-1].seq if page and len(matches) > limit else None
            )

    async def position(self, job_id: str) -> int | None:
        with self._gate:
            entry = self._entries.get(job_id)
            now_us = self._clock.now_us()
            if entry is None or entry.state is not State.READY or entry.due_us > now_us:
                return None
            line = self._queues[entry.queue].line_at(now_us)
            return next(n for n, other in enumerate(line) if other is entry)

    # --- Ledger: operating ---------------------------------------------------------------

    async def cancel(self, job_ids: Sequence[str]) -> list[bool]:
        with self._gate:
            now_us = self._clock.now_us()
            return [self._cancel(self._entries.get(job_id), now_us) for job_id in job_ids]

    def _cancel(self, entry: _Entry | None, now_us: int) -> bool:
        if entry is None or entry.state.terminal:
            return False
        if entry.state is State.READY:
            self._end(
                entry, State.CANCELLED, now_us, now_us + span_us(self._retention.cancelled_for), "cancelled"
            )
        elif not entry.cancel_requested:
            entry.cancel_requested = True
            entry.tell(Event(from_us(now_us), "cancel-requested", entry.attempts, entry.fence))
        return True

    async def reschedule(self, job_id: str, due_at: datetime) -> bool:
        with self._gate:
            entry = self._entries.get(job_id)
            if entry is None or entry.state is not State.READY:
                return False
            now_us = self._clock.now_us()
            entry.due_us = to_us(due_at)
            entry.tell(Event(from_us(now_us), "rescheduled", entry.attempts, entry.fence))
            self._make_ready(entry, now_us)
            return True

    async def replay(self, job_ids: Sequence[str]) -> list[bool]:
        with self._gate:
            now_us = self._clock.now_us()
            return [self._replay(self._entries.get(job_id), now_us) for job_id in job_ids]

    def _replay(self, entry: _Entry | None, now_us: int) -> bool:
        if entry is None or entry.state is not State.DEAD or entry.job.unique in self._unique:
            return False
        entry.tell(
            Event(from_us(now_us), "replayed", entry.attempts, entry.fence, "", f"was dead: {entry.reason}")
        )
        entry.attempts = entry.failures = entry.crashes = 0
        entry.ended_us = entry.keep_us = entry.expires_us = entry.started_us = None
        entry.reason = entry.error = entry.result = None
        entry.cancel_requested = False
        entry.due_us = now_us
        if entry.job.unique is not None:
            self._unique[entry.job.unique] = entry.job.id
        self._make_ready(entry, now_us)
        return True

    async def delete(self, job_ids: Sequence[str]) -> list[bool]:
        with self._gate:
            entries = [self._entries.get(job_id) for job_id in job_ids]
            return [self._delete(entry) for entry in entries]

    def _delete(self, entry: _Entry | None) -> bool:
        if entry is None or not entry.state.terminal or entry.job.id not in self._entries:
            return False
        self._forget(entry)
        return True

    async def drop(self, queue: str) -> int:
        with self._gate:
            now_us = self._clock.now_us()
            going = [e for e in self._entries.values() if e.queue == queue and e.state is not State.RUNNING]
            for entry in going:
                if entry.state is State.READY:
                    self._end(entry, State.CANCELLED, now_us, None)
                else:
                    self._forget(entry)
            if not any(entry.queue == queue for entry in self._entries.values()):
                self._queues.pop(queue, None)
            return len(going)

    async def add_rule(self, rule: Rule) -> bool:
        with self._gate:
            place = (rule.kind, rule.scope, rule.name)
            if self._rules.get(place) == rule:
                return False
            self._rules[place] = rule
            self._waiters.wake()
            return True

    async def remove_rule(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        with self._gate:
            removed = self._rules.pop((kind, scope, name), None) is not None
            self._waiters.wake()
            return removed

    async def rules(self) -> list[Rule]:
        with self._gate:
            return [self._rules[place] for place in sorted(self._rules)]

    # --- Ledger: schedules ---------------------------------------------------------------

    async def put_schedule(self, schedule: Schedule, next_at: datetime) -> None:
        with self._gate:
            timer = self._timers.get(schedule.name)
            if timer is None:
                self._timers[schedule.name] = _Timer(schedule, to_us(next_at))
                return
            if timer.schedule.timing != schedule.timing:
                timer.next_us = to_us(next_at)
            timer.schedule = schedule

    async def schedules(self, *, due: bool = False) -> list[ScheduleRecord]:
        with self._gate:
            now_us = self._clock.now_us()
            return [
                timer.record() for _, timer in sorted(self._timers.items()) if not due or timer.is_due(now_us)
            ]

    async def pause_schedule(self, name: str, paused: bool) -> bool:
        with self._gate:
            timer = self._timers.get(name)
            if timer is None or timer.paused == paused:
                return False
            timer.paused = paused
            return True

    async def remove_schedule(self, name: str) -> bool:
        with self._gate:
            return self._timers.pop(name, None) is not None

    async def fire(self, name: str, instant: datetime, job: Job | None, next_at: datetime) -> bool:
        with self._gate:
            now_us = self._clock.now_us()
            timer = self._timers.get(name)
            if timer is None or not timer.is_due(now_us) or timer.next_us != to_us(instant):
                return False
            timer.last_us, timer.next_us = timer.next_us, to_us(next_at)
            if job is not None:
                self._emit([job], now_us)
            return True

    # --- Hints ---------------------------------------------------------------------------

    @property
    def hears(self) -> bool:
        return False  # looking costs nothing here

    async def wait(self, queues: Sequence[str], timeout: float) -> bool:
        return await self._waiters.wait(queues, timeout)


def _moment(us: int | None) -> datetime | None:
    return None if us is None else from_us(us)


def _in_scope(entry: _Entry, scope: Scope, name: str) -> bool:
    facts: dict[Scope, Callable[[], str | None]] = {
        Scope.QUEUE: lambda: entry.queue,
        Scope.TASK: lambda: entry.job.task,
        Scope.KEY: lambda: entry.job.key,
    }
    return facts[scope]() == name


def _matches(entry: _Entry, where: Filter, now_us: int) -> bool:
    return (
        (where.queue is None or entry.queue == where.queue)
        and (where.task is None or entry.job.task == where.task)
        and (where.state is None or entry.state is where.state)
        and (where.reason is None or entry.reason == where.reason)
        and (where.batch is None or entry.job.batch == where.batch)
        and (
            where.scheduled is None
            or where.scheduled == (entry.state is State.READY and entry.due_us > now_us)
        )
    )


def _batch_is_over(held: _Batch, now_us: int) -> bool:
    if held.keep_us is not None:
        return held.keep_us <= now_us
    return not held.sealed and held.created_us + held.batch.open_for_ms * 1000 <= now_us


def from_url(address: Address, clock: Clock | None) -> MemoryBroker:
    """`memory://`: each call makes an engine of its own."""
    address.reject_unknown()
    return MemoryBroker(clock=clock)
