"""What is PostgreSQL's own: connections, errors, schemas, transactions of the caller, and other languages."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from click.testing import CliRunner

from skep import App, wire
from skep.batch import Batch, BatchState
from skep.broker import Durability, Engine, Receipt, Renewal, Rule, RuleKind, Scope, Transactional, Watched
from skep.brokers.postgres import PostgresBroker
from skep.brokers.postgres_hints import AT_ONCE, NEWS_EVERY
from skep.brokers.postgres_schema import script
from skep.cli import main
from skep.engines import make_engine
from skep.errors import (
    BadSetting,
    BatchSealed,
    EngineClosed,
    EngineUnavailable,
    OutcomeUnknown,
    QueueFull,
    SchemaTooNew,
    SkepError,
)
from skep.job import Done, Lease, Retry, new_id
from skep.testing.clock import FakeClock
from skep.testing.make import HOLDER, SPAN, a_job
from skep.testing.servers import PostgresServer, postgres
from skep.worker import Mode, Settings, Worker


@pytest_asyncio.fixture
async def engine(postgres_url: str, schema: str) -> AsyncIterator[PostgresBroker]:
    handle = await PostgresBroker(postgres_url, schema=schema).open()
    yield handle
    await handle.close()


@pytest_asyncio.fixture
async def connection(postgres_url: str) -> AsyncIterator[asyncpg.Connection]:
    opened = await asyncpg.connect(postgres_url)
    yield opened
    await opened.close()


async def take(engine: Engine, limit: int = 100) -> list[Lease]:
    return await engine.lease({"default": limit}, span=SPAN, holder=HOLDER)


async def test_a_url_gives_an_engine_with_its_schema(postgres_url: str, schema: str) -> None:
    engine = make_engine(f"{postgres_url}?schema={schema}&patience=5s")

    async with asyncio.timeout(20):
        await engine.open()
        await engine.put([a_job()])

    assert list(await engine.queues()) == ["default"]
    await engine.close()


def test_a_schema_must_leave_room_for_the_name_of_its_channel() -> None:
    with pytest.raises(BadSetting, match="schema"):
        PostgresBroker("postgresql://nobody@localhost/none", schema="s" * 51)


def test_a_schema_is_not_called_as_in_a_search_path() -> None:
    with pytest.raises(BadSetting, match="every user"):
        PostgresBroker("postgresql://nobody@localhost/none", schema="$user")


async def test_a_schema_may_have_any_name(postgres_url: str, connection: asyncpg.Connection) -> None:
    name = "a'b\"c;--$name$ %s {0} skep.x é"
    engine = await PostgresBroker(postgres_url, schema=name).open()
    try:
        await engine.put([a_job()])
        again = await PostgresBroker(postgres_url, schema=name).open()
        assert len(await take(again)) == 1
        await again.close()
    finally:
        await engine.close()
        await connection.execute("DROP SCHEMA {} CASCADE".format('"' + name.replace('"', '""') + '"'))


async def test_of_many_that_open_an_empty_schema_at_once_all_find_it_ready(
    postgres_url: str, schema: str
) -> None:
    engines = [PostgresBroker(postgres_url, schema=schema) for _ in range(6)]

    await asyncio.gather(*(engine.open() for engine in engines))

    await engines[0].put([a_job()])
    assert len(await take(engines[-1])) == 1
    for engine in engines:
        await engine.close()


async def test_the_printed_script_makes_what_the_engine_finds_up_to_date(
    postgres_url: str, schema: str, connection: asyncpg.Connection
) -> None:
    await connection.execute(script(schema))

    engine = await PostgresBroker(postgres_url, schema=schema).open()

    assert [receipt.created for receipt in await engine.put([a_job()])] == [True]
    await engine.close()


async def test_a_schema_of_a_newer_skep_is_refused(
    postgres_url: str, schema: str, engine: PostgresBroker, connection: asyncpg.Connection
) -> None:
    await connection.execute(f'INSERT INTO "{schema}".migration (number) VALUES (999)')

    with pytest.raises(SchemaTooNew):
        await PostgresBroker(postgres_url, schema=schema).open()


async def test_durability_is_read_from_the_server(engine: PostgresBroker) -> None:
    assert engine.durability is Durability.PROCESS  # the server of these tests does not sync


async def test_a_server_that_is_not_there_is_told() -> None:
    with pytest.raises(EngineUnavailable, match="cannot be reached") as raised:
        await PostgresBroker("postgresql://bob:secret@127.0.0.1:1/none").open()
    assert "secret" not in str(raised.value)


async def test_the_time_is_the_servers(engine: PostgresBroker, connection: asyncpg.Connection) -> None:
    before = await connection.fetchval("SELECT clock_timestamp()")
    await engine.put([a_job()])
    [lease] = await take(engine)
    after = await connection.fetchval("SELECT clock_timestamp()")

    assert before <= lease.put_at <= after
    assert before <= lease.until - SPAN <= after
    assert before <= await engine.now()


# --- transactions of the caller ----------------------------------------------------------


async def test_jobs_put_in_a_transaction_appear_with_it(
    engine: PostgresBroker, connection: asyncpg.Connection
) -> None:
    assert isinstance(engine, Transactional)
    kept, lost = a_job(), a_job()

    async with connection.transaction():
        assert await engine.put_in(connection, [kept]) == [Receipt(kept.id, created=True)]
        assert await take(engine) == []
    undone = connection.transaction()
    await undone.start()
    await engine.put_in(connection, [lost])
    await undone.rollback()

    assert [lease.id for lease in await take(engine)] == [kept.id]


async def test_a_refused_put_in_a_transaction_speaks_our_words(
    engine: PostgresBroker, connection: asyncpg.Connection
) -> None:
    await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 1))

    with pytest.raises(QueueFull):
        async with connection.transaction():
            await engine.put_in(connection, [a_job(), a_job()])
    with pytest.raises(BadSetting, match="str"):
        await engine.put_in("not a connection", [a_job()])


async def test_a_job_that_commits_late_is_found_below_the_floor(
    engine: PostgresBroker, connection: asyncpg.Connection
) -> None:
    """The claim looks at everything again whenever it would come back short."""
    late = a_job()
    async with connection.transaction():
        await engine.put_in(connection, [late])
        await engine.put([a_job() for _ in range(4)])
        assert len(await take(engine, 2)) == 2  # and keeps its floor

    assert late.id in [lease.id for lease in await take(engine, 3)]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
async def test_a_server_that_isolates_more_by_default_changes_nothing(
    postgres_url: str, schema: str, connection: asyncpg.Connection, level: str
) -> None:
    """I1, I2: the engine relies on READ COMMITTED, and asks for it where it is not the default."""
    role = f"strict_{schema}"
    await connection.execute(f"CREATE ROLE {role} LOGIN SUPERUSER")
    await connection.execute(f"ALTER ROLE {role} SET default_transaction_isolation TO '{level}'")
    engine = await PostgresBroker(postgres_url.replace("postgres@", f"{role}@"), schema=schema).open()
    try:
        job = a_job()
        answers = await asyncio.gather(*(engine.put([job]) for _ in range(10)))
        assert sum(receipt.created for [receipt] in answers) == 1
        await engine.put([a_job() for _ in range(100)])
        taken = await asyncio.gather(*(take(engine, 10) for _ in range(10)))
        assert len({lease.id for leases in taken for lease in leases}) == 100
        shown = await engine._link.read("SHOW transaction_isolation")
        assert shown[0][0] == "read committed"
    finally:
        await engine.close()
        await connection.execute(f"DROP OWNED BY {role} CASCADE")
        await connection.execute(f"DROP ROLE {role}")


async def test_any_language_can_put_a_job_by_sql(
    engine: PostgresBroker, schema: str, connection: asyncpg.Connection
) -> None:
    job = a_job(1, "two", priority=5, chosen=True, delay_ms=0)
    envelope = wire.encode(job).decode()

    for _ in range(2):
        assert await connection.fetchval(f'SELECT "{schema}".enqueue($1)', envelope) == job.id
    with pytest.raises(asyncpg.PostgresError, match="task"):
        await connection.fetchval(f'SELECT "{schema}".enqueue($1)', '{"v": 1}')

    [lease] = await take(engine)
    assert (lease.body, lease.task) == (wire.encode(job), job.task)
    record = await engine.get(job.id)
    assert record is not None
    assert record.priority == 5


async def test_times_in_an_envelope_put_by_sql_are_kept(
    engine: PostgresBroker, schema: str, connection: asyncpg.Connection
) -> None:
    moment = await engine.now() + timedelta(hours=1)
    job = a_job(due_at=moment, expires_in_ms=10_000)

    await connection.fetchval(f'SELECT "{schema}".enqueue($1)', wire.encode(job).decode())

    record = await engine.get(job.id)
    assert record is not None
    assert record.due_at == moment
    assert record.expires_at == record.put_at + timedelta(seconds=10)


async def test_large_jobs_are_leased_together_in_several_pieces(
    engine: PostgresBroker, schema: str, connection: asyncpg.Connection
) -> None:
    """I14, I15: no array of the server's becomes larger than it can be.  Here that is not a gigabyte."""
    await connection.execute(
        f'CREATE OR REPLACE FUNCTION "{schema}".most_bytes() RETURNS bigint IMMUTABLE LANGUAGE sql'
        " AS 'SELECT 5000::bigint'"
    )
    jobs = [a_job("x" * 900) for _ in range(12)]
    for turn in range(2):
        await engine.put(jobs)

        leases = await take(engine)

        assert [(lease.id, lease.body) for lease in leases] == [(job.id, wire.encode(job)) for job in jobs]
        assert await connection.fetchval(f'SELECT count(*) FROM "{schema}".chunk') == (3, 0)[turn]
        assert await engine.settle([(lease, Done()) for lease in leases]) == []
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.QUEUE, "default", 100))  # now they are rows


