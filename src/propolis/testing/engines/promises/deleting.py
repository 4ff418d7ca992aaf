"""Deleting: only what has ended is forgotten, when somebody asks or when its time is over."""

from __future__ import annotations

import msgspec
import pytest

from propolis.core.job import Dead, Done, Retried, State
from propolis.core.protocols import BITE, REMOVALS, Engine, Records
from propolis.core.transitions import Retention
from propolis.testing.clock import FakeClock
from propolis.testing.engines.promises.endings import ENDINGS, MORTAL, Way, every_ending
from propolis.testing.engines.steps import (
    A_MOMENT,
    HOUR,
    a_cancelled_job,
    a_dead_job,
    a_done_job,
    counts,
    found,
    info_of,
    order,
    put_one,
    put_some,
    settle_one,
    take,
    take_one,
)


class DeletingPromise:
    @every_ending
    async def test_an_ended_job_can_be_deleted_once(
        self, engine: Engine, clock: FakeClock, ending: Way
    ) -> None:
        """T14, I8."""
        job = await put_one(engine, **MORTAL)
        await ending.go(engine, clock, job.id)

        assert await engine.delete([job.id]) == [True]

        assert await engine.get(job.id) is None
        assert await found(engine) == []
        assert await engine.delete([job.id]) == [False]
        now = await counts(engine)
        assert (now.total, now.put, now.deleted) == (0, 1, 1)

    async def test_a_job_that_has_not_ended_is_never_deleted(self, engine: Engine) -> None:
        """T14."""
        running = await put_one(engine)
        await take_one(engine)
        ready = await put_one(engine)
        scheduled = await put_one(engine, delay_ms=1000)

        answers = await engine.delete([running.id, ready.id, scheduled.id, "unknown"])

        assert answers == [False, False, False, False]
        assert await found(engine) == [running.id, ready.id, scheduled.id]

    async def test_many_jobs_are_deleted_in_one_call_and_answered_in_its_order(self, engine: Engine) -> None:
        """T14."""
        one, two = await a_dead_job(engine), await a_done_job(engine)

        assert await engine.delete([two.id, "unknown", one.id, two.id]) == [True, False, True, False]

    async def test_a_job_is_kept_for_as_long_as_its_outcome_says(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T4, T6, T14."""
        done = await a_done_job(engine, keep=HOUR)
        dead = await a_dead_job(engine, Dead(keep=HOUR * 2))

        clock.advance(HOUR - A_MOMENT)
        assert (await engine.sweep()).removed == 0
        clock.advance(A_MOMENT)
        assert (await engine.sweep()).removed == 1
        assert await found(engine) == [dead.id]
        clock.advance(HOUR)
        assert (await engine.sweep()).removed == 1

        assert await engine.get(done.id) is None
        assert (await counts(engine)).deleted == 2

    @pytest.mark.parametrize("retention", [Retention(dead_for=HOUR, cancelled_for=HOUR * 2)], ids=["short"])
    async def test_the_engine_keeps_what_nobody_said_how_long_to_keep(
        self, engine: Engine, clock: FakeClock, retention: Retention
    ) -> None:
        """T6, T9, T14, S4.22."""
        dead = await a_dead_job(engine)
        cancelled = await a_cancelled_job(engine)

        clock.advance(retention.dead_for - A_MOMENT)
        await engine.sweep()
        assert await found(engine) == [dead.id, cancelled.id]
        clock.advance(A_MOMENT)
        await engine.sweep()
        assert await found(engine) == [cancelled.id]
        clock.advance(retention.cancelled_for - retention.dead_for)
        await engine.sweep()

        assert await found(engine) == []

    @pytest.mark.parametrize("retention", [Retention(dead_max=2)], ids=["two"])
    async def test_a_bounded_dead_shelf_keeps_the_newest_of_each_queue(
        self, engine: Engine, clock: FakeClock, retention: Retention
    ) -> None:
        """T6, T14, S1.8, S4.22: with room for two, four failures leave the two newest."""
        assert retention.dead_max == 2
        other = await a_dead_job(engine, queue="other")
        dead = []
        for _ in range(4):
            clock.advance("1s")
            dead.append((await a_dead_job(engine)).id)
        await engine.sweep()

        assert await found(engine, queue="default", state=State.DEAD) == dead[2:]
        assert await found(engine, queue="other") == [other.id]

    @pytest.mark.parametrize("retention", [Retention(dead_max=2)], ids=["two"])
    async def test_the_newest_on_the_dead_shelf_is_the_one_that_died_last(
        self, engine: Engine, clock: FakeClock, retention: Retention
    ) -> None:
        """T6, T14, S1.8."""
        assert retention.dead_max == 2
        ids = await put_some(engine, 3)
        for lease in reversed(await take(engine)):
            clock.advance("1s")
            await settle_one(engine, lease, Dead())
        await engine.sweep()

        assert await found(engine, state=State.DEAD) == ids[:2]

    async def test_sweeping_forgets_up_to_its_limit(self, engine: Engine, clock: FakeClock) -> None:
        """T14."""
        for _ in range(3):
            await a_done_job(engine, keep=HOUR)
        clock.advance(HOUR)

        assert [(await engine.sweep(limit=2)).removed for _ in range(3)] == [2, 1, 0]

    async def test_a_dropped_queue_is_forgotten_with_what_waits_and_what_has_ended(
        self, engine: Engine
    ) -> None:
        """T9, T14, S0.2."""
        await a_dead_job(engine, queue="mail")
        await put_one(engine, queue="mail")
        await put_one(engine, queue="mail", delay_ms=1000)
        other = await put_one(engine, queue="sms")

        assert await engine.drop("mail") == 3

        assert await take(engine, "mail") == []
        assert await found(engine) == [other.id]
        assert list(await engine.queues()) == ["sms"]

    async def test_a_running_job_of_a_dropped_queue_finishes(self, engine: Engine) -> None:
        """T14: a running job is never deleted."""
        job = await put_one(engine, queue="mail")
        lease = await take_one(engine, "mail")

        assert await engine.drop("mail") == 0

        assert (await info_of(engine, job.id)).state is State.RUNNING
        await settle_one(engine, lease, Done())
        assert await engine.get(job.id) is None

    async def test_dropping_a_queue_that_is_not_there_is_fine(self, engine: Engine) -> None:
        """S0.7."""
        assert await engine.drop("never") == 0
        await put_one(engine)
        assert await engine.drop("default") == 1
        assert await engine.drop("default") == 0

    async def test_a_dropped_queue_can_be_used_again(self, engine: Engine) -> None:
        """T1, S0.7."""
        await put_one(engine)
        await engine.drop("default")

        job = await put_one(engine)

        assert await order(engine) == [job.id]

    async def test_a_large_queue_is_dropped_in_bites_and_nothing_of_it_runs_any_more(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """L5.3, T9, T14: what is put after the drop runs, also with a lower priority."""
        await put_some(engine, BITE // 2)
        await put_some(engine, BITE, delay_ms=1000)
        await put_some(engine, BITE)

        gone = await engine.drop("default")
        new = await put_one(engine, priority=-1)

        assert BITE <= gone <= 2.5 * BITE
        clock.advance("1s")
        assert set(await order(engine)) <= {new.id}  # what is in its way goes in bites
        for _ in range(5):
            await engine.sweep()
        assert await found(engine) == [new.id]
        now = await counts(engine)
        assert (now.total, now.put - now.deleted) == (1, 1)

    async def test_how_far_a_large_drop_is_can_be_read(self, engine: Engine) -> None:
        """L5.3."""
        await put_some(engine, 3 * BITE)
        gone = await engine.drop("default")
        if gone == 3 * BITE:
            pytest.skip("this engine drops everything at once")
        assert isinstance(engine, Records)

        removed = []
        while page := (await engine.records(REMOVALS)).records:
            assert [record.name for record in page] == ["queue:default"]
            removed.append(msgspec.json.decode(page[0].value)["removed"])
            await engine.sweep()

        assert removed[0] == gone
        assert removed == sorted(removed)
        assert len(removed) < 6
        assert await found(engine) == []

    async def test_jobs_are_what_was_put_less_what_was_deleted(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """I8."""
        await a_done_job(engine, keep=None)
        await a_done_job(engine, keep=HOUR)
        await a_dead_job(engine)
        await a_cancelled_job(engine)
        moved = await put_one(engine)
        await settle_one(engine, await take_one(engine), Retried(queue="slow"))
        await put_some(engine, 3, delay_ms=1000)

        for _ in range(2):
            for name, now in (await engine.queues()).items():
                assert now.total == now.put - now.deleted == len(await found(engine, queue=name))
            clock.advance(HOUR)
            await engine.sweep()
        assert await found(engine, queue="slow") == [moved.id]

    @pytest.mark.parametrize("retention", [Retention(dead_max=2)], ids=["two"])
    async def test_a_bounded_dead_shelf_is_bounded_however_jobs_die(
        self, engine: Engine, clock: FakeClock, retention: Retention
    ) -> None:
        """T6, T8, T11, T12, T14, S1.8."""
        assert retention.dead_max == 2
        ids = []
        for way in ENDINGS:
            if way.state is State.DEAD:
                ids.append((await put_one(engine, **MORTAL)).id)
                await way.go(engine, clock, ids[-1])
                clock.advance("1s")
        await engine.sweep()

        assert len(ids) == 4
        assert await found(engine, state=State.DEAD) == ids[2:]
        now = await counts(engine)
        assert (now.dead, now.deleted) == (2, 2)
