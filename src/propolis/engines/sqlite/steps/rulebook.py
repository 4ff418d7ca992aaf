"""Which rules a job that is to be leased has to obey."""

from __future__ import annotations

from collections import Counter

from propolis.core.protocols import RuleKind, Scope
from propolis.engines.sqlite.steps.work import Named, Work

_HOLDS = (RuleKind.PAUSE, RuleKind.BLOCK)


class Rulebook:
    """Each rule is looked up when a job asks for it: there may be many, of others."""

    def __init__(self, work: Work) -> None:
        self._work = work
        ruled, self.has_groups, self.has_removals = work.run("circumstances").fetchone()
        queues, tasks, keys = work.run("ruled_scopes").fetchone() if ruled else (0, 0, 0)
        self._ruled = {Scope.QUEUE: queues, Scope.TASK: tasks, Scope.KEY: keys}
        self.rules_jobs = tasks or keys
        self._known: dict[Named, list[tuple[RuleKind, int]]] = {}

    def room(self, scope: Scope, name: str | None) -> int | None:
        """How many more may run now; None: as many as like."""
        if name is None or not self._ruled[scope]:
            return None
        found = self._known.get((scope, name))
        if found is None:
            rows = self._work.run("rules_of", scope=scope, name=name).fetchall()
            found = self._known[scope, name] = [(RuleKind(kind), n) for kind, n in rows]
        if not found:
            return None
        if any(kind in _HOLDS for kind, _ in found):
            return 0
        running = self._work.running_of(scope, name)
        return max(0, min(n - running for _, n in found))

    def kept_back_by(self, task: str, key: str | None, taken: Counter[Named]) -> Named | None:
        """The task or key whose rule keeps this job back; if none does, it counts as `taken` from here on."""
        if not self.rules_jobs:
            return None
        mine = [(Scope.TASK, task)] if key is None else [(Scope.TASK, task), (Scope.KEY, key)]
        for scope, name in mine:
            room = self.room(scope, name)
            if room is not None and taken[scope, name] >= room:
                return scope, name
        taken.update(mine)
        return None
