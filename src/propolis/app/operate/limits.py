"""`app.limits`: how many jobs of a key, a task or a queue run at once."""

from __future__ import annotations

from datetime import datetime
from typing import TypedDict, Unpack

from msgspec import Struct

from propolis.app.client.blocking import blocking
from propolis.app.client.client import Client
from propolis.app.operate.rules import author, end_of, named, place_of, rule_at
from propolis.core.duration import Duration
from propolis.core.envelope import check_options
from propolis.core.job import State
from propolis.core.protocols import BITE, Filter, Inspects, Limits, Rule, RuleKind, Scope
from propolis.errors import BadSetting

LOOKS = 4  # pages of a thousand jobs that are read to see what a limit does
SHOWN = 10  # ids of jobs in a sentence
_FIRST = Rule(RuleKind.LIMIT, Scope.KEY, "")  # before all limits, in the order of rules

Found = list[Rule]  # a method is called `list` below


class LimitTerms(TypedDict, total=False):
    """What is limited, if no key, and what is said about it."""

    task: str | None
    queue: str | None
    by: str | None
    why: str | None
    until: datetime | Duration | None


class LimitUse(Struct, frozen=True):
    """A limit, the jobs that run under it, and how many that are due wait.

    `more`: there are more jobs than were looked at, so that more of them may run and wait.
    """

    rule: Rule
    running: tuple[str, ...] = ()
    waiting: int = 0
    more: bool = False

    @property
    def has_room(self) -> bool:
        """Would it let another one run, as far as was seen?"""
        return len(self.running) < self.rule.n and not self.more

    def __str__(self) -> str:
        """Such as: key 'tenant:7' runs 3 of 3: jobs a, b, c."""
        run = f"{named(self.rule)} runs {len(self.running)}{' or more' if self.more else ''} of {self.rule.n}"
        if not self.running:
            return run
        rest = len(self.running) - SHOWN
        ids = ", ".join(self.running[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
        return f"{run}: {'job' if len(self.running) == 1 else 'jobs'} {ids}"


class LimitSettings:
    """`app.limits`: how many jobs of a key, a task or a queue run at once."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def aput(self, key: str | None = None, *, at_once: int, **terms: Unpack[LimitTerms]) -> bool:
        """Let at most so many jobs of a key run at once, or of a task=, or of a queue=.

        `by` says who (by default the actor of the app) and `why` why.  From `until` on it does not hold any
        more: a time, or a duration from now.  False if there was such a limit: then it says all that anew.
        What runs already goes on, and counts.
        """
        check_options("limits.put()", LimitTerms, terms)
        scope, name = _place(key, terms.get("task"), terms.get("queue"))
        if scope is Scope.KEY and name.endswith("*"):
            raise BadSetting(
                f"a limit on {name!r} would be for the key of exactly this name: keys that end with '*' are "
                f"reserved for prefixes, which cannot be limited yet"
            )
        ends, lasts = end_of(terms.get("until"))
        by = author(terms.get("by"), self._client.actor)
        n, why = checked_at_once(at_once), terms.get("why") or ""
        rule = Rule(RuleKind.LIMIT, scope, name, n, by=by, why=why, until=ends, lasts=lasts)
        return await (await self._client.piece(Limits)).add_rule(rule)

    async def aget(
        self, key: str | None = None, *, task: str | None = None, queue: str | None = None
    ) -> LimitUse | None:
        """The limit of exactly this key, task or queue, and what it does now; None if there is none.

        It reads a bite of the jobs that run and wait, and says so where there are more.
        """
        scope, name = _place(key, task, queue)
        engine = await self._client.piece(Limits)
        rule = await rule_at(engine, RuleKind.LIMIT, scope, name)
        return None if rule is None else await use_of(await self._client.piece(Inspects), rule, waiting=True)

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


def checked_at_once(n: object) -> int:
    """`BadSetting` for what is no number of jobs that may run."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise BadSetting(f"{n!r} jobs at once?  Give a whole number from 1; to let none run, pause them")
    return n


async def use_of(engine: Inspects, rule: Rule, *, waiting: bool = False) -> LimitUse:
    """What a limit does now, as far as some pages of jobs show it."""
    running, more_run = await _some(engine, rule, State.RUNNING)
    due, more_wait = await _some(engine, rule, State.READY) if waiting else ((), False)
    return LimitUse(rule, running, len(due), more_run or more_wait)


async def _some(engine: Inspects, rule: Rule, state: State) -> tuple[tuple[str, ...], bool]:
    """The ids of jobs under a limit that run, or are due and wait; and whether there are more."""
    where = Filter(
        queue=rule.name if rule.scope is Scope.QUEUE else None,
        task=rule.name if rule.scope is Scope.TASK else None,
        state=state,
        scheduled=False if state is State.READY else None,
    )
    found: tuple[str, ...] = ()
    after: int | None = None
    for _ in range(LOOKS):
        page = await engine.find(where, limit=BITE, after=after)
        found += tuple(info.id for info in page.jobs if rule.scope is not Scope.KEY or info.key == rule.name)
        if (after := page.after) is None:
            return found, False
    return found, True


def _place(key: str | None, task: str | None, queue: str | None) -> tuple[Scope, str]:
    if [key, task, queue].count(None) != 2:
        raise BadSetting("what is limited?  Give a key, or a task=, or a queue=")
    return place_of(queue, task, key)