# --- connections -------------------------------------------------------------------------


async def test_an_engine_is_used_from_several_loops(engine: PostgresBroker) -> None:
    await engine.put([a_job()])
    [lease] = await take(engine)
    answers: list[Renewal] = []

    def renew() -> None:
        answers.extend(asyncio.run(engine.renew([lease], span=SPAN)))

    thread = threading.Thread(target=renew)
    thread.start()
    await asyncio.to_thread(thread.join)

    assert [answer.until is not None for answer in answers] == [True]
    assert await engine.settle([(lease, Done())]) == []


async def test_connections_are_few_and_gone_after_the_close(
    postgres_url: str, schema: str, connection: asyncpg.Connection
) -> None:
    name = f"skep-{new_id()}"
    engine = await PostgresBroker(f"{postgres_url}?application_name={name}", schema=schema).open()
    await asyncio.gather(*(engine.put([a_job()]) for _ in range(50)))
    count = (
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%' || $1 || '%' AND pid <> pg_backend_pid()"
    )

    assert 1 <= await connection.fetchval(count, schema) <= 6
    await engine.close()

    for _ in range(100):
        if not await connection.fetchval(count, schema):
            break
        await asyncio.sleep(0.02)
    assert await connection.fetchval(count, schema) == 0
    with pytest.raises(EngineClosed):
        await engine.put([a_job()])


