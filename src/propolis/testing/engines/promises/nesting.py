"""Nesting: a batch may be one member of another."""

from __future__ import annotations

from propolis.core.batch import Batch, BatchState
from propolis.core.job import Dead, Done, State
from propolis.core.protocols import Engine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import a_job
from propolis.testing.engines.steps import (
    CALLBACKS,
    HOUR,
    a_batch,
    called_back,
    end_next,
    members_of,
    settle_one,
    status,
    take_one,
)


class NestingPromise:
    async def test_a_nested_batch_is_one_member_of_its_parent(self, engine: Engine) -> None:
        """B1, I11."""
        parent = a_batch()
        await engine.put_batch(parent, members_of(parent, 1), seal=False)
        child = Batch(id="child", parent=parent.id, member=1)
        await engine.put_batch(child, members_of(child, 2))
        await engine.seal(parent.id)
        assert (await status(engine, "child")).parent == parent.id
        assert (await status(engine, parent.id)).total == 2

        await end_next(engine, Done(), Done())
        assert await called_back(engine) == []
        await end_next(engine, Done())

        now = await status(engine, parent.id)
        assert (now.state, now.done) == (BatchState.SUCCESS, 2)
        assert await called_back(engine) == ["on_succeeded", "on_finished"]
        nested = (await engine.members(parent.id))[1]
        assert (nested.member, nested.id, nested.state) == (1, "child", State.DONE)

    async def test_a_nested_batch_that_does_not_succeed_is_a_dead_member(self, engine: Engine) -> None:
        """B1, I11."""
        parent = a_batch()
        await engine.put_batch(parent, seal=False)
        child = Batch(id="child", parent=parent.id)
        await engine.put_batch(child, members_of(child, 2))
        await engine.seal(parent.id)

        await end_next(engine, Done(), Dead())

        now = await status(engine, parent.id)
        assert (now.state, now.dead) == (BatchState.DEAD, 1)
        assert await called_back(engine) == ["on_failed", "on_finished"]

    async def test_a_nested_batch_that_is_deleted_is_a_cancelled_member(self, engine: Engine) -> None:
        """B1, I11, L3: a parent never waits for something that is gone."""
        parent = a_batch()
        await engine.put_batch(parent, seal=False)
        child = Batch(id="child", parent=parent.id)
        await engine.put_batch(child, members_of(child, 2))
        await engine.seal(parent.id)

        await engine.delete_batch("child")

        now = await status(engine, parent.id)
        assert (now.cancelled, now.pending) == (1, 0)
        assert await called_back(engine) == ["on_failed", "on_finished"]

    async def test_a_nested_batch_that_is_swept_unfinished_is_a_cancelled_member(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """B1, I11, L3."""
        parent = a_batch()
        await engine.put_batch(parent, seal=False)
        child = Batch(id="child", parent=parent.id, open_for_ms=3_600_000)
        await engine.put_batch(child, members_of(child, 1), seal=False)
        await engine.seal(parent.id)

        clock.advance(HOUR)
        await engine.sweep()

        assert (await status(engine, parent.id)).cancelled == 1
        assert await called_back(engine) == ["on_failed", "on_finished"]

    async def test_ends_are_passed_up_through_all_generations(self, engine: Engine) -> None:
        """B1, I11."""
        top = a_batch()
        middle, bottom = Batch(id="middle", parent=top.id), Batch(id="bottom", parent="middle", keep_for_ms=0)
        await engine.put_batch(top, seal=False)
        await engine.put_batch(middle, seal=False)
        await engine.put_batch(bottom, members_of(bottom, 1))
        await engine.seal("middle")
        await engine.seal(top.id)

        await end_next(engine, Done())

        assert (await status(engine, "middle")).state is BatchState.SUCCESS
        assert await called_back(engine) == ["on_succeeded", "on_finished"]

    async def test_a_callback_may_be_a_member_of_the_batch_around_its_own(self, engine: Engine) -> None:
        """B1, I11: that does not end in between, although the inner batch was the last of its members."""
        outer = a_batch()
        await engine.put_batch(outer, seal=False)
        called = a_job(queue=CALLBACKS, batch=outer.id, member=1)
        inner = Batch(id="inner", parent=outer.id, on_finished=called)
        await engine.put_batch(inner, members_of(inner, 2), seal=True)
        await engine.seal(outer.id)

        await end_next(engine, Done(), Done())

        now = await status(engine, outer.id)
        assert (now.total, now.done, now.pending) == (2, 1, 1)
        await settle_one(engine, await take_one(engine, CALLBACKS), Done(result=b"5"))
        assert (await status(engine, outer.id)).state is BatchState.SUCCESS
        members = await engine.members(outer.id)
        assert [(each.id, each.state, each.result) for each in members] == [
            (inner.id, State.DONE, None),
            (called.id, State.DONE, b"5"),
        ]
