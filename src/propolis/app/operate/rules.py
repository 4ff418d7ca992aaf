"""The rules of an engine, however many there are: what they are for, and what they say."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache

from propolis.core import wire
from propolis.core.protocols import Rule, RuleKind, Rules, Scope, task_and_key, task_key
from propolis.errors import BadSetting

_PAGE = 1000


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
    """Whether leasing obeys it for jobs of this queue, this task and this key, as far as they are given."""
    if rule.kind is RuleKind.CAP:
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
