"""`app.queues`: how full queues are, and what may run."""

from __future__ import annotations

from datetime import datetime
from typing import TypedDict, Unpack

from propolis.app.client.blocking import blocking
from propolis.app.client.client import Client
from propolis.app.operate.rules import (
    RuleState,
    author,
    end_of,
    place_of,
    rules_about,
    state_under,
)
from propolis.core import wire
from propolis.core.duration import Duration
from propolis.core.envelope import check_options
from propolis.core.protocols import Counts, Inspects, Operates, Rule, RuleKind, Rules, Scope
from propolis.errors import BadSetting


class CapTerms(TypedDict, total=False):
    """What is said about a rule."""

    by: str | None
    why: str | None
    until: datetime | Duration | None


class HoldTerms(CapTerms, total=False):
    """The same, and what is held back, if no queue."""

    task: str | None
    key: str | None


class Queues:
    """`app.queues`: how full they are, and what may run."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def acounts(self, *, limit: int = 1000, after: str | None = None) -> dict[str, Counts]:
        """Of so many queues, in the order of their names; `after` is the last one of the page before."""
        return await (await self._client.piece(Inspects)).queues(limit=limit, after=after)

    async def arules(self, *, limit: int = 1000, after: Rule | None = None) -> list[Rule]:
        return await (await self._client.piece(Rules)).rules(limit=limit, after=after)

    async def apause(self, name: str | None = None, **terms: Unpack[HoldTerms]) -> bool:
        """Start nothing more of a queue, or of a task=, a key= or both; what runs finishes.

        `by` says who (by default the actor of the app) and `why` why.  From `until` on it does not hold any
        more: a time, or a duration from now.  False if it was paused already: then it says all that anew.
        """
        return await self._hold(RuleKind.PAUSE, name, terms)

    async def aresume(
        self, name: str | None = None, *, task: str | None = None, key: str | None = None
    ) -> bool:
        """Undo pause.  False if it was not paused: of many that resume at once, one hears True."""
        return await self._let_go(RuleKind.PAUSE, name, task, key)

    async def ablock(self, name: str | None = None, **terms: Unpack[HoldTerms]) -> bool:
        """The same as pause, for administrators: independent of it."""
        return await self._hold(RuleKind.BLOCK, name, terms)

    async def aunblock(
        self, name: str | None = None, *, task: str | None = None, key: str | None = None
    ) -> bool:
        return await self._let_go(RuleKind.BLOCK, name, task, key)

    async def acap(self, name: str, jobs: int, **terms: Unpack[CapTerms]) -> bool:
        """Refuse puts (`QueueFull`) that would make more jobs than this wait in a queue.

        Retries, emissions, callbacks and schedules are not refused.  `by`, `why`, `until` and the answer are
        as those of `apause`.
        """
        check_options("queues.cap()", CapTerms, terms)
        _check_cap(jobs)
        return await self._add(RuleKind.CAP, place_of(name, None, None), terms, n=jobs)

    async def auncap(self, name: str) -> bool:
        """Let a queue hold any number again.  False if it had no cap."""
        return await self._let_go(RuleKind.CAP, name, None, None)

    async def astate(
        self, name: str | None = None, *, task: str | None = None, key: str | None = None
    ) -> RuleState:
        """What the rules make of jobs of this queue, this task and this key, as far as they are given.

        Blocked before paused before limited before open.
        """
        engine = await self._client.piece(Rules)
        return state_under(await rules_about(engine, name, task, key))

    async def adrop(self, name: str) -> int:
        """Forget a queue and all its jobs but those that run; returns how many went at once.

        Where there are more, no worker sees them any more, and sweeps remove them.
        """
        wire.check_queue(name)
        return await (await self._client.piece(Operates)).drop(name)

    async def _hold(self, kind: RuleKind, name: str | None, terms: HoldTerms) -> bool:
        return await self._add(kind, place_of(name, terms.get("task"), terms.get("key")), terms)

    async def _add(
        self, kind: RuleKind, place: tuple[Scope, str], terms: HoldTerms | CapTerms, n: int = 0
    ) -> bool:
        by, why = author(terms.get("by"), self._client.actor), terms.get("why") or ""
        ends, lasts = end_of(terms.get("until"))
        rule = Rule(kind, *place, n, by=by, why=why, until=ends, lasts=lasts)
        return await (await self._client.piece(Rules)).add_rule(rule)

    async def _let_go(self, kind: RuleKind, name: str | None, task: str | None, key: str | None) -> bool:
        scope, name = place_of(name, task, key)
        return await (await self._client.piece(Rules)).remove_rule(kind, scope, name)

    counts = blocking(acounts)
    rules = blocking(arules)
    state = blocking(astate)
    pause = blocking(apause)
    resume = blocking(aresume)
    block = blocking(ablock)
    unblock = blocking(aunblock)
    cap = blocking(acap)
    uncap = blocking(auncap)
    drop = blocking(adrop)


def _check_cap(jobs: object) -> None:
    if isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 0:
        raise BadSetting(f"a cap of {jobs!r} waiting jobs?  Give a whole number, 0 or more")
