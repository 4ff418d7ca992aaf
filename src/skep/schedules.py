"""Schedules as code declares them, and as engines keep them: `app.schedules`."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Mapping
from typing import Any, ParamSpec, TypeVar

from msgspec import Struct

from skep import wire
from skep.broker import Engine, Receipt, Rule, RuleKind, Scope
from skep.errors import BadSetting
from skep.job import new_id
from skep.producer import Producer
from skep.schedule import (
    Overlap,
    Plan,
    Schedule,
    ScheduleRecord,
    job_for,
    job_now,
    next_instant,
    overlap_key,
)
from skep.task import Call, Task

log = logging.getLogger("skep.schedules")

P = ParamSpec("P")
T = TypeVar("T")
Records = list[ScheduleRecord]  # a method is called `list` below


class Declared(Struct, frozen=True):
    """A schedule as code says it.  Its job is made when a worker starts: only then all names are there."""

    name: str
    plan: Plan
    task: Task[..., Any] | Call[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}

    def schedule(self) -> Schedule:
        """`BadSetting` for arguments that do not fit the task."""
        try:
            job = self.task.job(*self.args, **self.kwargs)
        except TypeError as error:
            raise BadSetting(f"schedule {self.name!r}: {error}") from error
        return self.plan.schedule(self.name, job, declared=True)


class Schedules:
    """`app.schedules`: what is to happen when, as the engine keeps it.

    `declared` are those of the app's own code, by name; they are put by its workers when they start.
    """

    def __init__(self, producer: Producer, declared: Mapping[str, Declared]) -> None:
        self._producer = producer
        self._declared = declared

    async def aput(
        self, name: str, plan: Plan, task: Task[P, Any] | Call[P, Any], *args: P.args, **kwargs: P.kwargs
    ) -> Schedule:
        """Store a schedule under its name, in place of one that is there.

        While its timing is the same it keeps the next instant that it had; and it stays paused if it was.
        """
        if name in self._declared:
            raise BadSetting(
                f"schedule {name!r} is declared in the code: change it there, or take another name"
            )
        if not isinstance(plan, Plan):
            raise BadSetting(f"schedule {name!r}: {plan!r} does not say when: write cron(…) or every(…)")
        schedule = plan.schedule(name, task.job(*args, **kwargs))
        await store(await self._producer.ready(), schedule)
        return schedule

    async def alist(self) -> Records:
        """All of them, by name."""
        return await (await self._producer.ready()).schedules()

    async def aget(self, name: str) -> ScheduleRecord | None:
        return next((record for record in await self.alist() if record.schedule.name == name), None)

    async def apause(self, name: str) -> bool:
        """Fire nothing more of it; jobs that were put go on.  False: unknown, or paused already."""
        return await (await self._producer.ready()).pause_schedule(name, True)

    async def aresume(self, name: str) -> bool:
        """Go on.  What came due meanwhile was missed, and its misfire policy says what becomes of it."""
        return await (await self._producer.ready()).pause_schedule(name, False)

    async def arun(self, name: str) -> Receipt | None:
        """Put its job now, besides its instants; None if there is no such schedule.

        The overlap policy holds: with "skip", a job that has not ended is what the receipt names.
        """
        record = await self.aget(name)
        if record is None:
            return None
        engine = await self._producer.ready()
        [receipt] = await engine.put([job_now(record.schedule, new_id(), await engine.now())])
        return receipt

    async def aremove(self, name: str) -> bool:
        """Forget it; jobs that were put go on.  One that is declared comes back with the next worker."""
        engine = await self._producer.ready()
        removed = await engine.remove_schedule(name)
        await engine.remove_rule(RuleKind.LIMIT, Scope.KEY, overlap_key(name))
        return removed

    def put(
        self, name: str, plan: Plan, task: Task[P, Any] | Call[P, Any], *args: P.args, **kwargs: P.kwargs
    ) -> Schedule:
        return self._wait(self.aput(name, plan, task, *args, **kwargs))

    def get(self, name: str) -> ScheduleRecord | None:
        return self._wait(self.aget(name))

    def pause(self, name: str) -> bool:
        return self._wait(self.apause(name))

    def resume(self, name: str) -> bool:
        return self._wait(self.aresume(name))

    def run(self, name: str) -> Receipt | None:
        return self._wait(self.arun(name))

    def remove(self, name: str) -> bool:
        return self._wait(self.aremove(name))

    def list(self) -> Records:
        return self._wait(self.alist())

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._producer.wait(coroutine)


async def store(engine: Engine, schedule: Schedule) -> None:
    """Put a schedule, with the rule that keeps its jobs apart where it wants one."""
    next_at = next_instant(schedule.timing, await engine.now())
    wire.encode(
        job_for(schedule, next_at)
    )  # what is wrong with its jobs is wrong here, not at its first instant
    key = overlap_key(schedule.name)
    if schedule.overlap is Overlap.QUEUE_ONE:  # first, so that no job comes before its rule
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, key, 1))
    await engine.put_schedule(schedule, next_at)
    if schedule.overlap is not Overlap.QUEUE_ONE:
        await engine.remove_rule(RuleKind.LIMIT, Scope.KEY, key)


async def sync(engine: Engine, declared: Mapping[str, Declared]) -> None:
    """Bring what is stored to what the code declares; what is so already is not written.

    A schedule that the code does not declare any more is left as it is, because other code may: an older or
    newer version in the middle of a deployment, or another app on the same engine.  Workers fire only
    the declared ones that they declare themselves, so it stops with the last worker that knows it.
    """
    stored = {record.schedule.name: record.schedule for record in await engine.schedules()}
    for name, one in declared.items():
        schedule = one.schedule()
        if stored.get(name) != schedule:
            await store(engine, schedule)
    for name, schedule in stored.items():
        if schedule.declared and name not in declared:
            log.info("schedule %s is stored, but not declared here: this worker does not fire it", name)
