"""Limits as code declares them, `@app.task(limit=limit(3, rate="100/min"))`, and how engines get them.

A worker that starts brings them to its engine.  What somebody has put at run time stands above them; but not
what a breaker has, which would leave nothing behind as it closes.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Protocol

from msgspec import Struct

from propolis.app.operate import breakers
from propolis.app.operate.limits import checked_terms
from propolis.app.operate.rules import rule_at
from propolis.core.protocols import (
    EACH,
    UNBOUNDED,
    Core,
    Limits,
    Rates,
    Rule,
    RuleKind,
    Scope,
    task_key,
)

BY = "code"  # who sets these rules, and the only one whose rules they replace
WHY = "declared by the task"
_PAGE = 1000


class Limit(Struct, frozen=True):
    """How many jobs run at once, and how often one starts."""

    n: int = UNBOUNDED
    every: timedelta | None = None
    burst: int = 1


def limit(at_once: int | None = None, *, rate: str | None = None, burst: int | None = None) -> Limit:
    """`@app.task(key="tenant:{tenant}", limit=limit(3, rate="100/min", burst=20))`.

    At most so many jobs run at once, and so many start in a time ("10/s", "100/min", "5/2h"); `burst` starts
    may be saved up.  For each key of a task that makes keys, else for the task as a whole.
    """
    made = Limit(*checked_terms(at_once, rate, burst))
    _rule_of("x", made, each_key=False)  # whose checks are those of the engines
    return made


class HasLimit(Protocol):
    """A task, as far as its limit goes."""

    @property
    def name(self) -> str: ...

    @property
    def declared_limit(self) -> Limit | None: ...

    @property
    def makes_keys(self) -> bool: ...


def needed_for(task: HasLimit) -> dict[type, str]:
    """The piece of the contract without which an engine cannot keep it."""
    made = task.declared_limit
    if made is None:
        return {}
    if made.every is None and not task.makes_keys:
        return {Limits: f"to limit {task.name}"}
    what = f"for each key of {task.name}" if made.every is None else f"for the rate of {task.name}"
    return {Rates: what}


async def sync(engine: Core, tasks: Iterable[HasLimit]) -> None:
    """Bring the rules of the code to what it declares; one call where they are so already.

    What somebody else has put in their places stays.  Of tasks that this code does not know nothing is
    changed: another version of it may, in the middle of a deployment.
    """
    known = list(tasks)
    if not isinstance(engine, Limits):
        return
    there = await _of_tasks(engine, known)
    for task in known:
        made = task.declared_limit
        wanted = None if made is None else _rule_of(task.name, made, each_key=task.makes_keys)
        for place in _places(task.name):
            await _bring(engine, place, there.get(place), wanted)


async def _bring(engine: Limits, place: tuple[Scope, str], old: Rule | None, wanted: Rule | None) -> None:
    if old is not None and old.by not in (BY, breakers.BY):
        return
    if wanted is not None and (wanted.scope, wanted.name) == place:
        if old is None or old.by != BY or _terms(old) != _terms(wanted):
            await engine.add_rule(wanted)
    elif old is not None and old.by == BY:
        await engine.remove_rule(RuleKind.LIMIT, *place)


async def _of_tasks(engine: Limits, tasks: list[HasLimit]) -> dict[tuple[Scope, str], Rule]:
    """The limits of tasks, and of each key of a task; one by one where there are more than a page of them."""
    page = await engine.rules(limit=_PAGE, after=Rule(RuleKind.LIMIT, Scope.TASK, ""))
    found = {(rule.scope, rule.name): rule for rule in page if rule.kind is RuleKind.LIMIT}
    if len(page) == _PAGE and len(found) == _PAGE:
        for place in [place for task in tasks for place in _places(task.name) if place not in found]:
            if (rule := await rule_at(engine, RuleKind.LIMIT, *place)) is not None:
                found[place] = rule
    return found


def _places(task: str) -> list[tuple[Scope, str]]:
    return [(Scope.TASK, task), (Scope.TASK_KEY, task_key(task, EACH))]


def _rule_of(task: str, made: Limit, *, each_key: bool) -> Rule:
    scope, name = _places(task)[each_key]
    return Rule(RuleKind.LIMIT, scope, name, made.n, by=BY, why=WHY, every=made.every, burst=made.burst)


def _terms(rule: Rule) -> tuple[object, ...]:
    return rule.n, rule.every, rule.burst, rule.until
