"""L6: what a caller's open transaction holds delays nobody who does not want the very same thing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta

import asyncpg
import pytest
import pytest_asyncio
from msgspec.structs import replace

from propolis import App, Job
from propolis.app.operate.schedule_records import KIND, pause, store
from propolis.core.batch import Batch
from propolis.core.job import Dead, Done, Lease, Outcome, Retried, State
from propolis.core.protocols import Receipt, Rule, RuleKind, Scope
from propolis.core.records import Change, Refusal, Swap
from propolis.core.schedule import Every, Schedule
from propolis.engines.postgres.engine import PostgresEngine
from propolis.errors import Busy
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.servers.serving import postgres
from propolis.worker import Lane, Settings, Worker
from propolis.worker.sweeping.schedule_firing import Firer

SOON = timedelta(seconds=1)


@pytest_asyncio.fixture
async def engine(postgres_url: str, schema: str) -> AsyncIterator[PostgresEngine]:
    """One without much patience: what waits for a stranger fails."""
    handle = await PostgresEngine(postgres_url, schema=schema, patience="5s").open()
    yield handle
    await handle.close()


@pytest_asyncio.fixture
async def timed(postgres_url: str, schema: str) -> AsyncIterator[tuple[PostgresEngine, FakeClock]]:
    """The same, with a clock that moves only when it is moved."""
    clock = FakeClock()
    handle = await PostgresEngine(postgres_url, schema=schema, patience="5s", clock=clock).open()
    yield handle, clock
    await handle.close()


@pytest_asyncio.fixture
async def stranger(connection: asyncpg.Connection) -> AsyncIterator[asyncpg.Connection]:
    """A connection in a transaction that nobody ends."""
    await connection.execute("SET application_name = 'billing'")
    transaction = connection.transaction()
    await transaction.start()
    yield connection
    if connection.is_in_transaction():
        await transaction.rollback()


async def take(engine: PostgresEngine, queue: str = "default", limit: int = 100) -> list[Lease]:
    return await engine.lease({queue: limit}, span=SPAN, holder=HOLDER)


def assert_names(busy: pytest.ExceptionInfo[Busy], holder: asyncpg.Connection) -> None:
    assert busy.value.pids == (holder.get_server_pid(),)
    assert "billing" in str(busy.value)
    assert "idle in transaction" in str(busy.value)


async def commit(holder: asyncpg.Connection) -> None:
    await holder.execute("COMMIT")


async def test_members_of_a_batch_end_while_somebody_puts_into_it(
    engine: PostgresEngine, stranger: asyncpg.Connection
) -> None:
    """L6.1: in every way that a member can end, and the count is right when that transaction has ended."""
    jobs = [a_job(batch="b", member=n) for n in range(5)]
    await engine.put_batch(Batch(id="b"), jobs, seal=False)
    await engine.put_in(stranger, [a_job(batch="b", member=5)])

    done, dead, again, cancelled, last = await take(engine)
    await engine.cancel([cancelled.id])
    outcomes: list[tuple[Lease, Outcome]]
    outcomes = [(done, Done()), (dead, Dead()), (again, Retried(timedelta(0))), (cancelled, Done())]
    assert (await engine.exchange(outcomes, {}, span=SPAN, holder=HOLDER)).later == []
    assert [renewal.until is not None for renewal in await engine.renew([last], span=SPAN)] == [True]
    assert await engine.settle([(last, Done())]) == []
    assert await engine.put([a_job(batch="b", member=6)])
    status = await engine.batch("b")
    assert status is not None
    assert (status.total, status.done, status.dead) == (6, 3, 1)

    await commit(stranger)
    status = await engine.batch("b")
    assert status is not None
    assert (status.total, status.enqueued, status.retrying) == (7, 2, 1)
    assert await engine.seal("b")
    assert await engine.settle([(lease, Done()) for lease in await take(engine)]) == []
    status = await engine.batch("b")
    assert status is not None
    assert (status.finished_at is not None, status.total, status.done) == (True, 7, 6)


async def test_a_sweep_ends_members_while_somebody_puts_into_their_batch(
    timed: tuple[PostgresEngine, FakeClock], stranger: asyncpg.Connection
) -> None:
    """L6.1: those that have expired, and those whose leases nobody renewed."""
    engine, clock = timed
    lost = [a_job(batch="b", member=n, max_crashes=1) for n in range(2)]
    await engine.put_batch(Batch(id="b"), lost, seal=False)
    await engine.put([a_job(batch="b", member=2, expires_in_ms=1, queue="other")])
    await take(engine)
    await engine.put_in(stranger, [a_job(batch="b", member=3)])

    clock.advance(SPAN * 2)
    swept = await engine.sweep()

    assert (swept.expired, swept.reaped) == (1, 2)


async def test_only_whoever_seals_a_batch_waits_for_who_puts_into_it(
    engine: PostgresEngine, stranger: asyncpg.Connection
) -> None:
    """L6.1: and no longer than a second; then it knows for whom."""
    await engine.put_batch(Batch(id="b"), [a_job(batch="b")], seal=False)
    await engine.put_batch(Batch(id="c"), [a_job(batch="c")], seal=False)
    await engine.put_in(stranger, [a_job(batch="b")])

    with pytest.raises(Busy) as busy:
        await engine.seal("b")
    assert_names(busy, stranger)
    with pytest.raises(Busy):
        await engine.delete_batch("b")
    assert await engine.seal("c")


async def test_a_nested_batch_in_an_open_transaction_keeps_nobody_from_ending_in_the_outer_one(
    engine: PostgresEngine, stranger: asyncpg.Connection
) -> None:
    """L6.1."""
    await engine.put_batch(Batch(id="b"), [a_job(batch="b")], seal=False)
    await engine.put_in(stranger, [a_job(batch="n")], batch=Batch(id="n", parent="b"))

    assert await engine.settle([(lease, Done()) for lease in await take(engine)]) == []
    await commit(stranger)
    assert await engine.seal("b")
    assert await engine.settle([(lease, Done()) for lease in await take(engine)]) == []
    status = await engine.batch("b")
    assert status is not None
    assert (status.finished_at is not None, status.done) == (True, 2)


@pytest.mark.parametrize("many", [1, 20])
async def test_a_unique_key_that_is_held_is_busy_and_others_are_not(
    engine: PostgresEngine, stranger: asyncpg.Connection, many: int
) -> None:
    """L6.2, F50."""
    await engine.put_in(stranger, [a_job(unique="k")])

    with pytest.raises(Busy) as busy:
        await engine.put([a_job(unique="k"), *(a_job() for _ in range(many - 1))])
    assert_names(busy, stranger)
    receipts = await engine.put([a_job(unique=f"k{n}") for n in range(many)])
    assert all(receipt.created for receipt in receipts)

    await stranger.execute("ROLLBACK")
    [receipt] = await engine.put([a_job(unique="k")])
    assert receipt.created


async def test_an_id_that_is_held_is_busy(engine: PostgresEngine, stranger: asyncpg.Connection) -> None:
    """L6.2: whichever kind of put it is."""
    job = a_job()
    await engine.put_in(stranger, [job])

    with pytest.raises(Busy) as busy:
        await engine.put([job])
    assert_names(busy, stranger)


async def test_a_put_of_a_job_that_is_there_holds_nothing_of_it(
    engine: PostgresEngine, stranger: asyncpg.Connection
) -> None:
    """L6.2: it may be leased, retried, and due again."""
    jobs = [a_job(), a_job(delay_ms=1)]
    await engine.put(jobs)
    leases = await take(engine)
    receipts = await engine.put_in(stranger, jobs)
    assert receipts == [Receipt(job.id, created=False) for job in jobs]
    more = [a_job() for _ in range(20)]
    receipts = await engine.put_in(stranger, [*jobs, *more])
    assert [receipt.created for receipt in receipts] == [False] * 2 + [True] * 20

    assert await engine.settle([(lease, Retried(timedelta(0))) for lease in leases]) == []
    await engine.sweep()
    assert {lease.id for lease in await take(engine)} | {lease.id for lease in leases} >= {
        job.id for job in jobs
    }


async def test_a_cap_counts_what_is_committed(engine: PostgresEngine, stranger: asyncpg.Connection) -> None:
    """L6.2: those who put into a queue with a cap do not wait for a caller."""
    await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 2))
    await engine.put_in(stranger, [a_job()])

    [receipt] = await engine.put([a_job()])
    assert receipt.created


async def settle(
    engine: PostgresEngine, outcomes: Sequence[tuple[Lease, Done]]
) -> tuple[list[Lease], list[Lease]]:
    answer = await engine.exchange(outcomes, {}, span=SPAN, holder=HOLDER)
    return answer.lost, answer.later


async def test_an_outcome_that_emits_what_is_held_is_answered_later(
    engine: PostgresEngine, stranger: asyncpg.Connection
) -> None:
    """L6.2: it keeps its lease, and the rest of its call is settled."""
    await engine.put([a_job() for _ in range(3)])
    leases = await take(engine)
    await engine.put_in(stranger, [a_job(unique="k")])

    outcomes = [(lease, Done()) for lease in leases]
    outcomes[1] = (leases[1], Done(emit=(a_job(unique="k"),)))
    await engine.put([a_job(queue="other")])
    answer = await engine.exchange(outcomes, {"other": 1}, span=SPAN, holder=HOLDER)
    assert (answer.lost, answer.later) == ([], [leases[1]])
    assert len(answer.leases) == 1
    assert await settle(engine, [outcomes[1]]) == ([], [leases[1]])
    [renewal] = await engine.renew([leases[1]], span=SPAN)
    assert renewal.until is not None

    await stranger.execute("ROLLBACK")
    assert await settle(engine, [outcomes[1]]) == ([], [])
    [emitted] = await take(engine)
    assert emitted.id == outcomes[1][1].emit[0].id
    info = await engine.get(leases[1].id)
    assert info is None or info.state is State.DONE


async def test_a_sweep_leaves_alone_what_a_stranger_keeps_from_ending(
    timed: tuple[PostgresEngine, FakeClock],
    stranger: asyncpg.Connection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """L6.2: a member that would end its batch, whose callback wants a key that is held; all others end."""
    engine, clock = timed
    calls = Batch(id="b", on_finished=a_job(unique="k"))
    await engine.put_batch(calls, [a_job(batch="b", expires_in_ms=1)])
    await engine.put([a_job(expires_in_ms=2) for _ in range(3)])
    await engine.put([a_job(queue="other")])
    await take(engine, "other")
    await engine.put_in(stranger, [a_job(unique="k")])

    clock.advance(SPAN * 2)
    swept = await engine.sweep()

    assert (swept.expired, swept.reaped) == (3, 1)
    assert "was put off" in caplog.text
    await stranger.execute("ROLLBACK")
    swept = await engine.sweep()
    assert swept.expired == 1


async def test_a_lease_passes_by_what_a_stranger_keeps_from_ending(
    timed: tuple[PostgresEngine, FakeClock], stranger: asyncpg.Connection
) -> None:
    """L6.2: a job that has expired, and would end its batch, keeps those behind it from nothing."""
    engine, clock = timed
    calls = Batch(id="b", on_finished=a_job(unique="k"))
    await engine.put_batch(calls, [a_job(batch="b", expires_in_ms=1)])
    await engine.put([a_job(expires_in_ms=1), a_job(id="behind")])
    await engine.put_in(stranger, [a_job(unique="k")])

    clock.advance("1s")
    assert [lease.id for lease in await take(engine)] == ["behind"]
    assert (await engine.queues())["default"].dead == 1

    await stranger.execute("ROLLBACK")
    assert (await engine.sweep()).expired == 1


async def test_schedules_fire_while_one_of_them_wants_what_is_held(
    timed: tuple[PostgresEngine, FakeClock], stranger: asyncpg.Connection
) -> None:
    """L6.2: that one is tried again later."""
    engine, clock = timed
    jobs = {"one": a_job(), "two": a_job(unique="k"), "three": a_job()}
    await store(engine, [Schedule(name=name, timing=Every(60_000), job=job) for name, job in jobs.items()])
    await engine.put_in(stranger, [a_job(unique="k")])
    clock.advance("61s")
    firer = Firer(engine, ())

    await firer.fire_due()

    assert [record.name for record in (await engine.records(KIND, due=True)).records] == ["two"]
    await stranger.execute("ROLLBACK")
    clock.advance("11s")
    await firer.fire_due()
    assert (await engine.records(KIND, due=True)).records == []
    assert (await engine.queues())["default"].ready == 3


async def test_a_swap_that_wants_what_is_held_is_refused_and_hinders_no_other(
    engine: PostgresEngine, stranger: asyncpg.Connection
) -> None:
    """R1, L6: whether a stranger holds the unique key of its job or its record."""
    names = ["a", "b", "c", "d"]
    [stored] = await engine.swap([Swap(changes=tuple(Change(kind="k", name=n, value=b"1") for n in names))])
    await engine.put_in(stranger, [a_job(unique="k")])
    await stranger.execute(f"""SELECT FROM "{engine._schema}".records WHERE name = 'c' FOR UPDATE""")
    swaps = [
        Swap(
            changes=(Change(kind="k", name=name, value=b"2", expected=stored.version),),
            puts=(a_job(unique="k" if name == "b" else None),),
        )
        for name in names
    ]

    answers = await engine.swap(swaps)

    assert [answer.refusal for answer in answers] == [None, Refusal.BUSY, Refusal.BUSY, None]
    found = (await engine.records("k")).records
    assert [record.value for record in found] == [b"2", b"1", b"1", b"2"]
    assert (await engine.queues())["default"].ready == 2
    await stranger.execute("ROLLBACK")
    assert [answer.refusal for answer in await engine.swap(swaps[1:3])] == [None, None]


async def test_whoever_changes_a_schedule_that_a_stranger_holds_is_told_so(
    engine: PostgresEngine, stranger: asyncpg.Connection
) -> None:
    """L6."""
    schedule = Schedule(name="one", timing=Every(60_000), job=a_job())
    await store(engine, [schedule])
    await stranger.execute(f'SELECT FROM "{engine._schema}".records FOR UPDATE')

    with pytest.raises(Busy):
        await pause(engine, "one", paused=True)
    with pytest.raises(Busy):
        await store(engine, [replace(schedule, timing=Every(30_000))])


async def test_whoever_holds_something_for_long_is_named(
    engine: PostgresEngine, stranger: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L6: in what `propolis check` says."""
    monkeypatch.setattr("propolis.engines.postgres.engine.HELD_LONG", 0.0)
    assert await engine.complaints() == []
    await engine.put_in(stranger, [a_job(unique="k")])

    [complaint] = await engine.complaints()

    assert (
        f"session {stranger.get_server_pid()} (billing, idle in transaction, in a transaction since "
        in complaint
    )
    assert "unique_key" in complaint


