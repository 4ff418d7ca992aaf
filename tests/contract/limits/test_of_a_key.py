"""Everything of a key can be paused, counted and cancelled, on every engine."""

from __future__ import annotations

from typing import Any

import pytest

from propolis import App
from propolis.app.operate import jobs
from propolis.core.job import Done
from propolis.core.protocols import Engine
from propolis.testing.engines.steps import put_one, settle_one, take
from propolis.values import Filter, State

KEY = "tenant:7"


async def some(engine: Engine) -> list[str]:
    """Of two keys and none; those of the key, the first of which runs."""
    ids = [(await put_one(engine, key=KEY)).id for _ in range(2)]
    for n in range(5):
        await put_one(engine, key="tenant:70")
        await put_one(engine)
        ids.append((await put_one(engine, key=KEY, queue="other" if n == 4 else "default")).id)
    [first] = await take(engine, limit=1)
    assert first.id == ids[0]
    return ids


async def test_the_jobs_of_a_key_are_found_and_counted(
    app: App, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "PAGE", 3)
    ids = await some(engine)
    assert {info.id for info in await app.jobs.afind(key=KEY)} == set(ids)
    assert len(await app.jobs.afind(key=KEY, limit=2)) == 2
    assert {info.id async for info in app.jobs.aeach(key=KEY)} == set(ids)
    assert await app.jobs.acount(key=KEY) == {State.READY: 6, State.RUNNING: 1}
    assert await app.jobs.acount(Filter(queue="other"), key=KEY) == {State.READY: 1}
    assert await app.jobs.acount(key="nobody") == {}
    assert (await app.jobs.acount())[State.READY] == 16


async def test_all_of_a_key_are_cancelled_in_bites_and_no_others(
    app: App, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "PAGE", 2)
    ids = await some(engine)
    assert await app.jobs.acancel_all(Filter(queue="other"), key=KEY) == 1
    assert await app.jobs.acancel_all(key=KEY, limit=2) == 2
    assert await app.jobs.acancel_all(key=KEY) == 4  # one of them runs
    running = await app.jobs.aget(ids[0])
    assert running is not None
    assert running.cancel_requested
    assert await app.jobs.acount(key=KEY) == {State.RUNNING: 1, State.CANCELLED: 6}
    assert await app.jobs.acount(key="tenant:70") == {State.READY: 5}
    assert await app.jobs.acancel_all(key=KEY) in (0, 1)  # asked once more


async def test_what_is_paused_is_counted_and_cancelled_too(app: App, engine: Engine) -> None:
    await app.queues.apause(key=KEY, by="anna")
    for _ in range(3):
        await put_one(engine, key=KEY)
    await put_one(engine)
    [other] = await take(engine)
    await settle_one(engine, other, Done())
    assert await app.jobs.acount(key=KEY) == {State.READY: 3}
    assert await app.jobs.acancel_all(key=KEY) == 3
    assert await app.queues.aresume(key=KEY)
    assert await take(engine) == []


async def test_what_has_ended_is_left_alone(app: App, engine: Engine) -> None:
    ids = await some(engine)
    assert await app.jobs.acancel_all(key=KEY) == 7
    where: Any = Filter(state=State.CANCELLED)
    assert await app.jobs.acancel_all(where, key=KEY) == 0
    assert len(await app.jobs.afind(where, key=KEY)) == len(ids) - 1


def test_synchronous_code_has_the_same_verbs() -> None:
    app = App("memory://")

    @app.task(name="t", key="tenant:{n}")
    def t(n: int) -> None: ...

    t.many([7, 7, 8]).enqueue()
    assert app.jobs.count(key=KEY) == {State.READY: 2}
    assert app.jobs.cancel_all(Filter(task="t"), key=KEY) == 2
    assert [info.key for info in app.jobs.find(Filter(state=State.READY), key="tenant:8")] == ["tenant:8"]
    app.close()
