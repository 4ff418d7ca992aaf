"""Jobs in transactions of the caller's own, on every kind of connection that callers have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import asyncpg
import django
import msgspec
import psycopg
import pytest
import pytest_asyncio
import sqlalchemy
from django.conf import settings as django_settings
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from propolis import App, Task
from propolis.core.batch import Batch
from propolis.core.protocols import Rule, RuleKind, Scope
from propolis.engines.postgres.engine import PostgresEngine
from propolis.engines.postgres.schema import dropped
from propolis.errors import BadSetting, BatchSealed, EngineUnavailable, QueueFull
from propolis.testing.engines.samples import a_job

NASTY = "100% of $1, :p, %s, %(x)s, {0}, 'quoted' and \"double\", \\ and é"


class Opened(NamedTuple):
    """A connection with the statement and the endings that its library has."""

    tx: Any
    execute: Callable[[str], Any]
    commit: Callable[[], Any]
    rollback: Callable[[], Any]


# --- the kinds that are awaited ----------------------------------------------------------


@asynccontextmanager
async def of_asyncpg(url: str) -> AsyncIterator[Opened]:
    connection = await asyncpg.connect(url)
    transaction = connection.transaction()
    await transaction.start()
    try:
        yield Opened(connection, connection.execute, transaction.commit, transaction.rollback)
    finally:
        await connection.close()


@asynccontextmanager
async def of_a_pool_of_asyncpg(url: str) -> AsyncIterator[Opened]:
    async with asyncpg.create_pool(url, min_size=1) as pool, pool.acquire() as connection:
        transaction = connection.transaction()
        await transaction.start()
        yield Opened(connection, connection.execute, transaction.commit, transaction.rollback)


@asynccontextmanager
async def of_async_psycopg(url: str) -> AsyncIterator[Opened]:
    async with await psycopg.AsyncConnection.connect(url, row_factory=dict_row) as connection:
        yield Opened(connection, connection.execute, connection.commit, connection.rollback)


@asynccontextmanager
async def of_an_async_cursor(url: str) -> AsyncIterator[Opened]:
    async with await psycopg.AsyncConnection.connect(url) as connection, connection.cursor() as cursor:
        yield Opened(cursor, cursor.execute, connection.commit, connection.rollback)


def of_async_session(driver: str) -> Callable[[str], AbstractAsyncContextManager[Opened]]:
    @asynccontextmanager
    async def opened(url: str) -> AsyncIterator[Opened]:
        engine = create_async_engine(url.replace("://", f"+{driver}://"))
        async with AsyncSession(engine) as session:
            yield Opened(
                session, lambda sql: session.execute(sqlalchemy.text(sql)), session.commit, session.rollback
            )
        await engine.dispose()

    return opened


def of_async_connection(driver: str) -> Callable[[str], AbstractAsyncContextManager[Opened]]:
    @asynccontextmanager
    async def opened(url: str) -> AsyncIterator[Opened]:
        engine = create_async_engine(url.replace("://", f"+{driver}://"))
        async with engine.connect() as connection:
            yield Opened(
                connection,
                lambda sql: connection.execute(sqlalchemy.text(sql)),
                connection.commit,
                connection.rollback,
            )
        await engine.dispose()

    return opened


@asynccontextmanager
async def of_a_scoped_async_session(url: str) -> AsyncIterator[Opened]:
    engine = create_async_engine(url.replace("://", "+asyncpg://"))
    scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
    yield Opened(scoped, lambda sql: scoped.execute(sqlalchemy.text(sql)), scoped.commit, scoped.rollback)
    await scoped.remove()
    await engine.dispose()


AWAITED = {
    "asyncpg": of_asyncpg,
    "asyncpg pool": of_a_pool_of_asyncpg,
    "psycopg": of_async_psycopg,
    "psycopg cursor": of_an_async_cursor,
    "session on asyncpg": of_async_session("asyncpg"),
    "session on psycopg": of_async_session("psycopg"),
    "connection on asyncpg": of_async_connection("asyncpg"),
    "connection on psycopg": of_async_connection("psycopg"),
    "scoped session": of_a_scoped_async_session,
}


# --- the kinds that are not --------------------------------------------------------------


@contextmanager
def of_psycopg(url: str) -> Iterator[Opened]:
    with psycopg.connect(url) as connection:
        yield Opened(connection, connection.execute, connection.commit, connection.rollback)


@contextmanager
def of_a_cursor(url: str) -> Iterator[Opened]:
    with psycopg.connect(url) as connection, connection.cursor() as cursor:
        yield Opened(cursor, cursor.execute, connection.commit, connection.rollback)


@contextmanager
def of_a_session(url: str) -> Iterator[Opened]:
    engine = sqlalchemy.create_engine(url.replace("://", "+psycopg://"))
    with Session(engine) as session:
        yield Opened(
            session, lambda sql: session.execute(sqlalchemy.text(sql)), session.commit, session.rollback
        )
    engine.dispose()


@contextmanager
def of_a_session_on_psycopg2(url: str) -> Iterator[Opened]:
    engine = sqlalchemy.create_engine(url.replace("://", "+psycopg2://"))
    with Session(engine) as session:
        yield Opened(
            session, lambda sql: session.execute(sqlalchemy.text(sql)), session.commit, session.rollback
        )
    engine.dispose()


@contextmanager
def of_a_scoped_session(url: str) -> Iterator[Opened]:
    engine = sqlalchemy.create_engine(url.replace("://", "+psycopg://"))
    scoped = scoped_session(sessionmaker(engine))
    yield Opened(scoped, lambda sql: scoped.execute(sqlalchemy.text(sql)), scoped.commit, scoped.rollback)
    scoped.remove()
    engine.dispose()


@contextmanager
def of_a_connection(url: str) -> Iterator[Opened]:
    engine = sqlalchemy.create_engine(url.replace("://", "+psycopg://"))
    with engine.connect() as connection:
        yield Opened(
            connection,
            lambda sql: connection.execute(sqlalchemy.text(sql)),
            connection.commit,
            connection.rollback,
        )
    engine.dispose()


def django_connections(url: str) -> Any:
    """The connections of a Django project on this database."""
    parts = urlsplit(url)
    if not django_settings.configured:
        database = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": parts.path[1:],
            "USER": parts.username,
            "HOST": parts.hostname,
            "PORT": parts.port,
        }
        other = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
        django_settings.configure(DATABASES={"default": database, "other": other}, USE_TZ=True)
        django.setup()
    from django.db import connections

    return connections


@contextmanager
def of_django(url: str) -> Iterator[Opened]:
    django_connections(url)
    from django.db import connection

    yield from _in_atomic(connection)


@contextmanager
def of_djangos_connections(url: str) -> Iterator[Opened]:
    yield from _in_atomic(django_connections(url)["default"])


def _in_atomic(connection: Any) -> Iterator[Opened]:
    from django.db import transaction

    atomic = transaction.atomic()
    atomic.__enter__()

    def execute(statement: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(statement)

    def roll_back() -> None:
        transaction.set_rollback(True)
        atomic.__exit__(None, None, None)

    try:
        yield Opened(connection, execute, lambda: atomic.__exit__(None, None, None), roll_back)
    finally:
        connection.close()


HERE = {
    "psycopg": of_psycopg,
    "psycopg cursor": of_a_cursor,
    "session": of_a_session,
    "session on psycopg2": of_a_session_on_psycopg2,
    "scoped session": of_a_scoped_session,
    "connection": of_a_connection,
    "Django": of_django,
    "Django connections": of_djangos_connections,
}


# --- what all of them can ----------------------------------------------------------------


class Orders:
    """A table of the caller's own, in the schema of the test."""

    def __init__(self, url: str, schema: str) -> None:
        self._url = url
        self._table = f'"{schema}".orders'

    def ask(self, statement: str) -> list[Any]:
        with psycopg.connect(self._url, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return [number for (number,) in cursor.fetchall()] if cursor.description else []

    def create(self) -> None:
        self.ask(f"CREATE TABLE {self._table} (number integer)")

    def insert(self, number: int) -> str:
        return f"INSERT INTO {self._table} VALUES ({number})"

    @property
    def numbers(self) -> list[int]:
        return self.ask(f"SELECT number FROM {self._table} ORDER BY number")


@pytest.fixture
def orders(engine: PostgresEngine, postgres_url: str, schema: str) -> Orders:
    orders = Orders(postgres_url, schema)
    orders.create()
    return orders


@pytest_asyncio.fixture
async def app(postgres_url: str, schema: str) -> AsyncIterator[App]:
    app = App(f"{postgres_url}?schema={schema}")
    yield app
    await app.aclose()


def bodies(app: App) -> list[str]:
    """The first argument of every job that is there."""
    return [msgspec.json.decode(info.body)["args"][0] for info in app.jobs.find()]


@pytest.mark.parametrize("kind", AWAITED)
async def test_an_awaited_job_appears_if_and_only_if_the_transaction_commits(
    kind: str, app: App, postgres_url: str, orders: Orders
) -> None:
    """T1, S2.2, S2.3: the caller's row and the job are there together, or neither of them is."""

    @app.task(name="ship")
    async def ship(number: str) -> None: ...

    async with AWAITED[kind](postgres_url) as opened:
        await opened.execute(orders.insert(1))
        await ship.using(tx=opened.tx).aenqueue("lost")
        await opened.rollback()
    async with AWAITED[kind](postgres_url) as opened:
        handle = await ship.using(tx=opened.tx).aenqueue(NASTY)
        await opened.execute(orders.insert(2))
        assert await asyncio.to_thread(bodies, app) == []  # not before the commit
        await opened.commit()

    assert handle.created
    assert await asyncio.to_thread(bodies, app) == [NASTY]
    assert orders.numbers == [2]
    assert await app.jobs.aget(handle.id) is not None


# --- behind a pooler ---------------------------------------------------------------------


@asynccontextmanager
async def of_asyncpg_without_names(url: str) -> AsyncIterator[Opened]:
    connection = await asyncpg.connect(url, statement_cache_size=0)
    transaction = connection.transaction()
    await transaction.start()
    try:
        yield Opened(connection, connection.execute, transaction.commit, transaction.rollback)
    finally:
        await connection.close()


@asynccontextmanager
async def of_psycopg_without_names(url: str) -> AsyncIterator[Opened]:
    async with await psycopg.AsyncConnection.connect(url, prepare_threshold=None) as connection:
        yield Opened(connection, connection.execute, connection.commit, connection.rollback)


POOLED = {"asyncpg": of_asyncpg_without_names, "psycopg": of_psycopg_without_names}


@pytest.mark.parametrize("kind", POOLED)
async def test_transactions_that_share_sessions_do_not_share_jobs(
    kind: str, pgbouncer_url: str, postgres_url: str, schema: str, orders: Orders
) -> None:
    """S2.2, S2.3, F30: pgbouncer in transaction mode, and more callers than it has sessions."""
    app = App(f"{pgbouncer_url}?schema={schema}&listen={postgres_url}")
    await app.ready()  # not while they have all the sessions there are, and wait for it

    @app.task(name="ship")
    async def ship(number: int) -> None: ...

    async def order(number: int) -> None:
        async with POOLED[kind](pgbouncer_url) as opened:
            await opened.execute(orders.insert(number))
            for _ in range(2):
                await ship.using(tx=opened.tx).aenqueue(number)
            await (opened.rollback() if number % 2 else opened.commit())

    for _ in range(2):
        await asyncio.gather(*(order(number) for number in range(20)))

    committed = [number for number in range(0, 20, 2) for _ in range(2)]
    assert orders.numbers == committed
    jobs = [msgspec.json.decode(info.body)["args"][0] async for info in app.jobs.aeach()]
    assert sorted(jobs) == sorted([*committed, *committed])
    await app.aclose()


@pytest.mark.parametrize("kind", HERE)
def test_a_job_appears_if_and_only_if_the_transaction_commits(
    kind: str, app: App, postgres_url: str, orders: Orders
) -> None:
    """T1, S2.2, S2.3: the same in the thread of the caller."""

    @app.task(name="ship")
    def ship(number: str) -> None: ...

    with HERE[kind](postgres_url) as opened:
        opened.execute(orders.insert(1))
        ship.using(tx=opened.tx).enqueue("lost")
        opened.rollback()
    with HERE[kind](postgres_url) as opened:
        handle = ship.using(tx=opened.tx).enqueue(NASTY)
        opened.execute(orders.insert(2))
        assert bodies(app) == []
        opened.commit()

    assert handle.created
    assert bodies(app) == [NASTY]
    assert orders.numbers == [2]


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_synchronous_code_below_an_async_session_may_enqueue(
    driver: str, app: App, postgres_url: str
) -> None:
    """As in `run_sync`, where a session is used as if there were no event loop."""

    @app.task(name="ship")
    async def ship(number: int) -> None: ...

    async with AWAITED[f"session on {driver}"](postgres_url) as opened:
        await opened.tx.run_sync(lambda session: ship.using(tx=session).enqueue(1))
        assert (await app.queues.acounts()) == {}
        await opened.commit()
    assert (await app.queues.acounts())["default"].ready == 1


@pytest.mark.parametrize("kind", AWAITED)
async def test_many_awaited_jobs_join_one_transaction(kind: str, app: App, postgres_url: str) -> None:
    """Unique keys, chosen ids and delays go the same way, and the receipts tell who was there."""

    @app.task(name="ship")
    async def ship(number: int) -> None: ...

    async with AWAITED[kind](postgres_url) as opened:
        many = await ship.using(tx=opened.tx).many(range(1500)).aenqueue()
        first = await ship.using(tx=opened.tx, unique="order:7", delay="1h").aenqueue(1)
        second = await ship.using(tx=opened.tx, unique="order:7").aenqueue(2)
        chosen = await ship.using(tx=opened.tx, job_id="mine").aenqueue(3)
        await opened.commit()

    assert all(handle.created for handle in many)
    assert (first.created, second.created, second.id) == (True, False, first.id)
    assert (chosen.created, chosen.id) == (True, "mine")
    counts = (await app.queues.acounts())["default"]
    assert (counts.ready, counts.scheduled) == (1501, 1)


@pytest.mark.parametrize("kind", HERE)
def test_many_jobs_join_one_transaction(kind: str, app: App, postgres_url: str, schema: str) -> None:
    @app.task(name="ship")
    def ship(number: int) -> None: ...

    with HERE[kind](postgres_url) as opened:
        many = ship.using(tx=opened.tx, unique="order:8").many([1, 2]).enqueue()
        ship.using(tx=opened.tx, queue="other").many([]).enqueue()
        opened.commit()

    assert [handle.created for handle in many] == [True, False]
    assert app.queues.counts()["default"].ready == 1


async def test_a_batch_is_opened_and_filled_in_a_transaction(
    engine: PostgresEngine, postgres_url: str
) -> None:
    batch = Batch(id="b", on_finished=a_job(id="after", chosen=True))
    async with of_asyncpg(postgres_url) as opened:
        members = [a_job(batch="b", member=number) for number in range(3)]
        await engine.put_in(opened.tx, members[:2], batch=batch, seal=False)
        await engine.put_in(opened.tx, members[2:])
        assert await engine.batch("b") is None
        await engine.put_in(opened.tx, [], batch=batch)
        await opened.commit()

    status = await engine.batch("b")
    assert status is not None
    assert (status.total, status.sealed) == (3, True)
    with pytest.raises(BatchSealed):
        async with of_asyncpg(postgres_url) as opened:
            await engine.put_in(opened.tx, [a_job(batch="b", member=3)])


async def test_a_token_names_a_put_in_a_transaction_too(engine: PostgresEngine, postgres_url: str) -> None:
    jobs = [a_job(), a_job()]
    for expected in (True, False):
        async with of_asyncpg(postgres_url) as opened:
            receipts = await engine.put_in(opened.tx, jobs, token="t")
            await opened.commit()
        assert [receipt.created for receipt in receipts] == [expected, expected]


@pytest.mark.parametrize("kind", AWAITED)
async def test_what_is_refused_speaks_our_words(kind: str, engine: PostgresEngine, postgres_url: str) -> None:
    await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 1))

    async with AWAITED[kind](postgres_url) as opened:
        with pytest.raises(QueueFull) as raised:
            await engine.put_in(opened.tx, [a_job(), a_job()])
        with suppress(Exception):
            await opened.rollback()
    assert (raised.value.queue, raised.value.limit) == ("default", 1)


