"""What the memory engine holds: plain objects, and the lines in which they stand."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator

from propolis.core.batch import Batch, BatchStatus
from propolis.core.clock import to_us
from propolis.core.envelope import Envelope
from propolis.core.job import Lease, Member, State
from propolis.core.protocols import BITE, Counts, Filter, Page, Rule, RuleKind, Scope
from propolis.core.transitions import Retention, due_us, expires_us
from propolis.engines.memory.entries import MemoryBatch, MemoryEntry, WaitingLines
from propolis.engines.shared.book.keeping import Place
from propolis.engines.shared.book.steps import Steps
from propolis.engines.shared.book.store import HeldTable
from propolis.engines.shared.from_exchange import ClaimTerms
from propolis.engines.shared.waiters import Waiters


class Book(Steps[MemoryEntry, MemoryBatch]):
    """All jobs, queues, batches and rules."""

    def __init__(self, waiters: Waiters, retention: Retention) -> None:
        super().__init__(retention, HeldTable())
        self.entries: dict[str, MemoryEntry] = {}
        self.lines: defaultdict[str, WaitingLines] = defaultdict(WaitingLines)
        self._running: dict[str, MemoryEntry] = {}
        self._parked: dict[str, MemoryEntry] = {}
        self._unique: dict[str, str] = {}
        self._rules: dict[tuple[RuleKind, Scope, str], Rule] = {}
        self._on_task_keys = [0, 0]  # rules on one of its keys, and limits on each of them
        self._prefixes: dict[str, Rule] = {}
        self._full: dict[tuple[Scope, str], int] = {}
        self._turns: dict[tuple[Scope, str], int] = {}
        self._batches: dict[str, MemoryBatch] = {}
        self._waiters = waiters
        self._memos: dict[tuple[str, str], tuple[int, bytes]] = {}
        self._kept: list[tuple[int, int, MemoryEntry]] = []
        self._seq = 0

    # --- jobs ----------------------------------------------------------------------------

    def entry(self, job_id: str) -> MemoryEntry | None:
        return self.entries.get(job_id)

    def used(self, job_id: str) -> bool:
        return job_id in self.entries or (("id", job_id) in self._memos and super().used(job_id))

    def create(self, job: Envelope, body: bytes) -> MemoryEntry:
        self._seq += 1
        now_us = self.now_us
        entry = self.entries[job.id] = MemoryEntry(
            job, body, self._seq, job.queue, now_us, due_us(job, now_us), expires_us(job, now_us)
        )
        self.lines[job.queue].put += 1
        if job.unique is not None:
            self._unique[job.unique] = job.id
        return entry

    def place(self, entry: MemoryEntry, *, front: bool = False) -> None:
        lines = self.lines[entry.queue]
        if entry.due_us > self.now_us:
            lines.schedule(entry)
        else:
            lines.stand(entry, front=front)
        self._waiters.wake(entry.queue)

    def park(self, entry: MemoryEntry) -> None:
        entry.ticket += 1
        self._parked[entry.job.id] = entry

    def parked(self, queue: str, task: str) -> list[MemoryEntry]:
        line = [e for e in self._all_parked() if (e.queue, e.job.task) == (queue, task)]
        return sorted(line, key=lambda entry: (-entry.job.priority, entry.seq))[:BITE]

    def parked_lines(self, most: int) -> tuple[tuple[str, str], ...]:
        return tuple(sorted({(entry.queue, entry.job.task) for entry in self._all_parked()})[:most])

    def _all_parked(self) -> Collection[MemoryEntry]:
        """Those that have left it since then are forgotten."""
        if self._parked:
            self._parked = {name: entry for name, entry in self._parked.items() if entry.parked}
        return self._parked.values()

    def lease(self, claim: ClaimTerms) -> list[Lease]:
        self._waiters.looked(claim.wants)
        self._forget_turns()
        return super().lease(claim)

    def take(self, queue: str, want: int) -> Iterator[MemoryEntry]:
        lines = self.lines.get(queue)
        if lines is None:
            return
        lines.promote(self.now_us)
        for priority in lines.priorities:
            line = lines.lines[priority]
            over: list[tuple[int, MemoryEntry]] = []
            while want > 0 and line:
                ticket, entry = line.popleft()
                if entry.ticket != ticket:
                    continue
                if self.goes(entry):
                    want -= 1
                    yield entry
                elif entry.state is State.READY:
                    over.append((ticket, entry))
            line.extendleft(reversed(over))

    def started(self, entry: MemoryEntry) -> None:
        entry.ticket += 1
        self._running[entry.job.id] = entry

    def stopped(self, entry: MemoryEntry) -> None:
        del self._running[entry.job.id]

    def changed(self, entry: MemoryEntry) -> None: ...

    def shelve(self, entry: MemoryEntry) -> None:
        entry.ticket += 1
        heapq.heappush(self._kept, (entry.keep_us or 0, entry.seq, entry))

    def forget(self, entry: MemoryEntry) -> None:
        entry.ticket += 1
        del self.entries[entry.job.id]
        self.lines[entry.queue].deleted += 1

    def move(self, entry: MemoryEntry, queue: str) -> None:
        self.lines[entry.queue].deleted += 1
        self.lines[queue].put += 1
        entry.queue = queue

    def waiting(self, queue: str) -> int:
        return sum(entry.queue == queue and entry.state is State.READY for entry in self.entries.values())

    def running_in(self, scope: Scope, name: str) -> int:
        return sum((scope, name) in entry.scopes() for entry in self._running.values())

    def last_number(self) -> int:
        return self._seq

    def of_queue(self, queue: str, most: int, upto: int) -> list[MemoryEntry]:  # noqa: ARG002  # all of them
        idle = (entry for entry in self.entries.values() if entry.state is not State.RUNNING)
        return [entry for entry in idle if entry.queue == queue and entry.seq <= upto]

    def close_queue(self, queue: str) -> None:
        if not any(entry.queue == queue for entry in self.entries.values()):
            self.lines.pop(queue, None)

    # --- names and rules -----------------------------------------------------------------

    def holder_of(self, key: str) -> str | None:
        return self._unique.get(key)

    def hold_key(self, key: str, job_id: str | None) -> None:
        if job_id is None:
            del self._unique[key]
        else:
            self._unique[key] = job_id

    def recall(self, kind: str, name: str) -> bytes | None:
        memo = self._memos.get((kind, name))
        return None if memo is None or memo[0] <= self.now_us else memo[1]

    def remember(self, kind: str, name: str, value: bytes, until_us: int) -> None:
        self._memos[kind, name] = until_us, value

    def rule(self, kind: RuleKind, scope: Scope, name: str) -> Rule | None:
        return self._rules.get((kind, scope, name))

    def rules(self, limit: int, after: Rule | None) -> list[Rule]:
        places = sorted(place for place, rule in self._rules.items() if not rule.is_over(self.now))
        if after is not None:
            places = [place for place in places if place > (after.kind, after.scope, after.name)]
        return [self._rules[place] for place in places[:limit]]

    def rules_over(self, limit: int) -> list[Rule]:
        return [rule for rule in self._rules.values() if rule.is_over(self.now)][:limit]

    def names_task_keys(self) -> bool:
        return self._on_task_keys[False] > 0

    def names_each_key(self) -> bool:
        return self._on_task_keys[True] > 0

    def prefixes(self) -> list[Rule]:
        return [rule for rule in self._prefixes.values() if not rule.is_over(self.now)]

    def full_us(self, scope: Scope, name: str) -> int:
        return self._full.get((scope, name), 0)

    def set_full(self, scope: Scope, name: str, full_us: int) -> None:
        self._full[scope, name] = full_us

    def await_token(self, scope: Scope, name: str, at_us: int) -> None:
        self._turns[scope, name] = at_us

    def _forget_turns(self) -> bool:
        """Those that have come; were there some?"""
        if (self.next_token_us() or self.now_us + 1) > self.now_us:
            return False
        self._turns = {place: at_us for place, at_us in self._turns.items() if at_us > self.now_us}
        return True

    def awaits_tokens(self) -> bool:
        return bool(self._turns)

    def next_token_us(self) -> int | None:
        return min(self._turns.values(), default=None)

    def follow_turns(self, after: str, limit: int) -> str | None:  # noqa: ARG002  # all of them
        self._turns.clear()  # until somebody looks
        self._waiters.wake()
        return None

    def set_rule(self, rule: Rule) -> None:
        if rule.scope is Scope.TASK_KEY and self.rule(rule.kind, rule.scope, rule.name) is None:
            self._on_task_keys[rule.kind is RuleKind.LIMIT] += 1
        if rule.prefix is not None:
            self._prefixes[rule.name] = rule
        self._rules[rule.kind, rule.scope, rule.name] = rule
        self.ruled = True
        self._waiters.wake()

    def remove_rule(self, rule: Rule) -> None:
        del self._rules[rule.kind, rule.scope, rule.name]
        if rule.prefix is not None:
            del self._prefixes[rule.name]
        if rule.scope is Scope.TASK_KEY:
            self._on_task_keys[rule.kind is RuleKind.LIMIT] -= 1
        self.ruled = bool(self._rules)
        self._waiters.wake()

    # --- batches -------------------------------------------------------------------------

    def batch_of(self, batch: str) -> MemoryBatch | None:
        return self._batches.get(batch)

    def create_batch(self, batch: Batch) -> MemoryBatch:
        self._seq += 1
        held = self._batches[batch.id] = MemoryBatch(batch, self._seq, self.now_us)
        return held

    def set_member(self, held: MemoryBatch, member: Member) -> None:
        held.members[member.id] = member

    def changed_batch(self, held: MemoryBatch) -> None: ...

    def forget_batch(self, held: MemoryBatch) -> None:
        del self._batches[held.batch.id]

    def waiting_members(self, held: MemoryBatch) -> tuple[list[MemoryEntry], bool]:
        return [entry for entry in self._live(held) if entry.state is State.READY], False

    def _live(self, held: MemoryBatch) -> list[MemoryEntry]:
        entries = [self.entries.get(name) for name, each in held.members.items() if not each.state.terminal]
        return [entry for entry in entries if entry is not None and entry.joined == held.number]

    # --- time ----------------------------------------------------------------------------

    def ending_last(self) -> MemoryEntry | None:
        return max(self._running.values(), key=lambda entry: entry.until_us, default=None)

    def ending_first(self, after: Place, limit: int) -> list[MemoryEntry]:
        running = ((entry.until_us, entry.seq, entry) for entry in self._running.values())
        return [entry for *_, entry in heapq.nsmallest(limit, (it for it in running if it[:2] > after))]

    def due_first(self, after: Place, limit: int) -> list[MemoryEntry]:
        waiting = (it for lines in self.lines.values() for it in lines.scheduled if it[3].ticket == it[2])
        return [entry for *_, entry in heapq.nsmallest(limit, (it for it in waiting if it[:2] > after))]

    def promote(self, limit: int) -> int:
        promoted = 0
        if self._forget_turns():
            self._waiters.wake()
        for name, lines in self.lines.items():
            if found := lines.promote(self.now_us, limit - promoted):
                promoted += found
                self._waiters.wake(name)
        return promoted

    def lost(self, limit: int) -> list[MemoryEntry]:
        over = [entry for entry in self._running.values() if entry.until_us <= self.now_us]
        return sorted(over, key=lambda entry: (entry.fence, entry.seq))[:limit]

    def expired(self, limit: int) -> list[MemoryEntry]:
        return [
            entry
            for entry in self.entries.values()
            if entry.state is State.READY and entry.expires_us is not None and entry.expires_us <= self.now_us
        ][:limit]

    def old_batches(self, limit: int) -> list[MemoryBatch]:
        over = (held for held in self._batches.values() if (held.over_us or self.now_us + 1) <= self.now_us)
        return list(over)[:limit]

    def forget_old(self, limit: int) -> int:
        removed = 0
        while self._kept and self._kept[0][0] <= self.now_us and removed < limit:
            _, _, entry = heapq.heappop(self._kept)
            if (
                self.entries.get(entry.job.id) is entry
                and entry.keep_us is not None
                and entry.keep_us <= self.now_us
            ):
                self.forget(entry)
                removed += 1
        self._full = {place: full_us for place, full_us in self._full.items() if full_us > self.now_us}
        self._memos = {name: memo for name, memo in self._memos.items() if memo[0] > self.now_us}
        return removed + self._trim_dead(limit) + self.records().expire(limit)

    def _trim_dead(self, limit: int) -> int:
        if self.retention.dead_max is None:
            return 0
        dead: defaultdict[str, list[MemoryEntry]] = defaultdict(list)
        for entry in self.entries.values():
            if entry.state is State.DEAD:
                dead[entry.queue].append(entry)
        removed = 0
        for entries in dead.values():
            entries.sort(key=lambda entry: (entry.ended_us or 0, entry.seq))
            for entry in entries[: max(0, min(limit, len(entries) - self.retention.dead_max))]:
                self.forget(entry)
                removed += 1
        return removed

    def next_us(self) -> int | None:
        moments = [entry.until_us for entry in self._running.values()]
        moments += [due for lines in self.lines.values() if (due := lines.next_due()) is not None]
        moments += [to_us(rule.until) for rule in self._rules.values() if rule.until is not None]
        moments += self._turns.values()
        moments += [] if (record_us := self.records().next_us()) is None else [record_us]
        return min((moment for moment in moments if moment > self.now_us), default=None)

    # --- looks ---------------------------------------------------------------------------

    def queues(self, limit: int, after: str | None) -> dict[str, Counts]:
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for entry in self.entries.values():
            scheduled = entry.state is State.READY and entry.due_us > self.now_us
            where = "scheduled" if scheduled else "parked" if entry.parked else entry.state.value
            found[entry.queue][where] += 1
        names = sorted(name for name in self.lines if after is None or name > after)[:limit]
        return {name: self._counts(found[name], self.lines[name]) for name in names}

    def _counts(self, found: Counter[str], lines: WaitingLines) -> Counts:
        return Counts(
            ready=found["ready"],
            scheduled=found["scheduled"],
            parked=found["parked"],
            running=found["running"],
            done=found["done"],
            dead=found["dead"],
            cancelled=found["cancelled"],
            put=lines.put,
            deleted=lines.deleted,
        )

    def find(self, where: Filter, limit: int, after: int | None) -> Page:
        later = (entry for entry in self.entries.values() if after is None or entry.seq > after)
        matches = sorted(
            (entry for entry in later if entry.matches(where, self.now_us)), key=lambda entry: entry.seq
        )
        page = matches[:limit]
        more = page[-1].seq if page and len(matches) > limit else None
        return Page([entry.info() for entry in page], more)

    def position(self, entry: MemoryEntry) -> int:
        return next(
            n for n, other in enumerate(self.lines[entry.queue].line_at(self.now_us)) if other is entry
        )

    def batches(self, limit: int, after: str | None) -> list[MemoryBatch]:
        names = sorted(name for name in self._batches if after is None or name > after)
        return [self._batches[name] for name in names[:limit]]

    def status(self, held: MemoryBatch) -> BatchStatus:
        waiting, _ = self.waiting_members(held)
        retrying = sum(entry.has_run for entry in waiting)
        return held.status(enqueued=len(waiting) - retrying, retrying=retrying)

    def members(self, held: MemoryBatch, limit: int, after: int | None) -> list[Member]:
        live = {entry.job.id: entry.state for entry in self._live(held)}
        found = [
            Member(each.member, each.id, live[each.id]) if each.id in live else each
            for each in held.members.values()
            if after is None or each.member > after
        ]
        return sorted(found, key=lambda member: (member.member, member.id))[:limit]
