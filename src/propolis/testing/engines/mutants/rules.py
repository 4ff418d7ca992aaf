"""Mutants of rules: what is ignored, holds too long or too much, or says what it said."""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec.structs import replace

from propolis.core.protocols import Engine, Rule, RuleKind, Scope, Swept, task_and_key
from propolis.testing.clock import FakeClock
from propolis.testing.engines.mutants.wrapped import Wrapped


class RuleIgnored(Wrapped):
    """A rule of this kind is listed, and does nothing."""

    kind: ClassVar[RuleKind]

    def __init__(self, engine: Engine, clock: FakeClock) -> None:
        super().__init__(engine, clock)
        self.listed: dict[tuple[Scope, str], Rule] = {}

    async def add_rule(self, rule: Rule) -> bool:
        if rule.kind is not self.kind:
            return await self.engine.add_rule(rule)
        was_there = (rule.scope, rule.name) in self.listed
        self.listed[rule.scope, rule.name] = rule.set_at(self.clock.now)
        return not was_there

    async def remove_rule(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        if kind is not self.kind:
            return await self.engine.remove_rule(kind, scope, name)
        return self.listed.pop((scope, name), None) is not None

    async def rules(self) -> list[Rule]:
        return [*await self.engine.rules(), *self.listed.values()]


class PauseIgnored(RuleIgnored):
    kind = RuleKind.PAUSE


class BlockIgnored(RuleIgnored):
    kind = RuleKind.BLOCK


class LimitIgnored(RuleIgnored):
    kind = RuleKind.LIMIT


class CapIgnored(RuleIgnored):
    kind = RuleKind.CAP


class OverAndHolding(Wrapped):
    """A rule that is over still holds, though it is not listed any more."""

    def __init__(self, engine: Engine, clock: FakeClock) -> None:
        super().__init__(engine, clock)
        self.shown: dict[tuple[RuleKind, Scope, str], Rule] = {}

    async def add_rule(self, rule: Rule) -> bool:
        before = self.shown.get((rule.kind, rule.scope, rule.name))
        was_there = before is not None and not before.is_over(self.clock.now)
        self.shown[rule.kind, rule.scope, rule.name] = rule.set_at(self.clock.now)
        await self.engine.add_rule(replace(rule, until=None, lasts=None))
        return not was_there

    async def remove_rule(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        await self.engine.remove_rule(kind, scope, name)
        rule = self.shown.pop((kind, scope, name), None)
        return rule is not None and not rule.is_over(self.clock.now)

    async def rules(self) -> list[Rule]:
        return [rule for rule in self.shown.values() if not rule.is_over(self.clock.now)]

    async def sweep(self, **asked: Any) -> Swept:
        ends = [rule.until for rule in await self.rules() if rule.until is not None]
        swept = await self.engine.sweep(**asked)
        known = [] if swept.next_in is None else [self.clock.now + swept.next_in]
        return replace(swept, next_in=min((end - self.clock.now for end in [*ends, *known]), default=None))


class EveryKey(Wrapped):
    """A rule on a task of one key holds for all of its keys."""

    def __init__(self, engine: Engine, clock: FakeClock) -> None:
        super().__init__(engine, clock)
        self.listed: dict[tuple[RuleKind, str], Rule] = {}

    async def add_rule(self, rule: Rule) -> bool:
        if rule.scope is not Scope.TASK_KEY:
            return await self.engine.add_rule(rule)
        task, _ = task_and_key(rule.name)
        added = await self.engine.add_rule(rule)
        await self.engine.add_rule(replace(rule, scope=Scope.TASK, name=task))
        return added

    async def remove_rule(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        if scope is Scope.TASK_KEY:
            await self.engine.remove_rule(kind, Scope.TASK, task_and_key(name)[0])
        return await self.engine.remove_rule(kind, scope, name)

    async def rules(self) -> list[Rule]:
        rules = await self.engine.rules()
        named = {(rule.kind, task_and_key(rule.name)[0]) for rule in rules if rule.scope is Scope.TASK_KEY}
        return [rule for rule in rules if rule.scope is not Scope.TASK or (rule.kind, rule.name) not in named]


class ForgetsWho(Wrapped):
    """A rule that is set again keeps what the first one said."""

    async def add_rule(self, rule: Rule) -> bool:
        same = (rule.kind, rule.scope, rule.name, rule.n)
        for there in await self.engine.rules():
            if (there.kind, there.scope, there.name, there.n) == same:
                return False
        return await self.engine.add_rule(rule)
