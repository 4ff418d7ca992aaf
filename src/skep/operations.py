"""What operators do, from Python: every verb for synchronous and (with an `a`) for asynchronous code."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from datetime import datetime
from typing import Any, TypeVar

from skep.broker import Counts, Filter, Rule, RuleKind, Scope
from skep.explain import explain
from skep.job import Record, State
from skep.producer import Producer

T = TypeVar("T")

Verb = Callable[..., Awaitable[list[bool]]]

PAGE = 500
EVERYTHING = Filter()


class _Operations:
    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._producer.wait(coroutine)


class Jobs(_Operations):
    """`app.jobs`: look at jobs and change their fate."""

    async def aget(self, job_id: str) -> Record | None:
        return await (await self._producer.ready()).get(job_id)

    async def afind(self, where: Filter = EVERYTHING, *, limit: int = 100) -> list[Record]:
        """The oldest `limit` jobs that match."""
        return (await (await self._producer.ready()).find(where, limit=limit)).records

    async def aeach(self, where: Filter = EVERYTHING) -> AsyncIterator[Record]:
        """Every job that matches, page by page."""
        engine = await self._producer.ready()
        after: int | None = 0
        while after is not None:
            page = await engine.find(where, limit=PAGE, after=after)
            for record in page.records:
                yield record
            after = page.after

    async def aexplain(self, job_id: str) -> list[str]:
        """Why is this job not running?"""
        return await explain(await self._producer.ready(), job_id)

    async def acancel(self, *job_ids: str) -> list[bool]:
        return await (await self._producer.ready()).cancel(job_ids)

    async def areplay(self, *job_ids: str) -> list[bool]:
        """Give dead jobs another life."""
        return await (await self._producer.ready()).replay(job_ids)

    async def areplay_all(
        self, where: Filter, *, limit: int | None = None, ended_before: datetime | None = None
    ) -> int:
        """Replay every dead job that matches, the first `limit` of them if given; returns how many."""
        return await self._all(where, self.areplay, limit, ended_before)

    async def adelete(self, *job_ids: str) -> list[bool]:
        return await (await self._producer.ready()).delete(job_ids)

    async def apurge(
        self, where: Filter, *, limit: int | None = None, ended_before: datetime | None = None
    ) -> int:
        """Delete every ended job that matches, the first `limit` of them if given; returns how many."""
        return await self._all(where, self.adelete, limit, ended_before)

    async def areschedule(self, job_id: str, due_at: datetime) -> bool:
        return await (await self._producer.ready()).reschedule(job_id, due_at)

    async def _all(self, where: Filter, verb: Verb, limit: int | None, ended_before: datetime | None) -> int:
        changed = taken = 0
        bundle: list[str] = []
        async for record in self.aeach(where):
            if ended_before is not None and (record.ended_at is None or record.ended_at >= ended_before):
                continue
            if taken == limit:
                break
            bundle.append(record.id)
            taken += 1
            if len(bundle) == PAGE:
                changed += sum(await verb(*bundle))
                bundle = []
        return changed + sum(await verb(*bundle))

    def get(self, job_id: str) -> Record | None:
        return self._wait(self.aget(job_id))

    def find(self, where: Filter = EVERYTHING, *, limit: int = 100) -> list[Record]:
        return self._wait(self.afind(where, limit=limit))

    def explain(self, job_id: str) -> list[str]:
        return self._wait(self.aexplain(job_id))

    def cancel(self, *job_ids: str) -> list[bool]:
        return self._wait(self.acancel(*job_ids))

    def replay(self, *job_ids: str) -> list[bool]:
        return self._wait(self.areplay(*job_ids))

    def replay_all(
        self, where: Filter, *, limit: int | None = None, ended_before: datetime | None = None
    ) -> int:
        return self._wait(self.areplay_all(where, limit=limit, ended_before=ended_before))

    def delete(self, *job_ids: str) -> list[bool]:
        return self._wait(self.adelete(*job_ids))

    def purge(self, where: Filter, *, limit: int | None = None, ended_before: datetime | None = None) -> int:
        return self._wait(self.apurge(where, limit=limit, ended_before=ended_before))

    def reschedule(self, job_id: str, due_at: datetime) -> bool:
        return self._wait(self.areschedule(job_id, due_at))


class Queues(_Operations):
    """`app.queues`: how full they are, and what may run."""

    async def acounts(self) -> dict[str, Counts]:
        return await (await self._producer.ready()).queues()

    async def arules(self) -> list[Rule]:
        return await (await self._producer.ready()).rules()

    async def apause(self, name: str, *, scope: Scope = Scope.QUEUE) -> bool:
        """Start nothing more of it; what runs finishes.  False if it is paused already."""
        return await self._rule(RuleKind.PAUSE, scope, name)

    async def aresume(self, name: str, *, scope: Scope = Scope.QUEUE) -> bool:
        return await (await self._producer.ready()).remove_rule(RuleKind.PAUSE, scope, name)

    async def ablock(self, name: str, *, scope: Scope = Scope.QUEUE) -> bool:
        """The same as pause, for administrators: independent of it."""
        return await self._rule(RuleKind.BLOCK, scope, name)

    async def aunblock(self, name: str, *, scope: Scope = Scope.QUEUE) -> bool:
        return await (await self._producer.ready()).remove_rule(RuleKind.BLOCK, scope, name)

    async def adrop(self, name: str) -> int:
        """Forget a queue and all its jobs but those that run; returns how many went."""
        return await (await self._producer.ready()).drop(name)

    async def _rule(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        return await (await self._producer.ready()).add_rule(Rule(kind, scope, name))

    def counts(self) -> dict[str, Counts]:
        return self._wait(self.acounts())

    def rules(self) -> list[Rule]:
        return self._wait(self.arules())

    def pause(self, name: str, *, scope: Scope = Scope.QUEUE) -> bool:
        return self._wait(self.apause(name, scope=scope))

    def resume(self, name: str, *, scope: Scope = Scope.QUEUE) -> bool:
        return self._wait(self.aresume(name, scope=scope))

    def block(self, name: str, *, scope: Scope = Scope.QUEUE) -> bool:
        return self._wait(self.ablock(name, scope=scope))

    def unblock(self, name: str, *, scope: Scope = Scope.QUEUE) -> bool:
        return self._wait(self.aunblock(name, scope=scope))

    def drop(self, name: str) -> int:
        return self._wait(self.adrop(name))


def dead(**facts: Any) -> Filter:
    """The dead jobs for which these facts are true."""
    return Filter(state=State.DEAD, **facts)
