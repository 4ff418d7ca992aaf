"""What operators do, from Python: every verb for synchronous and (with an `a`) for asynchronous code."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from datetime import datetime
from typing import Any, TypeVar

from skep.batch import BatchStatus, Member
from skep.broker import Counts, Engine, Filter, Rule, RuleKind, Scope
from skep.explain import explain
from skep.job import Record, State
from skep.producer import Producer

T = TypeVar("T")

Verb = Callable[..., Awaitable[list[bool]]]

PAGE = 500
EVERYTHING = Filter()
MEMBER_STATES = ("enqueued", "retrying", "running", "done", "dead", "cancelled")


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


class Batches(_Operations):
    """`app.batches`: how far they are, and what becomes of them."""

    async def aget(self, batch: str) -> BatchStatus | None:
        return await (await self._producer.ready()).batch(batch)

    async def afind(self, *, limit: int = 100, after: str | None = None) -> list[BatchStatus]:
        """In the order of their ids, which is that of their making unless these were chosen."""
        return await (await self._producer.ready()).batches(limit=limit, after=after)

    async def amembers(self, batch: str, *, after: int | None = None) -> AsyncIterator[Member]:
        """Every member in the order of the numbers, page by page; with `after`, those behind that number.

        Members that were added by several at once may share a number, so each page looks again at the
        last number of the page before.
        """
        engine = await self._producer.ready()
        seen, limit = set[str](), PAGE
        while page := await engine.members(batch, limit=limit, after=after):
            for member in page:
                if member.id not in seen:
                    yield member
            if len(page) < limit:
                return
            last = page[-1].member
            seen = {member.id for member in page if member.member == last}
            if len(seen) == limit:  # a whole page of one number: only a larger one gets beyond it
                limit *= 2
            after = last - 1

    async def aids(self, batch: str) -> dict[str, list[str]]:
        """The ids of the members, by what they are: enqueued, retrying, running, done, dead, cancelled."""
        engine = await self._producer.ready()
        again = {record.id async for record in _waiting_again(engine, batch)}
        ids: dict[str, list[str]] = {name: [] for name in MEMBER_STATES}
        async for member in self.amembers(batch):
            waiting = "retrying" if member.id in again else "enqueued"
            ids[waiting if member.state is State.READY else member.state.value].append(member.id)
        return ids

    async def aseal(self, batch: str) -> bool:
        return await (await self._producer.ready()).seal(batch)

    async def acancel(self, batch: str) -> int:
        """End what waits and ask what runs to stop, also in nested batches; returns how many jobs."""
        engine = await self._producer.ready()
        live = [member.id async for member in self.amembers(batch) if not member.state.terminal]
        changed = 0
        for start in range(0, len(live), PAGE):
            ids = live[start : start + PAGE]
            answers = await engine.cancel(ids)
            changed += sum(answers)
            for member, cancelled in zip(ids, answers, strict=True):
                if not cancelled and await engine.batch(member) is not None:
                    changed += await self.acancel(member)
        return changed

    async def areplay(self, batch: str) -> int:
        """Give the dead members another life, which is in their history and not in the batch's counts."""
        return await Jobs(self._producer).areplay_all(dead(batch=batch))

    async def adelete(self, batch: str) -> bool:
        """Forget it with the members that wait; those that run finish; no callback.  False: unknown."""
        return await (await self._producer.ready()).delete_batch(batch)

    def get(self, batch: str) -> BatchStatus | None:
        return self._wait(self.aget(batch))

    def find(self, *, limit: int = 100, after: str | None = None) -> list[BatchStatus]:
        return self._wait(self.afind(limit=limit, after=after))

    def members(self, batch: str) -> list[Member]:
        return self._wait(_listed(self.amembers(batch)))

    def ids(self, batch: str) -> dict[str, list[str]]:
        return self._wait(self.aids(batch))

    def seal(self, batch: str) -> bool:
        return self._wait(self.aseal(batch))

    def cancel(self, batch: str) -> int:
        return self._wait(self.acancel(batch))

    def replay(self, batch: str) -> int:
        return self._wait(self.areplay(batch))

    def delete(self, batch: str) -> bool:
        return self._wait(self.adelete(batch))


async def _waiting_again(engine: Engine, batch: str) -> AsyncIterator[Record]:
    """The members that wait and have failed or crashed before."""
    after: int | None = 0
    where = Filter(batch=batch, state=State.READY)
    while after is not None:
        page = await engine.find(where, limit=PAGE, after=after)
        for record in page.records:
            if record.failures or record.crashes:
                yield record
        after = page.after


async def _listed(members: AsyncIterator[T]) -> list[T]:
    return [member async for member in members]


def dead(**facts: Any) -> Filter:
    """The dead jobs for which these facts are true."""
    return Filter(state=State.DEAD, **facts)
