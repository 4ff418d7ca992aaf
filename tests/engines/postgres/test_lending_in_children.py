"""Transactional suspects: they run in a child, which settles them in its own commit."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from pathlib import Path

import asyncpg
import pytest

from propolis import App
from propolis.app.loading import load_app
from propolis.core.job import JobInfo
from propolis.core.protocols import Note
from propolis.values import State
from propolis.worker import Lane, Mode, Settings, Worker

LONG = timedelta(minutes=5)


class Bench:
    """An app whose jobs are suspects, with a table of their own."""

    def __init__(self, app: App, connection: asyncpg.Connection, schema: str) -> None:
        self.app = app
        self.connection = connection
        self.schema = schema
        self.solitary = 0  # how often a job was run alone

    async def suspect(self, *tasks: str) -> list[str]:
        """A job of each task, with its number, that a worker has lost while it ran."""
        handles = [await self.app.tasks[task].aenqueue(number) for number, task in enumerate(tasks, 1)]
        engine = await self.app.client.ready()
        leases = await engine.lease({"default": 10}, span=LONG, holder="dead")
        assert len(leases) == len(tasks)
        await engine.note([Note(lease, began=True) for lease in leases])
        await engine.renew(leases, span=timedelta(0))
        await engine.sweep()
        return [handle.id for handle in handles]

    async def work(self, slots: int = 4) -> Worker:
        settings = Settings(mode=Mode.UNTIL_EMPTY, lease=LONG, lanes=[Lane({"default": 1}, slots)])
        worker = Worker(self.app, settings)
        alone = worker.alone

        def counted() -> AbstractAsyncContextManager[None]:
            self.solitary += 1
            return alone()

        worker.alone = counted  # type: ignore[method-assign]
        async with asyncio.timeout(30):
            await worker.run()
        return worker

    async def numbers(self) -> list[int]:
        rows = await self.connection.fetch(f'SELECT number FROM "{self.schema}".effect ORDER BY number')
        return [number for (number,) in rows]

    async def transactions(self, table: str) -> set[int]:
        """Those that have written the rows of a table."""
        rows = await self.connection.fetch(f'SELECT xmin::text::bigint FROM "{self.schema}".{table}')
        return {number for (number,) in rows}

    async def info(self, job_id: str) -> JobInfo:
        info = await self.app.jobs.aget(job_id)
        assert info is not None
        return info


@pytest.fixture
async def bench(
    postgres_url: str, schema: str, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Bench]:
    monkeypatch.setenv("PROPOLIS_TEST_URL", f"{postgres_url}?schema={schema}&transactions=1")
    monkeypatch.setenv("PROPOLIS_TEST_TABLE", f'"{schema}".effect')
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    sys.modules.pop("suspect_tasks", None)  # so that it takes this test's schema
    app = load_app("suspect_tasks:app")
    assert isinstance(app, App)
    await app.ready()
    await connection.execute(
        f'CREATE TABLE "{schema}".effect (number integer UNIQUE DEFERRABLE INITIALLY DEFERRED)'
    )
    yield Bench(app, connection, schema)
    await app.aclose()


async def test_its_row_and_its_end_are_one_commit_of_a_child(bench: Bench) -> None:
    """T8: with what it emits and puts there; and with what it has from the child's own start-up."""
    [job] = await bench.suspect("succeed")
    worker = await bench.work()

    info = await bench.info(job)
    assert (info.state, info.attempts, info.losses, info.crashes) == (State.DONE, 2, 1, 0)
    assert info.log == ("written",)
    assert info.result is not None
    assert int(info.result) != os.getpid()
    assert await bench.numbers() == [41]
    assert (await bench.app.queues.acounts())["after"].ready == 2
    assert len(await bench.transactions("effect") | await bench.transactions("archive")) == 1
    assert (worker._pump.settled, bench.solitary) == (1, 0)


