"""Full queues: what the refusal says, and producers that wait for room, on every engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from propolis import App
from propolis.app.client import room
from propolis.core.job import Done
from propolis.core.protocols import Engine, RuleKind, Scope
from propolis.errors import BadCall, BadSetting, MemoryFull, QueueFull
from propolis.testing.engines.steps import counts, put_some, settle_one, take


def echo_of(app: App) -> Any:
    @app.task(name="tests.echo")
    async def echo(n: int) -> None: ...

    return echo


class Met:
    """Tells when somebody has met a full queue, and makes no pause long."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused = asyncio.Event()
        put = engine.put

        async def watched(jobs: Sequence[Any], *, token: str | None = None) -> Any:
            try:
                return await put(jobs, token=token)
            except QueueFull:
                self.refused.set()
                raise

        monkeypatch.setattr(engine, "put", watched)
        monkeypatch.setattr(room, "FIRST_PAUSE", 0.001)
        monkeypatch.setattr(room, "LAST_PAUSE", 0.01)


async def test_a_queue_is_capped_and_free_again(app: App, engine: Engine) -> None:
    assert await app.queues.acap("default", 2, by="anna", why="small disk") is True
    [rule] = await app.queues.arules()
    assert (rule.kind, rule.scope, rule.name, rule.n) == (RuleKind.CAP, Scope.QUEUE, "default", 2)
    assert (rule.by, rule.why) == ("anna", "small disk")
    assert await app.queues.acap("default", 3, until="1h") is False
    assert await app.queues.astate("default") == "open"  # it holds nothing back
    assert [await app.queues.auncap("default"), await app.queues.auncap("default")] == [True, False]
    await put_some(engine, 4)


async def test_the_refusal_says_which_bound_it_was_and_how_full_the_queue_is(
    app: App, engine: Engine
) -> None:
    await app.queues.acap("default", 3)
    await put_some(engine, 2)
    with pytest.raises(QueueFull) as refused:
        await echo_of(app).many([1, 2, 3]).aenqueue()
    error = refused.value
    assert (error.queue, error.bound, error.limit, error.would_hold) == ("default", "jobs", 3, 5)
    assert "a cap of 3 waiting jobs and would hold 5 with this put" in str(error)
    assert 'wait for room with using(wait="30s"), or raise its cap' in str(error)
    assert (await counts(engine)).waiting == 2


async def test_a_producer_waits_until_there_is_room(
    app: App, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    met, echo = Met(engine, monkeypatch), echo_of(app)
    await app.queues.acap("default", 1)
    await echo.aenqueue(1)
    waiting = asyncio.create_task(echo.using(wait="1m").aenqueue(2))
    await met.refused.wait()
    assert not waiting.done()
    [lease] = await take(engine)  # what runs does not fill the queue
    handle = await waiting
    assert (handle.created, (await counts(engine)).waiting) == (True, 1)
    await settle_one(engine, lease, Done())


async def test_many_wait_for_room_piece_by_piece_and_none_is_put_twice(
    app: App, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    met, echo = Met(engine, monkeypatch), echo_of(app)
    await app.queues.acap("default", 4)
    putting = asyncio.create_task(echo.using(wait="1m").many(range(10)).aenqueue())
    ran: list[str] = []
    await met.refused.wait()
    for _ in range(1000):
        for lease in await take(engine):
            ran.append(lease.id)
            await settle_one(engine, lease, Done())
        if putting.done():
            break
        await asyncio.sleep(0.001)
    ran += [lease.id for lease in await take(engine)]
    assert ran == [handle.id for handle in await putting]


async def test_room_that_does_not_come_in_time_is_the_same_refusal(
    app: App, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    echo = echo_of(app)
    await app.queues.acap("default", 0)
    with pytest.raises(QueueFull):
        await echo.using(wait=0).aenqueue(1)
    with pytest.raises(QueueFull):
        await echo.using(wait=0).many([1, 2]).aenqueue()
    assert (await counts(engine)).waiting == 0


async def test_nobody_waits_in_a_transaction(app: App) -> None:
    with pytest.raises(BadCall, match="leave wait= out"):
        echo_of(app).using(wait="1s", tx=object())


@pytest.mark.parametrize("n", [-1, True, 2.5, "3", None])
async def test_a_cap_is_a_number_of_jobs(n: Any) -> None:
    with pytest.raises(BadSetting, match="Give a whole number, 0 or more"):
        await App("memory://").queues.acap("mail", n)
    with pytest.raises(BadSetting, match="cannot be a queue"):
        await App("memory://").queues.acap("a b", 1)
    terms: Any = {"task": "t"}
    with pytest.raises(BadCall, match="has no option task"):
        await App("memory://").queues.acap("mail", 1, **terms)


def test_a_server_without_memory_is_a_bound_of_its_own() -> None:
    error = MemoryFull("mail", "jobs at redis://here")
    assert (error.bound, error.would_hold) == ("memory", None)


def test_synchronous_code_waits_as_well() -> None:
    app = App("memory://")
    echo = echo_of(app)
    assert app.queues.cap("default", 2) is True
    assert echo.using(wait="1s").enqueue(1).created
    with pytest.raises(QueueFull):
        echo.using(wait=0).many(iter([2, 3])).enqueue()
    assert app.queues.counts()["default"].waiting == 2  # what fitted was put
    assert app.queues.uncap("default") is True
    app.close()
