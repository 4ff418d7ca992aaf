"""How many may start, in the model of the contract: numbers, rates, and which limit holds for a key."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from propolis.core.job import State
from propolis.core.protocols import Rule, RuleKind, Scope, task_key
from propolis.testing.clock import FakeClock
from propolis.testing.engines.model.entries import ModelEntry, name_in

Place = tuple[Scope, str]
Held = tuple[Place, Rule]  # what a limit counts, and the limit

NONE = timedelta(0)
STOPS = (RuleKind.PAUSE, RuleKind.BLOCK)


@dataclass(slots=True, eq=False)
class Met:
    """A job that was seen to want nothing but a token, of what, and under which rules."""

    entry: ModelEntry
    place: Place
    rules: list[Rule]


class ModelLimits:
    """All rates of one bucket have the same `every * burst` here: none finds it emptier than empty."""

    def __init__(
        self, clock: FakeClock, rules: Callable[[], list[Rule]], jobs: Callable[[], list[ModelEntry]]
    ) -> None:
        self.clock = clock
        self.rules = rules
        self.jobs = jobs
        self.full_at: dict[Place, datetime] = {}  # of each bucket of which a token was ever taken
        self.met: dict[str, Met] = {}  # by the ids of the jobs

    def keep_back(self, entry: ModelEntry) -> bool:
        return self._is_stopped(entry) or bool(self._lacking(entry))

    def take_tokens(self, entry: ModelEntry) -> None:
        for place, limit in self._of(entry):
            if limit.every is not None:
                self.full_at[place] = max(self.clock.now, self._full_at(place)) + limit.every

    def give_tokens_back(self, entry: ModelEntry) -> None:
        for place, limit in self._of(entry):
            if limit.every is not None and place in self.full_at:
                self.full_at[place] -= limit.every

    def meet(self, waiting: Iterable[ModelEntry]) -> None:
        """Somebody has seen all of these: a sweep tells when what only wants a token gets it."""
        for entry in waiting:
            lacking = self._lacking(entry)
            if len(lacking) == 1 and not self._is_stopped(entry):
                [(place, _)] = lacking
                self.met[entry.job.id] = Met(entry, place, self.rules())

    def forget_if_rules_changed(self) -> None:
        """A job may be set aside for another reason now, or stand in line again."""
        self.met = {name: met for name, met in self.met.items() if met.rules == self.rules()}

    def tokens_in(self) -> list[timedelta]:
        """How long until those come that somebody was seen to want, and still wants."""
        spans: list[timedelta] = []
        for met in self.met.values():
            lacking = self._lacking(met.entry)
            if [place for place, _ in lacking] == [met.place] and not self._is_stopped(met.entry):
                spans += [self._token_at(*found) - self.clock.now for found in lacking]
        return spans

    def _is_stopped(self, entry: ModelEntry) -> bool:
        """By a pause, a block or a number."""
        stops = [rule for rule in self.rules() if rule.kind in STOPS]
        if any(rule.name == name_in(entry, rule.scope) for rule in stops):
            return True
        return any(self._running_in(place) >= limit.n for place, limit in self._of(entry))

    def _running_in(self, place: Place) -> int:
        scope, name = place
        return sum(job.state is State.RUNNING and name_in(job, scope) == name for job in self.jobs())

    def _of(self, entry: ModelEntry) -> list[Held]:
        """The limits of its queue and of its task, and the first one that there is of those for its key."""
        limits = {(rule.scope, rule.name): rule for rule in self.rules() if rule.kind is RuleKind.LIMIT}
        places = [(Scope.QUEUE, entry.queue), (Scope.TASK, entry.job.task)]
        found = [(place, limits[place]) for place in places if place in limits]
        if (key := entry.job.key) is not None:
            begins = [f"{key[:length]}*" for length in range(len(key), -1, -1)]
            names = begins if key.endswith("*") else [key, *begins]
            each_key = (Scope.TASK_KEY, task_key(entry.job.task, "*"))
            in_order = [*((Scope.KEY, name) for name in names), each_key]
            found += [((Scope.KEY, key), limits[place]) for place in in_order if place in limits][:1]
        return found

    def _full_at(self, place: Place) -> datetime:
        return self.full_at.get(place, self.clock.now)

    def _token_at(self, place: Place, limit: Rule) -> datetime:
        """When there is one, now or later."""
        return max(self.clock.now, self._full_at(place) - (limit.burst - 1) * (limit.every or NONE))

    def _lacking(self, entry: ModelEntry) -> list[Held]:
        """The limits of which it finds no token."""
        found = [held for held in self._of(entry) if held[1].every is not None]
        return [held for held in found if self._token_at(*held) > self.clock.now]