async def test_a_worker_goes_on_and_keeps_the_lease_of_what_is_recorded_later(
    engine: PostgresEngine, stranger: asyncpg.Connection, postgres_url: str, schema: str
) -> None:
    """F50: everything else runs meanwhile, nothing runs twice, and no lease is lost."""
    app = App(f"{postgres_url}?schema={schema}")
    runs: list[int | None] = []
    others, emitted = asyncio.Event(), asyncio.Event()

    @app.task(name="tests.count")
    async def count(number: int | None) -> None:
        runs.append(number)
        if len(runs) > 20:
            others.set()
        if number is None:
            emitted.set()

    @app.task(name="tests.hand_on")
    async def hand_on(job: Job) -> None:
        runs.append(-1)
        job.emit(count.using(unique="k"), None)

    await engine.put_in(stranger, [a_job(unique="k", task="tests.count")])
    await engine.put([a_job(task="tests.hand_on"), *(a_job(n, task="tests.count") for n in range(20))])
    worker = Worker(app, Settings(lanes=[Lane({"default": 1}, 4)]))
    running = asyncio.create_task(worker.run())
    async with asyncio.timeout(30):
        await others.wait()
        while (await engine.queues())["default"].total > 1:
            await asyncio.sleep(0.01)
        assert not emitted.is_set()
        await stranger.execute("ROLLBACK")
        await emitted.wait()
    worker.stop()
    await running

    assert sorted(runs, key=str) == sorted([-1, *range(20), None], key=str)
    assert worker.lost == 0
    await app.aclose()


