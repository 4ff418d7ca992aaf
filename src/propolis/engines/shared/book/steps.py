"""The steps that change jobs and batches, as every engine written in Python takes them.

What is stored, and where, is left to whoever inherits: `StoreBook`, over keys in order, and the book of the
memory engine, which is one over live objects.  The engine holds its lock around each call, and sets `now_us`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from propolis.core import wire
from propolis.core.batch import Batch, BatchState, callbacks
from propolis.core.clock import from_us, span_until, span_us
from propolis.core.envelope import Envelope, UniqueUntil
from propolis.core.job import Dead, Done, Event, Lease, Member, Outcome, State
from propolis.core.protocols import (
    BITE,
    KNOWN_FOR,
    LOG_LINES,
    PARKED_LINES,
    REMOVALS,
    Note,
    Receipt,
    Renewal,
    RuleKind,
    Scope,
    Swept,
)
from propolis.core.records import Change, Refusal, Swap, Swapped
from propolis.core.transitions import Retention, Step, reaped, settled
from propolis.engines.shared.book.keeping import B, E
from propolis.engines.shared.book.limit_steps import LimitSteps
from propolis.engines.shared.book.store import Table
from propolis.engines.shared.book.stored_records import StoredRecords
from propolis.engines.shared.from_exchange import ClaimTerms
from propolis.engines.shared.receipts import decide_receipts
from propolis.errors import BatchSealed, QueueFull, UnknownBatch

_EMITTING = (Done, Dead)


class Removal(Struct, frozen=True):
    """What a drop or the deletion of a batch is at: all jobs up to a number, or all of the batch of one."""

    removed: int
    since_us: int
    upto: int


class Steps(LimitSteps[E, B]):
    """What follows from each call.  Each checks before it changes: what raises has changed nothing."""

    def __init__(self, retention: Retention, table: Table) -> None:
        self.retention = retention
        self._table = table
        self.removals: dict[str, Removal] = {}  # what drops and deletions of batches have left undone

    # --- jobs come in --------------------------------------------------------------------

    def put(
        self,
        jobs: Sequence[Envelope],
        bodies: Sequence[bytes],
        token: str | None,
        batch: Batch | None = None,
        *,
        seal: bool = False,
    ) -> list[Receipt]:
        if token is not None and self.recall("token", token) is not None:
            return [Receipt(self._there_for(job), created=False) for job in jobs]
        opens = () if batch is None or self.batch_of(batch.id) else (batch,)
        receipts = self._receipts(jobs)
        fresh = [n for n, receipt in enumerate(receipts) if receipt.created]
        self._check([jobs[n] for n in fresh], opens)
        for new in opens:
            self._open_batch(new)
        for n in fresh:
            self._add(jobs[n], bodies[n])
        if batch is not None and seal:
            self.seal(batch.id)
        if token is not None:
            self.remember("token", token, b"", self.now_us + span_us(KNOWN_FOR))
        return receipts

    def records(self) -> StoredRecords:
        return StoredRecords(self._table, self.now_us)

    def swap(self, swap: Swap, bodies: Sequence[bytes]) -> Swapped:
        if (refused := self.records().refusal(swap)) is not None:
            return refused
        fresh = [n for n, receipt in enumerate(self._receipts(swap.puts)) if receipt.created]
        opens = [batch for batch in swap.opens if self.batch_of(batch.id) is None]
        try:
            self._check([swap.puts[n] for n in fresh], opens, bounded=swap.bounded)
        except QueueFull as error:
            return Swapped(None, Refusal.QUEUE_FULL, error.queue)
        except (UnknownBatch, BatchSealed) as error:
            return Swapped(None, Refusal.NO_BATCH, error.batch)
        for batch in opens:
            self._open_batch(batch)
        for n in fresh:
            self._add(swap.puts[n], bodies[n])
        return Swapped(self.records().apply(swap))

    def _receipts(self, jobs: Sequence[Envelope]) -> list[Receipt]:
        return decide_receipts(jobs, self.used, self.holder_of)

    def _there_for(self, job: Envelope) -> str:
        """The job that was put in this call, or the one in whose favour it was not."""
        if job.unique is None or self.used(job.id):
            return job.id
        return self.holder_of(job.unique) or job.id

    def used(self, job_id: str) -> bool:
        """Is there such a job, or was there one whose id was chosen?"""
        return self.entry(job_id) is not None or self.recall("id", job_id) is not None

    def _check(self, jobs: list[Envelope], opens: Sequence[Batch], *, bounded: bool = True) -> None:
        if self.ruled and bounded:
            for queue, coming in Counter(job.queue for job in jobs).items():
                cap = self.ruling(RuleKind.CAP, Scope.QUEUE, queue)
                if cap is not None and (would_hold := self.waiting(queue) + coming) > cap.n:
                    raise QueueFull(queue, cap.n, would_hold)
        opened: set[str | None] = {None}
        joined: set[str | None] = set()
        for batch in opens:
            joined |= {batch.parent} - opened
            opened.add(batch.id)
        for name in joined | {job.batch for job in jobs} - opened:
            held = self.batch_of(name or "")
            if held is None:
                raise UnknownBatch(name or "")
            if held.sealed:
                raise BatchSealed(name or "")

    def _add(self, job: Envelope, body: bytes) -> None:
        entry = self.create(job, body)
        if job.batch is not None and (held := self.batch_of(job.batch)) and held.finished_us is None:
            entry.joined = held.number
            held.total += 1
            self.set_member(held, Member(job.member, job.id, State.READY))
        entry.given = job.due_at is not None
        self.place_later(entry)

    def emit(self, jobs: Iterable[Envelope]) -> None:
        """Put what follows from a step; what is already there is left out."""
        for job in jobs:
            taken = job.unique is not None and self.holder_of(job.unique) is not None
            if not taken and not self.used(job.id):
                self._add(job, wire.encode(job))

    # --- jobs go out ---------------------------------------------------------------------

    def lease(self, claim: ClaimTerms) -> list[Lease]:
        wants, span, holder, limit, tasks = claim
        lasts_us = span_us(span)
        until_us = self.now_us + lasts_us
        until = from_us(until_us)
        leases: list[Lease] = []
        for queue, want in wants.items():
            room = min(want, limit - len(leases))
            for entry in self._next(queue, room, tasks) if tasks else self.take(queue, room):
                self.take_tokens(entry)
                entry.state = State.RUNNING
                entry.attempts += 1
                entry.began = entry.parked = False
                entry.fence = max(entry.fence + 1, self.now_us)
                entry.started_us, entry.until_us, entry.holder = self.now_us, until_us, holder
                entry.span_us = lasts_us
                if entry.job.unique_until is UniqueUntil.STARTED:
                    self._free_key(entry)
                self.started(entry)
                leases.append(entry.lease(until))
        return leases

    def _next(self, queue: str, want: int, tasks: Sequence[str]) -> Iterator[E]:
        """Those that are parked for these tasks first."""
        for task in tasks:
            for entry in list(self.parked(queue, task)) if want > 0 else ():
                if want > 0 and self.goes(entry):
                    want -= 1
                    yield entry
        yield from self.take(queue, want)

    def goes(self, entry: E) -> bool:
        """May it start?  Where it must not wait any longer it has ended instead."""
        if self.removals and self.was_removed(entry):
            return False
        if entry.expires_us is not None and entry.expires_us <= self.now_us:
            self.expire(entry)
            return False
        return not (self.ruled and self.kept_back(entry))

    def held(self, lease: Lease) -> E | None:
        """The running job that this lease is for, if it still is."""
        entry = self.entry(lease.id)
        if entry is None or entry.fence != lease.fence or entry.state is not State.RUNNING:
            return None
        return entry if entry.holder == lease.holder else None

    def live(self, lease: Lease) -> E | None:
        entry = self.held(lease)
        return entry if entry is not None and entry.until_us > self.now_us else None

    def renew(self, lease: Lease, span: timedelta) -> Renewal:
        entry = self.live(lease)
        if entry is None:
            return Renewal(None)
        entry.span_us = span_us(span)
        entry.until_us = self.now_us + entry.span_us
        self.changed(entry)
        return Renewal(from_us(entry.until_us), entry.cancel_requested)

    def note(self, notes: Sequence[Note]) -> list[Lease]:
        found = [(note, self.live(note.lease)) for note in notes]
        jobs = [job for note, entry in found if entry is not None for job in note.puts]
        self.put(jobs, wire.encode_all(jobs), None)
        for note, entry in found:
            if entry is not None:
                entry.progress = note.progress or entry.progress
                entry.log = (*entry.log, *note.lines)[-LOG_LINES:]
                entry.began = entry.began or note.began
                entry.checkpoint = entry.checkpoint if note.checkpoint is None else note.checkpoint
                self.changed(entry)
        return [note.lease for note, entry in found if entry is None]

    def settle(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> list[Lease]:
        lost: list[Lease] = []
        released: list[E] = []
        for lease, outcome in outcomes:
            entry = self.held(lease)
            step = settled(entry.running(), outcome, self.now_us, self.retention) if entry else None
            if entry is None or step is None:
                lost.append(lease)
                continue
            if isinstance(outcome, _EMITTING) and (outcome.emit or outcome.opens):
                self._free_key(entry)  # it may hand its own key on
                for batch in outcome.opens:
                    self._open_batch(batch)
                self.emit(outcome.emit)
            self.give_tokens_back(entry, outcome, step.state)
            self._apply(entry, step, released)
        self._to_front(released)
        return lost

    def _apply(self, entry: E, step: Step, to_front: list[E]) -> None:
        """Record a step of a running job, with all that follows from it."""
        self.stopped(entry)
        entry.state = State.READY
        entry.attempts, entry.failures = step.attempts, step.failures
        entry.losses, entry.crashes = step.losses, step.crashes
        entry.error = step.error
        if step.event is not None:
            entry.add_event(step.event)
        if step.state is not State.READY:
            self._end(entry, step.state, step.keep_us, step.reason, step.result)
            return
        entry.due_us, entry.given = step.due_us, False
        if step.queue is not None and step.queue != entry.queue:
            self.move(entry, step.queue)
        if step.front:
            to_front.append(entry)
        elif step.parked:
            entry.parked = True
            self.park(entry)
        else:
            self.place_later(entry)

    def _to_front(self, entries: list[E]) -> None:
        for entry in reversed(entries):  # the first of them is to stand first
            self.place(entry, front=True)

    def _end(
        self,
        entry: E,
        state: State,
        keep_us: int | None,
        reason: str | None = None,
        result: bytes | None = None,
    ) -> None:
        entry.state, entry.parked = state, False
        entry.ended_us, entry.keep_us = self.now_us, keep_us
        entry.reason, entry.result = reason, result
        entry.checkpoint = entry.checkpoint if state is State.DEAD else None
        if entry.job.unique is not None:
            self._free_key(entry)
        if entry.job.chosen:
            self.remember("id", entry.job.id, b"", self.now_us + span_us(KNOWN_FOR))
        if entry.joined:
            number, entry.joined = entry.joined, 0
            self._step(entry.job.batch, number, Member(entry.job.member, entry.job.id, state, result, reason))
        if keep_us is None:
            self.forget(entry)
        else:
            self.shelve(entry)

    def _free_key(self, entry: E) -> None:
        key = entry.job.unique
        if key is not None and self.holder_of(key) == entry.job.id:
            self.hold_key(key, None)

    # --- time ----------------------------------------------------------------------------

    def sweep(self, limit: int) -> Swept:
        behind = self.follow_clock(limit)
        for rule in self.rules_over(limit):
            self.remove_rule(rule)
        promoted = self.promote(limit)
        lost = self.lost(limit)
        to_front: list[E] = []
        for entry in lost:
            self._apply(entry, reaped(entry.running(), self.now_us, self.retention), to_front)
        self._to_front(to_front)
        ended = [entry for entry in lost if entry.state.terminal]  # others may expire after that
        expired = self.expired(limit)
        for entry in expired:
            self.expire(entry)
        self._go_on_dropping(limit)
        removed = self.forget_old(limit)
        for held in self.old_batches(limit):
            self._remove_batch(held)
        return Swept(
            promoted=promoted,
            reaped=len(lost),
            expired=len(expired),
            removed=removed,
            next_in=span_until(self.next_us(), self.now_us),
            again_in=timedelta(0) if behind else None,
            records_due=self.records().due_kinds(),
            ended=tuple(entry.job.id for entry in (*ended, *expired)),
            parked=self.parked_lines(PARKED_LINES),
        )

    def expire(self, entry: E) -> None:
        self._end(entry, State.DEAD, self.now_us + span_us(self.retention.dead_for), "expired")

    # --- batches -------------------------------------------------------------------------

    def _open_batch(self, batch: Batch) -> None:
        """Unless it is there."""
        if self.batch_of(batch.id) is not None:
            return
        held = self.create_batch(batch)
        parent = None if batch.parent is None else self.batch_of(batch.parent)
        if parent is not None and parent.finished_us is None:
            held.joined = parent.number
            parent.total += 1
            self.set_member(parent, Member(batch.member, batch.id, State.RUNNING))
        self.changed_batch(held)

    def seal(self, batch_id: str) -> bool:
        held = self.batch_of(batch_id)
        if held is None:
            raise UnknownBatch(batch_id)
        if held.sealed:
            return False
        held.sealed = True
        self._finish_if_over(held)
        return True

    def _step(self, batch_id: str | None, number: int, member: Member) -> None:
        """One member has ended (B1)."""
        held = self.batch_of(batch_id or "")
        if held is None or held.number != number:
            return
        held.count(member.state)
        self.set_member(held, member)
        if member.state is not State.DONE and not held.failed:
            held.failed = True
            self.emit(callbacks(held.batch, held.state(), first_failure=True, finished=False))
        self._finish_if_over(held)

    def _finish_if_over(self, held: B) -> None:
        if not held.sealed or held.live or held.finished_us is not None:
            self.changed_batch(held)
            return
        state = held.state()
        held.finished_us = self.now_us
        held.keep_us = self.now_us + held.batch.keep_for_ms * 1000
        self.emit(callbacks(held.batch, state, first_failure=False, finished=True))
        self._step_parent(held, State.DONE if state is BatchState.SUCCESS else State.DEAD)
        if held.batch.keep_for_ms == 0:
            self.forget_batch(held)
        else:
            self.changed_batch(held)

    def _step_parent(self, held: B, state: State) -> None:
        if held.joined:
            number, held.joined = held.joined, 0
            self._step(held.batch.parent, number, Member(held.batch.member, held.batch.id, state))

    def _remove_batch(self, held: B) -> None:
        self.forget_batch(held)
        if held.finished_us is None:
            self._step_parent(held, State.CANCELLED)

    def delete_batch(self, batch_id: str) -> bool:
        held = self.batch_of(batch_id)
        if held is None:
            return False
        waiting, more = self.waiting_members(held)
        for entry in waiting:
            self.cast_out(entry)
        if more:
            self.keep_removal(f"batch:{batch_id}", Removal(len(waiting), self.now_us, held.number))
        self._remove_batch(held)
        return True

    # --- what operators do ---------------------------------------------------------------

    def cancel(self, job_id: str) -> bool:
        entry = self.entry(job_id)
        if entry is None or entry.state.terminal:
            return False
        if entry.state is State.READY:
            keep_us = self.now_us + span_us(self.retention.cancelled_for)
            self._end(entry, State.CANCELLED, keep_us, "cancelled")
        elif not entry.cancel_requested:
            entry.cancel_requested = True
            self._add_event(entry, "cancel-requested")
            self.changed(entry)
        return True

    def reschedule(self, job_id: str, due_us: int) -> bool:
        entry = self.entry(job_id)
        if entry is None or entry.state is not State.READY:
            return False
        entry.due_us, entry.given, entry.parked = due_us, True, False
        self._add_event(entry, "rescheduled")
        self.place(entry)
        return True

    def replay(self, job_id: str) -> bool:
        entry = self.entry(job_id)
        if entry is None or entry.state is not State.DEAD:
            return False
        key = entry.job.unique
        if key is not None and self.holder_of(key) is not None:
            return False
        self._add_event(entry, "replayed", f"was dead: {entry.reason}")
        entry.state = State.READY
        entry.attempts = entry.failures = entry.losses = entry.crashes = 0
        entry.ended_us = entry.keep_us = entry.expires_us = entry.started_us = None
        entry.reason = entry.error = entry.result = None
        entry.cancel_requested = False
        entry.due_us = self.now_us
        if key is not None:
            self.hold_key(key, job_id)
        self.place(entry)
        return True

    def delete(self, job_id: str) -> bool:
        entry = self.entry(job_id)
        if entry is None or not entry.state.terminal:
            return False
        self.forget(entry)
        return True

    def drop(self, queue: str) -> int:
        upto = self.last_number()
        gone = self._drop_some(queue, BITE, upto)
        if self.of_queue(queue, 1, upto):
            self.keep_removal(f"queue:{queue}", Removal(gone, self.now_us, upto))
        return gone

    def _drop_some(self, queue: str, most: int, upto: int) -> int:
        going = self.of_queue(queue, most, upto)
        for entry in going:
            if entry.state is State.READY:
                self._end(entry, State.CANCELLED, None)
            else:
                self.forget(entry)
        self.close_queue(queue)
        return len(going)

    def _go_on_dropping(self, limit: int) -> None:
        """What a drop has left undone, a bite of it."""
        for name, removal in list(self.removals.items()):
            what, _, queue = name.partition(":")
            if what == "queue":
                gone = self._drop_some(queue, limit, removal.upto)
                more = bool(self.of_queue(queue, 1, removal.upto))
                self.keep_removal(name, replace(removal, removed=removal.removed + gone) if more else None)

    def keep_removal(self, name: str, removal: Removal | None) -> None:
        """How far it is, in a record; None: it is finished."""
        value = None if removal is None else msgspec.json.encode(removal)
        self.records().apply(Swap(changes=(Change(kind=REMOVALS, name=name, value=value),)))
        if removal is None:
            self.removals.pop(name, None)
        else:
            self.removals[name] = removal

    def cast_out(self, entry: E) -> None:
        """It goes with the batch that it waits in, and steps nothing."""
        entry.joined = 0
        self._end(entry, State.CANCELLED, None)

    def was_removed(self, entry: E) -> bool:
        """Has it only not gone yet?  Then it goes now, and does not start."""
        for name, removal in self.removals.items():
            if name == f"queue:{entry.queue}" and entry.seq <= removal.upto:
                self._end(entry, State.CANCELLED, None)
                return True
            if name == f"batch:{entry.job.batch}" and entry.joined == removal.upto:
                self.cast_out(entry)
                return True
        return False

    def _add_event(self, entry: E, kind: str, note: str = "") -> None:
        entry.add_event(Event(from_us(self.now_us), kind, entry.attempts, entry.fence, "", note))
