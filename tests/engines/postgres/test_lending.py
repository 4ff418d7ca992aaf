"""Jobs whose rows and whose end are one commit: exactly once, inside of one database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Annotated, Any

import asyncpg
import pytest
import pytest_asyncio

from propolis import App, Depends, Discard, Handle, Job, Retry, Transaction
from propolis.core.job import Done, JobInfo, Lease, Progress
from propolis.core.protocols import LendsTransactions
from propolis.engines import make_engine
from propolis.engines.postgres.engine import PostgresEngine
from propolis.errors import BadSetting, NoTransactions, OutcomeUnknown
from propolis.strategies import archive, dead, fixed, repeat
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.values import State
from propolis.worker import Lane, Mode, Settings, Worker


@pytest_asyncio.fixture(params=["the server", "pgbouncer"])
async def app(request: pytest.FixtureRequest, postgres_url: str, schema: str) -> AsyncIterator[App]:
    """Also where sessions are had only for the length of a transaction, which is all that is needed."""
    if request.param == "pgbouncer":
        url = f"{request.getfixturevalue('pgbouncer_url')}?listen={postgres_url}&"
    else:
        url = f"{postgres_url}?"
    app = App(f"{url}schema={schema}&transactions=2")
    yield app
    await app.aclose()


class Rows:
    """A table of the task's own, looked at from outside."""

    def __init__(self, connection: asyncpg.Connection, table: str) -> None:
        self.connection = connection
        self.table = table

    async def add(self, tx: Transaction, number: int) -> None:
        await tx.connection.execute(f"INSERT INTO {self.table} VALUES ($1)", number)

    async def all(self) -> list[int]:
        found = await self.connection.fetch(f"SELECT number FROM {self.table} ORDER BY number")
        return [number for (number,) in found]


@pytest_asyncio.fixture
async def rows(app: App, postgres_url: str, schema: str) -> AsyncIterator[Rows]:
    await app.ready()
    connection = await asyncpg.connect(postgres_url)
    await connection.execute(
        f'CREATE TABLE "{schema}".effect (number integer UNIQUE DEFERRABLE INITIALLY DEFERRED)'
    )
    yield Rows(connection, f'"{schema}".effect')
    await connection.close()


async def work(app: App, slots: int = 4) -> Worker:
    worker = Worker(app, Settings(mode=Mode.UNTIL_EMPTY, lanes=[Lane({"default": 1}, slots)]))
    async with asyncio.timeout(30):
        await worker.run()
    return worker


async def test_what_a_job_writes_and_its_end_are_one_commit(app: App, rows: Rows) -> None:
    """S0.19: with what it emits, and what it enqueues in the same transaction."""
    seen: list[tuple[list[int], int]] = []

    @app.task(name="note")
    async def note(number: int) -> None: ...

    @app.task(name="write", on_success=archive, result_ttl="1h")
    async def write(tx: Transaction, job: Job, number: int) -> str:
        await rows.add(tx, number)
        job.emit(note.using(delay="1h"), number)
        await note.using(tx=tx, delay="1h").aenqueue(number)
        seen.append((await rows.all(), len(await app.jobs.afind())))
        return "written"

    handle = await write.aenqueue(7)
    worker = await work(app)

    assert seen == [([], 1)]  # nothing of it was to be seen before the end
    assert await rows.all() == [7]
    info = await app.jobs.aget(handle.id)
    assert info is not None
    assert (info.state, info.result, info.attempts) == (State.DONE, b'"written"', 1)
    assert (await app.queues.acounts())["default"].scheduled == 2
    assert write.transactional
    assert worker._pump.settled == 1


async def test_what_a_job_reports_at_last_is_stored_before_its_commit(app: App) -> None:
    """Afterwards it would be refused, since the lease has ended."""

    @app.task(name="write", on_success=archive)
    async def write(tx: Transaction, job: Job) -> None:
        job.log("the last line")
        job.progress(1, 1)

    await write.many([()] * 20).aenqueue()
    await work(app)

    found = await app.jobs.afind(limit=100)
    assert [(each.log, each.progress) for each in found] == [(("the last line",), Progress(1, 1))] * 20