async def test_renewals_do_not_wait_behind_a_settle(
    engine: PostgresEngine, stranger: asyncpg.Connection, schema: str
) -> None:
    """L6.1: somebody holds the very row that a settle wants; the leases of others are renewed meanwhile."""
    await engine.put([a_job(), a_job()])
    [stuck], [healthy] = await take(engine, limit=1), await take(engine, limit=1)
    await stranger.execute(f'SELECT FROM "{schema}".running WHERE id = $1 FOR UPDATE', stuck.id)

    settling = asyncio.create_task(engine.settle([(stuck, Done())]))
    while not await waits_for(stranger, engine):
        await asyncio.sleep(0.005)  # no event shows that
    [renewal] = await engine.renew([healthy], span=SPAN)

    assert renewal.until is not None
    assert not settling.done()
    await stranger.execute("ROLLBACK")
    assert await settling == []


async def test_a_lease_that_somebody_holds_is_as_live_as_before_and_the_others_are_renewed(
    engine: PostgresEngine, stranger: asyncpg.Connection, schema: str
) -> None:
    """L6: in one call; a settle of some of a chunk holds all of it for as long as it takes."""
    await engine.put([a_job(unique="single"), *(a_job() for _ in range(5))])
    leases = [lease for n in (1, 2, 3) for lease in await take(engine, limit=n)]
    await stranger.execute(f'SELECT FROM "{schema}".chunk WHERE members = 2 FOR UPDATE')

    renewals = await engine.renew(leases, span=SPAN)

    assert [renewal.later for renewal in renewals] == [False, True, True, False, False, False]
    assert [renewal.until is None for renewal in renewals] == [False, True, True, False, False, False]
    await stranger.execute("ROLLBACK")
    assert all(renewal.until for renewal in await engine.renew(leases, span=SPAN))
    assert await engine.settle([(lease, Done()) for lease in leases]) == []


