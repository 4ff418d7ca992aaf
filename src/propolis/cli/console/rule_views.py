"""Rules as commands show them."""

from __future__ import annotations

from datetime import datetime

from propolis.cli.console.output import shown_time
from propolis.core.limits import rate_text
from propolis.core.protocols import UNBOUNDED, Rule, RuleKind, Scope, task_and_key

RULE_COLUMNS = ["rule", "for", "name", "by", "since", "until", "why"]


def row_of_rule(rule: Rule) -> list[str]:
    return [
        described(rule),
        scope_in_words(rule),
        rule.name,
        rule.by,
        shown_time(rule.at),
        shown_time(rule.until),
        rule.why,
    ]


def scope_in_words(rule: Rule) -> str:
    if rule.scope is not Scope.TASK_KEY:
        return rule.scope.value
    return "each key of a task" if rule.kind is RuleKind.LIMIT else "task of a key"


def rate_of_rule(rule: Rule) -> str:
    """Nothing where it has none."""
    if rule.every is None:
        return ""
    return rate_text(rule.every) + (f", {rule.burst} saved up" if rule.burst > 1 else "")


def fields_of(rule: Rule) -> dict[str, str | int | datetime | None]:
    """For programs: a rule on a task of one key names both."""
    task, key = task_and_key(rule.name) if rule.scope is Scope.TASK_KEY else (None, None)
    return {
        "kind": rule.kind.value,
        "scope": rule.scope.value,
        "name": rule.name,
        "task": rule.name if rule.scope is Scope.TASK else task,
        "key": rule.name if rule.scope is Scope.KEY else key,
        "n": rule.n if rule.kind in (RuleKind.LIMIT, RuleKind.CAP) and rule.n != UNBOUNDED else None,
        "rate": None if rule.every is None else rate_text(rule.every),
        "burst": None if rule.every is None else rule.burst,
        "by": rule.by,
        "at": rule.at,
        "until": rule.until,
        "why": rule.why,
    }


def described(rule: Rule) -> str:
    match rule.kind:
        case RuleKind.PAUSE:
            return "paused"
        case RuleKind.BLOCK:
            return "blocked"
        case _:
            number = [] if rule.n == UNBOUNDED else [str(rule.n)]
            return " ".join([rule.kind.value, *number, *filter(None, [rate_of_rule(rule)])])
