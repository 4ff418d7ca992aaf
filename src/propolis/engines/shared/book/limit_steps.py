"""What rules let start: pauses and blocks, how many run at once, and how often one may start."""

from __future__ import annotations

from collections.abc import Iterator

from propolis.core.job import Outcome, Released, Snoozed, State, Unknown
from propolis.core.limits import Rate, longest_prefix, rate_of
from propolis.core.protocols import EACH, Rule, RuleKind, Scope, Tokens, task_key
from propolis.engines.shared.book.clock_steps import ClockSteps
from propolis.engines.shared.book.keeping import B, E


class LimitSteps(ClockSteps[E, B]):
    """What follows from rules, with a count and a bucket for each queue, task and key."""

    ruled = False  # is there any rule at all?

    def ruling(self, kind: RuleKind, scope: Scope, name: str) -> Rule | None:
        """The rule, if it is not over."""
        rule = self.rule(kind, scope, name)
        return None if rule is None or rule.is_over(self.now) else rule

    def limit(self, scope: Scope, name: str, task: str | None = None) -> Rule | None:
        """The one that holds: for a key the one of exactly it, of its longest prefix, or of the task."""
        if scope is Scope.TASK_KEY:
            return None
        if scope is not Scope.KEY:
            return self.ruling(RuleKind.LIMIT, scope, name)
        exact = None if name.endswith(EACH) else self.ruling(RuleKind.LIMIT, scope, name)
        found = exact or longest_prefix(self.prefixes(), name)
        if found is None and task is not None and self.names_each_key():
            return self.ruling(RuleKind.LIMIT, Scope.TASK_KEY, task_key(task, EACH))
        return found

    def kept_back(self, entry: E) -> tuple[Scope, str] | None:
        """What a rule names that does not let it start."""
        scopes = entry.scopes()
        if entry.job.key is not None and self.names_task_keys():
            scopes.append((Scope.TASK_KEY, task_key(entry.job.task, entry.job.key)))
        task = entry.job.task
        return next(((scope, name) for scope, name in scopes if self.room(scope, name, task) == 0), None)

    def is_stopped(self, scope: Scope, name: str) -> bool:
        """Is it paused or blocked?"""
        return any(self.ruling(kind, scope, name) for kind in (RuleKind.PAUSE, RuleKind.BLOCK))

    def room(self, scope: Scope, name: str, task: str | None = None) -> int | None:
        """How many more may start, of a task where that makes a difference; None: any number."""
        if self.is_stopped(scope, name):
            return 0
        limit = self.limit(scope, name, task)
        if limit is None:
            return None
        room = max(0, limit.n - self.running_in(scope, name))
        rate = rate_of(limit)
        return room if rate is None else min(room, self._free(rate, scope, name))

    def _free(self, rate: Rate, scope: Scope, name: str) -> int:
        full_us = self.full_us(scope, name)
        if (bounded_us := rate.bounded(full_us, self.now_us)) != full_us:
            self.set_full(scope, name, bounded_us)
        free = rate.free(bounded_us, self.now_us)
        if free == 0:
            self.await_token(scope, name, rate.next_us(bounded_us, self.now_us))
        return free

    def take_tokens(self, entry: E) -> None:
        """It starts."""
        for rate, scope, name in self._rates(entry):
            self.set_full(scope, name, rate.taken(self.full_us(scope, name), self.now_us))

    def give_tokens_back(self, entry: E, outcome: Outcome, state: State) -> None:
        """It did not really run."""
        if state is State.READY and isinstance(outcome, Released | Snoozed | Unknown):
            for rate, scope, name in self._rates(entry):
                self.set_full(scope, name, rate.given_back(self.full_us(scope, name), self.now_us))

    def _rates(self, entry: E) -> Iterator[tuple[Rate, Scope, str]]:
        for scope, name in entry.scopes() if self.ruled else ():
            limit = self.limit(scope, name, entry.job.task)
            if limit is not None and (rate := rate_of(limit)) is not None:
                yield rate, scope, name

    def tokens(self, rate: Rate, scope: Scope, name: str) -> Tokens:
        return rate.tokens(self.full_us(scope, name), self.now_us)
