"""Which rules a job that is to be leased has to obey."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from propolis.core.protocols import RuleKind, Scope, task_key
from propolis.engines.sqlite.steps.work import Named, Work

_HOLDS = (RuleKind.PAUSE, RuleKind.BLOCK)
_OVER_AT_ONCE = 100  # rules that are over, of which a lease sees to those that they have kept back


def remove_rule(work: Work, kind: RuleKind, scope: Scope, name: str) -> bool:
    """False if there was none, or it was over."""
    work.woken.add(None)
    work.run("open_groups", scope=scope, name=name)
    row = work.run("remove_rule", kind=kind, scope=scope, name=name, now_us=work.now_us).fetchone()
    return row is not None and not row[0]


def remove_over(work: Work, most: int) -> int:
    """A bite of the rules whose time is over; those that they kept back may go."""
    over = work.run("rules_over", now_us=work.now_us, most=most).fetchall()
    for kind, scope, name in over:
        remove_rule(work, kind, scope, name)
    return len(over)


class Rulebook:
    """Each rule is looked up when a job asks for it: there may be many, of others."""

    def __init__(self, work: Work) -> None:
        self._work = work
        ruled, self.has_groups, self.has_removals = work.run("circumstances").fetchone()
        scopes = work.run("ruled_scopes", now_us=work.now_us).fetchone() if ruled else (0, 0, 0, 0, 0)
        queues, tasks, keys, task_keys, over = scopes
        if over:
            remove_over(work, _OVER_AT_ONCE)
        self._ruled = {Scope.QUEUE: queues, Scope.TASK: tasks, Scope.KEY: keys, Scope.TASK_KEY: task_keys}
        self.rules_jobs = tasks or keys or task_keys
        self._known: dict[Named, list[tuple[RuleKind, int]]] = {}

    def room(self, scope: Scope, name: str | None) -> int | None:
        """How many more may run now; None: as many as like."""
        if name is None or not self._ruled[scope]:
            return None
        found = self._known.get((scope, name))
        if found is None:
            which = {"scope": scope, "name": name, "now_us": self._work.now_us}
            rows = self._work.run("rules_of", **which).fetchall()
            found = self._known[scope, name] = [(RuleKind(kind), n) for kind, n in rows]
        if not found:
            return None
        if any(kind in _HOLDS for kind, _ in found):
            return 0
        running = self._work.running_of(scope, name)
        return max(0, min(n - running for _, n in found))

    def may_keep_back(self, names: Iterable[tuple[str, str | None]]) -> bool:
        """Is there a rule for any of these tasks and keys?"""
        return any(self.room(*each) is not None for task, key in names for each in self._scopes(task, key))

    def _scopes(self, task: str, key: str | None) -> list[Named]:
        if key is None:
            return [(Scope.TASK, task)]
        if not self._ruled[Scope.TASK_KEY]:
            return [(Scope.TASK, task), (Scope.KEY, key)]
        return [(Scope.TASK, task), (Scope.KEY, key), (Scope.TASK_KEY, task_key(task, key))]

    def kept_back_by(self, task: str, key: str | None, taken: Counter[Named]) -> Named | None:
        """What the rule names that keeps this job back; if none does, it counts as `taken` from here on."""
        if not self.rules_jobs:
            return None
        mine = self._scopes(task, key)
        for scope, name in mine:
            room = self.room(scope, name)
            if room is not None and taken[scope, name] >= room:
                return scope, name
        taken.update(mine)
        return None
