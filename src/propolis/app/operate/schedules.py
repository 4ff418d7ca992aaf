"""Schedules as code declares them, and as engines keep them: `app.schedules`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ParamSpec

from msgspec import Struct

from propolis.app.client.blocking import blocking
from propolis.app.client.client import Client
from propolis.app.operate.schedule_records import all_schedules, pause, remove, schedule_named, store
from propolis.app.task import Call, Task
from propolis.core.ids import new_id
from propolis.core.protocols import Core, Inspects, Receipt
from propolis.core.schedule import Plan, Schedule, ScheduleRecord, job_now
from propolis.errors import BadSetting

P = ParamSpec("P")
StoredSchedules = list[ScheduleRecord]  # a method is called `list` below


class Declared(Struct, frozen=True):
    """A schedule as code declares it.  A starting worker makes its job: only then all names are there."""

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

    def __init__(self, client: Client, declared: Mapping[str, Declared]) -> None:
        self._client = client
        self._declared = declared

    async def aput(
        self,
        /,  # so that `blocking` can stand before it: a P of its own follows
        name: str,
        plan: Plan,
        task: Task[P, Any] | Call[P, Any],
        *args: P.args,
        **kwargs: P.kwargs,
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
        await store(await self._client.ready(), [schedule])
        return schedule

    async def alist(self) -> StoredSchedules:
        """All of them, by name."""
        return await all_schedules(await self._client.ready())

    async def aget(self, name: str) -> ScheduleRecord | None:
        return await schedule_named(await self._client.ready(), name)

    async def apause(self, name: str) -> bool:
        """Fire nothing more of it; jobs that were put go on.  False: unknown, or paused already."""
        return await pause(await self._client.ready(), name, paused=True)

    async def aresume(self, name: str) -> bool:
        """Go on.  What came due meanwhile was missed, and its misfire policy says what becomes of it."""
        return await pause(await self._client.ready(), name, paused=False)

    async def arun(self, name: str) -> Receipt | None:
        """Put its job now, besides its instants; None if there is no such schedule.

        The overlap policy holds: with "skip", a job that has not ended is what the receipt names.
        """
        record = await self.aget(name)
        if record is None:
            return None
        now = await (await self._client.piece(Inspects)).now()
        [receipt] = await (await self._client.ready()).put([job_now(record.schedule, new_id(), now)])
        return receipt

    async def aremove(self, name: str) -> bool:
        """Forget it; jobs that were put go on.  One that is declared comes back with the next worker."""
        return await remove(await self._client.ready(), name)

    put = blocking(aput)
    get = blocking(aget)
    pause = blocking(apause)
    resume = blocking(aresume)
    run = blocking(arun)
    remove = blocking(aremove)
    list = blocking(alist)


async def sync(engine: Core, declared: Mapping[str, Declared]) -> None:
    """Bring what is stored to what the code declares; what is so already is not written.

    A schedule that the code does not declare any more is left as it is, because other code may: an older or
    newer version in the middle of a deployment, or another app on the same engine.  Workers fire only
    the declared ones that they declare themselves, so it stops with the last worker that knows it.
    """
    await store(engine, [one.schedule() for one in declared.values()])
