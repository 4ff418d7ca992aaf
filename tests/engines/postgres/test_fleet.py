"""Workers on PostgreSQL: how they share the sweeping, and how they are woken."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
from click.testing import CliRunner

from propolis import App
from propolis.cli import main
from propolis.core import wire
from propolis.core.batch import Batch, BatchState
from propolis.core.ids import new_id
from propolis.core.protocols import Watched
from propolis.engines.postgres.engine import PostgresEngine
from propolis.engines.postgres.hints import AT_ONCE, NEWS_EVERY
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import a_job
from propolis.worker import Mode, Settings, Worker


async def test_a_worker_drains_a_queue(postgres_url: str, schema: str) -> None:
    app = App(f"{postgres_url}?schema={schema}")
    seen: list[int] = []

    @app.task(name="tests.count")
    async def count(number: int) -> None:
        seen.append(number)

    engine = await PostgresEngine(postgres_url, schema=schema).open()
    await engine.put([a_job(number, task="tests.count") for number in range(500)])

    await Worker(app, Settings(mode=Mode.UNTIL_EMPTY)).run()

    assert sorted(seen) == list(range(500))
    assert (await engine.queues())["default"].total == 0
    await engine.close()
    await app.aclose()


async def test_an_idle_worker_starts_a_job_at_once(postgres_url: str, schema: str) -> None:
    app = App(f"{postgres_url}?schema={schema}")
    ran = asyncio.Event()

    @app.task(name="tests.ring")
    async def ring() -> None:
        ran.set()

    worker = Worker(app, Settings(poll=timedelta(minutes=1)))
    running = asyncio.create_task(worker.run())
    client = await PostgresEngine(postgres_url, schema=schema).open()
    await asyncio.sleep(0.3)  # until it rests

    await client.put([a_job(task="tests.ring")])
    async with asyncio.timeout(5):
        await ran.wait()

    worker.stop()
    await running
    await client.close()
    await app.aclose()


async def test_the_last_to_sweep_before_something_is_due_comes_back_for_it(
    postgres_url: str, schema: str
) -> None:
    """L1, L2: on time, and nobody else comes for it."""
    clock = FakeClock()
    engine = await PostgresEngine(postgres_url, schema=schema, clock=clock).open()
    for number in range(50):
        await engine.sweep(by=f"another {number}")
    clock.advance("70s")
    await engine.sweep(by="early")  # the one that comes next, in the eyes of all others
    clock.advance("100ms")
    await engine.put([a_job(delay_ms=100)])

    responsible = await engine.sweep(by="last")
    busy = await engine.sweep(by="after it")

    assert responsible.again_in == timedelta(milliseconds=100)
    assert busy.again_in is not None
    assert busy.again_in >= timedelta(milliseconds=100)
    await engine.close()


async def test_a_batch_that_was_overlooked_is_finished_by_a_sweep(
    engine: PostgresEngine, schema: str, connection: asyncpg.Connection
) -> None:
    """I11: as a defect would leave it; and one that has a member left is not touched."""
    called = a_job(id="called", chosen=True)
    members = [a_job(batch="whole", member=n) for n in range(3)]
    await engine.put_batch(Batch(id="whole", on_finished=called), members)
    await engine.put_batch(Batch(id="waits"), [a_job(batch="waits", member=n) for n in range(3)])
    await connection.execute(f"DELETE FROM {schema}.ready WHERE batch = 'whole'")
    tally = "('whole', 2), ('whole', 1), ('waits', 2)"
    await connection.execute(f"INSERT INTO {schema}.batch_tally VALUES {tally}")

    async with asyncio.timeout(30):
        while await engine.get("called") is None:
            await engine.sweep()

    whole, waits = await engine.batch("whole"), await engine.batch("waits")
    assert whole is not None
    assert (whole.state, whole.done) == (BatchState.SUCCESS, 3)
    assert waits is not None
    assert waits.state is BatchState.IN_PROGRESS


async def test_one_who_leaves_something_undone_comes_back_at_once(postgres_url: str, schema: str) -> None:
    """S2.28: few sweeps must not mean that what is past its time is forgotten more slowly than it comes."""
    clock = FakeClock()
    engine = await PostgresEngine(postgres_url, schema=schema, clock=clock).open()
    for _ in range(3):
        await engine.put([a_job(delay_ms=1000)], token=new_id())
    clock.advance("1s")
    pauses = [(await engine.sweep(by="one", limit=2)).again_in for _ in range(2)]
    clock.advance("1d")
    pauses += [(await engine.sweep(by="one", limit=2)).again_in for _ in range(2)]

    at_once = timedelta(milliseconds=10)
    assert [pause is not None and pause <= at_once for pause in pauses] == [True, False, True, False]
    await engine.close()


async def test_a_stream_of_puts_notifies_now_and_then_and_a_single_one_at_once(
    engine: PostgresEngine, schema: str, connection: asyncpg.Connection
) -> None:
    """Each notification wakes every listener, and takes a lock that all commits with one share."""
    heard: list[str] = []
    quiet = asyncio.Event()

    def hear(*arguments: Any) -> None:
        heard.append(arguments[-1])
        quiet.set()

    await connection.add_listener(f"propolis:{schema}", hear)
    clock = asyncio.get_running_loop().time
    began = clock()
    await engine.put([a_job(queue="first")])
    async with asyncio.timeout(10):
        await quiet.wait()
    while len(heard) < 2 or clock() - began < 0.3:
        await engine.put([a_job(queue="stream")])
    await engine.put([a_job(queue="last")])
    async with asyncio.timeout(10):
        while "last" not in heard:
            quiet.clear()
            await quiet.wait()

    assert heard[0] == "first"
    assert len(heard) <= AT_ONCE + (clock() - began) / NEWS_EVERY + 3


async def test_a_job_that_nobody_was_told_of_runs_within_a_sweep(
    postgres_url: str, schema: str, connection: asyncpg.Connection
) -> None:
    """S2.3, S2.1, L1: as when its producer dies between the commit and the notification."""
    app = App(f"{postgres_url}?schema={schema}")
    ran = asyncio.Event()

    @app.task(name="tests.ring")
    async def ring() -> None:
        ran.set()

    worker = Worker(app, Settings(poll=timedelta(minutes=1)))
    running = asyncio.create_task(worker.run())
    while not app.client.engine.hears:
        await asyncio.sleep(0.01)
    envelope = wire.encode(a_job(task="tests.ring")).decode()
    await connection.fetchval(f'SELECT "{schema}".enqueue($1)', envelope)

    async with asyncio.timeout(10):
        await ran.wait()
    worker.stop()
    await running
    await app.aclose()


async def test_an_old_transaction_is_told_about_once_a_minute(
    postgres_url: str,
    schema: str,
    connection: asyncpg.Connection,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F31: who it is, how old, and what to do; once for the whole fleet."""
    monkeypatch.setattr("propolis.engines.postgres.engine.OLD_TRANSACTION", 0.05)
    clock = FakeClock()
    engines = [await PostgresEngine(postgres_url, schema=schema, clock=clock).open() for _ in range(2)]
    async with connection.transaction(isolation="repeatable_read"):
        pid = await connection.fetchval("SELECT pg_backend_pid()")
        await connection.execute("SET LOCAL application_name = 'forgotten'")
        await asyncio.sleep(0.1)  # it is to be that old
        complaints = await engines[0].complaints()
        for engine in engines * 2:
            await engine.sweep(by="each")
        first = caplog.text
        clock.advance("61s")
        await engines[1].sweep(by="each")

    mine = f"pg_terminate_backend({pid})"
    assert any(mine in complaint and "forgotten" in complaint for complaint in complaints)
    assert first.count(mine) == 1
    assert caplog.text.count(mine) == 2
    assert isinstance(engines[0], Watched)
    for engine in engines:
        await engine.close()


