"""W.5: plain functions run in the thread of their job, and never in the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import timedelta
from typing import Annotated, Any

import pytest
from tests.unit.worker.working import record_of, until, work, working

from propolis import App, Depends, Job
from propolis.strategies import archive, dead
from propolis.values import State
from propolis.worker import Lane

tenant: ContextVar[str] = ContextVar("tenant", default="nobody")


def here() -> str:
    """The loop must not be here: what a plain function does would hold up everybody."""
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()
    return str(threading.get_ident())


@pytest.mark.parametrize("is_async", [False, True])
async def test_everything_plain_of_a_job_runs_in_its_thread(app: App, is_async: bool) -> None:
    """W.5: dependencies with their clean-up, middleware and hooks; all in one thread."""
    seen: dict[str, str] = {}

    def value() -> str:
        return here()

    def generated(deeper: Annotated[str, Depends(value)]) -> Iterator[str]:
        seen["dependency"] = deeper
        seen["opened"] = here()
        yield "given"
        seen["closed"] = here()

    @app.on_fetched
    def fetched(job: Job) -> None:
        seen["fetched"] = here()

    @app.on_finished
    def finished(job: Job, result: Any) -> None:
        seen["finished"] = here()

    @app.middleware
    def around(job: Job, call: Any) -> Any:
        seen["before"] = here()
        tenant.set("set by middleware")
        value = call()
        seen["after"] = here()
        return f"{value} and wrapped"

    @app.middleware
    async def between(job: Job, call: Any) -> Any:
        return await call()

    @app.middleware
    def around_again(job: Job, call: Any) -> Any:
        seen["again"] = here()
        return call()

    def body(given: str) -> str:
        return f"{given} {tenant.get()}"

    if is_async:

        @app.task(name="task", result_ttl="1h")
        async def task(given: Annotated[str, Depends(generated)]) -> str:
            assert asyncio.get_running_loop() is not None
            return body(given)
    else:

        @app.task(name="task", result_ttl="1h")
        def task(given: Annotated[str, Depends(generated)]) -> str:
            seen["task"] = here()
            return body(given)

    handle = await app.tasks["task"].aenqueue()
    async with asyncio.timeout(20):
        await work(app)
    assert await handle.aresult() == "given set by middleware and wrapped"
    assert len(seen) == 8 if is_async else 9
    assert len(set(seen.values())) == 1
    assert str(threading.get_ident()) not in seen.values()


async def test_a_plain_hook_that_never_returns_holds_up_its_slot_only(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W.5: the loop goes on meanwhile; and after its time the slot does too."""
    monkeypatch.setattr("propolis.worker.runner.HOOK_WITHIN", 0.05)
    forever = threading.Event()

    @app.on_finished
    def hang(job: Job, result: Any) -> None:
        if job.task == "hooked":
            forever.wait(60)

    @app.task(name="hooked", on_success=archive)
    async def hooked() -> None: ...

    @app.task(name="other", on_success=archive)
    async def other() -> None: ...

    handles = [await hooked.aenqueue(), await other.aenqueue()]
    try:
        await work(app, lanes=[Lane({"default": 1}, 1)])
    finally:
        forever.set()
    for handle in handles:
        assert (await record_of(app, handle.id)).state is State.DONE


async def test_a_run_below_a_plain_middleware_is_stopped_like_any_other(app: App) -> None:
    """W.5: the timeout reaches what the middleware waits for, and the middleware hears of it."""
    seen: list[str] = []

    @app.middleware
    def around(job: Job, call: Any) -> Any:
        try:
            return call()
        finally:
            seen.append(here())

    @app.task(timeout="20ms", on_timeout=dead)
    async def endless() -> None:
        await asyncio.sleep(600)

    handle = await endless.aenqueue()
    async with working(app) as worker:
        await until(lambda: bool(seen))
        assert worker.stuck == 0
    record = await record_of(app, handle.id)
    assert (record.state, record.reason) == (State.DEAD, "timeout")


async def test_a_plain_job_that_never_ends_below_a_plain_middleware_is_left(app: App) -> None:
    """W.5, S1.12."""
    forever = threading.Event()

    @app.middleware
    def around(job: Job, call: Any) -> Any:
        return call()

    @app.task(timeout="20ms", abandon=True, on_timeout=dead)
    def endless() -> None:
        forever.wait(60)

    handle = await endless.aenqueue()
    try:
        async with asyncio.timeout(20):
            await work(app, stuck_after=timedelta(hours=1))  # so it is left, and not given up
    finally:
        forever.set()
    assert (await record_of(app, handle.id)).reason == "timeout"
