"""What the tests of schedules do with an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import msgspec

from propolis import App, every
from propolis.app.operate.schedule_records import KIND, all_schedules, change_to
from propolis.core.protocols import Engine, Records, pop
from propolis.core.records import Read, Swap, Swapped
from propolis.core.schedule import Schedule, ScheduleRecord
from propolis.engines import piece_of
from propolis.worker.sweeping.schedule_firing import Firer

Make = Callable[[], Engine]

echo = App("memory://").task(name="tests.echo")(lambda: None)


def app_on(engine: Engine) -> App:
    """An app whose jobs are in this engine."""
    app = App("memory://")
    app.client._engine, app.client._opened = engine, True
    return app


async def put(engine: Engine, name: str = "report", **fields: Any) -> None:
    """A schedule of every hour unless something else is given."""
    plan = fields.pop("plan", None) or every("1h", **fields)
    await app_on(engine).schedules.aput(name, plan, echo)


async def keep(engine: Engine, schedule: Schedule, next_at: datetime) -> None:
    """Store a schedule as it is, whatever its timing says."""
    stored = ScheduleRecord(schedule=schedule, next_at=next_at)
    [answer] = await piece_of(engine, Records).swap([Swap(changes=(change_to(stored, 0),))])
    assert answer.refusal is None


async def look(engine: Engine, declared: tuple[str, ...] = ()) -> None:
    """What a worker does about schedules when it sweeps."""
    if KIND in (await engine.sweep()).records_due:
        await Firer(engine, declared).fire_due()


async def instants(engine: Engine) -> list[datetime]:
    """Those of all jobs that wait, in their order; afterwards these are done."""
    leases = await pop(engine, "default", limit=1000)
    return [instant_of(lease.body) for lease in leases]


def instant_of(body: bytes) -> datetime:
    return datetime.fromisoformat(msgspec.json.decode(body)["headers"]["propolis-instant"])


async def the_only(engine: Engine) -> ScheduleRecord:
    [stored] = await all_schedules(engine)
    return stored


class Around:
    """An engine with something around the verbs of records; a subclass overrides one of them."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:
        answers: list[Swapped] = await self.engine.swap(swaps, token=token)
        return answers

    async def records(self, kind: str, **asked: Any) -> Read:
        read: Read = await self.engine.records(kind, **asked)
        return read
