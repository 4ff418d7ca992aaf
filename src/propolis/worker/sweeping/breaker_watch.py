"""Breakers in a worker: runs are counted here, brought together in records, and judged there by all.

A run costs an addition.  Whoever has runs of a task with a breaker reads its record every few seconds, and
writes only while there are failures.  An open breaker is a pause with an end: no worker is needed to end it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
from msgspec import Struct

from propolis.app.context import Job
from propolis.app.operate.breakers import (
    BY,
    KIND,
    Breaker,
    BreakerChange,
    BreakerPlace,
    BreakerState,
    CountedRuns,
    Runs,
    has_enough,
    has_failed,
    is_complete,
    opened,
    place_of,
    read_counted,
    why_open,
    with_runs,
)
from propolis.app.operate.rules import rule_at
from propolis.app.task import Task
from propolis.core.job import Outcome
from propolis.core.protocols import Engine, Limits, Rates, Records, Rule, RuleKind, Rules, Scope
from propolis.core.records import Change, Record, Swap
from propolis.worker.settings import Monotonic

log = logging.getLogger("propolis.worker")

MAX_PLACES = 1000  # whose runs are counted at once, and which one call reads
AT_MOST_EVERY = 1.0  # seconds between two looks at one of them

ONE_TRY_EVERY = timedelta(seconds=1)  # at most: what fails at once is not tried by the hundred until a look
HOOK_WITHIN = 10.0  # seconds; no look is made meanwhile


class Tally(Struct):
    """The runs of one place in this worker that no record has yet."""

    breaker: Breaker
    done: int = 0  # since the last beat, as `failed`
    failed: int = 0
    waiting: list[tuple[float, int, int]] = []  # when they were gathered, done and failed
    looked: float = 0.0
    in_doubt: bool = False  # it is to open, unless others bring runs that went well

    def gather(self, now: float) -> None:
        if self.done or self.failed:
            self.waiting.append((now, self.done, self.failed))
            self.done = self.failed = 0
        oldest = now - self.breaker.within.total_seconds()
        while self.waiting and self.waiting[0][0] <= oldest:
            del self.waiting[0]

    @property
    def has_failures(self) -> bool:
        return any(failed for _, _, failed in self.waiting)

    @property
    def next_look(self) -> float:
        return self.looked + (
            AT_MOST_EVERY if self.in_doubt or self.has_failures else self.breaker.looks_every
        )

    def runs(self, now: float, engines_now: datetime) -> list[Runs]:
        return [
            Runs(engines_now - timedelta(seconds=now - at), done, failed) for at, done, failed in self.waiting
        ]


class Found(Struct, frozen=True):
    """What is stored of a place, when it was read."""

    place: BreakerPlace
    breaker: Breaker
    version: int
    counted: CountedRuns | None
    now: datetime


class BreakerWatch:
    """Counts the runs of one worker, and opens and closes breakers with the others."""

    def __init__(
        self, engine: Engine, hooks: Sequence[Callable[[BreakerChange], Any]], *, clock: Monotonic
    ) -> None:
        self._engine = engine
        self._hooks = hooks
        self._clock = clock
        self._tallies: dict[BreakerPlace, Tally] = {}

    def count(self, task: Task[..., object], job: Job, outcome: Outcome | None) -> None:
        """One run has ended; nothing is asked or written here."""
        breaker = task.options.breaker
        if breaker is None or (failed := has_failed(outcome)) is None:
            return
        place = place_of(breaker, task.name, job.envelope.key)
        if place is None:
            return
        tally = self._tallies.get(place)
        if tally is None:
            if len(self._tallies) >= MAX_PLACES:
                del self._tallies[next(iter(self._tallies))]  # bounded memory before every key
            tally = self._tallies[place] = Tally(breaker)
        if failed:
            tally.failed += 1
        else:
            tally.done += 1

    @property
    def next_moment(self) -> float | None:
        """When it is to beat next, for whoever moves the clock: None if there is nothing to do."""
        return min((tally.next_look for tally in self._tallies.values()), default=None)

    async def beat(self) -> None:
        """About once a second.  What goes wrong here is logged, and tried again."""
        now = self._clock()
        for place, tally in list(self._tallies.items()):
            tally.gather(now)
            if not (tally.waiting or tally.in_doubt):
                del self._tallies[place]
        due = {place: tally for place, tally in self._tallies.items() if now >= tally.next_look}
        if not due:
            return
        for tally in due.values():
            tally.looked = now
        try:
            for found in await self._read(due):
                if found.place in self._tallies:  # what fails is the last one the next time
                    self._tallies[found.place] = self._tallies.pop(found.place)
                await self._see_to(found, due[found.place], now)
        except Exception as error:
            log.warning("the runs that breakers count cannot be brought together yet: %s", error)

    async def _read(self, due: dict[BreakerPlace, Tally]) -> list[Found]:
        assert isinstance(self._engine, Records)
        read = await self._engine.records(KIND, names=[place.record for place in due], limit=MAX_PLACES)
        stored = {record.name: record for record in read.records}
        return [_found(place, tally, stored.get(place.record), read.now) for place, tally in due.items()]

    async def _see_to(self, found: Found, tally: Tally, now: float) -> None:
        runs, counted = tally.runs(now, found.now), found.counted
        tally.in_doubt = False
        if counted is not None and counted.open_until is not None:
            made = await self._try_again(found, counted, counted.open_until, runs)
        elif counted is not None or tally.has_failures:
            counted = with_runs(counted, found.place, found.breaker, runs, found.now)
            tally.in_doubt = has_enough(counted, found.breaker)
            made = await self._bring(found, counted)
        else:
            return  # all is well: they wait, in case that others have failures
        if made:
            tally.waiting = []

    async def _bring(self, found: Found, counted: CountedRuns) -> bool:
        if not counted.failed:  # for long enough: nobody has to write any more
            return await self._swap(found, None, None)
        if has_enough(counted, found.breaker) and is_complete(counted, found.breaker, found.now):
            return await self._open(found, counted)
        return await self._swap(found, counted, 2 * found.breaker.within)

    async def _try_again(self, found: Found, counted: CountedRuns, until: datetime, runs: list[Runs]) -> bool:
        """While nothing begins, what ends says nothing new; after that the first one that ends decides."""
        later = [each for each in runs if each.at > until]
        if any(each.failed for each in later):
            return await self._open(found, counted)
        return await self._close(found) if later else True

    # --- open and close --------------------------------------------------------------------

    async def _open(self, found: Found, counted: CountedRuns) -> bool:
        """The rules first: whoever dies in between leaves a pause that ends by itself."""
        place, breaker, why = found.place, found.breaker, why_open(counted, found.breaker)
        if place.key is None and _limits_tasks(self._engine):
            every, lasts = _tries_every(self._engine), 2 * breaker.pause
            await self._set(Rule(RuleKind.LIMIT, *place.paused, 1, by=BY, why=why, lasts=lasts, every=every))
        await self._set(Rule(RuleKind.PAUSE, *place.paused, by=BY, why=why, lasts=breaker.pause))
        after = opened(counted, breaker, found.now)
        if not await self._swap(found, after, 2 * breaker.pause):
            return False
        log.error("the breaker of %s is open for %s: %s", place, breaker.pause, why)
        await self._call_hooks(
            BreakerChange(
                *place, BreakerState.OPEN, failed=counted.failed, runs=counted.runs, until=after.open_until
            )
        )
        return True

    async def _close(self, found: Found) -> bool:
        engine, (scope, name) = self._engine, found.place.paused
        if found.place.key is None and await self._is_ours(RuleKind.LIMIT, scope, name):
            await engine.remove_rule(RuleKind.LIMIT, scope, name)
        if not await self._swap(found, None, None):
            return False
        log.warning("the breaker of %s is closed: what tried again has succeeded", found.place)
        await self._call_hooks(BreakerChange(*found.place, BreakerState.CLOSED))
        return True

    async def _set(self, rule: Rule) -> None:
        """Unless somebody else has set one there, which stays as it is."""
        if await self._is_free(rule):
            await self._engine.add_rule(rule)

    async def _is_free(self, rule: Rule) -> bool:
        assert isinstance(self._engine, Rules)
        there = await rule_at(self._engine, rule.kind, rule.scope, rule.name)
        return there is None or there.by == BY

    async def _is_ours(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        there = await rule_at(self._engine, kind, scope, name)
        return there is not None and there.by == BY

    async def _call_hooks(self, change: BreakerChange) -> None:
        for hook in self._hooks:
            try:
                async with asyncio.timeout(HOOK_WITHIN):
                    answer = hook(change)
                    if inspect.isawaitable(answer):
                        await answer
            except Exception:
                log.exception("the hook %s for breaker raised", getattr(hook, "__qualname__", hook))

    async def _swap(self, found: Found, counted: CountedRuns | None, expires_in: timedelta | None) -> bool:
        """False: another worker has changed it meanwhile, and the next look begins anew."""
        assert isinstance(self._engine, Records)
        value = None if counted is None else msgspec.json.encode(counted)
        name, version = found.place.record, found.version
        change = Change(kind=KIND, name=name, value=value, expected=version, expires_in=expires_in)
        [answer] = await self._engine.swap([Swap(changes=(change,))])
        return answer.refusal is None


def _found(place: BreakerPlace, tally: Tally, record: Record | None, now: datetime) -> Found:
    if record is None:
        return Found(place, tally.breaker, 0, None, now)
    counted = read_counted(record)
    until = None if counted is None else counted.open_until
    if until is not None and now >= until + tally.breaker.pause:  # nobody has tried: it is closed
        counted = None
    return Found(place, tally.breaker, record.version, counted, now)


def _tries_every(engine: object) -> timedelta | None:
    return ONE_TRY_EVERY if isinstance(engine, Rates) else None


def _limits_tasks(engine: object) -> bool:
    return isinstance(engine, Limits) and Scope.TASK in engine.limits
