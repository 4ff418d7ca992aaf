"""The rules of an engine, however many there are: what they are for, and what they say."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import cache

from msgspec.structs import force_setattr

from propolis.core import wire
from propolis.core.duration import Duration, duration
from propolis.core.limits import longest_prefix
from propolis.core.protocols import (
    EACH,
    MAX_BY,
    Rule,
    RuleKind,
    Rules,
    Scope,
    task_and_key,
    task_key,
)
from propolis.errors import BadSetting

_PAGE = 1000
_LAST = "\U0010ffff"
_LAST_SURROGATE, _LAST_BEFORE_SURROGATES = 0xDFFF, 0xD7FF  # what is between them stands alone in no text


class RuleState(StrEnum):
    """What all rules together make of a queue, a task or a key: the first of these that is true."""

    BLOCKED = "blocked"
    PAUSED = "paused"
    LIMITED = "limited"
    OPEN = "open"


_STATES = {
    RuleKind.BLOCK: RuleState.BLOCKED,
    RuleKind.PAUSE: RuleState.PAUSED,
    RuleKind.LIMIT: RuleState.LIMITED,
}
_STRENGTH = list(RuleState)


async def every_rule(engine: Rules) -> AsyncIterator[Rule]:
    """In the order of their kinds, scopes and names, page by page."""
    page = await engine.rules(limit=_PAGE)
    while page:
        for rule in page:
            yield rule
        page = await engine.rules(limit=_PAGE, after=page[-1]) if len(page) == _PAGE else []


async def rule_at(engine: Rules, kind: RuleKind, scope: Scope, name: str) -> Rule | None:
    """The one of this kind, scope and name, however many there are."""
    rule = await _first_from(engine, kind, scope, name)
    return rule if rule is not None and rule.name == name else None


async def _first_from(engine: Rules, kind: RuleKind, scope: Scope, name: str) -> Rule | None:
    """The first of this kind and scope whose name is this one, or comes after it."""
    last = Rule(kind, Scope.QUEUE, "")
    force_setattr(last, "scope", scope)
    force_setattr(last, "name", _just_before(name))  # a place where to begin, and no rule
    while page := await engine.rules(limit=1, after=last):
        [last] = page
        if (last.kind, last.scope) != (kind, scope):
            return None
        if last.name >= name:
            return last
    return None


async def limit_of_key(engine: Rules, key: str, task: str | None) -> Rule | None:
    """The limit that holds for a key, of jobs of a task: few calls, however many limits on keys there are."""
    found: list[Rule] = []
    first: Rule | None = None  # that is not before the names that were asked for
    for name in sorted({key, *(f"{key[:length]}{EACH}" for length in range(len(key) + 1))}):
        if first is None or first.name < name:
            first = await _first_from(engine, RuleKind.LIMIT, Scope.KEY, name)
        if first is None:
            break
        if first.name == name:
            found.append(first)
    if (held := _limit_among(found, key)) is not None or task is None:
        return held
    return await rule_at(engine, RuleKind.LIMIT, Scope.TASK_KEY, task_key(task, EACH))


def _limit_among(rules: Iterable[Rule], key: str) -> Rule | None:
    """Of limits on keys the one that holds for this key: that of exactly it, else of its longest prefix."""
    exact = [rule for rule in rules if rule.name == key and rule.prefix is None]
    prefixes = [rule for rule in rules if rule.prefix is not None]
    return exact[0] if exact else longest_prefix(prefixes, key)


def _just_before(name: str) -> str:
    """A name that comes before this one, with next to none between them: so a page begins there."""
    before = ord(name[-1]) - 1
    if before <= 0:
        return name[:-1]  # no name has a NUL
    if before == _LAST_SURROGATE:
        before = _LAST_BEFORE_SURROGATES
    return f"{name[:-1]}{chr(before)}{_LAST}"


async def rules_about(engine: Rules, queue: str | None, task: str | None, key: str | None) -> list[Rule]:
    """Those that leasing obeys for jobs of this queue, this task and this key, as far as they are given.

    Where there are many rules each of them is looked up: at most a dozen calls, however many there are.
    """
    page = await engine.rules(limit=_PAGE)
    if len(page) < _PAGE:
        return [*(rule for rule in page if applies(rule, queue, task, key)), *_of_key(page, task, key)]
    both = None if task is None or key is None else task_key(task, key)
    places = [(Scope.KEY, key), (Scope.QUEUE, queue), (Scope.TASK, task), (Scope.TASK_KEY, both)]
    found = [
        await rule_at(engine, kind, scope, name)
        for kind in sorted(_STATES)
        for scope, name in places
        if name is not None and (kind is not RuleKind.LIMIT or scope in (Scope.QUEUE, Scope.TASK))
    ]
    if key is not None:
        found.append(await limit_of_key(engine, key, task))
    return [rule for rule in found if rule is not None]


def _of_key(rules: list[Rule], task: str | None, key: str | None) -> list[Rule]:
    """The limit that holds for a key, where all rules are known."""
    limits = [rule for rule in rules if rule.kind is RuleKind.LIMIT]
    if key is None:
        return []
    if (held := _limit_among([rule for rule in limits if rule.scope is Scope.KEY], key)) is not None:
        return [held]
    each_key = None if task is None else task_key(task, EACH)
    return [rule for rule in limits if rule.scope is Scope.TASK_KEY and rule.name == each_key]


def place_of(name: str | None, task: str | None, key: str | None) -> tuple[Scope, str]:
    """What a rule is for: a queue, or a task, a key or both.  Under no other name there is ever a job."""
    if (name is None) == (task is None and key is None):
        raise BadSetting("what is it for?  Give a queue, or a task=, a key= or both")
    if name is not None:
        wire.check_queue(name)
        return Scope.QUEUE, name
    if task is not None:
        wire.check_task(task)
        wire.check_utf8("the name of a task", task)
    if key is None:
        return Scope.TASK, task or ""
    wire.check_text("key", key)
    wire.check_utf8("a key", key)
    return (Scope.KEY, key) if task is None else (Scope.TASK_KEY, task_key(task, key))


def applies(rule: Rule, queue: str | None, task: str | None, key: str | None) -> bool:
    """Whether leasing obeys it for jobs of this queue, this task and this key, as far as they are given.

    It is not asked of limits on keys, of which only one holds.
    """
    is_of_keys = rule.scope in (Scope.KEY, Scope.TASK_KEY)
    if rule.kind is RuleKind.CAP or (rule.kind is RuleKind.LIMIT and is_of_keys):
        return False
    match rule.scope:
        case Scope.QUEUE:
            return rule.name == queue
        case Scope.TASK:
            return rule.name == task
        case Scope.KEY:
            return rule.name == key
        case Scope.TASK_KEY:
            return None not in (task, key) and task_and_key(rule.name) == (task, key)


def state_under(rules: Iterable[Rule]) -> RuleState:
    """The one that is shown: blocked before paused before limited before open."""
    return min((state_of(rule) for rule in rules), key=_STRENGTH.index, default=RuleState.OPEN)


def state_of(rule: Rule) -> RuleState:
    return _STATES.get(rule.kind, RuleState.OPEN)


def strongest_first(rule: Rule) -> int:
    """A key to sort by."""
    return _STRENGTH.index(state_of(rule))


def named(rule: Rule) -> str:
    """What it is for, in words."""
    if rule.scope is Scope.TASK_KEY:
        task, key = task_and_key(rule.name)
        if key == EACH:
            return f"each key of task {task!r}"
        return f"task {task!r} of key {key!r}"
    return f"{rule.scope.value} {rule.name!r}"


def words_about(rule: Rule, now: datetime) -> str:
    """Who set it, when, until when and why, as far as that is known."""
    parts = [f"by {rule.by}"] if rule.by else []
    if rule.at is not None:
        parts.append(f"since {_time(rule.at, now)}")
    if rule.until is not None:
        parts.append(f"until {_time(rule.until, now)}")
    return " ".join(parts) + (f": {rule.why}" if rule.why else "")


def author(by: str | None, actor: str | None) -> str:
    """Whoever was named, or acts through the app, or runs this."""
    return (by or actor or whoever_runs_this())[:MAX_BY]


def end_of(until: datetime | Duration | None) -> tuple[datetime | None, timedelta | None]:
    """A time, or how long from now."""
    if until is None or isinstance(until, datetime):
        return until, None
    return None, duration(until)


def _time(moment: datetime, now: datetime) -> str:
    """Without the day, if that is today."""
    moment, now = moment.astimezone(UTC), now.astimezone(UTC)
    return f"{moment:%H:%MZ}" if moment.date() == now.date() else f"{moment:%F %H:%MZ}"


@cache
def whoever_runs_this() -> str:
    """The user of this process, and the machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container the user has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