async def test_one_that_ends_its_process_three_times_is_dead_and_others_go_on(bench: Bench) -> None:
    """F07: nothing of it stands, and nobody has to make way for it."""
    poison, good = await bench.suspect("exit", "succeed")
    neighbours = [await bench.app.tasks["plain"].aenqueue() for _ in range(8)]
    await bench.work()

    info = await bench.info(poison)
    assert (info.state, info.reason, info.losses, info.crashes) == (State.DEAD, "crashed", 1, 3)
    assert await bench.numbers() == [42]
    assert (await bench.info(good)).state is State.DONE
    for handle in neighbours:
        neighbour = await bench.info(handle.id)
        assert (neighbour.state, neighbour.attempts, neighbour.losses) == (State.DONE, 1, 0)
        assert neighbour.result == b"%d" % os.getpid()
    assert bench.solitary == 0


async def test_one_that_raises_is_judged_by_its_rules_and_leaves_nothing(bench: Bench) -> None:
    [job] = await bench.suspect("raise")
    await bench.work()

    info = await bench.info(job)
    assert (info.state, info.reason, info.failures, info.crashes) == (State.DEAD, "failed", 2, 0)
    assert [event.kind for event in info.history] == ["lost", "retried"]
    assert info.history[1].note.startswith("Unhappy: in ")
    assert not info.history[1].note.endswith(f" {os.getpid()}")
    assert await bench.numbers() == []
    assert bench.solitary == 0


@pytest.mark.parametrize(
    ("task", "reason", "error"),
    [
        ("conflict", "failed", "UniqueViolationError"),
        ("unkept", "failed", "BadCall"),
        ("hang", "timeout", "TimeoutError"),
    ],
)
async def test_one_whose_end_does_not_stand_leaves_nothing(
    bench: Bench, task: str, reason: str, error: str
) -> None:
    """A commit that is refused, a result that cannot be kept, and a time that is over."""
    [job] = await bench.suspect(task)
    await bench.work()

    info = await bench.info(job)
    assert (info.state, info.reason, info.crashes) == (State.DEAD, reason, 0)
    assert info.error is not None
    assert info.error.type.endswith(error)
    assert await bench.numbers() == []
    assert bench.solitary == 0


async def test_one_whose_process_ends_after_its_commit_is_not_run_again(bench: Bench) -> None:
    """The crash that its worker has seen is refused: the fence of that lease is gone."""
    [job] = await bench.suspect("silent")
    await bench.work()

    info = await bench.info(job)
    assert (info.state, info.attempts, info.crashes) == (State.DONE, 2, 0)
    assert await bench.numbers() == [1]


async def test_a_fork_of_it_does_not_touch_its_transaction(bench: Bench) -> None:
    """Its row stands although the fork, which has the same connection, came to another end."""
    [job] = await bench.suspect("fork")
    await bench.work()

    assert (await bench.info(job)).state is State.DONE
    assert await bench.numbers() == [1]


async def test_a_child_has_no_transaction_left_when_the_next_job_comes(bench: Bench) -> None:
    """However a job ended: it has only one connection to lend."""
    ended_badly = await bench.suspect("raise", "conflict", "unkept", "hang", "succeed", "succeed")
    good = [ended_badly.pop(), ended_badly.pop()]
    await bench.work(slots=1)

    assert [(await bench.info(job)).state for job in ended_badly] == [State.DEAD] * 4
    assert await bench.numbers() == [45, 46]
    assert len({(await bench.info(job)).result for job in good} - {None}) == 1  # one child for both
    assert bench.solitary == 0


async def test_where_the_child_has_another_engine_it_runs_alone_in_the_worker(bench: Bench) -> None:
    """What it would begin there could not settle the lease."""
    bench.app.url += "&patience=29s"
    await bench.app.aclose()
    [job] = await bench.suspect("succeed")
    await bench.work()

    assert (await bench.info(job)).result == b"%d" % os.getpid()
    assert await bench.numbers() == [41]
    assert bench.solitary == 1
