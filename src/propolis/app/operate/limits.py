"""`app.limits`: how many jobs of a key, a task or a queue run at once, and how often they start."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TypedDict, Unpack

from msgspec import Struct

from propolis.app.client.blocking import blocking
from propolis.app.client.client import Client
from propolis.app.operate.rules import author, end_of, limit_of_key, named, place_of, rule_at
from propolis.core.duration import Duration
from propolis.core.envelope import check_options
from propolis.core.job import State
from propolis.core.limits import every_of, rate_text
from propolis.core.protocols import (
    BITE,
    EACH,
    UNBOUNDED,
    Filter,
    Inspects,
    Limits,
    Rates,
    Rule,
    RuleKind,
    Scope,
    Tokens,
    task_and_key,
)
from propolis.errors import BadSetting

LOOKS = 4  # pages of a thousand jobs that are read to see what a limit does
SHOWN = 10  # ids of jobs in a sentence
_FIRST = Rule(RuleKind.LIMIT, Scope.KEY, "")  # before all limits, in the order of rules

Found = list[Rule]  # a method is called `list` below


class LimitTerms(TypedDict, total=False):
    """What is limited, if no key; how often its jobs start; and what is said about it."""

    task: str | None
    queue: str | None
    rate: str | None
    burst: int | None
    by: str | None
    why: str | None
    until: datetime | Duration | None


class LimitUse(Struct, frozen=True):
    """A limit, the jobs that run under it, and how many that are due wait.

    `key` is the one of which that is, where the limit is for many; None: of all of them.  `tokens` is what is
    left of its rate.  `more`: there are more jobs than were looked at, so that more of them may run and wait.
    """

    rule: Rule
    running: tuple[str, ...] = ()
    waiting: int = 0
    more: bool = False
    key: str | None = None
    tokens: Tokens | None = None

    @property
    def has_room(self) -> bool:
        """Would it let another one run, as far as was seen?"""
        has_token = self.tokens is None or self.tokens.free > 0
        return len(self.running) < self.rule.n and not self.more and has_token

    def __str__(self) -> str:
        """Such as: key 'tenant:7' runs 3 of 3: jobs a, b, c."""
        parts = [self._number()] if self.rule.n != UNBOUNDED else []
        return f"{self._name()} " + " and ".join(parts + self._rate())

    def _name(self) -> str:
        if self.key is None or self.key == self.rule.name:
            return named(self.rule)
        return f"key {self.key!r}, by the limit on {named(self.rule)},"

    def _number(self) -> str:
        run = f"runs {len(self.running)}{' or more' if self.more else ''} of {self.rule.n}"
        if not self.running:
            return run
        rest = len(self.running) - SHOWN
        ids = ", ".join(self.running[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
        return f"{run}: {'job' if len(self.running) == 1 else 'jobs'} {ids}"

    def _rate(self) -> list[str]:
        if self.rule.every is None or self.tokens is None:
            return []
        rate = rate_text(self.rule.every)
        if self.tokens.free > 0:
            return [f"may start {self.tokens.free} at once at its rate of {rate}"]
        return [f"has used its rate of {rate}: next turn in {soon(self.tokens.next_in)}"]


class LimitSettings:
    """`app.limits`: how many jobs of a key, a task or a queue run at once, and how often they start."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def aput(
        self, key: str | None = None, *, at_once: int | None = None, **terms: Unpack[LimitTerms]
    ) -> bool:
        """Let at most so many jobs of a key run at once, or of a task=, or of a queue=; or start at a `rate`.

        A rate is such as "100/min", and so many starts as `burst` says may be saved up.  A key that ends with
        `*` is each key that begins so; "*" beside a task is each key of its jobs.  `by` says who (by default
        the actor of the app) and `why` why.  From `until` on it does not hold any more: a time, or a duration
        from now.  False if there was such a limit: then it says all that anew.  What runs already goes on,
        and counts.
        """
        check_options("limits.put()", LimitTerms, terms)
        scope, name = _place(key, terms.get("task"), terms.get("queue"))
        ends, lasts = end_of(terms.get("until"))
        by = author(terms.get("by"), self._client.actor)
        n, every, burst = checked_terms(at_once, terms.get("rate"), terms.get("burst"))
        why = terms.get("why") or ""
        rule = Rule(
            RuleKind.LIMIT, scope, name, n, by=by, why=why, until=ends, lasts=lasts, every=every, burst=burst
        )
        needs_rates = every is not None or name.endswith(EACH)
        return await (await self._client.piece(Rates if needs_rates else Limits)).add_rule(rule)

    async def aget(
        self, key: str | None = None, *, task: str | None = None, queue: str | None = None
    ) -> LimitUse | None:
        """The limit that holds for this key, task or queue, and what it does now; None if there is none.

        For a key that is the one of exactly it, else of its longest prefix; beside a task, else the one for
        each key of it.  A key that ends with `*` is that prefix.  It reads a bite of the jobs that run and
        wait, and says so where there are more.
        """
        engine = await self._client.piece(Limits)
        if key is not None and not key.endswith(EACH):
            place_of(queue, task, key)
            rule = await limit_of_key(engine, key, task)
        else:
            rule = await rule_at(engine, RuleKind.LIMIT, *_place(key, task, queue))
        if rule is None:
            return None
        return await use_of(await self._client.piece(Inspects), rule, key, waiting=True)

    async def alist(self, *, limit: int = 1000, after: Rule | None = None) -> Found:
        """So many, those of keys first, in the order of names; `after` is the last one of the page before."""
        page = await (await self._client.piece(Limits)).rules(limit=limit, after=after or _FIRST)
        return [rule for rule in page if rule.kind is RuleKind.LIMIT]

    async def aremove(
        self, key: str | None = None, *, task: str | None = None, queue: str | None = None
    ) -> bool:
        """False if there was none.  What waited runs in its old order."""
        place = _place(key, task, queue)
        return await (await self._client.piece(Limits)).remove_rule(RuleKind.LIMIT, *place)

    put = blocking(aput)
    get = blocking(aget)
    remove = blocking(aremove)
    list = blocking(alist)