@pytest.mark.parametrize("kind", HERE)
def test_what_is_refused_in_a_thread_speaks_our_words(
    kind: str, engine: PostgresEngine, app: App, postgres_url: str
) -> None:
    app.client.wait(app.ready())
    app.client.wait(app.client.engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 1)))

    with HERE[kind](postgres_url) as opened:
        with pytest.raises(QueueFull):
            app.client.put_in(opened.tx, [a_job(), a_job()])
        opened.rollback()


# --- what cannot work is refused with advice ---------------------------------------------


@pytest.fixture
def ship(app: App) -> Task[[int], None]:
    @app.task(name="ship")
    def ship(number: int) -> None: ...

    return ship


async def test_outside_of_a_transaction_a_job_is_refused(ship: Task[[int], None], postgres_url: str) -> None:
    """It would be there at once, and not with the commit that the caller means."""
    plain = await asyncpg.connect(postgres_url)
    with pytest.raises(BadSetting, match=r"not in a transaction.*connection.transaction"):
        await ship.using(tx=plain).aenqueue(1)
    await plain.close()
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
        with pytest.raises(BadSetting, match="not in a transaction"):
            await ship.using(tx=connection).aenqueue(1)
        async with connection.transaction():
            await ship.using(tx=connection).aenqueue(1)
    for driver in ("asyncpg", "psycopg"):
        engine = create_async_engine(
            postgres_url.replace("://", f"+{driver}://"), isolation_level="AUTOCOMMIT", poolclass=NullPool
        )
        async with AsyncSession(engine) as session:
            with pytest.raises(BadSetting, match="AUTOCOMMIT"):
                await ship.using(tx=session).aenqueue(1)
        await engine.dispose()