async def test_check_shows_what_the_server_suffers_from(
    postgres_url: str,
    schema: str,
    engine: PostgresEngine,
    connection: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F31: `propolis check` names an old transaction, and is not content."""
    monkeypatch.setattr("propolis.engines.postgres.engine.OLD_TRANSACTION", 0.0)
    arguments = ["check", "--url", f"{postgres_url}?schema={schema}", "--json"]
    async with connection.transaction(isolation="repeatable_read"):
        pid = await connection.fetchval("SELECT pg_backend_pid()")
        result = await asyncio.to_thread(CliRunner().invoke, main, arguments)

    problems = json.loads(result.stdout)["problems"]
    assert result.exit_code == 1
    assert any(f"pg_terminate_backend({pid})" in problem["why"] for problem in problems)


async def test_a_new_sweeper_relies_on_nobody_whom_it_has_not_seen(
    postgres_url: str, schema: str, connection: asyncpg.Connection
) -> None:
    """L2, F01: also where none of those who are gone is late yet when it comes for the second time."""
    clock = FakeClock()
    engine = await PostgresEngine(postgres_url, schema=schema, clock=clock).open()
    await connection.execute(
        f"""INSERT INTO "{schema}".sweeper (name, back_us, since_us)
            SELECT 'gone ' || n, $1::bigint + 1900000 + 600000 * n, 0 FROM generate_series(0, 99) AS n""",
        clock.now_us(),
    )
    pauses = []
    for _ in range(10):
        again_in = (await engine.sweep(by="new")).again_in
        assert again_in is not None
        pauses.append(again_in)
        clock.advance(again_in)
    assert max(pauses) <= timedelta(seconds=5)
    await engine.close()