def soon(span: timedelta) -> str:
    """Such as 0.4 s, 12.5 min, 2 h."""
    units = (("d", timedelta(days=1)), ("h", timedelta(hours=1)), ("min", timedelta(minutes=1)))
    name, unit = next((each for each in units if span >= each[1]), ("s", timedelta(seconds=1)))
    return f"{span / unit:.3g} {name}"


def checked_terms(
    at_once: int | None, rate: str | None, burst: int | None
) -> tuple[int, timedelta | None, int]:
    """How many, how often, and how many of that may be saved up; `BadSetting` where that limits nothing."""
    if at_once is None and rate is None:
        raise BadSetting('what is the limit?  Give at_once=, or a rate= such as "100/min", or both')
    if burst is not None and rate is None:
        raise BadSetting(f"a burst of {burst!r} of which rate?  Give rate= as well")
    n = UNBOUNDED if at_once is None else checked_at_once(at_once)
    if burst is not None and (isinstance(burst, bool) or not isinstance(burst, int)):
        raise BadSetting(f"a burst of {burst!r}?  Give a whole number from 1")
    return n, None if rate is None else every_of(rate), 1 if burst is None else burst


def checked_at_once(n: object) -> int:
    """`BadSetting` for what is no number of jobs that may run."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise BadSetting(f"{n!r} jobs at once?  Give a whole number from 1; to let none run, pause them")
    return n


async def use_of(engine: Inspects, rule: Rule, key: str | None = None, *, waiting: bool = False) -> LimitUse:
    """What a limit does now, for a key where it is for many, as far as some pages of jobs show it."""
    of_key = key if rule.scope in (Scope.KEY, Scope.TASK_KEY) and key and not key.endswith(EACH) else None
    running, more_run = await _some(engine, rule, of_key, State.RUNNING)
    due, more_wait = await _some(engine, rule, of_key, State.READY) if waiting else ((), False)
    tokens: Tokens | None = None
    name = of_key or (None if rule.name.endswith(EACH) else rule.name)
    if rule.every is not None and name is not None and isinstance(engine, Rates):
        tokens = await engine.tokens(rule, name)
    return LimitUse(rule, running, len(due), more_run or more_wait, of_key, tokens)


async def _some(engine: Inspects, rule: Rule, key: str | None, state: State) -> tuple[tuple[str, ...], bool]:
    """The ids of jobs under a limit that run, or are due and wait; and whether there are more."""
    each_of = task_and_key(rule.name)[0] if rule.scope is Scope.TASK_KEY and key is None else None
    where = Filter(
        queue=rule.name if rule.scope is Scope.QUEUE else None,
        task=rule.name if rule.scope is Scope.TASK else each_of,
        state=state,
        scheduled=False if state is State.READY else None,
    )
    found: tuple[str, ...] = ()
    after: int | None = None
    for _ in range(LOOKS):
        page = await engine.find(where, limit=BITE, after=after)
        found += tuple(info.id for info in page.jobs if _counts(rule, key, info.key))
        if (after := page.after) is None:
            return found, False
    return found, True


def _counts(rule: Rule, key: str | None, of_job: str | None) -> bool:
    """Is it for jobs of that key, as far as their keys go?"""
    if rule.scope not in (Scope.KEY, Scope.TASK_KEY):
        return True
    if key is not None or of_job is None:
        return key == of_job and key is not None
    return of_job.startswith(rule.prefix) if rule.prefix is not None else rule.scope is Scope.TASK_KEY


def _place(key: str | None, task: str | None, queue: str | None) -> tuple[Scope, str]:
    is_each_key = key == EACH and task is not None and queue is None
    if not is_each_key and [key, task, queue].count(None) != 2:
        raise BadSetting(
            'what is limited?  Give a key, or a task=, or a queue=; or "*" and a task=, for each key of it'
        )
    if task is not None and task.endswith(EACH):
        raise BadSetting(
            f"tasks whose names begin with {task[:-1]!r}?  Name each task: only keys have prefixes"
        )
    return place_of(queue, task, key)