def test_outside_of_atomic_a_job_is_refused(ship: Task[[int], None], postgres_url: str) -> None:
    connections = django_connections(postgres_url)
    with pytest.raises(BadSetting, match="atomic"):
        ship.using(tx=connections["default"]).enqueue(1)
    connections["default"].close()
    with pytest.raises(BadSetting, match="sqlite"):
        ship.using(tx=connections["other"]).enqueue(1)
    sqlite = sqlalchemy.create_engine("sqlite://")
    with Session(sqlite) as session, pytest.raises(BadSetting, match="sqlite"):
        ship.using(tx=session).enqueue(1)
    sqlite.dispose()
    with (
        psycopg.connect(postgres_url, autocommit=True) as connection,
        pytest.raises(BadSetting, match="autoc"),
    ):
        ship.using(tx=connection).enqueue(1)


@pytest.mark.parametrize("kind", AWAITED)
async def test_what_must_be_awaited_says_so(kind: str, ship: Task[[int], None], postgres_url: str) -> None:
    async with AWAITED[kind](postgres_url) as opened:
        with pytest.raises(BadSetting, match="aenqueue"):
            ship.using(tx=opened.tx).enqueue(1)
        await opened.rollback()


@pytest.mark.parametrize("kind", [kind for kind in HERE if not kind.startswith("Django")])
async def test_what_cannot_be_awaited_works_all_the_same(
    kind: str, ship: Task[[int], None], app: App, postgres_url: str
) -> None:
    with HERE[kind](postgres_url) as opened:
        await ship.using(tx=opened.tx).aenqueue(1)
        opened.commit()
    assert (await app.queues.acounts())["default"].ready == 1