@pytest.mark.parametrize("how", ["raise", "failure", "retry", "result", "constraint", "commit", "aborted"])
async def test_a_job_that_does_not_succeed_leaves_nothing(app: App, rows: Rows, how: str) -> None:
    """Its failure is settled as any other: with its error, and by its strategy."""

    @app.task(name="write", on_error=dead, result_ttl="1h")
    async def write(tx: Transaction, number: int) -> Any:
        await rows.add(tx, number)
        match how:
            case "raise":
                raise ValueError("raised")
            case "failure":
                return Discard("said")
            case "retry":
                raise Retry("said")
            case "result":
                return object()
            case "constraint":  # which is looked at when it commits
                await rows.add(tx, number)
            case "commit":
                await tx.connection.execute("ROLLBACK")
            case "aborted":
                with pytest.raises(asyncpg.PostgresError):
                    await tx.connection.execute("SELECT 1 / 0")
        return None

    handle = await write.aenqueue(7)
    await work(app)

    assert await rows.all() == []
    info = await app.jobs.aget(handle.id)
    assert info is not None
    assert (info.state, info.failures, info.attempts) == (State.DEAD, 1, 1)
    assert info.error is not None
    expected = {"constraint": "UniqueViolationError", "commit": "BadSetting", "raise": "ValueError"}
    assert expected.get(how, info.error.type) == info.error.type


async def test_a_job_that_fails_first_writes_once(app: App, rows: Rows) -> None:
    @app.task(name="write", on_error=repeat(3, fixed(0)))
    async def write(job: Job, tx: Transaction, number: int) -> None:
        await rows.add(tx, number)
        if job.attempt < 3:
            raise ValueError

    await write.aenqueue(7)
    await work(app)

    assert await rows.all() == [7]


async def test_a_timeout_leaves_nothing(app: App, rows: Rows) -> None:
    @app.task(name="write", timeout="200ms", on_timeout=dead)
    async def write(tx: Transaction, number: int) -> None:
        await rows.add(tx, number)
        await tx.connection.execute("SELECT pg_sleep(60)")

    handle = await write.aenqueue(7)
    await work(app)

    assert await rows.all() == []
    info = await app.jobs.aget(handle.id)
    assert info is not None
    assert (info.state, info.reason) == (State.DEAD, "timeout")


async def test_a_job_that_lost_its_lease_leaves_nothing(app: App, rows: Rows) -> None:
    """The other run has written and ended meanwhile: there is one row, of one run."""
    runs: list[int] = []
    lost: list[str] = []
    app.on_lost(lambda job: lost.append(job.id))

    @app.task(name="write", on_success=archive)
    async def write(job: Job, tx: Transaction, number: int) -> None:
        runs.append(job.fence)
        await rows.add(tx, number * 10 + len(runs))
        if len(runs) == 1:  # our lease ends, and another worker takes the job and does it
            engine = await app.ready()
            await engine.renew([job.lease], span=timedelta(0))
            await engine.sweep()
            await work(app)

    handle = await write.aenqueue(7)
    await work(app)

    assert len(runs) == 2
    assert await rows.all() == [72]
    assert lost == [handle.id]
    info = await app.jobs.aget(handle.id)
    assert info is not None
    assert (info.state, info.losses, info.crashes) == (State.DONE, 1, 0)


async def test_a_job_that_is_given_back_or_cancelled_leaves_nothing(app: App, rows: Rows) -> None:
    """At the end of its worker it is released, and costs no attempt; an operator's cancel is its end."""
    reached = asyncio.Event()

    @app.task(name="write")
    async def write(tx: Transaction, number: int) -> None:
        await rows.add(tx, number)
        reached.set()
        await asyncio.Event().wait()

    handle = await write.aenqueue(7)
    for cancel in (False, True):
        reached.clear()
        worker = Worker(app, Settings(lease=timedelta(seconds=2), grace=timedelta(0)))
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(20):
            await reached.wait()
            if cancel:
                await app.jobs.acancel(handle.id)
                while (await info_of(app, handle)).state is not State.CANCELLED:
                    await asyncio.sleep(0.01)
            worker.stop()
            await running
        assert await rows.all() == []
        if not cancel:
            info = await info_of(app, handle)
            assert (info.state, info.attempts) == (State.READY, 0)


