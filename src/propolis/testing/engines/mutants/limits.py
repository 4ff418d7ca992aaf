"""Mutants of limits: rates that let too many start, and limits that are for other keys than they say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from propolis.core.job import Lease, Released, Snoozed, Unknown
from propolis.core.protocols import Engine, Rule, RuleKind, Scope, Swept, task_and_key
from propolis.testing.clock import FakeClock
from propolis.testing.engines.mutants.wrapped import Settled, Wrapped

Place = tuple[RuleKind, Scope, str]


class Reruled(Wrapped):
    """It shows the rules that were set, and keeps others."""

    def __init__(self, engine: Engine, clock: FakeClock) -> None:
        super().__init__(engine, clock)
        self.shown: dict[Place, Rule] = {}
        self.kept: dict[Place, Rule] = {}

    def kept_for(self, rules: list[Rule]) -> list[Rule]:
        """What is kept where these are shown."""
        return rules

    async def rules(self) -> list[Rule]:
        return [rule for rule in self.shown.values() if not rule.is_over(self.clock.now)]

    async def add_rule(self, rule: Rule) -> bool:
        place = (rule.kind, rule.scope, rule.name)
        there = place in {(rule.kind, rule.scope, rule.name) for rule in await self.rules()}
        self.shown[place] = rule.set_at(self.clock.now)
        await self.follow()
        return not there

    async def remove_rule(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        rule = self.shown.pop((kind, scope, name), None)
        await self.follow()
        return rule is not None and not rule.is_over(self.clock.now)

    async def follow(self) -> None:
        await self.keep(self.kept_for(await self.rules()))

    async def keep(self, rules: list[Rule]) -> None:
        """Let the engine have these, and no others."""
        wanted = {(rule.kind, rule.scope, rule.name): rule for rule in rules}
        for place in self.kept.keys() - wanted.keys():
            await self.engine.remove_rule(*place)
        for place, rule in wanted.items():
            if self.kept.get(place) != rule:
                await self.engine.add_rule(rule)
        self.kept = wanted

    async def lease(self, wants: Mapping[str, int], **terms: Any) -> list[Lease]:
        await self.follow()
        return await super().lease(wants, **terms)

    async def sweep(self, **asked: Any) -> Swept:
        await self.follow()
        swept = await self.engine.sweep(**asked)
        ends = [rule.until - self.clock.now for rule in await self.rules() if rule.until is not None]
        known = [] if swept.next_in is None else [swept.next_in]
        return replace(swept, next_in=min([*ends, *known], default=None))


class RateIgnored(Reruled):
    def kept_for(self, rules: list[Rule]) -> list[Rule]:
        return [replace(rule, every=None, burst=1) for rule in rules]


class BurstIgnored(Reruled):
    def kept_for(self, rules: list[Rule]) -> list[Rule]:
        return [replace(rule, burst=1) for rule in rules]


class FirstTokenNotTaken(Reruled):
    """One more may start where none has started for long."""

    def kept_for(self, rules: list[Rule]) -> list[Rule]:
        return [rule if rule.every is None else replace(rule, burst=rule.burst + 1) for rule in rules]


class TokenTooEarly(Reruled):
    """By as little as can be."""

    def kept_for(self, rules: list[Rule]) -> list[Rule]:
        return [
            rule if rule.every is None else replace(rule, every=rule.every - rule.every.resolution)
            for rule in rules
        ]


class TokenNotGivenBack(Reruled):
    """By those that did not really run."""

    async def settle(self, outcomes: Settled) -> list[Lease]:
        lost: list[Lease] = []
        for lease, outcome in outcomes:
            if isinstance(outcome, Released | Snoozed | Unknown):
                await self.keep([replace(rule, every=None, burst=1) for rule in await self.rules()])
            else:
                await self.follow()
            lost += await self.engine.settle([(lease, outcome)])
        await self.follow()
        return lost


class PrefixBeforeKey(Reruled):
    """A limit on a prefix comes before that of exactly the key."""

    def kept_for(self, rules: list[Rule]) -> list[Rule]:
        prefixes = tuple(rule.prefix for rule in rules if rule.prefix is not None)
        return [rule for rule in rules if rule.prefix is not None or not _limits_key(rule, prefixes)]


class ShortestPrefix(Reruled):
    """It comes before the longer ones."""

    def kept_for(self, rules: list[Rule]) -> list[Rule]:
        prefixes = {rule.prefix for rule in rules if rule.prefix is not None}
        return [
            rule
            for rule in rules
            if rule.prefix is None or not rule.prefix.startswith(tuple(prefixes - {rule.prefix}))
        ]


class TaskBeforeKeys(Reruled):
    """A limit for each key of a task comes before those of keys."""

    def kept_for(self, rules: list[Rule]) -> list[Rule]:
        for_tasks = any(_is_for_each_key(rule) for rule in rules)
        return [rule for rule in rules if not for_tasks or not _limits_key(rule, ("",))]


class PrefixForOneKey(Reruled):
    """A limit on a prefix is for no key that begins so."""

    def kept_for(self, rules: list[Rule]) -> list[Rule]:
        return [rule for rule in rules if rule.prefix is None]


class OneCountForAllKeys(Reruled):
    """A limit for each key of a task is for all of them together."""

    def kept_for(self, rules: list[Rule]) -> list[Rule]:
        return [
            replace(rule, scope=Scope.TASK, name=task_and_key(rule.name)[0])
            if _is_for_each_key(rule)
            else rule
            for rule in rules
        ]


def _limits_key(rule: Rule, begins: tuple[str, ...]) -> bool:
    return rule.kind is RuleKind.LIMIT and rule.scope is Scope.KEY and rule.name.startswith(begins)


def _is_for_each_key(rule: Rule) -> bool:
    return rule.kind is RuleKind.LIMIT and rule.scope is Scope.TASK_KEY