async def test_django_in_an_event_loop_is_told_what_to_do(ship: Task[[int], None], postgres_url: str) -> None:
    connection = django_connections(postgres_url)["default"]
    connection.in_atomic_block = True  # as if it were: it cannot be entered here
    try:
        with pytest.raises(BadSetting, match="sync_to_async"):
            await ship.using(tx=connection).aenqueue(1)
    finally:
        connection.in_atomic_block = False


def test_what_is_no_connection_is_told(ship: Task[[int], None], app: App) -> None:
    for wrong in ("postgresql://", object(), sqlalchemy.text("x"), app, None, django_settings):
        with pytest.raises(BadSetting, match="tx="):
            ship.using(tx=wrong).enqueue(1)


async def test_a_transaction_that_has_failed_is_told(ship: Task[[int], None], postgres_url: str) -> None:
    for kind in ("asyncpg", "psycopg", "connection on psycopg"):
        async with AWAITED[kind](postgres_url) as opened:
            with suppress(Exception):
                await opened.execute("SELECT 1 / 0")
            with pytest.raises(BadSetting, match="roll it back"):
                await ship.using(tx=opened.tx).aenqueue(1)
            await opened.rollback()


async def test_a_connection_that_is_gone_is_told(ship: Task[[int], None], postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        connection.close()
        with pytest.raises(EngineUnavailable, match="closed"):
            ship.using(tx=connection).enqueue(1)
    async with of_asyncpg(postgres_url) as opened:
        opened.tx.terminate()
        with pytest.raises(EngineUnavailable, match="closed"):
            await ship.using(tx=opened.tx).aenqueue(1)


async def test_a_connection_to_another_database_is_refused(
    engine: PostgresEngine, schema: str, postgres_url: str
) -> None:
    """Also when there is a propolis in a schema of the same name."""
    admin = await asyncpg.connect(postgres_url)
    await admin.execute(f'CREATE DATABASE "{schema}"')
    elsewhere = f"{postgres_url.rpartition('/')[0]}/{schema}"
    try:
        async with of_asyncpg(elsewhere) as opened:
            with pytest.raises(BadSetting, match="no propolis in the database"):
                await engine.put_in(opened.tx, [a_job()])
        other = await PostgresEngine(elsewhere, schema=schema).open()
        async with of_async_psycopg(elsewhere) as opened:
            with pytest.raises(BadSetting, match="another installation"):
                await engine.put_in(opened.tx, [a_job()])
            await opened.rollback()
        assert await other.queues() == {}
        await other.close()
    finally:
        await admin.execute(f'DROP DATABASE "{schema}" WITH (FORCE)')
        await admin.close()


async def test_a_schema_of_any_name_can_be_joined(postgres_url: str) -> None:
    name = "a%b:c $1 %s é"
    engine = await PostgresEngine(postgres_url, schema=name).open()
    try:
        for kind, opening in AWAITED.items():
            async with opening(postgres_url) as opened:
                assert (await engine.put_in(opened.tx, [a_job()]))[0].created, kind
                await opened.commit()
    finally:
        await engine.close()
        admin = await asyncpg.connect(postgres_url)
        await admin.execute(dropped(name))
        await admin.close()


# --- notifications -----------------------------------------------------------------------


@asynccontextmanager
async def waiting(url: str, schema: str) -> AsyncIterator[asyncio.Task[bool]]:
    """Somebody who waits for a job, and listens by the time we go on."""
    engine = await PostgresEngine(url, schema=schema).open()
    waiter = asyncio.create_task(engine.wait(["default"], 30))
    admin = await asyncpg.connect(url)
    listening = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%' || $1 || '%'"
    async with asyncio.timeout(10):
        while not await admin.fetchval(listening, schema):
            await asyncio.sleep(0.01)
    await engine.queues()  # what it looked for when it began to listen was not there
    await admin.close()
    yield waiter
    waiter.cancel()
    await asyncio.wait({waiter})
    await engine.close()


@pytest.mark.parametrize("kind", ["session", "scoped session", "Django"])
async def test_a_commit_that_the_library_tells_of_wakes_the_workers(
    kind: str, ship: Task[[int], None], postgres_url: str, schema: str
) -> None:
    """S0.13: in the moment of the commit, and not before."""

    def enqueue() -> None:
        with HERE[kind](postgres_url) as opened:
            ship.using(tx=opened.tx).enqueue(1)
            assert not waiter.done()
            opened.commit()

    async with waiting(postgres_url, schema) as waiter:
        await asyncio.to_thread(enqueue)
        assert await waiter


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_the_commit_of_an_async_session_wakes_the_workers(
    driver: str, ship: Task[[int], None], postgres_url: str, schema: str
) -> None:
    """S0.13: a savepoint is no commit, and what was rolled back is no news."""
    async with (
        waiting(postgres_url, schema) as waiter,
        AWAITED[f"session on {driver}"](postgres_url) as opened,
    ):
        await ship.using(tx=opened.tx).aenqueue(1)
        await opened.rollback()
        assert opened.tx.sync_session.info["propolis.committed"] == []
        async with opened.tx.begin_nested():
            await ship.using(tx=opened.tx).aenqueue(1)
        assert len(opened.tx.sync_session.info["propolis.committed"]) == 1
        assert not waiter.done()
        await opened.commit()
        assert await waiter


async def test_a_savepoint_that_is_rolled_back_takes_no_wake_up_with_it(
    ship: Task[[int], None], postgres_url: str, schema: str
) -> None:
    """S0.13: of what was put before it."""
    async with (
        waiting(postgres_url, schema) as waiter,
        AWAITED["session on asyncpg"](postgres_url) as opened,
    ):
        await ship.using(tx=opened.tx).aenqueue(1)
        savepoint = await opened.tx.begin_nested()
        await savepoint.rollback()
        assert len(opened.tx.sync_session.info["propolis.committed"]) == 1
        await opened.commit()
        assert await waiter


@pytest.mark.parametrize("kind", ["asyncpg", "psycopg", "connection on psycopg", "by SQL"])
async def test_of_other_commits_the_next_sweep_of_anybody_tells(
    kind: str, engine: PostgresEngine, postgres_url: str, schema: str
) -> None:
    """S0.13, S2.3: whoever waits need not look by itself, and need not be the one that sweeps."""
    async with waiting(postgres_url, schema) as waiter:
        async with AWAITED.get(kind, of_asyncpg)(postgres_url) as opened:
            if kind == "by SQL":
                await opened.execute(f"""SELECT "{schema}".enqueue('t', '[]')""")
            else:
                await engine.put_in(opened.tx, [a_job()])
            await engine.sweep()  # too early
            await opened.commit()
        assert not waiter.done()
        await engine.sweep()
        async with asyncio.timeout(10):
            assert await waiter
    admin = await asyncpg.connect(postgres_url)
    assert await admin.fetchval(f'SELECT count(*) FROM "{schema}".unannounced') == 0  # once is enough
    await admin.close()


async def test_a_put_in_a_transaction_does_not_notify_inside_of_it(
    engine: PostgresEngine, postgres_url: str, schema: str
) -> None:
    """Such a commit would wait for all others that notify."""
    heard: list[str] = []
    listener = await asyncpg.connect(postgres_url)
    await listener.add_listener(f"propolis:{schema}", lambda *arguments: heard.append(arguments[-1]))
    async with of_asyncpg(postgres_url) as opened:
        await engine.put_in(opened.tx, [a_job()])
        await opened.commit()
    await listener.execute("SELECT pg_notify($1, 'end')", f"propolis:{schema}")
    async with asyncio.timeout(10):
        while "end" not in heard:
            await listener.fetchval("SELECT 1")
    assert heard == ["end"]
    await listener.close()
