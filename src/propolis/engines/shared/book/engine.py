"""The verbs of an engine whose steps are those of the book: each is one call of them, behind a lock."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from typing import Any, Unpack

import msgspec

from propolis.core import wire
from propolis.core.batch import Batch, BatchStatus
from propolis.core.clock import Clock, SystemClock, from_us, span_us, to_us
from propolis.core.envelope import Envelope
from propolis.core.job import JobInfo, Lease, Member, Outcome, State
from propolis.core.limits import rate_in, too_many_prefixes
from propolis.core.protocols import (
    KNOWN_FOR,
    LIMIT_SCOPES,
    MAX_PREFIXES,
    Counts,
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
from propolis.engines.shared import feeds_on_records
from propolis.engines.shared.book.steps import Steps
from propolis.engines.shared.feed_verbs import After, FeedVerbs, Pages
from propolis.engines.shared.from_exchange import FromExchange, claim_of


class BookEngine(FromExchange, FeedVerbs):
    """Everything but opening, closing, and the way to the steps."""

    limits = LIMIT_SCOPES

    def __init__(self, clock: Clock | None) -> None:
        self._clock = clock or SystemClock()

    @abstractmethod
    def _call(self) -> AbstractContextManager[Steps[Any, Any]]:
        """The steps, at the time of one call; nobody else takes some meanwhile.  `EngineClosed`."""

    # --- jobs ----------------------------------------------------------------------------

    async def put(self, jobs: Sequence[Envelope], *, token: str | None = None) -> list[Receipt]:
        bodies = wire.encode_all(jobs)
        with self._call() as steps:
            return steps.put(jobs, bodies, token)

    async def exchange(
        self, outcomes: Sequence[tuple[Lease, Outcome]], wants: Mapping[str, int], **terms: Unpack[LeaseTerms]
    ) -> Exchange:
        with self._call() as steps:
            return Exchange(steps.settle(outcomes), steps.lease(claim_of(wants, terms)))

    async def renew(self, leases: Sequence[Lease], *, span: timedelta) -> list[Renewal]:
        with self._call() as steps:
            return [steps.renew(lease, span) for lease in leases]

    async def note(self, notes: Sequence[Note]) -> list[Lease]:
        with self._call() as steps:
            return steps.note(notes)

    async def sweep(self, *, limit: int = 1000, by: str | None = None) -> Swept:  # noqa: ARG002  # nobody to share with
        with self._call() as steps:
            return steps.sweep(limit)

    # --- records -------------------------------------------------------------------------

    async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:
        check_swaps(swaps)
        bodies = [wire.encode_all(swap.puts) for swap in swaps]  # or nothing is done
        with self._call() as steps:
            known = None if token is None else steps.recall("swap", token)
            if known is not None:
                return msgspec.json.decode(known, type=list[Swapped])
            answers = [steps.swap(swap, each) for swap, each in zip(swaps, bodies, strict=True)]
            if token is not None:
                until_us = steps.now_us + span_us(KNOWN_FOR)
                steps.remember("swap", token, msgspec.json.encode(answers), until_us)
            return answers

    async def records(self, kind: str, **which: Unpack[ReadOptions]) -> Read:
        reading = check_read(kind, which)
        with self._call() as steps:
            return steps.records().read(kind, reading)

    async def append_entries(self, feed: str, entries: Sequence[bytes], bounds: Bounds) -> int | None:
        return await feeds_on_records.append(self, feed, entries, bounds)

    async def feed_pages(self, after: After, limit: int) -> Pages:
        return await feeds_on_records.pages(self, after, limit)

    # --- batches -------------------------------------------------------------------------

    async def put_batch(
        self, batch: Batch, jobs: Sequence[Envelope] = (), *, seal: bool = True, token: str | None = None
    ) -> list[Receipt]:
        bodies = wire.encode_all(jobs)
        with self._call() as steps:
            return steps.put(jobs, bodies, token, batch, seal=seal)

    async def seal(self, batch: str) -> bool:
        with self._call() as steps:
            return steps.seal(batch)

    async def batch(self, batch: str) -> BatchStatus | None:
        with self._call() as steps:
            held = steps.batch_of(batch)
            return None if held is None else steps.status(held)

    async def batches(self, *, limit: int = 100, after: str | None = None) -> list[BatchStatus]:
        with self._call() as steps:
            return [steps.status(held) for held in steps.batches(limit, after)]

    async def members(self, batch: str, *, limit: int = 1000, after: int | None = None) -> list[Member]:
        with self._call() as steps:
            held = steps.batch_of(batch)
            return [] if held is None else steps.members(held, limit, after)

    async def delete_batch(self, batch: str) -> bool:
        with self._call() as steps:
            return steps.delete_batch(batch)

    # --- what operators see --------------------------------------------------------------

    async def now(self) -> datetime:
        return from_us(self._clock.now_us())

    async def queues(self, *, limit: int = 1000, after: str | None = None) -> dict[str, Counts]:
        with self._call() as steps:
            return steps.queues(limit, after)

    async def get(self, job_id: str) -> JobInfo | None:
        with self._call() as steps:
            entry = steps.entry(job_id)
            return None if entry is None else entry.info()

    async def find(self, where: Filter, *, limit: int = 100, after: int | None = None) -> Page:
        with self._call() as steps:
            return steps.find(where, limit, after)

    async def position(self, job_id: str) -> int | None:
        with self._call() as steps:
            entry = steps.entry(job_id)
            if entry is None or entry.parked or entry.state is not State.READY:
                return None
            if entry.due_us > steps.now_us:
                return None
            return steps.position(entry)

    # --- what operators do ---------------------------------------------------------------

    async def cancel(self, job_ids: Sequence[str]) -> list[bool]:
        with self._call() as steps:
            return [steps.cancel(job_id) for job_id in job_ids]

    async def reschedule(self, job_id: str, due_at: datetime) -> bool:
        with self._call() as steps:
            return steps.reschedule(job_id, to_us(due_at))

    async def replay(self, job_ids: Sequence[str]) -> list[bool]:
        with self._call() as steps:
            return [steps.replay(job_id) for job_id in job_ids]

    async def delete(self, job_ids: Sequence[str]) -> list[bool]:
        with self._call() as steps:
            return [steps.delete(job_id) for job_id in job_ids]

    async def drop(self, queue: str) -> int:
        with self._call() as steps:
            return steps.drop(queue)

    async def add_rule(self, rule: Rule) -> bool:
        with self._call() as steps:
            others = {other.name for other in steps.prefixes()} - {rule.name}
            if rule.prefix is not None and len(others) >= MAX_PREFIXES:
                raise too_many_prefixes(rule.name)
            was_there = steps.ruling(rule.kind, rule.scope, rule.name) is not None
            steps.set_rule(rule.set_at(steps.now))
            return not was_there

    async def remove_rule(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        with self._call() as steps:
            rule = steps.rule(kind, scope, name)
            if rule is not None:
                steps.remove_rule(rule)
            return rule is not None and not rule.is_over(steps.now)

    async def tokens(self, rule: Rule, name: str) -> Tokens:
        scope = Scope.KEY if rule.scope is Scope.TASK_KEY else rule.scope
        with self._call() as steps:
            return steps.tokens(rate_in(rule), scope, name)

    async def rules(self, *, limit: int = 1000, after: Rule | None = None) -> list[Rule]:
        with self._call() as steps:
            return steps.rules(limit, after)
