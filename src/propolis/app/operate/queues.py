"""`app.queues`: how full queues are, and what may run."""

from __future__ import annotations

from propolis.app.client.blocking import blocking
from propolis.app.client.client import Client
from propolis.core import wire
from propolis.core.protocols import Counts, Inspects, Operates, Rule, RuleKind, Rules, Scope


class Queues:
    """`app.queues`: how full they are, and what may run."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def acounts(self, *, limit: int = 1000, after: str | None = None) -> dict[str, Counts]:
        """Of so many queues, in the order of their names; `after` is the last one of the page before."""
        return await (await self._client.piece(Inspects)).queues(limit=limit, after=after)

    async def arules(self, *, limit: int = 1000, after: Rule | None = None) -> list[Rule]:
        return await (await self._client.piece(Rules)).rules(limit=limit, after=after)

    async def apause(self, name: str, *, scope: Scope = Scope.QUEUE) -> bool:
        """Start nothing more of it; what runs finishes.  False if it is paused already."""
        return await self._rule(RuleKind.PAUSE, scope, name)

    async def aresume(self, name: str, *, scope: Scope = Scope.QUEUE) -> bool:
        return await self._no_rule(RuleKind.PAUSE, scope, name)

    async def ablock(self, name: str, *, scope: Scope = Scope.QUEUE) -> bool:
        """The same as pause, for administrators: independent of it."""
        return await self._rule(RuleKind.BLOCK, scope, name)

    async def aunblock(self, name: str, *, scope: Scope = Scope.QUEUE) -> bool:
        return await self._no_rule(RuleKind.BLOCK, scope, name)

    async def adrop(self, name: str) -> int:
        """Forget a queue and all its jobs but those that run; returns how many went at once.

        Where there are more, no worker sees them any more, and sweeps remove them.
        """
        wire.check_queue(name)
        return await (await self._client.piece(Operates)).drop(name)

    async def _rule(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        _check(scope, name)
        return await (await self._client.piece(Rules)).add_rule(Rule(kind, scope, name))

    async def _no_rule(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        _check(scope, name)
        return await (await self._client.piece(Rules)).remove_rule(kind, scope, name)

    counts = blocking(acounts)
    rules = blocking(arules)
    pause = blocking(apause)
    resume = blocking(aresume)
    block = blocking(ablock)
    unblock = blocking(aunblock)
    drop = blocking(adrop)


def _check(scope: Scope, name: str) -> None:
    """As at a put: under no other name there is ever a job."""
    match scope:
        case Scope.QUEUE:
            wire.check_queue(name)
        case Scope.TASK:
            wire.check_task(name)
        case Scope.KEY:
            wire.check_text("key", name)
    wire.check_utf8(f"the name of a {scope}", name)
