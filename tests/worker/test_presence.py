"""Workers are records: what each writes of itself, how often, and who reads it."""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from tests.unit.worker.working import working

from propolis import App
from propolis.app.operate.workers import (
    KIND,
    TASKS_BYTES,
    Presence,
    WorkerCard,
    fingerprint,
    fitting,
    live_workers,
)
from propolis.core.records import MAX_VALUE, Change, Swap, Swapped
from propolis.engines.memory import MemoryEngine
from propolis.engines.sqlite.engine import SQLiteEngine
from propolis.errors import EngineUnavailable
from propolis.testing.clock import FakeClock
from propolis.values import WorkerInfo, WorkerState
from propolis.worker import Lane, Settings, Worker


class Seconds:
    """A monotonic clock that the test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["memory", "sqlite", "postgres", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "memory":
            return "memory://"
        case "sqlite":
            return f"sqlite:///{tmp_path}/jobs.db"
        case "postgres":
            server, schema = request.getfixturevalue("postgres_url"), request.getfixturevalue("schema")
            return f"{server}?schema={schema}"
        case _:
            server, prefix = request.getfixturevalue("valkey_url"), request.getfixturevalue("prefix")
            return f"{server}?prefix={prefix}:"


@pytest.fixture
async def app(url: str) -> AsyncIterator[App]:
    app = App(url)

    @app.task(name="mail.send", queue="mail")
    async def send() -> None: ...

    yield app
    await app.aclose()


async def listed(app: App, wanted: Callable[[list[WorkerInfo]], bool]) -> list[WorkerInfo]:
    """The workers, as soon as they are as wanted."""
    async with asyncio.timeout(60):
        while not wanted(found := await app.workers.alist()):
            await asyncio.sleep(0.01)  # no event shows this state
    return found


# --- a worker ----------------------------------------------------------------------------


async def test_a_worker_is_listed_while_it_works(app: App) -> None:
    assert await app.workers.alist() == []
    lanes = (Lane({"mail": 1, "bulk": 1}, 3), Lane({"slow": 1}, 2))
    async with working(app, lanes=lanes) as worker:
        [info] = await listed(app, bool)
        assert (info.host, info.pid) == (socket.gethostname(), os.getpid())
        assert info.id.startswith(f"{info.host}:{info.pid}:")
        assert (info.queues, info.slots, info.tasks) == (("bulk", "mail", "slow"), 5, ("mail.send",))
        assert info.state is WorkerState.WORKING
        assert info.code == fingerprint([app.tasks["mail.send"].function])
        assert info.version
        assert (info.function_set is not None) == app.url.startswith("postgres")
        assert info.started_at <= info.seen_at
        assert await asyncio.to_thread(app.workers.list) == [info]
        assert not worker.asked_to_stop
    assert await app.workers.alist() == []


async def test_explain_tells_that_no_worker_would_run_it(app: App) -> None:
    task = app.tasks["mail.send"]
    unknown = App(app.url)
    job = await task.aenqueue()

    async def reasons() -> list[str]:
        return await app.jobs.aexplain(job.id)

    assert "no live worker serves queue 'mail'" in await reasons()
    with unknown.client.lent_to(await app.ready()):
        async with working(unknown, lanes=(Lane({"other": 1}, 1),)):
            await listed(app, bool)
            assert "no live worker serves queue 'mail'" in await reasons()
        await app.queues.apause("mail")
        async with working(unknown, lanes=(Lane({"mail": 1}, 1),)):
            await listed(app, bool)
            assert "no live worker knows task 'mail.send'" in await reasons()
            async with working(app, lanes=(Lane({"default": 1}, 1),)):
                await listed(app, lambda found: len(found) == 2)
                assert "no live worker of queue 'mail' knows task 'mail.send'" in await reasons()
    async with working(app, lanes=(Lane({"mail": 1}, 1),)):
        await listed(app, bool)
        [reason] = await reasons()
        assert reason.startswith("queue 'mail' is paused by ")


async def test_one_that_drains_says_so_and_serves_nothing_more(app: App) -> None:
    clock, going, goes_on = Seconds(), asyncio.Event(), asyncio.Event()

    @app.task(name="slow", queue="mail")
    async def slow() -> None:
        going.set()
        await goes_on.wait()

    worker = Worker(app, Settings(lanes=(Lane({"mail": 1}, 1),)), clock=clock)
    running = asyncio.create_task(worker.run())
    await slow.aenqueue()
    await going.wait()
    waiting = await slow.aenqueue()
    await listed(app, lambda found: [each.state for each in found] == [WorkerState.WORKING])
    worker.stop()
    clock.now += 6  # the last write was less than five seconds ago
    await listed(app, lambda found: [each.state for each in found] == [WorkerState.DRAINING])
    assert "no live worker serves queue 'mail'" in await app.jobs.aexplain(waiting.id)
    goes_on.set()
    await running


def test_each_start_has_an_id_of_its_own() -> None:
    app = App("memory://")
    assert Worker(app)._settings.holder != Worker(app)._settings.holder


class Unwritable(SQLiteEngine):
    """Its records cannot be written."""

    async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:
        raise EngineUnavailable("it is full")


async def test_what_goes_wrong_with_the_record_does_not_harm_the_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app, ran = App("memory://"), asyncio.Event()

    @app.task(name="work")
    async def work() -> None:
        ran.set()

    engine = await Unwritable(tmp_path / "jobs.db").open()
    with app.client.lent_to(engine):
        async with working(app):
            await work.aenqueue()
            async with asyncio.timeout(60):
                await ran.wait()
                while "cannot write that it is alive" not in caplog.text:
                    await asyncio.sleep(0.01)  # no event shows this state
    assert "stays listed" in caplog.text
    await engine.close()


def test_in_a_test_of_an_app_its_worker_is_alive() -> None:
    app = App("memory://")

    @app.task(name="work")
    async def work() -> None: ...

    with app.test() as kit:
        job = work.using(delay="2h").enqueue()
        kit.advance("1h")
        assert [worker.state for worker in app.workers.list()] == [WorkerState.WORKING]
        assert not [reason for reason in app.jobs.explain(job.id) if "no live worker" in reason]


# --- the record --------------------------------------------------------------------------


class Counting(MemoryEngine):
    calls = 0

    async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:
        self.calls += 1
        return await super().swap(swaps, token=token)


class Fleet:
    """Workers that have nothing to do, in a time that the test moves."""

    def __init__(self, size: int) -> None:
        self.clock, self.seconds = FakeClock(), Seconds()
        self.engine = Counting(clock=self.clock)
        self.cards = [WorkerCard(state=WorkerState.WORKING)] * size
        self.workers = [
            Presence(self.engine, f"worker {n}", lambda n=n: self.cards[n], clock=self.seconds)  # type: ignore[misc]  # the default of n
            for n in range(size)
        ]

    async def go_on(self, seconds: int, each: Callable[[], Awaitable[None]] | None = None) -> int:
        """Returns how many calls they made."""
        before = self.engine.calls
        for _ in range(seconds):
            for worker in self.workers:
                await worker.beat()
            if each is not None:
                await each()
            self.clock.advance("1s")
            self.seconds.now += 1
        return self.engine.calls - before


async def test_a_hundred_idle_workers_make_few_calls_and_stay_listed() -> None:
    fleet = Fleet(100)

    async def all_are_listed() -> None:
        assert len(await live_workers(fleet.engine)) == 100

    assert await fleet.go_on(1, all_are_listed) == 100
    calls = await fleet.go_on(600, all_are_listed)
    assert 100 * 9 <= calls <= 2.5 * 600  # two and a half a second


async def test_a_change_is_written_soon_but_not_each_of_many() -> None:
    fleet = Fleet(1)
    await fleet.go_on(10)

    async def change() -> None:
        fleet.cards[0] = WorkerCard(state=WorkerState.WORKING, slots=fleet.cards[0].slots + 1)

    assert 19 <= await fleet.go_on(100, change) <= 21
    await fleet.go_on(6)
    [info] = await live_workers(fleet.engine)
    assert info.slots == 100


async def test_a_worker_that_is_gone_is_forgotten() -> None:
    fleet = Fleet(2)
    await fleet.go_on(1)
    await fleet.workers.pop().leave()
    assert [worker.id for worker in await live_workers(fleet.engine)] == ["worker 0"]
    fleet.workers.clear()  # as kill -9 does
    fleet.clock.advance("178s")
    [info] = await live_workers(fleet.engine)
    assert await fleet.engine.now() - info.seen_at == timedelta(seconds=179)
    fleet.clock.advance("2s")
    assert await live_workers(fleet.engine) == []


async def test_one_that_cannot_be_read_hides_no_other() -> None:
    fleet = Fleet(1)
    await fleet.go_on(1)
    values = {
        "other": b"\xff",
        "newer": b'{"state": "dancing"}',
        "later": b'{"state": "working", "mood": 1}',
        "eternal": b'{"state": "working", "up_s": 1e18}',
    }
    changes = [Change(kind=KIND, name=name, value=value) for name, value in values.items()]
    await fleet.engine.swap([Swap(changes=(change,)) for change in changes])
    states = {worker.id: worker.state for worker in await live_workers(fleet.engine)}
    assert states == {
        "other": WorkerState.UNKNOWN,
        "newer": WorkerState.UNKNOWN,
        "eternal": WorkerState.UNKNOWN,
        "later": WorkerState.WORKING,
        "worker 0": WorkerState.WORKING,
    }


async def test_thousands_of_tasks_are_cut_and_counted() -> None:
    names = [f"a.module.with.a.long.name.task_{n:06}_é" for n in range(20_000)]
    kept, more = fitting(reversed(names), TASKS_BYTES)
    assert kept == tuple(names[: len(kept)])
    assert len(kept) + more == len(names)
    assert more > 0
    engine = MemoryEngine()
    card = WorkerCard(tasks=kept, more_tasks=more, queues=kept[:300], state=WorkerState.WORKING)
    await Presence(engine, "w", lambda: card, clock=Seconds()).beat()
    [info] = await live_workers(engine)
    assert info.may_know(names[-1])
    [record] = (await engine.records(KIND)).records
    assert len(record.value) < MAX_VALUE
    assert fitting(["b", "a"], TASKS_BYTES) == (("a", "b"), 0)


def test_the_fingerprint_is_that_of_the_files_with_the_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    text = "from propolis import App\napp = App('memory://')\n@app.task\ndef work() -> None: ...\n"
    found = []
    for version in (text, text, text + "# another\n"):
        (tmp_path / "fingerprinted.py").write_text(version)
        sys.modules.pop("fingerprinted", None)
        found.append(fingerprint([importlib.import_module("fingerprinted").work.function]))
    sys.modules.pop("fingerprinted", None)
    assert found[0] == found[1] != found[2]
