"""Firing: each instant of a schedule is settled by exactly one of those who try."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from msgspec.structs import replace

from skep.broker import Engine, Rule, RuleKind, Scope
from skep.job import Done
from skep.schedule import Cron, Every, Misfire, Overlap, Schedule, firing_id
from skep.testing.clock import START, FakeClock
from skep.testing.contract.steps import (
    A_MOMENT,
    Another,
    counts,
    found,
    order,
    put_one,
    settle_one,
    take,
    take_one,
)
from skep.testing.make import a_job

MINUTE = timedelta(minutes=1)
FIRST, SECOND, THIRD = START + MINUTE, START + 2 * MINUTE, START + 3 * MINUTE


def every_minute(name: str = "report", task: str = "tests.report") -> Schedule:
    return Schedule(name=name, timing=Every(60_000), job=a_job(id="pattern", task=task))


async def a_due_schedule(engine: Engine, clock: FakeClock) -> None:
    await engine.put_schedule(every_minute(), FIRST)
    clock.advance(MINUTE)


class Firing:
    async def test_a_schedule_is_kept_under_its_name_with_its_next_instant(self, engine: Engine) -> None:
        """C1."""
        schedule = every_minute()

        await engine.put_schedule(schedule, FIRST)

        [record] = await engine.schedules()
        assert (record.schedule, record.next_at) == (schedule, FIRST)
        assert (record.last_at, record.paused) == (None, False)

    async def test_schedules_are_listed_by_name(self, engine: Engine) -> None:
        """C1."""
        for name in ("b", "c", "a"):
            await engine.put_schedule(every_minute(name), FIRST)

        assert [record.schedule.name for record in await engine.schedules()] == ["a", "b", "c"]

    async def test_a_schedule_is_due_when_its_instant_has_come(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """C1, I13."""
        await engine.put_schedule(every_minute("soon"), FIRST)
        await engine.put_schedule(every_minute("later"), SECOND)

        clock.advance(MINUTE - A_MOMENT)
        assert await engine.schedules(due=True) == []
        clock.advance(A_MOMENT)

        assert [record.schedule.name for record in await engine.schedules(due=True)] == ["soon"]

    async def test_firing_puts_the_job_and_goes_on_to_the_next_instant(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T1, C1."""
        await a_due_schedule(engine, clock)
        job = a_job(id=firing_id("report", FIRST), chosen=True)

        assert await engine.fire("report", FIRST, job, SECOND) is True

        [record] = await engine.schedules()
        assert (record.last_at, record.next_at) == (FIRST, SECOND)
        assert await order(engine) == [job.id]
        assert await engine.schedules(due=True) == []

    async def test_an_instant_fires_once(self, engine: Engine, clock: FakeClock) -> None:
        """C1, I1: also when its job has run and gone."""
        await a_due_schedule(engine, clock)
        job = a_job(id=firing_id("report", FIRST), chosen=True)
        await engine.fire("report", FIRST, job, SECOND)
        await settle_one(engine, await take_one(engine), Done())

        assert await engine.fire("report", FIRST, job, SECOND) is False

        assert await take(engine) == []
        [record] = await engine.schedules()
        assert record.next_at == SECOND

    async def test_of_many_who_fire_an_instant_at_once_one_does(
        self, engine: Engine, another: Another, clock: FakeClock
    ) -> None:
        """C1, I1."""
        handles = [engine, *[await another() for _ in range(3)]]
        await a_due_schedule(engine, clock)

        answers = await asyncio.gather(
            *(handle.fire("report", FIRST, a_job(), SECOND) for handle in handles * 4)
        )

        assert sorted(answers) == [False] * 15 + [True]
        assert (await counts(engine)).ready == 1

    async def test_an_instant_may_pass_without_a_job(self, engine: Engine, clock: FakeClock) -> None:
        """C1."""
        await a_due_schedule(engine, clock)

        assert await engine.fire("report", FIRST, None, THIRD) is True

        assert await found(engine) == []
        [record] = await engine.schedules()
        assert (record.last_at, record.next_at) == (FIRST, THIRD)

    async def test_an_instant_that_has_not_come_does_not_fire(self, engine: Engine, clock: FakeClock) -> None:
        """C1, I13."""
        await engine.put_schedule(every_minute(), FIRST)
        clock.advance(MINUTE - A_MOMENT)

        assert await engine.fire("report", FIRST, a_job(), SECOND) is False
        assert await found(engine) == []

    async def test_only_the_next_instant_fires(self, engine: Engine, clock: FakeClock) -> None:
        """C1."""
        await engine.put_schedule(every_minute(), SECOND)
        clock.advance(MINUTE * 10)

        assert await engine.fire("report", FIRST, a_job(), SECOND) is False
        assert await engine.fire("report", THIRD, a_job(), SECOND) is False
        assert await engine.fire("unknown", SECOND, a_job(), THIRD) is False
        assert await found(engine) == []

    async def test_an_instant_whose_job_is_already_there_is_settled_without_a_second(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T1, C1, I1."""
        await a_due_schedule(engine, clock)
        job = await put_one(engine, id=firing_id("report", FIRST), chosen=True)

        assert await engine.fire("report", FIRST, job, SECOND) is True

        assert await order(engine) == [job.id]

    async def test_a_schedule_that_was_late_goes_on_instant_by_instant(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """C1."""
        await engine.put_schedule(every_minute(), FIRST)
        clock.advance(MINUTE * 2)

        assert await engine.fire("report", FIRST, a_job("one"), SECOND) is True
        assert [record.next_at for record in await engine.schedules(due=True)] == [SECOND]
        assert await engine.fire("report", SECOND, a_job("two"), THIRD) is True
        assert await engine.fire("report", THIRD, a_job("three"), THIRD + MINUTE) is False

        assert (await counts(engine)).ready == 2

    async def test_a_paused_schedule_does_not_fire(self, engine: Engine, clock: FakeClock) -> None:
        """C1."""
        await a_due_schedule(engine, clock)

        assert await engine.pause_schedule("report", True) is True
        assert await engine.fire("report", FIRST, a_job(), SECOND) is False
        assert await engine.schedules(due=True) == []
        [record] = await engine.schedules()
        assert record.paused

        assert await engine.pause_schedule("report", False) is True
        assert await engine.fire("report", FIRST, a_job(), SECOND) is True

    async def test_a_schedule_that_is_so_already_is_neither_paused_nor_resumed(self, engine: Engine) -> None:
        """C1."""
        await engine.put_schedule(every_minute(), FIRST)

        assert await engine.pause_schedule("report", False) is False
        await engine.pause_schedule("report", True)
        assert await engine.pause_schedule("report", True) is False
        assert await engine.pause_schedule("unknown", True) is False

    async def test_a_removed_schedule_is_gone(self, engine: Engine, clock: FakeClock) -> None:
        """C1."""
        await a_due_schedule(engine, clock)

        assert await engine.remove_schedule("report") is True

        assert await engine.fire("report", FIRST, a_job(), SECOND) is False
        assert await engine.schedules() == []
        assert await engine.remove_schedule("report") is False

    async def test_a_schedule_put_again_with_its_timing_keeps_its_next_instant(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """C1: so that restarting a worker neither skips nor repeats an instant."""
        await a_due_schedule(engine, clock)
        changed = every_minute(task="tests.better_report")

        await engine.put_schedule(changed, SECOND)

        [record] = await engine.schedules()
        assert (record.schedule, record.next_at) == (changed, FIRST)

    async def test_a_schedule_put_again_with_another_timing_begins_anew(self, engine: Engine) -> None:
        """C1."""
        await engine.put_schedule(every_minute(), FIRST)

        await engine.put_schedule(replace(every_minute(), timing=Every(180_000)), THIRD)

        [record] = await engine.schedules()
        assert (record.schedule.timing, record.next_at) == (Every(180_000), THIRD)

    async def test_an_instant_whose_key_is_held_is_settled_without_a_job(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """C1, I12: what keeps the jobs of a schedule from overlapping."""
        holder = await put_one(engine, unique="k")
        await a_due_schedule(engine, clock)

        assert await engine.fire("report", FIRST, a_job(unique="k"), SECOND) is True

        assert await found(engine) == [holder.id]
        [record] = await engine.schedules()
        assert (record.last_at, record.next_at) == (FIRST, SECOND)

    async def test_the_job_of_an_instant_may_be_due_later(self, engine: Engine, clock: FakeClock) -> None:
        """C1, I2: what jitter asks for."""
        await a_due_schedule(engine, clock)

        await engine.fire("report", FIRST, a_job(due_at=FIRST + A_MOMENT), SECOND)

        assert await take(engine) == []
        clock.advance(A_MOMENT)
        assert len(await take(engine)) == 1

    async def test_everything_that_a_schedule_says_is_kept(self, engine: Engine) -> None:
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

        await engine.put_schedule(given, FIRST)

        [record] = await engine.schedules()
        assert record.schedule == given

    async def test_a_sweep_tells_that_an_instant_has_come(self, engine: Engine, clock: FakeClock) -> None:
        """C1: so that nobody has to ask for due schedules just to see."""
        await engine.put_schedule(every_minute(), FIRST)
        assert not (await engine.sweep()).schedules_due

        clock.advance(MINUTE)

        assert (await engine.sweep()).schedules_due
        assert (await engine.sweep()).schedules_due  # until somebody fires it
        await engine.fire("report", FIRST, None, SECOND)
        assert not (await engine.sweep()).schedules_due

    async def test_a_sweep_that_has_other_work_tells_it_too(self, engine: Engine, clock: FakeClock) -> None:
        """C1."""
        await put_one(engine, delay_ms=1000)
        await a_due_schedule(engine, clock)

        swept = await engine.sweep()

        assert (swept.promoted, swept.schedules_due) == (1, True)

    async def test_a_sweep_does_not_speak_of_paused_schedules(self, engine: Engine, clock: FakeClock) -> None:
        """C1."""
        await a_due_schedule(engine, clock)
        await engine.pause_schedule("report", True)

        assert not (await engine.sweep()).schedules_due

    async def test_schedules_are_not_held_to_caps(self, engine: Engine, clock: FakeClock) -> None:
        """C1."""
        await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 1))
        await put_one(engine)
        await a_due_schedule(engine, clock)

        assert await engine.fire("report", FIRST, a_job(), SECOND) is True
        assert (await counts(engine)).ready == 2

    @pytest.mark.parametrize("period_ms", [60_000, 180_000], ids=["same timing", "other timing"])
    async def test_a_schedule_put_again_stays_paused(self, engine: Engine, period_ms: int) -> None:
        """C1: a worker that starts does not undo what an operator did."""
        await engine.put_schedule(every_minute(), FIRST)
        await engine.pause_schedule("report", True)

        await engine.put_schedule(replace(every_minute(), timing=Every(period_ms)), THIRD)

        [record] = await engine.schedules()
        assert record.paused