async def test_connections_that_are_no_longer_needed_are_closed(
    postgres_url: str, schema: str, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S2.28: all but one."""
    monkeypatch.setattr("skep.brokers.postgres_link.SPARE_FOR", 0.1)
    engine = await PostgresBroker(postgres_url, schema=schema).open()
    await asyncio.gather(*(engine.put([a_job()]) for _ in range(20)))
    count = (
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%' || $1 || '%' AND pid <> pg_backend_pid()"
    )
    assert await connection.fetchval(count, schema) > 1

    async with asyncio.timeout(20):
        while await connection.fetchval(count, schema) > 1:
            await engine.rules()
            await asyncio.sleep(0.05)
    await engine.close()


async def test_a_call_that_takes_too_long_has_an_unknown_outcome(
    postgres_url: str, schema: str, connection: asyncpg.Connection
) -> None:
    engine = await PostgresBroker(postgres_url, schema=schema, patience="300ms").open()
    async with connection.transaction():
        await connection.execute(f'LOCK TABLE "{schema}".ready')
        with pytest.raises(OutcomeUnknown):
            await engine.put([a_job()])

    assert [receipt.created for receipt in await engine.put([a_job()])] == [True]
    await engine.close()


async def test_a_call_that_is_cancelled_leaves_no_answer_for_the_next_one(
    engine: PostgresBroker, schema: str, connection: asyncpg.Connection
) -> None:
    async with connection.transaction():
        await connection.execute(f'LOCK TABLE "{schema}".ready')
        call = asyncio.create_task(engine.put([a_job()]))
        await asyncio.wait({call}, timeout=0.1)
        call.cancel()
        await asyncio.wait({call})

    assert call.cancelled()
    assert await engine.rules() == []


async def test_a_deadlock_is_nobodys_business(engine: PostgresBroker) -> None:
    """Several who end the same jobs in opposite orders."""
    ids = [new_id() for _ in range(200)]
    await engine.put([a_job(id=name) for name in ids])

    ways = (ids, ids[::-1], ids, ids[::-1])
    answers = await asyncio.gather(*(engine.cancel(way) for way in ways))

    assert sum(map(sum, answers)) == len(ids)
    assert (await engine.queues())["default"].cancelled == len(ids)


async def test_a_killed_connection_costs_one_call_at_most(
    engine: PostgresBroker, schema: str, connection: asyncpg.Connection
) -> None:
    await engine.put([a_job()])
    await connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE '%' || $1 || '%'"
        " AND pid <> pg_backend_pid()",
        schema,
    )
    await asyncio.sleep(0.05)

    assert len(await take(engine)) == 1


async def attempt(act: Callable[[], object]) -> SkepError | None:
    try:
        await act()  # type: ignore[misc] # whatever it is, it is awaited here
    except SkepError as error:
        return error
    return None


async def test_an_engine_outlives_a_restart_of_its_server() -> None:
    """No error of the driver crosses; what was acknowledged is there; fences go on growing."""
    with postgres() as server:
        engine = await PostgresBroker(server.url, patience="5s").open()
        await engine.put([a_job(id="first")])
        [lease] = await take(engine)
        waiter = asyncio.create_task(engine.wait(["default"], 60))
        await restart(server, engine)

        assert await engine.settle([(lease, Done())]) == []
        await engine.put([a_job(id="second")])
        [second] = await take(engine)
        assert second.fence > lease.fence
        waiter.cancel()
        await asyncio.wait({waiter})
        await engine.close()


async def restart(server: PostgresServer, engine: Engine) -> None:
    await asyncio.to_thread(server.stop)
    for act in (lambda: engine.put([a_job()]), lambda: take(engine), engine.queues, engine.sweep):
        assert isinstance(await attempt(act), EngineUnavailable | OutcomeUnknown)
    await asyncio.to_thread(server.start)


# --- rules that only concurrency can break -----------------------------------------------


@pytest.mark.parametrize("facts", [{}, {"key": "k"}, {"delay_ms": 1000}], ids=["plain", "keyed", "delayed"])
async def test_one_job_comes_of_an_id_that_nobody_chose_and_many_put(
    engine: PostgresBroker, facts: dict[str, Any]
) -> None:
    """As when a put is repeated because its answer was lost."""
    for _ in range(20):
        job = a_job(**facts)
        answers = await asyncio.gather(*(engine.put([job]) for _ in range(6)))
        assert sum(receipt.created for [receipt] in answers) == 1


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "delayed": {"delay_ms": 1000},
    "keyed": {"key": "k"},
    "chosen": {"chosen": True},
}


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
async def test_one_job_comes_of_an_id_put_in_two_ways_at_once(
    engine: PostgresBroker, connection: asyncpg.Connection, first: str, second: str
) -> None:
    """I1: to different tables, in each of which the id would be free.  The second waits for the first."""
    name = new_id()
    async with connection.transaction():
        await engine.put_in(connection, [a_job(id=name, **KINDS[first])])
        call = asyncio.create_task(engine.put([a_job(id=name, **KINDS[second])]))
        waited, _ = await asyncio.wait({call}, timeout=0.05)
        assert not waited

    assert await call == [Receipt(name, created=False)]
    assert (await engine.queues())["default"].total == 1


async def test_one_job_comes_of_an_id_that_many_put_in_many_ways(engine: PostgresBroker) -> None:
    """I1: also in bundles, and after the first has gone on."""
    for _ in range(10):
        names = [new_id() for _ in range(3)]
        bundles = [[a_job(id=name, **facts) for name in names] for facts in KINDS.values()]
        taking = asyncio.create_task(take(engine))
        answers = await asyncio.gather(*(engine.put(bundle) for bundle in bundles * 2))
        await taking
        made = [receipt.id for answer in answers for receipt in answer if receipt.created]
        assert sorted(made) == sorted(names)


async def test_a_batch_sealed_while_it_is_filled_counts_what_it_took(
    engine: PostgresBroker,
) -> None:
    for _ in range(20):
        batch = Batch(id=new_id())
        await engine.put_batch(batch, seal=False)
        members = [a_job(batch=batch.id, member=number) for number in range(4)]
        answers = await asyncio.gather(
            *(engine.put([member]) for member in members), engine.seal(batch.id), return_exceptions=True
        )
        refused = sum(isinstance(answer, BatchSealed) for answer in answers)
        status = await engine.batch(batch.id)
        assert status is not None
        assert status.total == len(members) - refused


# --- the worker --------------------------------------------------------------------------


async def test_a_worker_drains_a_queue(postgres_url: str, schema: str) -> None:
    app = App(f"{postgres_url}?schema={schema}")
    seen: list[int] = []

    @app.task(name="tests.count")
    async def count(number: int) -> None:
        seen.append(number)

    engine = await PostgresBroker(postgres_url, schema=schema).open()
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
    producer = await PostgresBroker(postgres_url, schema=schema).open()
    await asyncio.sleep(0.3)  # until it rests

    await producer.put([a_job(task="tests.ring")])
    async with asyncio.timeout(5):
        await ran.wait()

    worker.stop()
    await running
    await producer.close()
    await app.aclose()


# --- the fleet ---------------------------------------------------------------------------


async def test_the_last_to_sweep_before_something_is_due_comes_back_for_it(
    postgres_url: str, schema: str
) -> None:
    """L1, L2: on time, and nobody else comes for it."""
    clock = FakeClock()
    engine = await PostgresBroker(postgres_url, schema=schema, clock=clock).open()
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
    engine: PostgresBroker, schema: str, connection: asyncpg.Connection
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
    engine = await PostgresBroker(postgres_url, schema=schema, clock=clock).open()
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
    engine: PostgresBroker, schema: str, connection: asyncpg.Connection
) -> None:
    """Each notification wakes every listener, and takes a lock that all commits with one share."""
    heard: list[str] = []
    quiet = asyncio.Event()

    def hear(*told: Any) -> None:
        heard.append(told[-1])
        quiet.set()

    await connection.add_listener(f"skep:{schema}", hear)
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
    while not app.engine.hears:
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
    monkeypatch.setattr("skep.brokers.postgres.OLD_TRANSACTION", 0.05)
    clock = FakeClock()
    engines = [await PostgresBroker(postgres_url, schema=schema, clock=clock).open() for _ in range(2)]
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
    assert any(mine in told and "forgotten" in told for told in complaints)
    assert first.count(mine) == 1
    assert caplog.text.count(mine) == 2
    assert isinstance(engines[0], Watched)
    for engine in engines:
        await engine.close()


async def test_check_shows_what_the_server_suffers_from(
    postgres_url: str, schema: str, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F31: `skep check` names an old transaction, and is not content."""
    monkeypatch.setattr("skep.brokers.postgres.OLD_TRANSACTION", 0.0)
    arguments = ["check", "--url", f"{postgres_url}?schema={schema}", "--json"]
    async with connection.transaction(isolation="repeatable_read"):
        pid = await connection.fetchval("SELECT pg_backend_pid()")
        result = await asyncio.to_thread(CliRunner().invoke, main, arguments)

    problems = json.loads(result.stdout)["problems"]
    assert result.exit_code == 1
    assert any(f"pg_terminate_backend({pid})" in problem["why"] for problem in problems)


async def waiting_for_locks(connection: asyncpg.Connection, schema: str, n: int) -> None:
    """Until so many statements of this schema wait for a lock."""
    count = (
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND position($1 IN query) > 0"
    )
    async with asyncio.timeout(20):
        while await connection.fetchval(count, f'"{schema}"') != n:
            await asyncio.sleep(0.01)


async def test_bundles_with_members_of_the_same_batches_do_not_lock_each_other_out(
    postgres_url: str,
    engine: PostgresBroker,
    connection: asyncpg.Connection,
    schema: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F33: a deadlock is found after a second, and one of the two bundles begins anew."""
    monkeypatch.setattr("skep.brokers.postgres_link.RETRIES", 1)
    for batch in ("a", "b"):
        await engine.put_batch(Batch(id=batch), [a_job(batch=batch) for _ in range(2)])
    a1, a2, b1, b2 = await take(engine)
    observer = await asyncpg.connect(postgres_url)

    async with connection.transaction(), asyncio.TaskGroup() as group:
        await connection.execute(f'SELECT FROM "{schema}".batch WHERE id = $1 FOR UPDATE', "a")
        one = group.create_task(engine.settle([(a1, Done()), (b1, Done())]))
        await waiting_for_locks(observer, schema, 1)
        other = group.create_task(engine.settle([(b2, Done()), (a2, Done())]))
        await waiting_for_locks(observer, schema, 2)
        await connection.execute("COMMIT")

    assert (one.result(), other.result()) == ([], [])
    await observer.close()


async def test_those_who_end_members_and_find_others_expired_do_not_lock_each_other_out(
    postgres_url: str, connection: asyncpg.Connection, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F33, T11: in one call, while the newest member waits in line."""
    monkeypatch.setattr("skep.brokers.postgres_link.RETRIES", 1)
    clock = FakeClock()
    engine = await PostgresBroker(postgres_url, schema=schema, clock=clock).open()
    await engine.put_batch(Batch(id="a"), [a_job(batch="a") for _ in range(2)], seal=False)
    leases = [*await take(engine, 1), *await take(engine, 1)]
    await engine.put([*(a_job(batch="a", expires_in_ms=10) for _ in range(2)), a_job(batch="a")])
    await engine.seal("a")
    clock.advance("1s")
    observer = await asyncpg.connect(postgres_url)

    async with connection.transaction(), asyncio.TaskGroup() as group:
        await connection.execute(f'SELECT FROM "{schema}".batch WHERE id = $1 FOR KEY SHARE', "a")
        calls = []
        for n, lease in enumerate(leases):
            ended = [(lease, Done())]
            calls.append(group.create_task(engine.exchange(ended, {"default": 1}, span=SPAN, holder=HOLDER)))
            await waiting_for_locks(observer, schema, n + 1)
        await connection.execute("COMMIT")

    assert [call.result().lost for call in calls] == [[], []]
    [last] = [lease for call in calls for lease in call.result().leases]
    assert await engine.settle([(last, Done())]) == []
    [status] = await engine.batches()
    assert (status.done, status.dead, status.finished_at) == (3, 2, clock.now)
    await observer.close()
    await engine.close()


async def test_the_server_gives_up_what_nobody_waits_for_any_more(
    postgres_url: str, connection: asyncpg.Connection, engine: PostgresBroker, schema: str
) -> None:
    """L3, I5: it would wait for ever, and end the lease when nobody thinks of it."""
    hasty = await PostgresBroker(postgres_url, schema=schema, patience="300ms").open()
    await engine.put_batch(Batch(id="a"), [a_job(batch="a")])
    [lease] = await take(engine)
    observer = await asyncpg.connect(postgres_url)

    async with connection.transaction():
        await connection.execute(f'SELECT FROM "{schema}".batch WHERE id = $1 FOR UPDATE', "a")
        with pytest.raises((OutcomeUnknown, EngineUnavailable)):
            await hasty.settle([(lease, Done())])
        await waiting_for_locks(observer, schema, 0)

    assert await engine.settle([(lease, Done())]) == []
    await observer.close()
    await hasty.close()


async def test_a_line_of_held_jobs_is_set_aside_in_time(engine: PostgresBroker) -> None:
    """L1, S2.10, S2.12: the walk goes on where it was; a queue that is paused is not walked."""
    jobs = [a_job(task="slow", queue="mixed") for _ in range(3000)]
    await engine.put([*jobs, a_job(task="quick", queue="mixed")])
    await engine.add_rule(Rule(RuleKind.PAUSE, Scope.TASK, "slow"))

    [lease] = await engine.lease({"mixed": 1}, span=SPAN, holder=HOLDER)

    assert lease.task == "quick"
    assert (await engine.queues())["mixed"].held == 3000
    await engine.remove_rule(RuleKind.PAUSE, Scope.TASK, "slow")
    await engine.add_rule(Rule(RuleKind.PAUSE, Scope.QUEUE, "mixed"))
    assert await engine.lease({"mixed": 1}, span=SPAN, holder=HOLDER) == []
    await engine.remove_rule(RuleKind.PAUSE, Scope.QUEUE, "mixed")
    leases = await engine.lease({"mixed": 10}, span=SPAN, holder=HOLDER)
    assert [lease.id for lease in leases] == [job.id for job in jobs[:10]]


async def test_many_unique_keys_that_are_held_are_refused_one_for_one(engine: PostgresBroker) -> None:
    """I12: the receipts name the holders in the order of the call, whatever is between them."""
    held = [a_job(unique=f"k{n}") for n in range(500)]
    await engine.put(held)
    again = [a_job(unique=f"k{n}" if n % 2 else f"new{n}") for n in range(500)]

    receipts = await engine.put(again)

    assert receipts == [
        Receipt(held[n].id, created=False) if n % 2 else Receipt(again[n].id, created=True)
        for n in range(500)
    ]
    assert (await engine.queues())["default"].total == 750


@pytest.mark.parametrize("more", [0, 20], ids=["few", "many"])
async def test_an_id_that_an_old_snapshot_shows_in_line_is_taken(
    engine: PostgresBroker, connection: asyncpg.Connection, schema: str, more: int
) -> None:
    """I1, I8: it was leased meanwhile; put a second time, it could never leave its run again."""
    job = a_job()
    await engine.put([job])
    async with connection.transaction(isolation="repeatable_read"):
        assert await connection.fetchval(f'SELECT count(*) FROM "{schema}".ready') == 1
        [lease] = await take(engine)

        receipts = await engine.put_in(connection, [job, *(a_job() for _ in range(more))])

    assert receipts[0] == Receipt(job.id, created=False)
    assert all(receipt.created for receipt in receipts[1:])
    assert await engine.settle([(lease, Retry(delay=timedelta(0)))]) == []
    assert len(await take(engine)) == 1 + more