async def waits_for(stranger: asyncpg.Connection, engine: PostgresEngine) -> bool:
    rows = await engine._link.read(
        "SELECT FROM pg_stat_activity WHERE $1 = ANY(pg_blocking_pids(pid))", stranger.get_server_pid()
    )
    return bool(rows)


UNNAMED = """
SELECT relname FROM pg_class
 WHERE relnamespace = to_regnamespace($1) AND relkind = 'r' AND relreplident <> 'f'
   AND NOT EXISTS (SELECT FROM pg_index WHERE indrelid = pg_class.oid AND indisprimary)
"""


async def test_sweeps_go_on_where_all_tables_are_published(caplog: pytest.LogCaptureFixture) -> None:
    """F52, L6.5: each row that is removed can be named to a subscriber."""
    with postgres(settings=("wal_level=logical",)) as server:
        clock = FakeClock()
        engine = await PostgresEngine(server.url, clock=clock).open()
        admin = await asyncpg.connect(server.url)
        await admin.execute("CREATE PUBLICATION everything FOR ALL TABLES")

        await engine.put_batch(Batch(id="b"), [a_job(batch="b") for _ in range(30)])
        for lease in await take(engine):
            assert await engine.settle([(lease, Done())]) == []
        async with admin.transaction():
            await engine.put_in(admin, [a_job(queue="lost")])
        await take(engine, "lost")
        clock.advance(SPAN * 2)
        swept = await engine.sweep(by="somebody")

        assert swept.reaped == 1
        assert await admin.fetchval("SELECT count(*) FROM propolis.tally") < 30
        assert await admin.fetchval("SELECT count(*) FROM propolis.unannounced") == 0
        assert caplog.text == ""
        assert await admin.fetch(UNNAMED, "propolis") == []
        await engine.close()
        await admin.close()