async def info_of(app: App, handle: Handle[Any]) -> JobInfo:
    info = await app.jobs.aget(handle.id)
    assert info is not None
    return info


async def test_what_a_job_emits_is_found_at_its_commit(app: App, rows: Rows) -> None:
    """With a minute between two looks."""
    chain: list[int] = []
    ended = asyncio.Event()

    @app.task(name="write")
    async def write(tx: Transaction, job: Job, number: int) -> None:
        await rows.add(tx, number)
        chain.append(number)
        if number < 5:
            job.emit(write, number + 1)
        else:
            ended.set()

    worker = Worker(app, Settings(poll=timedelta(minutes=1)))
    running = asyncio.create_task(worker.run())
    await worker.started.wait()
    await write.aenqueue(1)
    async with asyncio.timeout(20):
        await ended.wait()
    worker.stop()
    await running

    assert await rows.all() == chain == [1, 2, 3, 4, 5]


async def test_a_commit_whose_answer_is_lost_is_not_done_again(
    app: App, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure that is recorded instead is refused, because the fence has gone with the commit."""
    commit = asyncpg.transaction.Transaction.commit
    runs: list[int] = []

    async def commit_and_lose_the_answer(transaction: Any) -> None:
        await commit(transaction)
        raise ConnectionResetError

    @app.task(name="write", on_error=repeat(3, fixed(0)))
    async def write(tx: Transaction, number: int) -> None:
        runs.append(number)
        await rows.add(tx, number)
        monkeypatch.setattr(asyncpg.transaction.Transaction, "commit", commit_and_lose_the_answer)

    await write.aenqueue(7)
    await work(app)

    assert (runs, await rows.all()) == ([7], [7])
    assert (await app.queues.acounts())["default"].total == 0


async def test_a_commit_that_was_never_sent_is_done_again(
    app: App, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = asyncpg.transaction.Transaction.commit
    runs: list[int] = []

    async def lose_the_connection(transaction: Any) -> None:
        monkeypatch.setattr(asyncpg.transaction.Transaction, "commit", commit)
        transaction._connection.terminate()
        raise ConnectionResetError

    @app.task(name="write", on_error=repeat(3, fixed(0)))
    async def write(tx: Transaction, number: int) -> None:
        runs.append(number)
        await rows.add(tx, number)
        if len(runs) == 1:
            monkeypatch.setattr(asyncpg.transaction.Transaction, "commit", lose_the_connection)

    await write.aenqueue(7)
    await work(app)

    assert (runs, await rows.all()) == ([7, 7], [7])


async def test_a_connection_that_is_killed_under_a_job_costs_one_attempt(app: App, rows: Rows) -> None:
    runs: list[int] = []

    @app.task(name="write", on_error=repeat(3, fixed(0)))
    async def write(tx: Transaction, number: int) -> None:
        runs.append(number)
        await rows.add(tx, number)
        if len(runs) == 1:
            pid = await tx.connection.fetchval("SELECT pg_backend_pid()")
            await rows.connection.execute("SELECT pg_terminate_backend($1)", pid)

    await write.aenqueue(7)
    await work(app)

    assert (runs, await rows.all()) == ([7, 7], [7])


@pytest.mark.parametrize("app", ["the server"], indirect=True)  # what a session keeps is lost in a pooler
async def test_connections_are_lent_to_few_and_left_as_they_were(app: App, rows: Rows) -> None:
    """Two at a time here; the engine's own work goes on beside them."""
    pids: list[int] = []
    now = most = 0

    @app.task(name="write")
    async def write(tx: Transaction, number: int) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        pids.append(tx.connection.get_server_pid())
        assert await tx.connection.fetchval("SHOW work_mem") != "77kB"
        await tx.connection.execute("SET work_mem = '77kB'; SELECT pg_advisory_lock(1, 2)")
        await rows.add(tx, number)
        now -= 1

    await write.many(range(20)).aenqueue()
    await work(app, slots=10)

    assert await rows.all() == list(range(20))
    assert most <= 2
    assert len(set(pids)) <= 2


async def test_a_dependency_may_ask_for_the_transaction(app: App, rows: Rows) -> None:
    def repository(tx: Transaction) -> Any:
        return tx.connection

    @app.task(name="write")
    async def write(number: int, connection: Annotated[Any, Depends(repository)]) -> None:
        await connection.execute(f"INSERT INTO {rows.table} VALUES ($1)", number)

    await app.tasks["write"].aenqueue(7)
    await work(app)

    assert await rows.all() == [7]


# --- what cannot work --------------------------------------------------------------------


async def test_an_engine_that_lends_none_says_so_when_the_worker_starts(tmp_path: Any) -> None:
    for url in ("memory://", f"sqlite:///{tmp_path}/jobs.db"):
        app = App(url)

        @app.task
        async def write(tx: Transaction, number: int) -> None: ...

        with pytest.raises(NoTransactions, match="postgresql"):
            await Worker(app).run()
        await app.aclose()


async def test_a_plain_function_and_an_isolated_one_are_refused_when_the_worker_starts() -> None:
    for how in ({}, {"isolate": "process"}):
        app = App("memory://")

        def write(tx: Transaction, number: int) -> None: ...

        app.task(**how)(write)  # type: ignore[call-overload]  # either of both
        with pytest.raises(BadSetting, match="async def"):
            await Worker(app).run()


async def test_in_a_test_only_the_job_that_asks_for_one_fails() -> None:
    """And the function itself can be called with whatever connection the test has."""
    app = App("memory://")
    wrote: list[object] = []

    @app.task(on_error=dead)
    async def write(tx: Transaction, number: int) -> None:
        wrote.append((tx.connection, number))

    @app.task
    async def other() -> None:
        wrote.append("other")

    async with app.test() as t:
        handle = await write.aenqueue(1)
        await other.aenqueue()
        await t.drain()
        assert t.job(handle).state is State.DEAD
    await app.tasks[write.name](Transaction("mine"), 2)
    assert wrote == ["other", ("mine", 2)]


# --- the engine alone --------------------------------------------------------------------


async def test_the_engine_lends_a_transaction(postgres_url: str, schema: str) -> None:
    engine = await PostgresEngine(postgres_url, schema=schema).open()
    assert isinstance(engine, LendsTransactions)
    await engine.put([a_job(), a_job()])
    first, second = await engine.lease({"default": 2}, span=SPAN, holder=HOLDER)

    async with engine.transaction() as lent:
        assert await lent.settle(first, Done(emit=(a_job(id="next", chosen=True),)))
    async with engine.transaction() as lent:
        assert not await lent.settle(first, Done())  # at most once
    async with engine.transaction() as lent:
        await lent.connection.execute("SELECT 1")
    with pytest.raises(OutcomeUnknown):
        await settle_on_a_lost_connection(engine, second)

    assert await engine.settle([(second, Done())]) == []
    assert [lease.id for lease in await engine.lease({"default": 9}, span=SPAN, holder=HOLDER)] == ["next"]
    await engine.close()


async def settle_on_a_lost_connection(engine: PostgresEngine, lease: Lease) -> None:
    async with engine.transaction() as lent:
        lent.connection.terminate()
        await lent.settle(lease, Done())


def test_the_number_of_connections_to_lend_must_be_a_number() -> None:
    for wrong in ("none", "0"):
        with pytest.raises(BadSetting, match="transactions"):
            make_engine(f"postgresql://localhost/x?transactions={wrong}")
