"""Jobs that share the task of a slot, and nothing else."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

import pytest
from tests.unit.worker.working import record_of, until, work, working

from propolis import App
from propolis.app.context import current_job
from propolis.strategies import archive, dead
from propolis.values import State
from propolis.worker import Lane
from propolis.worker.calls.own_context import in_own_context

ONE_SLOT = [Lane({"default": 1}, 1)]
tenant: ContextVar[str] = ContextVar("tenant", default="nobody")


async def test_what_a_job_sets_in_its_context_is_gone_with_it(app: App) -> None:
    """F58, W.2: also what it sets after it has waited, and what its own tasks inherit."""
    seen: list[tuple[str, str]] = []

    @app.task
    async def job(name: str) -> None:
        before = tenant.get()
        await asyncio.sleep(0)
        tenant.set(name)
        await asyncio.sleep(0)

        async def inner() -> str:
            return tenant.get()

        seen.append((before, await asyncio.create_task(inner())))

    await job.many(["a", "b"]).aenqueue()
    await work(app, lanes=ONE_SLOT)
    assert seen == [("nobody", "a"), ("nobody", "b")]


async def test_hooks_and_middleware_are_in_the_context_of_their_job(app: App) -> None:
    """W.2."""
    seen: list[object] = []

    @app.middleware
    async def scoped(job: object, call: object) -> object:
        tenant.set("scoped")
        return await call()  # type: ignore[operator]

    @app.on_finished
    async def finished(job: object, result: object) -> None:
        seen.append((tenant.get(), current_job() is job))

    @app.task
    async def job() -> None:
        seen.append(tenant.get())

    await job.aenqueue()
    await work(app)
    assert seen == ["scoped", ("scoped", True)]
    assert tenant.get() == "nobody"


async def test_a_timer_that_a_job_left_behind_cancels_no_other(app: App) -> None:
    """F58, W.3: neither the slot, which would be missing for ever, nor the next job in it."""
    fired = asyncio.Event()

    @app.task(on_success=archive, on_error=dead)
    async def hostile(delay: float) -> None:
        task = asyncio.current_task()
        assert task is not None

        def late() -> None:
            task.cancel()
            fired.set()

        asyncio.get_running_loop().call_later(delay, late)

    @app.task(on_success=archive, on_error=dead)
    async def innocent() -> None:
        await fired.wait()
        await asyncio.sleep(0)

    async with working(app, lanes=ONE_SLOT) as worker:
        await hostile.aenqueue(0)
        await fired.wait()  # in the idle slot
        fired.clear()
        first = await hostile.aenqueue(0.05)
        second = await innocent.aenqueue()
        for handle in (first, second):
            await until_over(app, handle.id)
        assert len(worker._lanes[0].slots) == 1
    for handle in (first, second):
        assert (await record_of(app, handle.id)).state is State.DONE


async def test_a_slot_that_somebody_cancels_is_replaced(app: App) -> None:
    """W.3: from a context that knows of no job."""

    @app.task(on_success=archive)
    async def job() -> None: ...

    async with working(app, lanes=ONE_SLOT) as worker:
        [slot] = worker._lanes[0].slots
        assert slot.task is not None
        slot.task.cancel()
        await until(slot.task.done)
        handle = await job.aenqueue()
        await until_over(app, handle.id)


async def test_a_job_may_still_cancel_itself(app: App) -> None:
    """S1.10: that is an error of its own."""

    @app.task(on_error=dead)
    async def job() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(60)

    handle = await job.aenqueue()
    await work(app)
    record = await record_of(app, handle.id)
    assert record.error is not None
    assert (record.state, record.error.type) == (State.DEAD, "CancelledError")


@pytest.mark.parametrize("fails", [False, True])
async def test_a_job_that_cancels_itself_and_ends_cancels_no_other(app: App, fails: bool) -> None:
    """F58: what it does not wait for any more would reach the next job in its slot."""

    @app.task(on_error=dead)
    async def hostile() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        if fails:
            raise ValueError

    @app.task(result_ttl="1h", on_error=dead)
    async def innocent() -> int:
        task = asyncio.current_task()
        assert task is not None
        await asyncio.sleep(0)
        return task.cancelling()

    handles = [await task.aenqueue() for task in (hostile, innocent, hostile, innocent)]
    await work(app, lanes=ONE_SLOT)
    for handle in handles[1::2]:
        record = await record_of(app, handle.id)
        assert (record.state, record.result) == (State.DONE, b"0")


async def test_errors_that_are_thrown_in_and_answered_pass_through() -> None:
    """W.2: a coroutine may catch what is thrown into it, and wait for something else, again and again."""
    seen: list[str] = []

    async def stubborn() -> None:
        for _ in range(2):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                seen.append("caught")
        seen.append("done")

    async def outer() -> None:
        await in_own_context(stubborn())

    task = asyncio.create_task(outer())
    for caught in ([], ["caught"]):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert seen == caught
        task.cancel()
    await task
    assert seen == ["caught", "caught", "done"]
    coroutine = outer()
    coroutine.send(None)
    coroutine.close()  # and one that is closed is closed inside too
    assert seen == ["caught", "caught", "done"]


async def until_over(app: App, job_id: str) -> None:
    async with asyncio.timeout(20):
        while not (await record_of(app, job_id)).state.terminal:
            await asyncio.sleep(0.005)  # no event shows this state
