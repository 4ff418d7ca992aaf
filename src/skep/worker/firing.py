"""Firing schedules: a part of every worker, and none of them is special.

Nobody is elected, and nothing is remembered here that counts: the engine lets exactly one of those who fire
an instant do so, by its own clock, in the step that puts the job.
"""

from __future__ import annotations

import logging
from collections.abc import Container
from datetime import datetime, timedelta
from zlib import crc32

from skep.broker import Engine
from skep.errors import EngineError, SkepError
from skep.schedule import ScheduleRecord, firings

log = logging.getLogger("skep.worker")

MOST = 500  # instants in one go: the pump has other things to do as well
A_SECOND, A_MINUTE = timedelta(seconds=1), timedelta(minutes=1)


class Firer:
    """Fires what is due.  `declared` are the names of the schedules in the code that this worker runs."""

    def __init__(self, engine: Engine, declared: Container[str], holder: str) -> None:
        self._engine = engine
        self._declared = declared
        self._holder = holder
        self._left = 0
        self._complained: set[str] = set()

    async def fire_due(self) -> timedelta | None:
        """Settle the instants that have come.  Returns when the next one comes, as far as was seen."""
        due = [record for record in await self._engine.schedules(due=True) if self._is_ours(record)]
        if not due:
            return None
        now = await self._engine.now()
        self._left = MOST
        moments = [await self._bring_up_to(now, record) for record in sorted(due, key=self._order)]
        return max(timedelta(0), min(moments) - now)

    def _is_ours(self, record: ScheduleRecord) -> bool:
        schedule = record.schedule
        return not schedule.declared or schedule.name in self._declared

    def _order(self, record: ScheduleRecord) -> tuple[datetime, int]:
        """Each worker begins elsewhere: many of them share many schedules, rather than race for each."""
        return record.next_at, crc32(f"{self._holder}\0{record.schedule.name}".encode())

    async def _bring_up_to(self, now: datetime, record: ScheduleRecord) -> datetime:
        """Returns its next instant; one that has come, if there is more to do."""
        name, next_at = record.schedule.name, record.next_at
        try:
            for step in firings(record, now):
                if self._left == 0:
                    return now
                self._left -= 1
                if not await self._engine.fire(name, step.instant, step.job, step.next_at):
                    # Somebody else has settled this instant, and goes on with what there is to catch up.
                    return max(step.next_at, now + A_SECOND)
                next_at = step.next_at
        except EngineError:
            raise
        except (SkepError, ValueError, OverflowError) as error:
            self._complain_once(name, error)  # one that cannot fire must not stop the others
            return now + A_MINUTE
        return next_at

    def _complain_once(self, name: str, error: Exception) -> None:
        if name not in self._complained:
            self._complained.add(name)
            log.error("schedule %s cannot be fired here: %s", name, error)
