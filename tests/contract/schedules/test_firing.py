"""Firing: each instant of a schedule is settled by exactly one of those who try, on every engine."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from propolis.app.operate.schedule_records import (
    KIND,
    all_schedules,
    pause,
    remove,
    schedule_named,
    store,
)
from propolis.core.job import Done
from propolis.core.protocols import Engine, Records, Rule, RuleKind, Scope
from propolis.core.records import KEEP, MAX_VALUE, Change, Read, Swap
from propolis.core.schedule import Cron, Every, Misfire, Overlap, Schedule, ScheduleRecord, firing_id
from propolis.engines import piece_of
from propolis.engines.memory import MemoryEngine
from propolis.errors import RecordTooLarge
from propolis.testing.clock import START, FakeClock
from propolis.testing.engines.samples import a_job
from propolis.testing.engines.steps import (
    A_MOMENT,
    counts,
    found,
    info_of,
    order,
    put_one,
    settle_one,
    take,
    take_one,
)
from propolis.worker.sweeping.schedule_firing import LEFT_ALONE, Firer

from .acting import Around, Make, keep, look, the_only

MINUTE = timedelta(minutes=1)
FIRST, SECOND, THIRD = START + MINUTE, START + 2 * MINUTE, START + 3 * MINUTE
JOB = firing_id("report", FIRST)

pytestmark = pytest.mark.parametrize(
    "make", ["memory", "sqlite", "postgres", "redis", "shards"], indirect=True
)


def every_minute(name: str = "report", **fields: Any) -> Schedule:
    job = fields.pop("job", None) or a_job(id="pattern", task="tests.report")
    return Schedule(name=name, timing=Every(60_000), job=job, **fields)


async def a_due_schedule(engine: Engine, clock: FakeClock, **fields: Any) -> None:
    await store(engine, [every_minute(**fields)])
    clock.advance(MINUTE)


async def fire(engine: Engine, declared: tuple[str, ...] = ()) -> timedelta | None:
    return await Firer(engine, declared).fire_due()


async def is_told(engine: Engine) -> bool:
    return KIND in (await engine.sweep()).records_due


class Stale(Around):
    """Reads what somebody has read before."""

    def __init__(self, engine: Engine, read: Read) -> None:
        super().__init__(engine)
        self._read = read

    async def records(self, kind: str, **asked: Any) -> Read:
        return self._read


async def due_as_of_now(engine: Engine) -> Any:
    """An engine for a worker that has just read what is due, and rests before it fires it."""
    return Stale(engine, await piece_of(engine, Records).records(KIND, due=True))


# --- storing -----------------------------------------------------------------------------


async def test_a_schedule_is_kept_under_its_name_with_its_next_instant(engine: Engine) -> None:
    """C1."""
    schedule = every_minute()

    await store(engine, [schedule])

    stored = await schedule_named(engine, "report")
    assert stored == ScheduleRecord(schedule=schedule, next_at=FIRST)
    assert stored == await the_only(engine)
    assert await schedule_named(engine, "other") is None


async def test_schedules_are_listed_by_name_however_many_there_are(engine: Engine) -> None:
    """C1."""
    names = [f"{n:04}" for n in range(1001)]
    await store(engine, [every_minute(name) for name in reversed(names)])

    assert [stored.schedule.name for stored in await all_schedules(engine)] == names


async def test_a_schedule_stored_again_with_its_timing_keeps_its_next_instant(
    engine: Engine, clock: FakeClock
) -> None:
    """C1: so that restarting a worker neither skips nor repeats an instant."""
    await a_due_schedule(engine, clock)
    changed = every_minute(job=a_job(id="pattern", task="tests.better_report"))

    await store(engine, [changed])

    stored = await the_only(engine)
    assert (stored.schedule, stored.next_at) == (changed, FIRST)
    assert await is_told(engine)


async def test_a_schedule_stored_again_with_another_timing_begins_anew(
    engine: Engine, clock: FakeClock
) -> None:
    """C1."""
    await a_due_schedule(engine, clock)

    await store(engine, [replace(every_minute(), timing=Every(180_000))])

    stored = await the_only(engine)
    assert (stored.schedule.timing, stored.next_at) == (Every(180_000), THIRD)
    assert not await is_told(engine)


@pytest.mark.parametrize("period_ms", [60_000, 180_000], ids=["same timing", "other timing"])
async def test_a_schedule_stored_again_stays_paused(engine: Engine, clock: FakeClock, period_ms: int) -> None:
    """C1: a worker that starts does not undo what an operator did."""
    await store(engine, [every_minute()])
    await pause(engine, "report", paused=True)

    await store(engine, [replace(every_minute(), timing=Every(period_ms))])

    assert (await the_only(engine)).paused
    clock.advance(3 * MINUTE)
    assert not await is_told(engine)


async def test_a_schedule_that_fires_while_it_is_stored_again_is_stored_after_that(
    engine: Engine, clock: FakeClock
) -> None:
    """C1: no instant comes back because a worker has started."""
    await a_due_schedule(engine, clock)
    changed = every_minute(job=a_job(id="pattern", task="tests.better_report"))

    class Overtaken(Around):
        async def records(self, kind: str, **asked: Any) -> Read:
            read = await super().records(kind, **asked)
            await fire(engine)
            return read

    overtaken: Any = Overtaken(engine)
    await store(overtaken, [changed])

    stored = await the_only(engine)
    assert (stored.schedule, stored.last_at, stored.next_at) == (changed, FIRST, SECOND)


async def test_a_schedule_outlives_a_restart(make: Make, engine: Engine, clock: FakeClock) -> None:
    """C1."""
    await a_due_schedule(engine, clock)
    before = await the_only(engine)
    if not isinstance(engine, MemoryEngine):
        await engine.close()
        engine = await make().open()

    assert await the_only(engine) == before
    await fire(engine)
    assert await order(engine) == [JOB]
    await engine.close()


async def test_everything_that_a_schedule_says_is_kept(engine: Engine) -> None:
    """C1."""
    given = Schedule(
        name="tägliche:Übersicht",
        timing=Cron("0 9 * * mon-fri", "Europe/Paris"),
        job=a_job("é", id="pattern", queue="mail", priority=5, headers={"a": "b"}, expires_in_ms=1000),
        misfire=Misfire.ALL,
        misfire_limit=7,
        misfire_after_ms=5,
        overlap=Overlap.QUEUE_ONE,
        jitter_ms=11,
        declared=True,
    )

    await store(engine, [given])

    assert (await the_only(engine)).schedule == given


async def test_arguments_too_large_for_a_record_are_refused_with_the_name_of_their_schedule(
    engine: Engine,
) -> None:
    with pytest.raises(RecordTooLarge, match="schedule 'large'"):
        await store(engine, [every_minute(), every_minute("large", job=a_job("x" * 70_000))])
    assert await all_schedules(engine) == []


# --- firing ------------------------------------------------------------------------------


async def test_a_schedule_is_due_when_its_instant_has_come(engine: Engine, clock: FakeClock) -> None:
    """C1, I13."""
    await store(engine, [every_minute("soon"), replace(every_minute("later"), timing=Every(120_000))])

    clock.advance(MINUTE - A_MOMENT)
    assert await fire(engine) is None
    assert await found(engine) == []
    clock.advance(A_MOMENT)
    await fire(engine)

    assert await order(engine) == [firing_id("soon", FIRST)]


async def test_firing_puts_the_job_and_goes_on_to_the_next_instant(engine: Engine, clock: FakeClock) -> None:
    """T1, C1."""
    await a_due_schedule(engine, clock)

    assert await fire(engine) == MINUTE

    stored = await the_only(engine)
    assert (stored.last_at, stored.next_at) == (FIRST, SECOND)
    assert await order(engine) == [JOB]
    assert await fire(engine) is None


async def test_an_instant_fires_once(engine: Engine, clock: FakeClock) -> None:
    """C1, I1: also when its job has run and gone, and somebody has seen before that it was due."""
    await a_due_schedule(engine, clock)
    late = await due_as_of_now(engine)
    await fire(engine)
    await settle_one(engine, await take_one(engine), Done())

    await fire(engine)
    assert await fire(late) == MINUTE  # somebody else goes on with it

    assert await take(engine) == []
    assert (await the_only(engine)).next_at == SECOND


async def test_of_many_who_fire_an_instant_at_once_one_does(
    make: Make, engine: Engine, clock: FakeClock
) -> None:
    """C1, I1."""
    await a_due_schedule(engine, clock)
    async with AsyncExitStack() as stack:
        handles = [engine]
        for _ in range(3):
            handles.append(await make().open())
            stack.push_async_callback(handles[-1].close)
        late = [await due_as_of_now(handle) for handle in handles * 4]

        await asyncio.gather(*map(fire, late))

        assert (await counts(engine)).put == 1
        assert (await the_only(engine)).next_at == SECOND


async def test_an_instant_may_pass_without_a_job(engine: Engine, clock: FakeClock) -> None:
    """C1."""
    await store(engine, [every_minute(misfire=Misfire.SKIP, misfire_after_ms=0)])
    clock.advance(2 * MINUTE + A_MOMENT)

    await fire(engine)

    assert await found(engine) == []
    stored = await the_only(engine)
    assert (stored.last_at, stored.next_at) == (FIRST, THIRD)


async def test_an_instant_whose_job_is_already_there_is_settled_without_a_second(
    engine: Engine, clock: FakeClock
) -> None:
    """T1, C1, I1."""
    await a_due_schedule(engine, clock)
    await put_one(engine, id=JOB, chosen=True)

    await fire(engine)

    assert await order(engine) == [JOB]
    assert (await the_only(engine)).last_at == FIRST


async def test_an_instant_whose_key_is_held_is_settled_without_a_job(
    engine: Engine, clock: FakeClock
) -> None:
    """C1, I12: what keeps the jobs of a schedule from overlapping."""
    holder = await put_one(engine, unique="k")
    await a_due_schedule(engine, clock, job=a_job(id="pattern", unique="k"))

    await fire(engine)

    assert await found(engine) == [holder.id]
    stored = await the_only(engine)
    assert (stored.last_at, stored.next_at) == (FIRST, SECOND)


async def test_the_job_of_an_instant_may_be_due_later(engine: Engine, clock: FakeClock) -> None:
    """C1, I2: what jitter asks for."""
    await a_due_schedule(engine, clock, jitter_ms=30_000)

    await fire(engine)

    due_at = (await info_of(engine, JOB)).due_at
    assert FIRST < due_at < FIRST + MINUTE / 2
    assert await take(engine) == []
    clock.advance(due_at - clock.now)
    assert len(await take(engine)) == 1


async def test_a_schedule_that_was_late_settles_all_its_instants_in_their_order(
    engine: Engine, clock: FakeClock
) -> None:
    """C1."""
    await store(engine, [every_minute()])
    clock.advance(MINUTE * 2)

    await fire(engine)

    assert await order(engine) == [JOB, firing_id("report", SECOND)]
    stored = await the_only(engine)
    assert (stored.last_at, stored.next_at) == (SECOND, THIRD)


async def test_schedules_are_not_held_to_caps(engine: Engine, clock: FakeClock) -> None:
    """C1: a queue that is full loses no instant."""
    await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 1))
    await put_one(engine)
    await a_due_schedule(engine, clock)

    await fire(engine)

    assert (await counts(engine)).ready == 2


async def test_a_sweep_tells_that_an_instant_has_come(engine: Engine, clock: FakeClock) -> None:
    """C1: so that nobody has to ask for due schedules just to see."""
    await engine.put([a_job(delay_ms=600_000)])
    await store(engine, [every_minute()])
    swept = await engine.sweep()
    assert (swept.records_due, swept.next_in) == ((), MINUTE)

    clock.advance(MINUTE)

    assert await is_told(engine)
    assert await is_told(engine)  # until somebody fires it
    await fire(engine)
    assert not await is_told(engine)


async def test_a_sweep_that_has_other_work_tells_it_too(engine: Engine, clock: FakeClock) -> None:
    """C1."""
    await put_one(engine, delay_ms=1000)
    await a_due_schedule(engine, clock)

    swept = await engine.sweep()

    assert (swept.promoted, swept.records_due) == (1, (KIND,))


# --- pausing and removing ----------------------------------------------------------------


async def test_a_paused_schedule_does_not_fire(engine: Engine, clock: FakeClock) -> None:
    """C1: not even by somebody who has seen before that it was due."""
    await a_due_schedule(engine, clock)
    late = await due_as_of_now(engine)

    assert await pause(engine, "report", paused=True)
    await fire(late)
    assert await fire(engine) is None
    assert not await is_told(engine)
    assert (await the_only(engine)).paused
    assert await found(engine) == []

    assert await pause(engine, "report", paused=False)
    assert await is_told(engine)
    await fire(engine)
    assert await order(engine) == [JOB]


async def test_a_schedule_that_is_so_already_is_neither_paused_nor_resumed(engine: Engine) -> None:
    """C1."""
    await store(engine, [every_minute()])

    assert not await pause(engine, "report", paused=False)
    await pause(engine, "report", paused=True)
    assert not await pause(engine, "report", paused=True)
    assert not await pause(engine, "unknown", paused=True)


async def test_a_removed_schedule_is_gone(engine: Engine, clock: FakeClock) -> None:
    """C1: also for somebody who has seen before that it was due, and if it is stored again meanwhile."""
    await a_due_schedule(engine, clock)
    late = await due_as_of_now(engine)

    assert await remove(engine, "report")

    await fire(late)
    assert await all_schedules(engine) == []
    assert not await remove(engine, "report")
    await store(engine, [every_minute()])
    await fire(late)
    assert await found(engine) == []
    assert (await the_only(engine)).next_at == SECOND


# --- what nobody here can fire -----------------------------------------------------------


async def test_a_schedule_that_nobody_here_declares_is_moved_on_and_keeps_its_instant(
    engine: Engine, clock: FakeClock
) -> None:
    """Who declares it has had time to fire it; and when such a worker starts, it is due at once."""
    theirs = every_minute("theirs", declared=True, misfire_after_ms=3_600_000)
    await store(engine, [theirs])
    clock.advance(MINUTE)
    await look(engine)
    assert await is_told(engine)  # it is left to those who know it

    clock.advance(LEFT_ALONE)
    await look(engine)
    clock.advance(LEFT_ALONE - timedelta(seconds=1))
    assert not await is_told(engine)
    clock.advance("1s")
    assert await is_told(engine)  # again after as long as it had waited
    clock.advance(LEFT_ALONE)
    await look(engine)
    assert not await is_told(engine)
    stored = await the_only(engine)
    assert (stored.next_at, stored.last_at) == (FIRST, None)

    await store(engine, [theirs])  # a worker starts that declares it
    assert await is_told(engine)
    await fire(engine, declared=("theirs",))
    assert (await order(engine))[0] == firing_id("theirs", FIRST)
    assert (await counts(engine)).put == 1 + 3 * LEFT_ALONE // MINUTE


def value_of(schedule: Schedule) -> bytes:
    return msgspec.json.encode(ScheduleRecord(schedule=schedule, next_at=FIRST))


UNREADABLE = {
    "torn": b"{torn",
    "no text": value_of(every_minute("a")).replace(b"tests.report", b"tests.\xff"),
    "under another name": value_of(every_minute("b")),
    "without a zone": value_of(every_minute("a")).replace(b'00Z"', b'00"'),
}


@pytest.mark.parametrize("value", UNREADABLE.values(), ids=UNREADABLE)
async def test_an_unreadable_record_stops_no_other_and_is_moved_on(
    engine: Engine, clock: FakeClock, caplog: pytest.LogCaptureFixture, value: bytes
) -> None:
    """L7: and it is told once."""
    torn = Change(kind=KIND, name="a", value=value, expected=0, at=MINUTE)
    await piece_of(engine, Records).swap([Swap(changes=(torn,))])
    await store(engine, [every_minute()])
    clock.advance(MINUTE)
    firer = Firer(engine, ())
    for _ in range(2):
        await firer.fire_due()
    assert await order(engine) == [JOB]
    assert [record.getMessage() for record in caplog.records] == ["schedule a cannot be read by this version"]
    clock.advance(LEFT_ALONE)
    await firer.fire_due()
    [record] = (await piece_of(engine, Records).records(KIND, names=["a"])).records
    assert record.value == torn.value
    assert record.at is not None
    assert record.at > clock.now
    assert [stored.schedule.name for stored in await all_schedules(engine)] == ["report"]
    assert await schedule_named(engine, "a") is None
    assert await pause(engine, "a", paused=True) is False
    assert await remove(engine, "a")


def filled(room: int) -> Schedule:
    """Its value leaves so many bytes of a record."""
    empty = value_of(every_minute("a", job=a_job(headers={"x": ""})))
    return every_minute("a", job=a_job(headers={"x": "x" * (MAX_VALUE - room - len(empty))}))


async def test_one_that_cannot_be_fired_stops_no_other_and_is_moved_on(
    engine: Engine, clock: FakeClock
) -> None:
    """L7: here there is no room for the last instant, which is stored when it fires."""
    change = Change(kind=KIND, name="a", value=value_of(filled(10)), expected=0, at=MINUTE)
    await piece_of(engine, Records).swap([Swap(changes=(change,))])
    await store(engine, [every_minute()])
    clock.advance(MINUTE)
    await fire(engine)
    assert await order(engine) == [JOB]
    clock.advance(LEFT_ALONE)
    await fire(engine)
    [record] = (await piece_of(engine, Records).records(KIND, names=["a"])).records
    assert record.at is not None
    assert record.at > clock.now


async def test_a_thousand_due_schedules_of_others_do_not_hide_our_own(
    engine: Engine, clock: FakeClock
) -> None:
    others = [every_minute(f"{n:04}", declared=True) for n in range(1000)]
    await store(engine, [*others, every_minute("ours", declared=True)])
    clock.advance(MINUTE)

    await fire(engine, declared=("ours",))

    assert await order(engine) == [firing_id("ours", FIRST)]


async def test_a_reminder_that_came_too_early_fires_nothing(engine: Engine, clock: FakeClock) -> None:
    """The value is the truth."""
    await keep(engine, every_minute(), SECOND)
    early = Change(kind=KIND, name="report", value=KEEP, at=MINUTE)
    await piece_of(engine, Records).swap([Swap(changes=(early,))])
    clock.advance(MINUTE)

    assert await fire(engine) == MINUTE

    assert await found(engine) == []
    assert not await is_told(engine)
    clock.advance(MINUTE)
    await fire(engine)
    assert await order(engine) == [firing_id("report", SECOND)]