async def test_a_part_of_a_sweep_that_fails_undoes_no_other(
    timed: tuple[PostgresEngine, FakeClock],
    connection: asyncpg.Connection,
    schema: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """L6.5: and it is said which one, and why."""
    engine, clock = timed
    await engine.put([a_job(), a_job(delay_ms=1), a_job(queue="other", expires_in_ms=1)])
    await take(engine, limit=1)
    await connection.execute(
        f'CREATE FUNCTION "{schema}".refuse() RETURNS trigger LANGUAGE plpgsql AS '
        "$$ BEGIN RAISE EXCEPTION 'this shelf is closed'; END $$;"
        f'CREATE TRIGGER refuse BEFORE INSERT ON "{schema}".archive EXECUTE FUNCTION "{schema}".refuse()'
    )

    clock.advance(SPAN * 2)
    swept = await engine.sweep()

    assert (swept.promoted, swept.reaped, swept.expired) == (1, 1, 0)
    assert "a sweep could not end jobs that have expired: this shelf is closed" in caplog.text


async def test_a_caller_that_wants_what_another_one_holds_is_told_so(
    engine: PostgresEngine, stranger: asyncpg.Connection, postgres_url: str
) -> None:
    """L6.2: also in a transaction of its own."""
    await engine.put_in(stranger, [a_job(unique="k")])
    other = await asyncpg.connect(postgres_url)

    with pytest.raises(Busy) as busy:
        async with other.transaction():
            await engine.put_in(other, [a_job(unique="k")])

    assert_names(busy, stranger)
    assert await other.fetchval("SHOW lock_timeout") == "0"
    await other.close()


async def test_members_of_a_batch_that_is_sealed_in_an_open_transaction_end_later(
    engine: PostgresEngine, stranger: asyncpg.Connection
) -> None:
    """L6.1: they keep their leases, and the rest of the call is settled."""
    await engine.put_batch(Batch(id="b"), [a_job(batch="b") for _ in range(2)], seal=False)
    members = await take(engine)
    await engine.put([a_job() for _ in range(3)])
    others = await take(engine)
    await engine.put_in(stranger, [], batch=Batch(id="b"), seal=True)

    assert await settle(engine, [(lease, Done()) for lease in (*members, *others)]) == ([], members)
    renewals = await engine.renew(members, span=SPAN)
    assert all(renewal.until is not None for renewal in renewals)
    assert (await engine.sweep()).reaped == 0

    await commit(stranger)
    assert await settle(engine, [(lease, Done()) for lease in members]) == ([], [])
    status = await engine.batch("b")
    assert status is not None
    assert (status.finished_at is not None, status.done) == (True, 2)


async def test_behind_a_pooler_it_is_busy_as_well(
    pgbouncer_url: str, schema: str, engine: PostgresEngine, stranger: asyncpg.Connection
) -> None:
    """L6.2: where no setting of a session's counts, and its process is not known before."""
    pooled = await PostgresEngine(pgbouncer_url, schema=schema, patience="5s").open()
    await engine.put_in(stranger, [a_job(unique="k")])

    with pytest.raises(Busy) as busy:
        await pooled.put([a_job(unique="k")])
    assert_names(busy, stranger)
    await pooled.close()


async def test_sweeps_go_on_beside_a_sweeper_that_stands_still(
    timed: tuple[PostgresEngine, FakeClock], connection: asyncpg.Connection, schema: str
) -> None:
    """L6.3: it holds what sweepers lock to share their work, until the server ends it."""
    engine, clock = timed
    await engine.put([a_job(delay_ms=1), a_job(queue="other", expires_in_ms=1)])
    await connection.execute("BEGIN")
    await connection.execute(f'SELECT FROM "{schema}".migration, "{schema}".watch FOR UPDATE')

    clock.advance("1s")
    swept = await engine.sweep(by="somebody")

    assert (swept.promoted, swept.expired) == (1, 1)
    assert swept.again_in is not None
    await connection.execute("ROLLBACK")


async def next_place(connection: asyncpg.Connection, schema: str, place: int) -> None:
    await connection.execute(f"""SELECT setval('"{schema}".back', {place - 1})""")


async def test_whoever_puts_adds_the_tally_up_in_turn(
    engine: PostgresEngine, connection: asyncpg.Connection, schema: str
) -> None:
    """L5: about once for a thousand jobs, where nobody sweeps."""
    rows = []
    await next_place(connection, schema, 1023)
    for job in (a_job(), a_job(), a_job()):
        await engine.put([job])
        rows.append(await connection.fetchval(f'SELECT count(*) FROM "{schema}".tally'))
    await next_place(connection, schema, 2046)
    await engine.put([a_job(queue=queue) for queue in ("a", "b", "c")])

    assert rows == [1, 0, 1]
    assert await connection.fetchval(f'SELECT count(*) FROM "{schema}".tally') == 0
    assert {queue: counts.put for queue, counts in (await engine.queues()).items()} == {
        "default": 3,
        "a": 1,
        "b": 1,
        "c": 1,
    }


async def test_a_callers_transaction_adds_nothing_up(
    engine: PostgresEngine, stranger: asyncpg.Connection, schema: str
) -> None:
    """L6: it would hold the counts of the queue for as long as it is open."""
    await next_place(stranger, schema, 1024)
    await engine.put_in(stranger, [a_job()])

    assert await stranger.fetchval(f'SELECT count(*) FROM "{schema}".tally') == 1


async def test_whoever_swaps_adds_the_tally_up_in_turn(
    engine: PostgresEngine, connection: asyncpg.Connection, schema: str
) -> None:
    """L5: a program that only fires schedules puts as well."""
    await engine.put([a_job()])
    await next_place(connection, schema, 1024)
    await engine.swap([Swap(puts=(a_job(), a_job(queue="other")))])
    await engine.swap([Swap(changes=(Change(kind="k", name="n", value=b""),))])

    assert await connection.fetchval(f'SELECT count(*) FROM "{schema}".tally') == 0
    assert {queue: counts.put for queue, counts in (await engine.queues()).items()} == {
        "default": 2,
        "other": 1,
    }


async def test_a_caller_makes_one_row_of_the_tally_in_turn_and_is_in_nobodys_way(
    engine: PostgresEngine, connection: asyncpg.Connection, schema: str
) -> None:
    """L5, L6: also where all puts are in transactions of callers, and nobody sweeps."""
    for _ in range(3):
        await engine.put([a_job()])
    await next_place(connection, schema, 1024)
    await connection.execute("BEGIN")
    await engine.put_in(connection, [a_job()])

    assert await connection.fetchval(f'SELECT count(*) FROM "{schema}".tally') == 1
    assert (await engine.queues())["default"].put == 3
    await engine.sweep()
    assert await engine.drop("default") == 3
    counts = await engine.queues()
    assert [(each.put, each.deleted) for each in counts.values()] == [(0, 0)]  # its name stays that long

    await connection.execute("COMMIT")
    assert {queue: counts.put - counts.deleted for queue, counts in (await engine.queues()).items()} == {
        "default": 1
    }


async def test_a_put_in_whose_turn_counts_are_held_succeeds(
    engine: PostgresEngine, stranger: asyncpg.Connection, schema: str
) -> None:
    """L6: the next one adds them up."""
    await next_place(stranger, schema, 1023)
    await engine.put([a_job()])
    await engine.sweep()
    await stranger.execute(f'SELECT FROM "{schema}".total FOR UPDATE')

    [receipt] = await engine.put([a_job()])

    assert receipt.created
    assert await stranger.fetchval(f'SELECT count(*) FROM "{schema}".tally') == 1
