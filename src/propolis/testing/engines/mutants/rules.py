"""Mutants of rules: each is listed, and does nothing."""

from __future__ import annotations

from typing import ClassVar

from propolis.core.protocols import (
    Engine,
    Rule,
    RuleKind,
    Scope,
)
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
        known = self.listed.get((rule.scope, rule.name))
        self.listed[rule.scope, rule.name] = rule
        return rule != known

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
