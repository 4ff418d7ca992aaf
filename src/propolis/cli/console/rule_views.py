"""Rules as commands show them."""

from __future__ import annotations

from datetime import datetime

from propolis.cli.console.output import shown_time
from propolis.core.protocols import Rule, RuleKind, Scope, task_and_key

RULE_COLUMNS = ["rule", "for", "name", "by", "since", "until", "why"]


def row_of_rule(rule: Rule) -> list[str]:
    return [
        described(rule),
        "task of a key" if rule.scope is Scope.TASK_KEY else rule.scope.value,
        rule.name,
        rule.by,
        shown_time(rule.at),
        shown_time(rule.until),
        rule.why,
    ]


def fields_of(rule: Rule) -> dict[str, str | int | datetime | None]:
    """For programs: a rule on a task of one key names both."""
    task, key = task_and_key(rule.name) if rule.scope is Scope.TASK_KEY else (None, None)
    return {
        "kind": rule.kind.value,
        "scope": rule.scope.value,
        "name": rule.name,
        "task": rule.name if rule.scope is Scope.TASK else task,
        "key": rule.name if rule.scope is Scope.KEY else key,
        "n": rule.n if rule.kind in (RuleKind.LIMIT, RuleKind.CAP) else None,
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
            return f"{rule.kind.value} {rule.n}"
